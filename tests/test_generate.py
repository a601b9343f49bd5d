"""``generate`` and ``demo`` on a tiny target, and every mistake one can make on the way."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from secondguess import LLM, SamplingParams, TreeConfig
from secondguess.cli import main
from secondguess.commands import compare, demo
from secondguess.commands.compare import prompt_ids
from secondguess.target.load import load_target
from tiny_folder import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def generate(tiny: Path, *more: str) -> list[dict]:
    """Run the command on the tiny target and read its results back."""
    path = tiny / "out.json"
    assert main(["generate", str(tiny / "target"), *more, "--json", str(path)]) == 0
    return json.loads(path.read_text())["results"]


def drafted(tiny: Path, *more: str) -> list[dict]:
    methods = ["--method=ar,ngram,eagle3.1,pr", f"--drafter={tiny}/drafters/pr", "--budget=5", "--num-steps=3"]
    return generate(tiny, *more, *methods, "--max-new-tokens=12", "--ignore-eos")


def test_every_method_writes_the_same_tokens(tiny: Path, capsys) -> None:
    results = drafted(tiny, "one", "two")
    assert [(r["prompt"], r["method"]) for r in results] == [
        (prompt, method) for prompt in ("one", "two") for method in ("ar", "ngram", "eagle3.1", "pr")
    ]
    for prompt in ("one", "two"):
        answers = [r for r in results if r["prompt"] == prompt]
        assert len({tuple(r["token_ids"]) for r in answers}) == 1
        assert len({r["text"] for r in answers}) == 1
    out = capsys.readouterr().out
    assert out.count("identical") == 2
    assert "NO" not in out


def test_results_are_those_of_the_library(tiny: Path) -> None:
    (result,) = generate(tiny, "one", "--method=ar", "--max-tokens=9", "--temperature=1", "--seed=5", "--raw")
    target = load_target(str(tiny / "target"))
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=5)
    (output,) = LLM(target, method="ar", max_batch_size=1).generate("one", params)
    assert result["token_ids"] == list(output.token_ids)
    assert (result["text"], result["finish_reason"], result["seed"]) == (output.text, output.finish_reason, 5)
    assert set(result) == {"method", "prompt", "text", "token_ids", "finish_reason", "seed", "stats"}
    stats = result["stats"]
    assert stats["num_tokens"] == len(output.token_ids) - 1
    assert stats["acceptance_length"] == 1
    seconds = sum(stats[f"{part}_s"] for part in ("draft", "verify", "walk", "rest"))
    assert stats["tokens_per_second"] == pytest.approx(stats["num_tokens"] / seconds)


def test_a_drawn_seed_is_shared_by_the_methods_of_a_prompt_and_repeats_its_text(tiny: Path, capsys) -> None:
    results = drafted(tiny, "one", "two", "--temperature", "1")
    one, two = ({r["seed"] for r in results if r["prompt"] == p} for p in ("one", "two"))
    assert len(one) == len(two) == 1
    assert one != two
    assert f"seed {min(one)}" in capsys.readouterr().out
    again = drafted(tiny, "one", "--temperature", "1", "--seed", str(min(one)))
    assert again[0]["token_ids"] == results[0]["token_ids"]
    assert len({tuple(r["token_ids"]) for r in again}) == 1


def test_the_answer_is_printed_as_it_is(tiny: Path, capsys) -> None:
    whole, cut = (generate(tiny, "one", "--method=ar", "--max-new-tokens=40", *stop)[0] for stop in ([], ["--stop=z"]))
    assert cut["text"] == whole["text"].partition("z")[0] != whole["text"]
    answers = capsys.readouterr().out.split("tokens/s  level")
    # rich drops a few control characters from what it shows.
    assert all(Text(r["text"]).plain in out for r, out in zip((whole, cut), answers, strict=False))


def test_chat_template_unless_raw(tiny: Path) -> None:
    target = load_target(str(tiny / "target"))
    assert prompt_ids(target, "ab") == prompt_ids(target, "ab\n", raw=True)
    assert prompt_ids(target, "ab", raw=True) == target.tokenizer.encode("ab")


def test_a_prompt_from_standard_input(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    (result,) = generate(tiny, "-", "--method=ar", "--max-new-tokens=2")
    assert result["prompt"] == "two\nlines"


def test_standard_input_must_be_text(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
    assert main(["generate", str(tiny / "target"), "-", "--method=ar"]) == 2
    assert "standard input is not UTF-8 text" in capsys.readouterr().err


def test_the_tree_is_drawn_for_methods_with_a_drafter(tiny: Path, capsys) -> None:
    drafted(tiny, "one", "--show-tree")
    trees = capsys.readouterr().out.split("last draft tree")[1:]
    assert len(trees) == 2
    for tree in trees:
        assert sum("% 0" in line or "% R" in line for line in tree.splitlines()) == 5
        assert tree.count("' bonus") == 1


def test_a_longer_context_than_needed_is_not_allocated(tiny: Path) -> None:
    target = load_target(str(tiny / "target"))
    llms = compare.make_llms(target, ["ar"], TreeConfig(), 40)
    assert llms["ar"].max_model_len == 40


LONG = "x" * 2000
USAGE = [
    (["no-such-folder", "hi"], "no such target: 'no-such-folder'"),
    (["{tiny}/random.gguf", "hi"], "not a GGUF file"),
    (["{tiny}/magic.gguf", "hi"], "as a GGUF model"),
    (["{tiny}/missing.gguf", "hi"], "missing.gguf"),
    (["{target}", "hi", "--drafter", "{tiny}/drafters/other"], "was trained for another, not for this target"),
    (["{target}", "hi", "--drafter", "nope"], "no drafter 'nope'"),
    (["{target}", "hi", "--drafter", "{target}"], "not a secondguess drafter"),
    (["{target}", "hi", "--method", "pr", "--drafter", "{tiny}/drafters/eagle3.1"], "has no self-query"),
    (["{target}", "hi", "--method", "ar", "--drafter", "{tiny}/drafters/pr"], "--drafter needs one of the methods"),
    (["{target}", "hi", "--method", "ngram", "--show-tree"], "--show-tree needs one of the methods"),
    (["{target}", "hi", "--method", "ar", "--budget", "5"], "--budget needs one of the methods ngram, eagle3.1, pr"),
    (["{target}", "hi", "--method", "ngram", "--num-reconsider", "0"], "--num-reconsider needs one of the methods pr"),
    (["{target}", ""], "a prompt is empty"),
    (["{target}", "half \ud800", "--method", "ar"], "is no Unicode text at character 5"),
    (["x" * 300, "hi"], "File name too long"),
    (["{target}", LONG, "--method", "ar"], "a prompt has 2001 tokens, the context holds 1024"),
    (["{target}", "hi", "--temperature", "-1"], "temperature must be 0 or more, got -1.0"),
    (["{target}", "hi", "--temperature", "nan"], "temperature must be 0 or more, got nan"),
    (["{target}", "hi", "--budget", "0"], "budget must be at least 1, got 0"),
    (["{target}", "hi", "--method", "pr:budget=0"], "budget must be at least 1, got 0"),
    (["{target}", "hi", "--budget", "1025"], "budget must be at most 1024, got 1025"),
    (["{target}", "hi", "--num-steps", "65"], "num_steps must be at most 64, got 65"),
    (["{target}", "hi", "--num-reconsider", "257"], "num_reconsider must be at most 256, got 257"),
    (["{target}", "hi", "--num-steps=64", "--grow-width=256", "--offer-width=256"], "must be below 2^20: lower one"),
    (["{target}", "hi", "--method", "pr:k=200", "--drafter", "{tiny}/drafters/pr"], "offer_width must be at most 128"),
    (["{target}", "hi", "--method", "ar:budget=3"], "ar does not use budget, only ngram, eagle3.1, pr, hass, hass+pr"),
    (["{target}", "hi", "--method", "eagle3.1:m=0"], "eagle3.1 does not use num_reconsider, only pr, hass+pr do"),
    (["{target}", "hi", "--max-new-tokens", "0"], "max_tokens must be at least 1, got 0"),
    (["{target}", "hi", "--seed", "-3"], "seed must be in [0, 2^63), got -3"),
    (["{target}", "hi", "--budgets", "3"], "unknown flag --budgets; did you mean --budget?"),
    (["{target}", "hi", "--method", "eagle"], "unknown method 'eagle'"),
    (["{target}", "hi", "--method", "ar,"], "unknown method ''"),
    (["{target}", "hi", "--dtype", "float8"], "unknown dtype 'float8'"),
    (["{target}"], "the following arguments are required: PROMPT"),
]


@pytest.mark.parametrize(("argv", "said"), USAGE, ids=[said for _, said in USAGE])
def test_bad_input_is_one_line_and_exit_2(argv, said, tiny: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tiny / "cache"))
    (tiny / "random.gguf").write_bytes(os.urandom(999))
    (tiny / "magic.gguf").write_bytes(b"GGUF" + os.urandom(999))
    argv = [word.format(tiny=tiny, target=tiny / "target") for word in argv]
    assert main(["generate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("secondguess: ")
    assert err.count("\n") == 1


@pytest.fixture
def tiny_demo(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo with the tiny target, its drafters as the shipped ones, and short answers."""
    monkeypatch.setattr(demo, "TARGET", str(tiny / "target"))
    monkeypatch.setattr("secondguess.drafter.shipped.SHIPPED", tiny)
    monkeypatch.setattr(demo, "TREE", TreeConfig(budget=5, num_steps=3))
    monkeypatch.setattr(demo, "PARAMS", SamplingParams(max_tokens=8, ignore_eos=True))
    return tiny


def test_demo_compares_three_methods_on_three_prompts(tiny_demo: Path, capsys) -> None:
    path = tiny_demo / "demo.json"
    assert main(["demo", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(r["prompt"], r["method"]) for r in results] == [(p, m) for p in demo.PROMPTS for m in demo.METHODS]
    out = capsys.readouterr().out
    assert " ".join(demo.PROMPTS[0].split()) in " ".join(out.split())
    assert "identical" in out
    assert "Next: secondguess generate" in out


def test_demo_fails_when_a_method_changes_the_text(tiny_demo: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain decoder that falls one token short of the others."""
    honest = compare.LLM.stream

    def stream(llm, ids, params):
        return honest(llm, ids, replace(params, max_tokens=7) if llm.method.name == "ar" else params)

    monkeypatch.setattr(compare.LLM, "stream", stream)
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "eagle3.1 and pr did not write plain decoding's tokens" in " ".join(out.split())
    assert "NO (0 of 3)" in out
