"""What ``secondguess doctor`` looks at: the checkpoint beside the target, then how many of its guesses are right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.atomic import replacing
from secondguess.bench.acceptance import Tally, acceptance_length, paired_gain
from secondguess.commands.doctor_probe import Probe, open_probe
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_for
from secondguess.drafter.checks import Finding, examine
from secondguess.drafter.model import Drafter
from secondguess.drafter.readings import readings
from secondguess.drafter.settings import read_json
from secondguess.engine.thread import run
from secondguess.errors import UserError
from secondguess.methods import parse_method
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console

STUCK, WEAK = 1.05, 1.3  # tokens a cycle; 1 is what plain decoding has
TOLERANCE = 0.9  # of the card's
BETTER = 0.05  # by which share another reading has to be better to be named


def look(args: argparse.Namespace, target: HFTarget, folder: Path, console: Console) -> list[Finding]:
    """Every finding; the only one is the error if the drafter cannot be loaded."""
    try:
        drafter = run(load_for, folder, target)
    except UserError as error:
        return [Finding("checkpoint", "error", str(error))]
    whole = Finding("checkpoint", "ok", "whole: all settings and tensors are there, of the right shape")
    findings = [whole, *run(examine, folder, drafter, target.facts, target.embedding)]
    if args.probe:
        findings += probe(args, target, folder, drafter, console)
    return findings


def probe(
    args: argparse.Namespace, target: HFTarget, folder: Path, drafter: Drafter, console: Console
) -> list[Finding]:
    """The acceptance length beside the one that the checkpoint holds; ``--record`` keeps it there.

    Of a drafter that was imported as it is, those of other readings, too.
    """
    c, block = drafter.config, read_json(folder)["secondguess"]
    typed = "pr" if c.second_look else "eagle3.1"
    tree = TreeConfig(budget=args.budget, offer_width=min(TreeConfig().offer_width, c.draft_vocab_size))
    others = run(lambda: dict(readings(drafter, target))) if "imported" in block else {}
    texts = open_probe(target, parse_method(typed, tree).tree, args.max_new_tokens, console)
    ours = texts.replay(drafter)
    tau = acceptance_length(ours)
    setting = {"method": typed, "budget": args.budget, "max_new_tokens": args.max_new_tokens}
    card = block.get("probe", {})
    if args.record and tau is not None:
        record(folder, {"acceptance_length": round(tau, 3), **setting})
    known = card["acceptance_length"] if card and setting.items() <= card.items() else None
    return [judge(tau, args.budget, known), *compare(texts, ours, others)]


def compare(texts: Probe, ours: Sequence[Tally], others: Mapping[str, Drafter]) -> list[Finding]:
    """Whether a drafter would guess better if it were read otherwise: nothing else tells of a setting that was lost.

    ``ours``: its guesses as it is read. A gain counts if it is no chance (95 %, over the texts).
    """
    tau, taus, gains = acceptance_length(ours), dict[str, float](), dict[str, float]()
    if tau is None or not others:
        return []
    for said, drafter in others.items():
        theirs = texts.replay(drafter)
        gain, low, _ = paired_gain(theirs, ours) or (0.0, 0.0, 0.0)
        taus[said], gains[said] = (1 + gain) * tau, gain if low > 0 else 0.0
    best = max(gains, key=lambda said: gains[said])
    if gains[best] > BETTER:
        found = f"{taus[best]:.2f} tokens a cycle with {best}, {tau:.2f} as it is read"
        return [Finding("reading", "warning", found, f"a setting was lost: import it again with --set {best}")]
    tried = ", ".join(f"{said} {other:.2f}" for said, other in taus.items())
    return [Finding("reading", "ok", f"none of the others guesses better ({tried})")]


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
