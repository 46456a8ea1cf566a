"""The whole command, from nothing to the page, and what it refuses."""

import io
import json
import re
import shutil
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import typer
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from equilibrate.runlog import records
from equilibrate.paper.data import datasets as data
from equilibrate.paper.protocol import profiles
from equilibrate.paper.analysis import results
from equilibrate.paper.runs import execute as runs
from equilibrate.paper.runs.eta import Forecast
from equilibrate.paper.protocol.profiles import PROFILES, Profile
from equilibrate.paper.protocol.run import Stairs
from equilibrate.paper.runs.reproduce import command, reproduce

SHORT = {"epochs_scale": 0.01, "seeds": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    return out, reproduce(out=out, **SHORT)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "copy")


def test_all_panels_of_the_profile_claims_and_the_page(made):
    out, found = made
    panels = PROFILES["quick"].panels
    names = {f"fig{panel}.{kind}" for panel in panels for kind in ("png", "svg")}
    assert {path.name for path in (out / "figures").iterdir()} == names
    assert {path.stem for path in (out / "records").iterdir()} == set(PROFILES["quick"].runs)
    listed = json.loads((out / "claims.json").read_text())
    assert [item["id"] for item in listed] == [claim.id for claim in found]
    keys = {"id", "figure", "statement", "measured", "margin", "bound", "verdict"}
    assert all(keys <= set(item) for item in listed)
    page = (out / "report.html").read_text()
    assert page.count("<figure") == len(panels) == 18
    assert "small models on scikit-learn" in page
    assert ": B2a, B2b." in page
    assert "2 of 4" in page  # seeds, in the protocol


def test_run_again_it_changes_nothing(copy):
    before = {path.name: path.read_bytes() for path in (copy / "records").iterdir()}
    claims = (copy / "claims.json").read_bytes()
    reproduce(["1a"], out=copy, **SHORT)
    assert {path.name: path.read_bytes() for path in (copy / "records").iterdir()} == before
    assert (copy / "claims.json").read_bytes() == claims


def test_parts_with_some_of_the_seeds_make_up_the_whole(copy, tmp_path):
    """A replica equals the same run done alone, so parts side by side are the run itself."""
    for part in ("mlp-sequence:100-100", "mlp-sequence:101-101", None):
        reproduce(["2a"], out=tmp_path / "parts", part=part, **SHORT)
    names = {path.stem for path in (tmp_path / "parts" / "records").iterdir()}
    assert names == {"mlp-initial", "mlp-sequence.100-100", "mlp-sequence.101-101"}
    joined = results.load(tmp_path / "parts" / "records")["mlp-sequence"]
    whole = results.load(copy / "records")["mlp-sequence"]
    assert joined.run == whole.run
    for name in ("left", "right", "landscape"):
        np.testing.assert_allclose(joined.column(name), whole.column(name), rtol=1e-4)


def test_parts_of_a_shorter_run_do_not_stand_for_the_whole(tmp_path):
    reproduce(["B1a"], out=tmp_path, part="mlp-grid:0-0", **SHORT)
    reproduce(["B1a"], out=tmp_path, **SHORT | {"epochs_scale": 0.02})
    result = results.load(tmp_path / "records")["mlp-grid"]
    assert result.run.epochs == 2
    assert result.finished


def test_overwriting_a_run_takes_its_parts_away(tmp_path):
    """They may be longer than the run that takes their place, and would be drawn."""
    reproduce(["S1a"], out=tmp_path, part="mlp-amsgrad:0-1", **SHORT | {"epochs_scale": 0.02})
    reproduce(["S1a"], out=tmp_path, overwrite=True, **SHORT)
    names = {path.stem for path in (tmp_path / "records").iterdir()}
    assert names == {"mlp-amsgrad", "mlp-adam"}
    assert results.load(tmp_path / "records")["mlp-amsgrad"].run.epochs == 2
    assert "mlp-amsgrad.0-1" not in (tmp_path / "tables.md").read_text()  # nor its time


def test_no_part_makes_seeds_again(tmp_path):
    settings = {"out": tmp_path, "epochs_scale": 0.01, "seeds": 3}
    reproduce(["2a"], part="mlp-sequence:100-101", **settings)
    with pytest.raises(runs.RunError, match=r"make seeds 101 to 101 again, which .*100-101.jsonl"):
        reproduce(["2a"], part="mlp-sequence:101-102", **settings)
    reproduce(["2a"], **settings)
    with pytest.raises(runs.RunError, match=r"make seeds 102 to 102 again, which .*sequence.jsonl"):
        reproduce(["2a"], part="mlp-sequence:102-102", **settings)


def test_only_what_a_figure_needs_is_run(tmp_path):
    reproduce(["2a"], out=tmp_path, **SHORT)
    assert {path.stem for path in (tmp_path / "records").iterdir()} == {
        "mlp-initial",
        "mlp-sequence",
    }
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"fig2a"}


