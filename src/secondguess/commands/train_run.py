"""The work of ``secondguess train``, shown while it goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from secondguess.capture.run import disk_need, fill
from secondguess.commands.progress import progress
from secondguess.train.setup import Setup
from secondguess.train.trainer import Trainer


def describe(setup: Setup) -> str:
    t, store = setup.trainer, setup.store
    c, size, missing = t.config, sum(p.numel() for p in t.drafter.parameters()), store.missing
    start = f", continuing at step {t.step}" if t.step else ""
    if t.step == t.num_steps:
        start = ", finished already"
    need = disk_need(setup.target, store.tokens(missing)) / 1e9
    captures = f"{len(missing)} of {len(store.shards)} shards missing, {need:.2f} GB more" if missing else "complete"
    return (
        f"{c.method} drafter for {c.target}: {size / 1e6:.1f}M parameters, {t.num_steps} steps{start}\n"
        f"{len(t.training)} responses for training, {len(t.held_out)} held out\n"
        f"draft vocabulary {c.draft_vocab_size}: {t.coverage:.2%} of answer tokens; "
        f"{'bfloat16' if t.bfloat16 else 'float32'} products; run folder {t.folder.path}\n"
        f"states of {sum(store.lengths):,} tokens in {store.folder}: {captures}"
    )


def capture(setup: Setup, console: Console) -> None:
    store = setup.store
    if not store.missing:
        return
    with progress(console) as bar:
        task = bar.add_task("capturing target states", total=store.tokens(store.missing))
        fill(store, setup.target, setup.sequences, lambda n: bar.advance(task, n))


def train(trainer: Trainer, console: Console) -> None:
    try:
        with progress(console) as bar, interrupt_between_steps() as check:
            task = bar.add_task("training", total=trainer.num_steps, completed=trainer.step)

            def on_step(step: int, loss: float) -> None:
                bar.update(task, completed=step, description=f"training  loss {loss:.3f}")
                check()

            trainer.run(on_step, lambda line: console.print(held_out_lines(line), soft_wrap=True))
    except KeyboardInterrupt:
        kept = f"{trainer.num_saved} steps are kept in {trainer.folder.path}"
        console.print(f"{kept}; the same command goes on from there", soft_wrap=True)
        raise
    console.print(f"drafter written to {trainer.folder.drafter}", soft_wrap=True)


def held_out_lines(line: dict[str, Any]) -> str:
    """``step 200/900  level 0: held-out loss 2.10 2.40, top-1 0.51 0.44``: one number per unroll step."""
    held_out, start = line["held_out"], f"step {line['step']}/{line['of']}  "
    shown = []
    for level in (level for level in (0, 1) if held_out.get(f"loss{level}")):
        loss, top1 = numbers(held_out[f"loss{level}"]), numbers(held_out[f"top1_{level}"])
        shown.append(f"{start}level {level}: held-out loss {loss}, top-1 {top1}")
        start = " " * len(start)
    return "\n".join(shown) or f"{start}no response is held out"


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
