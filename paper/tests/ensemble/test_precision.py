"""The precision of an ensemble's products, and torch's own setting, which is restored."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from paper_support.replicas import data, ensemble_of
from support.device import DEVICE, ON_GPU

from equilibrate_paper.ensemble import evaluation
from equilibrate_paper.ensemble.precision import matrix_products


@contextmanager
def torch_set_to(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("setting", "expected"), [("highest", "fp32"), ("high", "tf32"), ("medium", "tf32")]
)
def test_the_default_is_torchs_setting_at_construction(setting, expected):
    with torch_set_to(setting):
        ensemble = ensemble_of()
    assert ensemble.precision == expected
    assert ensemble_of(precision="fp16").precision == "fp16"


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_cpu_ignores_the_precision(precision):
    plain, other = ensemble_of(precision="fp32"), ensemble_of(precision=precision)
    assert torch.equal(plain.run_epoch().loss, other.run_epoch().loss)
    assert torch.equal(plain.full_gradient(), other.full_gradient())
    assert plain.evaluate(*data(2, 3)) == other.evaluate(*data(2, 3))


def test_training_may_continue_in_another_precision():
    before, after = ensemble_of(precision="fp32"), ensemble_of(precision="fp16")
    before.run_epoch()
    after.load_state_dict(before.state_dict())
    assert after.precision == "fp16"
    assert after.step == before.step


CALLS = {
    "evaluate": lambda ensemble: ensemble.evaluate(*data(2, 3)),
    "full_gradient": lambda ensemble: ensemble.full_gradient(),
    "full_gradient_square": lambda ensemble: ensemble.full_gradient_square(),
    # a CPU does not change the setting
    **({"run_epoch": lambda ensemble: ensemble.run_epoch()} if ON_GPU else {}),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("precision", "inside"), [("fp32", "highest"), ("tf32", "high"), ("fp16", "high")]
)
@pytest.mark.parametrize("call", CALLS)
def test_torchs_setting_is_restored(call, precision, inside, fails, monkeypatch):
    """On a CPU, pretend that the device is a GPU."""
    if not ON_GPU:
        on_gpu = partial(matrix_products, device=torch.device("cuda"))
        monkeypatch.setattr(evaluation, "matrix_products", lambda p, _: on_gpu(p))
    seen = set()
    created = False

    def loss(outputs, targets):
        if created:  # the loss is checked when an ensemble is created
            seen.add(torch.get_float32_matmul_precision())
            if fails:
                raise ArithmeticError
        return F.cross_entropy(outputs, targets)

    ensemble = ensemble_of(loss=loss, precision=precision, device=DEVICE)
    created = True
    with torch_set_to("medium"):
        if fails:
            with pytest.raises(ArithmeticError):
                CALLS[call](ensemble)
        else:
            CALLS[call](ensemble)
        assert torch.get_float32_matmul_precision() == "medium"
    assert seen == {inside}
