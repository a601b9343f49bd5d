"""Ways of ``secondguess capture`` to make states: in this process, on a server, or by workers of a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

from secondguess.commands.options import absolute
from secondguess.train.setup import Captures

# Makes the shards that are missing; its argument hears how many more tokens were done.
Filler = Callable[[Callable[[int], None]], None]


def filler(args: argparse.Namespace, captures: Captures) -> Filler:
    if args.workers:
        return lambda on_tokens: by_workers(args, captures, on_tokens)
    return served(args, captures).fill if args.endpoint else captures.fill


def served(args: argparse.Namespace, captures: Captures) -> Captures:
    from secondguess.capture.served import STORAGE, Served  # needs an extra

    key = os.environ.get("OPENAI_API_KEY", "").strip()
    name, layers = args.model or args.target, captures.store.tap_layers
    storage = (args.shared_storage or STORAGE).expanduser()
    source = Served(args.endpoint, name, key or None, storage, captures.target, captures.sequences, layers)
    if captures.store.missing:
        source.check()
    return replace(captures, source=source)


def by_workers(args: argparse.Namespace, captures: Captures, on_tokens: Callable[[int], None]) -> None:
    from secondguess.integrations.ray_capture import Task, fill_with_workers  # needs an extra

    task = Task(
        target=absolute(args.target),
        responses=args.responses.expanduser().resolve(),
        captures=args.captures.expanduser().resolve(),
        precision=str(captures.target.spec.dtype).removeprefix("torch."),  # what "auto" was here
        device=args.device,
        gpus=args.worker_gpus,
        trust_remote_code=args.trust_remote_code,
        tap_layers=captures.store.tap_layers,
        shards=captures.store.missing,
    )
    fill_with_workers(task, args.workers, on_tokens)
