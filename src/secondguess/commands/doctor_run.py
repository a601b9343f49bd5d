"""What ``secondguess doctor`` looks at: the checkpoint beside the target, then how many of its guesses are right."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.atomic import replacing
from secondguess.bench.acceptance import Tally, acceptance_length, count
from secondguess.bench.metrics import is_looping
from secondguess.bench.replay import read, replay
from secondguess.bench.tasks import FOLDER, load_tasks
from secondguess.bench.transcript import BEYOND
from secondguess.commands.conversations import encode_all, transcribe
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_for
from secondguess.drafter.checks import Finding, examine
from secondguess.drafter.model import Drafter
from secondguess.drafter.settings import read_json
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.methods import parse_method
from secondguess.target.hf import HFTarget
from secondguess.types import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

PROMPTS = FOLDER / "doctor.jsonl"
BATCH = 20
STUCK, WEAK = 1.05, 1.3  # tokens a cycle; 1 is what plain decoding has
TOLERANCE = 0.9  # of the card's


def look(args: argparse.Namespace, target: HFTarget, folder: Path, console: Console) -> list[Finding]:
    """Every finding; the only one is the error if the drafter cannot be loaded."""
    try:
        drafter = run(load_for, folder, target)
    except UserError as error:
        return [Finding("checkpoint", "error", str(error))]
    whole = Finding("checkpoint", "ok", "whole: all settings and tensors are there, of the right shape")
    findings = [whole, *run(examine, folder, drafter, target)]
    if args.probe:
        findings.append(probe(args, target, folder, drafter, console))
    return findings


def probe(args: argparse.Namespace, target: HFTarget, folder: Path, drafter: Drafter, console: Console) -> Finding:
    """The acceptance length beside the one that the checkpoint holds; ``--record`` keeps it there."""
    typed, c = "pr" if drafter.config.second_look else "eagle3.1", drafter.config
    tree = TreeConfig(budget=args.budget, offer_width=min(TreeConfig().offer_width, c.draft_vocab_size))
    tau = measure(target, drafter, parse_method(typed, tree).tree, args.max_new_tokens, console)
    setting = {"method": typed, "budget": args.budget, "max_new_tokens": args.max_new_tokens}
    card = read_json(folder)["secondguess"].get("probe", {})
    if args.record and tau is not None:
        record(folder, {"acceptance_length": round(tau, 3), **setting})
    known = card["acceptance_length"] if card and setting.items() <= card.items() else None
    return judge(tau, args.budget, known)


def measure(
    target: HFTarget, drafter: Drafter, tree: TreeConfig, max_new_tokens: int, console: Console
) -> float | None:
    """tau on greedy answers to the doctor's prompts, by replay; None if nothing was drafted."""
    prompts = encode_all(target, load_tasks([str(PROMPTS)]), max_new_tokens, BATCH, console)
    transcripts = transcribe(target, prompts, SamplingParams(max_tokens=max_new_tokens), BATCH, console)
    texts = [run(read, target, transcript) for transcript in transcripts]
    columns = max(text.num_written for text in texts) + BEYOND
    speculator = run(EagleSpeculator, drafter, tree, len(texts), columns)
    tallies = [Tally(is_looping(transcript.answer_ids)) for transcript in transcripts]
    run(replay, speculator, texts, partial(count, tallies))
    return acceptance_length(tallies)


def judge(tau: float | None, budget: int, known: float | None) -> Finding:
    """``known``: what an earlier probe with the same settings found."""
    if tau is None:
        return Finding("acceptance", "unknown", "every answer ends with its first token: nothing was drafted")
    found = f"{tau:.2f} tokens a cycle at budget {budget}"
    if known is not None:
        found += f", {known:.2f} when it was recorded"
    if tau < STUCK:
        fix = "a lost flag, map or layer: see the lines above; or it was never trained for this target"
        return Finding("acceptance", "error", f"{found}: it guesses next to nothing right", fix)
    if known is not None and tau < TOLERANCE * known:
        return Finding("acceptance", "warning", found, "see what changed since, in the lines above")
    if known is None and tau < WEAK:
        return Finding("acceptance", "warning", f"{found}: hardly worth its time", "train it on more answers")
    return Finding("acceptance", "ok", found)


def record(folder: Path, found: dict[str, Any]) -> None:
    config = read_json(folder)
    config["secondguess"]["probe"] = found
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=1) + "\n")
