"""PR's trees for SGLang: their form, the drafter's K/V at SGLang's places, and the worker under a stand-in for SGLang.

The worker has not met SGLang itself: that takes a GPU. R requests, N nodes, E pairs, T taps, G heads, D head size,
H hidden, W columns; S rows of SGLang's table, P positions.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fake_sglang
from fake_sglang import SETTINGS, EagleDraftInput, TargetWorker, TreeMaskMode
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_drafter, save_drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.cycle import verify_rows
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.errors import UserError
from secondguess.integrations.sglang import drafting as sglang_drafting
from secondguess.integrations.sglang.drafting import Places, TreeDrafting
from secondguess.integrations.sglang.form import full_mask, tree_form, tree_mask
from secondguess.integrations.sglang.located import LocatedCache
from secondguess.llm import LLM
from secondguess.methods import parse_method
from secondguess.target.base import causal_rows
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.trim import row_of
from secondguess.tree.walk import walk
from secondguess.types import DraftTree, Rows, SamplingParams
from test_tree import configs, draft, seeds

# Of the first request:     0          of the second:  0      node 3 and 4 are padding
#                         1   2                        1
#                        3     4                       2
TREE = DraftTree(
    tokens_RN=torch.tensor([[9, 11, 12, 13, 14], [5, 6, 7, 0, 0]]),
    parents_RN=torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, -1, -1]]),
    depths_RN=torch.tensor([[0, 1, 1, 2, 2], [0, 1, 2, 0, 0]]),
    levels_RN=torch.zeros(2, 5, dtype=torch.int64),
    scores_RN=torch.zeros(2, 5),
    valid_RN=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
)
LENGTHS = [2, 3]


def test_the_form_of_two_trees() -> None:
    form = tree_form(TREE, torch.tensor(LENGTHS))
    assert form.tokens_B.tolist() == [9, 11, 12, 13, 14, 5, 6, 7, 0, 0]
    assert form.positions_B.tolist() == [2, 3, 3, 4, 4, 3, 4, 5, 3, 3]
    assert form.rows_RN.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert form.first_child_RN.tolist() == [[1, 3, 4, -1, -1], [1, 2, -1, -1, -1]]
    assert form.next_sibling_RN.tolist() == [[-1, 2, -1, -1, -1], [-1] * 5]


def test_the_masks_of_two_trees() -> None:
    first = ["10000", "11000", "10100", "11010", "10101"]
    second = ["10000", "11000", "11100", "00010", "00001"]
    assert bits(tree_mask(TREE)) == "".join(first + second)
    before = ["11" + row for row in first] + ["111" + row for row in second]
    assert bits(full_mask(TREE, LENGTHS)) == "".join(before)


def bits(mask: Tensor) -> str:
    return "".join(map(str, mask.int().tolist()))


@given(configs, seeds, st.integers(0, 9), st.integers(0, 9))
def test_masks_and_positions_are_those_of_our_own_verify_pass(config: TreeConfig, seed: int, a: int, b: int) -> None:
    tree, _ = draft(config, seed, False, [0, 1])
    requests: Any = [SimpleNamespace(slot=i, num_cached=n) for i, n in enumerate((a, b))]
    ours = verify_rows(tree, requests)
    visible_RNW = fake_sglang.unpack(full_mask(tree, [a, b]), [a, b], tree.tokens_RN.shape[1])
    assert torch.equal(visible_RNW, ours.visible_RNW)
    form = tree_form(tree, torch.tensor([a, b]))
    assert torch.equal(form.positions_B.view_as(tree.tokens_RN), ours.positions_RN)
    assert torch.equal(form.tokens_B.view_as(tree.tokens_RN), ours.tokens_RN)


@given(configs, seeds, st.integers(0, 2**32))
def test_walking_the_lists_is_walking_the_tree(config: TreeConfig, seed: int, chosen: int) -> None:
    """Whatever token the target chooses at each node; its children's tokens come up often."""
    tree, _ = draft(config, seed, False, [0, 1])
    generator = torch.Generator().manual_seed(chosen)
    others_RN = torch.randint(tree.tokens_RN.shape[1], tree.tokens_RN.shape, generator=generator)
    best_RN = tree.tokens_RN.gather(1, others_RN)
    verdict = walk(tree, lambda node_R, active_R: best_RN.gather(1, node_R[:, None])[:, 0])
    form = tree_form(tree, torch.tensor([4, 4]))
    lists = SimpleNamespace(retrieve_next_token=form.first_child_RN, retrieve_next_sibling=form.next_sibling_RN)
    for r in range(2):
        path = verdict.path_RD[r]
        assert fake_sglang.walk(lists, tree.tokens_RN[r], best_RN[r], r) == path[path >= 0].tolist()


