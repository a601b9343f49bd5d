"""Training batches from the target's states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secondguess.capture.source import FeatureSource
from secondguess.train.batch import Batch
from secondguess.train.data import Response


@dataclass(frozen=True, slots=True)
class Feed:
    """Builds the batch of any responses, given by index, on the device and in the precision of ``head_VH``.

    Letters as in ``batch``; K = L + 1 states of a token, the last one after the final norm.
    """

    responses: list[Response]
    source: FeatureSource
    head_VH: Tensor  # the target's output rows of the draft vocabulary
    draft_of: Tensor  # [target vocabulary] -> draft id or -1

    def batch(self, indices: list[int]) -> Batch:
        states, device = self.source.read(indices), self.head_VH.device
        hidden_TKH = torch.cat([s.hidden_TKH for s in states]).to(self.head_VH)
        best_T = torch.cat([s.best_T for s in states]).to(device).long()
        return Batch(
            tokens_T=torch.cat([torch.tensor(self.responses[i].input_ids) for i in indices]).to(device),
            taps_TLH=hidden_TKH[:, :-1],
            hidden_TH=hidden_TKH[:, -1],
            head_VH=self.head_VH,
            best_T=self.draft_of[best_T],
            lengths_B=torch.tensor([len(self.responses[i].input_ids) for i in indices], device=device),
            answer_starts_B=torch.tensor([self.responses[i].prompt_len for i in indices], device=device),
        )
