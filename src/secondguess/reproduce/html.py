"""The report as one HTML file that needs no other and no script: plots inside, light or dark, fit for a phone."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from secondguess.reproduce.layout import Chapter, Grid, Line, Number, Report

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1b1b; --soft: #6b6b6b; --line: #ddd; --paper: #f5f3ec;
  --differs: #ffe3d6; --edge: #d9541e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --ink: #e6e6e6; --soft: #9aa0a6; --line: #34383d; --paper: #212327; --differs: #4a2a1c; }
  img.plot { filter: invert(.9) hue-rotate(180deg); }
}
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { margin-top: 2.5rem; font-size: 1.2rem; }
h3 { margin-bottom: .3rem; font-size: 1rem; } code, small, .soft { color: var(--soft); } small { white-space: nowrap; }
nav a { display: inline-block; margin-right: 1rem; } a { color: inherit; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; }
th { font-weight: 600; }
th:first-child { text-align: left; min-width: 7rem; max-width: 12rem; background: var(--page);
  position: sticky; left: 0; }
tr:first-child th { white-space: nowrap; }
td span, td small { display: block; white-space: nowrap; }
tr.paper, tr.paper th:first-child { background: var(--paper); } tr.paper th { font-weight: 400; }
.differs { background: var(--differs); border-left: 3px solid var(--edge); padding-left: .3rem; }
.key { display: inline-block; padding: 0 .4rem; margin-right: 1rem; } .key.paper { background: var(--paper); }
img.plot { display: block; margin-top: 1rem; width: 100%; max-width: 46rem; height: auto; }
svg.steps { max-width: none; height: auto; }
.film input { margin: 0 .4rem .6rem 0; } .film .wide svg.steps .frame { animation: none; visibility: hidden; }
ol.notes li { margin-bottom: .6rem; } ul.reasons { margin: .3rem 0; padding-left: 1.2rem; font-size: .85rem; }
"""
MAX_FRAMES = 17  # of a film: a forward per draft step, of which replay allows 16, and the verdict
CHOSEN = "\n".join(
    f".film input:nth-of-type({i}):checked ~ .wide svg.steps .frame:nth-of-type({i}) {{ visibility: visible; }}"
    for i in range(1, MAX_FRAMES + 1)
)
KEY = (
    '<p><span class="key">measured here, with its 95 % interval</span><span class="key paper">from the paper</span>'
    '<span class="key differs">contradicts the paper</span><span class="key">- not measured</span></p>'
)


def html(report: Report, folder: Path) -> str:
    """``folder``: where the pictures lie."""
    places = {anchor(chapter): chapter.name for chapter in report.chapters}
    places |= {"differences": "Differences"} if report.notes else {}
    links = "".join(f'<a href="#{place}">{escape(name)}</a>' for place, name in places.items())
    passport = escape(report.passport.replace("`", ""))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}{CHOSEN}</style></head><body>\n"
        f"<h1>{escape(report.title)}</h1>\n"
        + "".join(f"<p>{escape(paragraph)}</p>\n" for paragraph in report.lead)
        + f"{KEY}\n<nav>{links}</nav>\n"
        + "\n".join(section(chapter, folder) for chapter in report.chapters)
        + contradictions(report)
        + f'\n<p class="soft">{passport}</p>\n</body></html>\n'
    )


def contradictions(report: Report) -> str:
    if not report.notes:
        return ""
    notes = "".join(f'<li id="note{i}">{escape(note)}</li>' for i, note in enumerate(report.notes, 1))
    title = '<h2 id="differences">Where this contradicts the paper</h2>'
    return f'\n{title}<p>{escape(report.held)}</p><ol class="notes">{notes}</ol>'


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
    spread = any(number.interval for numbers in line.fields for number in numbers)
    fields = "".join(f"<td>{''.join(number_box(number, spread) for number in numbers)}</td>" for numbers in line.fields)
    return f'<tr class="{line.source}"><th scope="row">{escape(label)}</th>{fields}</tr>'


def number_box(number: Number, spread: bool) -> str:
    """``spread``: others of the row have intervals, so that this number needs the room of one."""
    interval = f"<small>{escape(number.interval) or '&nbsp;'}</small>" if spread else ""
    link = f' <a href="#note{number.note}">({number.note})</a>' if number.note else ""
    differs = ' class="differs"' if number.note else ""
    return f'<div{differs} title="{escape(number.more)}"><span>{escape(number.text)}{link}</span>{interval}</div>'


def picture(path: Path) -> str:
    """A film, or a plot: these are black on white, and turned over in the dark."""
    if path.suffix == ".svg":
        return film(path.read_text(encoding="utf-8"), path.parent.name)
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="plot" alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def film(svg: str, name: str) -> str:
    """The frames of ``picture`` in the page's colours. Buttons choose one; alone, the picture shows all in turn."""
    buttons = "".join(
        f'<input type="radio" name="{escape(name)}" aria-label="frame {i}"{" checked" if i == 1 else ""}>'
        for i in range(1, 1 + svg.count('<g class="frame">'))
    )
    how = "<small>Step with the buttons, or with the arrow keys once one is chosen.</small>"
    return f'<div class="film">{buttons}{how}<div class="wide">{svg}</div></div>'
