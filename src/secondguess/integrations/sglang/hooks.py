"""What this plug-in needs of SGLang, by name. Checked against the installed source before anything is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources.abc import Traversable
from typing import Literal

from secondguess.integrations.sglang.signatures import (
    Signature,
    attributes_read,
    base_signature,
    keywords_passed,
    signature,
)

RELEASE = "0.5.23"  # of SGLang, whose source this was written from
Use = Literal["called", "overridden", "read", "derived", "reads", "passes"]
LOOK: dict[Use, Callable[[str, str], Signature | None]] = {
    "called": signature,
    "overridden": signature,
    "read": signature,
    "derived": base_signature,
    "reads": attributes_read,
    "passes": keywords_passed,
}
VERB: dict[Use, str] = {
    "called": "takes",
    "overridden": "takes",
    "read": "has",
    "derived": "has",
    "reads": "reads",
    "passes": "passes",
}


@dataclass(frozen=True, slots=True)
class Hook:
    """One name of SGLang's. ``use``:

    - ``called`` with the parameters ``names``, and no others: all that are required are among them
    - ``overridden`` by a method of ours that takes ``names``: SGLang passes no others
    - ``read``: a class with the attributes ``names``
    - ``derived``: a class of ours is derived from it; it has ``names``, among them all its abstract methods
    - ``reads``: a method that reads the attributes ``names`` of its object, which is ours
    - ``passes``: a function that passes the keywords ``names`` to what we give it, and no others
    """

    use: Use
    module: str
    name: str
    names: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.module.replace(".", "/") + ".py"

    def complaint(self, found: Signature | None) -> str:
        """What differs; empty if nothing does."""
        if found is None:
            return f"{self.module} has no {self.name}"
        missing = [name for name in self.names if name not in found.names]
        more = {"called": found.required, "overridden": found.names, "derived": found.required, "passes": found.names}
        news = [name for name in more.get(self.use, ()) if name not in self.names]
        verb = VERB[self.use]
        parts = [f"no longer {verb} {', '.join(missing)}"] if missing else []
        parts += [f"now {verb} {', '.join(news)}"] if news else []
        return f"{self.name} ({self.module}) {' and '.join(parts)}" if parts else ""


def needed(use: Use, module: str, name: str, names: str = "") -> Hook:
    return Hook(use, f"sglang.{module}", name, tuple(names.split()))


called, overridden, read = partial(needed, "called"), partial(needed, "overridden"), partial(needed, "read")
derived, reads, passes = partial(needed, "derived"), partial(needed, "reads"), partial(needed, "passes")


SPEC, FIELDS = "srt.speculative", "srt.arg_groups.fields"
HOOKS = (
    # How an algorithm is made known, and asked what it is like.
    called(
        f"{SPEC}.spec_info",
        "SpeculativeAlgorithm.register",
        "name supports_overlap validate_server_args spec_class",
    ),
    called(
        f"{SPEC}.spec_info",
        "SpeculativeAlgorithm.create_future_map",
        "device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    overridden(f"{SPEC}.spec_info", "SpeculativeAlgorithm.need_topk"),
    overridden(f"{SPEC}.spec_info", "SpeculativeAlgorithm.carries_draft_hidden_states"),
    overridden(f"{SPEC}.spec_registry", "CustomSpecAlgo.is_eagle"),
    overridden(f"{SPEC}.spec_registry", "CustomSpecAlgo.is_eagle3"),
    overridden(f"{SPEC}.spec_registry", "CustomSpecAlgo.has_draft_kv"),
    overridden(f"{SPEC}.spec_registry", "CustomSpecAlgo.handle_server_args", "server_args"),
    # Its flags.
    read(
        f"{FIELDS}.spec",
        "Spec",
        "speculative_draft_model_path speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens"
        " speculative_use_rejection_sampling speculative_adaptive speculative_accept_threshold_single"
        " speculative_accept_threshold_acc speculative_token_map speculative_draft_load_format"
        " speculative_draft_attention_backend",
    ),
    read(f"{FIELDS}.parallel", "Parallel", "tp_size pp_size dcp_size enable_dp_attention"),
    read(
        f"{FIELDS}.memory",
        "Memory",
        "enable_hierarchical_cache enable_unified_memory enable_hisparse enable_lmcache enable_flexkv"
        " enable_unified_cache_external_linker radix_cache_backend",
    ),
    read(f"{FIELDS}.disagg", "Disagg", "disaggregation_mode disaggregation_decode_retraction_backup enable_pdmux"),
    read(f"{FIELDS}.exec_", "ExecOverlap", "enable_two_batch_overlap"),
    read(f"{FIELDS}.exec_", "ExecKernel", "attention_backend prefill_attention_backend decode_attention_backend"),
    read(f"{FIELDS}.device", "Device", "device"),
    read(
        f"{FIELDS}.schedule",
        "Schedule",
        "max_running_requests disable_overlap_schedule enable_mixed_chunk",
    ),
    read("srt.environ", "Envs", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    called("srt.runtime_context", "get_spec"),
    called("srt.runtime_context", "get_device"),
    # The worker.
    passes("srt.managers.scheduler", "Scheduler.maybe_init_draft_worker", "server_args gpu_id nccl_port target_worker"),
    derived(
        f"{SPEC}.base_spec_worker",
        "BaseSpecWorker",
        "target_worker draft_worker alloc_memory_pool init_attention_backends",
    ),
    reads(f"{SPEC}.base_spec_worker", "BaseSpecWorker.target_worker", "_target_worker"),
    reads(f"{SPEC}.base_spec_worker", "BaseSpecWorker.draft_worker", "_draft_worker"),
    overridden(f"{SPEC}.base_spec_worker", "BaseSpecWorker.init_attention_backends"),
    overridden(
        f"{SPEC}.eagle_worker_v2",
        "EAGLEWorkerV2.forward_batch_generation",
        "batch on_publish grammar_barrier pp_proxy_tensors",
    ),
    overridden(
        f"{SPEC}.base_spec_worker",
        "BaseSpecWorker.alloc_memory_pool",
        "memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    ),
    called("srt.managers.tp_worker", "TpModelWorker.forward_batch_generation", "batch capture_hidden_mode"),
    called(
        f"{SPEC}.eagle_worker_common",
        "run_eagle_verify",
        "batch target_worker req_to_token_pool token_to_kv_pool_allocator plan_stream plan_stream_ctx topk"
        " num_draft_tokens device metadata_ready_pre_pad finalize_tree_path",
    ),
    # What it hands over and gets.
    called(
        f"{SPEC}.eagle_info",
        "EagleVerifyInput",
        "draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling retrieve_cum_len"
        " spec_steps topk draft_token_num capture_hidden_mode seq_lens_sum seq_lens_cpu",
    ),
    called(f"{SPEC}.eagle_info", "EagleDraftInput", "topk_p topk_index hidden_states bonus_tokens"),
    read(
        "srt.managers.schedule_batch",
        "ScheduleBatch",
        "reqs chunked_req chunked_req_next_prompt_token forward_mode input_ids seq_lens seq_lens_cpu prefix_lens"
        " extend_lens req_pool_indices spec_info",
    ),
    read(
        "srt.managers.utils",
        "GenerationBatchResult",
        "logits_output next_token_ids accept_lens new_seq_lens next_draft_input",
    ),
    read("srt.layers.logits_processor", "LogitsProcessorOutput", "hidden_states"),
    read("srt.model_executor.forward_batch_info", "CaptureHiddenMode", "FULL"),
    read("srt.model_executor.forward_batch_info", "ForwardMode", "is_extend"),
    read("srt.mem_cache.memory_pool", "ReqToTokenPool", "req_to_token"),
    read("srt.mem_cache.allocator.base", "BaseTokenToKVPoolAllocator", "size page_size"),
    # The target.
    read("srt.managers.tp_worker", "TpModelWorker", "model_runner tokenizer"),
    read("srt.model_executor.model_runner", "ModelRunner", "model model_config attn_backend"),
    read(
        "srt.configs.model_config",
        "ModelConfig",
        "num_hidden_layers vocab_size is_multimodal hf_text_config context_len",
    ),
    read("srt.layers.attention.base_attn_backend", "AttentionBackend", "verify_mask"),
    read("srt.layers.attention.verify_mask", "VerifyMask", "buffer mode fits"),
    read("kernels.ops.speculative.spec_tree", "TreeMaskMode", "FULL_MASK QLEN_ONLY"),
    read("srt.models.llama", "LlamaForCausalLM", "model"),
    read("srt.models.llama", "LlamaModel", "layers_to_capture"),
    read("srt.models.qwen2", "Qwen2ForCausalLM", "model"),
    read("srt.models.qwen2", "Qwen2Model", "layers_to_capture"),
    read("srt.models.qwen3", "Qwen3ForCausalLM", "model"),
    called("srt.models.llama", "LlamaForCausalLM.get_embed_and_head"),
    called("srt.models.qwen2", "Qwen2ForCausalLM.get_embed_and_head"),
    called("srt.models.qwen3", "Qwen3ForCausalLM.get_embed_and_head"),
)


def complaints(signature_of: Callable[[Hook], Signature | None]) -> Iterator[str]:
    """What differs from ``HOOKS``, in a tree of which ``signature_of`` knows the signatures."""
    for hook in HOOKS:
        if complaint := hook.complaint(signature_of(hook)):
            yield complaint


def source_of(root: Traversable) -> Callable[[Hook], Signature | None]:
    """Signatures of the source in ``root``, the folder or wheel that holds the package ``sglang``."""

    def signature_of(hook: Hook) -> Signature | None:
        path = root / hook.file
        return LOOK[hook.use](path.read_text(encoding="utf-8"), hook.name) if path.is_file() else None

    return signature_of
