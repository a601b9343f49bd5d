"""Decoding methods by name: ``ar``, ``ngram``, ``eagle3.1``, ``pr``, with settings if wanted (``pr:m=0,budget=24``)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.config import TreeConfig
from secondguess.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from secondguess.engine.speculate import Speculator
    from secondguess.target.hf import HFTarget

METHODS = ("ar", "ngram", "eagle3.1", "pr")
SHORT = {"m": "num_reconsider", "k": "offer_width", "gamma": "num_steps"}


@dataclass(frozen=True, slots=True)
class Method:
    """A method as typed, and the tree it drafts."""

    typed: str
    name: str
    tree: TreeConfig


def parse_method(text: str, tree: TreeConfig) -> Method:
    """Parse ``name[:setting=value,...]``; settings are TreeConfig fields (``m``, ``k``, ``gamma`` for short).

    Raises UserError on an unknown name or setting, or a value out of range.
    """
    name, _, settings = text.partition(":")
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{did_you_mean(name, METHODS)}; methods are {', '.join(METHODS)}")
    known = [field.name for field in fields(TreeConfig)]
    changes: dict[str, int] = {} if name == "pr" else {"num_reconsider": 0}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        key = SHORT.get(key, key)
        if key not in known:
            raise UserError(f"method {text!r}: unknown setting {key!r}{did_you_mean(key, known)}")
        if not value.isdecimal():
            raise UserError(f"method {text!r}: {key} must be a whole number, got {value!r}")
        changes[key] = int(value)
    if name != "pr" and changes["num_reconsider"]:
        raise UserError(f"method {text!r}: only pr reconsiders")
    return Method(text, name, replace(tree, **changes))


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
    method: Method, target: HFTarget, drafter: str | Path | None, num_slots: int, num_columns: int
) -> Speculator:
    """The speculator of a method. ``drafter``: a folder or the name of one that ships; None takes the method's own."""
    from secondguess.engine.ngram import Ngram
    from secondguess.engine.speculate import Plain

    if method.name == "ar":
        return Plain()
    if method.name == "ngram":
        return Ngram(method.tree)
    from secondguess.drafter.checkpoint import load_drafter
    from secondguess.drafter.shipped import find_drafter
    from secondguess.drafter.speculator import EagleSpeculator
    from secondguess.target.linear import can_pack, pack_linears

    folder = find_drafter(drafter or method.name, target.embedding)
    loaded = load_drafter(folder, target.embedding, target.spec.num_layers)
    if method.tree.num_reconsider and not loaded.config.reconsideration:
        raise UserError(f"drafter {folder} has no self-query, so it cannot reconsider: use eagle3.1 or a pr drafter")
    if can_pack(loaded):
        pack_linears(loaded)
    return EagleSpeculator(loaded, method.tree, num_slots, num_columns)
