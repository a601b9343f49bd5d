"""As much of SGLang as our plug-in touches: modules under SGLang's names, a tiny target behind them.

What SGLang's kernels do is done here in plain Python, from their contract: a mask over prefix and tree, and lists of
children that are walked from the root. R requests, N nodes, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from secondguess.target.hf import HFTarget
from secondguess.types import Rows

PADDING = 63  # rows of SGLang's embedding past the vocabulary
SETTINGS = SimpleNamespace(spec=SimpleNamespace(), device="cpu")  # what its runtime context knows


class TreeMaskMode(IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class CaptureHiddenMode(IntEnum):
    NULL = 0
    LAST = 1
    FULL = 2


class CustomSpecAlgo:
    def __init__(self, name: str, factory: Any, *, supports_overlap: bool, validate_server_args: Any) -> None:
        self.name, self.factory, self.check = name, factory, validate_server_args
        self.supports_overlap = supports_overlap


class SpeculativeAlgorithm:
    known: dict[str, CustomSpecAlgo] = {}  # noqa: RUF012 (as SGLang has it)

    @classmethod
    def register(cls, name: str, *, supports_overlap: bool, validate_server_args: Any, spec_class: Any) -> Any:
        def remember(factory: Any) -> Any:
            cls.known[name] = spec_class(
                name, factory, supports_overlap=supports_overlap, validate_server_args=validate_server_args
            )
            return factory

        return remember

    def create_future_map(self, device: str, req_to_token_pool: Any, **_: Any) -> tuple[Any, ...]:
        return self, device, req_to_token_pool


class BaseSpecWorker:
    _target_worker: Any

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = req_to_token_pool, token_to_kv_pool_allocator

    def init_attention_backends(self) -> None:
        pass


@dataclass
class EagleDraftInput:
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    hidden_states: Tensor | None = None
    bonus_tokens: Tensor | None = None


@dataclass
class EagleVerifyInput:
    draft_token: Tensor
    custom_mask: Tensor
    positions: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    retrieve_cum_len: Tensor | None
    spec_steps: int
    topk: int
    draft_token_num: int
    capture_hidden_mode: CaptureHiddenMode
    seq_lens_sum: int | None
    seq_lens_cpu: Tensor | None


def packages() -> dict[str, ModuleType]:
    """For ``sys.modules``."""
    contents = {
        "sglang.kernels.ops.speculative.spec_tree": [TreeMaskMode],
        "sglang.srt.model_executor.forward_batch_info": [CaptureHiddenMode],
        "sglang.srt.runtime_context": [get_spec, get_device],
        "sglang.srt.speculative.base_spec_worker": [BaseSpecWorker],
        "sglang.srt.speculative.eagle_info": [EagleDraftInput, EagleVerifyInput],
        "sglang.srt.speculative.eagle_worker_common": [run_eagle_verify],
        "sglang.srt.speculative.spec_info": [SpeculativeAlgorithm],
        "sglang.srt.speculative.spec_registry": [CustomSpecAlgo],
    }
    found: dict[str, ModuleType] = {}
    for name, things in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            found.setdefault(package, ModuleType(package))
        for thing in things:
            setattr(found[name], thing.__name__, thing)
    return found


def get_spec() -> SimpleNamespace:
    return SETTINGS.spec


def get_device() -> SimpleNamespace:
    return SimpleNamespace(device=SETTINGS.device)


class TargetWorker:
    """SGLang's worker of the target. The K/V of a request lies in the slot of its row."""

    def __init__(self, target: HFTarget, num_slots: int, num_columns: int) -> None:
        self.target, self.cache = target, target.new_cache(num_slots, num_columns)
        self.tokenizer = target.tokenizer
        spec = target.spec
        weight = torch.cat([target.embedding, torch.ones(PADDING, spec.hidden_size, dtype=spec.dtype)])
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(
                get_embed_and_head=lambda: (weight, None), model=SimpleNamespace(layers_to_capture=[2, 4, 5])
            ),
            model_config=SimpleNamespace(
                num_hidden_layers=spec.num_layers,
                vocab_size=spec.vocab_size,
                is_multimodal=False,
                hf_text_config=target.model.config,
                context_len=num_columns,
            ),
            attn_backend=SimpleNamespace(verify_mask=None),
        )

    def share(self, source: int, goal: int, length: int) -> None:
        """What a prefix cache does: the first columns of one request are another's, too."""
        for layer in range(self.target.spec.num_layers):
            for store_SGCD in self.cache.stores(layer):
                store_SGCD[goal, :, :length] = store_SGCD[source, :, :length]

    def forward_batch_generation(self, batch: Any, *, capture_hidden_mode: CaptureHiddenMode) -> SimpleNamespace:
        """Prompts, from where each goes on."""
        assert capture_hidden_mode == CaptureHiddenMode.FULL
        states, sampled = [], []
        texts = batch.input_ids.split(batch.extend_lens)
        for slot, start, text in zip(batch.req_pool_indices.tolist(), batch.prefix_lens, texts, strict=True):
            columns_N, columns_W = torch.arange(start, start + len(text)), torch.arange(start + len(text))
            visible_RNW = (columns_W <= columns_N[:, None])[None]
            rows = Rows(
                torch.tensor([slot]), text[None], columns_N[None], columns_N[None], visible_RNW, columns_W[None]
            )
            out = self.target.forward(rows, self.cache)
            states.append(out.taps_RNLH[0].flatten(1))
            sampled.append(out.logits_RNV[0, -1].argmax())
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=torch.cat(states)), next_token_ids=torch.stack(sampled).int()
        )


