"""How far numbers of fewer bits move a target: its law before each token of known answers, against float32's.

T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from secondguess.bench.replay import prefill
from secondguess.bench.transcript import Transcript
from secondguess.target.base import Target

Law = Callable[[Transcript], Tensor]  # a transcript -> logits [T, V] before each token of its answer


@dataclass(slots=True)
class Drift:
    """Sums over the tokens of answers."""

    num_tokens: int = 0
    kl: float = 0.0  # of the KL divergences KL(float32 || other), in nats
    largest_kl: float = 0.0
    num_same: int = 0  # tokens whose most probable value is the same

    def add(self, truth_TV: Tensor, other_TV: Tensor) -> None:
        p_TV, q_TV = (logits_TV.double().log_softmax(-1) for logits_TV in (truth_TV, other_TV))
        kl_T = (p_TV.exp() * (p_TV - q_TV)).sum(-1)
        self.num_tokens += len(kl_T)
        self.kl += float(kl_T.sum())
        self.largest_kl = max(self.largest_kl, float(kl_T.max()))
        self.num_same += int((truth_TV.argmax(-1) == other_TV.argmax(-1)).sum())


def drift(truth: Law, other: Law, transcripts: Sequence[Transcript], on_done: Callable[[], None]) -> Drift:
    """``on_done`` hears of each transcript."""
    found = Drift()
    for transcript in transcripts:
        found.add(truth(transcript), other(transcript))
        on_done()
    return found


def law_of(target: Target) -> Law:
    def law(transcript: Transcript) -> Tensor:
        logits_NV = prefill(target, transcript, last_only=False).logits_RNV[0]
        return logits_NV[len(transcript.prompt_ids) - 1 : -1].float().cpu()

    return law
