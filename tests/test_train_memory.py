"""What a training step takes at most, in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Literal, cast

import pytest
import torch

from secondguess.config import DrafterConfig, SecondLook
from secondguess.drafter.model import Drafter, initialise
from secondguess.train.batch import Batch
from secondguess.train.chunks import CHUNK
from secondguess.train.config import TrainConfig
from secondguess.train.objective import objectives, reconsider_of
from secondguess.train.start import new_optimizer

VOCABULARY, HIDDEN, TOKENS, PROMPT = 49152, 576, 2048, 48


LARGEST_KEPT = CHUNK // TOKENS  # the draft vocabulary whose logits just need not be made in parts


def step(draft_vocab_size: int, unroll_steps: int, loss: Literal["soft_ce", "lk"]) -> int:
    """Bytes that this process took at most, with one step of PR on one text, shaped like the default target's."""
    shape = DrafterConfig(
        hidden_size=HIDDEN, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        vocab_size=VOCABULARY, draft_vocab_size=draft_vocab_size, target_hidden_size=HIDDEN, target_num_layers=30,
        second_look=SecondLook(), lens=True,
    )  # fmt: skip
    sizes = {"draft_vocab_size": draft_vocab_size, "unroll_steps": unroll_steps}
    config = TrainConfig(responses="-", out="-", loss=loss, **sizes)
    head_VH = torch.randn(draft_vocab_size, HIDDEN)
    drafter = Drafter(shape, torch.randn(VOCABULARY, HIDDEN), torch.arange(draft_vocab_size))
    initialise(drafter, head_VH, torch.ones(HIDDEN), 0)
    batch = Batch(
        tokens_T=torch.randint(VOCABULARY, (TOKENS,)),
        taps_TLH=torch.randn(TOKENS, 3, HIDDEN),
        hidden_TH=torch.randn(TOKENS, HIDDEN),
        head_VH=head_VH,
        best_T=torch.zeros(TOKENS, dtype=torch.int64),
        lengths_B=torch.tensor([TOKENS]),
        answer_starts_B=torch.tensor([PROMPT]),
    )
    optimizer = new_optimizer(drafter, config)
    level0, level1, _ = objectives(drafter, batch, config, reconsider_of(config, 0))
    (level0 + level1).backward()
    optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("draft_vocab_size", "unroll_steps", "loss"),
    [(4096, 5, "soft_ce"), (VOCABULARY, 5, "soft_ce"), (LARGEST_KEPT, 7, "lk")],
)
def test_a_step_of_2048_tokens_stays_under_4_gb(draft_vocab_size: int, unroll_steps: int, loss: str) -> None:
    """Chunks keep it there whatever the vocabulary: the logits of its ten passes alone would be 4 GB, kept.

    Most is taken just below the size from which on there are chunks, by the loss that keeps most of a row.
    """
    command = [sys.executable, __file__, str(draft_vocab_size), str(unroll_steps), loss]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.5e9 < int(done.stdout) < 4e9


if __name__ == "__main__":
    sys.stdout.write(str(step(int(sys.argv[1]), int(sys.argv[2]), cast(Literal["soft_ce", "lk"], sys.argv[3]))))
