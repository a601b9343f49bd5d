"""Our proposer under a stand-in for vLLM's loop: flat passes, prompts in chunks, requests that come, go and move.

``scripts/check_vllm.py`` runs it in vLLM itself. T tokens of a pass, H hidden size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from secondguess.bench.peers.known import KNOWN
from secondguess.bench.peers.process import FOLDER
from secondguess.commands.bench_run import peer_drafter
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_drafter, save_drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Accepted
from secondguess.errors import UserError
from secondguess.integrations import vllm as integration
from secondguess.integrations.vllm import BranchProposer, Places, roots_of
from secondguess.llm import LLM
from secondguess.methods import parse_method
from secondguess.target.base import causal_rows
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_drafter
from secondguess.tree.branch import best_branch
from secondguess.types import DraftTree, Output, Rows, SamplingParams
from test_tree import configs, draft, seeds

CHUNK, STEPS, ROOM = 8, 3, 120  # positions of a prompt that a pass reads; draft tokens; tokens of a request


@pytest.fixture(scope="module")
def target(folder: Path) -> HFTarget:
    return load_target(str(folder / "target"), "float64")


def engine_config(options: Any, **changes: Any) -> SimpleNamespace:
    """As much of vLLM's config as the proposer reads."""
    settings = {
        "enforce_eager": True, "enable_prefix_caching": False, "world_size": 1, "max_num_seqs": 3, "tokenizer": None,
        "max_model_len": ROOM,
    } | changes  # fmt: skip
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=STEPS),
        additional_config={"secondguess": options},
        model_config=SimpleNamespace(
            max_model_len=settings["max_model_len"],
            enforce_eager=settings["enforce_eager"],
            skip_tokenizer_init=settings["tokenizer"] is None,
            tokenizer=settings["tokenizer"],
            tokenizer_revision=None,
            trust_remote_code=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=settings["enable_prefix_caching"]),
        parallel_config=SimpleNamespace(world_size=settings["world_size"]),
        scheduler_config=SimpleNamespace(max_num_seqs=settings["max_num_seqs"]),
    )


class Layer(nn.Module):
    """What vLLM's decoder layers are given."""

    def forward(self, positions_T: Tensor, added_TH: Tensor, residual_TH: Tensor | None) -> None:
        pass


def model_of(target: HFTarget) -> SimpleNamespace:
    """What ``load_model`` is given. vLLM's embedding has more rows than there are tokens."""
    weight = torch.cat([target.embedding, torch.ones(63, target.spec.hidden_size, dtype=torch.float64)])
    layers = nn.ModuleList(Layer() for _ in range(target.spec.num_layers))
    embedding, config = SimpleNamespace(weight=weight), target.model.config
    return SimpleNamespace(model=SimpleNamespace(layers=layers, embed_tokens=embedding, config=config))


@dataclass(eq=False)
class Request:
    slot: int
    tokens: list[int]
    num_read: int = 0
    draft: list[int] = field(default_factory=list)
    num_accepted: int = 0
    forced: int | None = None  # in place of the token that is emitted last, as if it had been drawn


