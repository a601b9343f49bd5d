"""A ``.gguf`` file as a Hugging Face folder, converted once and kept in the user's cache.

The folder's name is the SHA-256 of the source; ``manifest.json`` holds the SHA-256 of every file in it. A folder that
does not match is converted again. Two processes may convert at once: each writes its own temporary folder, the first
to rename wins and both end with the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from secondguess.cache import cache_dir
from secondguess.errors import UserError
from secondguess.target.pretrained import Pretrained
from secondguess.target.quiet import quiet_transformers

MAGIC = b"GGUF"
MANIFEST = "manifest.json"
FORMAT = "1"  # part of the folder's name; raise it when the conversion changes


def converted(source: Path, say: Callable[[str], None]) -> Path:
    """The float32 folder made of ``source``; ``say`` hears of a conversion (about 20 s for 135M weights).

    Raises UserError when the file is unreadable or no GGUF file, or when the folder cannot be written.
    """
    folder = cache_dir() / "gguf" / f"{_digest_of_source(source)[:32]}-{FORMAT}"
    if is_intact(folder):
        return folder
    again = " again, the cached copy is damaged" if folder.exists() else ", once"
    say(f"converting {source.name} to float32 in {folder}{again}")
    try:
        _make(source, folder)
    except (OSError, SafetensorError) as error:  # SafetensorError: no space left while writing weights
        help_ = "free some space or set SECONDGUESS_CACHE to another folder"
        raise UserError(f"cannot convert {source.name} into {folder.parent}: {error}; {help_}") from error
    return folder


def is_intact(folder: Path) -> bool:
    """Whether the folder holds what its manifest says."""
    try:
        digests = json.loads((folder / MANIFEST).read_text())
        return bool(digests) and all(_digest(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):  # missing or damaged: no such file, no JSON, no mapping
        return False


def _make(source: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as temporary:
        made = Path(temporary) / "model"
        _convert(source, made)
        digests = {path.name: _digest(path) for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps(digests, indent=1))
        _publish(made, folder)


def _digest_of_source(source: Path) -> str:
    try:
        with source.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UserError(f"not a GGUF file: {source}")
        return _digest(source)
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: Path, folder: Path) -> None:
    with quiet_transformers():
        try:
            files = Pretrained(source.parent)
            loaded = files.model(gguf_file=source.name, dtype=torch.float32)
            tokenizer = files.tokenizer(gguf_file=source.name)
        except (OSError, UserError):
            raise
        except Exception as error:  # the parser fails in many ways on a damaged file
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"cannot load {source} as a GGUF model: {reason or type(error).__name__}") from error
        # The loaded model counts as quantized and refuses to be saved; its weights are plain float32.
        del loaded.config.quantization_config
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _publish(made: Path, folder: Path) -> None:
    """Rename ``made`` to ``folder``. Another process may have been first, or have left a damaged one."""
    for _ in range(3):
        with contextlib.suppress(OSError):
            made.rename(folder)
            return
        if is_intact(folder):
            return
        grave = made.with_name("damaged")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
    raise OSError("could not put the converted folder in place")
