"""Rotations on a GPU: as on a CPU, without waiting, under autocast and gradient scaling."""

import pytest
import torch
from support import networks
from torch.nn.functional import cross_entropy

import equilibrate as eq

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

KINDS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.1, fused=True),
}


def run(norm, kind, device, steps, *, every=4, half=None, scaler=None):
    torch.manual_seed(0)
    make, names = networks.INVARIANT[norm]
    model = make().to(device)
    optimizer = KINDS[kind](model.parameters())
    monitor = eq.Monitor(optimizer, model, every=every)
    images, labels = (tensor.to(device) for tensor in networks.digits())
    chosen = torch.randint(len(images), (steps, 20), generator=torch.Generator().manual_seed(1))
    chosen = chosen.to(device)
    try:
        for t, batch in enumerate(chosen.unbind(0)):
            if t == 3 and device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            with torch.autocast(device, half or torch.bfloat16, enabled=half is not None):
                loss = cross_entropy(model(images[batch]).float(), labels[batch])
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {each.name: each.rotation for each in monitor.layers().layers}, names


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rotations_on_a_gpu_are_those_on_a_cpu(kind, every):
    found, _ = run("LayerNorm", kind, "cuda", 40, every=every)
    expected, _ = run("LayerNorm", kind, "cpu", 40, every=every)
    for name, rotation in expected.items():
        assert found[name].samples == rotation.samples
        assert found[name].angular_step == pytest.approx(rotation.angular_step, rel=1e-2)
        assert found[name].decay == pytest.approx(rotation.decay, rel=1e-3)
        assert found[name].equilibrium == rotation.equilibrium


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", networks.INVARIANT)
def test_scale_invariant_weights_are_recognised_on_a_gpu(norm, half):
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if half is torch.float16 else None
    kind = "fused AdamW" if scaler else "momentum"  # a fused step unscales gradients itself
    found, names = run(norm, kind, "cuda", 40, half=half, scaler=scaler)
    assert all(found[name].scale_invariant for name in names)
    assert not any(found[name].scale_invariant for name in list(found)[-2:])
