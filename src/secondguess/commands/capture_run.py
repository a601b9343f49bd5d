"""Ways of ``secondguess capture`` to make states: in this process, on a server, or by workers of a cluster."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace

from secondguess.train.setup import Captures

# Makes the shards that are missing; its argument hears how many more tokens were done.
Filler = Callable[[Callable[[int], None]], None]


def filler(args: argparse.Namespace, captures: Captures) -> Filler:
    if args.workers:
        return lambda on_tokens: by_workers(args, captures, on_tokens)
    return served(args, captures).fill if args.endpoint else captures.fill


def served(args: argparse.Namespace, captures: Captures) -> Captures:
    from secondguess.capture.served import Served  # needs an extra

    key = os.environ.get("OPENAI_API_KEY", "").strip()
    source = Served(args.endpoint, args.model or args.target, key or None, captures.target, captures.sequences)
    return replace(captures, source=source)


def by_workers(args: argparse.Namespace, captures: Captures, on_tokens: Callable[[int], None]) -> None:
    from secondguess.device import choose_device
    from secondguess.integrations.ray_capture import Task, fill_with_workers  # needs an extra

    paths = args.responses.resolve(), args.captures.resolve()
    task = Task(args.target, *paths, args.precision, choose_device(args.device).type, args.trust_remote_code)
    fill_with_workers(task, captures.store.missing, args.workers, on_tokens)
