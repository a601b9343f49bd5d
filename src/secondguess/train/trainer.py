"""The training loop: exact resume, held-out evaluation, a JSONL log, a checkpoint that serves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from secondguess.capture.store import StateStore
from secondguess.drafter.checkpoint import save_drafter
from secondguess.drafter.fit import head_rows
from secondguess.drafter.vocab import choose_vocab, count_tokens, coverage, target_to_draft
from secondguess.errors import UserError
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig
from secondguess.train.data import Response, batches, digest, split_held_out
from secondguess.train.feed import Feed
from secondguess.train.objective import Tally, objective, reconsider_of
from secondguess.train.run_folder import RunFolder
from secondguess.train.start import new_drafter, new_optimizer, use_bfloat16


class Trainer:
    """One run in one folder. Nothing is written, and no captured state is read, before ``run``."""

    def __init__(
        self,
        config: TrainConfig,
        target: HFTarget,
        responses: list[Response],
        store: StateStore,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """``record``: revision, versions and machine, kept in the run folder and in the checkpoint."""
        self.config, self.record = config, record or {}
        self.training, self.held_out = split_held_out(responses, config.held_out)
        self.steps_per_epoch = len(self.training) // config.batch_size
        if self.steps_per_epoch == 0:
            few = f"{len(self.training)} training responses do not fill one batch of {config.batch_size}"
            raise UserError(f"{few}: give more, or a smaller batch_size")
        self.num_steps = config.epochs * self.steps_per_epoch
        counts = count_tokens((responses[i].answer for i in self.training), target.spec.vocab_size)
        target_ids = choose_vocab(counts, config.draft_vocab_size)
        self.coverage = coverage(counts, target_ids)
        self.drafter, self.made_for = new_drafter(target, config, target_ids), asdict(target.facts)
        draft_of = target_to_draft(target_ids, target.spec.vocab_size)
        self.feed = Feed(responses, store, head_rows(target.head_weight, target_ids), draft_of)
        self.optimizer = new_optimizer(self.drafter, config)
        self.bfloat16 = use_bfloat16(config.precision)
        inputs = {
            "target weights": target.fingerprint,
            "content of responses": digest(responses),
            "draft vocabulary": target_ids.tolist(),
        }
        self.folder = RunFolder(Path(config.out).expanduser(), config, inputs)
        self.step, self.num_saved, self.seconds, self.window, self.log_bytes = 0, 0, 0.0, Tally(), 0
        self.resume()

    # -- one step ------------------------------------------------------------------------------------------------

    def products(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.bfloat16 else contextlib.nullcontext()

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then cosine to zero."""
        warm = max(1, round(self.config.warmup * self.num_steps))
        if step < warm:
            return self.config.lr * (step + 1) / warm
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.num_steps - warm)))

    def train_step(self, indices: list[int]) -> tuple[float, Tally]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        with self.products():
            batch = self.feed.batch(indices)
            loss, tally = objective(self.drafter, batch, self.config, reconsider_of(self.config, self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.item(), tally

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Held-out losses per unroll step and level; every row gets a second look here, whatever rho trains on."""
        tally, look = Tally(), reconsider_of(self.config, self.step)
        # Nothing carried: level 0 then does what EAGLE's does, and their numbers compare.
        look = look and replace(look, rho=1.0, carry="off")
        with self.products():
            for i in range(0, len(self.held_out), self.config.batch_size):
                batch = self.feed.batch(self.held_out[i : i + self.config.batch_size])
                tally.add(objective(self.drafter, batch, self.config, look)[1])
        return tally.summary()

    # -- the loop ------------------------------------------------------------------------------------------------

    def remaining_batches(self) -> Iterator[list[int]]:
        first_epoch, done = divmod(self.step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.config.epochs):
            order = list(batches(self.training, self.config.batch_size, self.config.seed, epoch))
            yield from order[done:] if epoch == first_epoch else order

    def run(
        self,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        on_log: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:
        """Train to the end and write the checkpoint.

        ``on_step`` hears the number of steps done and the last loss, ``on_log`` each line of the log. A
        KeyboardInterrupt raised by ``on_step`` loses nothing: the run goes on from that step.
        """
        self.folder.start(self.record, self.log_bytes)
        for indices in self.remaining_batches():
            clock = time.perf_counter()
            loss, tally = self.train_step(indices)
            self.window.add(tally)
            self.step += 1
            self.seconds += time.perf_counter() - clock
            last = self.step == self.num_steps
            if self.step % self.config.eval_every == 0 or last:
                on_log(self.log())
            if self.step % self.config.save_every == 0 or last:
                self.save()
            try:
                on_step(self.step, loss)
            except KeyboardInterrupt:
                self.save()
                raise
        self.export()

    def log(self) -> dict[str, Any]:
        """Add a line on the steps since the last one to the log."""
        line = {
            "step": self.step,
            "of": self.num_steps,
            "seconds": round(self.seconds, 1),
            "lr": self.learning_rate(self.step - 1),
            "train": self.window.summary(),
            "held_out": self.evaluate(),
            "rows": sum(self.window.rows),
        }
        self.folder.log(line)
        self.window = Tally()
        return line

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "window": asdict(self.window),
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.folder.save(state)
        self.num_saved = self.step

    def resume(self) -> None:
        state = self.folder.load()
        if state is None:
            return
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.num_saved = state["step"]
        self.seconds, self.log_bytes = state["seconds"], state["log_bytes"]
        self.window = Tally(**state["window"])

    def export(self) -> None:
        notes = {
            "target": self.config.target,
            "method": self.config.method,
            "made_for": self.made_for,
            "training": {
                "settings": {k: v for k, v in asdict(self.config).items() if k not in ("out", "captures")},
                "steps": self.num_steps,
                "seconds": round(self.seconds),
                "num_responses": len(self.training),
                "vocabulary_coverage": round(self.coverage, 4),
                "record": {k: v for k, v in self.record.items() if k != "command"},
            },
        }
        save_drafter(self.drafter, self.folder.drafter, notes)
