"""Faults known from the field that no line of the doctor is about: what happens instead of a silent low acceptance.

(The others are in ``test_doctor``, ``test_formats``, ``test_readings``, ``test_served`` and ``test_prepare``.)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreign_drafter import write_foreign
from secondguess.capture.source import Live
from secondguess.config import SecondLook, TreeConfig
from secondguess.drafter.checkpoint import load_drafter, load_for, open_checkpoint, save_drafter
from secondguess.drafter.checks import FOREIGN, examine
from secondguess.drafter.foreign import read_foreign
from secondguess.drafter.foreign_tensors import Source
from secondguess.drafter.model import Drafter
from secondguess.drafter.settings import read_settings
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.engine.speculate import GREEDY, Accepted, Roots
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.target.base import causal_rows
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.data import Response
from secondguess.train.own import surprise
from secondguess.train.setup import read_fitting
from secondguess.train.trainer import Trainer, make_feed
from secondguess.types import SamplingParams
from test_doctor import CHATML
from test_formats import EAGLE3, EAGLE31, change, examine_imported
from tiny_folder import CHAT, byte_tokenizer, save_tiny
from tiny_run import float32_target, tiny_config, tiny_run

# -- CFG: a setting is lost between two tools --------------------------------------------------------------------------


def test_settings_of_a_run_reach_the_checkpoint(tmp_path: Path) -> None:
    """Field fault 5: flags of the training's YAML that the drafter's config never heard of."""
    look: dict[str, Any] = {"see_own_level0": False, "query_slot": "own_token", "query_rope": "next"}
    run = tiny_run(tmp_path, "run", method="pr", epochs=1, num_layers=2, lens=True, draft_vocab_size=16, **look)
    run.run()
    shape, _ = read_settings(run.folder.drafter)
    assert (shape.num_layers, shape.lens, shape.draft_vocab_size) == (2, True, 16)
    assert shape.second_look == SecondLook(see_own_level0=False, query_slot="own_token", query_rope="next")


def test_a_lost_norm_of_all_states_is_noticed(tmp_path: Path) -> None:
    """Field fault 4."""
    source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE3 | {"norm_before_fc": True})
    with pytest.raises(UserError, match=r"norm_before_fc is false, but there is input_norm\.weight.*--set"):
        read_foreign(Source(change(source, {"norm_before_fc": None}), tiny_target("llama"), {}))


def test_settings_that_nobody_here_knows_are_named(tmp_path: Path) -> None:
    """Field faults 3 and 15: the next architecture, of which this package has not heard."""
    source = write_foreign(tmp_path / "theirs", "speculators", EAGLE31)
    read_foreign(told := Source(source, tiny_target("llama"), {}))
    assert not told.remarks
    news = {"norm_twice": True, "norm_never": False, "eagle_config": {"gate": "sigmoid"}, "transformers_version": "9"}
    read_foreign(told := Source(change(source, news), tiny_target("llama"), {}))
    assert told.remarks == ["settings that are not known here are left out: gate, norm_twice"]


def test_a_rotated_target_is_another_one(tmp_path: Path) -> None:
    """Field fault 49: the same text from states in another basis (QuaRot), in which a drafter guesses nothing."""
    folder, ids = save_tiny(tmp_path), torch.tensor([[5, 9, 2, 7]])
    turned = Path(shutil.copytree(folder / "target", folder / "turned"))
    weights = load_file(turned / "model.safetensors")
    basis, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for name, weight in weights.items():
        if weight.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[name] = (basis.T @ weight.double() if writes else weight.double() @ basis).contiguous()
    save_file(weights, turned / "model.safetensors", {"format": "pt"})
    straight, other = (load_target(str(path), "float64") for path in (folder / "target", turned))
    outs = [t.forward(causal_rows(torch.tensor([0]), ids), t.new_cache(1, 8)) for t in (straight, other)]
    torch.testing.assert_close(outs[0].logits_RNV, outs[1].logits_RNV, rtol=0, atol=1e-4)
    assert (outs[0].taps_RNLH - outs[1].taps_RNLH).abs().max() > 0.1
    load_for(folder / "drafters" / "pr", straight)
    with pytest.raises(UserError, match=r"not for this target \(hash of the token embedding"):
        load_for(folder / "drafters" / "pr", other)


# -- VOCAB -------------------------------------------------------------------------------------------------------------


def test_maps_that_mean_the_first_tokens_are_named(tmp_path: Path) -> None:
    """Field faults 7 and 8: offsets of zero, or 0, 1, 2, ..., are what a tool writes that has no map."""
    target, first = tiny_target("llama"), torch.arange(64) < 32
    for d2t in (torch.zeros(32, dtype=torch.int64), torch.arange(32)):
        source = write_foreign(tmp_path / "theirs", "eagle3", EAGLE31)
        findings = {f.name: f for f in examine_imported(change(source, d2t=d2t, t2d=first), target)}
        assert findings["vocabulary"].verdict == "warning"
        assert "are the first of the target's" in findings["vocabulary"].found


def test_a_vocabulary_of_more_tokens_than_were_seen_is_filled_up(tmp_path: Path) -> None:
    """Field fault 10."""
    run = tiny_run(tmp_path, "run", draft_vocab_size=64, epochs=1)  # token 0 is in no response
    run.run()
    saved = load_drafter(run.folder.drafter, run.drafter.embedding, run.drafter.config.target_num_layers)
    assert saved.target_ids.tolist() == list(range(64))


# -- IDX ---------------------------------------------------------------------------------------------------------------


def drafts(target: HFTarget, drafter: Drafter, texts: list[list[int]], part: int = 99) -> list[list[tuple[int, float]]]:
    """Tokens and scores of each text's tree; all are drafted for at once, after prompts that are read in parts."""
    speculator = EagleSpeculator(drafter, TreeConfig(budget=12, num_steps=4), len(texts), 128)
    for slot, text in enumerate(texts):
        states = target.forward(causal_rows(torch.tensor([0]), torch.tensor([text[:-1]])), target.new_cache(1, 128))
        for start in range(0, len(text) - 1, part):
            stop = min(start + part, len(text) - 1)
            following = torch.tensor(text[start + 1 : stop + 1])
            speculator.accept([Accepted(slot, following, states.taps_RNLH[0, start:stop])])
    ends, each = tuple(text[-1] for text in texts), (GREEDY,) * len(texts)
    tree = speculator.draft(Roots(tuple(range(len(texts))), ends, tuple(texts), each))
    rows = zip(tree.tokens_RN.tolist(), tree.scores_RN.tolist(), tree.valid_RN.tolist(), strict=True)
    return [[(token, score) for token, score, valid in zip(*row, strict=True) if valid] for row in rows]


