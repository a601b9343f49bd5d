"""The worker's side of a peer. Stands alone: a worker's environment need not have secondguess.

A worker is a script that gets one JSON argument and then talks in JSON lines: it says ``{"ready": ..., "versions":
{...}}``, takes ``{"prompt_ids", "max_new_tokens", "end_ids"}`` and answers ``{"token_ids", "prefill_s", "decode_s",
"peak_memory_bytes"}`` or ``{"error"}``. ``decode_s`` runs from the first new token to the last. A worker whose first
step may yield several tokens says how many: ``num_first``. An engine that drafts may add ``num_cycles``,
``num_drafted`` and ``num_accepted``. Some workers also take ``{"text_ids", "first", "logits_file"}`` and write there,
as raw float32, the logits after each token from ``first`` on.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Decode = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], Decode], packages: tuple[str, ...]) -> None:
    """Answer requests until standard input ends. ``start`` loads the model that the argument names.

    ``packages``: whose versions are told, of those that are installed.
    """
    # What libraries print must not come between the lines.
    talk = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(line: dict[str, Any]) -> None:
        talk.write(json.dumps(line) + "\n")

    try:
        decode = start(json.loads(sys.argv[1]))
    except Exception as error:  # whatever an engine raises becomes one line
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True, "versions": versions(packages)})
    for line in sys.stdin:
        try:
            say(decode(json.loads(line)) | {"peak_memory_bytes": peak_memory()})
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes. (What getrusage says includes whoever started it.)"""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
