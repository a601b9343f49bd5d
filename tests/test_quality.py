"""``secondguess quality``: how far a form of numbers moves the target's law, and whether its answers are right."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from secondguess.bench.grade import interval, is_right, last_number
from secondguess.bench.peers import known
from secondguess.bench.peers.known import KNOWN, Known
from secondguess.bench.quality import Drift
from secondguess.cli import main
from tiny_folder import save_tiny

WORKER = """
import sys
sys.path.insert(0, {folder!r})
import numpy
from protocol import serve

def start(config):
    assert config["logits_all"]

    def decode(request):
        if "logits_file" in request:
            rows = len(request["text_ids"]) - request["first"]
            numpy.zeros((rows, 257), numpy.float32).tofile(request["logits_file"])
            return {{}}
        return {{"token_ids": [23, 0], "prefill_s": 0.1, "decode_s": 0.1}}

    return decode

serve(start, ("torch",))
"""


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she has 1,234 apples.", 1234.0),
        ("#### -7", -7.0),
        ("$3.50 or 4.25?", 4.25),
        ("none", None),
        ("step 2: 5 apples, 10.", 10.0),
    ],
)
def test_last_numbers(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_right_answers() -> None:
    assert is_right("That makes 18 dollars.", "9 * 2 = <<9*2=18>>18.\n#### 18")
    assert is_right("18.0", "18")
    assert not is_right("That makes 81 dollars.", "18")
    assert not is_right("I do not know.", "18")
    assert not is_right("I do not know.", "no number")


def test_interval_of_a_share() -> None:
    low, high = interval(5, 10)  # Wilson: 0.2366 to 0.7634
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-3)
    assert interval(0, 10)[0] == 0.0
    assert interval(10, 10)[1] == pytest.approx(1.0)


def test_divergence_by_hand() -> None:
    found = Drift()
    found.add(torch.tensor([[0.0, 0.0], [3.0, 1.0]]), torch.tensor([[0.0, math.log(3)], [3.0, 1.0]]))
    # p = (1/2, 1/2), q = (1/4, 3/4): KL = ln 2 - ln 3 / 2; the second law is the same.
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert (found.num_tokens, found.num_same) == (2, 1)
    assert found.kl == pytest.approx(kl)
    assert found.largest_kl == pytest.approx(kl)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    save_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    rows = [{"id": str(i), "turns": [f"question {i}"], "reference": "7" if i else None} for i in range(3)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["quality", "target", "--tasks", "sums.jsonl", "--max-new-tokens", "8", "--json", "out.json"]


def test_forms_of_a_target(tiny: list[str], capsys) -> None:
    assert main(tiny) == 0
    rows = {row["dtype"]: row for row in json.loads(Path("out.json").read_text())["rows"]}
    assert list(rows) == ["float32", "bfloat16", "int8", "int4"]
    assert rows["float32"]["mean_kl"] == 0
    assert rows["float32"]["same_top1"] == 1
    assert 0 < rows["bfloat16"]["mean_kl"] < rows["int4"]["mean_kl"]
    assert 0 < rows["int8"]["mean_kl"] < rows["int4"]["mean_kl"]
    assert all(row["num_graded"] == 2 and row["num_tokens"] > 3 for row in rows.values())
    assert "against float32 over its 3 answers" in " ".join(capsys.readouterr().out.split())


def test_a_peer_that_shows_its_logits(tiny: list[str], tmp_path: Path, monkeypatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(folder=str(Path(known.__file__).parent)))
    fake = Known(engine="llama.cpp", package="torch", worker=str(worker), mode="int4")
    monkeypatch.setitem(KNOWN, "llama.cpp:Q4_0", fake)
    monkeypatch.setattr(known, "find_python", lambda k: Path(sys.executable))
    assert main([*tiny, "--dtypes", "float32", "--peers", "llama.cpp:Q4_0"]) == 0
    ours, theirs = json.loads(Path("out.json").read_text())["rows"]
    assert theirs["num_tokens"] == ours["num_tokens"]
    assert theirs["engine"] == "llama.cpp:Q4_0"
    assert theirs["right"] == 1.0  # token 23 is the byte "7"
    entropy_gap = np.log(257) - theirs["mean_kl"]
    assert 0 < entropy_gap < np.log(257)  # KL to the uniform law is log V less the entropy


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--peers", "vllm"], "peer vllm shows no logits"),
        (["--dtypes", "int3"], "unknown dtype 'int3'"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_mistakes(tiny: list[str], more: list[str], said: str, capsys) -> None:
    assert main([*tiny, *more]) == 2
    assert said in capsys.readouterr().err
