"""Training on from drafters of other trainers that read layers of their own: each is fed its own, and no others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foreign_drafter import FLAGS, reference, write_foreign
from secondguess.bench.replay import Text, read, replay
from secondguess.bench.transcript import Key, Transcript
from secondguess.capture.run import capture, plan_capture
from secondguess.capture.source import Live
from secondguess.cli import main
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_drafter, load_for, save_drafter
from secondguess.drafter.export import export
from secondguess.drafter.foreign import parse_given, read_foreign
from secondguess.drafter.foreign_tensors import Source
from secondguess.drafter.model import Drafter
from secondguess.drafter.speculator import EagleSpeculator
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.target.hf import HFTarget
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.train.data import Response
from secondguess.train.tau import read_texts
from secondguess.train.trainer import Trainer
from secondguess.types import SamplingParams
from test_capture import write_responses
from test_formats import FORMS, TAPS, change, every_input, files, serve, without_block
from tiny_folder import save_tiny
from tiny_run import float32_target, tiny_config, tiny_responses, tiny_run

OWN = (1, 4, 7)
# How each form names the inputs of these layers, and what else it may have unlike EAGLE-3.1.
NAMED: dict[str, tuple[list[int], list[str]]] = {
    "eagle3": ([0, 3, 6], ["layer_ids=outputs"]),
    "speculators": ([1, 4, 7], []),
}
UNLIKE: dict[str, dict[str, Any]] = {
    "eagle3": {"flags": dict.fromkeys(FLAGS, False), "own": True, "hidden": 40},
    "speculators": {"flags": dict.fromkeys(FLAGS, True) | {"fc_norm": False}},
}


def imported(folder: Path, target: HFTarget, form: str, ids: list[int], given: Sequence[str] = ()) -> str:
    """The folder of a random drafter of another trainer, imported; weights depend on the form alone."""
    theirs = change(write_foreign(folder.with_name("theirs"), form, **UNLIKE[form]), {TAPS: ids})
    save_drafter(read_foreign(Source(theirs, target, parse_given(given))).drafter, folder, {}, torch.float32)
    return str(folder)


# -- states ------------------------------------------------------------------------------------------------------------


def test_states_are_the_inputs_of_the_layers_that_were_asked_for(tmp_path: Path) -> None:
    """By transformers' own forward; asking for some does not move the others."""
    target, ids = tiny_target("llama"), [5, 9, 2, 7, 11, 3]
    inputs = every_input(target, torch.tensor([ids]))
    for layers, store in ((OWN, capture(target, [ids], tmp_path, OWN)), ((2, 4, 5), capture(target, [ids], tmp_path))):
        states = store[0]
        for place, layer in enumerate(layers):
            torch.testing.assert_close(states.taps_TLH[:, place].double(), inputs[layer][0], rtol=0.01, atol=0.01)
        torch.testing.assert_close(states.last_TH.double(), inputs[-1][0], rtol=0.01, atol=0.01)
        assert torch.equal(states.best_T.long(), target.logits(inputs[-1])[0].argmax(-1))
        assert torch.equal(Live(target, [ids], store.tap_layers).read([0])[0].hidden_TKH, states.hidden_TKH)


def test_captures_of_other_layers_are_never_found(tmp_path: Path) -> None:
    target, sequences = tiny_target("llama"), [(5, 9, 2), (7, 11)]
    made = capture(target, sequences, tmp_path, OWN)
    assert not plan_capture(target, sequences, tmp_path, OWN).missing
    for layers in (None, (1, 4, 6), (7, 4, 1), (1, 4), (1, 4, 5, 7)):
        other = plan_capture(target, sequences, tmp_path, layers)
        assert other.missing
        assert other.folder != made.folder


def test_states_of_other_layers_are_no_food(tmp_path: Path) -> None:
    target, responses = float32_target(), tiny_responses()
    start = imported(tmp_path / "start", target, "speculators", [*OWN])
    config = tiny_config(tmp_path / "run", warm_start=start)
    with pytest.raises(AssertionError, match="other layers"):
        Trainer(config, target, responses, Live(target, [r.input_ids for r in responses]))


# -- training ----------------------------------------------------------------------------------------------------------


