"""PR's draft tree in vLLM: a proposer for its ``custom_class`` method (made with vLLM 0.32, V1 model runner).

    vllm serve TARGET --enforce-eager --no-enable-prefix-caching --max-num-seqs 8 --max-model-len 8192 \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 3,
            "model": "secondguess.integrations.vllm.BranchProposer"}' \\
        --additional-config '{"secondguess": {"drafter": "path/to/drafter", "method": "pr"}}'

vLLM verifies chains. So the drafter grows its tree here, over K/V of its own and with second looks, and vLLM gets the
tree's best branch. vLLM tells a proposer tokens and no states: hooks on the target's layers catch them as they pass.
The K/V is set aside at the start, for ``--max-num-seqs`` texts of ``--max-model-len`` tokens.

E positions of a request that a pass read, L tapped layers, H hidden size, T tokens of the pass; S slots, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_checkpoint
from secondguess.drafter.checks import examine, warn
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.errors import UserError, did_you_mean, require
from secondguess.machine import available_bytes
from secondguess.methods import WITH_DRAFTER, check_network, packed_for_inference, parse_method
from secondguess.target.base import default_tap_layers
from secondguess.target.facts import facts_of
from secondguess.target.pretrained import Pretrained
from secondguess.tree.branch import best_branch

OURS = "secondguess"  # the key of ``additional_config`` that is meant for us


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What ``additional_config["secondguess"]`` may say; see ``LLM``. Without a drafter, one that ships is taken."""

    drafter: str | None = None
    method: str = "pr"


class BranchProposer:
    """Drafts for vLLM's requests with one drafter. Raises UserError for settings under which it could not.

    The text is vLLM's own, whatever is drafted. A request whose beginning no pass of this process has read (that of a
    prefix cache, say) is not drafted for.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine(vllm_config)
        self.num_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.options = options_of(vllm_config.additional_config)
        self.method = parse_method(self.options.method, TreeConfig(num_steps=self.num_tokens))
        drafting = self.method.has_drafter and self.method.tree.budget != "auto"
        require(drafting, f"method must be {' or '.join(WITH_DRAFTER)}, with a budget that is a number")
        self.num_slots: int = vllm_config.scheduler_config.max_num_seqs
        self.model_config = vllm_config.model_config
        self.max_len: int = self.model_config.max_model_len

    def load_model(self, target: Any) -> None:
        """``target``: vLLM's causal language model, weights loaded. The log is warned of what may not fit.

        Raises UserError if the drafter does not fit it.
        """
        body, num_layers = target.model, len(target.model.layers)
        embedding = body.embed_tokens.weight.detach()[: body.config.vocab_size]  # vLLM pads it
        folder = find_drafter(self.method.drafter or self.options.drafter, self.method.name, embedding)
        checkpoint = load_checkpoint(folder, embedding, num_layers)
        drafter = checkpoint.drafter.requires_grad_(False)
        check_network(self.method, drafter.config, f"drafter {folder}")
        check_room(drafter, self.num_slots, self.max_len)
        dtype = str(embedding.dtype).removeprefix("torch.")
        facts = facts_of(body.config, tokenizer_of(self.model_config), None, dtype)
        warn(folder, examine(checkpoint, facts, embedding, self.max_len))
        packed_for_inference(drafter)
        layers = drafter.config.tap_layers or default_tap_layers(num_layers)
        drafter.tap_index = tuple(range(len(layers)))
        self.taps, self.device = Taps(body.layers, layers), embedding.device
        self.places = Places(self.num_slots, self.max_len)
        tree = self.method.tree_for(drafter.config)
        self.speculator = EagleSpeculator(drafter, tree, self.num_slots, self.max_len)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """After a pass: draft tokens for each of its requests, ``num_speculative_tokens`` at most.

        ``sampled_token_ids``: what the pass emitted, nothing for a prompt that has not been read to its end.
        ``token_ids_cpu`` [requests, max length]: all tokens, those included; ``num_tokens_no_spec``: how many.
        """
        texts = [token_ids_cpu[i, : num_tokens_no_spec[i]] for i in range(len(sampled_token_ids))]
        heard = [self.hear(text, *read) for text, read in zip(texts, self.taps.by_request(), strict=True)]
        self.speculator.accept([accepted for accepted in heard if accepted])
        slots = {i: accepted.slot for i, accepted in enumerate(heard) if accepted and sampled_token_ids[i]}
        drafts: list[list[int]] = [[] for _ in texts]
        if slots:
            roots = roots_of([int(texts[i][-1]) for i in slots], list(slots.values()), self.device)
            branches = best_branch(self.speculator.draft(roots), self.num_tokens)
            for i, branch in zip(slots, branches, strict=True):
                drafts[i] = branch
        return drafts

    def hear(self, text: np.ndarray, first: int, taps_ELH: Tensor) -> Accepted | None:
        """What a pass adds to a request with this text: it read positions from ``first`` on, rejected ones included.

        None for a request whose beginning is not known.
        """
        slot = self.places.new() if first == 0 else self.places.find(text[: first + 1])
        if slot is None:
            return None
        if first == 0:
            self.speculator.release(slot)
        count = min(len(taps_ELH), len(text) - 1 - first)
        known = text[: first + 1 + count]
        self.places.keep(slot, known)
        tokens = torch.from_numpy(known[first + 1 :].astype(np.int64)).to(self.device)
        return Accepted(slot, tokens, taps_ELH[:count])


class Places:
    """Which slot of the drafter's cache holds which text. vLLM moves requests about and does not name them to a
    proposer, so their texts tell them apart: those of one length are compared, and what a text gains is copied.

    (Of two requests with one text either slot will do for either.)
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.texts_SC = np.zeros((num_slots, max_len), np.int32)
        self.lengths_S, self.used_S = np.zeros((2, num_slots), np.int64)  # used: how late, 0 is never
        self.now = 0

    def find(self, text: np.ndarray) -> int | None:
        n = len(text)
        slots = np.flatnonzero(self.lengths_S == n).tolist()
        return next((slot for slot in slots if np.array_equal(self.texts_SC[slot, :n], text)), None)

    def new(self) -> int:
        """A slot that is free, or else the one used longest ago: nobody says when a request ends. It is empty then."""
        slot = int(self.used_S.argmin())
        self.lengths_S[slot] = 0
        return slot

    def keep(self, slot: int, text: np.ndarray) -> None:
        """``text`` begins with what the slot holds."""
        self.now += 1
        self.texts_SC[slot, self.lengths_S[slot] : len(text)] = text[self.lengths_S[slot] :]
        self.lengths_S[slot], self.used_S[slot] = len(text), self.now