def test_the_cache_reads_what_lies_at_a_requests_places() -> None:
    """Two requests share places 7 and 3. A column past a request's length is scratch of its row in the batch."""
    table_SP = torch.tensor([[0, 0, 0, 0], [7, 3, 5, 0], [7, 3, 6, 1]], dtype=torch.int32)
    cache = LocatedCache(table_SP, 8, 2, [(1, 1)], torch.float32)
    cache.aim(torch.tensor([3, 2]))
    slots_R = torch.tensor([1, 2])
    assert cache.places(slots_R, torch.arange(6).expand(2, -1)).tolist() == [[7, 3, 5, 8, 9, 9], [7, 3, 10, 11, 11, 11]]
    cache.layers[0][:, :8, 0, 0] = torch.arange(8.0)
    new_RGND = torch.tensor([[100.0, 101.0], [200.0, 201.0]])[:, None, :, None]
    rows = Rows(
        slots_R=slots_R,
        tokens_RN=torch.zeros(2, 2, dtype=torch.int64),
        positions_RN=torch.zeros(2, 2, dtype=torch.int64),
        columns_RN=torch.tensor([[2, 3], [2, 3]]),
        visible_RNW=torch.ones(2, 2, 4, dtype=torch.bool),
        column_positions_RW=torch.arange(4).expand(2, -1),
    )
    cache.store(0, rows, new_RGND, new_RGND + 0.5)
    k_RGWD, v_RGWD = cache.read(0, cache.places(slots_R, torch.arange(4).expand(2, -1)))
    assert k_RGWD[:, 0, :, 0].tolist() == [[7, 3, 100, 101], [7, 3, 200, 201]]
    assert v_RGWD[:, 0, :, 0].tolist() == [[7, 3, 100.5, 101.5], [7, 3, 200.5, 201.5]]
    assert cache.layers[0][0, :8, 0, 0].tolist() == [0, 1, 2, 3, 4, 100, 6, 7], "place 6 is not this batch's to write"


@cache
def llama() -> HFTarget:
    return tiny_target("llama")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3))
def test_trees_are_those_of_our_own_speculator(seed: int, a: int, b: int, num_reconsider: int) -> None:
    """Pairs are read in two parts, places are in no order, rows of the table in another than the batch."""
    config = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3, num_reconsider=num_reconsider)
    drafter, rng = tiny_drafter(llama(), seed % 5), random.Random(seed)
    speculator = EagleSpeculator(drafter, config, 2, 64)
    places = torch.tensor(rng.sample(range(1, 100), 3 * 20), dtype=torch.int32).view(3, 20)
    drafting, slots_R = TreeDrafting(drafter, config, places, 100), torch.tensor([2, 0])
    generator, features, texts = torch.Generator().manual_seed(seed), list[Tensor](), list[list[int]]()
    for r, length in enumerate((a, b)):
        tokens_E = torch.randint(1, 64, (length,), generator=generator)
        taps_ETH = torch.randn(length, 3, 32, generator=generator, dtype=torch.float64)
        speculator.accept([Accepted(r, tokens_E, taps_ETH)])
        cuts = sorted({0, rng.randrange(length), length})
        for start, end in pairwise(cuts):
            at, counts_R = Places(slots_R[r : r + 1], torch.tensor([start]), start), torch.tensor([end - start])
            newest = drafting.read(at, tokens_E[None, start:end], taps_ETH[None, start:end], counts_R)
            features = [*features[:r], newest]
        texts.append([1, *tokens_E.tolist()])
    roots = Roots((0, 1), (texts[0][-1], texts[1][-1]), tuple(texts), (GREEDY, GREEDY))
    expected = speculator.draft(roots)
    at = Places(slots_R, torch.tensor([a, b]), max(a, b))
    same_trees(drafting.draft(at, torch.tensor(roots.tokens), torch.cat(features)), expected)


