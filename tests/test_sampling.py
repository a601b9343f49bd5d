"""Logits processing and the token choice: a plain-Python reference, exact laws, and independence of batch-mates."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from secondguess.engine import sampling
from secondguess.engine.cycle import chooser
from secondguess.engine.noise import gumbel
from secondguess.engine.sampler_state import join, keep, start
from secondguess.engine.sampling import SamplerState, choose, perturbed, process, record
from secondguess.errors import UserError
from secondguess.tree.walk import walk
from secondguess.types import DraftTree, Request, SamplingParams

V = 12
EOS = 3
PROMPT = (1, 1, 5)

params_st = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 0.7, 1.6]),
    top_k=st.sampled_from([0, 0, 1, 3, 5, V, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.61, 0.23, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.07, 0.43, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.35, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 0.5, 4.0]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 2, 4]),
    stop_token_ids=st.sampled_from([(), (7,), (7, EOS)]),
    ignore_eos=st.booleans(),
)
batches_st = st.lists(params_st, min_size=1, max_size=4)
outputs_st = st.lists(st.lists(st.integers(0, V - 1), max_size=5), min_size=4, max_size=4)


def logits_like(seed: int, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Logits on a coarse grid in every second row, so that ties are common."""
    logits_RV = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    logits_RV[::2] = (logits_RV[::2] * 2).round() / 2
    return logits_RV.to(dtype)


def state_of(batch: list[SamplingParams], outputs: list[list[int]], seed: int = 5) -> SamplerState:
    requests = [Request(PROMPT[: 1 + r % 3], params, choice=r) for r, params in enumerate(batch)]
    state = start(requests, [seed + r for r in range(len(batch))], vocab_size=V, eos_ids=(EOS,))
    for step in range(max((len(o) for o in outputs[: len(batch)]), default=0)):
        tokens = [o[step] if step < len(o) else -1 for o in outputs[: len(batch)]]
        record(state, torch.tensor(tokens), torch.tensor([t >= 0 for t in tokens]))
    return state


def single(params: SamplingParams) -> SamplerState:
    return state_of([params], [[]])


def kept(scores_V: Tensor) -> set[int]:
    return set((scores_V > -math.inf).nonzero().flatten().tolist())


# ---- the processors against a slow reference


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def edited(logits: list[float], p: SamplingParams, prompt: tuple[int, ...], output: list[int]) -> list[float]:
    counts, scores = Counter(output), list(logits)
    for token in range(len(scores)):
        if token in counts or token in prompt:
            scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
        if token in counts:
            scores[token] -= p.presence_penalty + p.frequency_penalty * counts[token]
        scores[token] += p.logit_bias.get(token, 0.0)
        ends = token in p.stop_token_ids or (token == EOS and not p.ignore_eos)
        if ends and len(output) < p.min_tokens:
            scores[token] = -math.inf
    return scores


def reference(logits: list[float], p: SamplingParams, prompt: tuple[int, ...], output: list[int]) -> list[float]:
    scores = edited(logits, p, prompt, output)
    if p.temperature == 0:
        return scores
    scores = [(s - max(scores)) / p.temperature for s in scores]
    survivors = [s if math.exp(s) >= p.min_p * (1 - 1e-12) else -math.inf for s in scores]
    if p.top_k:
        kth = sorted(survivors, reverse=True)[: p.top_k][-1]
        survivors = [s if s >= kth else -math.inf for s in survivors]
    mass, last = 0.0, -math.inf
    for probability, score in sorted(zip(softmax(survivors), survivors, strict=True), reverse=True):
        if mass < p.top_p or p.top_p == 1:
            mass, last = mass + probability, score
    return [s if s >= last else -math.inf for s in survivors]


