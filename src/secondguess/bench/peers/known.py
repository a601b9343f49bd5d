"""Which peers there are, what each needs, and where its environment lies."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secondguess.bench.peers.process import Peer
from secondguess.cache import cache_dir
from secondguess.config import CHAIN
from secondguess.errors import UserError, did_you_mean

PACKAGES = Path(__file__).parents[3]  # where an environment without this package finds it


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """``plain``: decodes without speculation. ``mode``: the numbers it computes with; None: those it is given.

    ``drafter``: the method whose drafter it uses, if any.
    """

    engine: str
    package: str
    worker: str
    plain: bool = True
    mode: str | None = None
    wants: str = "folder"  # or "gguf": which form of the target
    drafter: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def _llama_cpp(quantization: str | None, mode: str | None) -> Known:
    return Known(
        engine="llama.cpp",
        package="llama_cpp",
        worker="llama_cpp_worker.py",
        mode=mode,
        wants="gguf",
        config={"quantization": quantization},
    )


def _transformers(lookup: int) -> Known:
    worker, config = "transformers_worker.py", {"lookup": lookup}
    return Known(engine="transformers", package="transformers", worker=worker, plain=not lookup, config=config)


def _vllm(drafter: str | None = None, proposer: str | None = None) -> Known:
    config = {"num_speculative_tokens": CHAIN, "proposer": proposer, "package": str(PACKAGES)}
    plain = drafter is None
    return Known(engine="vllm", package="vllm", worker="vllm_worker.py", plain=plain, config=config, drafter=drafter)


KNOWN = {
    "transformers": _transformers(0),
    "transformers:lookup": _transformers(10),
    "llama.cpp": _llama_cpp(None, None),  # the file as it is
    "llama.cpp:F32": _llama_cpp("F32", "float32"),
    "llama.cpp:Q4_0": _llama_cpp("Q4_0", "int4"),
    "llama.cpp:Q8_0": _llama_cpp("Q8_0", "int8"),
    "vllm": _vllm(),
    "vllm:eagle3": _vllm("eagle3.1"),
    "vllm:pr": _vllm("pr", "secondguess.integrations.vllm.BranchProposer"),
}
# The formats of a .gguf file that compute with numbers we have, too. Any other is a mode of its own.
FILE_MODES = {
    "ALL_F32": "float32",
    "MOSTLY_F16": "float16",
    "MOSTLY_BF16": "bfloat16",
    "MOSTLY_Q8_0": "int8",
    "MOSTLY_Q4_0": "int4",
    "MOSTLY_Q4_1": "int4",
}
INSTALLED = "installed"
PEER = "peer"  # the name of a method that is one; as typed it is a key of KNOWN


def find_python(known: Known) -> Path | None:
    """The interpreter of a peer's own environment, or this one if it has the package; None if neither."""
    own = cache_dir() / "peers" / known.engine / "bin" / "python"
    if own.exists():
        return own
    return Path(sys.executable) if importlib.util.find_spec(known.package) else None


def choose_peers(names: Sequence[str], forms: Mapping[str, Path | None]) -> list[str]:
    """The peers that ``names`` ask for; ``installed`` stands for all that can run on the target's ``forms``.

    Raises UserError when a peer is unknown, not installed, or the target has no such form.
    """
    chosen: list[str] = []
    for name in names:
        if name == INSTALLED:
            chosen += [n for n, known in KNOWN.items() if find_python(known) and forms[known.wants]]
            continue
        if name not in KNOWN:
            raise UserError(f"unknown peer {name!r}{did_you_mean(name, KNOWN)}; peers are {', '.join(KNOWN)}")
        known = KNOWN[name]
        if find_python(known) is None:
            place = cache_dir() / "peers" / known.engine
            raise UserError(f"peer {name} is not installed: make an environment with it in {place}")
        if forms[known.wants] is None:
            raise UserError(f"peer {name} needs the target as a .gguf file")
        chosen.append(name)
    return list(dict.fromkeys(chosen))


def make_peer(
    name: str, forms: Mapping[str, Path | None], common: Mapping[str, Any], end_ids: Sequence[int], log: Path
) -> Peer:
    """``common``: threads, dtype (floating point), max_len, and the drafter (a folder) if it uses one."""
    known = KNOWN[name]
    python, model = find_python(known), forms[known.wants]
    assert python
    assert model
    config = dict(common) | dict(known.config) | {"model": str(model), "cache": str(cache_dir() / "peers" / "models")}
    mode = known.mode or (file_mode(model) if known.wants == "gguf" else common["dtype"])
    return Peer(python, known.worker, config, end_ids, log, mode)


def file_mode(path: Path) -> str:
    """The numbers in a .gguf file, by the format that it says most of its tensors have."""
    from gguf import GGUFReader, LlamaFileType  # imports numpy, which naming the peers in --help does not need

    format_ = GGUFReader(path).fields["general.file_type"].contents()
    name = LlamaFileType(format_).name
    return FILE_MODES.get(name, name)