def run_eagle_verify(
    batch: Any, *, target_worker: TargetWorker, topk: int, num_draft_tokens: int, **_: Any
) -> SimpleNamespace:
    """Greedy: the path that the target takes, moved to the front of each request's nodes."""
    given: EagleVerifyInput = batch.spec_info
    assert topk > 1, "else SGLang moves nothing"
    R, N = len(batch.seq_lens), num_draft_tokens
    tokens_RN, lengths = given.draft_token.view(R, N), batch.seq_lens.tolist()
    columns_RN = batch.seq_lens[:, None] + torch.arange(N)
    visible_RNW, positions_RN = unpack(given.custom_mask, lengths, N), given.positions.view(R, N)
    behind_RW = torch.arange(visible_RNW.shape[2]) - batch.seq_lens[:, None]  # 0 at the root's column
    in_tree_RW = positions_RN.gather(1, behind_RW.clamp(0, N - 1))
    column_positions_RW = torch.where(behind_RW < 0, behind_RW + batch.seq_lens[:, None], in_tree_RW)
    rows = Rows(batch.req_pool_indices, tokens_RN, positions_RN, columns_RN, visible_RNW, column_positions_RW)
    out = target_worker.target.forward(rows, target_worker.cache)
    best_RN = out.logits_RNV.argmax(-1)
    paths = [walk(given, tokens_RN[r], best_RN[r], r) for r in range(R)]
    assert max(map(len, paths)) <= given.spec_steps + 1
    counts_R, states_RNH = torch.tensor([len(path) for path in paths]), out.taps_RNLH.flatten(2).clone()
    front_RN, chosen_RN = torch.zeros(R, N, dtype=torch.int64), torch.zeros(R, N, dtype=torch.int32)
    for r, path in enumerate(paths):
        front_RN[r, : len(path)] = torch.tensor(path)
        chosen_RN[r, : len(path)] = best_RN[r, path]
        states_RNH[r, : len(path)] = states_RNH[r, path].clone()
    target_worker.cache.compact(batch.req_pool_indices, columns_RN.gather(1, front_RN), batch.seq_lens, counts_R)
    return SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=states_RNH.flatten(0, 1)),
        next_token_ids=chosen_RN.flatten(),
        accept_lens=counts_R.int(),
        new_seq_lens=batch.seq_lens + counts_R,
        next_draft_input=EagleDraftInput(bonus_tokens=chosen_RN[torch.arange(R), counts_R - 1]),
    )


def unpack(mask: Tensor, lengths: list[int], num_nodes: int) -> Tensor:
    """A flat mask over prefixes and trees -> bool [R, N, W]."""
    width = max(lengths) + num_nodes
    visible_RNW = torch.zeros(len(lengths), num_nodes, width, dtype=torch.bool)
    parts = mask.split([num_nodes * (length + num_nodes) for length in lengths])
    for visible_NW, length, part in zip(visible_RNW, lengths, parts, strict=True):
        visible_NW[:, : length + num_nodes] = part.view(num_nodes, -1)
    return visible_RNW


def walk(given: Any, tokens_N: Tensor, best_N: Tensor, r: int) -> list[int]:
    """The nodes of request ``r`` that the target goes through, by the lists of children."""
    path = [0]
    while True:
        child = int(given.retrieve_next_token[r, path[-1]])
        while child >= 0 and tokens_N[child] != best_N[path[-1]]:
            child = int(given.retrieve_next_sibling[r, child])
        if child < 0:
            return path
        path.append(child)
