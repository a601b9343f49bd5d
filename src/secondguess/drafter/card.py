"""The model card (README.md) of an exported drafter: what it is, how to serve it, what it was measured at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from secondguess.config import CHAIN, DrafterConfig

PAPER = "https://arxiv.org/abs/2611.05724"
# Settings of a training run that say nothing of the drafter.
PLACES = ("responses", "out", "captures", "eval_every", "save_every", "track")
SGLANG_TREE = {"num-steps": 5, "eagle-topk": 6, "num-draft-tokens": 25}  # the root counts as a token there
WORDS = {1: "One layer", 2: "Two layers"}


@dataclass(frozen=True, slots=True)
class Names:
    """What the drafter's folder is called, and its target: by other engines, and by this package."""

    drafter: str
    base_model: str
    target: str


def card(names: Names, form: str, c: DrafterConfig, block: Mapping[str, Any]) -> str:
    """Markdown, with the header that the hub reads. ``form``: see ``export``."""
    kind, base_model = kind_of(c), names.base_model
    tags = ["speculative-decoding", "eagle3", *["parallel-reconsideration"] * (c.second_look is not None)]
    header = [
        "---",
        f"base_model: {base_model}",
        "library_name: secondguess",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"- {tag}" for tag in tags),
        "---",
    ]
    parts = [
        f"# {kind} drafter for {base_model}",
        f"It guesses the next tokens of {base_model}, which checks them: the same text in less time. "
        f"{WORDS.get(c.num_layers, f'{c.num_layers} layers')} of width {c.hidden_size}; it can offer "
        f"{c.draft_vocab_size} of the {c.vocab_size} tokens.",
        measured(block),
        "## Serve it",
        *commands(names, form, c),
        *retraining(block),
        *notes(c),
    ]
    return "\n".join(header) + "\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def kind_of(c: DrafterConfig) -> str:
    if c.second_look is not None:
        return "PR"
    return "EAGLE-3.1" if c.fc_norm and c.norm_output else "EAGLE-3"


def measured(block: Mapping[str, Any]) -> str:
    """The acceptance length that the doctor recorded, and what the drafter was trained on."""
    probe, training = block.get("probe"), block.get("training", {})
    lines = []
    if probe:
        lines.append(
            f"Acceptance length {probe['acceptance_length']:.2f} (tokens a cycle; method {probe['method']}, budget "
            f"{probe['budget']}, greedy, {probe['max_new_tokens']} tokens to each of the doctor's 20 prompts)."
        )
    if count := training.get("num_responses"):
        took = f" for {training['steps']} steps, {training['seconds'] / 60:.0f} minutes" if "steps" in training else ""
        lines.append(f"Trained on {count} answers of the target itself{took}.")
    return " ".join(lines)


def retraining(block: Mapping[str, Any]) -> list[str]:
    """The settings that it was trained with, where they are not the defaults, as a file for ``secondguess train``."""
    settings = block.get("training", {}).get("settings")
    if not settings:
        return []
    from secondguess.train.config import unusual  # training is none of a drafter's business else

    said = {name: settings[name] for name in ("target", "method") if name in settings}
    said |= {name: value for name, value in unusual(settings).items() if name not in PLACES}
    again = (
        "`secondguess train --config run.yaml responses=answers.jsonl out=run` with this `run.yaml` trains it again:"
    )
    return ["## Train it again", again, f"```yaml\n{yaml.safe_dump(said, sort_keys=False).strip()}\n```"]


def commands(names: Names, form: str, c: DrafterConfig) -> list[str]:
    """How engines that compute what the drafter was trained to compute start with it."""
    lines = [
        f"secondguess: `secondguess serve {names.target} --drafter {names.drafter}`",
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
