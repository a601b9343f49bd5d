"""What the fields of a config say of their values: checked, and read from text, in one place."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from secondguess.errors import UserError, did_you_mean, require

KINDS: dict[type, type | tuple[type, ...]] = {bool: bool, int: int, float: (int, float)}
NAMES = {bool: "true or false", int: "a whole number", float: "a number"}

hints_of = cache(get_type_hints)


def choices(cls: type) -> dict[str, tuple[str, ...]]:
    """Allowed values of the fields that are one of a few words."""
    return {name: get_args(hint) for name, hint in hints_of(cls).items() if get_origin(hint) is Literal}


def check_choices(config: object) -> None:
    """Raises UserError when a field that is one of a few words holds another."""
    for name, words in choices(type(config)).items():
        value = getattr(config, name)
        wrong = f"{name} must be one of {', '.join(words)}, got {value!r}{did_you_mean(str(value), words)}"
        require(value in words, wrong)


def alternatives(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a hint asks for, and the values that may stand in its place: of ``int | None`` int and (None,)."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, ()
    first, *others = get_args(hint)
    return first, tuple(value for other in others for value in get_args(other) or (None,))


def check_numbers(config: object) -> None:
    """Raises UserError when a field that is a number, or true or false, holds something else."""
    for name, hint in hints_of(type(config)).items():
        value, (kind, instead) = getattr(config, name), alternatives(hint)
        if kind in KINDS and value not in instead:
            # Python's bool is an int, too, but budget=True is a mistake.
            fits = type(value) is bool if kind is bool else isinstance(value, KINDS[kind]) and type(value) is not bool
            require(fits, f"{name} must be {named(hint)}, got {value!r}", name)


def named(hint: Any) -> str:
    """What a number's hint asks for, in words; None is not told of."""
    kind, instead = alternatives(hint)
    return " or ".join([NAMES[kind], *(value for value in instead if value is not None)])


def read_value(name: str, hint: Any, text: str) -> Any:
    """``text`` as a value of the field ``name``: a number, ``true`` or ``false``, a word, ``none`` if it may be None.

    Words are not checked: the config does that. Raises UserError when the text is of another type.
    """
    kind, instead = alternatives(hint)
    for value in instead:
        if text == ("none" if value is None else value):
            return value
    if kind is bool:
        require(text in ("true", "false"), f"{name} must be {named(hint)}, got {text!r}")
        return text == "true"
    if kind is int:
        require(text.removeprefix("-").isdecimal(), f"{name} must be {named(hint)}, got {text!r}")
        require(text.isdecimal() and len(text) < 10, f"{name} must be in [0, 10^9), got {text}")
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{name} must be {named(hint)}, got {text!r}") from None
    return text
