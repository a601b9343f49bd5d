"""What ``secondguess bench`` runs, made of its flags: prompts as token ids, an LLM per method, the run folder."""

from __future__ import annotations

import argparse
import hashlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.bench.plan import make_groups
from secondguess.bench.runner import Bench
from secondguess.bench.store import Store
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.conversations import encode_all
from secondguess.drafter.shipped import find_drafter
from secondguess.engine.thread import run
from secondguess.llm import LLM
from secondguess.methods import Method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console


CONVERSATION_BATCH = 16  # first answers are decoded together, whatever is timed


def make_bench(
    args: argparse.Namespace, target: HFTarget, methods: list[Method], prompts: list[TaskPrompt], console: Console
) -> Bench:
    """Prompts as token ids, and one LLM per method with just the room that they need."""
    encoded = encode_all(target, prompts, args.max_new_tokens, CONVERSATION_BATCH, console)
    longest = max(len(prompt.ids) for prompt in encoded) + args.max_new_tokens
    room = {"max_batch_size": args.batch_size, "max_model_len": min(longest, target.spec.context_len)}
    drafters = {m: args.drafter if m.has_drafter else None for m in methods}
    llms = {m: LLM(target, drafter, method=m.typed, tree=m.tree, **room) for m, drafter in drafters.items()}
    groups = make_groups(encoded, args.batch_size)
    return Bench(llms, groups, args.batch_size, args.temperatures, args.max_new_tokens, args.seed)


def open_store(args: argparse.Namespace, bench: Bench, record: dict[str, Any]) -> Store:
    """The run folder. A result may be continued only with what would have given the same one, on the same machine."""
    flags = {name: value for name, value in vars(args).items() if name not in ("out", "json", "data_dir", "tasks")}
    made_of = {
        "target_weights": next(iter(bench.llms.values())).target.fingerprint,
        "drafter_weights": drafter_digests(bench, args.drafter),
        "prompts": [
            [p.task, p.id, hashlib.sha256(str(p.ids).encode()).hexdigest()] for g in bench.groups for p in g.prompts
        ],
        "machine": record["machine"],
    }
    folder = args.out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    return Store(folder, flags | made_of, record["revision"])


def drafter_digests(bench: Bench, drafter: str | None) -> dict[str, str]:
    """SHA-256 of the weight files of every drafter that takes part."""
    digests = {}
    for method, llm in bench.llms.items():
        if method.has_drafter:
            folder = run(find_drafter, drafter, method.name, llm.target.embedding)
            files = sorted(folder.rglob("*.safetensors"))
            digests[method.name] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return digests
