"""Settings that a checkpoint has lost, found by its guesses: of all readings the true one is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreign_drafter import FLAGS, write_foreign
from secondguess.bench.acceptance import acceptance_length
from secondguess.bench.replay import Text
from secondguess.cli import main
from secondguess.commands.doctor_probe import Probe
from secondguess.commands.doctor_run import compare
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_for, tap_for
from secondguess.drafter.model import Drafter
from secondguess.drafter.readings import changes, readings
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.target.base import causal_rows
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_target
from test_formats import EAGLE31, imported
from tiny_folder import save_tiny

CHAIN = TreeConfig(budget=3, num_steps=3, grow_width=1, offer_width=1, num_reconsider=0)
PROMPT, CYCLES = [5, 9, 2], 12


def variant(base: Drafter, target: HFTarget, **change: Any) -> Drafter:
    """The same weights, read otherwise."""
    table = target.embedding
    if change.get("own_embedding"):
        table = torch.randn(table.shape, generator=torch.Generator().manual_seed(5), dtype=table.dtype)
    drafter = Drafter(replace(base.config, **change), table, base.target_ids)
    drafter.load_state_dict(base.state_dict(), assign=True)
    tap_for(drafter, target)
    return drafter


def states(target: HFTarget, ids: list[int]) -> torch.Tensor:
    rows = causal_rows(torch.tensor([0]), torch.tensor([ids]))
    return target.forward(rows, target.new_cache(1, len(ids))).taps_RNLH[0]


def written_by(drafter: Drafter, target: HFTarget) -> list[int]:
    """The text of a target that always agrees with a chain of this drafter, and surprises it with the next token."""
    ids = [*PROMPT]
    for cycle in range(CYCLES):
        speculator = EagleSpeculator(drafter, CHAIN, 1, 128)
        speculator.accept([Accepted(0, torch.tensor(ids[1:]), states(target, ids)[:-1])])
        tree = speculator.draft(Roots((0,), (ids[-1],), (ids,), (GREEDY,)))
        ids += [*tree.tokens_RN[0, 1:].tolist(), 7 * cycle % 63 + 1]
    return ids


def probe_of(target: HFTarget, ids: list[int]) -> Probe:
    return Probe([Text(ids, states(target, ids), len(PROMPT) - 1, len(ids))], CHAIN)


LOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_output=false": ({"norm_output": False}, {"norm_output": True}),
    "norm_output=true": ({"norm_output": True}, {"norm_output": False}),
    "norm_before_residual=true": ({"norm_before_residual": True}, {"norm_before_residual": False}),
    "rope_theta=10000": ({"rope_theta": 1e4}, {"rope_theta": 1e6}),
    "layer_ids=3,5,6": ({"tap_layers": (3, 5, 6)}, {}),
    "layer_ids=1,3,4": ({"tap_layers": (1, 3, 4)}, {}),
    "own_embedding=false": ({}, {"own_embedding": True}),
}


@pytest.mark.parametrize(("said", "changed"), LOST.items(), ids=LOST)
def test_a_lost_setting_is_named(tmp_path: Path, said: str, changed: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Field faults 2, 4, 11, 13, 16, 17, 20 and 21, where the checkpoint looks healthy."""
    target = tiny_target("llama")
    base = load_for(imported(write_foreign(tmp_path / "theirs", "eagle3", EAGLE31), target), target)
    truth, lie = (variant(base, target, **change) for change in changed)
    ids, others, of_truth = written_by(truth, target), dict(readings(lie, target)), dict(readings(truth, target))
    probe = probe_of(target, ids)
    assert acceptance_length(probe.replay(truth)) == 4
    (found,) = compare(probe, probe.replay(lie), others)
    assert (found.name, found.verdict) == ("reading", "warning")
    assert f"4.00 tokens a cycle with {said}" in found.found
    assert found.fix.endswith(f"--set {said}")
    (found,) = compare(probe, probe.replay(truth), of_truth)
    assert found.verdict == "ok"


def test_what_can_be_read_otherwise(tmp_path: Path) -> None:
    target = tiny_target("llama")
    base = load_for(imported(write_foreign(tmp_path / "theirs", "eagle3", EAGLE31), target), target).config
    plain = replace(base, rope_theta=5e3)
    found = [
        "norm_output=false", "norm_before_residual=true", "rope_theta=10000", "rope_theta=1e+06", "layer_ids=1,3,4",
        "layer_ids=3,5,6",
    ]  # fmt: skip
    assert [*changes(plain, 1e6)] == found
    assert [*changes(replace(plain, rope_theta=1e6), 1e6)] == [said for said in found if said != "rope_theta=1e+06"]
    assert "layer_ids=1,4,8" not in changes(replace(plain, tap_layers=(0, 3, 7)), 1e4)
    assert "layer_ids=-1,2,6" not in changes(replace(plain, tap_layers=(0, 3, 7)), 1e4)
    own = replace(plain, own_embedding=True)
    assert "own_embedding=false" in changes(own, 1e4)
    assert "own_embedding=false" not in changes(replace(own, hidden_size=40), 1e4)


def test_what_is_said_is_what_import_takes(tmp_path: Path) -> None:
    """``--set`` with the words of a reading gives that reading."""
    target = tiny_target("llama")
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31, own=True)
    drafter = load_for(imported(source, target), target)
    for said, other in readings(drafter, target):
        assert load_for(imported(source, target, said), target).config == other.config
        assert torch.equal(other.fc.weight, drafter.fc.weight)


def test_the_doctor_reads_imported_drafters_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save_tiny(tmp_path))
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    write_foreign(Path("theirs"), "eagle3", dict.fromkeys(FLAGS, False), vocab=257, draft=100)
    assert main(["import", "theirs", "ours", "--target", "target"]) == 0
    for drafter, last in (("ours", "reading"), ("drafters/pr", "acceptance")):
        main(["doctor", "target", drafter, "--max-new-tokens", "4", "--budget", "4", "--json", "found.json"])
        assert json.loads(Path("found.json").read_text())["results"][-1]["name"] == last
