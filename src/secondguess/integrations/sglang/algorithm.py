"""What SGLang is told of the algorithm ``PR``. Whoever imports this needs SGLang."""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from secondguess.integrations.sglang.arguments import ALGORITHM, check_arguments, fill_arguments


class Reconsidering(CustomSpecAlgo):
    """Of EAGLE-3's kind: so the target's passes hand out the states that EAGLE-3 taps, verify passes take EAGLE's
    input, memory for the K/V of the drafter's layers stays free, and prefixes are kept by pairs of tokens, which is
    what the drafter's K/V at a position depends on.
    """

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        """No draft writes into SGLang's K/V."""
        return False

    def need_topk(self) -> bool:
        """The next draft's first offers do not travel from one cycle to the next."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Not from one machine to another."""
        return False

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler asks every algorithm for one, and ``CustomSpecAlgo`` has none to give."""
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        fill_arguments(server_args)


def announce() -> None:
    """Register the algorithm."""

    @SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=False, validate_server_args=check_arguments, spec_class=Reconsidering
    )
    def worker_class(server_args: Any) -> type:
        from secondguess.integrations.sglang.worker import Worker

        return Worker
