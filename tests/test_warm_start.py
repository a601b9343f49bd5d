"""Training on from a checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from foreign_drafter import write_foreign
from secondguess.drafter.checkpoint import load_drafter, save_drafter
from secondguess.drafter.foreign import read_foreign
from secondguess.drafter.foreign_tensors import Source
from secondguess.drafter.settings import read_block
from secondguess.drafter.vocab import count_tokens
from secondguess.errors import UserError
from secondguess.testing import tiny_drafter
from tiny_run import float32_target, tiny_config, tiny_responses, tiny_run


@pytest.fixture
def checkpoints(tmp_path):
    target = float32_target()
    for name in ("eagle3.1", "pr"):
        save_drafter(tiny_drafter(target, 5, name == "pr"), tmp_path / name, {"target": "tiny"})
    return tmp_path


def test_weights_and_vocabulary_are_the_checkpoints(checkpoints) -> None:
    target, new = float32_target(), tiny_run(checkpoints, "new", method="pr", lens=False)
    saved = load_drafter(checkpoints / "eagle3.1", target.embedding, target.spec.num_layers)
    run = tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "eagle3.1"), lens=False)
    ours = dict(run.drafter.named_parameters())
    assert torch.equal(ours.pop("self_query"), new.drafter.self_query)
    theirs = dict(saved.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(run.drafter.target_ids, saved.target_ids)
    assert not torch.equal(run.drafter.target_ids, new.drafter.target_ids)
    run.run()
    exported = load_drafter(run.folder.drafter, target.embedding, target.spec.num_layers)
    assert torch.equal(exported.target_ids, saved.target_ids)
    assert exported.config.has_self_query


def test_a_checkpoint_tells_what_its_start_took(checkpoints) -> None:
    """And names neither folder."""
    first = tiny_run(checkpoints, "first", method="eagle3.1", epochs=1)
    first.run()
    before = read_block(first.folder.drafter)["training"]
    assert "start" not in before
    second = tiny_run(checkpoints, "second", method="pr", epochs=1, warm_start=str(first.folder.drafter))
    second.run()
    training = read_block(second.folder.drafter)["training"]
    spent = {key: before[key] for key in ("num_responses", "steps", "seconds")}
    assert training["start"].items() >= ({"name": "FOLDER"} | spent).items()
    assert training["settings"]["warm_start"] == "FOLDER"
    assert str(checkpoints) not in (second.folder.drafter / "config.json").read_text()


def test_a_drafter_of_others_learns_second_looks(tmp_path) -> None:
    """With a width, norms and an embedding of its own."""
    target, flags = float32_target(), {"fc_norm": False, "norm_before_fc": True, "norm_output": False}
    theirs = write_foreign(tmp_path / "theirs", "eagle3", flags | {"norm_before_residual": True}, own=True, hidden=40)
    imported = read_foreign(Source(theirs, target, {}))
    save_drafter(imported.drafter, tmp_path / "imported", {"target": "tiny"}, torch.float32)
    run = tiny_run(tmp_path, "run", method="pr", warm_start=str(tmp_path / "imported"), lr=1e-3)
    before = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
    assert before["self_query"].shape == (40,)
    run.run()
    assert all(not torch.equal(p, before[name]) for name, p in run.drafter.named_parameters())
    exported = load_drafter(run.folder.drafter, target.embedding, target.spec.num_layers)
    assert exported.config.norm_before_fc
    assert exported.config.has_self_query
    assert torch.equal(exported.embedding, imported.drafter.embedding.bfloat16().float())


def test_what_may_not_fit_is_told(checkpoints, caplog) -> None:
    drafter = tiny_drafter(float32_target(), 5)
    drafter.config = replace(drafter.config, max_position_embeddings=64)
    save_drafter(drafter, checkpoints / "short", {})
    tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "short"))
    assert "positions: made for 64, the target takes 1024" in caplog.text


def test_a_further_layer_starts_as_the_identity(checkpoints) -> None:
    target, folder = float32_target(), str(checkpoints / "eagle3.1")
    one = load_drafter(checkpoints / "eagle3.1", target.embedding, target.spec.num_layers)
    run = tiny_run(checkpoints, "run", method="eagle3.1", warm_start=folder, num_layers=2, lr=1e-3)
    two, e, g = run.drafter, target.embedding[:5].clone(), target.embedding[5:10].clone()
    assert len(two.blocks) == 2

    def feature(drafter):
        return drafter.block(e, g, torch.arange(5), lambda layer, q, k, v: q)

    assert torch.equal(feature(two), feature(one))
    run.run()
    exported = load_drafter(run.folder.drafter, target.embedding, target.spec.num_layers)
    assert exported.config.num_layers == 2
    assert exported.blocks[1].mlp.down_proj.weight.any()
    assert exported.blocks[1].self_attn.o_proj.weight.any()


def test_a_further_layer_that_would_learn_nothing_is_refused(checkpoints) -> None:
    settings = {"method": "pr", "warm_start": str(checkpoints / "eagle3.1"), "shared_loss": "none"}
    with pytest.raises(UserError, match="has num_layers=1: more would learn nothing"):
        tiny_run(checkpoints, "run", num_layers=2, **settings)


def test_fewer_layers_are_refused(checkpoints) -> None:
    tiny_run(checkpoints, "two", method="eagle3.1", num_layers=2).run()
    with pytest.raises(UserError, match="has num_layers=2, more than 1: set num_layers"):
        tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "two" / "drafter"))


def test_tokens_are_added_with_the_rows_of_a_new_drafter(checkpoints) -> None:
    """The rest of the drafter stays as it is, and without a wish so does its vocabulary."""
    target, folder = float32_target(), str(checkpoints / "pr")
    saved = load_drafter(checkpoints / "pr", target.embedding, target.spec.num_layers)
    run = tiny_run(checkpoints, "run", method="pr", warm_start=folder, draft_vocab_size=48, lr=1e-3)
    grown, new = run.drafter, tiny_run(checkpoints, "new", method="pr", draft_vocab_size=64).drafter
    known = torch.isin(grown.target_ids, saved.target_ids)
    assert known.sum() == 32
    assert len(known) == 48
    assert torch.equal(grown.target_ids[known], saved.target_ids)
    assert torch.equal(grown.lm_head.weight[known], saved.lm_head.weight)
    assert torch.equal(grown.lm_head.weight[~known], new.lm_head.weight[grown.target_ids[~known]])
    counts = count_tokens((tiny_responses()[i].answer for i in run.training), 64)
    left_out = torch.ones(64, dtype=torch.bool).index_fill(0, grown.target_ids, False)
    assert counts[grown.target_ids[~known]].min() >= counts[left_out].max()
    assert torch.equal(grown.fc.weight, saved.fc.weight)
    assert torch.equal(grown.self_query, saved.self_query)
    before = grown.lm_head.weight.detach().clone()
    run.run()
    exported = load_drafter(run.folder.drafter, target.embedding, target.spec.num_layers)
    assert torch.equal(exported.target_ids, grown.target_ids)
    assert not torch.equal(run.drafter.lm_head.weight[~known], before[~known])
    assert read_block(run.folder.drafter)["training"]["settings"]["draft_vocab_size"] == 48
    kept = tiny_run(checkpoints, "kept", method="pr", warm_start=folder, draft_vocab_size=0).drafter
    assert torch.equal(kept.target_ids, saved.target_ids)


def test_fewer_tokens_or_of_another_width_are_refused(checkpoints) -> None:
    with pytest.raises(UserError, match="offers 32 tokens, and keeps them: draft_vocab_size=16 is too few"):
        tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "eagle3.1"), draft_vocab_size=16)
    flags = {"fc_norm": False, "norm_before_fc": True, "norm_output": False, "norm_before_residual": True}
    more = {"method": "pr", "warm_start": str(checkpoints / "pr"), "draft_vocab_size": 48}
    with pytest.raises(UserError, match="shared_loss=none would teach it no others: leave draft_vocab_size out"):
        tiny_run(checkpoints, "run", shared_loss="none", **more)
    theirs = write_foreign(checkpoints / "theirs", "eagle3", flags, own=True, hidden=40)
    imported = read_foreign(Source(theirs, float32_target(), {}))
    save_drafter(imported.drafter, checkpoints / "imported", {"target": "tiny"}, torch.float32)
    with pytest.raises(UserError, match="none of the target's can be added, whose head has another width"):
        tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "imported"), draft_vocab_size=60)


def test_a_lens_that_does_nothing_yet_joins_a_drafter_without_one(checkpoints) -> None:
    run = tiny_run(checkpoints, "lens", method="pr", warm_start=str(checkpoints / "pr"), lens=True)
    before = load_drafter(checkpoints / "pr", run.drafter.embedding, run.drafter.config.target_num_layers)
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, dict(run.drafter.named_parameters())[name]), name
    assert not run.drafter.lens.weight.any()
    run.run()
    exported = load_drafter(run.folder.drafter, run.drafter.embedding, run.drafter.config.target_num_layers)
    assert exported.lens.weight.any()


def test_a_self_query_is_kept_by_pr_and_dropped_by_eagle(checkpoints) -> None:
    target, folder = float32_target(), str(checkpoints / "pr")
    saved = load_drafter(checkpoints / "pr", target.embedding, target.spec.num_layers)
    assert torch.equal(tiny_run(checkpoints, "a", method="pr", warm_start=folder).drafter.self_query, saved.self_query)
    eagle = tiny_run(checkpoints, "b", method="eagle3.1", warm_start=folder).drafter
    assert not hasattr(eagle, "self_query")
    assert torch.equal(eagle.fc.weight, saved.fc.weight)


def test_a_run_goes_on_wherever_its_warm_start_lies_if_it_is_the_same(checkpoints) -> None:
    tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "pr")).run()
    shutil.move(checkpoints / "pr", checkpoints / "moved")
    run = tiny_run(checkpoints, "run", method="pr", warm_start=str(checkpoints / "moved"))
    assert run.step == run.plan.num_steps
    for other in (str(checkpoints / "eagle3.1"), "none"):
        with pytest.raises(UserError, match=r"another content of warm_start"):
            tiny_run(checkpoints, "run", method="pr", warm_start=other)


def test_a_run_goes_on_wherever_its_anchor_lies_if_it_is_the_same(checkpoints) -> None:
    start = str(checkpoints / "eagle3.1")
    changes = {"method": "pr", "warm_start": start, "balance": "anchor", "balance_weight": 0.5, "epochs": 1}
    shutil.copytree(checkpoints / "eagle3.1", checkpoints / "anchor")
    run = tiny_run(checkpoints, "run", anchor_to=str(checkpoints / "anchor"), **changes)
    run.run()
    training = json.loads((run.folder.drafter / "config.json").read_text())["secondguess"]["training"]
    assert training["settings"]["anchor_to"] == "FOLDER"  # nobody else has it there
    shutil.move(checkpoints / "anchor", checkpoints / "moved")
    assert tiny_run(checkpoints, "run", anchor_to=str(checkpoints / "moved"), **changes).finished
    for other in (str(checkpoints / "pr"), "none"):
        with pytest.raises(UserError, match=r"another content of anchor_to"):
            tiny_run(checkpoints, "run", anchor_to=other, **changes)


def test_a_drafter_of_another_target_is_refused(checkpoints) -> None:
    with pytest.raises(UserError, match="not for this target"):
        tiny_run(checkpoints, "run", target_seed=1, warm_start=str(checkpoints / "pr"))
    with pytest.raises(UserError, match="no drafter"):
        tiny_run(checkpoints, "run", warm_start="nowhere")


def test_second_looks_can_be_added_to_weights_that_stay(checkpoints) -> None:
    start = str(checkpoints / "eagle3.1")
    run = tiny_run(checkpoints, "run", method="pr", warm_start=start, shared_loss="none", lens=True)
    before = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
    run.run()
    changed = {name for name, p in run.drafter.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"self_query", "lens.weight"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shared_loss": "level0", "carry": "half"}, "needs carry=off"),
        ({"shared_loss": "level0", "query_slot": "own_token", "lens": False}, "leaves nothing to train of level 1"),
        ({"shared_loss": "none"}, "needs warm_start"),
        ({"shared_loss": "none", "warm_start": "pr", "query_slot": "own_token", "lens": False}, "leaves nothing"),
        ({"shared_loss": "none", "warm_start": "pr", "level1_weight": 0.0}, "trains nothing"),
        ({"shared_loss": "level0", "carry": "off", "attach": 0.5}, "attach would change nothing"),
        ({"shared_loss": "level0", "carry": "off", "balance_weight": 0.5}, "balance_weight would change nothing"),
        ({"shared_loss": "level0", "carry": "off", "parallel": "shard"}, "take parallel=replicate"),
        ({"shared_loss": "level0", "method": "eagle3.1"}, "eagle3.1 has no level 1"),
    ],
)
def test_what_does_not_go_with_weights_of_level_0_alone(tmp_path, settings, message) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(tmp_path, **({"method": "pr"} | settings))
