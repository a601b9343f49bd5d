"""Greedy chains: both levels equal a direct computation; positions, nodes and offers are what replay saw."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from secondguess.bench.chain import ChainSpeculator
from secondguess.bench.observe import Position, chain_positions, nodes_of, read_confident, tree_nodes
from secondguess.bench.offers import OfferWatch, count_refined
from secondguess.bench.plan import Prompt
from secondguess.bench.replay import Text, read, replay
from secondguess.bench.transcript import TranscriptStore, record
from secondguess.config import TreeConfig
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.cycle import CycleTrace
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.llm import LLM
from secondguess.target.base import causal_rows
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import DraftTree, SamplingParams, Verdict

CONFIG = TreeConfig(budget=10, num_steps=4, grow_width=3, offer_width=3)
KeyValue = tuple[torch.Tensor, torch.Tensor]


def look(
    drafter: Drafter, e_H: torch.Tensor, g_H: torch.Tensor, position: int, seen: list[KeyValue]
) -> tuple[torch.Tensor, KeyValue]:
    """One row of the block with its attention written out: its feature, its own key and value."""
    own: list[KeyValue] = []

    def attend(layer: int, q_1AD: torch.Tensor, k_1GD: torch.Tensor, v_1GD: torch.Tensor) -> torch.Tensor:
        own.append((k_1GD[0], v_1GD[0]))
        group = q_1AD.shape[1] // k_1GD.shape[1]
        k_CAD, v_CAD = (torch.stack(x).repeat_interleave(group, 1) for x in zip(*seen, *own, strict=True))
        weights_CA = ((q_1AD * k_CAD).sum(-1) / math.sqrt(q_1AD.shape[-1])).softmax(0)
        return (weights_CA[..., None] * v_CAD).sum(0, keepdim=True)

    return drafter.block(e_H[None], g_H[None], torch.tensor([position]), attend)[0], own[0]


def direct(drafter: Drafter, tokens: list[int], taps_TLH: torch.Tensor, depth: int) -> list[tuple]:
    """Logits of level 0 and of level 1 after the last token and after ``depth`` - 1 greedy descendants of it."""
    root = len(tokens) - 1
    seen: list[KeyValue] = []
    f_H = torch.empty(0)
    for p in range(root):
        token = torch.tensor(tokens[p + 1])
        f_H, own = look(drafter, drafter.embed(token), drafter.fuse(taps_TLH[p]), p, seen)
        seen.append(own)
    logits = []
    for d in range(depth):
        to_e, to_f = drafter.lens(f_H).chunk(2) if drafter.config.lens else (0, 0)
        refined_H, _ = look(drafter, drafter.self_query + to_e, f_H + to_f, root - 1 + d, seen)
        logits.append((drafter.logits(f_H), drafter.logits(refined_H)))
        child = drafter.target_ids[logits[-1][0].argmax()]
        f_H, own = look(drafter, drafter.embed(child), f_H, root + d, seen)
        seen.append(own)
    return logits


class Recorded(ChainSpeculator):
    """Keeps the logits of every row."""

    def offers(
        self, f_RXH: torch.Tensor, known_RMK: torch.Tensor | None = None, noise_RXV: torch.Tensor | None = None
    ) -> Offers:
        self.logits = [*getattr(self, "logits", []), self.drafter.logits(f_RXH)]
        return super().offers(f_RXH, known_RMK, noise_RXV)


@pytest.mark.parametrize(("num_steps", "lens"), [(1, False), (2, False), (5, False), (5, True)])
def test_both_levels_equal_a_direct_computation(num_steps: int, lens: bool) -> None:
    target = tiny_target("llama")
    drafter, prompts = tiny_drafter(target, lens=lens), [[5, 9, 2, 7, 1], [3, 3, 8]]
    generator = torch.Generator().manual_seed(0)
    taps = [torch.randn(len(p), 3, target.spec.hidden_size, generator=generator, dtype=torch.float64) for p in prompts]
    chain = Recorded(drafter, TreeConfig(num_steps=num_steps), num_slots=2, num_columns=64)
    chain.accept([Accepted(i, torch.tensor([*p[1:], 6]), taps[i]) for i, p in enumerate(prompts)])
    tree = chain.draft(Roots((0, 1), (6, 6), tuple([*p, 6] for p in prompts), (GREEDY, GREEDY)))
    logits_RYV = torch.cat(chain.logits, 1)
    for r, prompt in enumerate(prompts):
        expected = direct(drafter, [*prompt, 6], taps[r], num_steps)
        for d, (level0_V, level1_V) in enumerate(expected):
            torch.testing.assert_close(logits_RYV[r, max(2 * d - 1, 0)], level0_V, rtol=0, atol=1e-10)
            torch.testing.assert_close(logits_RYV[r, 2 * d + 2], level1_V, rtol=0, atol=1e-10)
            for guesses, logits_V in ((chain.level0, level0_V), (chain.level1, level1_V)):
                assert guesses.tokens_RD[r, d] == drafter.target_ids[logits_V.argmax()]
                assert guesses.confidence_RD[r, d].item() == pytest.approx(logits_V.softmax(0).max().item(), abs=1e-6)
        assert tree.tokens_RN[r].tolist() == [6, *chain.level0.tokens_RD[r].tolist()]
    assert tree.parents_RN.tolist() == [list(range(-1, num_steps))] * 2
    assert tree.scores_RN.exp()[:, -1].tolist() == pytest.approx(chain.level0.confidence_RD.prod(1).tolist())


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    """A target, a drafter that is right now and then, and a few plain texts."""
    target = tiny_target("llama")
    prompts = [Prompt("t", str(i), tuple((5 * i + 3 * j) % 63 + 1 for j in range(2 + i))) for i in range(4)]
    llm = LLM(target, method="ar", max_batch_size=4, max_model_len=200)
    store = TranscriptStore(tmp_path_factory.mktemp("texts"), {})
    return target, tiny_drafter(target), record(llm, prompts, SamplingParams(max_tokens=32), store, lambda n: None)


def positions_of(drafter: Drafter, text: Text, confidences: list[float]) -> list[Position]:
    """What greedy chains meet on a text, node by node."""
    known, found, root = drafter.target_ids.tolist(), [], text.num_prompt
    while root + 1 < text.num_written:
        for logits in direct(drafter, text.ids[: root + 1], text.taps_TLH, CONFIG.num_steps):
            token = text.ids[root + 1]
            right0, right1 = (bool(drafter.target_ids[x_V.argmax()] == token) for x_V in logits)
            if root + 1 < text.num_written:
                sure0, sure1 = (x_V.softmax(0).max().item() for x_V in logits)
                found.append(Position(sure0, sure1, confidences[root], right0, right1, token in known))
            root += 1
            if not right0:
                break
        else:
            root += 1  # the bonus token after a chain that was right to its end
    return found


def test_positions_are_those_of_chains_that_follow_the_text(workload) -> None:
    target, drafter, transcripts = workload
    texts, confidences = zip(*(read_confident(target, t) for t in transcripts), strict=True)
    chain = ChainSpeculator(drafter, CONFIG, len(texts), 200)
    expected: list[Position] = []
    for text, sure in zip(texts, confidences, strict=True):
        expected += (alone := positions_of(drafter, text, sure))
        for ours, theirs in zip(chain_positions(chain, [text], [sure]), alone, strict=True):
            assert ours[:3] == pytest.approx(theirs[:3], abs=1e-6)
            assert ours[3:] == theirs[3:]
    assert len(expected) > 100
    assert len({p.right0 for p in expected}) == len({p.right1 for p in expected}) == 2
    together = chain_positions(chain, texts, confidences)  # in another order
    assert Counter(p[3:] for p in together) == Counter(p[3:] for p in expected)
    for name in ("confidence0", "confidence1", "target_confidence"):
        ours, theirs = (sorted(getattr(p, name) for p in side) for side in (together, expected))
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_chain_is_a_tree_of_width_one(workload) -> None:
    """So a method can be one: what engines that verify chains are compared with."""
    target, drafter, transcripts = workload
    texts = [read(target, t) for t in transcripts]
    narrow = replace(CONFIG, budget=CONFIG.num_steps, grow_width=1, offer_width=1, num_reconsider=0)
    drafts: list[list[list[int]]] = []
    for speculator in (ChainSpeculator(drafter, CONFIG, 4, 200), EagleSpeculator(drafter, narrow, 4, 200)):
        seen: list[list[int]] = []
        replay(speculator, texts, lambda _, trace, seen=seen: seen.extend(trace.tree.tokens_RN.tolist()))
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 50


def test_tokens_past_the_end_of_a_text_do_not_count(workload) -> None:
    """Texts cut after the first right guess, so that its chain reaches beyond."""
    target, drafter, transcripts = workload
    chain, num_cut = ChainSpeculator(drafter, CONFIG, 1, 200), 0
    for text, sure in (read_confident(target, t) for t in transcripts):
        whole = chain_positions(chain, [text], [sure])
        first = next((i for i, p in enumerate(whole) if p.right0), None)
        if first is not None:
            cut = replace(text, num_written=text.num_prompt + 1 + first + 1)
            assert chain_positions(chain, [cut], [sure]) == whole[: first + 1]
            num_cut += 1
    assert num_cut


def test_the_target_s_confidence_is_that_after_each_token(workload) -> None:
    target, _, transcripts = workload
    text, confidences = read_confident(target, transcripts[0])
    again = read(target, transcripts[0])
    assert text.ids == again.ids
    assert torch.equal(text.taps_TLH, again.taps_TLH)
    assert len(confidences) == text.num_written
    for t in (0, 1, text.num_written - 1):
        cache = target.new_cache(1, t + 1)
        out = target.forward(causal_rows(torch.tensor([0]), torch.tensor([text.ids[: t + 1]])), cache, last_only=True)
        assert confidences[t] == pytest.approx(out.logits_RNV[0, 0].softmax(0).max().item(), abs=1e-6)


#        0 (root)
#      1    2      node 2 is of level 1, node 5 is padding
#      3    4
TREE = DraftTree(
    tokens_RN=torch.tensor([[9, 1, 2, 3, 4, 0]]),
    parents_RN=torch.tensor([[-1, 0, 0, 1, 2, -1]]),
    depths_RN=torch.tensor([[0, 1, 1, 2, 2, 0]]),
    levels_RN=torch.tensor([[0, 0, 1, 0, 0, 0]]),
    scores_RN=torch.tensor([[1.0, 0.5, 0.25, 0.125, 0.0625, 0.0]]).log(),
    valid_RN=torch.tensor([[True] * 5 + [False]]),
)


def test_nodes_of_a_cycle() -> None:
    verdict = Verdict(torch.tensor([[0, 2, -1]]), torch.tensor([[2, 7, -1]]), torch.tensor([2]))
    assert nodes_of(CycleTrace(TREE, verdict)) == [
        (0.5, False, 1, 0),
        (0.25, True, 1, 1),
        (0.125, False, 2, 0),
        (0.0625, False, 2, 0),
    ]


def offers(tokens: list[list[int]], logps: list[list[float]]) -> Offers:
    logps_RXK = torch.tensor([logps])
    return Offers(torch.tensor([tokens]), logps_RXK, logps_RXK[..., 0].exp())


def rows(fed_by: list[int], valid: list[bool], num_level0: int) -> DraftRows:
    unused = torch.zeros(0)
    return DraftRows(unused, torch.tensor([fed_by]), unused, unused, torch.tensor([valid]), num_level0)


def test_refined_offers_are_counted_against_their_own_node() -> None:
    root = offers([[5, 7]], [[-0.1, -2.0]])
    first = offers([[1, 2], [7, 9]], [[-1.0, -2.0], [-1.0, -3.0]])  # level 0 of token 5, level 1 of the root
    found = count_refined([root], rows([0, 0], [True, True], 1), first, 2)
    assert found == {"offered": 2, "duplicate": 1, "raised": 1}  # 7 was the root's child already, at -2.0
    second = offers([[3, 4], [2, 1], [2, 1]], [[-1.0, -2.0], [-2.5, -1.0], [-0.5, -0.5]])  # the last row is padding
    found = count_refined([root, first], rows([1, 1, 1], [True, True, False], 1), second, 2)
    assert found == {"offered": 2, "duplicate": 2, "raised": 0}  # one less probable, one as probable


def test_watching_changes_no_tree(workload) -> None:
    target, drafter, transcripts = workload
    texts = [read(target, t) for t in transcripts]
    watch = OfferWatch(drafter, CONFIG, len(texts), 200)
    plain = EagleSpeculator(drafter, CONFIG, len(texts), 200)
    nodes = tree_nodes(watch, texts)
    assert nodes == tree_nodes(plain, texts)
    assert watch.refined["offered"] > watch.refined["duplicate"] > watch.refined["raised"] > 0
    # Every step of a draft reconsiders a node or more, each with three offers.
    assert watch.refined["offered"] % 3 == 0
    assert {level for *_, level in nodes} == {0, 1}
