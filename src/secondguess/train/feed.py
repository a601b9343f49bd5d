"""Training batches from captured target states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.capture.store import StateStore
from secondguess.train.data import Response
from secondguess.train.unroll import Batch


@dataclass(frozen=True, slots=True)
class Feed:
    """Builds the batch of any responses, given by index. Letters as in ``unroll``."""

    responses: list[Response]
    store: StateStore
    head_VH: Tensor  # the target's output rows of the draft vocabulary
    draft_of: Tensor  # [target vocabulary] -> draft id or -1

    def batch(self, indices: list[int]) -> Batch:
        states = [self.store[i] for i in indices]
        hidden_T4H = torch.cat([s.hidden_T4H for s in states]).float()
        best_T = torch.cat([s.best_T for s in states]).long()
        return Batch(
            tokens_T=torch.cat([torch.tensor(self.responses[i].input_ids) for i in indices]),
            taps_TLH=hidden_T4H[:, :3],
            target_TV=(hidden_T4H[:, 3] @ self.head_VH.T).float().softmax(dim=-1),
            offered_T=self.draft_of[best_T] >= 0,
            lengths_B=torch.tensor([len(self.responses[i].input_ids) for i in indices]),
            answer_starts_B=torch.tensor([self.responses[i].prompt_len for i in indices]),
        )
