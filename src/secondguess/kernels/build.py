"""Compiles the C sources for this machine, once, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from secondguess.atomic import replacing
from secondguess.cache import cache_dir
from secondguess.kernels.structs import MIRRORED

FOLDER = Path(__file__).parent
COMPILED = (FOLDER / "draft.c", FOLDER / "grow.c")
SOURCES = (*COMPILED, FOLDER / "decoder.h", FOLDER / "linear.h")
# OpenMP's workers are torch's: the loader takes the library of this name that torch has brought already.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-shared")
ADVICE = "install GCC 11 or later, or name a compiler in the variable CC"

log = logging.getLogger(__name__)


class BuildError(Exception):
    """Why there is no library here, in one line."""


def sources_digest() -> str:
    """Of the C code alone."""
    return hashlib.sha256("\0".join(source.read_text() for source in SOURCES).encode()).hexdigest()[:16]


def library() -> ctypes.CDLL:
    """The compiled functions. Raises BuildError where they cannot be compiled; that is tried once, with a warning."""
    found = attempt()
    if isinstance(found, BuildError):
        raise BuildError(str(found))
    return found


@cache
def attempt() -> ctypes.CDLL | BuildError:
    """The library, or why there is none."""
    try:
        return _declare(_built())
    except BuildError as error:
        log.warning("no compiled layers, everything takes several times as long: %s", error)
        return error


def constant(name: str) -> int:
    """A number that the C code shows. Raises BuildError as above."""
    return _shown(library(), name)


def _built() -> Path:
    """Where the library lies, once it is compiled."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise BuildError(f"no C compiler: {ADVICE}")
    path = cache_dir() / "kernels" / f"{_key(compiler)}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                _compile(compiler, temporary)
        except OSError as error:
            raise BuildError(f"nothing can be kept in {path.parent}: {error.strerror}") from error
    return path


def _key(compiler: str) -> str:
    """Changes with whatever the result depends on; a home folder may be shared by different machines.

    Raises BuildError if the compiler does not start.
    """
    cpu = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    version = _run(compiler, "--version").stdout
    made_of = (*(source.read_text() for source in SOURCES), compiler, version, *FLAGS, platform.machine(), flags)
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    done = _run(compiler, *FLAGS, *map(str, COMPILED), "-o", str(path))
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{compiler} cannot compile our C code ({said}): {ADVICE}")


def _run(compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([*compiler.split(), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the C compiler {compiler} does not start ({error.strerror}): {ADVICE}") from error


def _declare(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} does not load ({error}): remove it") from error
    theirs = {name: _shown(lib, name) for name in MIRRORED}
    assert theirs == MIRRORED, f"C and Python disagree: {theirs.items() ^ MIRRORED.items()}"
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.linear.argtypes = [size, pointer, size, size, size, pointer, pointer]
    lib.norm.argtypes = [pointer, size, size, pointer, ctypes.c_float, pointer]
    lib.linear.restype = lib.norm.restype = None
    lib.layers_room.restype = lib.draft_room.restype = size
    lib.layers_room.argtypes = [pointer]
    lib.draft_room.argtypes = [pointer, pointer, pointer]
    lib.grow_plant.argtypes = [*[pointer] * 5, size, size]
    lib.grow_lay.argtypes = [pointer, pointer, ctypes.c_float, size, size]
    lib.grow_absorb.argtypes = [*[pointer] * 5, size]
    lib.grow_cut.argtypes = [pointer, pointer, size, *[pointer] * 6]
    for name in ("plant", "lay", "absorb", "cut"):
        getattr(lib, f"grow_{name}").restype = None
    lib.run_layers.argtypes = [pointer, pointer, size, pointer]
    lib.draft_offer.argtypes = [pointer, pointer, pointer, pointer]
    lib.draft_forward.argtypes = [pointer, pointer, pointer]
    lib.run_layers.restype = lib.draft_offer.restype = lib.draft_forward.restype = None
    return lib


def _shown(lib: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(lib, name).value
