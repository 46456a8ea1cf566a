"""Claims, figures and tables as one HTML page that needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Illustration:
    """A picture with what stands below it."""

    name: str
    path: Path
    caption: str


@dataclass(frozen=True)
class Table:
    """A heading, the names of the columns, and rows of text."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(
    title: str,
    summary: Sequence[str],
    claims: Sequence[Mapping[str, Any]],
    illustrations: Sequence[Illustration],
    tables: Sequence[Table],
) -> str:
    """The page as text; pictures stand in it, so that it is one file.

    A claim has the keys figure, statement, measured, error, bound, why, verdict, remark and ours;
    those of ours stand apart.

    >>> claim = {"figure": "1a", "statement": "The sides meet.", "measured": 0.01, "error": None}
    >>> claim |= {"bound": "< 0.05", "why": "A line's width.", "verdict": "holds", "remark": ""}
    >>> claim |= {"ours": False}
    >>> "The sides meet." in page("Results", ["One line."], [claim], [], [])
    True
    """
    head = f"<h1>{escape(title)}</h1>" + "".join(f"<p>{escape(p)}</p>" for p in summary)
    parts = [head]
    for ours, heading in ((False, "Claims of the paper"), (True, "Claims beyond the paper")):
        group = [claim for claim in claims if claim["ours"] == ours]
        if group:
            parts.append(f"<h2>{heading}</h2>{_tally(group)}{_claims(group)}")
    if illustrations:
        figures = "".join(_figure(illustration) for illustration in illustrations)
        parts.append(f'<h2>Figures</h2><div class="figures">{figures}</div>')
    parts += [f"<h2>{escape(table.heading)}</h2>{_table(table)}" for table in tables]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def number(measured: float | None, error: float | None) -> str:
    """A value with its error, rounded to the error's second digit; zero has no sign.

    >>> number(0.012345, 0.0021), number(0.5, None), number(None, None), number(97.1, 3.0)
    ('0.0123 ± 0.0021', '0.5', '–', '97.1 ± 3.0')
    >>> number(-0.2, 0.3), number(-0.001, 0.3)
    ('−0.20 ± 0.30', '0.00 ± 0.30')
    """
    if measured is None:
        return "–"
    places = max(0, 1 - int(f"{error or 0:e}".split("e")[1]))
    if not error:
        text = f"{measured:.3g}"
    elif places > 7:
        text = f"{measured:.3g} ± {error:.2g}"
    else:
        text = f"{measured:z.{places}f} ± {error:.{places}f}"
    return text.replace("-", "−")


def _tally(claims: Sequence[Mapping[str, Any]]) -> str:
    verdicts = [claim["verdict"] for claim in claims]
    counts = [f"<b>{verdicts.count(v)}</b> {escape(v)}" for v in dict.fromkeys(sorted(verdicts))]
    return f'<p class="tally">{" · ".join(counts)}</p>'


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for claim in claims:
        remark = f'<span class="remark">{escape(claim["remark"])}</span>' if claim["remark"] else ""
        kind = claim["verdict"].split()[0]
        cells = [
            ("Figure", escape(claim["figure"])),
            ("Claim", escape(claim["statement"])),
            ("Measured", f"<b>{escape(number(claim['measured'], claim['error']))}</b>"),
            ("Held to", f'{escape(claim["bound"])}<span class="why">{escape(claim["why"])}</span>'),
            ("Verdict", f'<span class="{kind}">{escape(claim["verdict"])}</span>{remark}'),
        ]
        rows.append(_row(cells))
    return (
        '<table class="claims"><thead><tr><th>Figure</th><th>Claim</th><th>Measured</th>'
        f"<th>Held to</th><th>Verdict</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        '<p class="note">± is half a 95 % interval over seeds.</p>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        _row([(column, escape(text)) for column, text in zip(table.columns, row, strict=True)])
        for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(cells: Sequence[tuple[str, str]]) -> str:
    inside = "".join(
        f'<td data-name="{escape(name)}"><div>{html}</div></td>' for name, html in cells
    )
    return f"<tr>{inside}</tr>"


def _figure(illustration: Illustration) -> str:
    kind = _TYPES.get(illustration.path.suffix)
    if kind is None:
        raise ValueError(
            f"{illustration.path} is neither .svg nor .png: a page can hold only these"
        )
    data = base64.b64encode(illustration.path.read_bytes()).decode()
    name, text = escape(illustration.name), escape(illustration.caption)
    return (
        f'<figure id="fig{name}"><img alt="Figure {name}: {text}" src="data:{kind};base64,{data}">'
        f"<figcaption><b>Figure {name}.</b> {text}</figcaption></figure>"
    )


_CSS = """
:root { color-scheme: light; --ink: #1c2126; --soft: #5b6670; --line: #dde2e6; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
p { max-width: 48rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line);
  padding: .35rem .9rem .35rem 0; }
td { vertical-align: top; border-bottom: 1px solid var(--line); padding: .5rem .9rem .5rem 0;
  overflow-wrap: anywhere; }
td:first-child { overflow-wrap: normal; }
.claims td:nth-child(2) { min-width: 13rem; }
.claims td:nth-child(3) { white-space: nowrap; font-variant-numeric: tabular-nums; }
.claims td:nth-child(5) { min-width: 9rem; }
.why, .remark, .note { display: block; color: var(--soft); font-size: .82rem; }
.holds, .fails, .undecided, .not { display: inline-block; padding: 0 .5rem; border-radius: .6rem;
  font-weight: 600; }
.holds { color: #0f5a2c; background: #ddf3e4; }
.fails { color: #8d1220; background: #fbe0e2; }
.undecided { color: #6b4e00; background: #fbf0cf; }
.not { color: #4c5660; background: #eceff1; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr));
  gap: 2rem 1.5rem; }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 480px; height: auto; margin: 0 auto .4rem; }
figcaption { font-size: .85rem; color: var(--soft); max-width: 480px; margin: 0 auto; }
figcaption b { color: var(--ink); }
@media (max-width: 700px) {
  thead { display: none; }
  tr { display: block; border: 1px solid var(--line); border-radius: .5rem;
    padding: .4rem .75rem; margin-bottom: .75rem; }
  td { display: grid; grid-template-columns: 5.6rem 1fr; border: 0; padding: .2rem 0; }
  td::before { content: attr(data-name); color: var(--soft); font-size: .82rem; }
  .claims td:nth-child(3) { white-space: normal; }
}
@media print {
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
}
"""
