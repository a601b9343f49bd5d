"""The doctor: every fault that is known from the field and can be planted here is an error or a warning with a name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from secondguess.bench.acceptance import acceptance_length
from secondguess.cli import main
from secondguess.commands import doctor_run
from secondguess.commands.doctor import DoctorOptions
from secondguess.commands.doctor_probe import open_probe
from secondguess.commands.doctor_run import elsewhere, judge, look, record
from secondguess.commands.show_findings import conclusion
from secondguess.config import TreeConfig
from secondguess.drafter.checkpoint import load_for, save_drafter
from secondguess.drafter.checks import CHECKS, Finding
from secondguess.drafter.model import Drafter
from secondguess.drafter.vocab import to_offsets
from secondguess.engine.thread import run
from secondguess.llm import LLM
from secondguess.target.facts import TargetFacts, answer_start
from secondguess.target.fingerprint import weights_fingerprint
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_drafter, tiny_target
from tiny_folder import CHAT, byte_tokenizer, save_tiny

CONSOLE = Console(stderr=True)
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    """``target`` and a ``drafter`` that keeps all facts about it."""
    folder = save_tiny(tmp_path_factory.mktemp("healthy"))
    byte_tokenizer(CHATML).save_pretrained(folder / "target")
    write(tiny_drafter(load(folder)), load(folder), folder)
    return folder


def load(folder: Path) -> HFTarget:
    return run(load_target, str(folder / "target"))


def write(drafter: Drafter, target: HFTarget, folder: Path) -> None:
    save_drafter(drafter, folder / "drafter", {"target": "tiny", "method": "pr", "made_for": asdict(target.facts)})


def findings_of(folder: Path) -> dict[str, Finding]:
    """By name, without the probe."""
    return {f.name: f for f in look(DoctorOptions(probe=False), load(folder), folder / "drafter", CONSOLE)}


def test_a_healthy_drafter_has_no_complaint(healthy) -> None:
    findings = findings_of(healthy)
    assert list(findings) == ["checkpoint", *CHECKS]
    assert {f.verdict for f in findings.values()} == {"ok"}
    assert "layers 2, 4, 5 of 8" in findings["tapped layers"].found
    assert "128 of the target's 257 tokens" in findings["vocabulary"].found
    assert findings["norms"].found == "fc_norm, norm_output"


def test_what_an_older_checkpoint_lacks_is_unknown(healthy, tmp_path) -> None:
    folder = shutil.copytree(healthy, tmp_path / "copy")
    edit(folder / "drafter", block={"made_for": None, "flags": None, "own_embedding": None, "tap_layers": None})
    edit(folder / "drafter", {"max_position_embeddings": None})
    unknown = {name for name, f in findings_of(folder).items() if f.verdict == "unknown"}
    assert unknown == {"tokenizer", "chat template", "thinking", "positions", "provenance"}
    assert not [f for f in findings_of(folder).values() if f.verdict in ("warning", "error")]


# -- faults that are planted -------------------------------------------------------------------------------------------


NOTHING: Mapping[str, Any] = {}


def edit(folder: Path, config: Mapping[str, Any] = NOTHING, block: Mapping[str, Any] = NOTHING, **tensors: Any) -> None:
    """Change a checkpoint's config, its ``secondguess`` block and its tensors; None takes something out."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    written = json.loads(path.read_text())
    ours = {k: v for k, v in (written.get("secondguess", {}) | dict(block)).items() if v is not None}
    written = {k: v for k, v in (written | {"secondguess": ours} | dict(config)).items() if v is not None}
    path.write_text(json.dumps(written))
    if tensors:
        found = load_file(weights) | tensors
        save_file({k: v.contiguous() for k, v in found.items() if v is not None}, weights)


def tensor(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "drafter" / "model.safetensors")[name]


def settings(**config: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "drafter", config)


