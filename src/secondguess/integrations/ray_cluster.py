"""Which Ray cluster is used. Whoever imports this needs the extra ``ray``."""

from __future__ import annotations

import os

import ray


def connect(num_cpus: float) -> None:
    """To the cluster that RAY_ADDRESS names, else to a new one on this machine, which ends with this process.

    ``num_cpus``: what is going to be started. A new cluster counts as having so many, since whatever does not fit waits
    for ever. (Left to itself, Ray waits for the cluster that ran here last, even when that has long been gone.)
    """
    if named := os.environ.get("RAY_ADDRESS"):
        ray.init(address=named, ignore_reinit_error=True)
    else:
        counted = max(int(num_cpus) + 1, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=counted, ignore_reinit_error=True)