@given(batches_st, outputs_st, st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_process_equals_a_plain_python_reference(batch: list[SamplingParams], outputs: list[list[int]], seed: int):
    logits_RV = logits_like(seed, len(batch))
    scores_RV = process(logits_RV, state_of(batch, outputs))
    for r, params in enumerate(batch):
        want = reference(logits_RV[r].tolist(), params, PROMPT[: 1 + r % 3], outputs[r])
        assert scores_RV[r].tolist() == pytest.approx(want, abs=1e-9)


@given(batches_st, outputs_st, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=150, deadline=None)
def test_a_row_does_not_depend_on_its_batch_mates(
    batch: list[SamplingParams], outputs: list[list[int]], seed: int, dtype: torch.dtype
):
    state, logits_RV = state_of(batch, outputs), logits_like(seed, len(batch), dtype)
    positions_R = torch.arange(len(batch)) + 17
    together_RV = perturbed(logits_RV, state, positions_R)
    for r in range(len(batch)):
        alone_1V = perturbed(logits_RV[r : r + 1], keep(state, [r]), positions_R[r : r + 1])
        assert torch.equal(alone_1V, together_RV[r : r + 1])
    assert torch.equal(choose(logits_RV, state, positions_R), together_RV.argmax(-1))


@given(batches_st, batches_st, outputs_st, st.permutations(range(4)), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_joining_and_leaving_batches_keeps_every_rows_history(
    first: list[SamplingParams], second: list[SamplingParams], outputs: list[list[int]], order: list[int], seed: int
):
    states = [state_of(first, outputs), state_of(second, outputs[::-1])]
    joined = join(states)
    kept_rows = [r for r in order if r < len(joined.rows)]
    state = keep(joined, kept_rows)
    tokens_R, active_R = torch.arange(len(kept_rows)), torch.arange(len(kept_rows)) % 2 == 0
    record(state, tokens_R, active_R)
    rows = [(states[s], r) for s, batch in enumerate((first, second)) for r in range(len(batch))]
    logits_RV = logits_like(seed, len(kept_rows))
    got_RV = process(logits_RV, state)
    for i, r in enumerate(kept_rows):
        own = keep(rows[r][0], [rows[r][1]])
        record(own, tokens_R[i : i + 1], active_R[i : i + 1])
        assert torch.equal(got_RV[i : i + 1], process(logits_RV[i : i + 1], own))


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_large_vocabulary_rows_with_and_without_a_full_sort_agree_alone_and_together(scale: float):
    """At scale 0.3 top-p keeps far more than the head it first looks at; at 4 far fewer."""
    num = 6000
    logits_RV = torch.randn(3, num, generator=torch.Generator().manual_seed(1)) * torch.tensor([[scale], [9.0], [0.1]])
    batch = [SamplingParams(temperature=1.0, top_p=p) for p in (0.9, 0.5, 1.0)]
    state = start([Request((1,), p) for p in batch], [1, 2, 3], vocab_size=num)
    scores_RV = process(logits_RV, state)
    for r, params in enumerate(batch):
        assert torch.equal(scores_RV[r : r + 1], process(logits_RV[r : r + 1], keep(state, [r])))
        ordered = logits_RV[r].double().softmax(-1).sort(descending=True).values
        below = int((ordered.cumsum(-1) < params.top_p).sum()) + 1
        assert len(kept(scores_RV[r])) == (num if params.top_p == 1 else below)


# ---- literal cases


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        ({"top_k": 1}, {1, 2}),  # ties with the k-th are kept
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_p": 1e-12}, {1, 2}),
        ({"top_p": 0.79}, {1, 2}),
        ({"top_p": 0.81}, {1, 2, 4}),
        ({"top_p": 0.91}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {1, 2}),
        ({"min_p": 0.2}, {1, 2, 4}),
        ({"min_p": 0.3}, {1, 2}),
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_masks_on_a_known_law(setting: dict, want: set[int]):
    logits_V = torch.tensor([0.05, 0.4, 0.4, 0.05, 0.1], dtype=torch.float64).log()
    state = start([Request((0,), SamplingParams(temperature=1.0, **setting))], [0], vocab_size=5)
    assert kept(process(logits_V[None], state)[0]) == want


def test_top_k_counts_what_min_p_left_and_top_p_what_top_k_left():
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    state = start([Request((0,), params)], [0], vocab_size=4)
    assert kept(process(logits_V[None], state)[0]) == {0}  # 0.4 / 0.7 reaches 0.5; 0.4 alone would not


def test_repetition_penalty_pushes_down_positive_and_negative_logits_of_prompt_and_output():
    state = state_of([SamplingParams(repetition_penalty=2.0)], [[2]])
    logits_V = torch.full((V,), 1.0)
    logits_V[2] = -1.0
    scores_V = process(logits_V[None], state)[0]
    assert (scores_V[1], scores_V[2], scores_V[4]) == (0.5, -2.0, 1.0)


def test_presence_and_frequency_look_at_the_output_only():
    state = state_of([SamplingParams(presence_penalty=1.0, frequency_penalty=0.25)], [[2, 2, 4]])
    assert process(torch.zeros(1, V), state)[0, :5].tolist() == [0, 0, -1.5, 0, -1.25]


def test_end_tokens_are_banned_until_min_tokens_are_out():
    state = single(SamplingParams(min_tokens=2, stop_token_ids=(7,)))
    for _ in range(2):
        assert kept(process(torch.zeros(1, V), state)[0]) == set(range(V)) - {EOS, 7}
        record(state, torch.tensor([0]), torch.tensor([True]))
    assert kept(process(torch.zeros(1, V), state)[0]) == set(range(V))


def test_an_ignored_eos_is_not_banned():
    state = single(SamplingParams(min_tokens=2, ignore_eos=True))
    assert kept(process(torch.zeros(1, V), state)[0]) == set(range(V))


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 2e-5])
def test_tiny_temperatures_are_greedy_and_finite(temperature: float):
    logits_RV = logits_like(1, 1, torch.float32) * 1000
    state = single(SamplingParams(temperature=temperature))
    assert not process(logits_RV, state).isnan().any()
    assert choose(logits_RV, state, torch.tensor([4])).tolist() == logits_RV.argmax(-1).tolist()


