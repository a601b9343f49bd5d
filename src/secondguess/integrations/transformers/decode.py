"""The decoding loop that transformers calls in place of its own. Whatever it cannot honour is an error that names it.

B requests, P positions of the padded prompts, T positions of prompt and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from secondguess.errors import UserError
from secondguess.integrations.transformers.options import check_alone, check_mode, sampling_params
from secondguess.integrations.transformers.ready import llm_for
from secondguess.llm import LLM
from secondguess.types import SamplingParams


def generate(model: Any, streamer: Any = None, **arguments: Any) -> Tensor:
    """``model.generate`` with ``decode`` as its loop; takes what it takes, and ``drafter`` and ``method``."""
    check_alone(arguments)
    return model.generate(streamer=streamer, stream_to=streamer, custom_generate=decode, **arguments)


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    drafter: str | Path | None = None,
    method: str = "pr",
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """int64 [B, T]: prompts [B, P] and answers, padded. For ``custom_generate=decode``.

    ``drafter`` and ``method``: see ``LLM``. Greedy answers have the tokens of plain generation. Sampled ones have its
    law, not its draws; ``torch.manual_seed`` repeats them. Raises UserError for options that are not supported.
    """
    check_mode(generation_config, model_kwargs)
    params = sampling_params(generation_config, logits_processor, stopping_criteria, input_ids.shape[1])
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
    # Greedy decoding leaves torch's generator alone, as plain generation does.
    seeds = torch.randint(2**62, (len(prompts),)) if generation_config.do_sample else torch.zeros(len(prompts)).long()
    each = [params(seed) for seed in seeds.tolist()]
    llm = llm_for(model, drafter, method, len(prompts), max(map(len, prompts)) + each[0].max_tokens)
    if stream_to is None:
        answers = [output.token_ids for output in llm.generate(prompts, each)]
    else:
        answers = [stream(llm, prompts, each, stream_to)]
    return padded(input_ids, answers, generation_config)


def prompts_of(input_ids: Tensor, mask_BP: Tensor | None) -> list[list[int]]:
    """The rows without their padding."""
    mask_BP = torch.ones_like(input_ids) if mask_BP is None else mask_BP
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, mask_BP, strict=True)]


def stream(llm: LLM, prompts: list[list[int]], each: list[SamplingParams], streamer: Any) -> tuple[int, ...]:
    """Tokens go to ``streamer`` as they come, several at a time."""
    if len(prompts) > 1:
        raise UserError(f"a streamer takes one answer, here are {len(prompts)}")
    answer: tuple[int, ...] = ()
    for delta in llm.stream(prompts[0], each[0]):
        streamer.put(torch.tensor(delta.token_ids))
        answer += delta.token_ids
    streamer.end()
    return answer


def padded(input_ids: Tensor, answers: Sequence[Sequence[int]], config: Any) -> Tensor:
    """Answers behind their prompts [B, T]; where one ends before the others, padding follows."""
    longest = max(map(len, answers))
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    answers_BT = torch.full((len(answers), longest), pad, dtype=input_ids.dtype)
    for row, answer in zip(answers_BT, answers, strict=True):
        row[: len(answer)] = torch.tensor(answer)
    return torch.cat([input_ids, answers_BT.to(input_ids.device)], dim=1)
