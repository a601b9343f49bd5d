"""Whether a device decodes what it should, on tiny models: the CPU's texts, and plain decoding's by any method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from secondguess.bench.audit import Job, audit
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.engine.noise import hash_words
from secondguess.llm import LLM
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Output, SamplingParams

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
METHODS = ("eagle3.1", "pr", "pr:coupled=true", "pr:budget=auto", "ngram")
TREE = TreeConfig(budget=24, num_steps=5)
NUM_PROMPTS, NUM_TOKENS, ROOM = 12, 40, 128


@dataclass(frozen=True, slots=True)
class Finding:
    """How a check went. ``excused``: texts that part at a near-tie, within what rounding explains."""

    what: str
    num_texts: int
    num_equal: int
    excused: int = 0

    @property
    def passed(self) -> bool:
        return self.num_equal + self.excused == self.num_texts


@dataclass(frozen=True, slots=True)
class Pair:
    """A tiny target and its drafter."""

    target: HFTarget
    drafter: Drafter

    @classmethod
    def on(cls, device: torch.device, family: str, dtype: torch.dtype) -> Pair:
        target = tiny_target(family, dtype=dtype, hidden_size=64, device=str(device))
        return cls(target, tiny_drafter(target))

    def llm(self, method: str, batch: int) -> LLM:
        drafter = None if method in ("ar", "ngram") else self.drafter
        return LLM(self.target, drafter, method=method, tree=TREE, max_batch_size=batch, max_model_len=ROOM)


def job() -> Job:
    """Greedy and sampled requests, with all that changes scores."""
    prompts = [[(7 * i * i + 3 * i + p) % 63 + 1 for i in range(5 + 3 * p)] for p in range(NUM_PROMPTS)]
    more = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}]
    params = [
        SamplingParams(seed=p, max_tokens=NUM_TOKENS, ignore_eos=True, **more[p % len(more)])
        for p in range(NUM_PROMPTS)
    ]
    return Job(prompts, params)


def texts(llm: LLM) -> list[tuple[int, ...]]:
    asked = job()
    outputs: list[Output] = llm.generate(asked.prompts, asked.params)
    return [output.token_ids for output in outputs]


def check_noise(device: torch.device) -> Finding:
    """The noise's bits are those of the CPU."""
    seeds_R, ids_V = torch.tensor([0, 1, 2**62 + 12345]), torch.arange(50_000)
    args = (seeds_R, seeds_R % 7, seeds_R % 8191, ids_V)
    here, there = hash_words(*args), hash_words(*(x.to(device) for x in args)).cpu()
    return Finding("noise, bits of the CPU", len(seeds_R), int((here == there).all(1).sum()))


def check_device(device: torch.device, family: str) -> Finding:
    """In float64 the device writes the CPU's texts."""
    here, there = (
        texts(Pair.on(where, family, torch.float64).llm("ar", 4)) for where in (torch.device("cpu"), device)
    )
    return Finding(f"{family}, float64: the CPU's texts", len(here), equal(here, there))


def check_method(pair: Pair, method: str) -> Finding:
    """A method writes plain decoding's texts, batched or not. Rounding excuses texts that part at near-ties."""
    plain, other = pair.llm("ar", 1), pair.llm(method, 4)
    ours, theirs = texts(plain), texts(other)
    parted = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    excused = sum(audit((plain, other), job(), i, (ours[i], theirs[i])).excused for i in parted)
    dtype = str(pair.target.spec.dtype).removeprefix("torch.")
    what = f"{pair.target.model.config.model_type}, {dtype}, {method}: plain decoding's texts"
    return Finding(what, len(ours), len(ours) - len(parted), excused)


def equal(a: Sequence[object], b: Sequence[object]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def check_all(device: torch.device) -> list[Finding]:
    found = [check_noise(device), *(check_device(device, family) for family in FAMILIES)]
    for family, dtype in product(FAMILIES, (torch.float64, torch.float32, torch.bfloat16)):
        pair = Pair.on(device, family, dtype)
        methods = METHODS if family == "llama" else METHODS[:2]
        found += [check_method(pair, method) for method in methods]
    return found