def test_figures_are_redrawn_without_a_run(copy):
    shutil.rmtree(copy / "figures")
    shutil.rmtree(copy / "checkpoints")
    reproduce(["4b"], out=copy, draw_only=True)
    assert (copy / "figures" / "fig4b.svg").exists()
    (copy / "records" / "cnn-amsgrad.jsonl").unlink()
    with pytest.raises(runs.RunError, match="lacks runs for figure 4b"):
        reproduce(["4b"], out=copy, draw_only=True)


def test_the_page_speaks_of_the_figures_that_are_drawn(copy):
    shutil.rmtree(copy / "figures")
    reproduce(["S2c"], out=copy, draw_only=True)
    page = (copy / "report.html").read_text()
    assert page.count("<figure") == 1
    assert set(re.findall(r'data-name="Figure"><div>(.*?)</div>', page)) == {"S2"}
    assert ": 1a, 1b," in page
    with pytest.raises(ValueError, match="draw_only and overwrite exclude each other"):
        reproduce(["S2c"], out=copy, draw_only=True, overwrite=True)


def test_drawing_from_nothing_is_refused(tmp_path):
    with pytest.raises(runs.RunError, match="lacks runs for any figure"):
        reproduce(out=tmp_path, draw_only=True)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(runs.RunError, match=r"nowhere does not exist: name the folder"):
        reproduce(out=nowhere, draw_only=True)
    assert not nowhere.exists()


def test_a_second_run_into_one_folder_is_refused(copy):
    with records.lock(copy), pytest.raises(records.RecordError, match="another run is writing"):
        reproduce(out=copy, **SHORT)


def test_other_settings_are_refused_or_overwrite(copy):
    with pytest.raises(records.RecordError, match="other settings"):
        reproduce(["1a"], out=copy, epochs_scale=0.03, seeds=2)
    reproduce(["1a"], out=copy, epochs_scale=0.03, seeds=2, overwrite=True)
    assert results.load(copy / "records")["mlp-initial"].run.epochs == 2


def test_profiles_do_not_mix(copy):
    with pytest.raises(runs.RunError, match="holds results of the profile 'quick'"):
        reproduce(["1a"], out=copy, profile="paper", **SHORT)


def test_what_is_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="figure '7z' is unknown; choose from 1a"):
        reproduce(["7z"], out=tmp_path)
    with pytest.raises(ValueError, match="figure 'B2b' is not part of the profile 'quick'"):
        reproduce(["B2b"], out=tmp_path)
    for part in ("mlp-sequence", "mlp:1-2"):
        with pytest.raises(ValueError, match=f"part='{part}' must be RUN:FIRST-LAST"):
            reproduce(["1a"], out=tmp_path, part=part)
    with pytest.raises(ValueError, match="has no seeds from 7 to 8"):
        reproduce(["1a"], out=tmp_path, part="mlp-sequence:7-8")
    with pytest.raises(ValueError, match="would not be made, since no mlp-adam is needed for 1a"):
        reproduce(["1a"], out=tmp_path, part="mlp-adam:0-1")
    with pytest.raises(ValueError, match="from whose end mlp-unbiased, mlp-sequence start: make"):
        reproduce(["1a"], out=tmp_path, part="mlp-initial:0-1")
    with pytest.raises(ValueError, match="device='warp' is unknown"):
        reproduce(["1a"], out=tmp_path, device="warp")
    with pytest.raises(ValueError, match="device='mps' is not supported: give auto, cpu or cuda"):
        reproduce(["1a"], out=tmp_path, device="mps")
    with pytest.raises(ValueError, match=r"device='cuda:99' is not there: .* CUDA device"):
        reproduce(["1a"], out=tmp_path, device="cuda:99")
    with pytest.raises(ValueError, match="profile='fast' is unknown"):
        reproduce(["1a"], out=tmp_path, profile="fast")


def test_precisions_are_not_compared_on_a_cpu(tmp_path, monkeypatch):
    """A CPU has one: the runs would be the same, and the claim that they agree would hold."""
    quick = PROFILES["quick"].runs
    compared = {name: replace(quick["mlp-initial"], name=name) for name in ("mlp-fp32", "mlp-tf32")}
    few = {"mlp-initial": quick["mlp-initial"], **compared}
    monkeypatch.setattr(profiles, "PROFILES", {"quick": Profile("quick", few, 1)})
    with pytest.raises(ValueError, match=r"'B2a' compares precisions .*: run it on a GPU"):
        reproduce(["B2a"], out=tmp_path, device="cpu", **SHORT)
    assert not [*tmp_path.iterdir()]
    reproduce(out=tmp_path, device="cpu", **SHORT)
    assert [path.stem for path in (tmp_path / "records").iterdir()] == ["mlp-initial"]


