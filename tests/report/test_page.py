"""The page: one file, everything escaped, and no wider than a phone in a real browser."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest

from equilibrate.report.page import Illustration, Table, number, page

CLAIM = {
    "figure": "1a",
    "statement": "The sides <meet>.",
    "measured": 0.0123,
    "error": 0.0021,
    "bound": "|L/R − 1| < 0.05 at the end, at the learning rate where it is largest",
    "why": "A line's width & no more.",
    "verdict": "holds",
    "remark": "",
    "ours": False,
}
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"><rect width="4" height="3"/></svg>'


@pytest.fixture
def html(tmp_path):
    picture = tmp_path / "fig1a.svg"
    picture.write_text(SVG)
    failing = CLAIM | {"verdict": "fails", "measured": None, "error": None, "remark": "one seed"}
    untested = CLAIM | {"verdict": "not tested at this scale"}
    return page(
        "Results",
        ["First.", "Second."],
        [CLAIM, failing, untested, CLAIM, CLAIM | {"ours": True, "statement": "Also this."}],
        [Illustration(f"{k}a", picture, "What it shows.") for k in range(1, 5)],
        [Table("Environment", ("What", "Value"), [("platform", "x" * 200)])],
    )


def test_everything_is_there_and_escaped(html):
    assert "The sides &lt;meet&gt;." in html
    assert escape("A line's width & no more.") in html
    assert "0.0123 ± 0.0021" in html
    assert "<b>2</b> holds" in html
    assert html.index("The sides") < html.index("Claims beyond") < html.index("Also this.")
    assert "<b>1</b> fails" in html
    assert html.count("<figure") == 4
    assert '<span class="not">not tested at this scale</span>' in html


def test_nothing_is_fetched(html):
    addresses = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^">)]*)', html)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "<script" not in html
    assert "@import" not in html


def test_empty_parts_leave_no_heading():
    assert "<h2>" not in page("Results", [], [], [], [])


def test_a_picture_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"fig\.pdf is neither \.svg nor \.png"):
        page("Results", [], [], [Illustration("1a", Path("fig.pdf"), "")], [])


@pytest.mark.parametrize(
    ("measured", "error", "text"),
    [
        (None, None, "–"),
        (1.0, 0.0, "1"),
        (-1.342, 0.261, "−1.34 ± 0.26"),
        (123.4, 20.0, "123 ± 20"),
        (1e-9, 2e-10, "1e−09 ± 2e−10"),
        (0.96, 0.096, "0.960 ± 0.096"),
        (-0.000189, 8.6e-6, "−0.0001890 ± 0.0000086"),
    ],
)
def test_numbers_are_rounded_to_their_errors(measured, error, text):
    assert number(measured, error) == text


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_the_screen(html, tmp_path, width):
    """A frame of the screen's width holds the page; its script says how wide the page came out."""
    host = tmp_path / "host.html"
    host.write_text(
        f'<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{escape(html)}">'
        "</iframe><script>f.onload = () => { const d = f.contentDocument;"
        "document.title = [d.documentElement.scrollWidth, d.documentElement.clientWidth,"
        "[...d.images].filter(i => i.naturalWidth > 0).length].join(' ') }</script>"
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *flags, profile, host.as_uri()], capture_output=True, text=True, timeout=120
    )
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)
    assert found is not None, done.stderr[-500:]
    scroll, client, images = map(int, found.groups())
    assert scroll <= client <= width
    assert images == 4
