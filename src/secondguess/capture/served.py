"""States from a vLLM server (``extract_hidden_states``), which may run the target on any number of GPUs.

The server writes the states of each prompt to a file in ``shared_storage_path``; this process has to see that folder.
Whoever imports this needs httpx2.

T tokens, H hidden size.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from secondguess.capture.store import States
from secondguess.errors import UserError, require
from secondguess.prepare.post import Server
from secondguess.target.hf import HFTarget

ROOM = 64  # prompts on their way at once


@dataclass(frozen=True, slots=True)
class Served:
    """A ``FeatureSource``. ``target``: its final norm and its head, which the server does not apply, are applied here.

    The server has to extract layers 2, n/2 and n - 3 of n, and n (vLLM counts inputs of layers, as we do).
    """

    url: str
    model: str
    key: str | None
    target: HFTarget
    sequences: Sequence[Sequence[int]]

    def read(self, indices: Sequence[int]) -> list[States]:
        """Raises UserError if the server does not extract states, or not those, and what ``Server.post`` raises."""
        return asyncio.run(self._read([self.sequences[i] for i in indices]))

    async def _read(self, sequences: Sequence[Sequence[int]]) -> list[States]:
        server = Server(self.url, self.key, ROOM)
        try:
            files = await asyncio.gather(*(self._ask(server, ids) for ids in sequences))
        finally:
            await server.close()
        return [self._states(taken(file), ids) for file, ids in zip(files, sequences, strict=True)]

    async def _ask(self, server: Server, ids: Sequence[int]) -> Path:
        """The file that the server is writing."""
        fields = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        said: dict[str, Any] = (await server.post("completions", fields)).get("kv_transfer_params") or {}
        path = said.get("hidden_states_path")
        require(path is not None, f"{self.url} extracts no hidden states: start vLLM as docs/scale.md says")
        return Path(str(path))

    def _states(self, found: dict[str, Tensor], ids: Sequence[int]) -> States:
        same = found["token_ids"].tolist() == list(ids)
        require(same, f"{self.url} read other tokens than it was sent: does it run this target?")
        target, raw_T4H = self.target, found["hidden_states"]
        wanted = (len(ids), 4, target.spec.hidden_size)
        require(
            raw_T4H.shape == wanted, f"{self.url} extracts states {tuple(raw_T4H.shape)}, not {wanted}: see its layers"
        )
        with torch.no_grad():
            last_TH = target.model.base_model.norm(raw_T4H[:, 3].to(target.spec.device, target.spec.dtype))
            best_T = target.logits(last_TH[None])[0].argmax(-1)
        hidden_T4H = torch.cat([raw_T4H[:, :3].bfloat16(), last_TH[:, None].to("cpu", torch.bfloat16)], 1)
        return States(hidden_T4H, best_T.to("cpu", torch.int32))


def taken(path: Path) -> dict[str, Tensor]:
    """What the server wrote, once it has: its writer holds a lock meanwhile. The files are removed."""
    lock = path.with_name(path.name + ".lock")
    try:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            found = load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not to be seen here: give vLLM a shared_storage_path that is") from error
    path.unlink()
    lock.unlink()
    return found
