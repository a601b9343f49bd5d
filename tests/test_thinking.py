"""Thinking modes and chat templates, from the data to the service: who serves another than was trained is told."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from secondguess.bench.signed import unsigned
from secondguess.capture.source import Live
from secondguess.cli import main
from secondguess.drafter.checkpoint import open_checkpoint, save_drafter
from secondguess.drafter.checks import examine
from secondguess.errors import UserError
from secondguess.llm import LLM
from secondguess.prompts import ends_with
from secondguess.server.asks import chat_requests
from secondguess.server.protocol import ChatBody
from secondguess.target.facts import served_with
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_drafter
from secondguess.train.data import Response, read_responses
from secondguess.train.origin import origin_of
from secondguess.train.trainer import Trainer
from tiny_folder import byte_tokenizer, save_tiny
from tiny_run import tiny_config

THOUGHT = "<think>\n\n</think>\n\n"
SWITCH = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    f"{{% if message['role'] == 'assistant' %}}{THOUGHT}{{% endif %}}{{{{ message['content'] }}}}\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>"
    f"{{% if enable_thinking is defined and not enable_thinking %}}{THOUGHT}{{% endif %}}{{% endif %}}"
)
OFF: dict[str, Any] = {"enable_thinking": False}
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a ``target`` whose template has a switch."""
    save_tiny(tmp_path)
    byte_tokenizer(SWITCH).save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def target(here: Path) -> HFTarget:
    return load_target("target")


def rows_of(target: HFTarget, prompt: str, count: int, variables: str = "{}") -> list[Response]:
    ids = target.tokenizer.encode(prompt, add_special_tokens=False)
    answers = [tuple(7 * i + j for j in range(1, 9)) for i in range(count)]
    return [Response(f"{prompt}{i}", (*ids, *answers[i]), len(ids), None, variables) for i in range(count)]


def test_a_switch_that_answers_were_made_with_is_known_to_the_doctor(here: Path, capsys) -> None:
    Path("prompts.txt").write_text("".join(f"Say {i}.\n" for i in range(24)))
    switch = ["--template-variable", "enable_thinking=false"]
    assert main(["prepare", "target", "prompts.txt", "--out", "answers.jsonl", "--max-new-tokens", "16", *switch]) == 0
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert all(row["template_variables"] == OFF for row in rows)
    settings = ["draft_vocab_size=64", "unroll_steps=2", "epochs=1", "batch_size=2", "held_out=0.3", "eval_responses=2"]
    assert main(["train", "target=target", "responses=answers.jsonl", "out=run", *settings]) == 0
    assert "do not end with" not in capsys.readouterr().err
    training = json.loads(Path("run/drafter/config.json").read_text())["secondguess"]["training"]
    assert training["template_variables"] == OFF
    assert training["strange_prompts"] == 0
    assert training["trained_length"] <= max(len(row["input_ids"]) for row in rows)

    def thinking(*flags: str) -> dict[str, str]:
        main(["doctor", "target", "run/drafter", "--no-probe", "--json", "found.json", *flags])
        return {f["name"]: f for f in json.loads(Path("found.json").read_text())["results"]}["thinking"]

    default = thinking()
    assert default["verdict"] == "warning"
    assert "left to the model, it was off" in default["found"]
    assert 'chat_template_kwargs {"enable_thinking": false}' in default["fix"]
    assert thinking(*switch)["verdict"] == "ok"


def test_the_probe_asks_in_the_mode_that_is_served(here: Path) -> None:
    save_drafter(tiny_drafter(load_target("target")), Path("drafter"), {})
    switch = ["--template-variable", "enable_thinking=false"]
    assert main(["doctor", "target", "drafter", "--max-new-tokens", "4", *switch]) in (0, 1)
    (texts,) = Path("cache").rglob("texts.jsonl")
    prompts = [unsigned(line)["prompt_ids"] for line in texts.read_bytes().splitlines()]
    assert all(ends_with(byte_tokenizer(), prompt, f"<|assistant|>{THOUGHT}") for prompt in prompts)
    assert len(prompts) == 20


def test_answers_of_the_other_mode_are_warned_of_for_good(target: HFTarget, tmp_path: Path) -> None:
    """Made by a tool that does not say which mode it was."""
    responses = rows_of(target, f"<|user|>Hi\n<|assistant|>{THOUGHT}", 24)
    config, source = tiny_config(tmp_path / "run", epochs=1), Live(target, [r.input_ids for r in responses])
    run = Trainer(config, target, responses, source)
    run.run()
    checkpoint = open_checkpoint(run.folder.drafter, target)
    assert checkpoint.drafter.answer_start is None
    findings = {f.name: f for f in examine(checkpoint, target.facts, target.embedding)}
    for name in ("thinking", "chat template"):
        assert findings[name].verdict == "warning"
        assert "100% of its training's prompts do not end with '<|assistant|>'" in findings[name].found


def test_the_mode_of_most_answers_counts(target: HFTarget) -> None:
    off = rows_of(target, f"<|assistant|>{THOUGHT}", 3, json.dumps(OFF))
    origin = origin_of([*off, *rows_of(target, "<|assistant|>", 1)], target)
    assert origin.variables == OFF
    assert origin.facts.thinking == "off"
    assert origin.notes["strange_prompts"] == 0.25
    assert origin_of(off[:1], target).length == len(off[0].input_ids)


def test_rows_say_what_the_template_was_given(tmp_path: Path) -> None:
    row = {"id": "1", "prompt_len": 1, "input_ids": [1, 2, 3]}
    (tmp_path / "r.jsonl").write_text(json.dumps(row | {"template_variables": OFF}) + "\n" + json.dumps(row) + "\n")
    assert [r.variables for r in read_responses(tmp_path / "r.jsonl", 64)] == ['{"enable_thinking": false}', "{}"]
    (tmp_path / "r.jsonl").write_text(json.dumps(row | {"template_variables": [1]}))
    with pytest.raises(UserError, match="template_variables must be an object"):
        read_responses(tmp_path / "r.jsonl", 64)


def test_a_server_tells_once_of_requests_in_another_mode(target: HFTarget, tmp_path: Path, caplog) -> None:
    made_for = asdict(served_with(target.facts, target.tokenizer, OFF))
    save_drafter(tiny_drafter(target), tmp_path / "drafter", {"made_for": made_for})
    llm = LLM(target, tmp_path / "drafter")
    assert "thinking: another thinking mode than at training" in caplog.text
    caplog.clear()
    caplog.set_level(logging.WARNING)

    def ask(**variables: Any) -> None:
        body = {"messages": QUESTION, "max_tokens": 4, "chat_template_kwargs": variables}
        chat_requests(llm, ChatBody.model_validate(body))

    ask(enable_thinking=False)
    llm.encode("Hi")
    assert not caplog.records
    ask()
    ask(enable_thinking=True)
    (record,) = caplog.records
    assert repr(f"<|assistant|>{THOUGHT}") in record.getMessage()
    assert "another chat template or thinking mode" in record.getMessage()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("enable_thinking", "must be NAME=VALUE, got 'enable_thinking'"),
        ("enable_thinkin=false", "has no variable 'enable_thinkin'"),
        ("tokenize=true", "'tokenize' is no variable"),
    ],
)
def test_a_variable_that_changes_nothing_is_refused(here: Path, capsys, given: str, said: str) -> None:
    Path("prompts.txt").write_text("Say 1.\n")
    for command in (["prepare", "target", "prompts.txt", "--out", "a.jsonl"], ["doctor", "target", "drafters/pr"]):
        assert main([*command, "--template-variable", given]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
