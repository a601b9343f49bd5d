"""The report in Markdown."""

from __future__ import annotations

from pathlib import PurePath

from secondguess.reproduce.layout import Chapter, Grid, Number, Report


def markdown(report: Report) -> str:
    lines = [f"# {report.title}", "", report.passport, ""]
    for paragraph in report.lead:
        lines += [paragraph, ""]
    for chapter in report.chapters:
        lines += chapter_lines(chapter)
    if report.notes:
        lines += ["## Where this contradicts the paper", "", report.held, ""]
        lines += [f"{number}. {note}" for number, note in enumerate(report.notes, 1)]
    return "\n".join(lines).rstrip() + "\n"


def chapter_lines(chapter: Chapter) -> list[str]:
    lines = [f"## {chapter.name}: {chapter.title}", "", chapter.about, ""]
    for grid in chapter.grids:
        lines += [f"**{grid.title}**", "", *grid_lines(grid), ""]
        lines += [f"- `-` not measured: {reason}" for reason in grid.reasons] + [""] * bool(grid.reasons)
    for name in chapter.pictures:
        lines += [f"![{PurePath(name).stem}]({name})", ""]
    return lines


def grid_lines(grid: Grid) -> list[str]:
    head = ["", "", *grid.columns]
    rule = ["---", "---", *["---:"] * len(grid.columns)]
    rows = [[line.label, line.source, *map(field, line.fields)] for line in grid.lines]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def field(numbers: list[Number]) -> str:
    return " / ".join(map(number_text, numbers))


def number_text(number: Number) -> str:
    text = f"{number.text} [{number.interval}]" if number.interval else number.text
    return f"**{text}** ({number.note})" if number.note else text
