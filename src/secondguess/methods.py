"""Decoding methods by name: ``ar``, ``ngram``, ``eagle3.1``, ``pr``, with settings if wanted (``pr:m=0,budget=24``).

``hass`` and ``hass+pr`` draft as ``eagle3.1`` and ``pr`` do; their drafters were trained otherwise. ``drafter=FOLDER``
is a setting too, so that several drafters can be compared in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from secondguess.config import DrafterConfig, Reconsider, SecondLook, TreeConfig
from secondguess.errors import UserError, did_you_mean, require
from secondguess.fields import read_value

if TYPE_CHECKING:
    from secondguess.drafter.model import Drafter
    from secondguess.engine.speculate import Speculator
    from secondguess.target.hf import HFTarget

# What a draft tree is shaped by, and which of it each method uses: the rest is refused, and reported as 0.
SHAPE = ("budget", "grow_width", "offer_width", "num_steps", "num_reconsider")
SWITCHES = tuple(field.name for field in fields(Reconsider))
LOOK = {field.name for field in fields(SecondLook)}
SETTINGS = (*SHAPE, "extra_advance", "coupled", "drafter", *SWITCHES)
LEVEL0 = (*SHAPE[:-1], "extra_advance", "coupled", "drafter")
USES = {
    "ar": (),
    "ngram": ("budget", "num_steps"),
    "eagle3.1": LEVEL0,
    "pr": SETTINGS,
    "hass": LEVEL0,
    "hass+pr": SETTINGS,
}
HINTS = get_type_hints(TreeConfig) | get_type_hints(Reconsider) | {"drafter": str}
METHODS = tuple(USES)
WITH_DRAFTER = ("eagle3.1", "pr", "hass", "hass+pr")
SHORT = {"m": "num_reconsider", "k": "offer_width", "gamma": "num_steps"}


@dataclass(frozen=True, slots=True)
class Method:
    """A method as typed, and the tree it drafts.

    ``own_look``: settings of second looks that were chosen; in the others the drafter's training decides. ``drafter``:
    of this method alone, a folder or one that ships.
    """

    typed: str
    name: str
    tree: TreeConfig
    own_look: frozenset[str] = frozenset()
    drafter: str | None = None

    @property
    def has_drafter(self) -> bool:
        return self.name in WITH_DRAFTER

    @property
    def takes_drafter(self) -> bool:
        """Whether it drafts with whatever drafter is given, for it names none itself."""
        return self.has_drafter and self.drafter is None

    @property
    def uses(self) -> tuple[str, ...]:
        return USES.get(self.name, ())

    @property
    def max_depth(self) -> int:
        """Draft tokens of the longest path."""
        return min(self.tree.num_steps, self.tree.max_budget) if "num_steps" in self.uses else 0

    def tree_for(self, config: DrafterConfig) -> TreeConfig:
        """The tree, with second looks of the kind that the drafter has learnt, as far as no other was chosen."""
        if config.second_look is None or not self.tree.num_reconsider:
            return self.tree
        learnt: dict[str, Any] = {k: v for k, v in asdict(config.second_look).items() if k not in self.own_look}
        return replace(self.tree, reconsider=replace(self.tree.reconsider, **learnt))


def parse_method(text: str, tree: TreeConfig) -> Method:
    """Parse ``name[:setting=value,...]``: fields of TreeConfig (``m``, ``k``, ``gamma`` for short) and of Reconsider.

    Raises UserError on an unknown name or setting, one that the method does not use, or a value out of range.
    """
    name, _, settings = text.partition(":")
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{did_you_mean(name, METHODS)}; methods are {', '.join(METHODS)}")
    if "num_reconsider" not in USES[name]:
        tree = replace(tree, num_reconsider=0, reconsider=Reconsider())
    try:
        given = [_setting(name, setting) for setting in filter(None, settings.split(","))]
        changes = dict(given)
        twice = [key for key in changes if sum(key == other for other, _ in given) > 1]
        require(not twice, f"{', '.join(twice)} is set twice")
        drafter = changes.pop("drafter", None)
        require(drafter != "", "drafter needs a folder, or the name of one that ships")
        switches = {key: changes.pop(key) for key in SWITCHES if key in changes}
        whole = replace(tree, **changes, reconsider=replace(tree.reconsider, **switches))
        blind = whole.budget == "auto" and "budget" in USES[name] and name not in WITH_DRAFTER
        require(not blind, f"budget auto needs a drafter's probabilities: give {name} a number ({name}:budget=8)")
    except UserError as error:
        raise UserError(f"method {text!r}: {error}") from error
    chosen = {key for key in LOOK if getattr(tree.reconsider, key) != getattr(Reconsider(), key)}
    return Method(text, name, whole, frozenset(chosen | (switches.keys() & LOOK)), drafter)


def _setting(name: str, text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    key = SHORT.get(key, key)
    if key not in SETTINGS:
        raise UserError(f"unknown setting {key!r}{did_you_mean(key, SETTINGS)}")
    if key not in USES[name]:
        users = ", ".join(method for method in METHODS if key in USES[method])
        raise UserError(f"{name} does not use {key}, only {users} {'do' if ' ' in users else 'does'}")
    return key, read_value(key, HINTS[key], value)


def refuse_unused(methods: Sequence[Method], tree: TreeConfig) -> None:
    """Raises UserError when ``tree`` changes a default that none of the methods uses."""
    for name in SHAPE:
        changed = getattr(tree, name) != getattr(TreeConfig(), name)
        if changed and not any(name in method.uses for method in methods):
            users = ", ".join(method for method in METHODS if name in USES[method])
            raise UserError(f"--{name.replace('_', '-')} needs one of the methods {users}")


def split_methods(text: str) -> list[str]:
    """Split a comma-separated list of methods; a ``setting=value`` part belongs to the method before it."""
    methods: list[str] = []
    for part in text.split(","):
        if methods and ":" in methods[-1] and "=" in part and ":" not in part:
            methods[-1] += f",{part}"
        else:
            methods.append(part.strip())
    return methods


def make_speculator(
    method: Method,
    target: HFTarget,
    drafter: str | Path | Drafter | None,
    num_slots: int,
    num_columns: int,
    loaded: dict[Path, Drafter] | None = None,
) -> Speculator:
    """The speculator of a method. ``drafter`` and ``loaded``: see ``open_drafter``, whose errors it raises."""
    from secondguess.engine.ngram import Ngram
    from secondguess.engine.speculate import Plain

    if method.name == "ar":
        return Plain()
    if method.name == "ngram":
        return Ngram(method.tree)
    from secondguess.drafter.adaptive import AdaptiveSpeculator
    from secondguess.drafter.cost_file import find_costs
    from secondguess.drafter.replayed import ReplayedSpeculator, is_static
    from secondguess.drafter.speculator import EagleSpeculator
    from secondguess.engine.graphs import usable
    from secondguess.engine.policy import Auto

    network = open_drafter(method, target, drafter, loaded, num_columns)
    tree = method.tree_for(network.config)
    if tree.budget != "auto":
        kind = ReplayedSpeculator if usable(target.spec.device) and is_static(tree) else EagleSpeculator
        return kind(network, tree, num_slots, num_columns)
    policy = Auto(tree, find_costs(target, network, tree, num_slots))
    return AdaptiveSpeculator(network, tree, num_slots, num_columns, policy)


def open_drafter(
    method: Method,
    target: HFTarget,
    drafter: str | Path | Drafter | None,
    loaded: dict[Path, Drafter] | None = None,
    context: int | None = None,
) -> Drafter:
    """The network of a method, the one that it names itself before any other. ``drafter``: a folder, the name of one
    that ships, or a network that is loaded already; None takes the one that ships for the method.

    ``loaded``: drafters of this target by folder, for methods that share them; a new one is added. ``context``: how
    many tokens a text may have, by default as many as ``LLM`` allows.
    Raises UserError when there is no such drafter, or it does not fit the target or the method.
    """
    from secondguess.drafter.checkpoint import tap_for
    from secondguess.drafter.shipped import find_drafter

    drafter = method.drafter or drafter
    if drafter is None or isinstance(drafter, str | Path):
        folder = find_drafter(drafter, method.name, target.embedding)
        loaded = {} if loaded is None else loaded
        if folder not in loaded:
            loaded[folder] = packed_for_inference(load_examined(folder, target, context))
        network, name = loaded[folder], f"drafter {folder}"
    else:
        network, name = drafter, "this drafter"
        tap_for(network, target)
    check_network(method, network.config, name)
    return network


def check_network(method: Method, config: DrafterConfig, name: str) -> None:
    """Raises UserError when a method cannot draft with a drafter (whose ``name`` the message gives)."""
    tree = method.tree_for(config)
    if tree.num_reconsider and tree.reconsider.query_slot == "self_query" and not config.has_self_query:
        raise UserError(f"{name} has no self-query, so it cannot reconsider: use eagle3.1 or a pr drafter")
    if tree.offer_width > config.draft_vocab_size:
        raise UserError(f"offer_width must be at most {config.draft_vocab_size}, the vocabulary of {name}")


def load_examined(folder: Path, target: HFTarget, context: int | None = None) -> Drafter:
    """A checkpoint; the log is warned of what does not fit. ``context``: see ``open_drafter``."""
    from secondguess.drafter.checkpoint import open_checkpoint
    from secondguess.drafter.checks import examine, warn

    checkpoint = open_checkpoint(folder, target)
    warn(folder, examine(checkpoint, target.facts, target.embedding, context))
    return checkpoint.drafter


def packed_for_inference(drafter: Drafter) -> Drafter:
    """The same one, which cannot be trained any more: on the CPU in compiled code, where there is some."""
    from secondguess.drafter.native import native_block
    from secondguess.target.linear import can_pack, exact_form, pack_linears

    if can_pack(drafter):
        form = exact_form(drafter)
        drafter.native = native_block(drafter, form)
        pack_linears(drafter, form)
    return drafter
