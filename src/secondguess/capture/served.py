"""States from a vLLM server (``extract_hidden_states``), which may run the target on any number of GPUs.

The server writes the states of each prompt to a file in ``shared_storage_path``; this process has to see that folder.
What is read is removed, so a server is not believed: no file outside that folder is touched, and none is removed but
one with the states of the tokens that we sent. Whoever imports this needs httpx2.

T tokens, L tapped layers, K = L + 1 states, H hidden size.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from secondguess.capture.source import forward_states
from secondguess.capture.store import States
from secondguess.errors import UserError, require
from secondguess.prepare.post import Server
from secondguess.target.base import default_tap_layers
from secondguess.target.hf import HFTarget

STORAGE = Path("/dev/shm/states")  # where docs/scale.md has vLLM write
ROOM = 64  # prompts on their way at once
LAST_S = 10.0  # for answers to prompts that nobody wants any more


@dataclass(frozen=True, slots=True)
class Served:
    """A ``FeatureSource``. ``target``: its final norm and its head, which the server does not apply, are applied here.

    The server has to extract the inputs of ``layers`` of n layers, and "layer n": vLLM counts inputs, as we do.
    ``storage``: its ``shared_storage_path``, as the user told us.
    """

    url: str
    model: str
    key: str | None
    storage: Path
    target: HFTarget
    sequences: Sequence[Sequence[int]]
    tap_layers: tuple[int, ...] | None = None
    batch_tokens: int | None = None  # all of a shard: the server makes its batches itself, and wants to be kept busy

    @property
    def layers(self) -> tuple[int, ...]:
        return self.tap_layers or default_tap_layers(self.target.spec.num_layers)

    def read(self, indices: Sequence[int]) -> list[States]:
        """Raises UserError if the server does not extract states, or not those, or elsewhere than in ``storage``, and
        what ``Server.post`` raises.
        """
        return asyncio.run(self._read([self.sequences[i] for i in indices]))

    def check(self) -> None:
        """Raises UserError unless the server extracts the right layers, as its states of the shortest sequence tell.

        States of neighbouring layers are much alike, so each is compared with this target's at all layers.
        """
        ids, num_layers = min(self.sequences, key=len), self.target.spec.num_layers
        [theirs] = self.read([self.sequences.index(ids)])
        [ours] = forward_states(self.target, [ids], tuple(range(num_layers)))
        inputs_LTH = ours.taps_TLH.transpose(0, 1)
        found = [nearest(state_TH, inputs_LTH) for state_TH in theirs.taps_TLH.unbind(1)]
        last_LTH = torch.cat([normed(self.target, inputs_LTH).cpu(), ours.last_TH[None]])
        found.append(nearest(theirs.last_TH, last_LTH))
        wanted = [*self.layers, num_layers]
        other = f"{self.url} extracts the states {found} of {num_layers} layers, not {wanted}"
        require(found == wanted, f"{other}: set eagle_aux_hidden_state_layer_ids, or does it run another model?")

    async def _read(self, sequences: Sequence[Sequence[int]]) -> list[States]:
        server, room = Server(self.url, self.key, ROOM), asyncio.Semaphore(ROOM)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(server, room, ids)) for ids in sequences]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            await server.close()
        return [task.result() for task in tasks]

    async def _one(self, server: Server, room: asyncio.Semaphore, ids: Sequence[int]) -> States:
        """Leaves no states of ours behind, not even if another sequence failed, or the user wants no more."""
        async with room:
            asked = asyncio.ensure_future(self._ask(server, ids))
            try:
                path = await asyncio.shield(asked)
            except asyncio.CancelledError:
                await self._forget(asked, ids)
                raise
            return self._states(await asyncio.to_thread(take, path, ids, self.url), ids)

    async def _forget(self, asked: asyncio.Future[Path], ids: Sequence[int]) -> None:
        """The server goes on with what it was asked for, and only its answer names the file."""
        with suppress(Exception):
            await asyncio.to_thread(take, await asyncio.wait_for(asked, LAST_S), ids, self.url)

    async def _ask(self, server: Server, ids: Sequence[int]) -> Path:
        """The file that the server is writing; in ``storage``, links and ``..`` followed."""
        fields = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        said: dict[str, Any] = (await server.post("completions", fields)).get("kv_transfer_params") or {}
        path = said.get("hidden_states_path")
        require(path is not None, f"{self.url} extracts no hidden states: start vLLM as docs/scale.md says")
        file, storage = Path(str(path)).resolve(), self.storage.resolve()
        outside = f"{self.url} names the file {file}, which is not in {storage}"
        require(file.is_relative_to(storage), f"{outside}: give --shared-storage vLLM's shared_storage_path")
        return file

    def _states(self, raw_TKH: Tensor, ids: Sequence[int]) -> States:
        target = self.target
        wanted = (len(ids), len(self.layers) + 1, target.spec.hidden_size)
        require(
            raw_TKH.shape == wanted, f"{self.url} extracts states {tuple(raw_TKH.shape)}, not {wanted}: see its layers"
        )
        last_TH = normed(target, raw_TKH[:, -1])
        best_T = target.logits(last_TH[None])[0].argmax(-1)
        hidden_TKH = torch.cat([raw_TKH[:, :-1].bfloat16(), last_TH[:, None].to("cpu", torch.bfloat16)], 1)
        return States(hidden_TKH, best_T.to("cpu", torch.int32))


def nearest(state_TH: Tensor, others_LTH: Tensor) -> int:
    """Which of the others is nearest, by its relative distance, averaged over tokens: some tokens' states are huge."""
    others_LTH = others_LTH.float()
    distance_LT = (others_LTH - state_TH.float()).norm(dim=-1) / others_LTH.norm(dim=-1)
    return int(distance_LT.mean(-1).argmin())


@torch.no_grad()
def normed(target: HFTarget, states_TH: Tensor) -> Tensor:
    """States [..., T, H] as the target's head reads them."""
    return target.model.base_model.norm(states_TH.to(target.spec.device, target.spec.dtype))


def take(path: Path, ids: Sequence[int], url: str) -> Tensor:
    """The states [T, K, H] of ``ids``, from the file that ``url`` named, which is removed.

    Its writer holds a lock until it is whole. Raises UserError, and leaves it, if it is anything else than that.
    """
    try:
        with lock_of(path).open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            found = load_file(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} is not to be seen here: give vLLM a shared_storage_path that is") from error
    except SafetensorError as error:
        raise UserError(f"{url} names {path}, which is no file of states ({error}): is it vLLM?") from error
    states, tokens = found.get("hidden_states"), found.get("token_ids")
    if states is None or tokens is None:
        raise UserError(f"{url} names {path}, which holds {', '.join(found)} and no states: is it vLLM?")
    require(tokens.tolist() == list(ids), f"{url} read other tokens than it was sent: does it run this target?")
    path.unlink()
    lock_of(path).unlink()
    return states


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
