"""A transformers causal language model as a target.

R requests, N rows, H hidden size, V vocabulary, L tapped layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from secondguess.engine.graphs import usable
from secondguess.engine.slots import SlotCache
from secondguess.errors import UserError, require
from secondguess.kernels.build import sources_digest
from secondguess.kernels.linear import CompactLinear
from secondguess.target import attention
from secondguess.target.base import TargetSpec, default_tap_layers
from secondguess.target.facts import TargetFacts, facts_of
from secondguess.target.fingerprint import model_fingerprint, weights_fingerprint
from secondguess.target.lean import LeanDecoder, fits
from secondguess.target.linear import can_pack, head_form, pack_linears, packed
from secondguess.target.native import NativeDecoder, compiles
from secondguess.target.parts import num_parts, whole
from secondguess.target.replayed import SPARE, ReplayedForward
from secondguess.types import Rows, TargetOut

# On the CPU, linear layers round one row alone differently (see ``linear``), and take longer for one than for four.
MIN_ROWS = 4
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "smollm3")
# Python that comes with a model has to be written like transformers' own, or our K/V would not be seen.
DEAF = "this model's own code does not call transformers' attention functions with all keywords: it cannot be run here"


# With these, transformers chooses the frequencies by the largest position in the pass.
ROPES_BY_LENGTH = ("dynamic", "longrope")


def rope_types(config: PreTrainedConfig) -> list[str]:
    """Of all layers; some models have parameters per kind of layer."""
    rope = config.rope_parameters or {}
    return [str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)]


def check_family(config: PreTrainedConfig) -> None:
    if config.model_type not in FAMILIES:
        raise UserError(f"model type {config.model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    for kind in rope_types(config):
        if kind in ROPES_BY_LENGTH:
            raise UserError(
                f"rope_type {kind!r} is not supported: there a token's scores depend on the longest text beside it"
            )


class HFTarget:
    """Takes the model over, with our own forward where there is one for it, else with transformers' own.

    Raises UserError for a model type outside ``FAMILIES`` (SmolLM and SmolLM2 are ``llama``).
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None = None, form: str = "float32") -> None:
        """``model``: a transformers ``...ForCausalLM``. ``form``: of the weights of a float32 model, see ``packed``."""
        check_family(model.config)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer: Any = tokenizer
        self.fingerprint = model_fingerprint(model, form)  # before packing takes the weights apart
        self._weights = weights_fingerprint(model)
        self.spec = _spec(model, form)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self.embedding: Tensor = whole(embedding)
        self.head_weight: Tensor = self.embedding if head is embedding else whole(head)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._body = body_of(model, form)
        self._body.decoder.tap(self.spec.tap_layers)
        self._replayed = ReplayedForward(self._pass) if usable(self.spec.device) and num_parts(model) == 1 else None

    @property
    def forward_id(self) -> str:
        """Names the code that runs the layers: what it writes may part at a near-tie from what another writes."""
        decoder = type(self._body.decoder).__name__
        return f"{decoder} {sources_digest()}" if isinstance(self._body.decoder, NativeDecoder) else decoder

    @cached_property
    def facts(self) -> TargetFacts:
        """What a drafter's checkpoint keeps of this target."""
        return facts_of(self.model.config, self.tokenizer, self._weights, str(self.spec.dtype).removeprefix("torch."))

    def tap(self, layers: Sequence[int]) -> tuple[int, ...]:
        """See ``Target.tap``. Places that were given out stay right: layers are only ever added, at the end."""
        new = [layer for layer in layers if layer not in self.spec.tap_layers]
        self._body.decoder.tap(new)
        self.spec = replace(self.spec, tap_layers=(*self.spec.tap_layers, *new))
        return tuple(self.spec.tap_layers.index(layer) for layer in layers)

    def new_cache(self, num_slots: int, num_columns: int) -> SlotCache:
        """``num_columns``: the longest text plus the rows of one pass."""
        spec, spare = self.spec, SPARE if self._replayed else 0
        return SlotCache(num_slots, num_columns + spare, spec.layer_shapes, spec.dtype, spec.device)

    @torch.no_grad()  # not inference_mode: a trainer may use the result
    def forward(self, rows: Rows, cache: SlotCache, last_only: bool = False) -> TargetOut:
        """See ``Target.forward``. On a GPU, what it returns may hold until the next call with this cache alone."""
        if self._replayed and not last_only and self._replayed.takes(rows):
            return self._replayed(rows, cache, len(self.spec.tap_layers))
        return self._pass(rows, cache, last_only)

    def _pass(self, rows: Rows, cache: SlotCache, last_only: bool = False) -> TargetOut:
        n = rows.tokens_RN.shape[1]
        rows = _at_least(rows, self._body.min_rows)
        step = attention.Step(rows, cache)
        hidden_RNH = self._body.decoder(step)
        taps_RNLH = torch.stack([step.taps_RNH[layer] for layer in self.spec.tap_layers], 2)
        logits_RNV = self._scores(hidden_RNH[:, -self._body.min_rows :] if last_only else hidden_RNH)
        return TargetOut(hidden_RNH[:, :n], taps_RNLH[:, :n], logits_RNV[:, -1:] if last_only else logits_RNV[:, :n])

    def logits(self, hidden_RNH: Tensor) -> Tensor:
        """See ``Target.logits``."""
        return self._scores(hidden_RNH)

    def _scores(self, hidden_RNH: Tensor) -> Tensor:
        logits_RNV = self._body.head(hidden_RNH)
        if self._softcap is None:
            return logits_RNV
        return torch.tanh(logits_RNV / self._softcap) * self._softcap


