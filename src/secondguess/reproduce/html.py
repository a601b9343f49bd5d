"""The report as one HTML file that needs no other: plots inside, light or dark, fit for a phone."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from secondguess.reproduce.layout import Chapter, Grid, Line, Report, Shown

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1b1b; --soft: #6b6b6b; --line: #ddd; --paper: #f5f3ec;
  --differs: #ffe3d6; --edge: #d9541e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --ink: #e6e6e6; --soft: #9aa0a6; --line: #34383d; --paper: #212327; --differs: #4a2a1c; }
  img.plot { filter: invert(1) hue-rotate(180deg); }
}
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
h3 { margin-bottom: .3rem; font-size: 1rem; } code, small, .soft { color: var(--soft); } small { white-space: nowrap; }
nav a { display: inline-block; margin-right: 1rem; } a { color: inherit; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { font-weight: 600; } th:first-child { text-align: left; min-width: 8rem; }
td span, td small { display: block; white-space: nowrap; }
tr.paper { background: var(--paper); } tr.paper th { font-weight: 400; }
.differs { background: var(--differs); border-left: 3px solid var(--edge); padding-left: .3rem; }
img.plot { width: 100%; max-width: 46rem; height: auto; } svg.steps { max-width: none; height: auto; }
ol.notes li { margin-bottom: .6rem; } ul.reasons { margin: .3rem 0; padding-left: 1.2rem; font-size: .85rem; }
"""


def html(report: Report, folder: Path) -> str:
    """``folder``: where the pictures lie."""
    links = "".join(f'<a href="#{anchor(chapter)}">{escape(chapter.name)}</a>' for chapter in report.chapters)
    notes = "".join(f'<li id="note{i}">{escape(note)}</li>' for i, note in enumerate(report.notes, 1))
    passport = escape(report.passport.replace("`", ""))
    differs = f'<h2>Where this contradicts the paper</h2><ol class="notes">{notes}</ol>' if notes else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{escape(report.title)}</h1>\n"
        + "".join(f"<p>{escape(paragraph)}</p>\n" for paragraph in report.lead)
        + f"<nav>{links}</nav>\n{differs}\n"
        + "\n".join(section(chapter, folder) for chapter in report.chapters)
        + f'\n<p class="soft">{passport}</p>\n</body></html>\n'
    )


def anchor(chapter: Chapter) -> str:
    return chapter.name.lower().replace(" ", "")


def section(chapter: Chapter, folder: Path) -> str:
    title = f'<h2 id="{anchor(chapter)}">{escape(chapter.name)}: {escape(chapter.title)}</h2>'
    pictures = "".join(picture(folder / name) for name in chapter.pictures)
    return f"{title}<p>{escape(chapter.about)}</p>{''.join(map(table, chapter.grids))}{pictures}"


def table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *grid.columns))
    body = "".join(map(row, grid.lines))
    reasons = "".join(f"<li>not measured: {escape(reason)}</li>" for reason in grid.reasons)
    why = f'<ul class="reasons soft">{reasons}</ul>' if reasons else ""
    return f'<h3>{escape(grid.title)}</h3><div class="wide"><table><tr>{head}</tr>{body}</table></div>{why}'


def row(line: Line) -> str:
    label = f"{line.label} (paper)" if line.source == "paper" else line.label
    fields = "".join(f"<td>{field(numbers)}</td>" for numbers in line.fields)
    return f'<tr class="{line.source}"><th scope="row">{escape(label)}</th>{fields}</tr>'


def field(numbers: Sequence[Shown]) -> str:
    return "".join(map(number, numbers))


def number(shown: Shown) -> str:
    interval = f"<small>{escape(shown.interval)}</small>" if shown.interval else ""
    link = f' <a href="#note{shown.note}">({shown.note})</a>' if shown.note else ""
    differs = ' class="differs"' if shown.note else ""
    return f"<div{differs}><span>{escape(shown.text)}{link}</span>{interval}</div>"


def picture(path: Path) -> str:
    """An SVG of ours takes the page's colours; plots are black on white, and turned over in the dark."""
    if path.suffix == ".svg":
        return f'<div class="wide">{path.read_text(encoding="utf-8")}</div>'
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="plot" alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
