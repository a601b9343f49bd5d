"""transformers' options as ours. What it has prepared is read (processors and criteria), so defaults are its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerationMode

from secondguess.errors import UserError
from secondguess.types import SamplingParams

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Our field for a processor's attribute. The first changes greedy decoding, too.
PENALTY: dict[type, tuple[str, str]] = {RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty")}
WARPERS: dict[type, tuple[str, str]] = {
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
LENGTHS = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)  # both say what ``min_length`` does
CRITERIA = (MaxLengthCriteria, EosTokenCriteria)
ALONE = ("assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "stop_strings")


def check_alone(arguments: Mapping[str, Any]) -> None:
    """Raises UserError for an argument of ``model.generate`` that is not seen in what it prepares."""
    refuse([name for name in ALONE if arguments.get(name) is not None])


def check_mode(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Raises UserError unless one answer per row is sought, from token ids alone."""
    mode = config.get_generation_mode()
    odd = [] if mode in MODES else [mode.value.replace("_", " ")]
    odd += ["return_dict_in_generate"] if config.return_dict_in_generate else []
    odd += ["inputs_embeds"] if model_kwargs.get("inputs_embeds") is not None else []
    caches = [model_kwargs.get(name) for name in ("cache", "past_key_values")]
    odd += ["a cache that holds something"] if any(c is not None and c.get_seq_length() for c in caches) else []
    refuse(odd)


def refuse(names: Sequence[str]) -> None:
    if names:
        raise UserError(f"not supported by secondguess's custom_generate: {', '.join(names)}")


def sampling_params(
    config: GenerationConfig, processors: Sequence[Any], criteria: Sequence[Any], prompt_len: int
) -> Callable[[int], SamplingParams]:
    """Our params, but for the seed. ``prompt_len``: of the padded prompts, which lengths are counted from."""
    known = PENALTY | WARPERS
    refuse([type(p).__name__ for p in processors if type(p) not in (*known, *LENGTHS)])
    refuse([type(c).__name__ for c in criteria if type(c) not in CRITERIA])
    refuse(["prompt_ignore_length" for p in processors if type(getattr(p, "prompt_ignore_length", None)) is int])
    used = known if config.do_sample else PENALTY
    found = {used[type(p)][0]: getattr(p, used[type(p)][1]) for p in processors if type(p) in used}
    if "min_p" in found and "top_p" in found:  # here min-p comes first, there last
        refuse(["min_p together with top_p"])
    ends = next((c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria), [])
    settings: dict[str, Any] = {
        "temperature": 1.0 if config.do_sample else 0.0,
        "max_tokens": config.max_length - prompt_len,
        "min_tokens": max(0, (config.min_length or 0) - prompt_len) if ends else 0,
        "stop_token_ids": tuple(ends),
        "ignore_eos": True,  # the end tokens are those of the call
    }
    return lambda seed: SamplingParams(**settings | found, seed=seed)
