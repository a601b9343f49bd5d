"""The model card (README.md) of a drafter: what it is and was measured at, how to serve it and to train it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from secondguess.config import CHAIN, DrafterConfig
from secondguess.drafter.measured import table
from secondguess.drafter.shipped import ELSEWHERE, public_settings

PAPER = "https://arxiv.org/abs/2611.05724"
KINDS = {"eagle3.1": "EAGLE-3.1", "pr": "PR", "hass": "HASS", "hass+pr": "HASS + PR"}
# Settings of a training run that say nothing of the drafter. (Whether to trust code is for who runs it to say.)
PLACES = (
    "responses", "out", "captures", "eval_every", "eval_budget", "eval_responses", "save_every", "track", "device",
    "parallel", "trust_remote_code",
)  # fmt: skip
SGLANG_TREE = {"num-steps": 5, "eagle-topk": 6, "num-draft-tokens": 25}  # the root counts as a token there
WORDS = {1: "One layer", 2: "Two layers"}


@dataclass(frozen=True, slots=True)
class Names:
    """What the drafter's folder is called, and its target: by other engines, and by this package."""

    drafter: str
    base_model: str
    target: str


def card(names: Names, form: str, c: DrafterConfig, block: Mapping[str, Any]) -> str:
    """Markdown, with the header that the hub reads. ``form``: see ``export``; ``block``: as it is ``published``."""
    kind, base_model, known = kind_of(c, block), names.base_model, block.get("card", {})
    header = {
        "base_model": base_model,
        **({"license": known["licence"]} if "licence" in known else {}),
        "library_name": "secondguess",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", *["parallel-reconsideration"] * (c.second_look is not None)],
    }
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {kind} drafter for {base_model}",
        f"It guesses the next tokens of {base_model}, which checks them: the same text in less time. "
        f"{WORDS.get(c.num_layers, f'{c.num_layers} layers')} of width {c.hidden_size}; it can offer "
        f"{c.draft_vocab_size} of the {c.vocab_size} tokens.",
        probed(block.get("probe")),
        *(["## Measured", *table(known["measured"])] if "measured" in known else []),
        "## Serve it",
        *commands(names, form, c, block),
        *data(block),
        *retraining(block),
        *notes(c),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def published(block: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """The ``secondguess`` block as others may read it: a path of this machine would tell them nothing."""
    found, training = {**block, "target": names.target}, block.get("training", {})
    if "settings" in training:
        settings = {name: value for name, value in training["settings"].items() if name not in PLACES}
        found["training"] = {**training, "settings": public_settings(settings) | {"target": names.target}}
    return found


def method_of(c: DrafterConfig, block: Mapping[str, Any]) -> str:
    """What it was trained for; where that is not known, what its network is made for."""
    return block.get("method") or ("eagle3.1" if c.second_look is None else "pr")


def kind_of(c: DrafterConfig, block: Mapping[str, Any]) -> str:
    older = method_of(c, block) == "eagle3.1" and not (c.fc_norm and c.norm_output)
    return "EAGLE-3" if older else KINDS[method_of(c, block)]


def probed(probe: Mapping[str, Any] | None) -> str:
    """The acceptance length that the doctor recorded."""
    if not probe:
        return ""
    return (
        f"Acceptance length {probe['acceptance_length']:.2f} (tokens a cycle; method {probe['method']}, budget "
        f"{probe['budget']}, greedy, {probe['max_new_tokens']} tokens to each of the doctor's 20 prompts)."
    )


def data(block: Mapping[str, Any]) -> list[str]:
    """What it was trained on, and the licence."""
    known, training = block.get("card", {}), block.get("training", {})
    lines = [
        f"Trained on {effort(training)}." if "num_responses" in training else "",
        known.get("data", ""),
        f"Licence: {known['licence']}." if "licence" in known else "",
    ]
    return ["## Data", *filter(None, lines)] if any(lines) else []


def effort(training: Mapping[str, Any]) -> str:
    """``3968 answers of the target itself for 992 steps, 11 minutes``, then the same of the drafter it started from."""
    said, start = f"{training['num_responses']} answers of the target itself", training.get("start")
    if "steps" in training:
        said += f" for {training['steps']} steps, {duration(training)}"
    if start is None:
        return said
    before = f", which was trained on {effort(start)}" if "num_responses" in start else ""
    return f"{said}, from `{start['name']}`{before}"


def duration(training: Mapping[str, Any]) -> str:
    whole = training.get("wall_seconds")
    seconds, of = (training["seconds"], "of steps alone") if whole is None else (whole, "in all")
    processes = training.get("num_processes", 1)
    return f"{seconds / 60:.0f} minutes {of}" + (f" by {processes} processes" if processes > 1 else "")


def retraining(block: Mapping[str, Any]) -> list[str]:
    """The settings that it was trained with, in full, as a file for ``secondguess train``."""
    settings = block.get("training", {}).get("settings")
    if not settings:
        return []
    from secondguess.train.config import idle  # training is none of a drafter's business else

    unsaid = (*PLACES, *idle(settings["method"]))
    said = {name: value for name, value in settings.items() if name not in unsaid}
    again = (
        "`secondguess train --config run.yaml responses=answers.jsonl out=run` with this `run.yaml` trains it again:"
    )
    elsewhere = f"`{ELSEWHERE}` is a drafter that was not published under a name." if ELSEWHERE in said.values() else ""
    return ["## Train it again", again, f"```yaml\n{yaml.safe_dump(said, sort_keys=False).strip()}\n```", elsewhere]


def commands(names: Names, form: str, c: DrafterConfig, block: Mapping[str, Any]) -> list[str]:
    """How engines that compute what the drafter was trained to compute start with it."""
    lines = [
        f"secondguess: `secondguess serve {names.target} --drafter {names.drafter} --method {method_of(c, block)}`",
        f"vLLM: `{vllm_command(names, form)}`",
    ]
    if unread_by_sglang(c):
        return lines
    if form != "eagle3":
        return [*lines, "SGLang does not read this form: `secondguess export --to eagle3` writes the other."]
    return [*lines, f"SGLang: `{sglang_command(names)}`"]


def vllm_command(names: Names, form: str) -> str:
    if form != "eagle3":
        return f"vllm serve {names.drafter}"
    config = f'{{"method": "eagle3", "model": "{names.drafter}", "num_speculative_tokens": {CHAIN}}}'
    return f"vllm serve {names.base_model} --speculative-config '{config}'"


def sglang_command(names: Names) -> str:
    launch = f"python -m sglang.launch_server --model-path {names.base_model} --speculative-algorithm EAGLE3"
    tree = " ".join(f"--speculative-{flag} {value}" for flag, value in SGLANG_TREE.items())
    return f"{launch} --speculative-draft-model-path {names.drafter} {tree}"


def unread_by_sglang(c: DrafterConfig) -> list[str]:
    """What of the network SGLang passes over without a word, or may: it would guess next to nothing right."""
    parts = {
        "`norm_before_residual`": c.norm_before_residual,
        "`norm_before_fc`": c.norm_before_fc,
        f"more than the first of {c.num_layers} layers": c.num_layers > 1,
    }
    return [part for part, there in parts.items() if there]


def notes(c: DrafterConfig) -> list[str]:
    """What to beware of."""
    found = []
    if c.fc_norm or c.norm_output:
        found.append("An engine must know `fc_norm` and `norm_output` (EAGLE-3.1). llama.cpp does not.")
    if unread := unread_by_sglang(c):
        bad = "It would say nothing of that and guess badly: do not serve the drafter there."
        found.append(f"SGLang is not known to read {' and '.join(unread)}. {bad}")
    if c.second_look is not None:
        needs = "secondguess (its server, or its plug-ins for vLLM and SGLang) and `reconsider/`."
        second = f"The second look ([parallel reconsideration]({PAPER})) needs {needs}"
        found.append(f"{second} Other engines ignore that folder and serve the same drafter as EAGLE-3.1.")
    if c.tap_layers:
        layers = ", ".join(map(str, c.tap_layers))
        found.append(
            f"It reads the inputs of layers {layers}; the config names them so, as vLLM does. SGLang counts outputs of "
            "layers: take one off each number there."
        )
    return ["## Beware", *found] if found else []
