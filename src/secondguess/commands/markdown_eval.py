"""An eval in Markdown: a row per method, a column per task and group, a table per budget."""

from __future__ import annotations

from collections.abc import Sequence

from secondguess.bench.best import duels
from secondguess.bench.evaluation import Evaluation, Groups, Row
from secondguess.commands.show_eval import said_of


def markdown(evaluation: Evaluation, against: str, groups: Groups) -> str:
    """Over all prompts, and again without those that loop if some do; then PR's best and EAGLE-3.1's, if chosen."""
    rows, texts = evaluation.rows(against, groups), evaluation.runs[0].tallies
    looping = sum(text.looping for text in texts)
    kinds = {"": f"{len(texts)} prompts"}
    if looping:
        kinds["_nonlooping"] = f"without the {looping} of {len(texts)} prompts that loop"
    blocks = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        same = [row for row in rows if row["budget"] == budget]
        for kind, prompts in kinds.items():
            title = f"**T = {evaluation.temperature:g}, budget {budget}, {prompts}**"
            meaning = f"tau, gain over {against} in %, each with its 95 % interval over prompts"
            blocks += [f"{title}: {meaning}", table(same, kind)]
    return "\n\n".join([*blocks, *map(said_of, duels(evaluation))])


def table(rows: Sequence[Row], kind: str) -> str:
    """``kind``: what the names of the fields to show end in."""
    columns, methods = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "method"))
    cells = {(row["method"], row["task"]): cell(row, kind) for row in rows}
    head = [["", *columns], ["---"] * (len(columns) + 1)]
    body = [[method, *(cells[method, column] for column in columns)] for method in methods]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *body])


def cell(row: Row, kind: str) -> str:
    tau = estimate(row, f"acceptance_length{kind}", "{:.2f}")
    gain = estimate(row, f"gain{kind}", "{:+.1f}", scale=100)
    return ", ".join(filter(None, (tau, gain))) or "-"


def estimate(row: Row, name: str, form: str, scale: int = 1) -> str:
    if row[name] is None:
        return ""
    value, low, high = (form.format(scale * row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"