def trees(drafter: Drafter, texts: Sequence[Text]) -> list[list[list[int]]]:
    """The tokens of every tree of a replay."""
    found: list[list[list[int]]] = []
    speculator = EagleSpeculator(drafter, TreeConfig(budget=8), len(texts), 64)
    with torch.no_grad():
        replay(speculator, texts, lambda _, trace: found.append(trace.tree.tokens_RN.tolist()))
    return found


def text_of(target: HFTarget, r: Response) -> Text:
    """A response as ``eval`` reads it, its states rounded as captured ones are."""
    text = read(target, Transcript(Key("t", r.id, ""), r.input_ids[: r.prompt_len], r.answer, (), "length"))
    return replace(text, taps_TLH=text.taps_TLH.bfloat16().float())


@pytest.mark.parametrize("form", FORMS)
def test_second_looks_are_learnt_and_exported_again(tmp_path: Path, form: str) -> None:
    target, (ids, given) = float32_target(), NAMED[form]
    start = imported(tmp_path / "start", target, form, ids, given)
    run = tiny_run(tmp_path, "run", method="pr", warm_start=start, epochs=1)
    before = {name: p.detach().clone() for name, p in run.drafter.named_parameters()}
    run.run()
    assert run.drafter.config.tap_layers == OWN
    assert all(not torch.equal(p, before[name]) for name, p in run.drafter.named_parameters())
    # Replayed over the states of training, and over what the target gives a drafter that was loaded to serve.
    served, feed = load_for(run.folder.drafter, target).requires_grad_(False), run.learner.feed
    served.load_state_dict(run.drafter.state_dict())
    served.embedding.copy_(run.drafter.embedding)  # its own may be; the checkpoint has them in bfloat16
    known = read_texts(feed, run.judge.replayed)
    texts = [text_of(target, feed.responses[i]) for i in run.judge.replayed]
    for text, ours in zip(texts, known, strict=True):
        own_TLH = text.taps_TLH[:, list(served.tap_index)]
        torch.testing.assert_close(own_TLH, ours.taps_TLH, rtol=0.01, atol=0.01)  # a bit of bfloat16
        text.taps_TLH[:, list(served.tap_index)] = ours.taps_TLH  # or a near-tie could fall either way
    drafted = trees(run.drafter, known)
    assert drafted == trees(served, texts)
    served.tap_index = (0, 1, 2)  # EAGLE-3's: were they the same, the equality would say nothing
    assert drafted != trees(served, texts)
    exported_as_trained(run.folder.drafter, target, tmp_path)


def exported_as_trained(folder: Path, target: HFTarget, out: Path) -> None:
    """Both forms compute what the checkpoint of the run does, and name its layers."""
    drafter = load_for(folder, target)
    generator = torch.Generator().manual_seed(1)
    taps_TLH, tokens = torch.randn(5, len(target.spec.tap_layers), 32, generator=generator), [7, 3, 60, 3, 11, 22]
    wanted = serve(drafter, taps_TLH, tokens)
    for form in FORMS:
        export(folder, form, out / form, "someone/target", None)
        config, tensors = files(out / form)
        own_TLH = taps_TLH[:, list(drafter.tap_index)].double()
        found = reference(config, tensors, target.embedding, own_TLH, tokens)[-2:]
        torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)
        assert (config if form == "speculators" else config["eagle_config"])[TAPS] == [*OWN]
        assert (out / form / "reconsider" / "query.safetensors").exists()
        source = Source(without_block(out / form), target, parse_given(["layer_ids=inputs"]))
        assert read_foreign(source).drafter.config == replace(drafter.config, second_look=None, lens=False)


def test_second_looks_are_added_to_a_drafter_that_stays(tmp_path: Path) -> None:
    """Level 0 as it was imported, bit for bit, whatever it was exported to."""
    target, (ids, given) = float32_target(), NAMED["eagle3"]
    start = Path(imported(tmp_path / "start", target, "eagle3", ids, given))
    run = tiny_run(tmp_path, "run", method="pr", warm_start=str(start), shared_loss="none", epochs=1)
    run.run()
    export(run.folder.drafter, "speculators", tmp_path / "out", None, None)
    before, after = load_for(start, target), load_for(tmp_path / "out", target)
    assert after.self_query.abs().sum() > 0
    for name, parameter in before.named_parameters():
        assert torch.equal(after.get_parameter(name), parameter.bfloat16().float()), name