def tensors(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Change tensors; ``__`` stands for a dot."""

    def plant(folder: Path) -> None:
        found = {name.replace("__", "."): change for name, change in changes.items()}
        changed: dict[str, Any] = {name: change(tensor(folder, name)) for name, change in found.items()}
        edit(folder / "drafter", **changed)

    return plant


def rewrite(**config: Any) -> Callable[[Path], None]:
    """Another drafter for the target, whose shape differs."""

    def plant(folder: Path) -> None:
        target = load(folder)
        old = tiny_drafter(target)
        table = torch.randn(old.embedding.shape, generator=torch.Generator().manual_seed(0))
        own = config.get("own_embedding", False)
        new = Drafter(replace(old.config, **config), table if own else old.embedding, old.target_ids)
        new.target_embedding = old.target_embedding
        write(new, target, folder)

    return plant


def another_map(folder: Path) -> None:
    """The map made anew from other text, as long as the old one; the head is not."""
    t2d, d2t = tensor(folder, "t2d"), tensor(folder, "d2t")
    ids = (~t2d).nonzero().flatten()[: len(d2t)]
    edit(folder / "drafter", d2t=to_offsets(ids), t2d=torch.zeros_like(t2d).index_fill(0, ids, True))


def lost_map(folder: Path) -> None:
    """The map of a tool that takes the first tokens of the vocabulary for the draft vocabulary."""
    d2t, t2d = tensor(folder, "d2t"), tensor(folder, "t2d")
    edit(folder / "drafter", d2t=torch.zeros_like(d2t), t2d=torch.arange(len(t2d)) < len(d2t))
    edit(folder / "drafter", block={"draft_vocab": None})


def templated(template: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        byte_tokenizer(template).save_pretrained(folder / "target")

    return plant


def other_tokenizer(folder: Path) -> None:
    path = folder / "target" / "tokenizer.json"
    written = json.loads(path.read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(written))


def scaled_target(kind: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / "target" / "config.json"
        written = json.loads(path.read_text())
        written["rope_parameters"] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
        path.write_text(json.dumps(written))

    return plant


def block(**ours: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "drafter", block=ours)


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    """One after the other."""

    def plant(folder: Path) -> None:
        for each in plants:
            each(folder)

    return plant


def fine_tuned(folder: Path) -> None:
    path = folder / "target" / "model.safetensors"
    found = load_file(path)
    found["model.layers.3.mlp.up_proj.weight"] *= 1.01
    save_file(found, path, metadata={"format": "pt"})


def stranger(folder: Path) -> None:
    shutil.rmtree(folder / "target")
    other = tiny_target("llama", 7, vocab_size=257)
    other.model.save_pretrained(folder / "target")
    byte_tokenizer(CHATML).save_pretrained(folder / "target")


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "drafter" / name).unlink()


THETA = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}
TAPS = "eagle_aux_hidden_state_layer_ids"

# Kind and number of the fault in the list of field faults, how it is planted, the line that tells of it, what it says.
FAULTS = {
    "CFG 2: norm_output flipped by a tool": (settings(norm_output=False), "checkpoint", "norm_output must be true"),
    "CFG 3: fc_norm lost by a tool": (settings(fc_norm=None), "checkpoint", "fc_norm must be true"),
    "CFG 4: norm_before_fc gained": (settings(norm_before_fc=True), "checkpoint", "norm_before_fc must be false"),
    "CFG 2: trained without norm_output": (rewrite(norm_output=False), "norms", "known to lose norm_output"),
    "CFG 50: quantised": (settings(quantization_config={"bits": 8}), "checkpoint", "quantization_config must be null"),
    "CFG 1: another algorithm": (settings(architectures=["LlamaForCausalLMEagle"]), "checkpoint", "architectures"),
    "CFG 5: no block of ours": (settings(secondguess=None), "checkpoint", "'secondguess import'"),
    "VOCAB 6: no map": (tensors(d2t=lambda t: None, t2d=lambda t: None), "checkpoint", "d2t or t2d is missing"),
    "VOCAB 7: ids for offsets": (tensors(d2t=lambda t: t + torch.arange(len(t))), "checkpoint", "holds token ids"),
    "VOCAB 8: the first tokens": (lost_map, "vocabulary", "are the first of the target's"),
    "VOCAB 9: another map": (another_map, "checkpoint", "not the one that the head was trained with"),
    "VOCAB 10: larger than the target's": (settings(draft_vocab_size=300), "checkpoint", "larger than vocab_size"),
    "VOCAB: another tokenizer": (other_tokenizer, "tokenizer", "another tokenizer than at training"),
    "VOCAB 8: few answers covered": (
        block(training={"vocabulary_coverage": 0.31}),
        "vocabulary",
        "31.0% of its training answers",
    ),
    "LOAD 11: a random embedding": (rewrite(own_embedding=True), "embeddings", "nothing like the target's"),
    "LOAD 12: tied": (settings(tie_word_embeddings=True), "checkpoint", "tie_word_embeddings must be false"),
    "LOAD 12: a head of another size": (tensors(lm_head__weight=lambda t: t[:-1]), "checkpoint", "expected (128, 32)"),
    "LOAD: a size that no tensor has": (
        settings(num_attention_heads=2**19, num_key_value_heads=2**19, head_dim=2**19),
        "checkpoint",
        "expected (274877906944, 64)",
    ),
    "LOAD: a size that no machine has": (settings(intermediate_size=10**30), "checkpoint", "above 524288"),
    "LOAD 13: another target": (stranger, "checkpoint", "not for this target (hash of the token embedding"),
    "LOAD 14: another width": (settings(hidden_size=48), "checkpoint", "needs an embedding of its own"),
    "LOAD: a tensor is missing": (tensors(norm__weight=lambda t: None), "checkpoint", "norm.weight"),
    "LOAD: one too many": (lambda f: edit(f / "drafter", extra=torch.ones(1)), "checkpoint", "unknown tensors: extra"),
    "LOAD: not a number": (tensors(fc__weight=lambda t: t * float("nan")), "checkpoint", "not finite"),
    "LOAD 50: whole numbers": (tensors(fc__weight=lambda t: t.to(torch.int8)), "checkpoint", "fc.weight is torch.int8"),
    "LOAD: no self-query": (removed("reconsider/query.safetensors"), "checkpoint", "incomplete"),
    "IDX 15: four layers": (settings(**{TAPS: [2, 4, 5, 7]}), "checkpoint", "must be [2, 4, 5], got [2, 4, 5, 7]"),
    "IDX 16: outputs for inputs": (settings(**{TAPS: [1, 3, 4]}), "checkpoint", "other taps"),
    "IDX 17: off by one": (settings(eagle_config={TAPS: [3, 5, 6]}), "checkpoint", "other taps"),
    "ROPE 20: one base of two": (settings(rope_theta=500000.0), "checkpoint", "do not have the rope_theta 500000"),
    "ROPE 20: another base, by a tool": (settings(**THETA), "checkpoint", "rope_parameters must be"),
    "ROPE 21: another base": (rewrite(rope_theta=1e6), "rope", "base 1e+06, the target's is 10000"),
    "ROPE 22: a tool lost the scaling": (
        both(rewrite(rope_scaling=LINEAR), settings(rope_parameters=None)),
        "checkpoint",
        "rope_parameters must be",
    ),
    "ROPE 22: the target is scaled since": (scaled_target("linear"), "rope", "at training it had"),
    "ROPE 22: another factor": (
        both(rewrite(rope_scaling=LINEAR), scaled_target("linear"), block(made_for=None)),
        "rope",
        "linear by 4, the target's is linear by 2",
    ),
    "ROPE 23: scaling was lost": (
        both(scaled_target("linear"), block(made_for=None)),
        "rope",
        "default, the target's is linear",
    ),
    "ROPE 23: a yarn target": (
        both(scaled_target("yarn"), block(made_for=None)),
        "rope",
        "default, the target's is yarn",
    ),
    "ROPE 23: scaling of another kind": (settings(**YARN), "checkpoint", "are not supported: plain RoPE, or linear"),
    "LEN 24: short": (settings(max_position_embeddings=64), "positions", "made for 64, the target takes 1024"),
    "LEN 24: no length": (settings(max_position_embeddings=0), "checkpoint", "a whole number above 0"),
    "LEN 26: on short texts": (
        block(training={"trained_length": 100}),
        "positions",
        "trained on texts of up to 100 tokens, here they may have 1024",
    ),
    "LEN 26: a window": (settings(sliding_window=512), "checkpoint", "sliding_window must be null"),
    "DATA 27: another template": (templated(CHAT), "chat template", "another chat template"),
    "DATA 28: thinking off": (
        templated(CHATML.replace("<|assistant|>", "<|assistant|><think>\n\n</think>\n")),
        "thinking",
        "off, it was left to the model",
    ),
    "DATA 27: prompts of another template": (
        block(training={"strange_prompts": 0.4}),
        "chat template",
        "40% of its training's prompts do not end with '<|assistant|>': another chat template or thinking mode",
    ),
    "DATA 28: prompts of another mode": (block(training={"strange_prompts": 1.0}), "thinking", "not known: 100%"),
    "DATA 29: a fine-tune": (fine_tuned, "provenance", "another target weights"),
    "DATA 29: others' answers": (block(training={"surprise": 0.8}), "provenance", "nats a token: not its own"),
}


@pytest.mark.parametrize(("plant", "name", "said"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_named(healthy, tmp_path, plant, name: str, said: str) -> None:
    folder = shutil.copytree(healthy, tmp_path / "copy")
    plant(folder)
    found = findings_of(folder)[name]
    assert found.verdict == ("error" if name == "checkpoint" else "warning")
    assert said in found.found
    assert found.fix


@pytest.mark.parametrize(
    ("fault", "told", "untold"),
    [
        ("CFG 5: no block of ours", set(), {"tokenizer", "provenance", "norms"}),
        ("CFG 2: norm_output flipped by a tool", {"tokenizer", "chat template", "thinking", "provenance"}, {"norms"}),
        ("LOAD 13: another target", {"tokenizer", "norms", "rope", "positions"}, {"hidden sizes", "embeddings"}),
        ("LOAD: a tensor is missing", {"hidden sizes", "tapped layers", "norms", "rope"}, {"vocabulary", "dtype"}),
    ],
)
def test_what_can_be_told_of_a_drafter_that_does_not_load_is_told(
    healthy, tmp_path, fault: str, told: set[str], untold: set[str]
) -> None:
    folder = shutil.copytree(healthy, tmp_path / "copy")
    FAULTS[fault][0](folder)
    findings = findings_of(folder)
    assert list(findings) == ["checkpoint", *CHECKS]
    assert all(findings[name].verdict in ("ok", "warning") for name in told)
    assert {findings[name].verdict for name in untold} == {"unknown"}


def test_a_folder_without_settings_is_an_error(healthy, tmp_path) -> None:
    folder = shutil.copytree(healthy, tmp_path / "copy")
    (folder / "drafter" / "config.json").write_text("{")
    assert "is not JSON" in findings_of(folder)["checkpoint"].found
    assert "does not fit" in conclusion(list(findings_of(folder).values()))


def test_loading_warns_once_and_names_what(healthy, tmp_path, caplog) -> None:
    LLM(load(healthy), healthy / "drafter")
    assert not [r for r in caplog.records if r.name.startswith("secondguess")]
    folder = shutil.copytree(healthy, tmp_path / "copy")
    edit(folder / "drafter", THETA, block={"rope": None})  # of before the block held it
    templated(CHAT)(folder)
    LLM(load(folder), folder / "drafter")
    (record,) = [r for r in caplog.records if r.name.startswith("secondguess")]
    assert record.levelname == "WARNING"
    for part in ("'secondguess doctor'", "rope: base 1e+06", "chat template: another"):
        assert part in record.getMessage()


def test_long_texts_are_warned_of_where_they_are_served(healthy, tmp_path, caplog) -> None:
    folder = shutil.copytree(healthy, tmp_path / "copy")
    edit(folder / "drafter", block={"training": {"trained_length": 40}})
    LLM(load(folder), folder / "drafter", max_model_len=200)
    assert not caplog.text
    LLM(load(folder), folder / "drafter", max_model_len=1000)
    assert "positions: trained on texts of up to 40 tokens" in caplog.text


# -- facts -------------------------------------------------------------------------------------------------------------


def test_weights_are_known_in_any_dtype_but_not_after_training() -> None:
    model = tiny_target("llama").model.float()
    known = weights_fingerprint(model)
    assert weights_fingerprint(model.double()) == weights_fingerprint(model.bfloat16()) == known
    model.model.layers[3].self_attn.q_proj.weight *= 1.01
    assert weights_fingerprint(model) != known


def test_facts_of_a_target(healthy) -> None:
    facts = load(healthy).facts
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.thinking == "left to the model"
    assert facts.dtype == "float32"
    assert (facts.max_positions, facts.tied_embeddings) == (1024, True)
    assert TargetFacts(answer_start="<think>\n").thinking == "on"
    assert TargetFacts().thinking is None


def test_the_start_of_an_answer_is_what_the_template_adds() -> None:
    assert answer_start(byte_tokenizer(CHATML)) == "<|assistant|>"
    assert answer_start(byte_tokenizer(CHAT)) == ""


# -- the probe ---------------------------------------------------------------------------------------------------------


def successor(tokens: int = 257, width: int = 272) -> tuple[HFTarget, Drafter]:
    """A target that continues every token with the next one, and a drafter that knows the first guess of each cycle.

    Attention and MLP of both add nothing, so a state says which token it stands at, and the head does the counting.
    """
    model = tiny_target("llama", vocab_size=tokens, hidden_size=width, num_layers=7, tie=False).model
    eye = torch.eye(tokens, width, dtype=torch.float64)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        weights["model.embed_tokens.weight"].copy_(eye)
        weights["lm_head.weight"].copy_(eye.roll(1, 0))  # row y is at token y - 1
    target = HFTarget(model, byte_tokenizer(CHAT))
    old = tiny_drafter(target, reconsideration=False)
    ids = torch.arange(1, tokens)
    drafter = Drafter(replace(old.config, draft_vocab_size=len(ids)), target.embedding, ids).double()
    for weight in drafter.parameters():
        weight.requires_grad_(False)
        if weight.dim() > 1:
            weight.zero_()
    drafter.fc.weight[:, :width].copy_(torch.eye(width))
    drafter.lm_head.weight.copy_(eye.roll(2, 0)[1:])  # from the state at token y - 2
    return target, drafter


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> tuple[HFTarget, Drafter]:
    return successor()


def tau_of(target: HFTarget, drafter: Drafter) -> float | None:
    tree = TreeConfig(num_reconsider=0, budget=8)
    return acceptance_length(open_probe(target, tree, 16, CONSOLE).replay(drafter))


def test_the_probe_tells_a_drafter_that_works_from_one_whose_head_was_shifted(counting, tmp_path, monkeypatch) -> None:
    """Field fault 9 again: nothing in the checkpoint tells of it, only the guesses do."""
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path))
    target, drafter = counting
    tau = tau_of(target, drafter)
    assert tau is not None
    assert tau > 1.9
    drafter.lm_head.weight.copy_(drafter.lm_head.weight.roll(5, 0))
    stuck = judge(tau_of(target, drafter), 8, None)
    assert stuck.verdict == "error"
    assert "guesses next to nothing right" in stuck.found


@pytest.mark.parametrize(
    ("tau", "known", "verdict"),
    [
        (None, None, "unknown"),
        (1.0, None, "error"),
        (1.04, 1.04, "error"),
        (1.2, None, "warning"),
        (1.2, 1.25, "ok"),
        (2.0, None, "ok"),
        (2.0, 2.1, "ok"),
        (2.0, 2.5, "warning"),
    ],
)
def test_verdicts_on_an_acceptance_length(tau, known, verdict) -> None:
    assert judge(tau, 24, known).verdict == verdict


@pytest.mark.parametrize(
    ("tau", "known", "kept"),
    [(2.0, None, 2.0), (1.2, None, 1.2), (1.0, None, None), (2.4, 2.5, 2.4), (2.0, 2.5, 2.5), (1.0, 2.5, 2.5)],
)
def test_a_bad_number_is_not_kept_in_place_of_a_good_one(healthy, tmp_path, tau, known, kept) -> None:
    folder = shutil.copytree(healthy / "drafter", tmp_path / "drafter")
    edit(folder, block={"probe": known and {"acceptance_length": known}})
    finding = record(folder, {"acceptance_length": tau}, judge(tau, 24, known), known)
    block = json.loads((folder / "config.json").read_text())["secondguess"]
    assert block.get("probe", {}).get("acceptance_length") == kept
    assert ("not recorded" in finding.found) == (kept != tau)
    assert ("the checkpoint keeps 2.50" in finding.found) == (kept == 2.5)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(healthy, tmp_path, monkeypatch) -> Callable[..., int]:
    shutil.copytree(healthy, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    return lambda *flags: main(["doctor", "target", "drafter", "--max-new-tokens", "4", *flags])


def test_doctor_prints_a_line_for_each_check(command, capsys) -> None:
    assert command("--no-probe", "--json", "found.json") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CHECKS)
    assert "the drafter fits" in out
    results = json.loads(Path("found.json").read_text())["results"]
    assert [row["name"] for row in results] == ["checkpoint", *CHECKS]
    assert {row["verdict"] for row in results} == {"ok"}


def test_an_error_is_exit_1_and_a_warning_is_not(command, capsys) -> None:
    edit(Path("drafter"), {"max_position_embeddings": 64})
    assert command("--no-probe") == 0
    assert "may not fit: 1 warning" in capsys.readouterr().out
    edit(Path("drafter"), {"norm_output": False})
    assert command() == 1
    out = capsys.readouterr().out
    assert "norm_output must be true" in " ".join(out.split())
    assert "does not fit" in out


def test_recording_an_acceptance_length_keeps_the_checkpoint_loadable(command, monkeypatch) -> None:
    monkeypatch.setattr(doctor_run, "STUCK", 0.0)  # a random drafter is never right
    command("--record", "--json", "first.json")
    probe = json.loads(Path("drafter/config.json").read_text())["secondguess"]["probe"]
    assert probe["method"] == "pr"
    assert probe["budget"] == 24
    assert 1 <= probe["acceptance_length"] < 5
    command("--json", "second.json")
    last = json.loads(Path("second.json").read_text())["results"][-1]
    assert last["name"] == "acceptance"
    assert f"{probe['acceptance_length']:.2f} when it was recorded" in last["found"]
    run(load_for, Path("drafter"), load(Path()))


def test_of_a_number_that_is_not_compared_it_says_so(command) -> None:
    card = {"acceptance_length": 2.21, "method": "pr", "budget": 24, "max_new_tokens": 32}
    edit(Path("drafter"), block={"probe": card})
    command("--budget", "8", "--max-new-tokens", "32", "--json", "found.json")
    last = json.loads(Path("found.json").read_text())["results"][-1]
    assert last["found"].endswith(" (the card's 2.21 was at budget 24: not compared)")
    assert elsewhere(card, {"method": "eagle3.1", "budget": 24, "max_new_tokens": 4}).endswith(
        "was at method pr, max_new_tokens 32: not compared)"
    )
    assert elsewhere(card, dict(list(card.items())[1:])) == elsewhere({}, {"budget": 24}) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--record", "--no-probe"], "leave out --no-probe"),
        (["--budget", "0"], "budget must be at least 1"),
        (["--max-new-tokens", "0"], "max_tokens must be at least 1"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(command, flags, said, capsys) -> None:
    assert command(*flags) == 2
    assert said in capsys.readouterr().err


def test_a_drafter_that_is_not_there_is_bad_usage(command, capsys) -> None:
    assert main(["doctor", "target", "nowhere"]) == 2
    assert "no such folder" in capsys.readouterr().err
