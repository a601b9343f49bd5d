"""The same on a real GPU: run with ``pytest -m gpu``, or with ``scripts/gpu_check.sh``, which needs no pytest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from secondguess.bench.gpu import equality
from secondguess.bench.gpu.equality import Pair, check_device, check_method, check_noise
from secondguess.capture.run import capture
from secondguess.testing import tiny_target
from secondguess.train.trainer import Trainer
from tiny_run import tiny_config, tiny_responses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda:0")


def test_noise() -> None:
    assert check_noise(CUDA).passed


@pytest.mark.parametrize("family", equality.FAMILIES)
def test_a_gpu_writes_the_cpu_s_texts(family: str) -> None:
    assert check_device(CUDA, family).passed


@pytest.mark.parametrize("method", equality.METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_methods_write_plain_decoding_s_texts(method: str, dtype: torch.dtype) -> None:
    assert check_method(Pair.on(CUDA, "llama", dtype), method).passed


def test_drafts_are_recorded() -> None:
    llm = Pair.on(CUDA, "llama", torch.float32).llm("pr", 4)
    equality.texts(llm)
    assert llm.engine.speculator._replays._graphs  # pyrefly: ignore


@pytest.mark.parametrize("method", ["eagle3.1", "pr"])
def test_training_steps_are_those_of_the_cpu(method: str, tmp_path: Path) -> None:
    losses, responses = {}, tiny_responses()
    for device in ("cpu", "cuda"):
        target = tiny_target("llama", dtype=torch.float32, device=device)
        store = capture(target, [r.input_ids for r in responses], tmp_path / device)
        trainer = Trainer(tiny_config(tmp_path / f"run-{device}", method=method), target, responses, store)
        losses[device] = [trainer.train_step(trainer.training[:4]) for _ in range(3)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
