"""The page is one file, escapes all text, and fits the width of a phone in a real browser."""

import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
from paper_support.judged import judged_claim
from support.browser import CHROMIUM, result

from equilibrate_paper.analysis.judged import ClaimGroup
from equilibrate_paper.output.html import Illustration, render
from equilibrate_paper.output.markdown import Table

CLAIM = judged_claim(
    statement="The sides <meet>.",
    bound="|L/R − 1| < 0.05 at the end, at the learning rate where it is largest",
    why="A line's width & no more.",
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 3"><rect width="4" height="3"/></svg>'


@pytest.fixture
def html(tmp_path):
    image = tmp_path / "fig1a.svg"
    image.write_text(SVG)
    failing = replace(CLAIM, verdict="fails", measured=None, margin=None, remark="one <seed>")
    untested = replace(CLAIM, verdict="not tested at this scale")
    ours = replace(CLAIM, ours=True, statement="Also this.")
    return render(
        "Results <2>",
        ["First.", "Second."],
        [
            ClaimGroup("Claims of the paper", [CLAIM, failing, untested, CLAIM]),
            ClaimGroup("Claims beyond the paper", [ours]),
        ],
        [Illustration(f"{k}a", image, 'What "it" shows.') for k in range(1, 5)],
        [Table("Environment", ("What", "Value"), [("platform", "x" * 200)])],
    )


class Document(HTMLParser):
    """The tags of a page that were not closed, and its text outside the style."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_all_content_is_shown_and_escaped(html):
    text = Document(html).text
    for part in (
        "Results <2>",
        "Second.",
        CLAIM.statement,
        CLAIM.bound,
        CLAIM.why,
        "0.0123 ± 0.0021",
        "one <seed>",
        "Environment",
        "x" * 200,
        'What "it" shows.',
    ):
        assert part in text
    assert "<meet>" not in html
    assert "<seed>" not in html
    assert html.count("<figure") == 4
    assert '<span class="not">not tested at this scale</span>' in html


def test_tags_are_nested(html):
    assert html.startswith("<!DOCTYPE html>\n<html")
    assert Document(html).open == []


def test_the_page_loads_nothing(html):
    addresses = re.findall(r'(?:src|href|url)\s*[=(]\s*"?([^">)]*)', html)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "<script" not in html
    assert "@import" not in html


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_the_screen(html, tmp_path, width):
    """Show the page in a frame of the screen's width, and let a script report the page's width."""
    host = tmp_path / "host.html"
    host.write_text(
        "<!DOCTYPE html><pre id=result></pre>"
        f'<iframe id="f" style="width:{width}px;height:900px;border:0" srcdoc="{escape(html)}">'
        "</iframe><script>f.onload = () => { const d = f.contentDocument;"
        "result.textContent = JSON.stringify([d.documentElement.scrollWidth,"
        "d.documentElement.clientWidth,"
        "[...d.images].filter(i => i.naturalWidth > 0).length]) }</script>"
    )
    scroll, client, images = result(host)
    assert scroll <= client <= width
    assert images == 4
