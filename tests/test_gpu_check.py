"""The script that measures a GPU, at tiny shapes on the CPU, and its arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secondguess.bench.gpu import __main__ as gpu
from secondguess.bench.gpu import equality
from secondguess.bench.gpu.cycles import SERIAL, Case, measure
from secondguess.bench.gpu.equality import Finding
from secondguess.bench.gpu.models import SHAPES, TINY, random_drafter, random_target
from secondguess.bench.gpu.roofline import cache_bytes, draft_bytes, target_bytes
from secondguess.bench.script import Script, histogram, mean
from secondguess.config import TreeConfig
from secondguess.llm import LLM
from secondguess.types import DraftTree, SamplingParams

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"
CPU = torch.device("cpu")


@pytest.mark.parametrize("tau", [1.0, 2.5, 4.83, 8.9])
def test_the_stated_law_has_its_mean(tau: float) -> None:
    shares = histogram(tau, 8)
    assert len(shares) == 9
    assert sum(shares) == pytest.approx(1)
    assert mean(shares) == pytest.approx(tau - 1, abs=1e-6)
    script = Script(shares, 0)
    assert sum(script.draw() for _ in range(2000)) / 2000 == pytest.approx(tau - 1, abs=0.02)


def test_a_script_takes_as_many_guesses_as_it_says() -> None:
    """Root 0; 1 and 2 its children, 3 below 1, 4 below 3. Request 1 has no deeper node than 1."""
    tokens_RN = torch.tensor([[9, 5, 6, 7, 8], [9, 5, 0, 0, 0]])
    parents_RN = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, -1, -1, -1]])
    depths_RN = torch.tensor([[0, 1, 1, 2, 3], [0, 1, 0, 0, 0]])
    zeros_RN = torch.zeros_like(tokens_RN)
    tree = DraftTree(tokens_RN, parents_RN, depths_RN, zeros_RN, zeros_RN.float(), tokens_RN > 0)
    chosen = []
    choose_at = Script([0.0, 0.0, 1.0], 99)(tree, lambda node_R, active_R: chosen.append(1) or node_R)
    active_R = torch.tensor([True, True])
    assert choose_at(torch.tensor([0, 0]), active_R).tolist() == [5, 5]
    assert choose_at(torch.tensor([1, 1]), active_R).tolist() == [7, 99]
    assert choose_at(torch.tensor([3, 0]), active_R).tolist() == [99, 99]
    assert len(chosen) == 3


def test_bytes_of_a_cycle() -> None:
    """Llama-3.1-8B has 8.03e9 weights, 0.525e9 of them its embedding; 128 KiB of K/V a token in 16 bits."""
    shape = SHAPES["Llama-3.1-8B"]
    assert target_bytes(shape, 1) == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    assert cache_bytes(shape, 2, 1) == 128 * 1024
    one, two = (draft_bytes(shape, 1, TreeConfig(num_steps=n)) for n in (1, 2))
    block = 4096 * 128 * (2 * 48 + 32) + 3 * 4096 * 14336 + 32000 * 4096
    assert two - one == block
    assert one == block + 3 * 4096 * 4096


def test_cycles_of_all_methods() -> None:
    shape = TINY["Qwen3-8B"]
    target = random_target(shape, torch.float32, CPU)
    cases = [Case("ar", 0, 2), Case("eagle3.1", 24, 2), Case("pr", 24, 2), Case(SERIAL, 24, 2)]
    found = measure(target, random_drafter(shape, target), cases, 30, 40)
    assert found[cases[0]]["tau"] == 1.0
    for case in cases[1:]:
        assert 0.75 * mean(case.shares) < found[case]["tau"] - 1 < 1.1 * mean(case.shares)
        assert found[case]["cycle_ms"] > 0


def test_the_script_runs_without_a_gpu(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(equality, "FAMILIES", ("llama",))
    monkeypatch.setattr(equality, "METHODS", ("pr",))
    monkeypatch.setattr(equality, "NUM_PROMPTS", 3)
    monkeypatch.setattr(gpu, "TINY", {"Qwen3-8B": TINY["Qwen3-8B"]})
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--device", "cpu"])
    assert gpu.main() == 0
    said = capsys.readouterr().out
    assert "No GPU: tiny shapes on the CPU" in said
    assert (tmp_path / "report.md").read_text() in said
    results = json.loads((tmp_path / "result.json").read_text())
    assert results["copy_bandwidth"] > 0
    assert {row["method"] for row in results["Qwen3-8B"]} == {"ar", "eagle3.1", "pr", SERIAL}
    assert all(Finding(**row).passed for row in results["equality"])


def test_wrong_choices_are_found() -> None:
    """Of a random text hardly a token is the best."""
    target = equality.Pair.on(CPU, "llama", torch.bfloat16).target
    output = LLM(target, method="ar", max_model_len=64).generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0]
    assert equality.worst_choice(target, output) <= equality.ROUNDING_STEPS
    other = replace(output, token_ids=tuple((t + 1) % 64 for t in output.token_ids))
    assert equality.worst_choice(target, other) > equality.ROUNDING_STEPS


def test_a_text_that_parts_fails_the_check(tmp_path: Path, monkeypatch) -> None:
    bad = [Finding("texts", 3, 2)]
    monkeypatch.setattr(gpu, "check_all", lambda device: bad)
    monkeypatch.setattr(gpu, "TINY", {})
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--device", "cpu"])
    assert gpu.main() == 1
    assert "FAILED" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_from_a_bare_checkout(tmp_path: Path) -> None:
    bare = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)}
    done = subprocess.run([str(SCRIPT), str(tmp_path)], env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.json").is_file()