def test_a_trained_drafter_serves_without_a_detour_over_a_file(tmp_path: Path) -> None:
    """Whoever is given a network taps what it reads."""
    target = float32_target()
    start = imported(tmp_path / "start", target, "speculators", [*OWN])
    drafter = load_drafter(Path(start), target.embedding, target.spec.num_layers)
    (wanted,), (got,) = (
        llm.generate([[5, 9, 2, 7]], SamplingParams(max_tokens=16))
        for llm in (LLM(target, method="ar"), LLM(target, drafter, method="eagle3.1"))
    )
    assert got.token_ids == wanted.token_ids
    assert [target.spec.tap_layers[place] for place in drafter.tap_index] == [*OWN]


def test_an_anchor_reads_the_layers_of_the_drafter_that_it_holds(tmp_path: Path) -> None:
    target = float32_target()
    anchored: dict[str, Any] = {"method": "pr", "balance": "anchor", "balance_weight": 0.5, "epochs": 1}
    start = imported(tmp_path / "start", target, "speculators", [*OWN])
    other = imported(tmp_path / "other", target, "speculators", [1, 3, 6])
    losses: dict[str, list[float]] = {}
    for anchor in ("none", start):
        run = tiny_run(tmp_path, f"run{len(losses)}", warm_start=start, anchor_to=anchor, **anchored)
        run.run(lambda step, loss, to=anchor: losses.setdefault(to, []).append(loss))
    assert losses["none"][0] == losses[start][0]  # a copy of the start point, and the start point
    with pytest.raises(UserError, match="reads other layers: start from it too"):
        tiny_run(tmp_path, "refused", warm_start=start, anchor_to=other, **anchored)


def test_another_import_of_the_same_weights_is_another_start(tmp_path: Path) -> None:
    target = float32_target()
    first = imported(tmp_path / "first", target, "eagle3", [1, 3, 6], ["layer_ids=inputs"])
    other = imported(tmp_path / "other", target, "eagle3", [1, 3, 6], ["layer_ids=outputs"])
    flags = imported(tmp_path / "flags", target, "eagle3", [1, 3, 6], ["layer_ids=inputs", "norm_output=true"])
    tiny_run(tmp_path, "run", warm_start=first, epochs=1).run()
    assert tiny_run(tmp_path, "run", warm_start=first, epochs=1).step
    for start in (other, flags):
        with pytest.raises(UserError, match="another network of warm_start"):
            tiny_run(tmp_path, "run", warm_start=start, epochs=1)


def test_our_own_start_points_are_known_by_their_weights_alone(tmp_path: Path) -> None:
    """Runs that were kept before networks were told apart can go on."""
    save_drafter(tiny_drafter(float32_target(), reconsideration=False), tmp_path / "ours", {})
    assert tiny_run(tmp_path, "run", warm_start=str(tmp_path / "ours")).folder.inputs["network of warm_start"] is None


# -- the commands ------------------------------------------------------------------------------------------------------


def test_from_import_to_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(save_tiny(tmp_path))
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    theirs = write_foreign(Path("theirs"), "eagle3", dict.fromkeys(FLAGS, False), vocab=257, draft=100)
    change(theirs, {TAPS: [0, 3, 6]})
    assert main(["import", "theirs", "mine", "--target", "target", "--set", "layer_ids=outputs"]) == 0
    responses = write_responses(tmp_path / "r.jsonl", [12] * 20)
    train = [
        "train", "target=target", f"responses={responses}", "warm_start=mine", "out=run", "unroll_steps=2", "epochs=1",
        "batch_size=4",
    ]  # fmt: skip
    assert main(["capture", "target", responses]) == 0
    capsys.readouterr()
    assert main([*train, "--dry-run"]) == 0
    assert "1 of 1 shards missing" in " ".join(capsys.readouterr().err.split())
    assert main(["capture", "target", responses, "--warm-start", "mine"]) == 0
    capsys.readouterr()
    assert main(train) == 0
    assert "complete" in " ".join(capsys.readouterr().err.split())
    flags = ["--method", "ar,eagle3.1,pr", "--drafter", "run/drafter", "--max-tokens", "8", "--json", "out.json"]
    assert main(["generate", "target", "ab", *flags]) == 0
    plain, *fast = json.loads(Path("out.json").read_text())["results"]
    assert [result["token_ids"] for result in fast] == [plain["token_ids"]] * 2
    assert main(["capture", "target", responses, "--warm-start", "drafters/other"]) == 2
    assert "not for this target" in capsys.readouterr().err
