"""``secondguess serve --ray``: a user's mistakes are found here, before replicas find them on other machines."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from secondguess.commands.options import absolute
from secondguess.commands.serve import make, start_logging, warn_if_open
from secondguess.config import TreeConfig
from secondguess.device import check_share
from secondguess.errors import install, require
from secondguess.methods import Method, parse_method
from secondguess.server.replicas import Address, Replicas
from secondguess.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)


def serve_replicas(args: Namespace, tree: TreeConfig, settings: Settings, replicas: Replicas) -> int:
    """With a copy of all settings in each replica, on whatever machine it is."""
    require(find_spec("ray") is not None, f"ray is not installed; --ray needs: {install('ray,serve')}")
    check_share(args.device, replicas.replica_gpus, "--replica-gpus")
    start_logging()
    name = settings.served_model_name or args.target
    settings, args = replace(settings, served_model_name=name), portable(args, tree)
    method = parse_method(args.method, tree)
    check_models(args, method)
    port = take_port(args.host, args.port)
    from secondguess.integrations.ray_serve import deployed, wait

    def make_replica() -> FastAPI:
        start_logging()
        return make(args, method, tree, settings)

    wanted = Address(args.host, port, settings.request_timeout)
    with deployed(make_replica, replicas, settings, args.max_batch_size, wanted) as there:
        log.info("serving %s at http://%s:%d (a page for browsers is there, too)", name, there.host, there.port)
        warn_if_open(there.host, settings)
        wait()
    return 0


def portable(args: Namespace, tree: TreeConfig) -> Namespace:
    """The same arguments, whose paths hold in other folders too."""
    method, typed = parse_method(args.method, tree), args.method
    if method.drafter:
        typed = typed.replace(f"drafter={method.drafter}", f"drafter={absolute(method.drafter)}")
    drafter = args.drafter and absolute(args.drafter)
    changes = {"target": absolute(args.target), "drafter": drafter, "method": typed}
    return Namespace(**vars(args) | changes)


def check_models(args: Namespace, method: Method) -> None:
    """Raises UserError for a target, a drafter or sizes that no replica could be made of. Loads no model."""
    from secondguess.drafter.checkpoint import check_target
    from secondguess.drafter.settings import read_settings
    from secondguess.drafter.shipped import find_drafter
    from secondguess.engine.room import check_batch, context_of
    from secondguess.target.hf import check_family
    from secondguess.target.load import blamed_on, check_dtype, find_files
    from secondguess.target.pretrained import read_config, stored_embedding

    check_dtype(args.dtype)
    check_batch(args.max_batch_size)
    files = find_files(args.target, args.trust_remote_code, log.info)
    with blamed_on(args.target):
        config, _ = read_config(files)
        check_family(config)
    context_of(config.max_position_embeddings, args.max_model_len, args.kv_cache_tokens)
    vain = args.drafter and not (method.takes_drafter or method.name == "pr")  # beside which eagle3.1 is offered
    require(not vain, f"method {args.method} takes no drafter besides its own, if any: leave --drafter out")
    if method.has_drafter:
        embedding = stored_embedding(Path(files.place))
        folder = find_drafter(method.drafter or args.drafter, method.name, embedding)
        check_target(*read_settings(folder), embedding, config.num_hidden_layers, folder)


def take_port(host: str, port: int) -> int:
    """The port that Ray is told, on this machine a free one for 0. Raises UserError if it cannot be had."""
    if os.environ.get("RAY_ADDRESS"):  # it is taken elsewhere, or by Ray Serve already
        require(0 < port < 2**16, f"--port must be in [1, 65535] on a cluster, got {port}")
        return port
    from secondguess.server.listen import bind

    with bind(host, port) as sock:
        return int(sock.getsockname()[1])
