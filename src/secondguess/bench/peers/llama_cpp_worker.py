"""llama.cpp through llama-cpp-python, greedy, plain, on the same GGUF as it is or requantised."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import llama_cpp
from protocol import Decode, serve

FILE_TYPES = {"F32": "LLAMA_FTYPE_ALL_F32", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}


def start(config: dict[str, Any]) -> Decode:
    path = requantised(Path(config["model"]), config["quantization"], Path(config["cache"]))
    threads, room = config["threads"], config["max_len"]
    llm = llama_cpp.Llama(
        str(path),
        n_ctx=room,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=config.get("logits_all", False),
        verbose=False,
    )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return show_logits(llm, request) if "logits_file" in request else decode(request)

    def decode(request: dict[str, Any]) -> dict[str, Any]:
        began, times, tokens = time.perf_counter(), [], []
        for token in llm.generate(request["prompt_ids"], top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            times.append(time.perf_counter())
            tokens.append(token)
            if token in request["end_ids"] or len(tokens) >= request["max_new_tokens"]:
                break
        llm.reset()  # the next request may share a prefix, and would be spared its prefill
        return {"token_ids": tokens, "prefill_s": times[0] - began, "decode_s": times[-1] - times[0]}

    return answer


def show_logits(llm: llama_cpp.Llama, request: dict[str, Any]) -> dict[str, Any]:
    llm.reset()
    llm.eval(request["text_ids"])
    llm.scores[request["first"] : llm.n_tokens].tofile(request["logits_file"])
    llm.reset()
    return {}


def requantised(source: Path, quantization: str | None, cache: Path) -> Path:
    """The model in another number format, made once; as it is when none is asked for."""
    if quantization is None:
        return source
    path = cache / f"{source.stem}-{source.stat().st_size}-{quantization}.gguf"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.partial")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, FILE_TYPES[quantization])
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(temporary).encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {source.name} as {quantization}")
    temporary.rename(path)
    return path


if __name__ == "__main__":
    serve(start, ("llama-cpp-python",))
