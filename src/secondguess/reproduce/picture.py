"""A draft, step by step, as a picture: which nodes a forward takes, and which of the step before it looks at again.

One SVG with a frame per forward of the drafter, and one for the verdict. On its own it shows them in turn, over and
over; a page may let its reader choose, and give the colours of ink and page (--ink, --page).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap

from secondguess.bench.steps import Look
from secondguess.engine.cycle import CycleTrace

COLUMN, ROW, LEFT, TOP, FOOT = 112, 26, 24, 72, 16
MIN_WIDTH, CAPTION = 860, 120  # pixels; characters of a line
PIECE = 11  # characters of a token that are shown
SECONDS = 3  # that a frame is shown
STYLE = (
    "svg.steps{font:11px system-ui,sans-serif;color:var(--ink,#1b1b1b);--back:var(--page,#fff);background:var(--back)}"
    "@media(prefers-color-scheme:dark){svg.steps{color:var(--ink,#e6e6e6);--back:var(--page,#16181b)}}"
    # A label's outline in the colour of the page hides the lines behind it.
    "svg.steps text{fill:currentColor;paint-order:stroke;stroke:var(--back);stroke-width:4px;stroke-linejoin:round}"
    "svg.steps .c{font-weight:600;font-size:12px}svg.steps .old{opacity:.6}"
    "svg.steps line{stroke:currentColor;opacity:.35}svg.steps circle{fill:currentColor}"
    "svg.steps .new{fill:#2f7fd0}svg.steps .taken{fill:#2a9d4a}"
    "svg.steps .ring{fill:none;stroke:#e0662f;stroke-width:2.5}svg.steps .again{fill:#e0662f;font-size:10px}"
)

Decode = Callable[[int], str]
Place = tuple[float, float]


def page(steps: Sequence[Sequence[Look]], trace: CycleTrace, decode: Decode) -> str:
    """``steps``: the looks of each forward, the extend pass first; ``trace``: what became of the draft."""
    first = [look for step in steps for look in step if look.level == 0]
    taken = accepted(first, trace)
    at = places([*first, *(look for look in taken if look not in first)])
    width = max(MIN_WIDTH, LEFT + COLUMN * (1 + max(x for x, _ in at.values())))
    height = TOP + ROW * (1 + max(y for _, y in at.values())) + FOOT
    frames = [forward(number, steps, at, decode) for number in range(len(steps))]
    frames.append(verified(first, taken, trace, at, decode))
    body = "".join(f'<g class="frame">{frame}</g>' for frame in frames)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
    return (
        f'<svg class="steps" xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
        f"<title>A draft, step by step</title><style>{STYLE}{in_turn(len(frames))}</style>{body}</svg>\n"
    )


def in_turn(count: int) -> str:
    """Each frame for a while. On paper, and for readers who want no motion, the last one."""
    delays = (f"svg.steps .frame:nth-of-type({i + 1}){{animation-delay:{SECONDS * i}s}}" for i in range(count))
    return (
        f"@keyframes turn{{0%{{visibility:visible}}{100 / count:.3f}%,100%{{visibility:hidden}}}}"
        f"svg.steps .frame{{visibility:hidden;animation:turn {SECONDS * count}s step-end infinite}}{''.join(delays)}"
        "@media print,(prefers-reduced-motion:reduce)"
        "{svg.steps .frame{animation:none}svg.steps .frame:last-of-type{visibility:visible}}"
    )


def accepted(first: Sequence[Look], trace: CycleTrace) -> list[Look]:
    """The root and the accepted nodes: looks of ``first``, or new ones for nodes that no forward took."""
    tree, count = trace.tree, int(trace.verdict.num_emitted_R[0])
    known = {(look.parent, look.token): look for look in first}
    taken = [first[0]]
    for node in trace.verdict.path_RD[0, 1:count].tolist():
        above, token, level = taken[-1], int(tree.tokens_RN[0, node]), int(tree.levels_RN[0, node])
        unseen = Look(-2 - len(taken), above.node, token, above.depth + 1, level, -1, 0.0)
        taken.append(known.get((above.node, token), unseen))
    return taken


def places(nodes: Sequence[Look]) -> dict[int, Place]:
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


def forward(number: int, steps: Sequence[Sequence[Look]], at: dict[int, Place], decode: Decode) -> str:
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
    first: Sequence[Look], taken: Sequence[Look], trace: CycleTrace, at: dict[int, Place], decode: Decode
) -> str:
    """The last frame: what the target took."""
    levels, count = trace.tree.levels_RN[0].tolist(), len(taken)
    guesses = list(zip(taken[1:], trace.verdict.path_RD[0, 1:count].tolist(), strict=True))
    said = [said_of(look.token, decode) + (" (a second guess)" if levels[node] else "") for look, node in guesses]
    rings = "".join(ring(at[look.node]) for look, node in guesses if levels[node])
    bonus = said_of(int(trace.verdict.tokens_RD[0, count - 1]), decode)
    size = int(trace.tree.valid_RN[0].sum()) - 1
    title = f"The target checks {size} guesses and takes {', '.join(said) or 'none'}; its own next token is {bonus}"
    looks = [*first, *(look for look in taken if look not in first)]
    return caption(title) + tree(looks, at, decode, {look.node: "taken" for look in taken}) + rings


def tree(looks: Sequence[Look], at: dict[int, Place], decode: Decode, classes: dict[int, str]) -> str:
    lines, marks = [], []
    for look in looks:
        x, y = xy(at[look.node])
        if look.parent in at:
            px, py = xy(at[look.parent])
            lines.append(f'<line x1="{px}" y1="{py}" x2="{x}" y2="{y}"/>')
        kind = classes.get(look.node, "old")
        radius = 3 if kind == "old" else 4.5
        label = escape(shortened(decode(look.token)))
        marks.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"/>')
        marks.append(f'<text class="{kind if kind == "old" else ""}" x="{x + 9}" y="{y + 4}">{label}</text>')
    return "".join(lines + marks)


def again(look: Look, at: dict[int, Place], decode: Decode) -> str:
    """A second look, and below the node's own token what it finds most probable to come next."""
    x, y = xy(at[look.node])
    guess = f"\u2192 {escape(shortened(decode(look.guess)))} {look.confidence:.0%}"
    return ring(at[look.node]) + f'<text class="again" x="{x + 9}" y="{y + 15}">{guess}</text>'


def ring(place: Place) -> str:
    x, y = xy(place)
    return f'<circle class="ring" cx="{x}" cy="{y}" r="7"/>'


def caption(text: str) -> str:
    lines = enumerate(wrap(text, CAPTION))
    return "".join(f'<text class="c" x="{LEFT - 10}" y="{16 + 16 * i}">{escape(line)}</text>' for i, line in lines)


def xy(place: Place) -> Place:
    column, row = place
    return LEFT + COLUMN * column, TOP + ROW * row


def said_of(token: int, decode: Decode) -> str:
    return f'"{shortened(decode(token))}"'


def shortened(piece: str) -> str:
    text = repr(piece)[1:-1].replace(" ", "\u2423")
    return text if len(text) <= PIECE else text[: PIECE - 1] + "\u2026"
