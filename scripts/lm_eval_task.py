"""gsm8k for lm-eval from a local file, and whether two runs of it say the same."""

from __future__ import annotations

import json
from pathlib import Path

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
    (folder / "gsm8k_here.yaml").write_text(TASK.format(data=path))


def compare(folder: Path) -> None:
    """Raises SystemExit unless the drafted and the plain run answered the same."""
    drafted, plain = (answers(folder / way) for way in ("drafted", "plain"))
    same = sum(drafted[doc] == plain[doc] for doc in plain)
    print(f"lm-eval: {same} of {len(plain)} answers are plain decoding's")
    if drafted != plain:
        raise SystemExit("lm-eval: drafted and plain answers differ")


def answers(folder: Path) -> dict[int, str]:
    """Of the newest run in ``folder``, by document."""
    newest = max(folder.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return {row["doc_id"]: row["resps"][0][0] for row in rows}
