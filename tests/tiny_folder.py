"""A tiny target on disk, with a tokenizer: what a command is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from secondguess.drafter.checkpoint import save_drafter
from secondguess.testing import tiny_drafter, tiny_target

END = "<end>"
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Token 0 ends a text, tokens 1 to 256 are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {character: i for i, character in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=chat_template)


def save_tiny(folder: Path, seed: int = 0, family: str = "llama") -> Path:
    """Write ``target`` (bytes as tokens, a context of 1024) and ``drafters``: its own two and ``other``, not its."""
    target = tiny_target(family, seed, vocab_size=257)
    target.model.save_pretrained(folder / "target")
    byte_tokenizer(CHAT).save_pretrained(folder / "target")
    for name in ("eagle3.1", "pr"):
        save_drafter(tiny_drafter(target, seed, name == "pr"), folder / "drafters" / name, {"target": "tiny"})
    stranger = tiny_target(family, seed + 1, vocab_size=257)
    save_drafter(tiny_drafter(stranger), folder / "drafters" / "other", {"target": "another"})
    return folder


def tiny_workload(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """``save_tiny`` and two tasks of two prompts in ``folder``, which becomes the current one; the flags that use them.

    What is cached stays in ``folder``.
    """
    save_tiny(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SECONDGUESS_CACHE", str(folder / "cache"))
    for task in ("one", "two"):
        rows = [{"id": f"{task}{i}", "turns": [f"{task} {i}"]} for i in range(2)]
        Path(f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("target", "--tasks", "one.jsonl,two.jsonl", "--max-new-tokens", "12", "--drafter", "drafters/pr")
