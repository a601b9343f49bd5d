"""gsm8k for lm-eval from a local file, and whether two runs of it say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME, METRIC = "gsm8k_here", "exact_match,last-number"
WAYS = {"drafted": {"method": "pr"}, "plain": False}  # what each run asks for
TASK = """\
task: gsm8k_here
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{turns[0]}}}}\\nAnswer:"
doc_to_target: "{{{{reference.split('####')[-1].strip()}}}}"
generation_kwargs:
  until: ["Question:"]
  max_gen_toks: 128
  temperature: 0.0
filter_list:
  - name: last-number
    filter:
      - function: regex
        regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
    ignore_case: true
    regexes_to_ignore: [",", "\\\\$", "\\\\.$"]
metadata:
  version: 1
"""


def write_task(folder: Path, data: Path) -> None:
    """Raises SystemExit when ``data`` has no gsm8k_test.jsonl."""
    path = (data / "gsm8k_test.jsonl").resolve()
    if not path.is_file():
        raise SystemExit(f"no {path}: SECONDGUESS_DATA names the folder with gsm8k_test.jsonl")
    (folder / f"{NAME}.yaml").write_text(TASK.format(data=path))


def compare(folder: Path) -> dict[str, Any]:
    """The runs side by side. Raises SystemExit unless the drafted one answered and scored as the plain one."""
    drafted, plain = (answers(folder / way) for way in WAYS)
    scores = {way: score(folder / way) for way in WAYS}
    same = sum(drafted.get(doc) == answer for doc, answer in plain.items())
    print(f"lm-eval: {same} of {len(plain)} answers are plain decoding's; scores {scores}")
    if not plain or drafted != plain or scores["drafted"] != scores["plain"]:
        raise SystemExit("lm-eval: drafted and plain answers differ")
    return {"num_questions": len(plain), "num_same_answers": same, "score": scores}


def answers(folder: Path) -> dict[int, str]:
    """Of the newest run in ``folder``, by document."""
    rows = [json.loads(line) for line in newest(folder, "samples_*.jsonl").read_text().splitlines()]
    return {row["doc_id"]: row["resps"][0][0] for row in rows}


def score(folder: Path) -> float:
    """Share of right answers."""
    return json.loads(newest(folder, "results_*.json").read_text())["results"][NAME][METRIC]


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
