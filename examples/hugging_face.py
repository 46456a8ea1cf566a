"""Hugging Face's Trainer on a small GPT-2: the lines that end in `# equilibrate` turn it on.

The learning rate is constant, and decays to zero from where that pays until the last step.

python examples/hugging_face.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from equilibrate.integrations.transformers import CooldownCallback  # equilibrate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--folder", default="hugging_face_example")
parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
args = parser.parse_args()


# Sequences in which each token is the sum of the two before it, now and then a wrong one.
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(16, (4096, 24), generator=generator)
right = torch.rand(4096, 24, generator=generator) > 0.1
for t in range(2, 24):
    total = (tokens[:, t - 1] + tokens[:, t - 2]) % 16
    tokens[:, t] = torch.where(right[:, t], total, tokens[:, t])
sequences = [{"input_ids": row, "labels": row} for row in tokens]

torch.set_num_threads(1)  # small operations are faster so
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=16,
    n_positions=24,
    n_embd=32,
    n_layer=2,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
)
training = TrainingArguments(
    output_dir=args.folder,
    max_steps=args.steps,
    per_device_train_batch_size=32,
    learning_rate=3e-3,
    weight_decay=1.0,
    warmup_steps=50,
    lr_scheduler_type="constant_with_warmup",  # equilibrate
    logging_steps=50,
    save_steps=args.steps // 2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), training, train_dataset=sequences)
trainer.add_callback(CooldownCallback())  # equilibrate
trainer.train(resume_from_checkpoint=args.resume or None)