def same_trees(one: DraftTree, other: DraftTree) -> None:
    for name in ("tokens_RN", "parents_RN", "depths_RN", "levels_RN", "valid_RN"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    torch.testing.assert_close(one.scores_RN, other.scores_RN)


def test_padding_is_read_into_scratch() -> None:
    """After a verify pass requests have accepted more or less: what pads the shorter ones touches nobody's places."""
    config = TreeConfig(budget=6, num_steps=3, grow_width=2, offer_width=2, num_reconsider=1)
    table_SP = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    drafting = TreeDrafting(tiny_drafter(llama()), config, table_SP, 21)
    taps_RETH = torch.randn(2, 4, 3, 32, dtype=torch.float64)
    at, tokens_RE = Places(torch.tensor([0, 1]), torch.tensor([0, 5]), 5), torch.ones(2, 4, dtype=torch.int64)
    drafting.read(at, tokens_RE, taps_RETH, torch.tensor([1, 4]))
    written = drafting.cache.layers[0][0, :21].flatten(1).any(1).nonzero()[:, 0].tolist()
    assert written == [1, 16, 17, 18, 19]


@pytest.mark.parametrize(("most", "at_once"), [(1, {1}), (2 * 18 * 256, {1, 2, 3}), (2**20, {3})])
def test_kv_are_copied_for_few_requests_at_a_time(most: int, at_once: set[int], monkeypatch) -> None:
    """A place of this drafter's takes 256 bytes: K and V of two heads of 8 in float64. Passes see 12 to 18 columns."""
    config = TreeConfig(budget=6, num_steps=3, grow_width=2, offer_width=2, num_reconsider=1)
    table_SP, generator = torch.arange(1, 61, dtype=torch.int32).view(3, 20), torch.Generator().manual_seed(0)
    tokens_RE = torch.randint(1, 64, (3, 12), generator=generator)
    taps_RETH = torch.randn(3, 12, 3, 32, generator=generator, dtype=torch.float64)
    slots_R, lengths_R, copied = torch.tensor([2, 0, 1]), torch.tensor([12, 4, 9]), set[int]()

    def draft(drafting: TreeDrafting) -> DraftTree:
        start = Places(slots_R, torch.zeros_like(slots_R), 0)
        features_RH = drafting.read(start, tokens_RE, taps_RETH, lengths_R)
        return drafting.draft(Places(slots_R, lengths_R, 12), tokens_RE[:, 0], features_RH)

    expected = draft(TreeDrafting(tiny_drafter(llama()), config, table_SP, 61))
    few = TreeDrafting(tiny_drafter(llama()), config, table_SP, 61)
    read = few.cache.read
    monkeypatch.setattr(sglang_drafting, "COPIED_BYTES", most)
    monkeypatch.setattr(few.cache, "read", lambda layer, places: copied.add(len(places)) or read(layer, places))
    same_trees(draft(few), expected)
    assert few.cache.bytes_of_place(0) == 256
    assert copied == at_once


# The worker --------------------------------------------------------------------------------------------------------

CHUNK, ROOM, BUDGET, STEPS = 8, 120, 12, 4


@pytest.fixture(scope="module")
def target(folder: Path) -> HFTarget:
    return load_target(str(folder / "target"), "float64")


@pytest.fixture
def worker_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The worker, imported among modules of SGLang's names."""
    for name, module in fake_sglang.packages().items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "secondguess.integrations.sglang.worker"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]


