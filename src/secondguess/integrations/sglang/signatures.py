"""Names and parameters of what a Python file defines, read from its text: nothing is imported.

Importing an engine to ask what it has takes seconds, and needs its devices.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Define = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ITSELF = ("self", "cls")


@dataclass(frozen=True, slots=True)
class Signature:
    """Of a function: its parameters. Of a class: its fields, constants, methods, and what these set."""

    names: tuple[str, ...]
    required: tuple[str, ...] = ()  # parameters, or fields of a dataclass, without a default


def signature(source: str, dotted: str) -> Signature | None:
    """Of ``dotted`` (``function``, ``Class`` or ``Class.method``) in a file with this text; None if it is not there."""
    found = find(source, dotted)
    if found is None:
        return None
    return of_class(found) if isinstance(found, ast.ClassDef) else of_function(found)


def base_signature(source: str, dotted: str) -> Signature | None:
    """As ``signature``, of a class that is derived from: ``required`` are its abstract methods."""
    found = find(source, dotted)
    if found is None:
        return None
    assert isinstance(found, ast.ClassDef)
    abstract = [part.name for part in found.body if isinstance(part, Define) and is_abstract(part)]
    return Signature(of_class(found).names, tuple(abstract))


def attributes_read(source: str, dotted: str) -> Signature | None:
    """As ``signature``: the attributes of ``self`` that a method reads."""
    found = find(source, dotted)
    return Signature(tuple(dict.fromkeys(of_self(found, ast.Load)))) if found else None


def keywords_passed(source: str, dotted: str) -> Signature | None:
    """As ``signature``: the keywords of all calls in a function."""
    found = find(source, dotted)
    if found is None:
        return None
    calls = [node for node in ast.walk(found) if isinstance(node, ast.Call)]
    return Signature(tuple(dict.fromkeys(keyword.arg for call in calls for keyword in call.keywords if keyword.arg)))


def find(source: str, dotted: str) -> Define | None:
    body, found = ast.parse(source).body, None
    for name in dotted.split("."):
        found = next((node for node in body if isinstance(node, Define) and node.name == name), None)
        if found is None:
            return None
        body = found.body
    return found


def of_function(node: ast.AST | None) -> Signature:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    a = node.args
    placed = [arg.arg for arg in (*a.posonlyargs, *a.args)]
    bare = placed[: len(placed) - len(a.defaults)]
    bare += [arg.arg for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    names = (*placed, *(arg.arg for arg in a.kwonlyargs))
    return Signature(*(tuple(name for name in some if name not in ITSELF) for some in (names, bare)))


def of_class(node: ast.ClassDef) -> Signature:
    names, required = [], []
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.append(part.target.id)
            required += [part.target.id] if is_bare(part.value) else []
        elif isinstance(part, ast.Assign):
            names += [target.id for target in part.targets if isinstance(target, ast.Name)]
        elif isinstance(part, Define):
            names += [part.name, *of_self(part, ast.Store)]
    return Signature(tuple(dict.fromkeys(names)), tuple(required))


def is_bare(value: ast.expr | None) -> bool:
    """Whether a field's value is no default: none at all, or ``field()`` without one."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        return not any(keyword.arg in ("default", "default_factory") for keyword in value.keywords)
    return value is None


def is_abstract(part: Define) -> bool:
    return any(ast.unparse(decorator).endswith("abstractmethod") for decorator in part.decorator_list)


def of_self(method: ast.AST, context: type[ast.expr_context]) -> Iterator[str]:
    """Attributes of ``self`` that it sets (``ast.Store``) or reads (``ast.Load``)."""
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context) and ast.unparse(node.value) == "self":
            yield node.attr