@dataclass(frozen=True, slots=True)
class Body:
    """How a model's forward is run. ``min_rows``: fewer are computed with twins of the last beside them."""

    decoder: NativeDecoder | LeanDecoder | GenericDecoder
    head: nn.Module
    min_rows: int


def body_of(model: Any, form: str) -> Body:
    """Compiled code if it takes the model, else our own forward, else transformers'."""
    head = model.get_output_embeddings()
    if fits(model) and compiles(model):
        return Body(NativeDecoder(model, form), CompactLinear(head, head_form(head, form)), 1)
    decoder = LeanDecoder(model, partial(packed, form=form)) if fits(model) else GenericDecoder(model, form)
    on_cpu = model.device.type == "cpu"
    return Body(decoder, packed(head, head_form(head, form)), MIN_ROWS if on_cpu else 1)


class GenericDecoder:
    """The model's own forward, unmodified but for our attention and packed linear layers; hooks catch the taps."""

    def __init__(self, model: Any, form: str) -> None:
        self.model = model.base_model
        if can_pack(model):
            pack_linears(self.model, form)
        model.set_attn_implementation(attention.NAME)

    def tap(self, layers: Iterable[int]) -> None:
        for layer in layers:
            self.model.layers[layer].register_forward_pre_hook(tap(layer), with_kwargs=True)

    def __call__(self, step: attention.Step) -> Tensor:
        """The rows' states after the final norm; ``step`` keeps the inputs of the tapped layers."""
        rows = step.rows
        out = self.model(input_ids=rows.tokens_RN, position_ids=rows.positions_RN, use_cache=False, step=step)
        require(bool(step.by_window), DEAF)
        return out.last_hidden_state


def tap(layer: int) -> Callable[[object, tuple[Tensor, ...], dict[str, Any]], None]:
    """A hook that leaves a layer's input with the pass it belongs to."""

    def hook(_module: object, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        require("step" in kwargs, DEAF)
        kwargs["step"].taps_RNH[layer] = args[0]

    return hook


def _at_least(rows: Rows, count: int) -> Rows:
    """Repeat the last row of each request until there are ``count`` rows; twins write the same K/V to one column."""
    r, n = rows.tokens_RN.shape
    if r * n >= count:
        return rows
    index = torch.arange(-(-count // r), device=rows.tokens_RN.device).clamp(max=n - 1)
    return replace(
        rows,
        tokens_RN=rows.tokens_RN[:, index],
        positions_RN=rows.positions_RN[:, index],
        columns_RN=rows.columns_RN[:, index],
        visible_RNW=rows.visible_RNW[:, index],
    )


def _spec(model: Any, form: str) -> TargetSpec:
    config = model.config
    layers = model.base_model.layers
    dtype = str(model.dtype).removeprefix("torch.")
    num_heads = config.num_key_value_heads // num_parts(model)
    return TargetSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(layers),
        context_len=config.max_position_embeddings,
        layer_shapes=tuple((num_heads, layer.self_attn.head_dim) for layer in layers),
        dtype=model.dtype,
        mode=dtype if form == "float32" else form,
        device=model.device,
        eos_token_ids=_eos(model),
        tap_layers=default_tap_layers(len(layers)),
    )


def _eos(model: Any) -> frozenset[int]:
    """Chat models name several end tokens in ``generation_config``, and one in ``config``."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    found = model.config.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
