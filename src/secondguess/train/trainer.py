"""The training loop: exact resume, held-out evaluation, a JSONL log, a checkpoint that serves."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from secondguess.capture.store import StateStore
from secondguess.drafter.checkpoint import save_drafter
from secondguess.drafter.fit import drafter_config, final_norm_gain, head_rows
from secondguess.drafter.model import Drafter, initialise
from secondguess.drafter.vocab import choose_vocab, count_tokens, coverage, target_to_draft
from secondguess.errors import UserError
from secondguess.target.hf import HFTarget
from secondguess.train.config import TrainConfig, dump_config
from secondguess.train.data import Response, batches, split_held_out
from secondguess.train.objective import Tally, objective, reconsider_of
from secondguess.train.unroll import Batch


def use_bfloat16(precision: str) -> bool:
    """``auto`` takes bfloat16 products where the processor multiplies them natively."""
    return precision == "bfloat16" or (precision == "auto" and torch.cpu._is_avx512_bf16_supported())


def new_drafter(target: HFTarget, config: TrainConfig, target_ids: torch.Tensor) -> Drafter:
    """A drafter for ``target`` at its start point."""
    shape = drafter_config(target.model, config.draft_vocab_size, config.method == "pr")
    drafter = Drafter(shape, target.embedding.detach().float(), target_ids)
    initialise(drafter, head_rows(target.head_weight, target_ids), final_norm_gain(target.model), config.seed)
    return drafter


@dataclass(frozen=True, slots=True)
class Feed:
    """Builds training batches from captured states."""

    responses: list[Response]
    store: StateStore
    head_VH: torch.Tensor  # the target's output rows of the draft vocabulary
    draft_of: torch.Tensor  # [target vocabulary] -> draft id or -1

    def batch(self, indices: list[int]) -> Batch:
        states = [self.store[i] for i in indices]
        hidden_T4H = torch.cat([s.hidden_T4H for s in states]).float()
        best_T = torch.cat([s.best_T for s in states]).long()
        return Batch(
            tokens_T=torch.cat([torch.tensor(self.responses[i].input_ids) for i in indices]),
            taps_TLH=hidden_T4H[:, :3],
            target_TV=(hidden_T4H[:, 3] @ self.head_VH.T).float().softmax(dim=-1),
            offered_T=self.draft_of[best_T] >= 0,
            lengths_B=torch.tensor([len(self.responses[i].input_ids) for i in indices]),
            answer_starts_B=torch.tensor([self.responses[i].prompt_len for i in indices]),
        )


class Trainer:
    """One run in one folder: ``run.yaml``, ``log.jsonl``, ``resume.pt``, and in the end the checkpoint ``drafter/``."""

    def __init__(self, config: TrainConfig, target: HFTarget, responses: list[Response], store: StateStore) -> None:
        self.config, self.folder = config, Path(config.out)
        self.training, self.held_out = split_held_out(responses, config.held_out)
        self.steps_per_epoch = len(self.training) // config.batch_size
        if self.steps_per_epoch == 0:
            raise UserError(f"{len(self.training)} training responses do not fill one batch of {config.batch_size}")
        self.num_steps = config.epochs * self.steps_per_epoch
        counts = count_tokens((responses[i].answer for i in self.training), target.spec.vocab_size)
        target_ids = choose_vocab(counts, config.draft_vocab_size)
        self.coverage = coverage(counts, target_ids)
        self.drafter = new_drafter(target, config, target_ids)
        draft_of = target_to_draft(target_ids, target.spec.vocab_size)
        self.feed = Feed(responses, store, head_rows(target.head_weight, target_ids), draft_of)
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.bfloat16 = use_bfloat16(config.precision)
        self.step, self.seconds = 0, 0.0
        self.folder.mkdir(parents=True, exist_ok=True)
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
        tally = Tally()
        with self.products():
            for i in range(0, len(self.held_out), self.config.batch_size):
                batch = self.feed.batch(self.held_out[i : i + self.config.batch_size])
                tally.add(objective(self.drafter, batch, self.config, reconsider_of(self.config, 0, rho=1.0))[1])
        return tally.summary()

    # -- the loop ------------------------------------------------------------------------------------------------

    def remaining_batches(self) -> Iterator[list[int]]:
        first_epoch, done = divmod(self.step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.config.epochs):
            order = list(batches(self.training, self.config.batch_size, self.config.seed, epoch))
            yield from order[done:] if epoch == first_epoch else order

    def run(self, on_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Train to the end. ``on_step`` hears the number of steps done and the last loss."""
        c = self.config
        window, clock = Tally(), time.perf_counter()
        for indices in self.remaining_batches():
            loss, tally = self.train_step(indices)
            window.add(tally)
            self.step += 1
            last = self.step == self.num_steps
            if self.step % c.eval_every == 0 or last:
                self.seconds += time.perf_counter() - clock
                self.log({"train": window.summary(), "held_out": self.evaluate(), "rows": sum(window.rows)})
                window, clock = Tally(), time.perf_counter()
            if self.step % c.save_every == 0 or last:
                self.seconds += time.perf_counter() - clock
                self.save()
                clock = time.perf_counter()
            on_step(self.step, loss)
        self.export()

    def log(self, entry: dict[str, Any]) -> None:
        lr = self.learning_rate(self.step - 1)
        line = {"step": self.step, "of": self.num_steps, "seconds": round(self.seconds, 1), "lr": lr, **entry}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Everything a resumed run needs, and the size of the log, so that lines of lost steps are cut off."""
        log = self.folder / "log.jsonl"
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "seconds": self.seconds,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "log_bytes": log.stat().st_size if log.exists() else 0,
        }
        temporary = self.folder / "resume.partial"
        torch.save(state, temporary)
        temporary.rename(self.folder / "resume.pt")

    def resume(self) -> None:
        path = self.folder / "resume.pt"
        (self.folder / "run.yaml").write_text(dump_config(self.config))
        if not path.exists():
            (self.folder / "log.jsonl").unlink(missing_ok=True)
            return
        state = torch.load(path, weights_only=True)
        if state["config"] != asdict(self.config):
            changed = [k for k, v in asdict(self.config).items() if state["config"].get(k) != v]
            raise UserError(f"{self.folder} holds a run with another {', '.join(changed)}: choose another out folder")
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        with (self.folder / "log.jsonl").open("a") as file:
            file.truncate(state["log_bytes"])

    def export(self) -> None:
        notes = {
            "target": self.config.target,
            "method": self.config.method,
            "training": {
                **{k: v for k, v in asdict(self.config).items() if k not in ("out", "captures")},
                "steps": self.num_steps,
                "seconds": round(self.seconds),
                "responses": len(self.training),
                "vocabulary_coverage": round(self.coverage, 4),
            },
        }
        save_drafter(self.drafter, self.folder / "drafter", notes)
