"""``secondguess serve``: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from secondguess.commands.options import add_dataclass, from_args
from secondguess.config import TreeConfig
from secondguess.errors import UserError
from secondguess.methods import METHODS, SHAPE, Method, parse_method, refuse_unused
from secondguess.server.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

    from fastapi import FastAPI

    from secondguess.target.hf import HFTarget

KEY_VARIABLE = "SECONDGUESS_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder, hub id, .gguf file, or smollm2-135m")
    add("--drafter", help="folder, or name of one that ships (default: the one named like the method)")
    methods = f"{', '.join(METHODS)}, with settings if wanted (pr:m=0); a request may ask for another"
    add("--method", default="pr", help=f"{methods} (default: pr)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, metavar="INT", help="0 takes a free one (default: 8000)")
    add("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (default: float32)")
    add("--device", default="cpu", help="where the models run (default: cpu)")
    room = "room for prompt and answer together, in tokens (default: the target's, at most 8192)"
    add("--max-model-len", type=int, metavar="INT", help=room)
    batch = "requests decoded together; others wait (default: 8)"
    add("--max-batch-size", "--max-num-seqs", type=int, default=8, metavar="INT", help=batch)
    add_dataclass(parser, TreeConfig, SHAPE)
    add_dataclass(parser, Settings)


def run(args: argparse.Namespace) -> int:
    settings, tree = from_args(Settings, args), from_args(TreeConfig, args)
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get(KEY_VARIABLE) or None)
    method = parse_method(args.method, tree)
    refuse_unused([method], tree)
    uvicorn = import_uvicorn()
    sock = bind(args.host, args.port)
    start_logging()
    app = make(args, method, tree, settings)
    config = uvicorn.Config(
        app, log_config=None, server_header=False, timeout_graceful_shutdown=round(settings.drain_timeout) or 1
    )
    log.info("serving %s at http://%s:%d", args.target, *sock.getsockname()[:2])
    if settings.api_key is None and args.host not in LOOPBACK:
        log.warning("whoever reaches %s can use the server: --api-key lets in those who know it", args.host)
    # What uvicorn does with the signal, it does first; then it raises it again.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        uvicorn.Server(config).run(sockets=[sock])
    except KeyboardInterrupt:
        log.info("stopped")
    return 0


def import_uvicorn() -> ModuleType:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; the server needs: pip install 'secondguess[serve]'") from error
    return uvicorn


def bind(host: str, port: int) -> socket.socket:
    """The address is taken before the models are loaded, and listened at after that."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port must be in [0, 65535], got {port}")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}; try another --host or --port") from error
    return sock


def start_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("secondguess", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


def make(args: argparse.Namespace, method: Method, tree: TreeConfig, settings: Settings) -> FastAPI:
    """The application, around an LLM."""
    from secondguess.engine.thread import run
    from secondguess.llm import LLM
    from secondguess.server.app import make_app
    from secondguess.server.service import Service
    from secondguess.target.load import load_target

    log.info("loading %s", args.target)
    target = run(load_target, args.target, args.dtype, args.device)
    llm = LLM(
        target,
        args.drafter,
        method=args.method,
        others=others(method, args.drafter, target),
        tree=tree,
        max_batch_size=args.max_batch_size,
        max_model_len=args.max_model_len,
    )
    return make_app(Service(llm, args.target, settings))


def others(method: Method, drafter: str | None, target: HFTarget) -> list[str]:
    """What requests may ask for besides: methods without a drafter, and EAGLE-3.1 where there is a PR drafter."""
    from secondguess.drafter.shipped import shipped_for

    names = [name for name in ("ar", "ngram") if name != method.name]
    if method.name == "pr" and (drafter is not None or "eagle3.1" in shipped_for(target.embedding)):
        names.append("eagle3.1")
    return names
