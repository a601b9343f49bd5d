"""Held-out acceptance length: what replay finds over the target's own texts, and nothing of it touches training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from secondguess.bench.acceptance import Tally, acceptance_length, count
from secondguess.bench.replay import read, replay
from secondguess.bench.transcript import Key, Transcript
from secondguess.capture.source import Live
from secondguess.config import TreeConfig
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.llm import LLM
from secondguess.train.data import Response
from secondguess.train.judge import pick_replayed
from secondguess.train.trainer import Trainer
from secondguess.types import SamplingParams
from tiny_run import float32_target, tiny_config, tiny_run

TREE = TreeConfig(budget=8)


@pytest.fixture(scope="module")
def target():
    return float32_target()


@pytest.fixture(scope="module")
def responses(target) -> list[Response]:
    """Greedy answers."""
    prompts = [[5 * i % 63 + 1, 3 * i % 63 + 1, 7] for i in range(16)]
    outputs = LLM(target, method="ar", max_model_len=64).generate(prompts, SamplingParams(max_tokens=20))
    answered = [(i, o) for i, o in enumerate(outputs) if len(o.token_ids) > 2]
    assert len(answered) > 8
    return [Response(f"r{i}", (*o.prompt_ids, *o.token_ids), 3, 0.0) for i, o in answered]


def trainer(target, responses, tmp_path, **changes) -> Trainer:
    settings = {"held_out": 0.5, "batch_size": 2, "eval_budget": 8, "draft_vocab_size": 64, "epochs": 8} | changes
    config = tiny_config(tmp_path / "run", **settings)
    return Trainer(config, target, responses, Live(target, [r.input_ids for r in responses]))


@pytest.mark.parametrize("method", ["pr", "eagle3.1"])
def test_tau_is_what_replay_finds(target, responses, tmp_path, method: str) -> None:
    run = trainer(target, responses, tmp_path, method=method, lr=5e-3)
    run.run()
    found = run.judge.tau(run.drafter, run.learner)
    assert run.folder.log_lines()[-1]["held_out_tau"] == found["held_out_tau"]
    texts = []
    for i in run.judge.replayed:
        r = responses[i]
        text = read(target, Transcript(Key("t", r.id, ""), r.input_ids[:3], r.answer, (), "length"))
        texts.append(replace(text, taps_TLH=text.taps_TLH.bfloat16().float()))
    looks = {"held_out_tau": 3, "held_out_tau_m0": 0} if method == "pr" else {"held_out_tau": 0}
    assert found.keys() == looks.keys()
    for name, m in looks.items():
        tallies = [Tally(looping=False) for _ in texts]
        speculator = EagleSpeculator(run.drafter, replace(TREE, num_reconsider=m), len(texts), 64)
        with torch.no_grad():
            replay(speculator, texts, partial(count, tallies))
        tau = acceptance_length(tallies)
        assert tau is not None
        assert tau > 1.1  # it has learnt something, so the comparison is of more than misses
        assert found[name] == pytest.approx(tau, abs=1e-4)


def test_evaluation_does_not_touch_training(tmp_path) -> None:
    losses: list[list[float]] = []
    arms: dict[str, dict[str, Any]] = {
        "often": {"eval_every": 1},
        "never": {"eval_every": 1000, "eval_responses": 0},
    }
    for name, changes in arms.items():
        run = tiny_run(tmp_path, name, method="pr", epochs=2, **changes)
        losses.append([])
        run.run(lambda step, loss: losses[-1].append(loss))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_without_responses_there_is_no_tau(tmp_path) -> None:
    run = tiny_run(tmp_path, "run", eval_responses=0)
    assert run.judge.tau(run.drafter, run.learner) == {}
    assert tiny_run(tmp_path, "other", held_out=0).judge.replayed == []


def test_greedy_responses_are_replayed_where_temperatures_are_known() -> None:
    def made(*temperatures: float | None) -> list[Response]:
        return [Response(str(i), (1, 2, 3), 1, t) for i, t in enumerate(temperatures)]

    assert pick_replayed(made(0, 1, 0.0, None, 0), [0, 1, 2, 3], 9) == [0, 2]
    assert pick_replayed(made(*[None] * 8), range(8), 3) == [0, 2, 5]
    assert pick_replayed(made(1, 1), [0, 1], 3) == [0, 1], "none is greedy, but tau is still wanted"
