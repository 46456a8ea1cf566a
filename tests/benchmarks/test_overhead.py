"""The overhead benchmarks run at tiny sizes, and their results become tables and figures."""

import json
import math

import pytest


@pytest.mark.slow
def test_dry_run_writes_each_variant_and_keeps_earlier_cases(load, tmp_path):
    gpu, watchers = load("gpu_overhead"), load("watchers")
    out = tmp_path / "out.json"
    for optimizer in ("momentum", "adamw-fused"):
        gpu.main(f"--dry-run --models mlp --optimizers {optimizer} --out {out}".split())
    results = json.loads(out.read_text())["results"]
    assert {m: list(cases) for m, cases in results.items()} == {
        "mlp": ["momentum", "adamw-fused"],
    }
    for case in (case for model in results.values() for case in model.values()):
        assert list(case["variants"]) == list(watchers.WATCHERS)
        assert case["variants"]["bare"]["wall"]["ratio"] == 1
        assert all(row["wall"]["median"] > 0 for row in case["variants"].values())


def test_dry_run_without_out_is_an_error(load, capsys):
    with pytest.raises(SystemExit):
        load("gpu_overhead").main(["--dry-run"])
    assert "cannot overwrite measured results" in capsys.readouterr().err


def test_blocks_are_multiples_of_the_default_interval(load):
    plans = load("gpu_overhead").PLANS.values()
    cases = load("overhead").WORKLOADS.values()
    assert not any(plan.steps % 16 for plan in plans)
    assert not any(case.updates % 16 for case in cases)


def test_watchers_agree_on_what_they_watch(load):
    torch = pytest.importorskip("torch")
    gpu, watchers, workloads = (load(n) for n in ("gpu_overhead", "watchers", "workloads"))
    workload = workloads.mlp("cpu", batch_size=4, tiny=True)

    def trained(name):
        loop = gpu.GpuLoop(workload, "sgd", watchers.WATCHERS[name])
        loop.run(16)
        return loop

    naive, norm = trained("naive .item() loop"), trained("get_total_norm().item()")
    bare, monitored = trained("bare"), trained("every=1")
    for loop in (naive, norm, monitored):
        pairs = zip(bare.model.parameters(), loop.model.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs)
    assert 0 < norm.watcher.total <= math.sqrt(16 * naive.watcher.right) * (1 + 1e-6)
    histograms = trained("histograms, every 16").watcher.histograms
    sizes = [p.numel() for p in bare.model.parameters()]
    assert [histograms[i].sum().item() for i in range(len(sizes))] == sizes


def test_interleave_stops_at_the_time_limit(load):
    interleave = load("harness").interleave
    assert len(interleave({"a": lambda: 0}, 50, seconds=0)["a"]) == 3
    assert len(interleave({"a": lambda: 0}, 2, seconds=0)["a"]) == 2
    assert len(interleave({"a": lambda: 0}, 50)["a"]) == 50


def test_tables_and_figure_from_results(load, tmp_path):
    tables = load("tables")
    comparison = {"median": 0.002, "ratio": 1.25, "ratio_interval": [1.2, 1.3]}
    variants = {"bare": comparison | {"ratio": 1.0}, "every=1": comparison, "every=16": comparison}
    gpu = {
        "mlp": {
            "sgd": {
                "device": "GPU X",
                "torch": "2.11",
                "rounds": 7,
                "variants": {
                    name: {"wall": row, "memory_bytes": 2**20, "memory_over_bare_bytes": 2**19}
                    for name, row in variants.items()
                },
            }
        }
    }
    (tmp_path / "gpu_overhead.json").write_text(json.dumps({"results": gpu}))
    found = tables.tables(tmp_path)
    assert set(found) == {"gpu", "gpu memory"}
    assert "| MLP, sgd | 2 | 1.250 ± 0.050 | 1.250 ± 0.050 |" in found["gpu"]
    assert "| MLP, sgd | 1 | +0.5 | +0.5 |" in found["gpu memory"]
    tables.draw({"GPU": tables.gpu_ratios(gpu)}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_replace_table_needs_its_place(load):
    replace_table = load("tables").replace_table
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb"
    assert replace_table(text, "x", "new") == "a\n<!-- table: x -->\nnew\n<!-- end -->\nb"
    with pytest.raises(ValueError, match="found 0 places for the table 'y'"):
        replace_table(text, "y", "new")


def test_readme_has_a_place_for_every_table(load):
    tables = load("tables")
    text = tables.README.read_text()
    for name in ("cpu", "gpu", "gpu memory"):
        tables.replace_table(text, name, "")
