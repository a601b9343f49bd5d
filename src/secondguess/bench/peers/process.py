"""A peer as the bench sees it: something that decodes jobs, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from secondguess.types import Output, SamplingParams, Stats

FOLDER = Path(__file__).parent


class Peer:
    """Starts with the first request. Greedy only. Raises RuntimeError with the engine's own words when it fails."""

    def __init__(
        self, python: Path, worker: str, config: Mapping[str, Any], end_ids: Sequence[int], log: Path, mode: str
    ) -> None:
        """``log``: what the engine prints. ``mode``: the numbers it computes with, as in ``TargetSpec.mode``."""
        self.mode, self.drafter = mode, config.get("drafter")
        self._log = log
        self._command = [str(python), str(FOLDER / worker), json.dumps(dict(config))]
        self._end_ids = list(end_ids)
        self._process: subprocess.Popen[str] | None = None
        self.versions: dict[str, str] = {}
        self.peak_memory_bytes = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Output]:
        """As ``LLM.generate``, one prompt after the other."""
        return [self._decode(ids, p) for ids, p in zip(prompts, params, strict=True)]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def logits(self, ids: Sequence[int], first: int) -> np.ndarray:
        """float32 [T - first, V]: after each of the T ``ids`` from number ``first`` on, if the worker shows them."""
        with tempfile.TemporaryDirectory(prefix="secondguess-logits-") as folder:
            file = Path(folder) / "logits"
            self._ask({"text_ids": list(ids), "first": first, "logits_file": str(file)})
            return np.fromfile(file, np.float32).reshape(len(ids) - first, -1)

    def _decode(self, ids: Sequence[int], params: SamplingParams) -> Output:
        request = {"prompt_ids": list(ids), "max_new_tokens": params.max_tokens, "end_ids": self._end_ids}
        answer = self._ask(request)
        self.peak_memory_bytes = answer["peak_memory_bytes"]
        return output_of(ids, answer, self._end_ids)

    def _start(self) -> None:
        pipe = subprocess.PIPE
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=log, text=True)
        try:
            self.versions = self._hear()["versions"]
        except RuntimeError:
            self.close()
            raise

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer, either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise RuntimeError(f"the process ended with exit code {code}, see {self._log}")
        try:
            answer = json.loads(line)
        except ValueError:
            self.close()
            raise RuntimeError(f"the process answered {line[:80]!r}, see {self._log}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def output_of(prompt_ids: Sequence[int], answer: Mapping[str, Any], end_ids: Sequence[int]) -> Output:
    """Where the engine tells no cycles, none are counted. All time is ``rest``."""
    tokens = tuple(answer["token_ids"])
    num_decoded = max(0, len(tokens) - answer.get("num_first", 1))
    cycles, accepted, drafted = (answer.get(name, 0) for name in ("num_cycles", "num_accepted", "num_drafted"))
    times = answer["prefill_s"], 0.0, 0.0, 0.0, answer["decode_s"]
    return Output(
        given="",
        prompt_ids=tuple(prompt_ids),
        text="",
        token_ids=tokens,
        origins=(),
        finish_reason="stop" if tokens and tokens[-1] in end_ids else "length",
        seed=0,
        stats=Stats(num_decoded, cycles, accepted, 0, *times, num_drafted=drafted),
    )
