"""What ``secondguess bench`` runs, made of its flags: prompts as token ids, an LLM per method, the run folder."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from secondguess.bench.peers.known import KNOWN, PEER, choose_peers, make_peer
from secondguess.bench.peers.process import Peer
from secondguess.bench.plan import make_groups
from secondguess.bench.runner import Bench
from secondguess.bench.store import Store
from secondguess.bench.tasks import TaskPrompt
from secondguess.commands.conversations import encode_all
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import weights_digest
from secondguess.drafter.shipped import find_drafter, shipped_for
from secondguess.engine.thread import run
from secondguess.errors import UserError, require
from secondguess.llm import LLM
from secondguess.methods import Method
from secondguess.target.hf import HFTarget
from secondguess.target.load import WHOLE, forms_of

if TYPE_CHECKING:
    from rich.console import Console


PEER_ROOM = 16  # tokens past the longest answer: vLLM stops drafting where a draft would not fit
CONVERSATION_BATCH = 16  # first answers are decoded together, whatever is timed


def make_bench(
    args: argparse.Namespace, target: HFTarget, methods: list[Method], prompts: list[TaskPrompt], console: Console
) -> Bench:
    """Prompts as token ids, one LLM per method with just the room that they need, and the peers."""
    encoded = encode_all(target, prompts, args.max_new_tokens, CONVERSATION_BATCH, console)
    longest = max(len(prompt.ids) for prompt in encoded) + args.max_new_tokens
    room = {"max_batch_size": args.batch_size, "max_model_len": min(longest, target.spec.context_len)}
    room["enable_prefix_caching"] = False  # of the peers neither: every round reads its prompts
    drafters = {m: args.drafter if m.takes_drafter else None for m in methods}
    llms = {m: LLM(target, drafter, method=m.typed, tree=m.tree, **room) for m, drafter in drafters.items()}
    peers = make_peers(args, target, longest) if args.peers else {}
    groups = make_groups(encoded, args.batch_size)
    seeds = args.max_new_tokens, args.seed, args.rounds
    return Bench(llms, groups, args.batch_size, args.temperatures, *seeds, peers)


def make_peers(args: argparse.Namespace, target: HFTarget, longest: int) -> dict[Method, Peer]:
    """Raises UserError when a peer cannot take part."""
    if args.batch_size != 1:
        raise UserError("peers decode one prompt at a time: leave --batch-size at 1")
    forms = forms_of(args.target)
    common = {
        "threads": torch.get_num_threads(),
        "dtype": target.spec.mode if target.spec.mode in WHOLE else str(target.spec.dtype).removeprefix("torch."),
        "max_len": min(longest + PEER_ROOM, target.spec.context_len),
        "trust_remote_code": args.trust_remote_code,
    }
    logs, end_ids = Path(tempfile.mkdtemp(prefix="secondguess-peers-")), sorted(target.spec.eos_token_ids)
    peers = {}
    for name in choose_peers(args.peers, forms):
        drafter = peer_drafter(name, args.drafter, target)
        if KNOWN[name].drafter and drafter is None:
            missing = f"peer {name} needs a drafter like {KNOWN[name].drafter}, and none ships for this target"
            require(name not in args.peers, f"{missing}: name one (--drafter)")
            continue  # of all that are installed
        log = logs / f"{name.replace(':', '-')}.log"
        peers[Method(name, PEER, TreeConfig())] = make_peer(name, forms, common | {"drafter": drafter}, end_ids, log)
    return peers


def peer_drafter(name: str, drafter: str | None, target: HFTarget) -> str | None:
    """The folder of the drafter that a peer uses: that which is given, or ships. None where there is none."""
    wanted = KNOWN[name].drafter
    if wanted is None:
        return None
    if drafter is not None:
        return str(run(find_drafter, drafter, wanted, target.embedding))
    shipped = run(shipped_for, target.embedding).get(wanted)
    return None if shipped is None else str(shipped)


def open_store(args: argparse.Namespace, folder: Path, target: HFTarget, bench: Bench, record: dict[str, Any]) -> Store:
    """The run folder. A result may be continued only with what would have given the same one, on the same machine."""
    flags = {name: value for name, value in vars(args).items() if name not in ("out", "json", "data_dir", "tasks")}
    made_of = {
        "target_weights": target.fingerprint,
        "drafter_weights": drafter_digests(bench, args.drafter),
        "prompts": [
            [p.task, p.id, hashlib.sha256(str(p.ids).encode()).hexdigest()] for g in bench.groups for p in g.prompts
        ],
        "machine": record["machine"],
        "peers": {m.typed: peer.drafter and weights_digest(Path(peer.drafter)) for m, peer in bench.peers.items()},
        "versions": record["versions"],
    }
    return Store(folder, flags | made_of, record["revision"])


def drafter_digests(bench: Bench, drafter: str | None) -> dict[str, str]:
    """SHA-256 of the weight files of every drafter that takes part."""
    digests = {}
    for method, llm in bench.llms.items():
        if method.has_drafter:
            named = method.drafter or drafter
            digests[method.typed] = weights_digest(run(find_drafter, named, method.name, llm.target.embedding))
    return digests