class Runner:
    """Greedy decoding as vLLM does it: one flat pass over the rows of all requests, then the proposer."""

    def __init__(self, target: HFTarget, proposer: BranchProposer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target, self.proposer, self.starts = target, proposer, [0]
        self.cache, self.model = target.new_cache(8, ROOM), model_of(target)
        monkeypatch.setattr(integration, "starts_of_pass", lambda: self.starts)
        proposer.load_model(self.model)

    def step(self, requests: list[Request]) -> list[list[int]]:
        """What the pass emits for each; its next draft is with the request then."""
        self.starts, positions, taps, sampled = [0], [], [], []
        for r in requests:
            first = r.num_read
            taps_ELH, emitted = self.read(r)
            positions += range(first, first + len(taps_ELH))
            taps.append(taps_ELH)
            sampled.append(emitted)
            self.starts.append(len(positions))
        self.fire(torch.tensor(positions), torch.cat(taps))
        lengths = np.array([len(r.tokens) for r in requests], dtype=np.int32)
        table = np.full((len(requests), ROOM), -7, dtype=np.int32)
        for row, r in zip(table, requests, strict=True):
            row[: len(r.tokens)] = r.tokens
        for r, tokens in zip(requests, self.proposer.propose(sampled, lengths, table), strict=True):
            r.draft = tokens
        return sampled

    def read(self, r: Request) -> tuple[Tensor, list[int]]:
        """A chunk of the prompt, or the newest token and its draft: the states of all rows, and what is emitted."""
        waiting = r.tokens[r.num_read :]
        rows = waiting[:CHUNK] + (r.draft if len(waiting) == 1 else [])
        index_N = torch.arange(r.num_read, r.num_read + len(rows))
        columns_W = torch.arange(len(index_N) + r.num_read)
        out = self.target.forward(
            Rows(
                slots_R=torch.tensor([r.slot]),
                tokens_RN=torch.tensor([rows]),
                positions_RN=index_N[None],
                columns_RN=index_N[None],
                visible_RNW=(columns_W <= index_N[:, None])[None],
                column_positions_RW=columns_W[None],
            ),
            self.cache,
        )
        if len(waiting) > CHUNK:
            r.num_read += CHUNK
            return out.taps_RNLH[0], []
        best = out.logits_RNV[0].argmax(-1).tolist()[len(waiting) - 1 :]
        num_right = next((i for i, token in enumerate(r.draft) if token != best[i]), len(r.draft))
        r.num_read += len(waiting) + num_right
        r.num_accepted += num_right
        emitted = [*best[:num_right], best[num_right] if r.forced is None else r.forced]
        r.tokens += emitted
        return out.taps_RNLH[0], emitted

    def fire(self, positions_T: Tensor, taps_TLH: Tensor) -> None:
        """The tapped layers are called as in a pass, the residual stream in two parts."""
        for i, layer in enumerate(self.target.spec.tap_layers):
            self.model.model.layers[layer](positions_T, 0.25 * taps_TLH[:, i], 0.75 * taps_TLH[:, i])


def plain(target: HFTarget, prompts: list[list[int]]) -> list[Output]:
    llm = LLM(target, method="ar", max_batch_size=1, max_model_len=ROOM)
    return llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))


def expected_draft(target: HFTarget, drafter_folder: Path, tokens: list[int], method: str) -> list[int]:
    """The best branch of a tree that is drafted anew, over the states of one pass."""
    drafter = load_drafter(drafter_folder, target.embedding, target.spec.num_layers)
    tree = parse_method(method, TreeConfig(num_steps=STEPS)).tree_for(drafter.config)
    speculator = EagleSpeculator(drafter, tree, 1, ROOM)
    cache = target.new_cache(1, ROOM)
    out = target.forward(causal_rows(torch.tensor([0]), torch.tensor([tokens[:-1]])), cache)
    speculator.accept([Accepted(0, torch.tensor(tokens[1:]), out.taps_RNLH[0])])
    return best_branch(speculator.draft(roots_of(tokens[-1:], [0], torch.device("cpu"))), STEPS)[0]


@pytest.mark.parametrize("method", ["pr", "eagle3.1:budget=3,grow_width=1,offer_width=1"])
def test_drafts_are_those_of_a_tree_over_the_whole_text(method: str, folder: Path, target, monkeypatch) -> None:
    drafter = folder / "drafters" / ("pr" if method == "pr" else "eagle3.1")
    proposer = BranchProposer(engine_config({"drafter": str(drafter), "method": method}))
    runner, rng = Runner(target, proposer, monkeypatch), random.Random(0)
    lengths = [1, 21, 8, 5, 9]  # less than a chunk, several, one; more requests than there is room for at once
    prompts = [[rng.randrange(1, 257) for _ in range(n)] for n in lengths]
    texts = [[*p, *o.token_ids] for p, o in zip(prompts, plain(target, prompts), strict=True)]
    waiting = [Request(i, [*prompt]) for i, prompt in enumerate(prompts)]
    running, finished, compared = [waiting.pop(0)], [], 0
    while running:
        for r, emitted in zip(running, runner.step(running), strict=True):
            if emitted:
                assert r.draft == expected_draft(target, drafter, r.tokens, method)
                compared += 1
                count = rng.randrange(STEPS + 1)  # a random drafter is never right: help it
                r.draft = [*texts[r.slot][len(r.tokens) :][:count], *r.draft][:STEPS]
        finished += [r for r in running if len(r.tokens) > 40]
        running = [r for r in running if r not in finished]
        rng.shuffle(running)
        if waiting and len(running) < 3:
            running.append(waiting.pop(0))
    assert len(finished) == 5
    assert all(r.tokens == texts[r.slot][: len(r.tokens)] for r in finished)
    assert sum(r.num_accepted for r in finished) > 50
    assert compared > 50