def make_worker(module: ModuleType, target: HFTarget, drafter: Path, **changes: Any) -> Any:
    spec = {"speculative_num_steps": STEPS, "speculative_num_draft_tokens": BUDGET + 1} | changes
    SETTINGS.spec = SimpleNamespace(speculative_draft_model_path=str(drafter), **spec)
    return module.Worker(SimpleNamespace(), 0, 0, TargetWorker(target, 4, ROOM))


@dataclass(eq=False)
class Request:
    slot: int
    text: list[int]
    num_read: int = 0
    carried: tuple[Tensor, Tensor] | None = None  # a row of what SGLang carries to the next cycle


class Scheduler:
    """What SGLang's scheduler does around the worker: places, batches, and carrying the draft input along."""

    def __init__(self, worker: Any, seed: int = 0) -> None:
        self.worker, self.rng, self.num_accepted = worker, random.Random(seed), 0
        self.table_SP = torch.zeros(4, ROOM, dtype=torch.int32)
        self.free = self.rng.sample(range(1, 401), 400)
        pool, allocator = SimpleNamespace(req_to_token=self.table_SP), SimpleNamespace(size=400, page_size=1)
        worker.alloc_memory_pool(None, pool, allocator)

    def prefill(self, requests: list[Request], chunked: Request | None = None) -> None:
        ends = [r.num_read + CHUNK if r is chunked else len(r.text) for r in requests]
        for r, end in zip(requests, ends, strict=True):
            self.allocate(r.slot, r.num_read, end)
        texts = [torch.tensor(r.text[r.num_read : end]) for r, end in zip(requests, ends, strict=True)]
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: True),
            reqs=requests,
            chunked_req=chunked,
            chunked_req_next_prompt_token=chunked.text[chunked.num_read + CHUNK] if chunked else None,
            input_ids=torch.cat(texts),
            req_pool_indices=torch.tensor([r.slot for r in requests]),
            prefix_lens=[r.num_read for r in requests],
            extend_lens=[len(text) for text in texts],
            seq_lens=torch.tensor(ends),
        )
        result = self.worker.forward_batch_generation(batch)
        assert result.new_seq_lens is batch.seq_lens
        self.carry(requests, result)
        for i, (r, end) in enumerate(zip(requests, ends, strict=True)):
            r.num_read = end
            if r is not chunked:
                r.text.append(int(result.next_token_ids[i]))

    def decode(self, requests: list[Request]) -> None:
        for r in requests:
            self.allocate(r.slot, r.num_read, r.num_read + BUDGET + 1)
        features, roots = zip(*(r.carried for r in requests if r.carried), strict=True)
        lengths = torch.tensor([r.num_read for r in requests])
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: False),
            reqs=requests,
            req_pool_indices=torch.tensor([r.slot for r in requests]),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            spec_info=EagleDraftInput(hidden_states=torch.stack(features), bonus_tokens=torch.stack(roots)),
        )
        result = self.worker.forward_batch_generation(batch)
        self.carry(requests, result)
        for r, tokens, count in zip(
            requests, result.next_token_ids.view(len(requests), -1).tolist(), result.accept_lens.tolist(), strict=True
        ):
            r.text += tokens[:count]
            r.num_read += count
            self.num_accepted += count - 1

    def allocate(self, slot: int, start: int, end: int) -> None:
        """Places for columns that have none, in no order."""
        for column in range(start, end):
            if self.table_SP[slot, column] == 0:
                self.table_SP[slot, column] = self.free.pop()

    def carry(self, requests: list[Request], result: Any) -> None:
        carried = result.next_draft_input
        assert len(carried.topk_p) == len(carried.topk_index) == len(requests), "SGLang splits and joins them"
        for i, r in enumerate(requests):
            r.carried = carried.hidden_states[i], carried.bonus_tokens[i]

    def share(self, source: Request, goal: Request, length: int) -> None:
        """What SGLang's prefix cache does."""
        self.table_SP[goal.slot, :length] = self.table_SP[source.slot, :length]
        self.worker.target_worker.share(source.slot, goal.slot, length)
        goal.num_read = length


