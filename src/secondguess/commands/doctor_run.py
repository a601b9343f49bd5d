"""What ``secondguess doctor`` looks at: the checkpoint beside the target, then how many of its guesses are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secondguess.bench.acceptance import Tally, acceptance_length, paired_gain
from secondguess.commands.doctor import DoctorOptions
from secondguess.commands.doctor_probe import Probe, open_probe
from secondguess.config import TreeConfig
from secondguess.drafter.checks import Finding, answers
from secondguess.drafter.model import Drafter
from secondguess.drafter.patient import Loaded, admit
from secondguess.drafter.readings import readings
from secondguess.drafter.settings import add_note
from secondguess.engine.thread import run
from secondguess.methods import parse_method
from secondguess.prompts import check_variables
from secondguess.target.facts import served_with
from secondguess.target.hf import HFTarget

if TYPE_CHECKING:
    from rich.console import Console

STUCK, WEAK = 1.05, 1.3  # tokens a cycle; 1 is what plain decoding has
TOLERANCE = 0.9  # of the card's
BETTER = 0.05  # by which share another reading has to be better to be named


def look(options: DoctorOptions, target: HFTarget, folder: Path, console: Console) -> list[Finding]:
    """Every finding, those of the guesses only if the drafter can be loaded."""
    check_variables(target.tokenizer, options.variables)
    facts = served_with(target.facts, target.tokenizer, options.variables)
    patient, checkpoint = run(admit, folder, target, facts)
    findings = [checkpoint, *run(answers, patient)]
    if options.probe and isinstance(patient, Loaded):
        findings += probe(options, target, folder, patient, console)
    return findings


def probe(options: DoctorOptions, target: HFTarget, folder: Path, patient: Loaded, console: Console) -> list[Finding]:
    """The acceptance length beside the one that the checkpoint holds; ``record`` keeps it there.

    Of a drafter that was imported as it is, those of other readings, too.
    """
    drafter, budget = patient.drafter, options.budget
    c = drafter.config
    typed = "pr" if c.second_look else "eagle3.1"
    tree = TreeConfig(budget=budget, offer_width=min(TreeConfig().offer_width, c.draft_vocab_size))
    others = run(lambda: dict(readings(drafter, target))) if "imported" in patient.block else {}
    shape = parse_method(typed, tree).tree
    texts = open_probe(target, shape, options.max_new_tokens, console, options.variables)
    ours = texts.replay(drafter)
    tau = acceptance_length(ours)
    setting = {"method": typed, "budget": budget, "max_new_tokens": options.max_new_tokens}
    card = patient.block.get("probe", {})
    known = card["acceptance_length"] if card and setting.items() <= card.items() else None
    judged = judge(tau, budget, known)
    judged = replace(judged, found=judged.found + elsewhere(card, setting))
    if options.record and tau is not None:
        judged = record(folder, {"acceptance_length": round(tau, 3), **setting}, judged, known)
    return [judged, *compare(texts, ours, others)]


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


def elsewhere(card: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    """What the checkpoint holds of a probe with other settings than these; empty if there was none."""
    others = [f"{name} {card.get(name)}" for name, value in setting.items() if card.get(name) != value]
    if not card or not others:
        return ""
    return f" (the card's {card['acceptance_length']:.2f} was at {', '.join(others)}: not compared)"


def record(folder: Path, found: dict[str, Any], judged: Finding, known: float | None) -> Finding:
    """Keep what was found, unless that would hide a fault from later doctors. ``known``: what is kept so far."""
    if judged.verdict == "error" or (known is not None and judged.verdict != "ok"):
        kept = "" if known is None else f": the checkpoint keeps {known:.2f}"
        return replace(judged, found=f"{judged.found}; not recorded{kept}")
    add_note(folder, "probe", found)
    return judged
