"""The interactive page of a run: one file, escaped, and working in a real browser."""

import json
import math
import re
from html import escape
from importlib.resources import files

import pytest
import torch
from support.browser import CHROMIUM, result

import equilibrate as eq
from equilibrate.cli import main
from equilibrate.record.jsonl import Writer
from equilibrate.report.live import view
from equilibrate.report.page import data as data_of
from equilibrate.report.page import decision_table, facts, layer_table, render
from equilibrate.report.run import Run, load

ROWS = 60
INVARIANT = {
    "scale_invariant": True,
    "angular_step": 0.0123456,
    "equilibrium": 0.01,
    "relaxation": 2500.0,
}


def forecast(k):
    if k == ROWS // 2:
        return {
            "horizon": 20 * k,
            "undefined": "it needs 128 steps at this learning rate, and has seen 40",
        }
    losses = {"now": 1 / k, "after": 0.9 / k, "after_margin": 0.001, "staying": 0.98 / k}
    gains = {"gain": 0.1 / k, "gain_margin": 0.01, "over_staying": 0.08 / k}
    return {"horizon": 20 * k, **losses, **gains, "over_staying_margin": 0.01}


def rows():
    for k in range(1, ROWS + 1):
        residual = 2 * math.exp(-(k % 20) / 4) * (-1) ** k
        lowered = k % 20 == 0
        layers = {
            f"block.{n}.weight": {
                "left": 1.0,
                "right": 2.0,
                "residual": residual / (n + 1),
                "state": "norm falls" if n else "not known yet",
                **({} if n else INVARIANT),
            }
            for n in range(8)
        }
        lr = 0.1 * 0.5 ** (k // 20)
        decision = {
            "step": 100 * k - 50 * lowered,  # between two rows
            "lowered": lowered,
            "reason": f"equilibrated <at> {k}" if lowered else f"not yet: {k}",
            "lrs": [lr, 0.2],
        }
        yield {
            "step": 100 * k,
            "time": 1e9 + 2 * k,
            "epoch": k,
            "loss": 1 / k,
            "left": 1 + residual,
            "right": 1.0,
            "residual": residual,
            "margin": 0.2,
            "count": 50,
            "lrs": [lr, 0.2],
            "decisions": [decision],
            "forecast": forecast(k),
            "layers": layers,
            "accuracy </script>": k / ROWS,
        }


def made(rows, config=None):
    run = Run("My <run>", config or {}, {"torch": "2", "gpu": None})
    for row in rows:
        run.add(dict(row))
    return run


@pytest.fixture(scope="module")
def run():
    run = made(rows(), {"name": "<b>", "recorder": {"threshold": 0.01}})
    run.end = {"status": "finished", "time": "2026-01-01T00:00:00+00:00"}
    return run


@pytest.fixture(scope="module")
def html(run):
    return render(run)


@pytest.fixture(scope="module")
def data(html):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)
    assert found is not None
    return json.loads(found[1])


def test_facts(run):
    found = facts(run)
    assert found == {
        "Step": "6,000",
        "Epoch": "60",
        "Loss": "0.01667",
        "Learning rate": "0.0125, 0.2",
        "Lowered": "3 times",
        "L/R − 1": "2.00 ± 0.20",
        "Forecast": (
            "a cooldown over 1,200 steps would end at 0.0150 ± 0.0010; now 0.0167, staying 0.0163"
        ),
        "Last decision": "at step 5,950: equilibrated <at> 60",
    }
    assert [*found][-3:] == ["Forecast", "Last decision", "L/R − 1"]  # FDR1 for those who use it


