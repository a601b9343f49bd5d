#!/usr/bin/env python3
"""Draws docs/pictures/draft.svg: a draft of the shipped PR drafter on the doctor's prompts, forward by forward.

.venv/bin/python scripts/draw_draft.py
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

from rich.console import Console

from secondguess.bench.replay import read, replay
from secondguess.bench.steps import StepWatch
from secondguess.bench.tasks import load_tasks
from secondguess.commands.compare import load
from secondguess.commands.conversations import encode_all, transcribe
from secondguess.commands.doctor_run import PROMPTS
from secondguess.commands.reproduce_steps import Shot
from secondguess.config import TreeConfig
from secondguess.engine.thread import run
from secondguess.methods import open_drafter, parse_method
from secondguess.reproduce.picture import page
from secondguess.types import SamplingParams

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "draft.svg"
METHOD = "pr:budget=8,num_steps=4,grow_width=3,offer_width=3,m=2"  # small enough to be looked at
TOKENS = 64


def draw() -> str:
    """The cycle with the most accepted second guesses."""
    console, target = Console(stderr=True), load("smollm2-135m")
    prompts = encode_all(target, load_tasks([str(PROMPTS)]), TOKENS, 20, console)
    transcripts = transcribe(target, prompts, SamplingParams(max_tokens=TOKENS), 20, console)
    method = parse_method(METHOD, TreeConfig())
    drafter = run(open_drafter, method, target, None)
    columns = max(len(t.prompt_ids) + len(t.answer_ids) + len(t.beyond_ids) for t in transcripts)
    watch, shot = run(StepWatch, drafter, method.tree, 1, columns), Shot()
    for transcript in transcripts:
        run(replay, watch, [run(read, target, transcript)], partial(shot.take, watch))
    assert shot.trace is not None
    return page(shot.steps, shot.trace, cache(target.tokenizer.decode))


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")
