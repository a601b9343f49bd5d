"""Models from disk, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from secondguess.errors import UserError

# Models for text and images whose text part is a language model of its own, and where its weights lie in their files.
WITH_IMAGES = ("gemma3",)
TEXT_WEIGHTS = {r"^(?:model\.)?language_model\.(?:model\.)?": "model."}


def read_config(folder: Path) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A model's config, and what ``load_whole`` needs to load it: of a model for text and images, its text part."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if config.model_type not in WITH_IMAGES:
        return config, {}
    text = config.get_text_config()
    return text, {"config": text, "key_mapping": TEXT_WEIGHTS}


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
