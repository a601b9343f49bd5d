"""Short names for a target's weights."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

SAMPLE = 1024


def weights_fingerprint(model: nn.Module) -> str:
    """Tells fine-tunes apart: hashes the first values of every parameter, as float32. Take it before packing."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:SAMPLE].to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def embedding_fingerprint(embedding: Tensor) -> str:
    """Tells base models apart: the first 1,024 rows in bfloat16.

    The same for a model loaded in float64, float32 or bfloat16. Not in float16, whose rounding is another: small values
    lose bits that bfloat16 keeps.
    """
    sample = embedding[:SAMPLE].to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]
