"""A task that one pass of M cannot hold and a second look must: a look-up whose key is the result of another one.

Two tables lie in the context, a row per entry (key: the tapped state, value: the token). The first one sends symbols x
to symbols u, the second one u to answers y. A draft row reads x, and its tapped state asks for u (one hop) or for y
(two). M has one attention layer, so one pass compares x, and nothing else, with all keys at once. That gives u. The row
that has y is the one whose key is u, and

    E[attention of a level-0 head to that row] <= 1 / NUM,   whatever the weights of M,

for a score depends on the two rows it compares alone, and the first table is drawn independently of the second one:
given all that the scores of the second table's NUM rows are made of, each of them is equally likely to be the one.
(Attending to the whole table says nothing either: every answer occurs in it once.) Guessing among the answers is right
once in NUM. Level 1 starts from a feature that holds u: one more look-up and it has y.
"""

from __future__ import annotations

import pytest
import torch

from secondguess.config import DrafterConfig, SecondLook
from secondguess.drafter.model import Drafter, initialise
from secondguess.train.batch import Batch
from secondguess.train.config import TrainConfig
from secondguess.train.objective import objective, reconsider_of
from secondguess.train.tally import Tally

NUM = 8  # entries of each table
X, U, Y = 0, NUM, 2 * NUM  # first token of each kind of symbol
ONE, TWO, BLANK, VOCAB = 3 * NUM, 3 * NUM + 1, 3 * NUM + 2, 3 * NUM + 3
HIDDEN = 64
QUERIES = 24  # drafts per sequence
SEQUENCES = 8
STEPS = 400

CONFIG = TrainConfig(responses="-", out="-", draft_vocab_size=VOCAB, unroll_steps=1, carry="off", lr=3e-3)


def new_drafter() -> Drafter:
    shape = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, target_hidden_size=HIDDEN, target_num_layers=8,
        second_look=SecondLook(),
    )  # fmt: skip
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    drafter = Drafter(shape, embedding, torch.arange(VOCAB))
    initialise(drafter, 0.1 * embedding, torch.ones(HIDDEN), seed=0)
    return drafter


def sequence(g: torch.Generator, two: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, tapped symbols and answers of one sequence, [T] each; ``two``: the share of queries for two hops.

    Row p holds the symbol tapped at p and token p + 1. Entries of both tables come first, in random order.
    """
    first, second = torch.randint(NUM, (NUM,), generator=g), torch.randperm(NUM, generator=g)
    keys, values = torch.arange(X, Y), torch.cat([U + first, Y + second])
    order = torch.randperm(2 * NUM, generator=g)
    x, hops = torch.randint(NUM, (QUERIES,), generator=g), torch.rand(QUERIES, generator=g) < two
    blank = torch.tensor([BLANK])
    tokens = torch.cat([blank, values[order], X + x, blank])
    tapped = torch.cat([keys[order], torch.where(hops, TWO, ONE), blank, blank])
    answers = torch.where(hops, Y + second[first[x]], U + first[x])
    return tokens, tapped, torch.cat([blank.expand(2 * NUM + 1), answers, blank])


def batch_of(drafter: Drafter, g: torch.Generator, two: float) -> Batch:
    tokens, tapped, answers = zip(*(sequence(g, two) for _ in range(SEQUENCES)), strict=True)
    return Batch(
        tokens_T=torch.cat(tokens),
        taps_TLH=drafter.embedding[torch.cat(tapped)][:, None].expand(-1, 3, -1),
        hidden_TH=20 * torch.nn.functional.one_hot(torch.cat(answers), VOCAB).float(),
        head_VH=torch.eye(VOCAB),
        offered_T=torch.ones(sum(map(len, tokens)), dtype=torch.bool),
        lengths_B=torch.full((SEQUENCES,), len(tokens[0])),
        answer_starts_B=torch.full((SEQUENCES,), 2 * NUM + 1),
    )


def train(drafter: Drafter) -> None:
    g, optimizer = torch.Generator().manual_seed(1), torch.optim.Adam(drafter.parameters(), CONFIG.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, CONFIG.lr, STEPS, pct_start=0.1)
    for step in range(STEPS):
        loss, _ = objective(drafter, batch_of(drafter, g, 0.5), CONFIG, reconsider_of(CONFIG, step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def top1(drafter: Drafter, two: float) -> tuple[float, float]:
    """How often each level is right on new sequences."""
    tally, g = Tally(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _ in range(10):
            tally.add(objective(drafter, batch_of(drafter, g, two), CONFIG, reconsider_of(CONFIG, 0))[1])
    summary = tally.summary()
    return summary["top1_0"][0], summary["top1_1"][0]


@pytest.fixture(scope="module")
def trained() -> Drafter:
    drafter = new_drafter()
    train(drafter)
    return drafter


def test_one_hop_is_found_at_first_sight(trained: Drafter) -> None:
    assert top1(trained, two=0)[0] > 0.9


def test_two_hops_are_found_by_the_second_look_alone(trained: Drafter) -> None:
    level0, level1 = top1(trained, two=1)
    assert level1 > 0.9
    assert level0 < 3 / NUM
