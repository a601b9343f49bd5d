"""PR's draft tree in SGLang: a plug-in for its speculative decoding (written from SGLang 0.5.23).

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm PR --speculative-draft-model-path DRAFTER

SGLang verifies trees, but grows its own with first looks alone, and its draft branches see the K/V of the branches that
held their places before. Here the tree is grown as in our engine, and SGLang gets it in the form that its verify pass
takes. It samples, keeps the target's K/V and schedules; see docs/integrations.md for what it cannot do yet.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from secondguess.integrations.sglang.hooks import RELEASE, complaints, source_of

log = logging.getLogger(__name__)


def register() -> None:
    """Make the algorithm ``PR`` known, unless the SGLang installed differs from the one this was written for.

    SGLang calls this as each of its processes starts (entry point ``sglang.srt.plugins``), whatever algorithm is asked
    for. So a difference is a warning of one line, and ``PR`` an unknown algorithm then.
    """
    found = find_spec("sglang")
    origin = found and found.origin
    differs = list(complaints(source_of(Path(origin).parents[1]))) if origin else ["its source is not to be found"]
    if differs:
        log.warning("secondguess was made for SGLang %s and is not loaded: %s", RELEASE, "; ".join(differs))
        return
    from secondguess.integrations.sglang.algorithm import announce

    announce()
