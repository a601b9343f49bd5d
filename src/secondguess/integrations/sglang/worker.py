"""The worker that SGLang's scheduler calls for every batch. Whoever imports this needs SGLang.

A request's cycle: draft a tree with our drafter; SGLang verifies and samples; the drafter reads what was accepted. What
the next draft begins with travels with the request in SGLang's own draft input.

R requests, N nodes, E new pairs, T taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_device, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_worker_common import run_eagle_verify
from torch import Tensor

from secondguess.drafter.checkpoint import load_checkpoint
from secondguess.drafter.checks import examine, warn
from secondguess.drafter.model import Drafter
from secondguess.drafter.shipped import find_drafter
from secondguess.errors import require
from secondguess.integrations.sglang.arguments import BRANCHES, method_of
from secondguess.integrations.sglang.drafting import Places, TreeDrafting
from secondguess.integrations.sglang.form import full_mask, tree_form, tree_mask
from secondguess.methods import Method, check_network
from secondguess.target.base import default_tap_layers
from secondguess.target.facts import facts_of
from secondguess.types import DraftTree


class Worker(BaseSpecWorker):
    """Raises UserError where the drafter does not fit the target."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker, self._draft_worker = target_worker, None  # SGLang's names; the drafter is no model of its
        spec, self.device = get_spec(), get_device().device
        self.method = method_of(spec.speculative_num_steps, spec.speculative_num_draft_tokens)
        self.drafter = open_drafter(target_worker, spec.speculative_draft_model_path, self.method)
        self.tree = self.method.tree_for(self.drafter.config)
        self.speculative_num_steps = self.tree.num_steps
        self.speculative_num_draft_tokens = self.tree.max_budget + 1

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        super().alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        num_places = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size  # the first page is padding
        self.drafting = TreeDrafting(self.drafter, self.tree, req_to_token_pool.req_to_token, num_places)

    def init_attention_backends(self) -> None:
        """SGLang calls it once the target's are there, which is when it has chosen the layers that it taps."""
        super().init_attention_backends()
        check_taps(self.target_worker.model_runner)

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """Prompts, or a cycle of requests that run. The last three are for schedules that ``arguments`` rules out."""
        return self.read_prompts(batch) if batch.forward_mode.is_extend() else self.run_cycle(batch)

    def read_prompts(self, batch: Any) -> Any:
        result = self.target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        following_R = following_tokens(batch, result.next_token_ids)
        taps = result.logits_output.hidden_states.split(batch.extend_lens)
        texts = batch.input_ids.split(batch.extend_lens)
        features = [
            self.read_prompt(batch.req_pool_indices[i : i + 1], start, text_E, following_R[i], taps[i])
            for i, (start, text_E) in enumerate(zip(batch.prefix_lens, texts, strict=True))
        ]
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = carry(torch.cat(features), result.next_token_ids)
        return result

    def read_prompt(self, slot_R: Tensor, start: int, text_E: Tensor, following: Tensor, taps_EH: Tensor) -> Tensor:
        """A prompt from position ``start`` on, or a part of it; ``following``: the token after that. [1, H]."""
        tokens_E = torch.cat([text_E[1:].long(), following[None]])
        start_R, counts_R = torch.full_like(slot_R, start), torch.full_like(slot_R, len(tokens_E))
        return self.drafting.read(Places(slot_R, start_R, start), tokens_E[None], self.taps(taps_EH)[None], counts_R)

    def run_cycle(self, batch: Any) -> Any:
        carried, lengths = batch.spec_info, batch.seq_lens_cpu.tolist()
        at = Places(batch.req_pool_indices, batch.seq_lens, max(lengths))
        tree = self.drafting.draft(at, carried.bonus_tokens.long(), carried.hidden_states)
        batch.spec_info = self.verify_input(tree, batch.seq_lens, lengths)
        result = self.verify(batch)
        (R, N), E = tree.tokens_RN.shape, self.tree.num_steps + 1  # the longest path and the token after it
        tokens_RE = result.next_token_ids.view(R, N)[:, :E].long()
        taps_RETH = self.taps(result.logits_output.hidden_states.view(R, N, -1)[:, :E])
        features_RH = self.drafting.read(at, tokens_RE, taps_RETH, result.accept_lens.long())
        result.next_draft_input = carry(features_RH, result.next_draft_input.bonus_tokens)
        return result

    def verify(self, batch: Any) -> Any:
        """SGLang's verify pass over ``batch.spec_info``; what it accepts comes first among each request's nodes."""
        return run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=nullcontext(),
            topk=BRANCHES,
            num_draft_tokens=self.speculative_num_draft_tokens,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
        )

    def verify_input(self, tree: DraftTree, lengths_R: Tensor, lengths: list[int]) -> EagleVerifyInput:
        form = tree_form(tree, lengths_R)
        return EagleVerifyInput(
            draft_token=form.tokens_B,
            custom_mask=fitting_mask(tree, lengths, self.target_worker.model_runner.attn_backend.verify_mask),
            positions=form.positions_B,
            retrieve_index=form.rows_RN,
            retrieve_next_token=form.first_child_RN,
            retrieve_next_sibling=form.next_sibling_RN,
            retrieve_cum_len=None,
            spec_steps=self.tree.num_steps,
            topk=BRANCHES,
            draft_token_num=self.speculative_num_draft_tokens,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def taps(self, states: Tensor) -> Tensor:
        """[..., T H] -> [..., T, H]: SGLang lays the tapped states side by side."""
        return states.unflatten(-1, (self.drafter.config.num_taps, -1))


def open_drafter(target_worker: Any, path: str, method: Method) -> Drafter:
    """The drafter at ``path`` for the model of SGLang's worker. The log is warned of what may not fit."""
    runner = target_worker.model_runner
    config = runner.model_config
    require(not config.is_multimodal, "images have no tokens that the drafter could read: take a target of text alone")
    embedding = runner.model.get_embed_and_head()[0].detach()[: config.vocab_size]  # SGLang pads it
    folder = find_drafter(path, method.name, embedding)
    checkpoint = load_checkpoint(folder, embedding, config.num_hidden_layers)
    dtype = str(embedding.dtype).removeprefix("torch.")
    facts = facts_of(config.hf_text_config, target_worker.tokenizer, None, dtype)
    warn(folder, examine(checkpoint, facts, embedding, config.context_len))
    drafter = checkpoint.drafter.requires_grad_(False)
    check_network(method, drafter.config, f"drafter {folder}")
    taps = f"drafter {folder} taps layers of its own choice, which SGLang numbers otherwise: take one with EAGLE-3's"
    require(drafter.config.tap_layers is None, taps)
    return drafter


def check_taps(runner: Any) -> None:
    """Raises UserError unless SGLang taps EAGLE-3's layers: a drafter's own config can make it tap others."""
    found = list(runner.model.model.layers_to_capture)
    wanted = list(default_tap_layers(runner.model_config.num_hidden_layers))
    other = f"SGLang taps the inputs of layers {found}, and the drafter reads {wanted}"
    require(found == wanted, f"{other}: take eagle_config out of the drafter's config.json")


def following_tokens(batch: Any, sampled_R: Tensor) -> Tensor:
    """int64 [R]: the token after what a pass read of each prompt. After a part of one it is the prompt's own."""
    following_R = sampled_R.long()
    if batch.chunked_req_next_prompt_token is None:
        return following_R
    unfinished = torch.tensor([request is batch.chunked_req for request in batch.reqs], device=sampled_R.device)
    return torch.where(unfinished, batch.chunked_req_next_prompt_token, following_R)


def fitting_mask(tree: DraftTree, lengths: list[int], wanted: Any) -> Tensor:
    """The mask that an attention backend reads: where it says so (``VerifyMask``), its form and its buffer."""
    if wanted is None:
        return full_mask(tree, lengths)
    require(wanted.mode in (TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY), "choose another --attention-backend")
    mask = tree_mask(tree) if wanted.mode == TreeMaskMode.QLEN_ONLY else full_mask(tree, lengths)
    if not wanted.fits(len(lengths)):
        return mask
    wanted.buffer[: len(mask)] = mask
    return wanted.buffer


def carry(features_RH: Tensor, roots_R: Tensor) -> EagleDraftInput:
    """What travels with requests to the next cycle. SGLang splits and joins all four; ours are the last two."""
    unused_R1 = roots_R.new_zeros(len(roots_R), 1)
    return EagleDraftInput(
        topk_p=unused_R1.float(), topk_index=unused_R1.long(), hidden_states=features_RH, bonus_tokens=roots_R
    )
