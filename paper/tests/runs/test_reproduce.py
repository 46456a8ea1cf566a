"""A reproduction from the runs to the report, and the errors of invalid requests."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest

from equilibrate.record import jsonl
from equilibrate.record.jsonl import RecordError
from equilibrate_paper.analysis import results
from equilibrate_paper.data import datasets
from equilibrate_paper.protocol import profiles
from equilibrate_paper.protocol.profiles import PROFILES, Profile
from equilibrate_paper.protocol.schedules import PiecewiseConstant
from equilibrate_paper.runs.errors import Diverged, RunError
from equilibrate_paper.runs.reproduce import draw, reproduce

SHORT = profiles.profile("quick", 0.01, 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    return out, reproduce(out=out, profile=SHORT)


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
    reproduce(["1a"], out=copy, profile=SHORT)
    assert {path.name: path.read_bytes() for path in (copy / "records").iterdir()} == before
    assert (copy / "claims.json").read_bytes() == claims


def test_only_the_runs_of_a_figure_are_executed(tmp_path):
    reproduce(["2a"], out=tmp_path, profile=SHORT)
    assert {path.stem for path in (tmp_path / "records").iterdir()} == {
        "mlp-initial",
        "mlp-sequence",
    }
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"fig2a"}


def test_draw_only_draws_recorded_runs(copy):
    shutil.rmtree(copy / "figures")
    shutil.rmtree(copy / "checkpoints")
    draw(["4b"], out=copy)
    assert (copy / "figures" / "fig4b.svg").exists()
    (copy / "records" / "cnn-amsgrad.jsonl").unlink()
    with pytest.raises(RunError, match="lacks runs for figure 4b"):
        draw(["4b"], out=copy)


def test_report_contains_only_drawn_figures(copy):
    shutil.rmtree(copy / "figures")
    draw(["S2c"], out=copy)
    page = (copy / "report.html").read_text()
    assert page.count("<figure") == 1
    assert set(re.findall(r'data-name="Figure"><div>(.*?)</div>', page)) == {"S2"}
    assert ": 1a, 1b," in page


def test_draw_only_without_records_raises(tmp_path):
    with pytest.raises(RunError, match="lacks runs for any figure"):
        draw(out=tmp_path)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(RunError, match=r"nowhere does not exist: give the folder"):
        draw(out=nowhere)
    assert not nowhere.exists()


def test_second_process_in_one_folder_raises(copy):
    with (
        jsonl.open_locked(copy / ".lock"),
        pytest.raises(jsonl.RecordError, match="another run is writing"),
    ):
        reproduce(out=copy, profile=SHORT)


def test_other_settings_raise_unless_overwriting(copy):
    longer = profiles.profile("quick", 0.03, 2)
    with pytest.raises(jsonl.RecordError, match="other settings"):
        reproduce(["1a"], out=copy, profile=longer)
    reproduce(["1a"], out=copy, profile=longer, overwrite=True)
    assert results.load(copy / "records")["mlp-initial"].run.epochs == 2


def test_profiles_in_one_folder_raise(copy):
    with pytest.raises(RunError, match="has results of the profile 'quick'"):
        reproduce(["1a"], out=copy, profile=profiles.profile("paper", 0.01, 2), data_dir=copy)


def test_invalid_arguments_raise(tmp_path):
    for function in (partial(reproduce, profile=SHORT), draw):
        with pytest.raises(ValueError, match="figure '7z' is unknown; choose from 1a"):
            function(["7z"], out=tmp_path)
    with pytest.raises(ValueError, match="figure 'B2b' is not part of the profile 'quick'"):
        reproduce(["B2b"], out=tmp_path, profile=SHORT)
    with pytest.raises(ValueError, match="profile='fast' is unknown"):
        profiles.profile("fast")


def test_comparing_precisions_on_a_cpu_raises(tmp_path):
    """A CPU has one precision: the runs would be equal, and the claim would hold trivially."""
    quick = SHORT.runs
    compared = {name: replace(quick["mlp-initial"], name=name) for name in ("mlp-fp32", "mlp-tf32")}
    few = {"mlp-initial": quick["mlp-initial"], **compared}
    profile = Profile("quick", few, 1)
    with pytest.raises(ValueError, match=r"'B2a' compares precisions .*: run it on a GPU"):
        reproduce(["B2a"], out=tmp_path, profile=profile)
    assert not [*tmp_path.iterdir()]
    reproduce(out=tmp_path, profile=profile)
    assert [path.stem for path in (tmp_path / "records").iterdir()] == ["mlp-initial"]


def test_missing_data_raise_and_keep_the_records(copy, monkeypatch):
    def missing(name, *_, **__):
        raise datasets.DataError(f"{name} was not found")

    monkeypatch.setattr(datasets, "load", missing)
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(datasets.DataError, match="digits was not found"):
        reproduce(["1a"], out=copy, profile=SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


def test_diverging_run_does_not_stop_the_others(tmp_path):
    wild = replace(SHORT.runs["mlp-initial"], arms={"initial": PiecewiseConstant(((1e30, 2),))})
    altered = Profile("quick", {**SHORT.runs, "mlp-initial": wild})
    with pytest.raises(Diverged, match=r"(?s)mlp-initial: the loss .*mlp-sequence: not run"):
        reproduce(["2a", "S1a"], out=tmp_path, profile=altered)
    assert (tmp_path / "figures" / "figS1a.png").exists()


def test_folder_that_cannot_be_written_to_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(jsonl.RecordError, match="cannot write to"):
        reproduce(["1a"], out=tmp_path / "file" / "out", profile=SHORT)


def test_figures_that_cannot_be_written_raise_and_keep_the_records(copy):
    shutil.rmtree(copy / "figures")
    (copy / "figures").touch()
    before = (copy / "records" / "mlp-initial.jsonl").read_bytes()
    with pytest.raises(RecordError, match="cannot write to"):
        reproduce(["1a"], out=copy, profile=SHORT)
    assert (copy / "records" / "mlp-initial.jsonl").read_bytes() == before


@pytest.mark.slow
def test_figures_1a_and_4a_on_real_mnist(tmp_path, real_data):
    found = reproduce(
        ["1a", "4a"],
        out=tmp_path,
        profile=profiles.profile("paper", 0.01, 1),
        data_dir=real_data,
    )
    assert {path.name for path in (tmp_path / "figures").glob("*.png")} == {
        "fig1a.png",
        "fig4a.png",
    }
    assert {claim.verdict for claim in found} == {"not tested at this scale"}
    result = results.load(tmp_path / "records")["mlp-schedules"]
    assert result.column("test_accuracy", "preset")[-1, 0] > 0.9
