"""The report of ``secondguess reproduce``: a folder with HTML, Markdown, CSV, JSON and plots."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from secondguess.atomic import replacing
from secondguess.bench.paper import PAPER
from secondguess.commands.record import passport, write_json
from secondguess.commands.reproduce_steps import PICTURE
from secondguess.reproduce.cells import MIN_UNITS
from secondguess.reproduce.html import html
from secondguess.reproduce.layout import Chapter, Report, chapters, summary
from secondguess.reproduce.markdown import markdown
from secondguess.reproduce.outcome import Outcome
from secondguess.reproduce.prose import differences, headline, recovery, tally
from secondguess.reproduce.world import World, figures_folder

FIGURES = ("figure1a.png", "figure1b.png")  # of a diagnosis


def write_report(world: World, outcomes: Sequence[Outcome], complaints: Sequence[str], costs: Chapter) -> Report:
    """``costs``: the chapter of what a GPU does."""
    folder = world.args.out
    rows = [row for o in outcomes for row in o.rows()]
    write_json(folder / "cells.json", world.record, "rows", rows)
    with replacing(folder / "cells.csv") as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    report = make_report(world, outcomes, complaints, draw(outcomes, folder), costs)
    for name, text in (("report.md", markdown(report)), ("report.html", html(report, folder))):
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return report


def make_report(
    world: World,
    outcomes: Sequence[Outcome],
    complaints: Sequence[str],
    pictures: Mapping[str, list[str]],
    costs: Chapter,
) -> Report:
    lead = [tally(outcomes), headline(outcomes), recovery(outcomes), *complaints, methods_paragraph(world)]
    parts = [summary(outcomes), *chapters(outcomes, pictures), coforwarding(pictures), costs]
    return Report(
        title=f"The paper's tables (arXiv 2611.05724) on {world.args.target}",
        passport=passport(world.record),
        lead=[paragraph for paragraph in lead if paragraph],
        chapters=[chapter for chapter in parts if chapter],
        notes=differences(outcomes),
        held=held_different_paragraph(world),
    )


def coforwarding(pictures: Mapping[str, list[str]]) -> Chapter | None:
    """What the paper draws in its Figures 2 and 3, from a draft that was really made."""
    if not pictures.get("steps"):
        return None
    about = (
        "A draft of PR as it happened: of the first prompts' drafts, the one with the most accepted second guesses. "
        "Each forward takes the new nodes (blue) and, in the same batch, second looks at nodes of the forward before "
        "(ringed, with what the second look finds most probable next); green is what the target took, ringed if it was "
        "a second guess."
    )
    return Chapter("Figures 2 and 3", "Co-forwarding, step by step", about, [], pictures["steps"])


def methods_paragraph(world: World) -> str:
    a = world.args
    return (
        f"Tau comes from replay: drafters run over texts that plain decoding wrote once, of at most {a.limit} prompts "
        f"a task and {a.max_new_tokens} new tokens. Speedups and milliseconds come from live decoding of "
        f"{a.live_limit} prompts a task (of {MIN_UNITS} batches at least, where there are prompts enough), on which "
        "plain decoding and all methods take turns; times that are divided by each other are of one such session. "
        "Prompts whose plain text repeats itself (over half of its 4-grams occurred in it before) are left out; "
        "with_loops in cells.json is with them. Intervals are 95 %: bootstrap over prompts (all turns of a "
        f"conversation together) or batches (none for fewer than {MIN_UNITS} a task), and Wilson's of shares. A "
        "gain or share contradicts the paper if its interval lies on the other side of no difference, or wholly "
        "outside of half to twice the paper's."
    )


def held_different_paragraph(world: World) -> str:
    a, machine = world.args, world.record["machine"]
    where = machine["cpu"] if world.target.spec.device.type == "cpu" else ", ".join(machine["gpus"])
    return (
        f"Held different in all of these: the target, {a.target} (the paper's stands at each table); drafters of "
        f"another training; texts, of at most {a.limit} prompts a task ({a.live_limit} for time) and "
        f"{a.max_new_tokens} new tokens; the machine, {a.dtype} on {where}."
    )


def draw(outcomes: Sequence[Outcome], folder: Path) -> dict[str, list[str]]:
    """Make plots of gains, find those of diagnoses: names of files in ``folder`` by table."""
    from secondguess.commands.plot_gains import draw_gains
    from secondguess.commands.plots import save

    pictures: dict[str, list[str]] = {}
    for table, group in groupby(outcomes, lambda o: o.cell.place.table):
        part = list(group)
        if figure := draw_gains(part, PAPER[table].title):
            save(figure, folder, f"gains-{table}")
            pictures[table] = [f"gains-{table}.png"]
        if table == "figure1":
            measured = [m for o in part if o.value for m in o.cell.ours]
            folders = [figures_folder(m) for m in dict.fromkeys(measured)]
            for place, names in ((table, FIGURES), ("steps", (PICTURE,))):
                paths = [f"{each}/{name}" for each in folders for name in names]
                pictures[place] = [path for path in paths if (folder / path).is_file()]
    return pictures
