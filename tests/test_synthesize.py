"""Prompts that the target writes itself: where a user's turn begins in any template, what is refused, what is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from secondguess.cli import main
from secondguess.errors import UserError
from secondguess.prepare.answerer import Question, Reply
from secondguess.prepare.chat import Chat
from secondguess.prepare.overlap import Index
from secondguess.prepare.synthesize import (
    LONGEST,
    PATIENCE,
    TEMPERATURE,
    TOP_P,
    PromptFile,
    Synthesis,
    is_plain,
    normalised,
    synthesize,
)
from secondguess.prepare.template import UserTurn, user_turn, user_turns
from secondguess.testing import tiny_target
from tiny_folder import END, byte_tokenizer

OWN = "{% if messages[0]['role'] != 'system' %}Be good.<end>{% endif %}"


def loop(message: str) -> str:
    return "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def chat(template: str, end_ids: frozenset[int] = frozenset({0})) -> Chat:
    return Chat(byte_tokenizer(template), 1024, end_ids)


def decoded(c: Chat, turn: UserTurn) -> str:
    return str(c.tokenizer.decode(list(turn.prompt_ids)))


@pytest.mark.parametrize(
    ("template", "before", "stop"),
    [
        (loop("{{ m['role'] }}:{{ m['content'] }}<end>"), "user:", ()),
        (loop("{{ m['role'] }}:{{ m['content'] | trim }}\n<end>"), "user:", ()),
        (loop("[INST] {{ m['content'] }} [/INST]"), "[INST] ", ("[/INST]",)),
        (loop("Q {{ m['content'] }}\n"), "Q ", ("A:",)),
        ("Q {% for m in messages %}{{ m['content'] }}{% endfor %}", "Q ", ()),
        (OWN + loop("{{ m['role'] }}:{{ m['content'] }}<end>"), "Be good.<end>user:", ()),
    ],
)
def test_where_a_users_words_begin_and_end(template, before, stop) -> None:
    c = chat(template)
    turn = user_turn(c, None)
    assert decoded(c, turn) == before
    assert (turn.stop, turn.stop_token_ids) == (stop, ())


def test_an_end_that_is_not_the_targets_own_is_told() -> None:
    assert user_turn(chat(loop("U:{{ m['content'] }}<end>"), frozenset({9})), None).stop_token_ids == (0,)


def test_with_and_without_the_templates_own_system_prompt() -> None:
    plain = loop("{{ m['role'] }}:{{ m['content'] }}<end>")
    for template, system, expected in (
        (OWN + plain, None, ["Be good.<end>user:", "system:<end>user:"]),
        (OWN + plain, "Hm.", ["system:Hm.<end>user:"]),
        (plain, None, ["user:"]),  # it has none: an empty one would only be longer
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + plain, None, ["user:"]),
    ):
        c = chat(template)
        assert [decoded(c, turn) for turn in user_turns(c, system)] == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (loop("U:{{ m['content'] | upper }}"), "changes what a user says"),
        (loop("{{ m['content'] }}"), "puts nothing before what a user says"),
    ],
)
def test_templates_that_cannot_be_continued(template, said) -> None:
    with pytest.raises(UserError, match=said):
        user_turn(chat(template), None)


TURNS = (UserTurn(None, (1,), (), ()), UserTurn("", (2,), (), ()))
QUESTION = "How do bees find their way home?"


def synthesis(seed: int = 0, benchmark: str = "the secret of the benchmark") -> Synthesis:
    return Synthesis(TURNS, seed, f"synthesised/tiny/{seed}/", frozenset({0}), Index([benchmark]))


@pytest.mark.parametrize(
    ("reply", "refusal"),
    [
        (Reply((5, 6, 0), QUESTION, True), None),
        (Reply((5, 6, 0), "\N{GREEK SMALL LETTER PI} \N{CJK UNIFIED IDEOGRAPH-4E00}" * 12, True), None),
        (Reply((5, 6, 7), QUESTION, False), "not ended"),
        (Reply((5, 0, 7, 0), QUESTION, True), "no plain text"),
        (Reply((), "How do bees \N{REPLACEMENT CHARACTER} fly back home?", True), "no plain text"),
        (Reply((), "How do bees \x1b[1m fly back home?", True), "no plain text"),
        (Reply((0,), "", True), "too short"),
        (Reply((), "?!" * 40 + "Why?", True), "too short"),
        (Reply((), "word " * LONGEST, True), "too long"),
        (Reply((), "  what IS the answer, please?\n", True), "doublet"),
        (Reply((), "The secret of -- the benchmark!", True), "benchmark text"),
    ],
)
def test_what_is_refused(reply, refusal) -> None:
    assert synthesis().refusal(reply, {normalised("What is the answer, please")}) == refusal


@given(st.text())
def test_case_space_and_punctuation_make_no_new_prompt(text: str) -> None:
    assert normalised(f" {text}\n?!") == normalised(text)
    assert normalised("Why, THOUGH") == normalised("why though?") != normalised("why thought")
    assert is_plain(text) == all(is_plain(c) for c in text)


class Scripted:
    """Some texts come twice, some do not end, and who is asked first does not finish first."""

    room = 5

    def __init__(self, tell: type[Exception] | None = None) -> None:
        self.asked: list[Question] = []
        self.tell = tell

    async def answer(self, question: Question) -> Reply:
        self.asked.append(question)
        seed = question.params.seed or 0
        await asyncio.sleep(seed % 3 * 0.0005)
        if self.tell and len(self.asked) > 20:
            raise self.tell
        return Reply((5, 0), f"What about topic number {seed % 40}?", ended=seed % 7 > 0)


def written(path: Path, wanted: int, seed: int = 0) -> list[dict]:
    async def run() -> None:
        with PromptFile(path) as file:
            await synthesize(Scripted(), synthesis(seed), file, wanted, lambda refusal: None)

    asyncio.run(run())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_depend_neither_on_who_finishes_first_nor_on_interruptions(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.jsonl", 20)
    assert len({row["turns"][0] for row in whole}) == 20
    assert [row.get("system") for row in whole] == [None if int(row["id"][-1]) % 2 == 0 else "" for row in whole]
    for kept in (0, 1, 13, 20):
        path = tmp_path / f"{kept}.jsonl"
        cut = '{"id": "synthesised/tiny/0/9' if kept < 20 else ""
        path.write_text("".join(json.dumps(row) + "\n" for row in whole[:kept]) + cut)
        assert written(path, 20) == whole
    assert [row["turns"] for row in whole] != [row["turns"] for row in written(tmp_path / "b.jsonl", 20, seed=1)]


def test_an_error_ends_the_draws_that_are_under_way(tmp_path: Path) -> None:
    async def run() -> int:
        with PromptFile(tmp_path / "a.jsonl") as file, pytest.raises(ConnectionError):
            await synthesize(Scripted(ConnectionError), synthesis(), file, 35, lambda refusal: None)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1  # itself


def test_a_target_that_writes_no_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{PATIENCE} draws in a row were no prompts, the last one"):
        written(tmp_path / "a.jsonl", 41)  # there are 40 texts


TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}system helpful word1 <end> {% endif %}"
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A random target that writes words, and ends a text after a few of them."""
    target = tiny_target("llama", vocab_size=257)
    target.model.generation_config.eos_token_id = [0, *range(190, 257)]
    target.model.save_pretrained(tmp_path / "target")
    words = ["unknown", "user", "assistant", "system", "helpful", *(f"word{i}" for i in range(251))]
    tokenizer = Tokenizer(models.WordLevel({END: 0} | {w: i for i, w in enumerate(words, 1)}, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
    fast.save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    flags = ("--synthesize", "6", "--max-new-tokens", "12", "--batch-size", "3", "--temperature", "1")
    return lambda out, *more: main(["prepare", "target", "--out", out, *flags, *more])


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_prompts_are_written_and_answered_in_one_run(prepare, capsys) -> None:
    assert prepare("answers.jsonl") == 0
    assert "prompts drawn: " in capsys.readouterr().err
    prompts = rows("answers.prompts.jsonl")
    assert len(prompts) == 6
    answers = {row["id"]: row for row in rows("answers.jsonl")}
    assert set(answers) == {row["id"] for row in prompts}
    tokenizer = PreTrainedTokenizerFast.from_pretrained("target")
    for row in prompts:
        system = [{"role": "system", "content": row["system"]}] if "system" in row else []
        messages = [*system, {"role": "user", "content": row["turns"][0]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer = answers[row["id"]]
        assert answer["input_ids"][: answer["prompt_len"]] == tokenizer.encode(text, add_special_tokens=False)
        assert answer["source"] == "synthesised"
    assert prepare("again.jsonl", "--batch-size", "1") == 0
    assert rows("again.prompts.jsonl") == prompts
    lines = Path("answers.prompts.jsonl").read_text().splitlines(keepends=True)
    Path("again.prompts.jsonl").write_text("".join(lines[:2]))
    assert prepare("again.jsonl") == 0
    assert rows("again.prompts.jsonl") == prompts


def test_benchmark_text_is_not_synthesised(prepare) -> None:
    assert prepare("answers.jsonl") == 0
    first, *others = rows("answers.prompts.jsonl")
    Path("task.jsonl").write_text(json.dumps({"id": "t", "turns": first["turns"]}) + "\n")
    assert prepare("clean.jsonl", "--refuse-overlap", "task.jsonl") == 0
    clean = rows("clean.prompts.jsonl")
    assert clean[:5] == others
    assert clean[5]["turns"] != first["turns"]


def test_the_help_says_how_prompts_are_drawn(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "--help"])
    # Lines end after the hyphen, too.
    assert f"(temperature{TEMPERATURE:g},top-p{TOP_P:g})" in "".join(capsys.readouterr().out.split())