def helped(tree: DraftTree, rest: list[list[int]], rng: random.Random) -> DraftTree:
    """The tree with right tokens on a path of each request: a random drafter is never right."""
    tokens_RN = tree.tokens_RN.clone()
    for r, right in enumerate(rest):
        path, node = [], int(tree.depths_RN[r].argmax())
        while node > 0:
            path.append(node)
            node = int(tree.parents_RN[r, node])
        count = rng.randrange(len(path) + 1)
        for node, token in list(zip(reversed(path), right, strict=False))[:count]:
            tokens_RN[r, node] = token
    return replace(tree, tokens_RN=tokens_RN)


def expected_tree(target: HFTarget, folder: Path, text: list[int], method: str) -> DraftTree:
    """Drafted anew by our own speculator, over the states of one pass."""
    drafter = load_drafter(folder, target.embedding, target.spec.num_layers)
    tree = parse_method(method, TreeConfig(num_steps=STEPS, budget=BUDGET)).tree_for(drafter.config)
    speculator = EagleSpeculator(drafter, tree, 1, ROOM)
    out = target.forward(causal_rows(torch.tensor([0]), torch.tensor([text[:-1]])), target.new_cache(1, ROOM))
    speculator.accept([Accepted(0, torch.tensor(text[1:]), out.taps_RNLH[0])])
    return speculator.draft(Roots((0,), (text[-1],), (text,), (GREEDY,)))