def test_greedy_choice_takes_the_lowest_of_tied_tokens_and_leaves_the_logits_alone():
    logits_RV = torch.zeros(2, V, dtype=torch.bfloat16)
    logits_RV[:, [4, 9]] = 3.0
    before_RV = logits_RV.clone()
    mixed = state_of([SamplingParams(), SamplingParams(temperature=1.0, logit_bias={1: 2.0})], [[], []])
    assert choose(logits_RV, mixed, torch.tensor([0, 0]))[0] == 4
    assert choose(logits_RV, keep(mixed, [0, 0]), torch.tensor([0, 0])).tolist() == [4, 4]
    assert torch.equal(logits_RV, before_RV)


@pytest.mark.parametrize("setting", [{"logit_bias": {V: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": (V,)}])
def test_tokens_outside_the_vocabulary_are_refused(setting: dict):
    with pytest.raises(ValueError, match="vocabulary ends at 11"):
        single(SamplingParams(**setting))


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"stop": 5}, "stop must be a tuple of strings, got 5"),
        ({"stop_token_ids": None}, "token ids"),
        ({"logit_bias": None}, "token ids"),
        ({"stop": (7,)}, "stop must be a tuple of strings"),
        ({"stop": ("",)}, "must not be empty"),
        ({"logit_bias": {3: math.nan}}, "logit_bias must be finite"),
        ({"logit_bias": {3: -math.inf}}, "logit_bias must be finite"),
        ({"logit_bias": {"3": 1.0}}, "token ids"),
        ({"stop_token_ids": (1.5,)}, "token ids"),
        ({"seed": 1.0}, "seed must be a whole number, got 1.0"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"seed": -1}, "seed must be in"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict, match: str):
    with pytest.raises(UserError, match=match):
        SamplingParams(**setting)


# ---- the law of the choice


@pytest.mark.parametrize(
    ("params", "num_draws"),
    [
        (SamplingParams(temperature=1.0), 1_000_000),
        (SamplingParams(temperature=0.6, top_p=0.9, logit_bias={4: 1.0}), 200_000),
        (SamplingParams(temperature=1.4, top_k=5, min_p=0.1, presence_penalty=0.7), 200_000),
    ],
)
def test_tokens_follow_the_softmax_of_the_processed_scores(params: SamplingParams, num_draws: int):
    num_rows = 2000
    requests = [Request(PROMPT, params, choice=r % 4) for r in range(num_rows)]
    state = start(requests, [r // 4 for r in range(num_rows)], vocab_size=V)
    record(state, torch.full((num_rows,), 6), torch.ones(num_rows, dtype=torch.bool))
    logits_RV = logits_like(3, 2)[1].float().expand(num_rows, V)
    counts_V = torch.zeros(V, dtype=torch.float64)
    for position in range(num_draws // num_rows):
        tokens_R = choose(logits_RV, state, torch.full((num_rows,), position))
        counts_V += torch.bincount(tokens_R, minlength=V)
    expected_V = process(logits_RV[:1], keep(state, [0]))[0].double().softmax(-1) * num_draws
    possible_V = expected_V > 0
    assert counts_V[~possible_V].sum() == 0
    chi_square = ((counts_V - expected_V) ** 2 / expected_V)[possible_V].sum().item()
    df = int(possible_V.sum()) - 1
    assert chi_square < df + 5 * math.sqrt(2 * df)


def test_noise_is_keyed_by_seed_choice_and_position():
    logits_RV, params = torch.zeros(1, V), SamplingParams(temperature=1.0)
    state = start([Request(PROMPT, params, choice=2)], [99], vocab_size=V)
    want = gumbel(torch.tensor([99]), torch.tensor([2]), torch.tensor([31]), torch.arange(V))
    assert torch.equal(perturbed(logits_RV, state, torch.tensor([31])), want)


# ---- noise is evaluated for those who need it alone


def evaluated(monkeypatch) -> list[int]:
    """Grows by the number of noise values, each time that some are evaluated."""
    seen: list[int] = []

    def spy(*arguments) -> Tensor:
        noise = gumbel(*arguments)
        seen.append(noise.numel())
        return noise

    monkeypatch.setattr(sampling, "gumbel", spy)
    return seen


LARGE_V = 3000
HOT, WIDE = SamplingParams(temperature=1.0), SamplingParams(temperature=1.4, top_p=0.999999)
NARROW = [
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1.0, top_k=40),
    SamplingParams(temperature=1.5, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.4),
    SamplingParams(temperature=0.6, top_k=90, top_p=0.9),
]


@pytest.mark.parametrize("others", [[], [HOT], [WIDE]], ids=["few", "all of one", "most of one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_few_tokens_is_that_of_all(others: list[SamplingParams], dtype: torch.dtype, monkeypatch):
    requests = [Request(PROMPT, p, choice=r) for r, p in enumerate([SamplingParams(), *NARROW, *others])]
    state = start(requests, range(10, 10 + len(requests)), vocab_size=LARGE_V)
    logits_RV = torch.randn(len(requests), LARGE_V, generator=torch.Generator().manual_seed(1), dtype=dtype) * 4
    positions_R = torch.arange(len(requests)) * 3
    want_RV, drawn = process(logits_RV, state), state.settings
    tokens_V = torch.arange(LARGE_V)
    want_RV[1:] += gumbel(drawn.seeds_S, drawn.choices_S, positions_R[1:], tokens_V, dtype)
    seen = evaluated(monkeypatch)
    assert torch.equal(perturbed(logits_RV, state, positions_R), want_RV)
    assert (sum(seen) < 1000) == (not others), "one row with many left, and all are evaluated"


def test_rows_whose_path_has_ended_choose_nothing_and_the_others_what_they_would_have(monkeypatch):
    penalised, early = replace(HOT, presence_penalty=2.0), replace(HOT, top_p=0.6, min_tokens=3)
    batch = [HOT, replace(HOT, top_k=3), penalised, SamplingParams(), early]
    outputs, rng, seen = [[1], [2], [3, 3], [4], [5]], Random(0), evaluated(monkeypatch)
    for seed in range(40):
        logits_RNV = torch.stack([logits_like(seed, len(batch), torch.float32) for _ in range(2)], 1)
        positions_RN = torch.tensor([[7, 8]]).repeat(len(batch), 1)
        states = [state_of(batch, outputs, seed) for _ in range(2)]
        active_R = torch.tensor([rng.random() < 0.5 for _ in batch])
        node_R = torch.tensor([rng.randrange(2) for _ in batch])
        whole_R = choose(logits_RNV[torch.arange(5), node_R], states[0], 8 + node_R)
        record(states[0], whole_R, active_R)
        seen.clear()
        some_R = chooser(logits_RNV, positions_RN, states[1], None)(node_R, active_R)
        assert torch.equal(some_R[active_R], whole_R[active_R])
        assert sum(seen) <= V * int(active_R[[0, 1, 2, 4]].sum())
        assert torch.equal(states[1].history.output_counts_PV, states[0].history.output_counts_PV)
        assert torch.equal(states[1].history.num_emitted_R, states[0].history.num_emitted_R)


# ---- verification: the walk with keyed tokens is the target's law


def random_tree(rng: Random, vocab: int, depth: int, max_nodes: int) -> dict[tuple[int, ...], None]:
    """Paths of a tree of distinct siblings, the root's () first."""
    paths: dict[tuple[int, ...], None] = {(): None}
    for _ in range(rng.randint(0, 2 * max_nodes)):
        path = (*rng.choice(list(paths)), rng.randrange(vocab))
        if len(path) <= depth and len(paths) < max_nodes:
            paths.setdefault(path)
    return paths


def as_draft_tree(paths: dict[tuple[int, ...], None], rows: int) -> DraftTree:
    index = {path: n for n, path in enumerate(paths)}
    columns = [
        [path[-1] if path else 0 for path in paths],
        [index[path[:-1]] if path else -1 for path in paths],
        [len(path) for path in paths],
        [0] * len(paths),
    ]
    tokens_RN, parents_RN, depths_RN, levels_RN = (torch.tensor(c).expand(rows, -1) for c in columns)
    return DraftTree(tokens_RN, parents_RN, depths_RN, levels_RN, torch.zeros(rows, len(paths)), tokens_RN >= 0)


@pytest.mark.parametrize("seed", range(25))
def test_walking_any_tree_with_target_tokens_at_its_nodes_emits_exactly_the_targets_law(seed: int):
    rng = Random(seed)
    vocab = rng.randint(2, 6)
    paths = random_tree(rng, vocab, depth=3, max_nodes=6 if vocab <= 4 else 5)
    law = {path: softmax([rng.gauss(0, 1.5) for _ in range(vocab)]) for path in paths}
    chosen_RN = torch.tensor(list(product(range(vocab), repeat=len(paths))))  # every outcome of the draws at all nodes
    tree = as_draft_tree(paths, len(chosen_RN))
    verdict = walk(tree, lambda node_R, active_R: chosen_RN.gather(1, node_R[:, None])[:, 0])
    law_NV = torch.tensor(list(law.values()), dtype=torch.float64)
    weights_R = law_NV[torch.arange(len(paths)), chosen_RN].prod(1)
    emitted: dict[tuple[int, ...], float] = {}
    for tokens, num, weight in zip(verdict.tokens_RD.tolist(), verdict.num_emitted_R, weights_R.tolist(), strict=True):
        sequence = tuple(tokens[:num])
        emitted[sequence] = emitted.get(sequence, 0.0) + weight
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in emitted.items():
        want = math.prod(law[sequence[:i]][token] for i, token in enumerate(sequence))
        assert probability == pytest.approx(want, abs=1e-12)


@given(params_st, st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_walking_trees_emits_the_tokens_of_plain_decoding(params: SamplingParams, seed: int):
    def next_logits(tokens: list[int]) -> Tensor:
        return logits_like(hash((seed, *tokens[-3:])) % 2**31, 2, torch.float32)[1:]

    request, rng = Request(PROMPT, replace(params, max_tokens=24)), Random(seed)
    plain, plain_state = list(PROMPT), start([request], [seed], vocab_size=V, eos_ids=(EOS,))
    while len(plain) < len(PROMPT) + 24:
        token_1 = choose(next_logits(plain), plain_state, torch.tensor([len(plain)]))
        record(plain_state, token_1, torch.tensor([True]))
        plain += token_1.tolist()

    drafted, state = list(PROMPT), start([request], [seed], vocab_size=V, eos_ids=(EOS,))
    while len(drafted) < len(plain):
        paths = random_tree(rng, V, depth=3, max_nodes=30)
        logits_NV = torch.cat([next_logits([*drafted, *path]) for path in paths])
        positions_N = torch.tensor([len(drafted) - 1 + len(path) for path in paths])
        tree = as_draft_tree(paths, 1)
        verdict = walk(tree, chooser(logits_NV[None], positions_N[None], state, None))
        drafted += verdict.tokens_RD[0].tolist()
    assert drafted[: len(plain)] == plain


def test_top_p_over_scores_that_are_no_numbers_takes_some_token():
    for value in (math.nan, -math.inf):
        state = single(SamplingParams(temperature=1.0, top_p=0.9))
        token_1 = choose(torch.full((1, V), value), state, torch.tensor([3]))
        assert 0 <= int(token_1) < V
