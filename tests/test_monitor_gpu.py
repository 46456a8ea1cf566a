"""A monitor on a GPU: no step waits, readings are a CPU's, graphs are read, memory stays small."""

import pytest
import torch
from torch import nn

import equilibrate as eq

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 300
SGD = {
    f"SGD {form}": (torch.optim.SGD, kwargs)
    for form, kwargs in {
        "decay": {"weight_decay": 0.05},
        "momentum": {"momentum": 0.9},
        "dampening": {"momentum": 0.8, "dampening": 0.4, "weight_decay": 0.02},
        "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02},
        "maximize": {"maximize": True, "momentum": 0.5, "weight_decay": 0.1},
    }.items()
}
OTHERS = {
    name: (kind, {})
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", "SGD", "LBFGS", "SparseAdam"}
}
FUSED = {
    f"fused {name}": (kind, {**kwargs, "fused": True})
    for name, (kind, kwargs) in {
        **SGD,
        "Adam": (torch.optim.Adam, {}),
        "AdamW": (torch.optim.AdamW, {}),
    }.items()
}
ALL = {**SGD, **OTHERS, **FUSED}


def build(name, device, dtype=torch.float32):
    """A small model of every layout, with an optimizer."""
    kind, own = ALL[name]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    model = model.to(device, dtype).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    lr = 0.02 if kind is torch.optim.SGD else 1e-3
    params = list(model.parameters())
    if name == "Muon":
        params = [p for p in params if p.ndim == 2]
    return model, kind(params, lr=lr, **own)


def data(device, dtype=torch.float32, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(steps, 8, 3, 6, 6, generator=generator)
    ys = torch.randn(steps, 8, 3, generator=generator)
    return xs.to(device, dtype), ys.to(device, dtype)


def train(model, optimizer, batches, *, sync_debug_mode="default", scaler=None, on_step=None):
    """A loop in which nothing after the first steps may wait for the device."""
    sign = -1.0 if optimizer.param_groups[0].get("maximize") else 1.0
    try:
        for t, (x, y) in enumerate(zip(*batches, strict=True)):
            optimizer.zero_grad()
            loss = sign * (model(x) - y).square().mean()
            if t == 3:  # libraries have been loaded
                torch.cuda.set_sync_debug_mode(sync_debug_mode)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            if on_step:
                on_step(t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_no_step_waits_for_the_device(name, every):
    """Over several blocks of measurements, with a learning rate that is changed now and then."""
    model, optimizer = build(name, "cuda")
    try:
        train(model, optimizer, data("cuda", steps=8), sync_debug_mode="error")
    except RuntimeError as error:
        pytest.skip(f"the optimizer itself waits: {error}")
    model, optimizer = build(name, "cuda")
    monitor = eq.Monitor(optimizer, model, every=every)

    def lower(t):
        if t % 20 == 7:
            optimizer.param_groups[0]["lr"] *= 0.9

    train(model, optimizer, data("cuda"), sync_debug_mode="error", on_step=lower)
    assert monitor.reading().step == STEPS
    assert monitor.reading().undefined is None


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", ["SGD momentum", "SGD nesterov"])
def test_no_step_waits_with_a_learning_rate_on_the_device(name, every):
    model, optimizer = build(name, "cuda")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02, device="cuda")
    optimizer.param_groups[0]["foreach"] = False
    monitor = eq.Monitor(optimizer, every=every)
    lr = optimizer.param_groups[0]["lr"]
    batches = data("cuda", steps=40)

    # SGD itself turns such a learning rate into a number, so only the hooks are watched.
    monitor.detach()
    for t, (x, y) in enumerate(zip(*batches, strict=True)):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error" if t > 3 else "default")
        try:
            monitor.before_step(deferred=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("error" if t > 3 else "default")
        try:
            monitor.after_step()
            lr.mul_(0.99)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert monitor.reading().undefined is None


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", FUSED)
def test_no_fused_step_under_gradient_scaling_waits(name, every):
    model, optimizer = build(name, "cuda")
    monitor = eq.Monitor(optimizer, every=every)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    xs, ys = data("cuda")
    for t in (50, 200, 201):
        ys[t] = torch.inf
    train(model, optimizer, (xs, ys), sync_debug_mode="error", scaler=scaler)
    reading = monitor.reading()
    assert reading.step == STEPS - 3
    assert reading.undefined is None


@pytest.mark.parametrize("every", [1, 5])
# Muon computes in bfloat16. ASGD keeps its step size in single precision, and torch's two
# implementations of it, of which a GPU uses the other one, round it differently: on a CPU alone
# they differ by up to 4e-5 in the number that is compared here.
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("Muon", "ASGD")])
def test_readings_are_those_of_a_cpu(name, every):
    """In double precision, so that the two trajectories stay together."""
    readings = []
    for device in ("cpu", "cuda"):
        model, optimizer = build(name, device, torch.float64)
        monitor = eq.Monitor(optimizer, model, every=every)
        train(model, optimizer, data(device, torch.float64, 60))
        layers = {layer.name: layer.reading for layer in monitor.layers().layers}
        readings.append({**layers, "all": monitor.reading()})
    for key, expected in readings[0].items():
        found = readings[1][key]
        assert found.count == expected.count
        assert found.right == pytest.approx(expected.right, rel=1e-6)
        assert found.difference == pytest.approx(expected.difference, abs=1e-6 * expected.right)
        assert found.stderr == pytest.approx(expected.stderr, rel=1e-3, abs=1e-5, nan_ok=True)
        assert found.margin == pytest.approx(expected.margin, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["SGD decay", "SGD dampening", "SGD nesterov", "AdamW"])
