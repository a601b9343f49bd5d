"""``secondguess capture``: the target's states at its answers, on disk, ahead of training."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from secondguess.commands.options import add_device, add_target
from secondguess.commands.record import add_json, make_record, write_json
from secondguess.device import check_share, choose_device
from secondguess.errors import install, require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_target(parser)
    add("responses", type=Path, metavar="RESPONSES", help="JSONL file of the target's own answers, as train takes it")
    add("--captures", type=Path, default=Path("captures"), metavar="DIR", help="where states go (default: captures)")
    start = "drafter that training will start from (train's warm_start): the layers that it reads (default: EAGLE-3's)"
    add("--warm-start", default="none", metavar="DRAFTER", help=start)
    precision = "of the target: auto, float32 or bfloat16; as train's setting (default: auto)"
    add("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help=precision)
    add_device(parser)
    server = "vLLM server that extracts hidden states (docs/scale.md); OPENAI_API_KEY is its key"
    add("--endpoint", metavar="URL", help=server)
    add("--model", metavar="NAME", help="the target's name there (default: TARGET)")
    storage = "its shared_storage_path: files of states that were read are removed there (default: /dev/shm/states)"
    add("--shared-storage", type=Path, metavar="DIR", help=storage)
    add("--workers", type=int, metavar="INT", help="make the states in so many processes of a Ray cluster")
    gpus = "with --workers: GPUs of each, above 0 unless --device is cpu (default: 0)"
    add("--worker-gpus", type=float, default=0.0, metavar="FLOAT", help=gpus)
    add("--dry-run", action="store_true", help="check everything, say what is missing, and stop")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    check(args)
    from rich.console import Console

    from secondguess.commands.capture_run import filler
    from secondguess.commands.train_run import capture, describe_captures
    from secondguess.train.device import open_target
    from secondguess.train.setup import plan_captures, read_fitting
    from secondguess.train.start import tap_layers_of

    console = Console(stderr=True, highlight=False, markup=False)
    device = choose_device(args.device)
    target = open_target(args.target, args.precision, device, args.trust_remote_code, console.print)
    responses = read_fitting(args.responses, target, console.print)
    captures = plan_captures(target, responses, args.captures, tap_layers_of(target, args.warm_start))
    console.print(describe_captures(captures), soft_wrap=True)
    if not args.dry_run:
        capture(captures, console, filler(args, captures))
        console.print(f"complete in {captures.store.folder}", soft_wrap=True)
    if args.json:
        store = captures.store
        row = {
            "folder": str(store.folder),
            "sequences": len(store.lengths),
            "tokens": sum(store.lengths),
            "shards": len(store.shards) + len(store.missing),
            "missing": len(store.missing),
        }
        write_json(args.json, make_record(), "rows", [row])
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises UserError for flags that do not go together, or need what is not installed."""
    require(not (args.endpoint and args.workers), "give --endpoint or --workers: a server needs no workers")
    require(args.endpoint or not args.model, "--model is for --endpoint")
    require(args.endpoint or not args.shared_storage, "--shared-storage is for --endpoint")
    require(args.workers is None or args.workers >= 1, f"--workers must be at least 1, got {args.workers}")
    require(args.workers or not args.worker_gpus, "--worker-gpus is for --workers")
    if args.workers:
        check_share(args.device, args.worker_gpus, "--worker-gpus")
    for flag, given, module in (("endpoint", args.endpoint, "httpx2"), ("ray", args.workers, "ray")):
        missing = bool(given) and find_spec(module) is None
        require(not missing, f"{module} is not installed; it comes with: {install(flag)}")
