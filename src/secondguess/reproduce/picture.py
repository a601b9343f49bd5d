"""A draft, step by step, as a picture: which nodes a forward takes, and which of the step before it looks at again.

One SVG with a frame per forward of the drafter. Text and lines are in the colour of the page around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap

from secondguess.bench.steps import Look
from secondguess.engine.cycle import CycleTrace

COLUMN, ROW, LEFT, TOP = 104, 17, 24, 54
MIN_WIDTH, CAPTION = 720, 100  # pixels; characters of a line
PIECE = 11  # characters of a token that are shown
STYLE = (
    "svg.steps{font:11px system-ui,sans-serif;color:#1b1b1b}"
    "svg.steps text{fill:currentColor}svg.steps .c{font-weight:600;font-size:12px}svg.steps .old{opacity:.55}"
    "svg.steps line{stroke:currentColor;opacity:.3}svg.steps circle{fill:currentColor}"
    "svg.steps .new{fill:#2f7fd0}svg.steps .ring{fill:none;stroke:#d9541e;stroke-width:2.5}"
    "svg.steps .again{fill:#d9541e}svg.steps .taken{fill:#2a9d4a}"
    "@media(prefers-color-scheme:dark){svg.steps{color:#e6e6e6}}"
)

Decode = Callable[[int], str]


def page(steps: Sequence[Sequence[Look]], trace: CycleTrace, decode: Decode) -> str:
    """``steps``: the looks of each forward, the extend pass first; ``trace``: what became of the draft."""
    at = places([look for step in steps for look in step if look.level == 0])
    width = max(MIN_WIDTH, LEFT + COLUMN * (1 + max(x for x, _ in at.values())))
    height = TOP + ROW * (1 + max(y for _, y in at.values()))
    shown = [frame(number, steps, at, decode) for number in range(len(steps))]
    shown.append(verified(steps, trace, at, decode))
    frames = [f'<g transform="translate(0 {height * i:.0f})">{body}</g>' for i, body in enumerate(shown)]
    size = f'viewBox="0 0 {width} {height * len(frames):.0f}" width="{width}"'
    return (
        f'<svg class="steps" xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
        f"<title>A draft, step by step</title><style>{STYLE}</style>{''.join(frames)}</svg>\n"
    )


def places(nodes: Sequence[Look]) -> dict[int, tuple[float, float]]:
    """Column and row of each node: depth, and the middle of its children's rows; leaves take a row each, in order."""
    children: dict[int, list[int]] = {look.node: [] for look in nodes}
    for look in nodes:
        if look.parent in children:
            children[look.parent].append(look.node)
    depth, rows, free = {look.node: look.depth for look in nodes}, dict[int, float](), 0
    for node in bottom_up(nodes[0].node, children):
        below = [rows[child] for child in children[node]]
        rows[node] = (below[0] + below[-1]) / 2 if below else free
        free += not below
    return {node: (depth[node], row) for node, row in rows.items()}


def bottom_up(node: int, children: dict[int, list[int]]) -> list[int]:
    """Every node after all below it, in the order of their parents' lists."""
    return [below for child in children[node] for below in bottom_up(child, children)] + [node]


def frame(number: int, steps: Sequence[Sequence[Look]], at: dict[int, tuple[float, float]], decode: Decode) -> str:
    """Everything that forwards up to ``number`` took; what this one takes is coloured."""
    looks = [look for step in steps[: number + 1] for look in step if look.level == 0]
    new = {look.node for look in steps[number] if look.level == 0}
    second = [look for look in steps[number] if look.level == 1]
    many = f"{len(new)} new node{'s' * (len(new) != 1)} at level 0"
    beside = f"; beside them, in the same batch, {len(second)} of the nodes before get a second look" if second else ""
    title = f"Forward {number + 1} of {len(steps)}: {many}{beside}"
    if number == 0:
        title = f"Forward 1 of {len(steps)}: the newest token, with the target's own features"
    body = tree(looks, at, decode, dict.fromkeys(new, "new"))
    return caption(title) + body + "".join(again(look, at, decode) for look in second)


def verified(
    steps: Sequence[Sequence[Look]], trace: CycleTrace, at: dict[int, tuple[float, float]], decode: Decode
) -> str:
    """The last frame: what the target took. Accepted leaves have not been forwarded: only the caption names them."""
    looks = [look for step in steps for look in step if look.level == 0]
    count = int(trace.verdict.num_emitted_R[0])
    path = trace.verdict.path_RD[0, 1:count].tolist()
    tokens, levels = trace.tree.tokens_RN[0].tolist(), trace.tree.levels_RN[0].tolist()
    taken, node = {looks[0].node}, looks[0].node
    for token in (tokens[n] for n in path):
        found = next((look.node for look in looks if (look.parent, look.token) == (node, token)), None)
        if found is None:
            break
        taken.add(found)
        node = found
    said = [quoted(decode(tokens[n])) + (" (a second guess)" if levels[n] else "") for n in path]
    bonus = quoted(decode(int(trace.verdict.tokens_RD[0, count - 1])))
    size = int(trace.tree.valid_RN[0].sum()) - 1
    title = f"The target checks {size} guesses and takes {', '.join(said) or 'none'}; its own next token is {bonus}"
    return caption(title) + tree(looks, at, decode, dict.fromkeys(taken, "taken"))


def tree(looks: Sequence[Look], at: dict[int, tuple[float, float]], decode: Decode, classes: dict[int, str]) -> str:
    lines, marks = [], []
    for look in looks:
        x, y = xy(at[look.node])
        if look.parent in at:
            px, py = xy(at[look.parent])
            lines.append(f'<line x1="{px}" y1="{py}" x2="{x}" y2="{y}"/>')
        kind = classes.get(look.node, "old")
        radius = 3 if kind == "old" else 4.5
        label = escape(quoted(decode(look.token)))
        marks.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"/>')
        marks.append(f'<text class="{kind if kind == "old" else ""}" x="{x + 8}" y="{y + 4}">{label}</text>')
    return "".join(lines + marks)


def again(look: Look, at: dict[int, tuple[float, float]], decode: Decode) -> str:
    """A second look, and what it finds most probable after the node."""
    x, y = xy(at[look.node])
    guess = escape(quoted(decode(look.guess)))
    return (
        f'<circle class="ring" cx="{x}" cy="{y}" r="8"/>'
        f'<text class="again" x="{x + 8}" y="{y - 6}" style="fill:#d9541e">\u2192 {guess} {look.confidence:.0%}</text>'
    )


def caption(text: str) -> str:
    lines = enumerate(wrap(text, CAPTION))
    return "".join(f'<text class="c" x="{LEFT - 10}" y="{16 + 16 * i}">{escape(line)}</text>' for i, line in lines)


def xy(place: tuple[float, float]) -> tuple[float, float]:
    column, row = place
    return LEFT + COLUMN * column, TOP + ROW * row


def quoted(piece: str) -> str:
    text = repr(piece)[1:-1].replace(" ", "\u2423")
    return text if len(text) <= PIECE else text[: PIECE - 1] + "\u2026"
