"""The model card (README.md) of an exported drafter: what it is, how to serve it, what it was measured at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from secondguess.config import DrafterConfig

PAPER = "https://arxiv.org/abs/2611.05724"
# Settings of a training run that say nothing of the drafter.
PLACES = ("responses", "out", "captures", "eval_every", "save_every", "track")


def card(name: str, form: str, c: DrafterConfig, block: Mapping[str, Any], base_model: str) -> str:
    """Markdown, with the header that the hub reads. ``form``: see ``export``."""
    kind = kind_of(c)
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
        f"It guesses the next tokens of {base_model}, which checks them: the same text in less time. One layer of "
        f"width {c.hidden_size}; it can offer {c.draft_vocab_size} of the {c.vocab_size} tokens.",
        measured(block),
        "## Serve it",
        *commands(name, form, base_model),
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


def commands(name: str, form: str, base_model: str) -> list[str]:
    """How engines start with it; ``name`` is its folder."""
    config = f'{{"method": "eagle3", "model": "{name}", "num_speculative_tokens": 5}}'
    vllm = f"vllm serve {base_model} --speculative-config '{config}'" if form == "eagle3" else f"vllm serve {name}"
    lines = [
        f"[secondguess](https://pypi.org/project/secondguess): `secondguess serve {base_model} --drafter {name}`",
        f"vLLM: `{vllm}`",
    ]
    if form == "eagle3":
        launch = f"python -m sglang.launch_server --model-path {base_model} --speculative-algorithm EAGLE3"
        tree = "--speculative-num-steps 5 --speculative-eagle-topk 6 --speculative-num-draft-tokens 25"
        lines.append(f"SGLang: `{launch} --speculative-draft-model-path {name} {tree}`")
    else:
        lines.append("SGLang does not read this form: `secondguess export --to eagle3` writes the other.")
    return lines


def notes(c: DrafterConfig) -> list[str]:
    """What to beware of."""
    found = []
    if c.fc_norm or c.norm_output:
        found.append("An engine must know `fc_norm` and `norm_output` (EAGLE-3.1). llama.cpp does not.")
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
