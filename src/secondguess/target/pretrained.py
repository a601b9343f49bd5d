"""Models from disk, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from secondguess.errors import UserError


def load_whole(folder: Path, **options: Any) -> Any:
    """``AutoModelForCausalLM.from_pretrained``, which on its own fills what a file lacks with random numbers.

    Raises UserError when a weight is missing or has another shape. A head tied to the embedding is not missing.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **options
    )
    wrong = dict.fromkeys(info["missing_keys"], "is missing")
    wrong |= {name: f"has shape {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]}
    if wrong:
        name = min(wrong)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"the weights in {folder} do not fit its config: {name} {wrong[name]}{more}")
    return model
