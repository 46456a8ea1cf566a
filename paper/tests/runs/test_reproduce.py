"""A reproduction from the runs to the report, and the errors of invalid requests."""

import io
import json
import re
import shutil
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from rich.console import Console

from equilibrate.runlog import records
from equilibrate.runlog.lock import lock
from equilibrate_paper.analysis import results
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import profiles
from equilibrate_paper.protocol.profiles import PROFILES, Profile
from equilibrate_paper.protocol.schedules import PiecewiseConstant
from equilibrate_paper.runs.errors import Diverged, RunError
from equilibrate_paper.runs.reproduce import reproduce

SHORT = {"epochs_scale": 0.01, "seeds": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    return out, reproduce(out=out, **SHORT)


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "copy")


def test_all_panels_claims_and_the_report_are_written(made):
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
    assert ": B2a, B2b, B4a, B4b." in page
    assert "2 of 4" in page  # seeds, in the protocol


def test_second_call_changes_nothing(copy):
    before = {path.name: path.read_bytes() for path in (copy / "records").iterdir()}
    claims = (copy / "claims.json").read_bytes()
    reproduce(["1a"], out=copy, **SHORT)
    assert {path.name: path.read_bytes() for path in (copy / "records").iterdir()} == before
    assert (copy / "claims.json").read_bytes() == claims


def test_joined_parts_equal_the_whole_run(copy, tmp_path):
    """A replica does not depend on the others, so the parts together are the run itself."""
    for part in ("mlp-sequence:100-100", "mlp-sequence:101-101", None):
        reproduce(["2a"], out=tmp_path / "parts", part=part, **SHORT)
    names = {path.stem for path in (tmp_path / "parts" / "records").iterdir()}
    assert names == {"mlp-initial", "mlp-sequence.100-100", "mlp-sequence.101-101"}
    joined = results.load(tmp_path / "parts" / "records")["mlp-sequence"]
    whole = results.load(copy / "records")["mlp-sequence"]
    assert joined.run == whole.run
    for name in ("left", "right", "landscape"):
        np.testing.assert_allclose(joined.column(name), whole.column(name), rtol=1e-4)


def test_parts_of_a_shorter_run_do_not_replace_the_whole(tmp_path):
    reproduce(["B1a"], out=tmp_path, part="mlp-grid:0-0", **SHORT)
    reproduce(["B1a"], out=tmp_path, **SHORT | {"epochs_scale": 0.02})
    result = results.load(tmp_path / "records")["mlp-grid"]
    assert result.run.epochs == 2
    assert result.finished


def test_overwriting_a_run_removes_its_parts(tmp_path):
    """They may be longer than the run that replaces them, and would be drawn."""
    reproduce(["S1a"], out=tmp_path, part="mlp-amsgrad:0-1", **SHORT | {"epochs_scale": 0.02})
    reproduce(["S1a"], out=tmp_path, overwrite=True, **SHORT)
    names = {path.stem for path in (tmp_path / "records").iterdir()}
    assert names == {"mlp-amsgrad", "mlp-adam"}
    assert results.load(tmp_path / "records")["mlp-amsgrad"].run.epochs == 2
    assert "mlp-amsgrad.0-1" not in (tmp_path / "tables.md").read_text()  # nor its timing


def test_part_with_recorded_seeds_raises(tmp_path):
    settings = {"epochs_scale": 0.01, "seeds": 3}
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    reproduce(["2a"], out=parts, part="mlp-sequence:100-101", **settings)
    with pytest.raises(RunError, match=r"repeat seeds 101 to 101, which are .*100-101.jsonl"):
        reproduce(["2a"], out=parts, part="mlp-sequence:101-102", **settings)
    reproduce(["2a"], out=whole, **settings)
    with pytest.raises(RunError, match=r"repeat seeds 102 to 102, which are .*sequence.jsonl"):
        reproduce(["2a"], out=whole, part="mlp-sequence:102-102", **settings)


def test_whole_run_uses_the_recorded_parts(tmp_path):
    settings = {"out": tmp_path, "epochs_scale": 0.01, "seeds": 3}
    reproduce(["2a"], part="mlp-sequence:100-101", **settings)
    before = (tmp_path / "records" / "mlp-sequence.100-101.jsonl").read_bytes()
    reproduce(["2a"], **settings)
    names = {path.stem for path in (tmp_path / "records").iterdir()}
    assert names == {"mlp-initial", "mlp-sequence.100-101", "mlp-sequence.102-102"}
    assert (tmp_path / "records" / "mlp-sequence.100-101.jsonl").read_bytes() == before
    assert results.load(tmp_path / "records")["mlp-sequence"].run.seeds == (100, 101, 102)


def test_only_the_runs_of_a_figure_are_executed(tmp_path):
    reproduce(["2a"], out=tmp_path, **SHORT)
    assert {path.stem for path in (tmp_path / "records").iterdir()} == {
        "mlp-initial",
        "mlp-sequence",
    }
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"fig2a"}


def test_draw_only_draws_recorded_runs(copy):
    shutil.rmtree(copy / "figures")
    shutil.rmtree(copy / "checkpoints")
    reproduce(["4b"], out=copy, draw_only=True)
    assert (copy / "figures" / "fig4b.svg").exists()
    (copy / "records" / "cnn-amsgrad.jsonl").unlink()
    with pytest.raises(RunError, match="lacks runs for figure 4b"):
        reproduce(["4b"], out=copy, draw_only=True)


