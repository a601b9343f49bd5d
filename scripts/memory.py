#!/usr/bin/env python3
"""The most memory that decoding takes, beside what it has to hold: weights, the K/V that are written, and code (Linux).

    scripts/memory.py OUT.json [--target smollm2-135m] [--dtype float32,int4] [--method ar,pr] [--requests 16]
        [--max-new-tokens 1024]

Every case has a process of its own. Code is what the imports alone take. Loading is measured apart from decoding.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import re
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import transformers.models.llama.modeling_llama  # noqa: F401  (code that a target needs)
from torch import nn

from secondguess import LLM, SamplingParams
from secondguess.commands.record import make_record, write_json
from secondguess.commands.workload import comma_separated
from secondguess.engine.slots import SlotCache

MB = 1e6
T = TypeVar("T")


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    code = alone(resident)
    rows = []
    for dtype, method in itertools.product(args.dtype, args.method):
        row = alone(measure, args.target, dtype, method, args.requests, args.max_new_tokens)
        needed = code + row["weights_mb"] + row["kv_mb"]
        rows.append(row | {"code_mb": code, "needed_mb": needed, "over_needed": row["decoding_mb"] / needed})
        print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    record = make_record() | {"command": f"scripts/memory.py {shlex.join(argv)}"}
    write_json(args.out, record, "rows", rows)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", type=comma_separated(str), default="float32,int4", help="(default: float32,int4)")
    parser.add_argument("--method", type=comma_separated(str), default="ar,pr", help="(default: ar,pr)")
    parser.add_argument("--requests", type=int, default=16, help="(default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="(default: 1024)")
    return parser.parse_args(argv)


def alone(work: Any, *arguments: Any) -> Any:
    """What ``work`` returns in a process that has done nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure(target: str, dtype: str, method: str, requests: int, max_new_tokens: int) -> dict[str, Any]:
    """Megabytes: the peaks of loading and of decoding, what stays between them, and what has to be held."""
    prompts = [f"{number} things to know about the sea:" for number in range(requests)]
    llm = LLM(target, dtype=dtype, method=method, max_batch_size=requests, max_model_len=max_new_tokens + 32)
    sizes = {"loading_mb": peak(), "loaded_mb": resident(), "weights_mb": weight_bytes() / MB}
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is that of decoding
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_new_tokens, ignore_eos=True))
    num_tokens = sum(len(out.prompt_ids) + len(out.token_ids) for out in outputs)
    sizes |= {"decoding_mb": peak(), "kv_mb": num_tokens * kv_bytes_of_a_token() / MB}
    return {"dtype": dtype, "method": method, "requests": requests, "max_new_tokens": max_new_tokens, **sizes}


def weight_bytes() -> int:
    """Of all networks that there are, each tensor once."""
    held = [t for m in alive(nn.Module) for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def kv_bytes_of_a_token() -> float:
    """In the target's cache, and in those of drafters."""
    return sum(cache.bytes / (cache.num_slots * cache.num_columns) for cache in alive(SlotCache))


def alive(kind: type[T]) -> list[T]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


def peak() -> float:
    return status("VmHWM")


def resident() -> float:
    return status("VmRSS")


def status(name: str) -> float:
    """Megabytes of this process."""
    return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024 / MB


if __name__ == "__main__":
    main(sys.argv[1:])