def test_data_that_vanish_are_told_and_records_stay(copy, monkeypatch):
    def vanished(name, *_, **__):
        raise data.DataError(f"{name} was not found")

    monkeypatch.setattr(data, "load", vanished)
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(data.DataError, match="digits was not found"):
        reproduce(["1a"], out=copy, **SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    quick = profiles.profile("quick", **SHORT)
    wild = replace(quick.runs["mlp-initial"], arms={"initial": Stairs(((1e30, 2),))})
    altered = Profile("quick", MappingProxyType(dict(quick.runs) | {"mlp-initial": wild}))
    monkeypatch.setattr(profiles, "profile", lambda *_: altered)
    with pytest.raises(runs.Diverged, match=r"(?s)mlp-initial: the loss .*mlp-sequence: not run"):
        reproduce(["2a", "S1a"], out=tmp_path)
    assert (tmp_path / "figures" / "figS1a.png").exists()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(records.RecordError, match="cannot write to"):
        reproduce(["1a"], out=tmp_path / "file" / "out", **SHORT)


def test_figures_that_cannot_be_written_leave_the_records(copy):
    shutil.rmtree(copy / "figures")
    (copy / "figures").touch()
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(runs.RunError, match="what was recorded is safe"):
        reproduce(["1a"], out=copy, **SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_named_on_the_terminal(copy):
    for path in (copy / "checkpoints").glob("mlp-initial.pt*"):
        path.write_bytes(path.read_bytes()[:1000])
    shutil.copy(
        copy / "checkpoints" / "mlp-sequence.pt", copy / "checkpoints" / "mlp-initial.pt.previous"
    )
    console = Console(record=True, file=io.StringIO(), width=200)
    with pytest.raises(records.RecordError, match="do not belong together"):
        reproduce(["1a"], out=copy, console=console, **SHORT)
    assert "mlp-initial.pt is damaged" in console.export_text()


def test_command_line_says_bars_claims_and_where(copy):
    app = typer.Typer()
    app.command()(command)
    options = ["--out", str(copy), "--epochs-scale", "0.01", "--seeds", "2"]
    result = CliRunner().invoke(app, ["1a", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "mlp-initial" in result.output
    assert "done" in result.output
    assert "Claims of the paper" in result.output
    assert "not tested at this scale: 1 " in result.output  # figure 1a has one claim, none of ours
    assert "Claims beyond the paper" not in result.output
    assert "report.html" in result.output


@pytest.mark.parametrize("width", [80, 120])
def test_claims_fit_the_terminal(copy, width):
    app = typer.Typer()
    app.command()(command)
    options = ["--draw-only", "--out", str(copy)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    table = [line for line in result.output.splitlines() if line.startswith(" ")]
    assert max(map(cell_len, table)) == width
    assert "…" not in result.output
    assert result.output.index("Claims of the paper") < result.output.index("Claims beyond")
    assert "B1a" in result.output
    assert "B2a" not in result.output  # there is no such figure without a GPU


def test_remaining_time_is_that_of_the_speed_seen():
    """Two tasks, ten epochs a second with four replicas: 24 epochs of 8 replicas take 4.8 s."""
    plan = profiles.profile("quick", epochs_scale=0.1)
    todo = [plan.runs[name] for name in ("mlp-initial", "mlp-schedules", "cnn-initial")]
    forecast = Forecast(todo)
    assert forecast.left() is None
    for epoch in range(9):
        forecast.note("mlp-initial", epoch, 100 + epoch / 10)
    assert forecast.left("mlp-initial") == 0
    assert forecast.left("mlp-schedules") == pytest.approx(24 * 2 / 10)
    assert forecast.left() is None  # nothing is known of the CNN yet
    forecast.note("cnn-initial", 0, 200)
    forecast.note("cnn-initial", 1, 201)
    assert forecast.left() == pytest.approx(4.8 + 3 * 1.0)


def test_a_resumed_run_is_timed_from_where_it_was_taken_up():
    run = profiles.profile("quick", epochs_scale=0.5).runs["mlp-initial"]
    forecast = Forecast([run])
    forecast.note(run.name, 30, 0.0)
    forecast.note(run.name, 32, 1.0)
    assert forecast.left() == pytest.approx((run.epochs - 32) * 0.5)


def test_figures_1a_and_4a_on_real_mnist(tmp_path, real_data):
    found = reproduce(
        ["1a", "4a"],
        out=tmp_path,
        profile="paper",
        epochs_scale=0.01,
        seeds=1,
        device="cpu",
        data_dir=real_data,
    )
    assert {path.name for path in (tmp_path / "figures").glob("*.png")} == {
        "fig1a.png",
        "fig4a.png",
    }
    assert {claim.verdict for claim in found} == {"not tested at this scale"}
    result = results.load(tmp_path / "records")["mlp-schedules"]
    assert result.column("test_accuracy", "preset")[-1, 0] > 0.9
