"""Lines of JSON that carry their own checksum: one that was altered or cut short is known for damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "sha256"


def sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def signed(fields: Mapping[str, Any]) -> str:
    """A line, with its end."""
    return json.dumps(dict(fields) | {CHECKSUM: sha256(fields)}, ensure_ascii=False) + "\n"


def unsigned(line: bytes) -> dict[str, Any]:
    """The fields of a line. Raises ValueError if it is damaged."""
    try:
        fields = json.loads(line)
        if isinstance(fields, dict) and fields.pop(CHECKSUM, None) == sha256(fields):
            return fields
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    raise ValueError("its checksum is not that of its fields")
