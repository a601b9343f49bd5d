"""What ``secondguess quality`` runs: float32 answers, then every form of numbers over them, and on its own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondguess.bench.grade import interval, is_right
from secondguess.bench.peers.known import choose_peers, make_peer
from secondguess.bench.peers.process import Peer
from secondguess.bench.plan import Prompt
from secondguess.bench.quality import Drift, Law, drift, law_of
from secondguess.bench.tasks import TaskPrompt
from secondguess.bench.transcript import Transcript
from secondguess.commands.compare import load
from secondguess.commands.conversations import encode_all, transcribe
from secondguess.commands.progress import progress
from secondguess.engine.thread import run
from secondguess.target.hf import HFTarget
from secondguess.target.load import forms_of
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Study:
    """The texts that float32 wrote, and who is compared with it over them."""

    args: argparse.Namespace
    truth: HFTarget
    prompts: list[Prompt]
    references: Mapping[str, str]  # by the prompt's id, of those that have one
    transcripts: list[Transcript]
    console: Console

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.args.max_new_tokens, seed=self.args.seed)

    def ours(self, dtype: str) -> Row:
        target = self.truth if dtype == "float32" else load_as(self.args, dtype)
        answers = transcribe(target, self.prompts, self.params, self.args.batch_size, self.console)
        found = self._drift(dtype, law_of(target))
        return self._row("secondguess", dtype, found, [answer.answer_ids for answer in answers])

    def theirs(self, name: str, peer: Peer) -> Row:
        ids = [p.ids for p in self.prompts]
        found = self._drift(name, law_of_peer(peer))
        outputs = peer.generate(ids, [self.params] * len(ids))
        return self._row(name, peer.mode, found, [output.token_ids for output in outputs])

    def _drift(self, name: str, law: Law) -> Drift:
        with progress(self.console) as bar:
            task = bar.add_task(f"laws of {name}", total=len(self.transcripts))
            return run(drift, law_of(self.truth), law, self.transcripts, partial(bar.advance, task))

    def _row(self, engine: str, dtype: str, found: Drift, answers: Sequence[Sequence[int]]) -> Row:
        graded = [
            is_right(self.truth.tokenizer.decode(list(ids), skip_special_tokens=True), self.references[p.id])
            for p, ids in zip(self.prompts, answers, strict=True)
            if p.id in self.references
        ]
        low, high = interval(sum(graded), len(graded)) if graded else (None, None)
        return {
            "engine": engine,
            "dtype": dtype,
            "num_prompts": len(self.prompts),
            "num_tokens": found.num_tokens,
            "mean_kl": found.kl / found.num_tokens,
            "largest_kl": found.largest_kl,
            "same_top1": found.num_same / found.num_tokens,
            "num_graded": len(graded),
            "right": sum(graded) / len(graded) if graded else None,
            "right_low": low,
            "right_high": high,
        }


def assess(args: argparse.Namespace, tasks: list[TaskPrompt], console: Console) -> list[Row]:
    """A row for each form of numbers, then for each peer."""
    truth = load_as(args, "float32")
    prompts = encode_all(truth, tasks, args.max_new_tokens, args.batch_size, console)
    params = SamplingParams(max_tokens=args.max_new_tokens, seed=args.seed)
    transcripts = transcribe(truth, prompts, params, args.batch_size, console)
    references = {task.id: task.reference for task in tasks if task.reference is not None}
    study = Study(args, truth, prompts, references, transcripts, console)
    rows = [study.ours(dtype) for dtype in args.dtypes]
    for name, peer in make_peers(args, study).items():
        try:
            rows.append(study.theirs(name, peer))
        finally:
            peer.close()
    return rows


def load_as(args: argparse.Namespace, dtype: str) -> HFTarget:
    return load(args.target, dtype, args.device, args.trust_remote_code)


def make_peers(args: argparse.Namespace, study: Study) -> dict[str, Peer]:
    """Raises UserError when a peer cannot take part."""
    forms = forms_of(args.target)
    longest = max(len(p.ids) for p in study.prompts) + args.max_new_tokens
    common = {"threads": torch.get_num_threads(), "dtype": "float32", "max_len": longest + 1, "drafter": None}
    logs, end_ids = Path(tempfile.mkdtemp(prefix="secondguess-peers-")), sorted(study.truth.spec.eos_token_ids)
    return {
        name: make_peer(name, forms, common | {"logits_all": True}, end_ids, logs / f"{name.replace(':', '-')}.log")
        for name in choose_peers(args.peers, forms)
    }


def law_of_peer(peer: Peer) -> Law:
    def law(transcript: Transcript) -> Tensor:
        ids, first = transcript.prompt_ids + transcript.answer_ids, len(transcript.prompt_ids) - 1
        return torch.from_numpy(peer.logits(ids[:-1], first))

    return law
