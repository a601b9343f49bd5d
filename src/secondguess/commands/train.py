"""``secondguess train``: from the target's own answers to a drafter, in one command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from secondguess.target.hf import HFTarget
    from secondguess.train.config import TrainConfig
    from secondguess.train.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file of training settings")
    parser.add_argument("--print-config", action="store_true", help="print the settings in full and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be done, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")


def run(args: argparse.Namespace) -> int:
    from secondguess.train.config import dump_config, load_config

    config, console = load_config(args.config, args.overrides), Console(stderr=True)
    if args.print_config:
        Console().print(dump_config(config), end="", highlight=False)
        return 0
    trainer = prepare(config, console)
    console.print(describe(trainer), highlight=False)
    if not args.dry_run:
        train(trainer, console)
    return 0


def prepare(config: TrainConfig, console: Console) -> Trainer:
    """Load the target, capture its states where they are missing, and set the run up (or pick it up again)."""
    from secondguess.target.load import load_target
    from secondguess.train.data import read_responses
    from secondguess.train.trainer import Trainer, use_bfloat16

    # Captured in the precision that is trained in: half the time of float32 where bfloat16 is native.
    target = load_target(config.target, "bfloat16" if use_bfloat16(config.precision) else "float32")
    responses = read_responses(Path(config.responses), target.spec.vocab_size)
    store = capture_states(target, [r.input_ids for r in responses], Path(config.captures), console)
    return Trainer(config, target, responses, store)


def capture_states(target: HFTarget, sequences: list[tuple[int, ...]], folder: Path, console: Console):
    from secondguess.capture.run import capture
    from secondguess.commands.progress import progress

    with progress(console) as bar:
        task = bar.add_task("capturing target states", total=sum(map(len, sequences)))
        return capture(target, sequences, folder, lambda n: bar.advance(task, n))


def describe(trainer: Trainer) -> str:
    c = trainer.config
    size = sum(p.numel() for p in trainer.drafter.parameters())
    start = f", continuing at step {trainer.step}" if trainer.step else ""
    return (
        f"{c.method} drafter for {c.target}: {size / 1e6:.1f}M parameters, {trainer.num_steps} steps{start}\n"
        f"{len(trainer.training)} responses for training, {len(trainer.held_out)} held out\n"
        f"draft vocabulary {c.draft_vocab_size}: {trainer.coverage:.2%} of answer tokens; "
        f"{'bfloat16' if trainer.bfloat16 else 'float32'} products; run folder {c.out}"
    )


def train(trainer: Trainer, console: Console) -> None:
    from secondguess.commands.progress import progress

    with progress(console) as bar:
        task = bar.add_task("training", total=trainer.num_steps, completed=trainer.step)

        def on_step(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"training  loss {loss:.3f}")
            if not console.is_terminal and step % trainer.config.save_every == 0:
                console.print(f"step {step}/{trainer.num_steps}  loss {loss:.3f}", highlight=False)

        trainer.run(on_step)
    console.print(f"drafter written to {trainer.folder / 'drafter'}", highlight=False)