def test_the_sentence_is_that_of_the_last_forecast():
    """A run says why there is none, and that no later row has one if the learning rate decays."""
    run = made([{"step": 100, "loss": 1.0}])
    assert run.sentence is None
    assert "Forecast" not in facts(run)
    run.add({"step": 200, "forecast": forecast(2)})
    assert facts(run)["Forecast"] == (
        "a cooldown over 40 steps would end at 0.4500 ± 0.0010; now 0.5000, staying 0.4900"
    )
    run.add({"step": 3000, "forecast": forecast(30)})
    why = (
        "no forecast for a cooldown over 600 steps: "
        "it needs 128 steps at this learning rate, and has seen 40"
    )
    assert facts(run)["Forecast"] == why
    for step in range(3001, 3001 + 2 * Run.MOST_ROWS):
        run.add({"step": step})
    assert facts(run)["Forecast"] == f"at step 3,000: {why}"


def test_text_is_escaped(html):
    assert html.startswith("<!DOCTYPE html>")
    assert "<title>My &lt;run&gt;</title>" in html
    assert "Finished · 2026-01-01 00:00:00 UTC · 60 rows<" in html
    assert "<at>" not in html
    assert '<td data-name="Reason"><div>equilibrated &lt;at&gt; 60</div></td>' in html
    assert "<b></div>" not in html
    assert html.count("</script>") == 2  # the data and the program


def test_the_data_are_those_of_the_run(data, run):
    assert data["loss"] == run.column("loss")
    assert list(data["x"]) == ["step", "epoch", "time"]
    assert (data["x"]["step"][0], data["x"]["time"][-1]) == (100, 118)
    assert data["threshold"] == 0.01
    assert data["others"] == {"accuracy </script>": run.column("accuracy </script>")}
    assert data["layers"]["names"] == [f"block.{n}.weight" for n in range(8)]
    assert data["layers"]["x"] == data["x"]
    assert data["forecast"]["after"][28:31] == [0.0310345, None, 0.0290323]
    assert [data["forecast"][name][-1] for name in ("after_margin", "staying", "horizon")] == [
        *(0.001, 0.0163333, 1200),
    ]


def test_a_lowering_lies_at_its_own_step_on_every_axis(data):
    assert data["lowerings"]["x"] == {
        "step": [1950, 3950, 5950],
        "epoch": [19.5, 39.5, 59.5],
        "time": [37, 77, 117],
    }
    rates = data["rates"]
    place = rates["x"]["step"].index(1950)
    assert rates["x"]["step"][place - 1 : place + 3] == [1900, 1950, 1950, 2000]
    assert rates["values"][0][place - 1 : place + 3] == [0.1, 0.1, 0.05, 0.05]
    assert data["reasons"][19] == "Lowered at step 1,950: equilibrated <at> 20"


def test_a_cooldown_begins_at_its_own_step_and_rate(tmp_path):
    """At step 72 with 0.1, not at the next row, at step 80 with 0.0556."""
    theta = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([theta], lr=0.1)
    scheduler = eq.Cooldown(optimizer, total_steps=90)
    with eq.Recorder(tmp_path, scheduler, every=40) as recorder:
        for _ in range(90):
            theta.grad = torch.ones(3)
            optimizer.step()
            scheduler.step(1.0)
            recorder.record()
    run = load(recorder.path)
    assert run is not None
    assert [row["step"] for row in run.rows] == [40, 80]
    shown = data_of(run)
    assert (shown["lowerings"]["x"]["step"], shown["lowerings"]["lrs"]) == ([72], [[0.1]])
    assert shown["rates"]["x"]["step"] == [40, 72, 72, 80]
    assert shown["rates"]["values"][0] == pytest.approx([0.1, 0.1, 0.1, 1 / 18], rel=1e-5)
    (row,) = decision_table(run.lowerings)[1]
    assert row[:2] == ("72", "0.1")
    assert "last decision, at step 72, lr 0.1\n" in view(run, width=80)


