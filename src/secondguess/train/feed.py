"""Training batches from the target's states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.capture.source import FeatureSource
from secondguess.train.data import Response
from secondguess.train.unroll import Batch, full_precision


@dataclass(frozen=True, slots=True)
class Feed:
    """Builds the batch of any responses, given by index, on the device and in the precision of ``head_VH``.

    Letters as in ``unroll``.
    """

    responses: list[Response]
    source: FeatureSource
    head_VH: Tensor  # the target's output rows of the draft vocabulary
    draft_of: Tensor  # [target vocabulary] -> draft id or -1

    def batch(self, indices: list[int]) -> Batch:
        states, device = self.source.read(indices), self.head_VH.device
        hidden_T4H = torch.cat([s.hidden_T4H for s in states]).to(self.head_VH)
        best_T = torch.cat([s.best_T for s in states]).to(device).long()
        return Batch(
            tokens_T=torch.cat([torch.tensor(self.responses[i].input_ids) for i in indices]).to(device),
            taps_TLH=hidden_T4H[:, :3],
            target_TV=full_precision(hidden_T4H[:, 3] @ self.head_VH.T).softmax(dim=-1),
            offered_T=self.draft_of[best_T] >= 0,
            lengths_B=torch.tensor([len(self.responses[i].input_ids) for i in indices], device=device),
            answer_starts_B=torch.tensor([self.responses[i].prompt_len for i in indices], device=device),
        )