def test_report_contains_only_drawn_figures(copy):
    shutil.rmtree(copy / "figures")
    reproduce(["S2c"], out=copy, draw_only=True)
    page = (copy / "report.html").read_text()
    assert page.count("<figure") == 1
    assert set(re.findall(r'data-name="Figure"><div>(.*?)</div>', page)) == {"S2"}
    assert ": 1a, 1b," in page
    with pytest.raises(ValueError, match="draw_only and overwrite cannot be combined"):
        reproduce(["S2c"], out=copy, draw_only=True, overwrite=True)


def test_draw_only_without_records_raises(tmp_path):
    with pytest.raises(RunError, match="lacks runs for any figure"):
        reproduce(out=tmp_path, draw_only=True)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(RunError, match=r"nowhere does not exist: give the folder"):
        reproduce(out=nowhere, draw_only=True)
    assert not nowhere.exists()


def test_second_process_in_one_folder_raises(copy):
    with lock(copy), pytest.raises(records.RecordError, match="another run is writing"):
        reproduce(out=copy, **SHORT)


def test_other_settings_raise_unless_overwriting(copy):
    with pytest.raises(records.RecordError, match="other settings"):
        reproduce(["1a"], out=copy, epochs_scale=0.03, seeds=2)
    reproduce(["1a"], out=copy, epochs_scale=0.03, seeds=2, overwrite=True)
    assert results.load(copy / "records")["mlp-initial"].run.epochs == 2


def test_profiles_in_one_folder_raise(copy):
    with pytest.raises(RunError, match="has results of the profile 'quick'"):
        reproduce(["1a"], out=copy, profile="paper", **SHORT)


def test_invalid_arguments_raise(tmp_path):
    with pytest.raises(ValueError, match="figure '7z' is unknown; choose from 1a"):
        reproduce(["7z"], out=tmp_path)
    with pytest.raises(ValueError, match="figure 'B2b' is not part of the profile 'quick'"):
        reproduce(["B2b"], out=tmp_path)
    for part in ("mlp-sequence", "mlp:1-2"):
        with pytest.raises(ValueError, match=f"part='{part}' must be RUN:FIRST-LAST"):
            reproduce(["1a"], out=tmp_path, part=part)
    with pytest.raises(ValueError, match="has no seeds from 7 to 8"):
        reproduce(["1a"], out=tmp_path, part="mlp-sequence:7-8")
    with pytest.raises(ValueError, match="has no effect, because 1a does not need mlp-adam"):
        reproduce(["1a"], out=tmp_path, part="mlp-adam:0-1")
    with pytest.raises(ValueError, match="because mlp-unbiased, mlp-sequence start from the"):
        reproduce(["1a"], out=tmp_path, part="mlp-initial:0-1")
    with pytest.raises(ValueError, match="profile='fast' is unknown"):
        reproduce(["1a"], out=tmp_path, profile="fast")


def test_comparing_precisions_on_a_cpu_raises(tmp_path, monkeypatch):
    """A CPU has one precision: the runs would be equal, and the claim would hold trivially."""
    quick = PROFILES["quick"].runs
    compared = {name: replace(quick["mlp-initial"], name=name) for name in ("mlp-fp32", "mlp-tf32")}
    few = {"mlp-initial": quick["mlp-initial"], **compared}
    monkeypatch.setattr(profiles, "PROFILES", {"quick": Profile("quick", few, 1)})
    with pytest.raises(ValueError, match=r"'B2a' compares precisions .*: run it on a GPU"):
        reproduce(["B2a"], out=tmp_path, device="cpu", **SHORT)
    assert not [*tmp_path.iterdir()]
    reproduce(out=tmp_path, device="cpu", **SHORT)
    assert [path.stem for path in (tmp_path / "records").iterdir()] == ["mlp-initial"]


def test_missing_data_raise_and_keep_the_records(copy, monkeypatch):
    def missing(name, *_, **__):
        raise datasets.DataError(f"{name} was not found")

    monkeypatch.setattr(datasets, "load", missing)
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(datasets.DataError, match="digits was not found"):
        reproduce(["1a"], out=copy, **SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


def test_diverging_run_does_not_stop_the_others(tmp_path, monkeypatch):
    quick = profiles.profile("quick", **SHORT)
    wild = replace(quick.runs["mlp-initial"], arms={"initial": PiecewiseConstant(((1e30, 2),))})
    altered = Profile("quick", MappingProxyType(dict(quick.runs) | {"mlp-initial": wild}))
    monkeypatch.setattr(profiles, "profile", lambda *_: altered)
    with pytest.raises(Diverged, match=r"(?s)mlp-initial: the loss .*mlp-sequence: not run"):
        reproduce(["2a", "S1a"], out=tmp_path)
    assert (tmp_path / "figures" / "figS1a.png").exists()


def test_folder_that_cannot_be_written_to_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(records.RecordError, match="cannot write to"):
        reproduce(["1a"], out=tmp_path / "file" / "out", **SHORT)


def test_figures_that_cannot_be_written_raise_and_keep_the_records(copy):
    shutil.rmtree(copy / "figures")
    (copy / "figures").touch()
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(RunError, match="The recorded rows are safe: run the same"):
        reproduce(["1a"], out=copy, **SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


def test_damaged_checkpoint_is_named_on_the_terminal(copy):
    for path in (copy / "checkpoints").glob("mlp-initial.pt*"):
        path.write_bytes(path.read_bytes()[:1000])
    shutil.copy(
        copy / "checkpoints" / "mlp-sequence.pt", copy / "checkpoints" / "mlp-initial.pt.previous"
    )
    console = Console(record=True, file=io.StringIO(), width=200)
    with pytest.raises(records.RecordError, match="they belong to different runs"):
        reproduce(["1a"], out=copy, console=console, **SHORT)
    assert "mlp-initial.pt is damaged" in console.export_text()


@pytest.mark.slow
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