@pytest.mark.parametrize("method", ["pr", "pr:m=2,merge=union,grow_width=4", "eagle3.1"])
def test_texts_and_trees_are_those_of_our_own_engine(
    method: str, folder: Path, target: HFTarget, worker_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in parts, one that begins as another did, batches whose order changes, and drafts that are accepted."""
    monkeypatch.setenv("SECONDGUESS_METHOD", method)
    drafter = folder / "drafters" / ("eagle3.1" if method == "eagle3.1" else "pr")
    worker = make_worker(worker_module, target, drafter)
    scheduler, rng = Scheduler(worker), random.Random(1)
    prompts = [[rng.randrange(1, 257) for _ in range(n)] for n in (21, 5)]
    prompts.append([*prompts[0][:17], 44, 45])
    a, b, c = requests = [Request(slot, [*prompt]) for slot, prompt in zip((3, 1, 2), prompts, strict=True)]
    plain = LLM(target, method="ar", max_batch_size=1, max_model_len=ROOM)
    outputs = plain.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    texts = {r.slot: [*p, *o.token_ids] for r, p, o in zip(requests, prompts, outputs, strict=True)}
    running: list[Request] = []
    draft_tree, compared = worker.drafting.draft, []

    def draft_and_help(at: Places, roots_R: Tensor, features_RH: Tensor) -> DraftTree:
        tree = draft_tree(at, roots_R, features_RH)
        for r, request in enumerate(running):
            same_trees(row_of(tree, r), expected_tree(target, drafter, request.text, method))
            compared.append(request.slot)
        return helped(tree, [texts[request.slot][len(request.text) :] for request in running], rng)

    worker.drafting.draft = draft_and_help
    scheduler.prefill([b, a], chunked=a)
    scheduler.prefill([a], chunked=a)
    scheduler.prefill([a])
    running = [b, a]
    for _ in range(3):
        scheduler.decode(running)
    scheduler.share(a, c, 16)  # SGLang keeps prefixes by pairs of tokens, so the next one is shared as well
    scheduler.prefill([c])
    running = [a, c, b]
    while min(len(r.text) for r in requests) < 45:
        running = [r for r in rng.sample(requests, 3) if len(r.text) < 60]
        scheduler.decode(running)
    for r in requests:
        assert r.text == texts[r.slot][: len(r.text)]
    assert scheduler.num_accepted > 15
    assert set(compared) == {1, 2, 3}


def test_masks_are_written_where_the_backend_reads_them(worker_module: ModuleType) -> None:
    def wanted(mode: TreeMaskMode, max_bs: int) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, buffer=torch.ones(400).bool(), fits=lambda bs: bs <= max_bs)

    full, small = full_mask(TREE, LENGTHS), tree_mask(TREE)
    assert torch.equal(worker_module.fitting_mask(TREE, LENGTHS, None), full)
    for mode, mask in ((TreeMaskMode.FULL_MASK, full), (TreeMaskMode.QLEN_ONLY, small)):
        backend = wanted(mode, 2)
        assert worker_module.fitting_mask(TREE, LENGTHS, backend) is backend.buffer
        assert torch.equal(backend.buffer[: len(mask)], mask)
        assert torch.equal(worker_module.fitting_mask(TREE, LENGTHS, wanted(mode, 1)), mask)
    with pytest.raises(UserError, match="another --attention-backend"):
        worker_module.fitting_mask(TREE, LENGTHS, wanted(TreeMaskMode.QLEN_ONLY_BITPACKING, 2))


def test_what_may_not_fit_is_told(tmp_path: Path, target: HFTarget, worker_module: ModuleType, caplog) -> None:
    drafter = tiny_drafter(target)
    drafter.config = replace(drafter.config, rope_theta=1e6)
    save_drafter(drafter, tmp_path / "drafter", {})
    make_worker(worker_module, target, tmp_path / "drafter")
    assert "rope: base 1e+06, the target's is 10000" in caplog.text


def test_what_is_compared_is_what_sglang_serves(
    tmp_path: Path, target: HFTarget, worker_module: ModuleType, caplog
) -> None:
    """Its tokenizer, with the chat template, and its context, not the target's of 1024."""
    drafter, facts = tmp_path / "drafter", target.facts
    then = {"tokenizer": facts.tokenizer, "chat_template": facts.chat_template, "answer_start": facts.answer_start}
    save_drafter(tiny_drafter(target), drafter, {"made_for": then, "training": {"trained_length": ROOM // 8}})
    make_worker(worker_module, target, drafter)
    assert not caplog.text
    strange = dict.fromkeys(("tokenizer", "chat_template"), "0123456789abcdef") | {"answer_start": "<think>"}
    save_drafter(tiny_drafter(target), drafter, {"made_for": strange, "training": {"trained_length": ROOM // 8 - 1}})
    make_worker(worker_module, target, drafter)
    for said in (
        "another tokenizer than at training",
        "another chat template than",
        "another thinking mode than at training: left to the model, it was on",
        f"texts of up to {ROOM // 8 - 1} tokens, here they may have {ROOM}",
    ):
        assert said in caplog.text


@pytest.mark.parametrize(
    ("name", "said"), [("eagle3.1", "has no self-query"), ("other", "not for this target"), ("none", "no drafter")]
)
def test_a_drafter_that_does_not_fit_is_refused(
    name: str, said: str, folder: Path, target: HFTarget, worker_module: ModuleType
) -> None:
    with pytest.raises(UserError, match=said):
        make_worker(worker_module, target, folder / "drafters" / name)


def test_other_taps_than_eagle3s_are_refused(folder: Path, target: HFTarget, worker_module: ModuleType) -> None:
    """SGLang chooses them when it makes its attention backends, after the worker is there."""
    worker = make_worker(worker_module, target, folder / "drafters" / "pr")
    worker.init_attention_backends()
    worker.target_worker.model_runner.model.model.layers_to_capture = [1, 4, 7]
    with pytest.raises(UserError, match=r"taps the inputs of layers \[1, 4, 7\], and the drafter reads \[2, 4, 5\]"):
        worker.init_attention_backends()
