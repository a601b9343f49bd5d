"""The ``speculators`` form of a checkpoint, which ``vllm serve DRAFTER`` needs nothing else for.

It is the flat EAGLE-3 form with its settings in two places and ``layers.0.`` for ``midlayer.`` in the names of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

KIND = "speculators_model_type"
VERSION = "0.9.0"  # of the library whose form this is
TAPS = "eagle_aux_hidden_state_layer_ids"
FLAT_ARCHITECTURES = ["LlamaForCausalLMEagle3"]
# What stands beside ``transformer_layer_config``; all else is in it.
OUTSIDE = (
    "draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", TAPS,
    "tie_word_embeddings", "quantization_config", "secondguess",
)  # fmt: skip
# What only this form has.
NESTED = (KIND, "speculators_version", "speculators_config", "embed_requires_grad", "transformer_layer_config")
FLAT_LAYER, LAYER = "midlayer.", "layers.0."


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of either form in the flat one. Settings that are null are left out."""
    flat = said(config)
    if KIND in config:
        layer = said(config.get("transformer_layer_config"))
        outside = {key: flat[key] for key in OUTSIDE if key in flat}
        architectures = FLAT_ARCHITECTURES if config[KIND] == "eagle3" else [config[KIND]]
        flat = {**layer, **outside, "architectures": architectures}
    return flat | ({"eagle_config": said(flat["eagle_config"])} if "eagle_config" in flat else {})


def said(settings: Any) -> dict[str, Any]:
    """Those that are not null."""
    return {key: value for key, value in settings.items() if value is not None} if isinstance(settings, dict) else {}


def nested(flat: Mapping[str, Any], verifier: str, architectures: list[str], num_tokens: int) -> dict[str, Any]:
    """A flat config in the form of ``speculators``.

    ``verifier``: the name under which an engine finds the target, ``architectures`` what its config says,
    ``num_tokens``: how many tokens an engine that drafts chains should draft.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        KIND: "eagle3",
        "speculators_version": VERSION,
        **{key: flat[key] for key in OUTSIDE if key in flat},
        TAPS: flat.get("eagle_config", {}).get(TAPS),
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {
            key: value for key, value in flat.items() if key not in (*OUTSIDE, "architectures", "eagle_config")
        }
        | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    }


def flat_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of either form under their names in the flat one."""
    return {_moved(name, LAYER, FLAT_LAYER): tensor for name, tensor in tensors.items()}


def nested_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_moved(name, FLAT_LAYER, LAYER): tensor for name, tensor in tensors.items()}


def _moved(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name
