"""What ``eval --sweep`` compares: every reading of what the paper leaves open, its controls, and other tree shapes."""

from __future__ import annotations

from typing import get_type_hints

from secondguess.config import Reconsider
from secondguess.fields import choices
from secondguess.methods import SWITCHES

BASELINE, OTHER = "pr", "eagle3.1"
# The paper's Table 4: the rows of second looks spent on width instead. Without either it is EAGLE-3.1's tree.
CONTROLS = ("pr:m=0", "pr:m=0,extra_advance=3", "pr:m=0,grow_width=9")
NUMBERS = {
    "threshold": ("0.5", "0.7", "0.9"),
    "reconsider_steps": ("1", "2", "4"),
    "reconsider_cap": ("3", "6", "12"),  # 3 a draft is how the paper's Table 9 can be read
}
SECOND_LOOKS = ("1", "2", "4", "6")  # m, of which the paper's 3 is the default
# Both methods get the same ones, so that neither is compared at the other's best.
SHAPES = {"offer_width": ("9", "12", "16"), "grow_width": ("9", "12"), "num_steps": ("5", "10")}


def sweep(offer_width: int) -> list[str]:
    """Method strings, among them EAGLE-3.1 and PR as they are."""
    shaped = {
        name: [f"{name}:{field}={size}" for field, sizes in SHAPES.items() for size in sizes]
        for name in (OTHER, BASELINE)
    }
    return [OTHER, *shaped[OTHER], BASELINE, *shaped[BASELINE], *second_looks(offer_width)]


def second_looks(offer_width: int) -> list[str]:
    """PR with other second looks, and with none. One that offers ``offer_width`` children is the default."""
    switches = [f"{BASELINE}:{name}={value}" for name in SWITCHES for value in values(name, offer_width)]
    return switches + [f"{BASELINE}:m={m}" for m in SECOND_LOOKS] + list(CONTROLS)


def values(name: str, offer_width: int) -> list[str]:
    """Of a switch, but for its default."""
    default = getattr(Reconsider(), name)
    if name == "refined_offer_width":
        return [str(width) for width in range(1, offer_width)]
    if get_type_hints(Reconsider)[name] is bool:
        return [str(not default).lower()]
    words = choices(Reconsider).get(name) or NUMBERS[name]
    return [word for word in words if word != default]