def test_a_request_whose_beginning_was_not_seen_gets_no_draft(folder: Path, target, monkeypatch) -> None:
    proposer = BranchProposer(engine_config({"drafter": str(folder / "drafters" / "pr")}))
    runner = Runner(target, proposer, monkeypatch)
    strange, known = Request(0, [5, 6, 7], num_read=2), Request(1, [8, 9])
    runner.step([strange, known])
    assert strange.draft == []
    assert len(known.draft) == STEPS
    runner.step([strange, known])
    assert strange.draft == []
    assert known.draft


def test_when_there_is_no_room_the_text_used_longest_ago_goes(folder: Path, target, monkeypatch) -> None:
    proposer = BranchProposer(engine_config({"drafter": str(folder / "drafters" / "pr")}, max_num_seqs=2))
    runner = Runner(target, proposer, monkeypatch)
    a, b, c = (Request(i, [20 + i, 30, 40]) for i in range(3))
    runner.step([a])
    runner.step([b])
    runner.step([a])
    runner.step([c])  # takes the place of b
    runner.step([a, b])
    assert a.draft
    assert b.draft == []


def test_two_requests_with_the_same_text_stay_apart(folder: Path, target, monkeypatch) -> None:
    proposer = BranchProposer(engine_config({"drafter": str(folder / "drafters" / "pr")}))
    runner = Runner(target, proposer, monkeypatch)
    twins = [Request(i, [7, 8, 9]) for i in range(2)]
    for _ in range(3):
        runner.step(twins)
    assert twins[0].draft == twins[1].draft
    twins[0].forced = 50
    runner.step(twins)
    twins[0].forced = None
    runner.step(twins)
    assert twins[0].tokens != twins[1].tokens
    for r in twins:
        assert r.draft == expected_draft(target, folder / "drafters" / "pr", r.tokens, "pr")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enforce_eager": False}, "start vLLM with --enforce-eager"),
        ({"enable_prefix_caching": True}, "start vLLM with --no-enable-prefix-caching"),
        ({"world_size": 2}, "leave tensor and pipeline parallel at 1"),
    ],
)
def test_settings_under_which_states_pass_unseen_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        BranchProposer(engine_config({}, **changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafer": "x"}, "unknown key 'drafer'; did you mean drafter"),
        ({"method": "ngram"}, "method must be eagle3.1 or pr"),
        ({"method": "pr:budget=auto"}, "with a budget that is a number"),
        ({"method": "prr"}, "unknown method 'prr'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        BranchProposer(engine_config(options))


@pytest.mark.parametrize(
    ("name", "said"), [("eagle3.1", "has no self-query"), ("other", "not for this target"), ("none", "no drafter")]
)
def test_a_drafter_that_does_not_fit_is_refused(name: str, said: str, folder: Path, target) -> None:
    proposer = BranchProposer(engine_config({"drafter": str(folder / "drafters" / name)}))
    with pytest.raises(UserError, match=said):
        proposer.load_model(model_of(target))


def test_what_may_not_fit_is_told(tmp_path: Path, target: HFTarget, caplog) -> None:
    drafter = tiny_drafter(target)
    drafter.config = replace(drafter.config, rope_theta=1e6)
    save_drafter(drafter, tmp_path / "drafter", {})
    BranchProposer(engine_config({"drafter": str(tmp_path / "drafter")})).load_model(model_of(target))
    assert "rope: base 1e+06, the target's is 10000" in caplog.text


def test_another_tokenizer_is_told(tmp_path: Path, folder: Path, target: HFTarget, caplog) -> None:
    drafter = tmp_path / "drafter"
    save_drafter(tiny_drafter(target), drafter, {"made_for": {"tokenizer": target.facts.tokenizer}})
    config = engine_config({"drafter": str(drafter)}, tokenizer=str(folder / "target"))
    BranchProposer(config).load_model(model_of(target))
    assert not caplog.text
    save_drafter(tiny_drafter(target), drafter, {"made_for": {"tokenizer": "0123456789abcdef"}})
    BranchProposer(config).load_model(model_of(target))
    assert "tokenizer: another tokenizer than at training" in caplog.text


def test_texts_of_which_there_is_no_room_are_refused(folder: Path, target: HFTarget) -> None:
    proposer = BranchProposer(engine_config({"drafter": str(folder / "drafters" / "pr")}, max_model_len=2**40))
    with pytest.raises(UserError, match=r"GB, .* are free: lower --max-num-seqs or --max-model-len"):
        proposer.load_model(model_of(target))


def test_of_a_text_that_grows_what_is_new_is_copied() -> None:
    places, text = Places(2, 6), np.array([4, 5, 6, 7], np.int32)
    slot = places.new()
    places.keep(slot, text[:2])
    places.keep(slot, np.array([0, 0, 6, 7]))  # its beginning is known
    assert places.find(text) == slot
    assert [places.find(other) for other in (text[:2], text[:3], np.array([4, 5, 6, 8]))] == [None] * 3
    other = places.new()
    places.keep(other, text[:3])
    assert places.find(text[:3]) == other != slot
    assert places.new() == slot, "used longest ago"
    assert places.find(text) is None, "and empty then"


#         0
#      1     2      node 5 is padding
#      3     4
TREE = DraftTree(
    tokens_RN=torch.tensor([[9, 11, 12, 13, 14, 0]]),
    parents_RN=torch.tensor([[-1, 0, 0, 1, 2, -1]]),
    depths_RN=torch.tensor([[0, 1, 1, 2, 2, 0]]),
    levels_RN=torch.tensor([[0, 0, 1, 0, 0, 0]]),
    scores_RN=torch.tensor([[1.0, 0.5, 0.45, 0.1, 0.4, 9.0]]).log(),
    valid_RN=torch.tensor([[True] * 5 + [False]]),
)


def test_the_best_branch() -> None:
    assert best_branch(TREE, 3) == best_branch(TREE, 2) == [[12, 14]]  # 0.45 + 0.4, against 0.5 + 0.1
    assert best_branch(TREE, 1) == [[11]]


@given(configs, seeds, st.integers(1, 6))
def test_no_other_branch_is_worth_more(config: TreeConfig, seed: int, num_tokens: int) -> None:
    tree, _ = draft(config, seed, False, [0, 1])
    for r, branch in enumerate(best_branch(tree, num_tokens)):
        parents, scores = tree.parents_RN[r].tolist(), tree.scores_RN[r].exp().tolist()
        worth, paths = {0: 0.0}, {0: list[int]()}
        for n in range(1, int(tree.valid_RN[r].sum())):
            worth[n] = worth[parents[n]] + scores[n]
            paths[n] = [*paths[parents[n]], int(tree.tokens_RN[r, n])]
        allowed = [n for n in worth if len(paths[n]) <= num_tokens]
        most = max(worth[n] for n in allowed)
        assert any(paths[n] == branch and worth[n] == pytest.approx(most) for n in allowed)


def test_what_vllm_is_told_of_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from vllm_worker import drafting

    told = {name: drafting({**KNOWN[name].config, "drafter": KNOWN[name].drafter}) for name in KNOWN if "vllm" in name}
    assert told["vllm"] == {}
    assert told["vllm:eagle3"]["speculative_config"]["method"] == "eagle3"
    ours = told["vllm:pr"]
    assert ours["additional_config"] == {"secondguess": {"drafter": "pr"}}
    module, _, name = ours["speculative_config"]["model"].rpartition(".")
    assert (module, name) == (BranchProposer.__module__, BranchProposer.__name__)


def test_a_peer_takes_the_drafter_that_is_given(folder: Path, target: HFTarget) -> None:
    drafter = str(folder / "drafters" / "pr")
    assert peer_drafter("vllm:pr", drafter, target) == peer_drafter("vllm:eagle3", drafter, target) == drafter
    assert peer_drafter("vllm", drafter, target) is None
    assert peer_drafter("vllm:pr", None, target) is None  # none ships for it