TEXTS = [[5 * i % 63 + 1 for i in range(length)] for length in (3, 40, 17)]


@pytest.mark.parametrize("part", [1, 7, 16])
def test_a_prompt_that_is_read_in_parts_is_drafted_for_as_a_whole_one(part: int) -> None:
    """Field fault 34: the last token of a part, paired with what the target would say in place of what the text says.

    (The same of the plug-ins: ``test_vllm``, ``test_sglang``.)
    """
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    for parts, whole in zip(drafts(target, drafter, TEXTS, part), drafts(target, drafter, TEXTS), strict=True):
        assert [token for token, _ in parts] == [token for token, _ in whole]
        assert [score for _, score in parts] == pytest.approx([score for _, score in whole], abs=1e-10)


def test_requests_of_different_lengths_are_drafted_for_as_alone() -> None:
    """Field fault 48: padding of a batch is taken for tokens of the shorter texts."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    for text, beside in zip(TEXTS, drafts(target, drafter, TEXTS), strict=True):
        (alone,) = drafts(target, drafter, [text])
        assert [token for token, _ in beside] == [token for token, _ in alone]
        assert [score for _, score in beside] == pytest.approx([score for _, score in alone], abs=1e-10)


# -- ROPE and LEN ------------------------------------------------------------------------------------------------------


def test_a_new_drafter_turns_at_the_targets_rate(tmp_path: Path) -> None:
    """Field fault 20: the base stands in ``rope_parameters`` since transformers 5."""
    target = tiny_target("llama")
    target.model.config.rope_parameters = {"rope_type": "default", "rope_theta": 123456.0}
    save_drafter(tiny_drafter(target), tmp_path / "drafter", {})
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 123456.0
    assert written["secondguess"]["rope"] == written["rope_parameters"]
    rates = load_for(tmp_path / "drafter", target).rope_rates
    assert rates[1] == pytest.approx(123456.0**-0.25)


def test_past_the_length_that_a_drafter_was_made_for_the_text_goes_on(tmp_path: Path, caplog) -> None:
    """Field faults 24, 25 and 47: a warning, no crash, and plain decoding's text."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    drafter.config = replace(drafter.config, max_position_embeddings=16)
    save_drafter(drafter, tmp_path / "short", {})
    prompt, params = [5 * i % 63 + 1 for i in range(40)], SamplingParams(max_tokens=24, ignore_eos=True)
    (wanted,), (got,) = (
        llm.generate([prompt], params) for llm in (LLM(target, method="ar"), LLM(target, tmp_path / "short"))
    )
    assert got.token_ids == wanted.token_ids
    assert "positions: made for 16, the target takes 1024" in caplog.text


