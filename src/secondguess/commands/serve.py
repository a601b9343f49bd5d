"""``secondguess serve``: the OpenAI-compatible server, and the page."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from secondguess.commands.options import add_dataclass, add_device, add_drafter, add_target, from_args
from secondguess.commands.others import others
from secondguess.config import TreeConfig
from secondguess.device import choose_device
from secondguess.errors import UserError, install, require
from secondguess.methods import METHODS, SHAPE, Method, parse_method, refuse_unused
from secondguess.server.replicas import Replicas
from secondguess.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

KEY_VARIABLE = "SECONDGUESS_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_target(parser)
    add_drafter(parser)
    methods = f"{', '.join(METHODS)}, with settings if wanted (pr:m=0); a request may ask for another"
    add("--method", default="pr", help=f"{methods} (default: pr)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, metavar="INT", help="0 takes a free one (default: 8000)")
    add("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (default: float32)")
    add_device(parser)
    room = "room for prompt and answer together, in tokens (default: the target's, at most 8192)"
    add("--max-model-len", type=int, metavar="INT", help=room)
    batch = "requests decoded together; others wait (default: 8)"
    add("--max-batch-size", "--max-num-seqs", type=int, default=8, metavar="INT", help=batch)
    kv = "texts may have so many tokens together, then the newest waits (default: what slots and memory hold)"
    add("--kv-cache-tokens", type=int, metavar="INT", help=kv)
    off = "read every prompt from its beginning, whatever others begin with (default: what they share is read once)"
    add("--no-enable-prefix-caching", dest="prefix_caching", action="store_false", help=off)
    add("--ray", action="store_true", help="serve replicas through Ray Serve, on this machine or RAY_ADDRESS's cluster")
    add_dataclass(parser, Replicas)
    add_dataclass(parser, TreeConfig, SHAPE)
    add_dataclass(parser, Settings)


def run(args: argparse.Namespace) -> int:
    settings, tree = from_args(Settings, args), from_args(TreeConfig, args)
    if settings.api_key is None:
        settings = replace(settings, api_key=os.environ.get(KEY_VARIABLE) or None)
    method = parse_method(args.method, tree)
    refuse_unused([method], tree)
    check_installed()
    replicas = from_args(Replicas, args)
    if args.ray:
        from secondguess.commands.serve_ray import serve_replicas

        return serve_replicas(args, tree, settings, replicas)
    require(replicas == Replicas(), "settings of replicas are for --ray")
    from secondguess.server.listen import bind, listen
    from secondguess.target.spread import is_follower

    sock = bind(args.host, 0 if is_follower() else args.port)
    start_logging()
    app = make(args, method, tree, settings)
    warn_if_open(args.host, settings)
    return 0 if listen(app, sock) else 1


def warn_if_open(host: str, settings: Settings) -> None:
    if settings.api_key is None and host not in LOOPBACK:
        log.warning("whoever reaches %s can use the server: --api-key lets in those who know it", host)


def check_installed() -> None:
    missing = [name for name in ("fastapi", "prometheus_client", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is not installed; the server needs: {install('serve')}")


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
    from secondguess.target.spread import load_spread

    log.info("loading %s", args.target)
    target = run(load_spread, args.target, args.dtype, str(choose_device(args.device)), args.trust_remote_code)
    llm = LLM(
        target,
        args.drafter,
        method=args.method,
        others=others(method, args.drafter, target),
        tree=tree,
        max_batch_size=args.max_batch_size,
        max_model_len=args.max_model_len,
        kv_cache_tokens=args.kv_cache_tokens,
        enable_prefix_caching=args.prefix_caching,
    )
    return make_app(Service(llm, args.target, settings))
