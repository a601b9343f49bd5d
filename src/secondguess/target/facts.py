"""What a drafter's checkpoint keeps of the target it was trained for, so that a misfit can be told later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

# Words, digits, code, other scripts and white space: texts that tokenizers cut in different ways.
SAMPLE = "It's 12,345.67 km\u00b2 \u2014 na\u00efve \u6f22\u5b57 \u043f\u0440\n\tdef f(x):\n        return \U0001f642"

NOTHING: Mapping[str, Any] = {}
STRANGE = 0.2  # of a training's prompts; more that the target's chat template would not have written are much


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """None is what is not known: a checkpoint may be older than a field, a target may have no tokenizer."""

    architecture: str | None = None
    weights: str | None = None  # a fingerprint that does not depend on the dtype
    dtype: str | None = None
    tokenizer: str | None = None  # hash of its vocabulary and of how it cuts a text
    chat_template: str | None = None  # hash; empty if there is none
    answer_start: str | None = None  # what the chat template puts before an answer
    rope: dict[str, Any] | None = None
    max_positions: int | None = None
    tied_embeddings: bool | None = None

    @property
    def thinking(self) -> str | None:
        """Whether answers open with a chain of thought, as far as the chat template decides it."""
        if self.answer_start is None:
            return None
        if "</think>" in self.answer_start:
            return "off"
        return "on" if "<think>" in self.answer_start else "left to the model"


def facts_of(config: Any, tokenizer: Any, weights: str | None, dtype: str) -> TargetFacts:
    """``config``: a transformers config; ``weights``: see ``weights_fingerprint``. None is what is not known."""
    spoken = {} if tokenizer is None else tokenizer_facts(tokenizer)
    return TargetFacts(
        architecture=next(iter(config.architectures or []), None),
        weights=weights,
        dtype=dtype,
        rope=plain_rope(config.rope_parameters or {}),
        max_positions=config.max_position_embeddings,
        tied_embeddings=config.tie_word_embeddings,
        **spoken,
    )


def tokenizer_facts(tokenizer: Any) -> dict[str, str]:
    template = tokenizer.chat_template
    cut = tokenizer.encode(SAMPLE, add_special_tokens=False)
    return {
        "tokenizer": short_hash([sorted(tokenizer.get_vocab().items()), cut]),
        "chat_template": short_hash(template) if template else "",
        "answer_start": answer_start(tokenizer) if template else "",
    }


def served_with(facts: TargetFacts, tokenizer: Any, variables: Mapping[str, Any]) -> TargetFacts:
    """Those of a target whose chat template is given ``variables``, such as ``enable_thinking``."""
    if not (variables and facts.chat_template):
        return facts
    return replace(facts, answer_start=answer_start(tokenizer, variables))


def answer_start(tokenizer: Any, variables: Mapping[str, Any] = NOTHING) -> str:
    """What the template adds to a conversation where an answer begins (or all of it, of an odd template)."""
    question = [{"role": "user", "content": "?"}]
    asked, ready = (
        str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=ready, **variables))
        for ready in (False, True)
    )
    return ready.removeprefix(asked)


def plain_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of the layers that attend fully, without what is not set (Gemma 3 has two kinds of layer)."""
    of_layer = parameters.get("full_attention", parameters)
    return {key: value for key, value in of_layer.items() if value is not None}


def recorded(block: Mapping[str, Any]) -> TargetFacts:
    """What a checkpoint's ``secondguess`` block says of the target at training."""
    known = block.get("made_for", {})
    return TargetFacts(**{f.name: known.get(f.name) for f in fields(TargetFacts)})


def trained_opening(block: Mapping[str, Any]) -> str | None:
    """What the prompts of a training ended with, if that is known."""
    strange = block.get("training", {}).get("strange_prompts") or 0.0
    return recorded(block).answer_start if strange <= STRANGE else None


def short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