# -- DATA --------------------------------------------------------------------------------------------------------------


def answers_of(target: HFTarget, temperature: float, told: float | None) -> list[Response]:
    prompts = [[5 * i % 63 + 1, 3 * i % 63 + 1, 7] for i in range(24)]
    each = [SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True) for i in range(24)]
    outputs = LLM(target, method="ar", max_model_len=64).generate(prompts, each)
    return [Response(f"r{i}", (*o.prompt_ids, *o.token_ids), 3, told) for i, o in enumerate(outputs)]


def surprise_at(target: HFTarget, responses: Sequence[Response], num_draft: int = 64) -> float:
    feed = make_feed(target, list(responses), Live(target, [r.input_ids for r in responses]), torch.arange(num_draft))
    found = surprise(feed, range(len(responses)))
    assert found is not None
    return found


@pytest.mark.parametrize(("temperature", "told"), [(0.0, 0.0), (0.0, None), (1.0, None), (1.0, 1.0), (1.7, 1.7)])
def test_answers_of_the_target_do_not_surprise_it_and_others_do(temperature: float, told: float | None) -> None:
    """Field fault 29: text that the target would not write."""
    target, other = float32_target(), float32_target(1)
    own = answers_of(target, temperature, told)
    assert surprise_at(target, own) < FOREIGN
    assert surprise_at(target, own, num_draft=40) < FOREIGN
    assert surprise_at(other, own) > FOREIGN


def test_answers_hotter_than_they_say_are_noticed() -> None:
    target = float32_target()
    assert surprise_at(target, answers_of(target, 2.5, 1.0)) > FOREIGN
    assert surprise_at(target, answers_of(target, 1.0, 0.0)) > FOREIGN


def test_training_on_others_answers_warns_and_the_checkpoint_tells(tmp_path: Path, caplog) -> None:
    run = tiny_run(tmp_path, "run", epochs=1)  # on random tokens
    run.run()
    (record,) = [r for r in caplog.records if r.name == "secondguess.train.own"]
    assert "surprise the target by" in record.getMessage()
    assert "'secondguess prepare'" in record.getMessage()
    target = float32_target()
    checkpoint = open_checkpoint(run.folder.drafter, target)
    findings = {f.name: f for f in examine(checkpoint, target.facts, target.embedding)}
    assert findings["provenance"].verdict == "warning"
    assert "not its own" in findings["provenance"].found


def test_training_on_own_answers_does_not_warn(tmp_path: Path, caplog) -> None:
    target = float32_target()
    responses = answers_of(target, 1.0, 1.0)
    config = tiny_config(tmp_path / "run", epochs=1)
    Trainer(config, target, responses, Live(target, [r.input_ids for r in responses])).run()
    assert not [r for r in caplog.records if r.name.startswith("secondguess")]


def test_prompts_of_another_template_are_noticed(tmp_path: Path) -> None:
    """Field faults 27 and 28, at training: a drafter learns the form that its prompts have."""
    save_tiny(tmp_path)
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    forms = ("<|user|>Hi\n<|assistant|>", "<|user|>Hi\n<|assistant|><think>\n\n</think>\n", "Hi", "<|assistant|>")
    rows = [
        {"id": str(i), "prompt_len": len(ids), "input_ids": [*ids, 5, 6]}
        for i, ids in enumerate(tokenizer.encode(form, add_special_tokens=False) for form in forms)
    ]
    said: list[str] = []
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read_fitting(tmp_path / "r.jsonl", target, said.append)) == 4
    (line,) = said
    assert "2 of 4 prompts do not end with '<|assistant|>'" in line
    assert "another chat template or thinking mode" in line
    byte_tokenizer(CHAT).save_pretrained(tmp_path / "target")  # which puts nothing there
    read_fitting(tmp_path / "r.jsonl", load_target(str(tmp_path / "target")), said.append)
    assert len(said) == 1


def test_answers_of_which_no_token_can_be_offered_are_refused(tmp_path: Path) -> None:
    """Field fault 31: a loss over nothing looks healthy."""
    target = float32_target()
    old = tiny_drafter(target)
    drafter = Drafter(old.config, old.embedding, torch.arange(32))
    drafter.load_state_dict(old.state_dict())
    save_drafter(drafter, tmp_path / "low", {})
    responses = [Response(f"r{i}", tuple(40 + (7 * i + j) % 24 for j in range(10)), 3) for i in range(24)]
    config, source = tiny_config(tmp_path / "run", warm_start=str(tmp_path / "low")), Live(target, [])
    with pytest.raises(UserError, match="can offer none of the answers' tokens"):
        Trainer(config, target, responses, source)
