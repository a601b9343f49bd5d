"""Flags made from a config's fields, so that no option is declared twice."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from secondguess.device import DEVICES
from secondguess.errors import UserError
from secondguess.fields import alternatives

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
DTYPES = "float32, float64, bfloat16, float16; of weights alone: int8, int4, on a CPU bfloat16 (default: float32)"


def add_dataclass(parser: ArgumentParser, cls: type[DataclassInstance], only: Collection[str] | None = None) -> None:
    """Add one flag per field of a dataclass: ``grow_width: int = 6`` becomes ``--grow-width INT``, 6 by default.

    The help is the field's ``metadata["help"]``. Types: bool (``--x`` and ``--no-x``), int, float, str, Path, a
    ``Literal``, ``tuple[T, ...]`` (the flag may be repeated) and ``T | None``. Without a default it is required.
    ``only`` names the fields to offer, all by default.
    """
    hints = get_type_hints(cls)
    for field in fields(cls):
        if only is None or field.name in only:
            parser.add_argument(f"--{field.name.replace('_', '-')}", **_kind(hints[field.name]), **_default(field))


def from_args(cls: type[T], args: Namespace, **more: Any) -> T:
    """Build ``cls`` from its flags and from ``more`` fields. Raises ``UserError`` when the class rejects a value."""
    names = {field.name for field in fields(cls)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    try:
        return cls(**{name: value for name, value in given.items() if name in names}, **more)
    except ValueError as error:
        raise UserError(str(error)) from error


def add_target(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="folder, hub id, .gguf file, or smollm2-135m")
    add_trust(parser)


def add_trust(parser: ArgumentParser) -> None:
    what = "run Python code that comes with the target; without it none is run"
    parser.add_argument("--trust-remote-code", action="store_true", help=what)


def add_drafter(parser: ArgumentParser) -> None:
    which = "folder, hub id, or name of one that ships (default: the one named like the method)"
    parser.add_argument("--drafter", help=which)


def add_variables(parser: ArgumentParser) -> None:
    """``template_variables``: pairs of a name and a value."""
    what = "what the chat template is given besides the conversation: enable_thinking=false; may be repeated"
    parser.add_argument(
        "--template-variable",
        dest="template_variables",
        type=variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=what,
    )


def variable(text: str) -> tuple[str, Any]:
    """A name and its value: JSON, else the text as it is."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def add_dtype(parser: ArgumentParser) -> None:
    """What the target computes with, and where."""
    parser.add_argument("--dtype", default="float32", help=DTYPES)
    add_device(parser)


def add_device(parser: ArgumentParser) -> None:
    where = "where models run; auto takes a GPU if there is one (default: auto)"
    parser.add_argument("--device", choices=DEVICES, default="auto", help=where)


def absolute(name: str) -> str:
    """A path of this machine's that holds in another folder too; any other name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def either(kind: type, *words: str) -> Callable[[str], Any]:
    """A type for argparse: one of ``words``, or else a ``kind``."""

    def parse(text: str) -> Any:
        return text if text in words else kind(text)

    parse.__name__ = " or ".join([kind.__name__, *words])  # argparse says "invalid NAME value"
    return parse


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        kind, instead = alternatives(hint)
        words = [value for value in instead if value is not None]
        names = " or ".join([kind.__name__.upper(), *words])
        return {"type": either(kind, *words), "metavar": names} if words else _kind(kind)
    if get_origin(hint) is tuple:
        return {**_kind(parts[0]), "action": "append"}
    if get_origin(hint) is Literal:
        return {"type": type(parts[0]), "choices": parts}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    assert hint in (int, float, str, Path), f"no flag for a field of type {hint}"
    return {"type": hint, "metavar": hint.__name__.upper()}


def _default(field: Field[Any]) -> dict[str, Any]:
    text = field.metadata.get("help", "").replace("%", "%%")
    if field.default is MISSING and field.default_factory is MISSING:
        return {"required": True, "help": text}
    default = field.default if field.default_factory is MISSING else field.default_factory()
    shown = f"(default: {default})" if default not in (None, ()) else ""
    default = list(default) if isinstance(default, tuple) else default  # what argparse appends to
    return {"default": default, "help": f"{text} {shown}".strip()}
