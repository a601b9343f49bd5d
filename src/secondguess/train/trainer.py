"""The training loop: exact resume, held-out evaluation, a JSONL log, checkpoints that serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from secondguess.atomic import replacing_folder
from secondguess.capture.source import FeatureSource
from secondguess.drafter.checkpoint import save_drafter, weights_digest
from secondguess.drafter.fit import head_rows
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter, public_settings
from secondguess.drafter.vocab import count_tokens, coverage, target_to_draft
from secondguess.errors import require
from secondguess.lock import locked
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig
from secondguess.train.data import Response, digest, split_held_out
from secondguess.train.feed import Feed
from secondguess.train.flops import matmul_peak
from secondguess.train.judge import Judge, pick_replayed
from secondguess.train.learner import Learner
from secondguess.train.memory import Memory
from secondguess.train.meter import Window
from secondguess.train.origin import origin_of
from secondguess.train.own import check_answers
from secondguess.train.parallel import Processes, load_optimizer, whole, whole_drafter
from secondguess.train.plan import Plan
from secondguess.train.run_folder import RunFolder
from secondguess.train.start import content, start_drafter, start_notes, unlike_new


class Trainer:
    """One run in one folder. Nothing is written, and no state of the target is read, before ``run``."""

    def __init__(
        self,
        config: TrainConfig,
        target: HFTarget,
        responses: list[Response],
        source: FeatureSource,
        record: Mapping[str, Any] | None = None,
        processes: Processes | None = None,
    ) -> None:
        """``record``: revision, versions and machine, kept in the run folder and in the checkpoint.

        Of several ``processes`` each has a trainer, and the first one writes.
        """
        self.began, self.wall_before = time.perf_counter(), 0.0
        self.config, self.record, self.processes = config, record or {}, processes or Processes()
        self.training, held_out = split_held_out(responses, config.held_out)
        self.plan = Plan(config, self.training, self.processes.count)
        self.judge = Judge(config, held_out, pick_replayed(responses, held_out, config.eval_responses))
        counts = count_tokens((responses[i].answer for i in self.training), target.spec.vocab_size)
        self.drafter, self.start_notes = start_drafter(target, config, counts), start_notes(target, config)
        self.origin = origin_of([responses[i] for i in self.training], target)
        assert source.tap_layers == self.drafter.config.tap_layers, "states of other layers than the drafter reads"
        self.coverage = coverage(counts, self.drafter.target_ids)
        require(self.coverage > 0, "the drafter can offer none of the answers' tokens: start from another, or from new")
        self.folder = RunFolder(Path(config.out).expanduser(), config, inputs(config, target, responses, self.drafter))
        self.step, self.num_saved, self.seconds, self.window, self.log_bytes = 0, 0, 0.0, Window(), 0
        self.surprise: float | None = None
        state = self.folder.load()
        if state:
            self.drafter.load_state_dict(state["drafter"])
        feed = make_feed(target, responses, source, self.drafter.target_ids)
        self.learner = Learner(self.drafter.to(target.spec.device), feed, config, self.processes)
        self.memory = Memory(self.learner.device)
        if state:
            self.resume(state)

    def resume(self, state: dict[str, Any]) -> None:
        load_optimizer(self.learner.optimizer, state["optimizer"])
        if self.learner.anchor:
            self.learner.anchor.load_state_dict(state["anchor"])
        self.step = self.num_saved = state["step"]
        self.seconds, self.log_bytes = state["seconds"], state["log_bytes"]
        self.wall_before = state.get("wall_seconds", self.seconds)  # states of before have none
        self.window = Window.of(state["window"], self.config.unroll_steps)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(
        self,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        on_log: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        """Train to the end and write the checkpoint.

        ``on_step`` hears the number of steps done and the last loss, ``on_log`` each line of the log. A
        KeyboardInterrupt raised by ``on_step`` loses nothing: the run goes on from that step. (Several processes go on
        from where they saved last: they may have been interrupted in different steps.) A run that is finished is left
        as it is. Raises Diverged.
        """
        if self.finished:
            return
        with locked(self.folder.path) if self.processes.first else contextlib.nullcontext():
            if self.processes.first:
                self.folder.start(self.record, self.step, self.log_bytes)
                self.surprise = check_answers(self.learner.feed, self.training)
            for indices in self.plan.steps_from(self.step):
                loss = self.train_step(indices)
                last = self.step == self.plan.num_steps
                if self.step % self.config.eval_every == 0 or last:
                    on_log(self.log())
                if self.step % self.config.save_every == 0 or last:
                    self.save()
                try:
                    on_step(self.step, loss)
                except KeyboardInterrupt:
                    if self.processes.count == 1:
                        self.save()
                    raise
            self.export(whole_drafter(self.drafter), self.folder.drafter)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: all steps are done, and the drafter is written."""
        return self.step == self.plan.num_steps and (self.folder.drafter / "config.json").is_file()

    @property
    def wall_seconds(self) -> float:
        """Of this session and of those before as far as they were kept: captures, steps, evaluation and saving."""
        return self.wall_before + time.perf_counter() - self.began

    def train_step(self, indices: list[int]) -> float:
        """Train on these responses and return the loss."""
        clock, batches = time.perf_counter(), self.plan.micro_batches(indices)
        with self.memory.of_a_step():
            done = self.learner.step(self.step, batches, self.plan.learning_rate(self.step))
        seconds = time.perf_counter() - clock
        self.window.add(done, seconds, self.learner.flops(indices))
        self.step += 1
        self.seconds += seconds
        return done.loss

    def seconds_per_step(self) -> float:
        """Measured on the first batch of the next step, without moving a weight."""
        first = self.plan.micro_batches(next(self.plan.steps_from(self.step)))[0]
        clock = 0.0
        for _ in range(2):  # the first time warms up
            clock = time.perf_counter()
            self.learner.gradients(self.step, [first])
        self.learner.optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - clock) * self.config.accumulate

    # -- the log -------------------------------------------------------------------------------------------------

    def log(self) -> dict[str, Any]:
        """Add a line on the steps since the last one, and on the drafter as it is now, to the log."""
        drafter, device = whole_drafter(self.drafter), self.learner.device
        peak = matmul_peak(torch.bfloat16 if self.learner.bfloat16 else torch.float32, device) * self.processes.count
        line = {
            "step": self.step,
            "of": self.plan.num_steps,
            "seconds": round(self.seconds, 1),
            "wall_seconds": round(self.wall_seconds, 1),
            "lr": self.plan.learning_rate(self.step - 1),
            **self.window.summary(),
            "held_out": self.judge.losses(drafter, self.learner),
            **self.judge.tau(drafter, self.learner),
            "speed": self.window.speed(peak) | self.memory.summary(),
        }
        if self.processes.first:
            self.folder.log(line)
        self.window = Window()
        return line

    def evaluate(self) -> dict[str, list[float]]:
        """Held-out losses of the drafter as it is now, per unroll step and level."""
        return self.judge.losses(whole_drafter(self.drafter), self.learner)

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Keep the state, and beside it the drafter as it would be served."""
        drafter, optimizer = whole_drafter(self.drafter), whole(self.learner.optimizer.state_dict())
        if self.processes.first:
            state = {
                "step": self.step,
                "seconds": self.seconds,
                "wall_seconds": self.wall_seconds,
                "window": self.window.state(),
                "drafter": drafter.state_dict(),
                "optimizer": optimizer,
                "anchor": self.learner.anchor.state_dict() if self.learner.anchor else None,
            }
            self.folder.save(state)
        self.export(drafter, self.folder.latest_drafter)
        self.num_saved = self.step

    def export(self, drafter: Drafter, folder: Path) -> None:
        """Write a checkpoint that serves, in place of the one that is there."""
        if not self.processes.first:
            return
        found = {
            "warm_start": self.config.warm_start,
            "anchor_to": self.config.anchor_to,
            "draft_vocab_size": drafter.config.draft_vocab_size,
        }
        notes = {
            "target": self.config.target,
            "method": self.config.method,
            "made_for": asdict(self.origin.facts),
            "training": {
                "settings": public_settings(self.folder.settings | found),
                "steps": self.step,
                "seconds": round(self.seconds),
                "wall_seconds": round(self.wall_seconds),
                "num_processes": self.processes.count,
                **self.start_notes,
                **self.origin.notes,
                "vocabulary_coverage": round(self.coverage, 4),
                "surprise": self.surprise,
                "sessions": [{k: v for k, v in r.items() if k != "command"} for r in self.folder.records()],
            },
        }
        with replacing_folder(folder) as temporary:
            save_drafter(drafter, temporary, notes)


def inputs(config: TrainConfig, target: HFTarget, responses: list[Response], drafter: Drafter) -> dict[str, Any]:
    """What a run depends on beside its settings. ``drafter``: at its start point."""
    repeated = len(responses) - len({r.id for r in responses})
    return {
        "target weights": target.fingerprint,
        "content of responses": digest(responses),
        "treatment of repeated ids": f"{repeated} left out" if repeated else None,
        "content of warm_start": None if config.warm_start == "none" else content(drafter),
        "network of warm_start": None if config.warm_start == "none" else unlike_new(drafter, target, config),
        "content of anchor_to": None if config.anchor_to == "none" else content_of(config.anchor_to, target),
        "draft vocabulary": drafter.target_ids.tolist(),
    }


def content_of(name: str, target: HFTarget) -> str:
    """Changes with the weights of the drafter of that name."""
    return weights_digest(find_drafter(name, name, target.embedding))[:16]


def make_feed(target: HFTarget, responses: list[Response], source: FeatureSource, target_ids: torch.Tensor) -> Feed:
    draft_of = target_to_draft(target_ids, target.spec.vocab_size).to(target.spec.device)
    return Feed(responses, source, head_rows(target.head_weight, target_ids), draft_of)
