"""What the fields of a config say of their values: checked, and read from text, in one place."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


def check_numbers(config: object) -> None:
    """Raises UserError when a field that is a number, or true or false, holds something else."""
    for name, hint in hints_of(type(config)).items():
        value, optional = getattr(config, name), NoneType in get_args(hint)
        kind = get_args(hint)[0] if optional else hint
        if kind in KINDS and not (optional and value is None):
            # Python's bool is an int, too, but budget=True is a mistake.
            fits = type(value) is bool if kind is bool else isinstance(value, KINDS[kind]) and type(value) is not bool
            require(fits, f"{name} must be {NAMES[kind]}, got {value!r}")


def read_value(name: str, hint: Any, text: str) -> Any:
    """``text`` as a value of the field ``name``: a number, ``true`` or ``false``, a word, ``none`` if it may be None.

    Words are not checked: the config does that. Raises UserError when the text is of another type.
    """
    if NoneType in get_args(hint):
        return None if text == "none" else read_value(name, get_args(hint)[0], text)
    if hint is bool:
        require(text in ("true", "false"), f"{name} must be true or false, got {text!r}")
        return text == "true"
    if hint is int:
        require(text.isdecimal() and len(text) < 10, f"{name} must be a whole number, got {text!r}")
        return int(text)
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{name} must be a number, got {text!r}") from None
    return text
