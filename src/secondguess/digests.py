"""Short names for token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def of_tokens(ids: Sequence[int]) -> str:
    """Eight bytes in hex; the same on every machine."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:16]
