"""Coupled drafting knows the noise that tokens are drawn with, offers by it, and changes no text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.drafter.coupling import coming_noise
from secondguess.engine.sampler_state import start
from secondguess.engine.sampling import choose
from secondguess.engine.speculate import GREEDY, Draw
from secondguess.llm import LLM
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Request, SamplingParams

TREE = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3)


@pytest.mark.parametrize(("temperature", "seed", "choice"), [(1.0, 5, 0), (0.3, 2**62, 2), (1.7, 0, 1)])
def test_a_drafter_that_knows_the_target_s_law_knows_the_token(temperature: float, seed: int, choice: int) -> None:
    """argmax(log p + T G) at depth d is what the sampler chooses there."""
    num_depths, length, vocab_size = 40, 9, 64
    logits_DV = torch.randn(num_depths, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    noise_RDV = coming_noise([GREEDY, Draw(temperature, seed, choice)], [3, length], num_depths, torch.arange(64))
    assert noise_RDV is not None
    guessed_D = (logits_DV + noise_RDV[1]).argmax(-1)
    request = Request((1, 2), SamplingParams(temperature=temperature, seed=seed), choice=choice)
    state = start([request], [seed], vocab_size=vocab_size)
    chosen = [int(choose(logits_DV[d][None], state, torch.tensor([length + d]))) for d in range(num_depths)]
    assert guessed_D.tolist() == chosen
    assert chosen != logits_DV.argmax(-1).tolist()
    assert not noise_RDV[0].any()


def test_a_reduced_vocabulary_gets_the_noise_of_its_tokens() -> None:
    ids = torch.tensor([3, 17, 40])
    whole, part = (coming_noise([Draw(1.0, 4)], [5], 2, tokens) for tokens in (torch.arange(64), ids))
    assert whole is not None
    assert part is not None
    assert torch.equal(whole[..., ids], part)


def test_greedy_requests_need_no_noise() -> None:
    assert coming_noise([GREEDY, Draw(1e-9, 4)], [5, 6], 3, torch.arange(8)) is None


@pytest.mark.parametrize("method", ["pr:coupled=true", "eagle3.1:coupled=true", "pr:coupled=true,merge=rescore_all"])
def test_the_text_is_plain_decoding_s(method: str, tmp_path: Path) -> None:
    """A batch of greedy and sampled requests, with settings of the sampler that the drafter does not look at."""
    target = tiny_target("llama")
    save_drafter(tiny_drafter(target, reconsideration=True), tmp_path / "drafter", {"target": "tiny"})
    prompts = [[1 + i, 2, 3 + i] for i in range(8)]
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=30, top_p=top_p, repetition_penalty=penalty)
        for t, top_p, penalty, seed in zip(
            (0.0, 1.0, 0.7, 1.5, 1.0, 0.2, 0.0, 3.0), (1.0, 1.0, 0.8, 1.0) * 2, (1.0, 1.2) * 4, range(8), strict=True
        )
    ]
    plain = LLM(target, method="ar", max_batch_size=4, max_model_len=64)
    coupled = LLM(target, tmp_path / "drafter", method=method, tree=TREE, max_batch_size=4, max_model_len=64)
    expected = [o.token_ids for o in plain.generate(prompts, params)]
    assert [o.token_ids for o in coupled.generate(prompts, params)] == expected
