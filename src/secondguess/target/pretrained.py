"""Models from disk, whole or not at all.

Whatever transformers loads by name it is told to load here, so that one place decides whose code runs.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from secondguess.errors import UserError

# Models for text and images whose text part is a language model of its own, and where its weights lie in their files.
WITH_IMAGES = ("gemma3",)
TEXT_WEIGHTS = {r"^(?:model\.)?language_model\.(?:model\.)?": "model."}
CODE = ("*.py",)  # files of a model that are fetched only if they are trusted


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model's files: a folder, or a hub id. Python among them runs only if they are ``trusted``.

    Raises UserError when something cannot be read without it.
    """

    place: Path | str
    trusted: bool = False

    def config(self) -> PreTrainedConfig:
        with naming_the_flag(self.place):
            return AutoConfig.from_pretrained(self.place, trust_remote_code=self.trusted)

    def tokenizer(self, **options: Any) -> Any:
        with naming_the_flag(self.place):
            return AutoTokenizer.from_pretrained(self.place, trust_remote_code=self.trusted, **options)

    def model(self, **options: Any) -> Any:
        """``AutoModelForCausalLM.from_pretrained``, which on its own fills what a file lacks with random numbers.

        Raises UserError when a weight is missing or has another shape. A head tied to the embedding is not missing.
        """
        how = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": self.trusted}
        with naming_the_flag(self.place):
            model, info = AutoModelForCausalLM.from_pretrained(self.place, **how, **options)
        wrong = dict.fromkeys(info["missing_keys"], "is missing")
        wrong |= {name: f"has shape {list(had)}, not {list(wanted)}" for name, had, wanted in info["mismatched_keys"]}
        if wrong:
            name = min(wrong)
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise UserError(f"the weights in {self.place} do not fit its config: {name} {wrong[name]}{more}")
        return model


def read_config(files: Pretrained) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """A model's config, and what ``Pretrained.model`` needs to load it: of one for text and images, its text part."""
    config = files.config()
    if config.model_type not in WITH_IMAGES:
        return config, {}
    text = config.get_text_config()
    return text, {"config": text, "key_mapping": TEXT_WEIGHTS}


def stored_embedding(folder: Path) -> Tensor:
    """A model's token embedding [V, H] as it lies on disk, and nothing else of it. Raises UserError if it does not."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                if name.endswith("embed_tokens.weight"):
                    return file.get_tensor(name)
    raise UserError(f"no safetensors file in {folder} has the token embedding (embed_tokens.weight)")


@contextmanager
def naming_the_flag(place: Path | str) -> Generator[None]:
    """transformers' refusal to run a model's own code, in our words."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(f"{place} needs Python code of its own, which only --trust-remote-code lets run") from error
