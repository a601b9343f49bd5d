"""``transformers`` generate, greedy: plain, or with its prompt lookup."""

from __future__ import annotations

import time
from typing import Any

import torch
from protocol import Decode, serve
from transformers import AutoModelForCausalLM


class Clock:
    """A streamer that looks at the time and counts. It is given the prompt first, then what each step adds."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


def start(config: dict[str, Any]) -> Decode:
    torch.set_num_threads(config["threads"])
    dtype = getattr(torch, config["dtype"])
    how = {"dtype": dtype, "trust_remote_code": config["trust_remote_code"]}
    model = AutoModelForCausalLM.from_pretrained(config["model"], **how).eval()
    more = {"prompt_lookup_num_tokens": config["lookup"]} if config["lookup"] else {}

    @torch.inference_mode()
    def decode(request: dict[str, Any]) -> dict[str, Any]:
        ids_1P = torch.tensor([request["prompt_ids"]])
        clock, began = Clock(), time.perf_counter()
        out = model.generate(
            ids_1P,
            attention_mask=torch.ones_like(ids_1P),
            do_sample=False,
            max_new_tokens=request["max_new_tokens"],
            eos_token_id=request["end_ids"],
            pad_token_id=request["end_ids"][0],
            streamer=clock,
            **more,
        )
        first = clock.times[1] if len(clock.times) > 1 else time.perf_counter()
        return {
            "token_ids": out[0, ids_1P.shape[1] :].tolist(),
            "prefill_s": first - began,
            "decode_s": clock.times[-1] - first,
            "num_first": clock.counts[1] if len(clock.counts) > 1 else 0,
        }

    return decode


if __name__ == "__main__":
    serve(start, ("transformers", "torch"))