def test_the_table_of_layers(run, html):
    *_, row = run.layer_rows
    columns, cells = layer_table(row["layers"])
    assert columns == (
        "Layer", "State", "L/R − 1", "Angular step", "In equilibrium", "Relaxation", "Left side",
        "Right side",
    )  # fmt: skip
    assert cells[0] == (
        "block.0.weight", "not known yet", "2", "0.0123 rad", "0.01 rad", "2,500 steps", "1",
        "2",
    )  # fmt: skip
    assert cells[1][:6] == ("block.1.weight", "norm falls", "1", "–", "–", "–")
    summary = "Of 8 layers, norm falls: 7, not known yet: 1, scale-invariant (⊥): 1."
    assert f"<p>{summary}</p>" in html
    assert "<details open>" in html
    never = {"w": {"residual": 0.5, "relaxation": None}, "v": {"residual": None}}
    assert layer_table(never) == (
        ("Layer", "L/R − 1", "Relaxation"),
        [("w", "0.5", "never"), ("v", "–", "–")],
    )


def test_the_margin_of_a_drift_is_not_shown_as_its_error():
    drift = {"residual": -29.0, "margin": 26.0, "state": "norm grows"}
    unknown = {"residual": -2.0, "margin": 2.6, "state": "not known yet"}
    table = layer_table({"a": drift, "b": unknown})
    assert table[1] == [("a", "norm grows", "−29"), ("b", "not known yet", "−2.0 ± 2.6")]


def test_a_decay_begins_and_is_not_a_lowering():
    run = Run("mine", {"recorder": {"total_steps": 100}}, {})
    decision = {"step": 80, "lowered": True, "reason": "it pays", "lrs": [0.2]}
    run.add({"step": 80, "lrs": [0.2], "decisions": [decision]})
    run.add({"step": 100, "lrs": [0.0]})
    assert facts(run)["Decay began"] == "at step 80"
    html = render(run)
    assert "<h2>Beginning of the decay</h2>" in html
    assert "The decay began at step 80: it pays" in html
    assert "Lowered at" not in html


def test_the_page_loads_nothing_and_holds_its_scripts_unchanged(html):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")
    for name in ("plot.js", "run.js", "run.css"):
        text = files("equilibrate.report").joinpath(f"templates/{name}").read_text(encoding="utf-8")
        assert text.rstrip() in html


def test_a_page_of_almost_nothing():
    html = render(made([{"loss": 1.0}, {"loss": [1, 2], "lrs": None, "note": "text"}]))
    assert "End not recorded · 2 rows · values of a wrong type are left out<" in html
    assert "<h2>Lowerings" not in html
    assert "Layers</h2>" not in html


def test_a_long_record_is_thinned_and_keeps_each_lowering(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "MOST_ROWS", 100)
    monkeypatch.setattr(Run, "MOST_LAYER_ROWS", 10)
    with Writer(tmp_path / "mine" / "train.jsonl", config={}) as writer:
        for k in range(1, 1002):
            made = {"step": 10 * k - 5, "lowered": k in (77, 333), "reason": "", "lrs": [0.1]}
            layers = {"layers": {"a": {"residual": 1.0}}} if k % 7 == 0 else {}
            writer.write({"step": 10 * k, "loss": 1 / k, "decisions": [made], **layers})
    run = load(tmp_path / "mine" / "train.jsonl")
    assert run is not None
    steps = run.column("step")
    assert (run.title, run.recorded, steps[0], steps[-1]) == ("mine", 1001, 10, 10010)
    assert 50 <= len(steps) <= 101
    assert 5 <= len(list(run.layer_rows)) <= 11
    assert [made["step"] for made in run.lowerings] == [765, 3325]
    assert len(run.kept) == Run.MOST_DECISIONS
    assert f"1001 rows · {len(steps)} of them drawn" in render(run)


