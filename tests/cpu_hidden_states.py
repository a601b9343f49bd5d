"""vLLM's example connector for a machine without a GPU: it copies on a CUDA stream. Loaded by ``test_served``.

So the writing is ours: to the same file, under the same lock. What vLLM extracts and how it tells is vLLM's.
"""

from __future__ import annotations

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class CpuHiddenStates(ExampleHiddenStatesConnector):
    """Writes at once, where the example copies on a CUDA stream first."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self.written = {*getattr(self, "written", ()), pending.req_id}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        super().get_finished(finished_req_ids)
        done, self.written = getattr(self, "written", set()), set()
        return done or None, None
