"""SGLang's arguments under the algorithm ``PR``: what they must be, and what is filled in."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from secondguess.config import TreeConfig
from secondguess.errors import require
from secondguess.methods import WITH_DRAFTER, Method, parse_method

ALGORITHM = "PR"
METHOD = "SECONDGUESS_METHOD"  # in the environment: SGLang has no place for a plug-in's flags
BRANCHES = 2  # to SGLang, more than one means trees; it reserves K/V for so many times the steps
TREE_BACKENDS = ("flashinfer", "fa3", "triton")  # whose verify passes read the tree's mask, whatever a page holds
MAX_RUNNING_REQUESTS = 48  # SGLang's own default for speculation
RESIZING = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
MOVES = "the drafter's K/V would not move with the target's"
OURS = "it is for drafts of SGLang's own"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Must:
    """The only value that an argument may have."""

    name: str
    value: Any
    why: str


MUSTS = (
    Must("device", "cuda", "elsewhere SGLang takes the best token whatever the temperature"),
    Must("tp_size", 1, "the drafter wants the whole embedding"),
    Must("pp_size", 1, "the drafter wants states of early and late layers"),
    Must("dcp_size", 1, "the drafter's K/V lies where one device has the target's"),
    Must("enable_dp_attention", False, "every process would have to draft in step with the others"),
    Must("disaggregation_mode", "null", "the drafter's K/V would stay behind with the prompt"),
    Must("enable_hierarchical_cache", False, MOVES),
    Must("enable_unified_memory", False, MOVES),
    Must("enable_hisparse", False, MOVES),
    Must("enable_lmcache", False, MOVES),
    Must("enable_flexkv", False, MOVES),
    Must("enable_unified_cache_external_linker", False, MOVES),
    Must("radix_cache_backend", None, MOVES),
    Must("enable_pdmux", False, "a prompt has to be read in one pass over all layers"),
    Must("enable_two_batch_overlap", False, "a batch is drafted for as one"),
    Must("speculative_adaptive", False, "it changes the length of chains, and these are trees"),
    Must("speculative_use_rejection_sampling", False, "it is for chains, and these are trees"),
    Must("speculative_accept_threshold_single", 1.0, "else tokens are taken that the target would not have drawn"),
    Must("speculative_accept_threshold_acc", 1.0, "else tokens are taken that the target would not have drawn"),
    Must("speculative_token_map", None, OURS),
    Must("speculative_draft_load_format", None, OURS),
    Must("speculative_draft_attention_backend", None, OURS),
)


def method_of(num_steps: int | None, num_draft_tokens: int | None) -> Method:
    """The method that ``SECONDGUESS_METHOD`` names (``pr`` if nothing), whose tree is as SGLang's arguments say.

    ``num_draft_tokens`` counts the root. Raises UserError for settings that cannot be honoured in SGLang, and for two
    that contradict each other.
    """
    tree = TreeConfig()
    tree = replace(tree, num_steps=num_steps or tree.num_steps)
    tree = replace(tree, budget=num_draft_tokens - 1) if num_draft_tokens else tree
    method = parse_method(os.environ.get(METHOD, "pr"), tree)
    tree = method.tree
    drafting = method.has_drafter and tree.budget != "auto"
    require(drafting, f"{METHOD} must be {' or '.join(WITH_DRAFTER)}, with a budget that is a number")
    require(method.drafter is None, f"{METHOD}: SGLang names the drafter, with --speculative-draft-model-path")
    require(not tree.coupled, f"{METHOD}: coupled needs our noise, and SGLang draws its own: leave it out")
    require(tree.reconsider.merge != "append", f"{METHOD}: SGLang wants siblings of distinct tokens: not merge=append")
    fits = tree.num_steps <= tree.max_budget
    require(fits, f"a tree of {tree.max_budget} nodes cannot be {tree.num_steps} deep: fewer --speculative-num-steps")
    for flag, given, meant in (
        ("num-steps", num_steps, tree.num_steps),
        ("num-draft-tokens", num_draft_tokens, tree.max_budget + 1),
    ):
        twice = f"--speculative-{flag} is {given}, and {METHOD} makes it {meant}: leave one of them out"
        require(given in (None, meant), twice)
    return method


def check_arguments(server_args: Any) -> None:
    """Raises UserError for what would go wrong. SGLang calls it once it has chosen its attention backends."""
    for must in MUSTS:
        given, flag = getattr(server_args, must.name), "--" + must.name.replace("_", "-")
        require(given == must.value, f"{ALGORITHM} needs {flag} to be {must.value!r}, got {given!r}: {must.why}")
    # To SGLang, AMD's devices are "cuda" as well.
    require(torch.version.hip is None, f"{ALGORITHM} is for NVIDIA: on AMD SGLang verifies as if temperature were 0")
    both = server_args.attention_backend
    for use in ("prefill", "decode"):  # verify passes run on either, by --speculative-attention-mode
        backend = getattr(server_args, f"{use}_attention_backend") or both
        ignores = f"--attention-backend must be {', '.join(TREE_BACKENDS)} for {ALGORITHM}, got {backend} to {use}"
        require(backend in TREE_BACKENDS, f"{ignores}: others do not read the tree's mask")
    kept = server_args.disaggregation_decode_retraction_backup
    flag = "--disaggregation-decode-retraction-backup"
    require(kept != "host_pool", f"{ALGORITHM} needs {flag} not to be 'host_pool': {MOVES}")
    drafter = server_args.speculative_draft_model_path
    require(bool(drafter), f"{ALGORITHM} needs --speculative-draft-model-path: the folder of a drafter")
    widths = f"leave --speculative-eagle-topk out: widths are settings of the method ({METHOD}=pr:offer_width=6)"
    require(server_args.speculative_eagle_topk in (None, BRANCHES), widths)
    resized = os.environ.get(RESIZING, "0").lower() not in ("", "0", "false", "no")
    require(not resized, f"unset {RESIZING}: the drafter's K/V would have to grow with the target's")


def fill_arguments(server_args: Any) -> None:
    """The tree's shape, and what every draft here needs. The log says it, as loudly as SGLang of such changes."""
    method = method_of(server_args.speculative_num_steps, server_args.speculative_num_draft_tokens)
    tree = method.tree
    server_args.speculative_num_steps = tree.num_steps
    server_args.speculative_num_draft_tokens = tree.max_budget + 1
    server_args.speculative_eagle_topk = BRANCHES
    server_args.disable_overlap_schedule = True  # a draft begins with what the last cycle accepted
    server_args.enable_mixed_chunk = False
    if server_args.max_running_requests is None:
        server_args.max_running_requests = MAX_RUNNING_REQUESTS
    log.warning(
        "%s: method %s, %d draft tokens with the root in %d steps, at most %d requests; no overlap, no mixed chunks",
        ALGORITHM,
        method.typed,
        tree.max_budget + 1,
        tree.num_steps,
        server_args.max_running_requests,
    )