SCRIPT = """
const frames = [...document.querySelectorAll("iframe")];
const text = (d, selector) => d.querySelector(selector).textContent;
const send = (plot, type, share, y = 60) => {
  const box = plot.getBoundingClientRect(), view = plot.ownerDocument.defaultView;
  plot.dispatchEvent(new view.PointerEvent(type, { bubbles: true, button: 0,
    clientX: box.left + share * box.width, clientY: box.top + y }));
};
const press = (plot, key) => plot.dispatchEvent(
  new plot.ownerDocument.defaultView.KeyboardEvent("keydown", { key, bubbles: true }));
function check(frame) {
  const d = frame.contentDocument, root = d.documentElement, found = {};
  found.fits = root.scrollWidth <= root.clientWidth;
  found.drawn = root.dataset.drawn;
  found.panels = d.querySelectorAll(".panel svg .curve").length;
  found.bands = d.querySelectorAll(".panel svg .band").length;
  found.dots = d.querySelectorAll("#panel-rate circle.dot").length;
  found.dotReason = text(d, "#panel-rate circle.dot title");
  found.rates = [...d.querySelectorAll("#panel-rate svg > g text")].map((t) => t.textContent);
  const plot = d.querySelector("#panel-residual .plot");
  send(plot, "pointermove", 0.999);
  found.readout = text(d, "#readout");
  found.tip = d.querySelector("#tip").innerText.split("\\n").filter((line) => line);
  found.cursors = d.querySelectorAll(".cursor").length;
  press(plot, "ArrowLeft");
  found.left = text(d, "#readout").split(" · ")[0];
  press(plot, "Home");
  found.home = text(d, "#readout").split(" · ")[0];
  send(d.querySelector("#panel-loss .plot"), "pointermove", 0.999);
  found.loss = d.querySelector("#tip").innerText.split("\\n").filter((line) => line);
  const layers = d.querySelector("#panel-layers .plot");
  send(layers, "pointermove", 0.999, 9);
  found.cell = d.querySelector("#tip").innerText.split("\\n").filter((line) => line);
  press(layers, "ArrowDown");
  found.below = text(d, "#tip p");
  const canvas = layers.querySelector("canvas"), pixels = canvas.getContext("2d");
  found.canvas = canvas.height;
  found.opaque = [0, canvas.width - 1].map((x) => pixels.getImageData(x, 0, 1, 1).data[3]);
  send(layers, "pointerleave", 0.5);
  found.tipHidden = d.querySelector("#tip").hidden;
  found.cleared = text(d, "#readout");
  const before = d.querySelector("#panel-loss .curve").getAttribute("d");
  send(plot, "pointerdown", 0.5); send(plot, "pointermove", 0.8); send(plot, "pointerup", 0.8);
  found.zoomed = d.querySelector("#panel-loss .curve").getAttribute("d") !== before;
  found.reset = !d.querySelector("#reset").disabled;
  d.querySelector("#reset").click();
  found.back = d.querySelector("#panel-loss .curve").getAttribute("d") === before;
  const paths = [1, 2].map(() => {  // the second zoom is to what lies between two rows
    send(plot, "pointerdown", 0.5); send(plot, "pointermove", 0.53); send(plot, "pointerup", 0.53);
    return d.querySelector("#panel-loss .curve").getAttribute("d");
  });
  found.between = paths[0] !== paths[1];
  d.querySelector("#reset").click();
  d.querySelector("#panel-loss .tools button:nth-child(2)").click();
  found.linear = d.querySelector("#panel-loss .curve").getAttribute("d") !== before;
  const axis = d.querySelector("#axis");
  found.axes = [...axis.options].map((o) => o.value);
  axis.value = "time";
  axis.dispatchEvent(new d.defaultView.Event("change"));
  found.units = [...d.querySelectorAll("#panel-loss text")].map((t) => t.textContent);
  return found;
}
let open = frames.length;
for (const frame of frames) frame.onload = () => {
  if (--open) return;
  setTimeout(() => {
    let found;
    try { found = frames.map(check); } catch (error) { found = String(error.stack); }
    document.getElementById("result").textContent = JSON.stringify(found);
  }, 200);
};
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_works_in_a_browser_on_a_phone_and_on_a_desktop(html, tmp_path):
    """Show the page in frames of two widths, point and press keys, and report what it shows."""
    host = tmp_path / "host.html"
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(html)}"></iframe>'
        for width in (390, 1200)
    )
    host.write_text(
        f"<!DOCTYPE html><pre id=result></pre>{frames}<script>{SCRIPT}</script>", encoding="utf-8"
    )
    both = result(host)
    assert isinstance(both, list), both
    for found in both:
        assert found["fits"]
        assert found["drawn"] == "loss rate other-accuracy </script> sides residual layers"
        assert found["panels"] == 3 + 2 + 1 + 2 + 1
        assert found["bands"] == 2
        assert found["dots"] == 3
        assert {"0", "0.1", "0.2"} <= {*found["rates"]}  # a linear axis with its zero
        assert found["dotReason"] == "equilibrated <at> 20"
        assert found["readout"] == (
            "step 6,000 · epoch 60 · loss 0.01667 · after a cooldown 0.0150 ± 0.0010 · "
            "L/R − 1 = 2.00 ± 0.20 · lr 0.0125, 0.2 · Lowered at step 5,950: equilibrated <at> 60"
        )
        assert found["tip"] == [
            "step 6,000, epoch 60 (1 min 58 s)",
            "residual: 2.00 ± 0.20",
            "window of 50 steps",
            "Lowered at step 5,950: equilibrated <at> 60",
        ]
        assert found["loss"][1:5] == [
            "loss: 0.0167",
            "forecast: after a cooldown: 0.0150 ± 0.0010",
            "after staying as long: 0.0163",
            "cooldown over 1,200 steps",
        ]
        assert found["cursors"] == 5
        assert (found["left"], found["home"]) == ("step 5,900", "step 100")
        assert found["cell"] == [
            "block.0.weight ⊥",
            "L/R − 1 = 2",
            "not known yet",
            "step 6,000",
        ]
        assert found["below"] == "block.1.weight"
        assert found["canvas"] == 8
        assert found["opaque"] == [255, 255]
        assert found["tipHidden"]
        assert found["cleared"].startswith("Point at a curve")
        assert found["zoomed"]
        assert found["reset"]
        assert found["back"]
        assert found["between"]
        assert found["linear"]
        assert found["axes"] == ["step", "epoch", "time"]
        assert "seconds" in found["units"]


def test_the_command_writes_the_page(tmp_path, capsys):
    record = tmp_path / "mine" / "train.jsonl"
    with Writer(record, config={}) as writer:
        for row in rows():
            writer.write(row)
    best = tmp_path / "new" / "page.html"
    for arguments, path in [
        ([record.parent], record.parent / "report.html"),
        ([record], record.with_suffix(".html")),
        ([record, "--out", best, "--title", "Best"], best),
    ]:
        main(["report", *map(str, arguments)])
        assert capsys.readouterr().out.split() == ["report", str(path)]
        title = "Best" if "--title" in arguments else "mine"
        assert f"<h1>{title}</h1>" in path.read_text(encoding="utf-8")
    assert not list(tmp_path.rglob("*.partial"))


def test_errors_are_told_in_one_line(tmp_path, full_disk):
    with pytest.raises(
        SystemExit, match=r"equilibrate: .*train\.jsonl does not exist: record a ru"
    ):
        main(["report", str(tmp_path)])
    record = tmp_path / "[a] run.jsonl"
    with Writer(record, config={}) as writer:
        with pytest.raises(SystemExit, match=r"\[a\] run\.jsonl has no rows yet: wait for the fi"):
            main(["report", str(tmp_path)])
        writer.write({"step": 1, "loss": 1.0})
    main(["report", str(tmp_path)])
    before = (tmp_path / "report.html").read_bytes()
    with full_disk(5_000), pytest.raises(SystemExit, match=r"report\.html \(File too large\): fre"):
        main(["report", str(tmp_path)])
    assert (tmp_path / "report.html").read_bytes() == before
    for folder in (".", "/", str(tmp_path)):
        with pytest.raises(SystemExit, match=r"cannot write to .*, which is a folder: name a"):
            main(["report", str(tmp_path), "--out", folder])
    with pytest.raises(SystemExit, match=r"no\[/red\]such/train\.jsonl does not exist: record a"):
        main(["report", "no[/red]such"])
    Writer(tmp_path / "other.jsonl", config={}).close()
    with pytest.raises(SystemExit, match=r"has several records \(\[a\] run\.jsonl, other\.jsonl\)"):
        main(["report", str(tmp_path)])
