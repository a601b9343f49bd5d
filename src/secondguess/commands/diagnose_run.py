"""What ``secondguess diagnose`` runs and writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.bench.chain import ChainSpeculator
from secondguess.bench.diagnosis import Diagnosis, Nodes, Positions, diagnose, results
from secondguess.bench.observe import chain_positions, read_confident, table, tree_nodes
from secondguess.bench.offers import OfferWatch
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.progress import progress
from secondguess.commands.record import passport, write_json
from secondguess.commands.recordings import recordings
from secondguess.commands.show_diagnosis import markdown
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.methods import Method, open_drafter
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console


def look(
    args: argparse.Namespace,
    target: HFTarget,
    method: Method,
    prompts: list[TaskPrompt],
    console: Console,
    folder: Path | None = None,
) -> Diagnosis:
    """Replay the drafter's greedy chains and the method's trees over plain decoding's texts.

    ``folder``: where these are kept, see ``transcribe``.
    """
    drafter = run(open_drafter, method, target, args.drafter)
    tree = method.tree_for(drafter.config)
    [recording] = recordings(args, target, [method], prompts, console, folder=folder)
    size, columns = args.batch_size, recording.num_columns
    chain = run(ChainSpeculator, drafter, tree, size, columns)
    trees = run(OfferWatch, drafter, tree, size, columns)
    positions, nodes = [], []
    with progress(console) as bar:
        task = bar.add_task("replay", total=len(recording.transcripts))
        for start in range(0, len(recording.transcripts), size):
            read = [run(read_confident, target, t, draw) for t, draw in recording.drawn[start : start + size]]
            texts = [text for text, _ in read]
            positions += run(chain_positions, chain, texts, [confidences for _, confidences in read])
            nodes += run(tree_nodes, trees, texts)
            bar.advance(task, len(texts))
    if not positions:
        raise UserError("nothing was drafted: every answer ends with its first token; raise --max-new-tokens")
    return diagnose(table(Positions, positions), table(Nodes, nodes), trees.refined)


def write(diagnosis: Diagnosis, setting: str, record: Mapping[str, Any], folder: Path) -> None:
    from secondguess.commands.plots import draw, save

    write_json(folder / "diagnosis.json", record, "results", results(diagnosis))
    text = f"{passport(record)}\n\n{setting}\n\n{markdown(diagnosis)}"
    (folder / "table7.md").write_text(text, encoding="utf-8")
    for name, figure in draw(diagnosis, setting).items():
        save(figure, folder, name)
