"""Compiles the C sources for this machine, once, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from secondguess.atomic import replacing
from secondguess.cache import cache_dir

FOLDER = Path(__file__).parent
COMPILED = (FOLDER / "draft.c", FOLDER / "grow.c")
SOURCES = (*COMPILED, FOLDER / "decoder.c", FOLDER / "linear.c")  # and what they include
# OpenMP's workers are torch's: the loader takes the library of this name that torch has brought already.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-shared")


class BuildError(Exception):
    """Why there is no library here, in one line."""


def sources_digest() -> str:
    """Of the C code alone."""
    return hashlib.sha256("\0".join(source.read_text() for source in SOURCES).encode()).hexdigest()[:16]


@cache
def library() -> ctypes.CDLL:
    """The compiled functions. Raises BuildError where they cannot be compiled."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise BuildError("no C compiler: install gcc or clang, or name one in the variable CC")
    path = cache_dir() / "kernels" / f"{_key(compiler)}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                _compile(compiler, temporary)
        except OSError as error:
            raise BuildError(f"nothing can be kept in {path.parent}: {error.strerror}") from error
    return _declare(path)


def _key(compiler: str) -> str:
    """Changes with whatever the result depends on; a home folder may be shared by different machines."""
    cpu = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    made_of = (*(source.read_text() for source in SOURCES), compiler, *FLAGS, platform.machine(), flags)
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    try:
        command = [*compiler.split(), *FLAGS, *map(str, COMPILED), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler {compiler} does not start: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise BuildError(f"{compiler} cannot compile our C code: {said}")


def _declare(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load ({error}): remove it") from error
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.linear.argtypes = [size, pointer, size, size, size, pointer, pointer]
    lib.norm.argtypes = [pointer, size, size, pointer, ctypes.c_float, pointer]
    lib.linear.restype = lib.norm.restype = None
    lib.block_size.restype = lib.lanes.restype = lib.scratch_size.restype = size
    lib.scratch_size.argtypes = [size] * 6
    lib.grow_plant.argtypes = [*[pointer] * 5, size, size]
    lib.grow_lay.argtypes = [pointer, pointer, ctypes.c_float, size, size]
    lib.grow_absorb.argtypes = [*[pointer] * 5, size]
    lib.grow_cut.argtypes = [pointer, pointer, size, *[pointer] * 6]
    for name in ("plant", "lay", "absorb", "cut"):
        getattr(lib, f"grow_{name}").restype = None
    lib.run_layers.argtypes = [pointer, pointer, size, pointer]
    lib.draft_offer.argtypes = [pointer, pointer, pointer, size, pointer, size, pointer, pointer, pointer]
    lib.draft_forward.argtypes = [pointer, pointer, pointer]
    lib.run_layers.restype = lib.draft_offer.restype = lib.draft_forward.restype = None
    return lib
