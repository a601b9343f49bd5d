"""The work of ``secondguess train``, shown while it goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from secondguess.commands.progress import progress
from secondguess.errors import install
from secondguess.lock import locked
from secondguess.train.config import TrainConfig
from secondguess.train.setup import Captures, Setup
from secondguess.train.track import Tracker, open_tracker, scalars
from secondguess.train.trainer import Trainer


def describe(setup: Setup) -> str:
    t = setup.trainer
    c, plan, size = t.config, t.plan, sum(p.numel() for p in t.drafter.parameters())
    start = f", continuing at step {t.step}" if t.step else ""
    if t.step == plan.num_steps:
        start = ", finished already"
    tokens = sum(len(t.learner.feed.responses[i].answer) - 1 for i in t.training)
    held_out = f"{len(t.judge.held_out)} held out, tau on {len(t.judge.replayed)} of them"
    of = f" from {c.warm_start}" if c.warm_start != "none" else ""
    where = t.learner.device.type + (f", {t.processes.count} processes" if t.processes.count > 1 else "")
    return (
        f"{c.method} drafter for {c.target}{of}: {size / 1e6:.1f}M parameters, {plan.num_steps} steps of "
        f"{plan.step_size}{start}\n"
        f"{len(t.training)} responses for training, {held_out}; {tokens:,} trained tokens, {c.epochs} times\n"
        f"draft vocabulary {len(t.drafter.target_ids)}: {t.coverage:.2%} of answer tokens; "
        f"{'bfloat16' if t.learner.bfloat16 else 'float32'} products on {where}; run folder {t.folder.path}\n"
        f"{describe_shared_loss(c)}"
        f"{describe_captures(setup.captures) if setup.captures else 'states made as they are needed, no captures'}"
    )


def describe_shared_loss(c: TrainConfig) -> str:
    """A line on what ``auto`` comes to and why, if there is something to choose."""
    if not c.recipe.level1 or c.shared_loss != "auto":
        return ""
    reasons = c.reasons_for_both
    if not reasons:
        return "shared_loss=auto: level0, the weights that both levels use are those of eagle3.1\n"
    if reasons == ["parallel=shard"]:
        fix = "parallel=replicate trains level0, shared_loss=both trains this one either way"
        return f"warning: parallel=shard makes it another recipe, shared_loss=auto is both and not level0: {fix}\n"
    return f"shared_loss=auto: both, because of {' and '.join(reasons)}\n"


def describe_captures(captures: Captures) -> str:
    store, missing = captures.store, len(captures.store.missing)
    more = f"{missing} of {missing + len(store.shards)} shards missing, {captures.bytes_missing / 1e9:.2f} GB more"
    folders = sorted({str(path.parent) for path in store.shards} | ({str(store.folder)} if missing else set()))
    return f"states of {sum(store.lengths):,} tokens in {' and '.join(folders)}: {more if missing else 'complete'}"


def estimate(setup: Setup) -> str:
    """How long the steps that are left take, if their states are there to try one."""
    t = setup.trainer
    if t.step == t.plan.num_steps:
        return "nothing is left to do"
    if setup.captures and setup.captures.store.missing:
        return "the time is estimated once there are states to try a step on"
    seconds = t.seconds_per_step()
    total = seconds * (t.plan.num_steps - t.step)
    spent = f"{total / 3600:.1f} h" if total > 3600 else f"{total / 60:.1f} min"
    return f"about {spent} without evaluation: {seconds:.2f} s a step, measured on one batch"


def capture(captures: Captures, console: Console, fill: Callable[[Callable[[int], None]], None]) -> None:
    """Make the states that are missing by ``fill``, whose argument hears how many more tokens were done."""
    store = captures.store
    if not store.missing:
        return
    with locked(store.folder), progress(console) as bar:
        task = bar.add_task("capturing target states", total=store.tokens(store.missing))
        fill(lambda n: bar.advance(task, n))


def train(trainer: Trainer, console: Console) -> None:
    report = Report(trainer, console)
    try:
        with progress(console) as bar, interrupt_between_steps() as check:
            task = bar.add_task("training", total=trainer.plan.num_steps, completed=trainer.step)

            def on_step(step: int, loss: float) -> None:
                speed = trainer.window.tokens_per_second
                shown = f"training  loss {loss:.3f}" + (f"  {speed:,.0f} tokens/s" if speed else "")
                bar.update(task, completed=step, description=shown)
                check()

            trainer.run(on_step, report)
    except KeyboardInterrupt:
        kept = f"{trainer.num_saved} steps are kept in {trainer.folder.path}"
        console.print(f"{kept}; the same command goes on from there", soft_wrap=True)
        raise
    finally:
        report.close()
    console.print(f"drafter written to {trainer.folder.drafter}", soft_wrap=True)


class Report:
    """Hears every line of the log: on the console, as curves, and for a tracker."""

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self.trainer, self.console = trainer, console
        first = trainer.processes.first
        self.tracker: Tracker | None = open_tracker(trainer.config, trainer.folder.path) if first else None
        self.draws = first and find_spec("matplotlib") is not None
        if not self.draws:
            console.print(f"no curves.png: it needs matplotlib, {install('plots')}", markup=False, soft_wrap=True)

    def __call__(self, line: dict[str, Any]) -> None:
        self.console.print(held_out_lines(line), soft_wrap=True)
        if self.tracker:
            self.tracker.log(line["step"], dict(scalars(line)))
        if self.draws:
            from secondguess.commands.curves import save_curves

            save_curves(self.trainer.folder.log_lines(), self.trainer.folder.path / "curves.png")

    def close(self) -> None:
        if self.tracker:
            self.tracker.close()


def held_out_lines(line: dict[str, Any]) -> str:
    """``step 200/900  level 0: held-out loss 2.10 2.40, top-1 0.51 0.44``: one number per unroll step.

    Then the acceptance length, if it was measured, and the speed.
    """
    held_out, start = line["held_out"], f"step {line['step']}/{line['of']}  "
    shown = []
    for level in (level for level in (0, 1) if held_out.get(f"loss{level}")):
        loss, top1 = numbers(held_out[f"loss{level}"]), numbers(held_out[f"top1_{level}"])
        shown.append(f"level {level}: held-out loss {loss}, top-1 {top1}")
    speed = line["speed"]
    last = f"{speed['tokens_per_second']:,.0f} tokens/s, {speed['share_of_peak']:.0%} of peak"
    shown = shown or ["no response is held out"]
    return start + f"\n{' ' * len(start)}".join([*shown, ", ".join([*taus(line), last])])


def taus(line: dict[str, Any]) -> list[str]:
    """``held-out tau 2.31 (m = 0: 2.28)``, or nothing."""
    tau, plain = line.get("held_out_tau"), line.get("held_out_tau_m0")
    if tau is None:
        return []
    return [f"held-out tau {tau:.2f}" + (f" (m = 0: {plain:.2f})" if plain is not None else "")]


def numbers(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


@contextmanager
def interrupt_between_steps() -> Generator[Callable[[], None]]:
    """The first Ctrl-C waits until the yielded function is called, where the run is in one piece; a second does not."""
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