class Taps:
    """The states of the newest pass at the inputs of some layers."""

    def __init__(self, layers: Any, tapped: Sequence[int]) -> None:
        self.tapped = tuple(tapped)
        self.starts: list[int] = [0]  # where in the pass each request begins, then where the last one ends
        self.positions_T = torch.zeros(0)
        self.states_TH: dict[int, Tensor] = {}
        for number in self.tapped:
            layers[number].register_forward_pre_hook(partial(self.keep, number))

    def keep(self, number: int, _layer: object, inputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """A hook. vLLM's layers hand on what the last one added, and beside it the residual stream before that."""
        positions_T, added_TH, residual_TH = inputs
        starts = starts_of_pass()
        if starts is not None:
            self.starts, self.positions_T = starts, positions_T
            self.states_TH[number] = added_TH.clone() if residual_TH is None else added_TH + residual_TH

    def by_request(self) -> list[tuple[int, Tensor]]:
        """Of each request the first position that the pass read, and the states [E, L, H] from there on."""
        taps_TLH = torch.stack([self.states_TH[number] for number in self.tapped], 1)
        return [(int(self.positions_T[a]), taps_TLH[a:b]) for a, b in pairwise(self.starts)]


def starts_of_pass() -> list[int] | None:
    """Where in the running pass each request begins, then where the last one ends; None where vLLM only warms up."""
    from vllm.forward_context import get_forward_context

    by_layer = get_forward_context().attn_metadata
    return next(iter(by_layer.values())).query_start_loc.tolist() if by_layer else None


def roots_of(tokens: list[int], slots: list[int], device: torch.device) -> Roots:
    """``tokens``: the newest of each request. A drafter reads states, and greedy drafts take no noise: no histories."""
    return Roots(tuple(slots), tuple(tokens), ([],) * len(tokens), (GREEDY,) * len(tokens), device)


def options_of(additional_config: Mapping[str, Any]) -> Options:
    given, known = additional_config.get(OURS, {}), [f.name for f in fields(Options)]
    for key in given:
        if key not in known:
            raise UserError(f"additional_config[{OURS!r}] has an unknown key {key!r}{did_you_mean(key, known)}")
    return Options(**given)


def tokenizer_of(model_config: Any) -> Any:
    """The one that vLLM uses, as transformers has it; None if vLLM was told to use none."""
    if model_config.skip_tokenizer_init:
        return None
    files = Pretrained(model_config.tokenizer, model_config.trust_remote_code)
    return files.tokenizer(revision=model_config.tokenizer_revision)


def check_room(drafter: Drafter, num_slots: int, max_len: int) -> None:
    """Raises UserError if the drafter's K/V does not fit what is free: all of it is there from the start."""
    c, weight = drafter.config, drafter.norm.weight
    needed = 2 * c.num_layers * c.num_key_value_heads * c.head_dim * weight.element_size() * num_slots * max_len
    free = torch.cuda.mem_get_info(weight.device)[0] if weight.is_cuda else available_bytes()
    texts = f"{num_slots} texts of {max_len} tokens takes {needed / 1e9:.1f} GB"
    fix = "lower --max-num-seqs or --max-model-len"
    require(free is None or needed <= free, f"the drafter's K/V for {texts}, {(free or 0) / 1e9:.1f} are free: {fix}")


def check_engine(vllm_config: Any) -> None:
    """Raises UserError for settings under which states pass unseen: drafts would stop, or never come."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    require(model.enforce_eager, "compiled passes run no hooks: start vLLM with --enforce-eager")
    cached = "cached prefixes are not read again: start vLLM with --no-enable-prefix-caching"
    require(not vllm_config.cache_config.enable_prefix_caching, cached)
    require(parallel.world_size == 1, "the drafter wants whole states: leave tensor and pipeline parallel at 1")
