"""Claims, figures and tables as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from equilibrate_paper.analysis.judged import ClaimGroup
from equilibrate_paper.output.markdown import Table


@dataclass(frozen=True)
class Illustration:
    """A figure with its caption."""

    name: str
    """Name of the figure, such as 1a."""
    path: Path
    """An .svg file."""
    caption: str
    """Text below the image."""

    @property
    def data_uri(self) -> str:
        """The image file as a data URI."""
        data = base64.b64encode(self.path.read_bytes()).decode()
        return f"data:image/svg+xml;base64,{data}"


def render(
    title: str,
    summary: Sequence[str] = (),
    claims: Sequence[ClaimGroup] = (),
    illustrations: Sequence[Illustration] = (),
    tables: Sequence[Table] = (),
) -> str:
    """Render a page that contains its images and style, and loads nothing.

    All text is escaped. Parts without content are left out with their headings.

    >>> "<p>2 &lt; 3</p>" in render("Results", ["2 < 3"])
    True

    Args:
        title: Title and first heading.
        summary: Paragraphs below the title.
        claims: Groups of claims, a table for each.
        illustrations: Images with captions.
        tables: Tables at the end.

    Returns:
        The HTML text.
    """
    environment = Environment(
        loader=PackageLoader("equilibrate_paper.output"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        summary=summary,
        claims=claims,
        illustrations=illustrations,
        tables=tables,
    )
