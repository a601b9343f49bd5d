"""Short names for a target's weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from secondguess.target.parts import whole

SAMPLE = 1024
CHUNK = 1 << 22  # values at once, so that memory stays small
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of a value
NO_MATTER = ("_name_or_path", "transformers_version", "architectures")


def model_fingerprint(model: Any, form: str = "float32") -> str:
    """Changes with any weight, its precision, the ``form`` it is rounded to, and the config.

    Take it before packing takes the weights apart.

    The bits of all values are summed, twice: as they are, and each times its place, so that swaps show too. That takes
    a moment where a cryptographic hash would take minutes.
    """
    settings = {key: value for key, value in model.config.to_dict().items() if key not in NO_MATTER}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        bits = whole(parameter.detach()).flatten().view(BITS[parameter.element_size()])
        sums = [int(chunk_sum) for chunk in bits.split(CHUNK) for chunk_sum in checksums(chunk)]
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}{sums}".encode())
    if form != "float32":
        digest.update(form.encode())
    return digest.hexdigest()[:16]


def checksums(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Sums modulo 2^64."""
    values = bits.long()
    return values.sum(), (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


def glance(parameter: Tensor) -> int:
    """A sum of its bits, eight bytes at a time: another after nearly any change, though not if values swap.

    Whole numbers of 64 bits are added 20 times as fast as smaller ones.
    """
    values = parameter.detach().flatten().view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    end = len(values) // 8 * 8
    return int(values[:end].view(torch.int64).sum()) + int(values[end:].sum())


def weights_fingerprint(model: Any) -> str:
    """Tells fine-tunes of one model apart: a sample of every weight in bfloat16, so the dtype does not matter.

    (But for float16, see ``embedding_fingerprint``.) Take it before packing takes the weights apart.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = whole(parameter.detach()).flatten()
        digest.update(name.encode())
        digest.update(half_bytes(values[:: max(1, len(values) // SAMPLE)]))
    return digest.hexdigest()[:16]


def half_bytes(values: Tensor) -> bytes:
    """In bfloat16."""
    return values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def embedding_fingerprint(embedding: Tensor) -> str:
    """Tells base models apart: the first 1,024 rows in bfloat16.

    The same for a model loaded in float64, float32 or bfloat16. Not in float16, whose rounding is another: small values
    lose bits that bfloat16 keeps.
    """
    return hashlib.sha256(half_bytes(embedding.detach()[:SAMPLE])).hexdigest()[:16]