def test_the_kernel_reads_what_plain_operations_read(name, dtype, monkeypatch):
    """Two monitors of the same training, one with the Triton kernel and one without."""
    from equilibrate.watching import sums

    model, optimizer = build(name, "cuda", dtype)
    kernel = eq.Monitor(optimizer, model, every=4)
    monkeypatch.setattr(sums, "uses_triton", lambda params: False)
    plain = eq.Monitor(optimizer, model, every=4)
    train(model, optimizer, data("cuda", dtype, 60))
    pairs = zip(kernel.layers().layers, plain.layers().layers, strict=True)
    for found, expected in ((one.reading, other.reading) for one, other in pairs):
        assert found.right == pytest.approx(expected.right, rel=1e-5)
        assert found.difference == pytest.approx(expected.difference, abs=1e-5 * expected.right)


def test_parameters_that_were_moved_at_the_end_of_a_training_can_still_be_read():
    model, optimizer = build("SGD momentum", "cuda")
    monitor = eq.Monitor(optimizer, model, every=4)
    train(model, optimizer, data("cuda", steps=40))
    before = monitor.reading()
    model.cpu()
    assert monitor.reading() == before


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("name", ALL)
def test_training_is_bit_identical_with_a_monitor(name, every):
    weights = []
    for watch in (False, True):
        model, optimizer = build(name, "cuda")
        monitor = eq.Monitor(optimizer, every=every) if watch else None
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            train(model, optimizer, data("cuda", steps=50))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        weights.append(torch.cuda.get_rng_state())
        assert monitor is None or monitor.reading().step == 50
    assert torch.equal(weights[0], weights[2])
    assert torch.equal(weights[1], weights[3])


GRAPHS = {
    "SGD decay": {"weight_decay": 0.05},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "Adam": {"capturable": True},
}


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_measure_reads_a_replayed_graph(name, every):
    """A captured step gives the readings of the same step that is not captured."""
    kind = torch.optim.Adam if name == "Adam" else torch.optim.SGD

    def start():
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double().to("cuda")
        optimizer = kind(model.parameters(), lr=0.02, foreach=True, **GRAPHS[name])
        return model, optimizer

    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(40, 8, 6, generator=generator, dtype=torch.float64).to("cuda")
    ys = torch.randn(40, 8, 3, generator=generator, dtype=torch.float64).to("cuda")

    def iterate(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=False)
        (model(x) - y).square().mean().backward()
        optimizer.step()

    model, optimizer = start()
    for t in range(3):  # the same warm-up as before a capture
        iterate(model, optimizer, xs[t], ys[t])
    plain = eq.Monitor(optimizer, every=every)
    for x, y in zip(xs, ys, strict=True):
        iterate(model, optimizer, x, y)
    expected = plain.reading()

    model, optimizer = start()
    x, y = xs[0].clone(), ys[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for t in range(3):
            x.copy_(xs[t])
            y.copy_(ys[t])
            iterate(model, optimizer, x, y)
    torch.cuda.current_stream().wait_stream(side)
    monitor = eq.Monitor(optimizer, every=every)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(model, optimizer, x, y)
    assert monitor.step == 0  # hooks do nothing during a capture
    for t in range(40):
        x.copy_(xs[t])
        y.copy_(ys[t])
        with eq.measure(optimizer):
            graph.replay()
    reading = monitor.reading()
    assert (reading.step, reading.count) == (expected.step, expected.count)
    assert reading.right == pytest.approx(expected.right, rel=1e-6)
    assert reading.difference == pytest.approx(expected.difference, abs=1e-6 * expected.right)


def test_replays_outside_measure_are_reported():
    model = nn.Linear(6, 3).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    monitor = eq.Monitor(optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    with pytest.warns(UserWarning, match=r"no optimizer step was seen.*eq.measure\("):
        assert monitor.reading().count == 0


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("name", ["SGD momentum", "fused SGD momentum", "Adam"])
def test_peak_memory(name, every):
    """A measured step needs one copy of the parameters, which is gone after it if every > 1."""
    kind, own = ALL[name]
    peaks, kept = [], []
    for watch in (False, True):
        torch.cuda.empty_cache()
        params = [nn.Parameter(torch.randn(2**22, device="cuda")) for _ in range(4)]
        optimizer = kind(params, lr=1e-3, **own)
        monitor = eq.Monitor(optimizer, every=every) if watch else None
        for p in params:
            p.grad = torch.randn_like(p)
        for _ in range(3):
            optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(40):
            optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        kept.append(torch.cuda.memory_allocated())
        del monitor, params, optimizer
    size = 4 * 4 * 2**22
    # The rows of the window and the tables of the kernel take less than 2 MB.
    assert peaks[1] - peaks[0] <= size + 2_000_000
    assert kept[1] - kept[0] <= (every == 1) * size + 2_000_000
