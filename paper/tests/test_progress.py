"""Progress bars show what is done, in which unit, and a status."""

import io

from rich.console import Console

from equilibrate_paper.progress import progress_bars


def test_bar_shows_count_unit_and_status():
    console = Console(file=io.StringIO(), width=120, record=True, force_terminal=True)
    with progress_bars("epochs", console) as bars:
        bar = bars.add_task("mlp", total=10, status="")
        bars.update(bar, completed=3, status="loss 0.25")
    text = console.export_text()
    assert "mlp" in text
    assert "3/10 epochs" in " ".join(text.split())
    assert "loss 0.25" in text


def test_a_long_status_does_not_hide_the_count():
    """As that of `equilibrate train` in a terminal of 80 columns."""
    output = io.StringIO()
    with progress_bars("epochs", Console(file=output, width=80)) as bars:
        bars.add_task("digits-mlp", total=100, completed=25, status="loss 0.079  " + 80 * "x")
    shown = " ".join(output.getvalue().split())
    assert shown.startswith("digits-mlp")
    assert "25/100 epochs" in shown
    assert "loss 0.079" in shown
