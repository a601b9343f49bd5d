"""The lean forward gives what transformers' own gives."""

from __future__ import annotations

import pytest
import torch

from secondguess.target import hf, lean
from secondguess.target.base import causal_rows
from secondguess.testing import tiny_target


def run(target):
    ids_RN = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])
    return target.forward(causal_rows(torch.tensor([0, 1]), ids_RN), target.new_cache(2, 16))


@pytest.mark.parametrize("family", lean.FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_lean_equals_generic(family: str, dtype: torch.dtype, tolerance: float, monkeypatch) -> None:
    monkeypatch.setattr(hf, "compiles", lambda model: False)
    fast = tiny_target(family, dtype=dtype)
    assert isinstance(fast._body.decoder, lean.LeanDecoder)
    monkeypatch.setattr(hf, "fits", lambda model: False)
    slow = tiny_target(family, dtype=dtype)
    assert isinstance(slow._body.decoder, hf.GenericDecoder)
    assert fast.fingerprint == slow.fingerprint
    ours, theirs = run(fast), run(slow)
    for name in ("hidden_RNH", "taps_RNLH", "logits_RNV"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=tolerance)


def test_other_models_go_the_generic_way() -> None:
    assert isinstance(tiny_target("gemma3")._body.decoder, hf.GenericDecoder)
    assert isinstance(tiny_target("llama", dtype=torch.bfloat16)._body.decoder, hf.GenericDecoder)
