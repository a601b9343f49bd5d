"""Switches by name: what they ask of the drafter, and that no reading of reconsideration changes a text."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secondguess.bench.sweep import second_looks, sweep
from secondguess.cli import main
from secondguess.config import Reconsider, SecondLook, TreeConfig
from secondguess.drafter.checkpoint import save_drafter
from secondguess.drafter.look import offer, query
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import Plain
from secondguess.errors import UserError
from secondguess.fields import choices
from secondguess.methods import SWITCHES, make_speculator, parse_method
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import Rows
from test_drafter import PROMPTS, prime
from test_engine import decode, eagle, random_requests
from tiny_folder import save_tiny

SMALL = TreeConfig(budget=12, num_steps=4, grow_width=3, offer_width=3, num_reconsider=2)


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return tiny_drafter(tiny_target("llama"))


def features(drafter: Drafter, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, num_rows, drafter.config.hidden_size, generator=generator, dtype=torch.float64)


def with_switches(**switches) -> TreeConfig:
    return replace(SMALL, reconsider=Reconsider(**switches))


# ---- the drafter


def test_level_1_rates_the_tokens_that_level_0_offered(drafter: Drafter) -> None:
    f_RXH = features(drafter, 5)
    known_RMK = drafter.target_ids[torch.tensor([[[0, 31, 7], [4, 5, 6]], [[1, 2, 3], [9, 8, 30]]])]
    offers = offer(drafter, with_switches(merge="rescore_all"), f_RXH, known_RMK)
    plain = offer(drafter, SMALL, f_RXH)
    assert torch.equal(offers.tokens_RXK, plain.tokens_RXK)
    assert torch.equal(offers.logps_RXK, plain.logps_RXK)
    logps_RMV = drafter.logits(f_RXH).float().log_softmax(-1)[:, 3:]
    assert offers.known_logps_RMK is not None
    assert offers.known_logps_RMK[1, 1, 2] == logps_RMV[1, 1, 30]
    assert offers.known_logps_RMK[0, 0].tolist() == logps_RMV[0, 0, [0, 31, 7]].tolist()
    assert plain.known_logps_RMK is None


def test_novel_offers_are_the_best_of_the_rest(drafter: Drafter) -> None:
    f_RXH = features(drafter, 4)
    known_RMK = offer(drafter, SMALL, f_RXH).tokens_RXK[:, 2:].contiguous()  # what level 1 would offer too
    offers = offer(drafter, with_switches(merge="novel_only"), f_RXH, known_RMK)
    six = offer(drafter, replace(SMALL, offer_width=6), f_RXH)
    assert torch.equal(offers.tokens_RXK[:, :2], six.tokens_RXK[:, :2, :3])
    assert torch.equal(offers.tokens_RXK[:, 2:], six.tokens_RXK[:, 2:, 3:])
    assert torch.equal(offers.logps_RXK[:, 2:], six.logps_RXK[:, 2:, 3:])


def test_doubt_is_entropy_or_margin(drafter: Drafter) -> None:
    f_RXH = features(drafter, 3)
    probs_RXV = drafter.logits(f_RXH).float().softmax(-1)
    entropy = offer(drafter, with_switches(select="entropy"), f_RXH).doubt_RX
    margin = offer(drafter, with_switches(select="margin"), f_RXH).doubt_RX
    expected_RX = torch.distributions.Categorical(probs_RXV).entropy()
    torch.testing.assert_close(entropy, expected_RX)
    best_RXV = probs_RXV.sort(-1, descending=True).values
    torch.testing.assert_close(margin, best_RXV[..., 1] - best_RXV[..., 0])
    assert offer(drafter, SMALL, f_RXH).doubt_RX is None


def test_what_stands_where_level_0_has_the_token(drafter: Drafter) -> None:
    f_RMH, tokens_RM = features(drafter, 2), torch.tensor([[3, 4], [5, 6]])

    def asked(slot) -> torch.Tensor:
        return query(drafter, SecondLook(query_slot=slot), drafter.embed(tokens_RM), f_RMH)

    assert torch.equal(asked("self_query"), drafter.self_query.expand(2, 2, -1))
    assert torch.equal(asked("own_token"), drafter.embedding[tokens_RM])
    probs_V = drafter.logits(f_RMH[1, 0]).softmax(-1)
    expected_H = sum(p * drafter.embedding[t] for p, t in zip(probs_V, drafter.target_ids, strict=True))
    torch.testing.assert_close(asked("soft_pred")[1, 0], expected_H, rtol=0, atol=1e-6)


def forwards(config: TreeConfig) -> list[Rows]:
    """The rows of every forward of a draft for two prompts, the extend pass left out."""
    target, seen = tiny_target("llama"), []
    s = EagleSpeculator(tiny_drafter(target), config, num_slots=2, num_columns=64)
    roots, run = prime(s, target, PROMPTS), s.run

    def spy(rows: Rows, e_RXH: torch.Tensor, g_RXH: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return run(rows, e_RXH, g_RXH)

    s.run = spy  # type: ignore[method-assign]
    s.draft(roots)
    return seen[1:]


def test_a_second_look_may_stand_one_position_further() -> None:
    same, further = (forwards(with_switches(query_rope=rope))[0] for rope in ("same", "next"))
    assert (further.positions_RN - same.positions_RN).tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert torch.equal(further.columns_RN, same.columns_RN)
    assert same.positions_RN[:, 3].tolist() == [4, 2], "the root's row: the newest pair of five tokens, and of three"


def test_a_root_that_does_not_see_itself_sees_the_prompt() -> None:
    sees, blind = (forwards(with_switches(see_own_level0=own))[0].visible_RNW for own in (True, False))
    changed = (sees != blind).nonzero().tolist()
    assert changed == [[0, 3, 4], [1, 3, 2]], "the root's own column, to the row of its second look alone"
    assert blind[0, 3].tolist() == [True] * 4 + [False] * 4 + [True]
    assert blind[1, 3].tolist() == [True] * 2 + [False] * 4 + [True] + [False] * 2


# ---- texts


def assert_text_is_plain(typed: str, seed: int) -> None:
    rng = random.Random(seed)
    target = tiny_target(rng.choice(["llama", "gemma3"]), seed, vocab_size=12)
    tree = parse_method(typed, SMALL).tree
    for temperature in (0.0, 1.0):
        requests = random_requests(rng, target.spec.vocab_size, temperature, 2)
        plain = [decode(target, Plain(), [request])[0] for request in requests]
        for one, many in zip(plain, decode(target, eagle(target, tree, seed), requests), strict=True):
            assert many.emitted == one.emitted
            assert many.finish_reason == one.finish_reason


@pytest.mark.parametrize("typed", second_looks(offer_width=3))
def test_no_switch_changes_a_text(typed: str) -> None:
    assert_text_is_plain(typed, len(typed))


@pytest.mark.parametrize("seed", range(12))
def test_no_combination_changes_a_text(seed: int) -> None:
    rng = random.Random(seed)
    settings = {name: rng.choice(words) for name, words in choices(Reconsider).items()}
    settings |= {name: rng.choice(("true", "false")) for name in ("propagate", "root_eligible", "see_own_level0")}
    settings |= {"threshold": rng.choice(("0.3", "1")), "reconsider_cap": rng.choice(("none", "4"))}
    assert_text_is_plain("pr:" + ",".join(f"{name}={value}" for name, value in settings.items()), seed)


# ---- names


def test_settings_are_read_by_the_type_of_their_field() -> None:
    typed = "pr:merge=drop,m=6,threshold=0.7,root_eligible=false,reconsider_cap=3,reconsider_steps=none,budget=9"
    tree = parse_method(typed, TreeConfig(num_steps=5)).tree
    switches = Reconsider(merge="drop", threshold=0.7, root_eligible=False, reconsider_cap=3)
    assert tree == TreeConfig(num_steps=5, num_reconsider=6, budget=9, reconsider=switches)
    assert parse_method("pr", tree).tree == tree, "what is not typed stays"
    assert parse_method("eagle3.1:extra_advance=3", tree).tree.reconsider == Reconsider()
    assert parse_method("eagle3.1:extra_advance=3", tree).tree.rows_per_step == 9


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("pr:merg=drop", "unknown setting 'merg'; did you mean merge?"),
        (
            "pr:merge=dropp",
            "merge must be one of max, replace, rescore_all, logmean, drop, novel_only, union, append, got",
        ),
        ("pr:merge=dropp", "did you mean drop?"),
        ("pr:merge", "merge must be one of"),
        ("pr:propagate=no", "propagate must be true or false, got 'no'"),
        ("pr:threshold=high", "threshold must be a number, got 'high'"),
        ("pr:threshold=1.5", "threshold must be in [0, 1], got 1.5"),
        ("pr:threshold=nan", "threshold must be in [0, 1], got nan"),
        ("pr:reconsider_cap=0", "reconsider_cap must be at least 1, got 0"),
        ("pr:reconsider_steps=all", "reconsider_steps must be a whole number, got 'all'"),
        ("pr:m=-1", "num_reconsider must be in [0, 10^9), got -1"),
        ("pr:budget=9999999999", "budget must be in [0, 10^9), got 9999999999"),
        ("pr:k=4,refined_offer_width=5", "refined_offer_width must be at most offer_width (4), got 5"),
        ("pr:m=0,merge=drop,select=path", "merge, select would change nothing: num_reconsider (m) is 0"),
        ("pr:extra_advance=3", "extra_advance stands in for second looks: set num_reconsider (m) to 0"),
        ("pr:m=2,merge=drop,num_reconsider=3", "num_reconsider is set twice"),
        ("eagle3.1:merge=drop", "eagle3.1 does not use merge, only pr, hass+pr do"),
        ("ngram:extra_advance=3", "ngram does not use extra_advance, only eagle3.1, pr, hass, hass+pr do"),
    ],
)
def test_bad_settings_are_one_line(typed: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_method(typed, TreeConfig())
    assert said in str(caught.value)
    assert f"method {typed!r}" in str(caught.value)


def test_a_drafter_without_self_query_can_look_again_at_the_token(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_drafter(tiny_drafter(target, reconsideration=False), tmp_path, {})
    with pytest.raises(UserError, match="no self-query"):
        make_speculator(parse_method("pr:query_slot=self_query", SMALL), target, tmp_path, 1, 32)
    speculator = make_speculator(parse_method("pr:query_slot=own_token", SMALL), target, tmp_path, 2, 32)
    assert isinstance(speculator, EagleSpeculator)
    assert int(speculator.draft(prime(speculator, target, PROMPTS)).levels_RN.sum()) > 0


def test_second_looks_are_served_as_they_were_trained_unless_told_otherwise(tmp_path: Path) -> None:
    target, learnt = tiny_target("llama"), SecondLook(query_slot="soft_pred", query_rope="next", see_own_level0=False)
    save_drafter(tiny_drafter(target, look=learnt), tmp_path, {})

    def served(typed: str, tree: TreeConfig = SMALL) -> Reconsider:
        speculator = make_speculator(parse_method(typed, tree), target, tmp_path, 2, 32)
        assert isinstance(speculator, EagleSpeculator)
        speculator.draft(prime(speculator, target, PROMPTS))
        return speculator.config.reconsider

    as_trained = Reconsider(query_slot="soft_pred", query_rope="next", see_own_level0=False)
    assert served("pr") == served("hass+pr") == as_trained
    assert served("pr:query_rope=same,merge=drop") == replace(as_trained, query_rope="same", merge="drop")
    own = replace(SMALL, reconsider=Reconsider(query_slot="own_token"))
    assert served("pr", own) == replace(as_trained, query_slot="own_token")
    assert served("pr:m=0") == served("eagle3.1") == Reconsider()
    with pytest.raises(UserError, match="no self-query"):
        served("pr:query_slot=self_query")


def test_hass_drafts_as_eagle_does_and_needs_a_drafter(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_drafter(tiny_drafter(target, reconsideration=False), tmp_path, {})
    trees = []
    for typed in ("eagle3.1", "hass"):
        speculator = make_speculator(parse_method(typed, SMALL), target, tmp_path, 2, 32)
        assert isinstance(speculator, EagleSpeculator)
        trees.append(speculator.draft(prime(speculator, target, PROMPTS)))
    assert torch.equal(trees[0].tokens_RN, trees[1].tokens_RN)
    for name in ("hass", "hass+pr"):
        with pytest.raises(UserError, match=f"no drafter '{re.escape(name)}': no such drafter ships"):
            make_speculator(parse_method(name, SMALL), target, None, 2, 32)


# ---- the sweep


def test_the_sweep_has_every_value_of_every_switch_once() -> None:
    methods = [parse_method(typed, TreeConfig()) for typed in second_looks(offer_width=6)]
    trees = [method.tree for method in methods]
    assert len({*trees, TreeConfig()}) == len(trees) + 1
    changed = [[n for n in SWITCHES if getattr(t.reconsider, n) != getattr(Reconsider(), n)] for t in trees]
    assert [len(names) for names in changed] == [1] * (len(changed) - 7) + [0] * 7
    assert {name for names in changed for name in names} == set(SWITCHES)
    for name, words in choices(Reconsider).items():
        assert {getattr(t.reconsider, name) for t in trees} == set(words)
    assert [m.typed for m in methods[-7:-3]] == ["pr:m=1", "pr:m=2", "pr:m=4", "pr:m=6"]
    assert [m.typed for m in methods[-3:]] == ["pr:m=0", "pr:m=0,extra_advance=3", "pr:m=0,grow_width=9"]
    assert "pr:refined_offer_width=3" not in second_looks(offer_width=3)


def test_the_sweep_gives_both_methods_the_same_shapes() -> None:
    methods = [parse_method(typed, TreeConfig()) for typed in sweep(offer_width=6)]
    shapes = {m.typed: (m.tree.offer_width, m.tree.grow_width, m.tree.num_steps) for m in methods}
    expected = {(6, 6, 8), (9, 6, 8), (12, 6, 8), (16, 6, 8), (6, 9, 8), (6, 12, 8), (6, 6, 5), (6, 6, 10)}
    for name in ("eagle3.1", "pr"):
        assert {shapes[typed] for typed in shapes if typed.startswith(name) and "m=0" not in typed} == expected
    assert len(shapes) == len(methods)
    assert {"eagle3.1", "pr", *second_looks(offer_width=6)} < shapes.keys()


def test_eval_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    save_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    rows = [{"id": turn, "turns": [turn]} for turn in ("one", "two")]
    Path("one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = ("--tasks", "one.jsonl", "--max-new-tokens", "5", "--num-steps", "3", "--drafter", "drafters/pr")
    assert main(["eval", "target", *fixed, "--method", "eagle3.1", "--sweep", "--json", "rows.json"]) == 0
    content = json.loads(Path("rows.json").read_text())
    rows = content["rows"]
    assert [row["method"] for row in rows] == list(dict.fromkeys(["eagle3.1", *sweep(offer_width=6)]))
    assert [row["method"] for row in rows if row["gain"] is None] == ["pr"]
    (best,) = content["best"]
    assert best["num_prompts"] == 1
    assert f"{best['method']} {best['acceptance_length']:.2f}, {best['over']} " in capsys.readouterr().out
