"""Two processes do what one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secondguess.drafter.checkpoint import load_drafter
from secondguess.errors import UserError
from secondguess.train.parallel import Processes
from secondguess.train.run_folder import read_state
from tiny_run import float32_target, tiny_run
from two_processes import CLIP, GRADIENTS, RUN, SHARDED, gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what two processes have left there."""
    folder, script = tmp_path_factory.mktemp("two"), Path(__file__).with_name("two_processes.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("name", "parallel"), [*((name, "replicate") for name in GRADIENTS), *((name, "shard") for name in SHARDED)]
)
def test_two_processes_have_the_gradients_of_one(folder: Path, name: str, parallel: str) -> None:
    theirs = torch.load(folder / f"{name}-{parallel}.pt", weights_only=True)
    ours = gradients(folder, name, Processes())
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-12)
    assert theirs["norms"] == pytest.approx(ours["norms"], rel=1e-10)
    assert len(ours["norms"]) == (2 if name == "level0" else 1)
    assert min(ours["norms"]) > CLIP
    torch.testing.assert_close(theirs["sums"], ours["sums"], rtol=1e-12, atol=1e-12)
    assert theirs["gradients"].keys() == ours["gradients"].keys()
    for parameter, gradient in ours["gradients"].items():
        torch.testing.assert_close(theirs["gradients"][parameter], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_run_of_two_processes_is_that_of_one(folder: Path, parallel: str) -> None:
    """Up to rounding, which sums gradients in another order."""
    alone = tiny_run(folder, f"alone-{parallel}", **RUN)
    alone.run()
    together = tiny_run(folder, parallel, **RUN)
    ours, theirs = alone.folder.log_lines(), together.folder.log_lines()
    assert [line["step"] for line in theirs] == [line["step"] for line in ours] == [4, 8]
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
        for part in ("train", "held_out"):
            for name in ("loss0", "loss1"):
                assert a[part][name] == pytest.approx(b[part][name], rel=1e-3)


def test_a_sharded_run_is_kept_and_exported_whole(folder: Path) -> None:
    state, target = read_state(folder / "shard" / "resume.pt"), float32_target()
    exported = load_drafter(folder / "shard" / "drafter", target.embedding, target.spec.num_layers)
    alone = tiny_run(folder, "shard", **RUN)
    assert alone.step == alone.plan.num_steps == state["step"] == 8
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, alone.drafter.state_dict()[name].bfloat16().float()), name
    moments = [values["exp_avg"].shape for values in alone.learner.optimizer.state_dict()["state"].values()]
    assert sorted(moments) == sorted(p.shape for p in alone.drafter.parameters())


def test_what_needs_several_processes_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="parallel=shard needs several processes: start with torchrun"):
        tiny_run(tmp_path, "run", parallel="shard")
    with pytest.raises(UserError, match="batch_size must be at least 5, the number of processes"):
        tiny_run(tmp_path, "run", processes=Processes(0, 5))


def shares(items: str, costs: list[int], count: int) -> list[str]:
    return ["".join(Processes(rank, count).even_share(items, costs)) for rank in range(count)]


def test_every_process_has_about_the_same_to_do() -> None:
    """The dearest first (b 9, d 8, e 4, c 2, a 1), each to whoever has the least: 9 + 2 + 1 and 8 + 4."""
    assert shares("abcde", [1, 9, 2, 8, 4], 2) == ["abc", "de"]
    assert shares("abcd", [3, 1, 2, 5], 1) == ["abcd"]
    assert shares("ab", [1, 1], 3) == ["a", "b", ""]


@given(costs=st.lists(st.integers(1, 50), max_size=12), count=st.integers(1, 4))
def test_shares_are_whole_and_none_is_more_than_one_item_above_another(costs: list[int], count: int) -> None:
    items = "abcdefghijkl"[: len(costs)]
    found = shares(items, costs, count)
    assert sorted("".join(found)) == list(items)
    loads = [sum(costs[items.index(item)] for item in share) for share in found]
    assert max(loads) - min(loads) <= max(costs, default=0)
