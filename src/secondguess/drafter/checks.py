"""Does a drafter that loads fit its target, and its settings each other? One line per question.

What cannot be right is an error of loading already (``checkpoint``, ``settings``). Here is what may be right, but is
the usual cause of guesses that are not accepted, of which nothing else would be heard.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from secondguess.drafter.checkpoint import Checkpoint
from secondguess.drafter.patient import Configured, Finding, Fitting, Loaded, Patient, Verdict, loaded
from secondguess.drafter.rope import rope_parameters
from secondguess.target.base import default_tap_layers
from secondguess.target.facts import STRANGE, TargetFacts
from secondguess.target.fingerprint import SAMPLE

LOW_COVERAGE = 0.8  # of the training answers' tokens
FOREIGN = 0.1  # nats a token, see ``train.own``
FAR = 8  # times as long as the training's texts; a drafter that did well at 2,000 tokens was useless at 20,000
Answer = tuple[Verdict, str, str]  # what was found, and what to do about it
UNREAD: Answer = ("unknown", "cannot be told while the checkpoint does not load", "")


def examine(
    checkpoint: Checkpoint, facts: TargetFacts, embedding: torch.Tensor, context: int | None = None
) -> list[Finding]:
    """All questions about a drafter that was loaded for the target with these facts and embedding.

    ``context``: tokens that a text may have, by default as many as ``LLM`` allows.
    """
    return answers(loaded(checkpoint, facts, embedding, context))


def answers(patient: Patient) -> list[Finding]:
    """To all questions, as far as the checkpoint could be read."""
    return [
        Finding(name, *(check(patient) if isinstance(patient, needs) else UNREAD))
        for name, (needs, check) in CHECKS.items()
    ]


def warn(folder: Path, findings: list[Finding]) -> None:
    """One line on stderr (or wherever the program logs to) with all warnings, if there are any."""
    warnings = [f"{f.name}: {f.found}" for f in findings if f.verdict == "warning"]
    if warnings:
        told = "; ".join(warnings)
        logging.getLogger(__name__).warning("drafter %s may not fit, see 'secondguess doctor': %s", folder, told)


def sizes(p: Fitting) -> Answer:
    c = p.config
    heads = f"{c.num_attention_heads} heads of {c.head_dim}"
    return "ok", f"{c.hidden_size} in the drafter, {c.target_hidden_size} in the target; {heads}", ""


def taps(p: Fitting) -> Answer:
    c = p.config
    layers = ", ".join(map(str, c.tap_layers or default_tap_layers(c.target_num_layers)))
    kind = "EAGLE-3's" if c.tap_layers is None else "its own"
    return "ok", f"inputs of layers {layers} of {c.target_num_layers} ({kind})", ""


def vocabulary(p: Loaded) -> Answer:
    c, ids = p.config, p.drafter.target_ids
    if c.draft_vocab_size < c.vocab_size and int(ids[-1]) == len(ids) - 1:
        lost = f"its {len(ids)} tokens are the first of the target's: the map of another tool's drafter was lost"
        return "warning", lost, "give it the d2t that it was trained with"
    coverage = p.training.get("vocabulary_coverage")
    found = f"{len(ids)} of the target's {c.vocab_size} tokens"
    if coverage is None:
        return "ok", found, ""
    verdict = "ok" if coverage >= LOW_COVERAGE else "warning"
    fix = "no other token can be guessed: train with a larger draft_vocab_size"
    return verdict, f"{found}: {coverage:.1%} of its training answers", fix


def tokenizer(p: Patient) -> Answer:
    fix = "load the target with the tokenizer that made the training data"
    return same(p.then.tokenizer, p.now.tokenizer, "tokenizer", fix)


def norms(p: Configured) -> Answer:
    c = p.config
    on = [name for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output") if getattr(c, name)]
    if c.fc_norm and not c.norm_output:
        lost = "fc_norm without norm_output is neither EAGLE-3 nor EAGLE-3.1: tools are known to lose norm_output"
        return "warning", lost, "import it with --set norm_output=true, too, and let the probe decide"
    return "ok", ", ".join(on) or "none but the block's own (EAGLE-3)", ""


def rope(p: Configured) -> Answer:
    c, now = p.config, p.now.rope or {}
    ours, fix = rope_parameters(c), "right only if it was trained so; else import it with --set rope_theta=..."
    if ours["rope_theta"] != now.get("rope_theta"):
        return "warning", f"base {ours['rope_theta']:g}, the target's is {now.get('rope_theta')}", fix
    if p.then.rope is not None and any(now.get(key) != value for key, value in p.then.rope.items()):
        was = f"the target has {now}, at training it had {p.then.rope}"
        return "warning", was, "load the target with the RoPE that it had at training"
    if p.then.rope is None and any(({"rope_type": "default"} | now).get(key) != ours[key] for key in ours):
        differs = f"{scaling_name(ours)}, the target's is {scaling_name(now)}: a lost rope_scaling?"
        return "warning", differs, "right only if it was trained so; it shows in long texts"
    return "ok", f"{scaling_name(ours)}, base {ours['rope_theta']:g}", ""


def scaling_name(rope: Mapping[str, Any]) -> str:
    return f"{rope.get('rope_type', 'default')}" + (f" by {rope['factor']:g}" if "factor" in rope else "")


def positions(p: Configured) -> Answer:
    limit, takes, trained = p.config.max_position_embeddings, p.now.max_positions or 0, trained_length(p.training)
    if limit is not None and limit < takes:
        fix = "expect few accepted guesses past that: keep texts shorter, or train it on longer ones"
        return "warning", f"made for {limit}, the target takes {takes}", fix
    if trained and p.context > FAR * trained:
        fix = "expect few accepted guesses in long texts: train it on longer answers, or serve with --max-model-len"
        return "warning", f"trained on texts of up to {trained} tokens, here they may have {p.context}", fix
    if limit is None:
        return "unknown", f"it does not say how far it goes; the target takes {takes}", ""
    also = f"; trained on texts of up to {trained}" if trained else ""
    return "ok", f"{limit}, the target takes {takes}{also}", ""


def trained_length(training: Mapping[str, Any]) -> int:
    """Tokens of the longest text of this training or of those before it; 0 if it is not known."""
    before = trained_length(training["start"]) if "start" in training else 0
    return max(training.get("trained_length", 0), before)


def embeddings(p: Loaded) -> Answer:
    head = "its own head; the target's is " + ("tied" if p.now.tied_embeddings else "not tied")
    if not p.config.own_embedding:
        return "ok", f"the target's token embedding, {head}", ""
    mine, theirs = p.drafter.embedding[:SAMPLE].float(), p.embedding[:SAMPLE].float()
    if mine.shape == theirs.shape and (likeness := F.cosine_similarity(mine, theirs).mean().item()) < 0.5:
        random = f"its own token embedding is nothing like the target's (cosine {likeness:.2f}): saved by mistake?"
        return "warning", random, "drop it: import it with --set own_embedding=false"
    return "ok", f"a token embedding of its own, {head}", ""


def dtype(p: Loaded) -> Answer:
    then = "" if p.then.dtype is None else f"; trained beside the target in {p.then.dtype}"
    return "ok", f"stored in {p.stored}, runs in {p.now.dtype} as the target{then}", ""


def chat_template(p: Patient) -> Answer:
    fix = "use the template that made the training data, or train on answers under this one"
    if found := strange_prompts(p):
        return "warning", f"{found}: another chat template or thinking mode than the target's", fix
    return same(p.then.chat_template, p.now.chat_template, "chat template", fix)


def thinking(p: Patient) -> Answer:
    fix, variables = "train on answers of the mode that is served", p.training.get("template_variables")
    if found := strange_prompts(p):
        return "warning", f"not known: {found}", fix
    if variables:
        fix = f"serve with chat_template_kwargs {json.dumps(variables)}, or {fix}"
    return same(p.then.thinking, p.now.thinking, "thinking mode", fix, show=True)


def strange_prompts(p: Patient) -> str | None:
    """What of the training's prompts the target's chat template would not have written, if that is much."""
    share = p.training.get("strange_prompts") or 0.0
    start = p.then.answer_start
    return f"{share:.0%} of its training's prompts do not end with {start!r}" if share > STRANGE else None


def provenance(p: Patient) -> Answer:
    fix = "expect fewer accepted guesses beside a fine-tune of its target: train it on answers of this one"
    method, training = p.block.get("method"), p.training
    count, surprise = training.get("num_responses"), training.get("surprise")
    made = (f"as {method}" if method else "by another trainer") + (f" on {count} answers" if count else "")
    if surprise is not None and surprise > FOREIGN:
        others = f"trained {made}; the answers surprised its target by {surprise:.2f} nats a token: not its own"
        return "warning", others, "have the target answer the prompts ('secondguess prepare'), and train on that"
    verdict, found, fix = same(p.then.weights, p.now.weights, "target weights", fix)
    return verdict, f"trained {made}; {found}", fix


def same(then: str | None, now: str | None, what: str, fix: str, show: bool = False) -> Answer:
    """Whether something of the target is as it was at training; ``show`` tells what it is."""
    if then is None or now is None:
        return "unknown", f"the {'checkpoint' if then is None else 'target'} does not say which {what}", ""
    if then != now:
        return "warning", f"another {what} than at training" + (f": {now}, it was {then}" if show else ""), fix
    return "ok", f"the {what} of training" + (f": {now}" if show else ""), ""


# How much of the checkpoint a question needs, and who answers it.
CHECKS: dict[str, tuple[type[Patient], Callable[[Any], Answer]]] = {
    "hidden sizes": (Fitting, sizes),
    "tapped layers": (Fitting, taps),
    "vocabulary": (Loaded, vocabulary),
    "tokenizer": (Patient, tokenizer),
    "norms": (Configured, norms),
    "rope": (Configured, rope),
    "positions": (Configured, positions),
    "embeddings": (Loaded, embeddings),
    "dtype": (Loaded, dtype),
    "chat template": (Patient, chat_template),
    "thinking": (Patient, thinking),
    "provenance": (Patient, provenance),
}
