"""The servers that stand behind one address (``serve --ray``)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from secondguess.config import option
from secondguess.engine.thread import submit
from secondguess.errors import require
from secondguess.fields import check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Raises UserError when a field is out of range."""

    replicas: int = option(1, "with --ray: servers behind the address")
    max_replicas: int | None = option(None, "with --ray: up to so many while they are busy, --replicas at the least")
    replica_cpus: float = option(1.0, "with --ray: CPU cores that a replica counts for")
    replica_gpus: float = option(0.0, "with --ray: GPUs of a replica, above 0 unless --device is cpu")

    def __post_init__(self) -> None:
        check_numbers(self)
        require(self.replicas >= 1, f"replicas must be at least 1, got {self.replicas}")
        most = self.max_replicas
        require(most is None or most >= self.replicas, f"max_replicas must be at least {self.replicas}, got {most}")
        require(self.replica_cpus >= 0, f"replica_cpus must be at least 0, got {self.replica_cpus}")

    def sizes(self, busy: int) -> dict[str, Any]:
        """As Ray Serve's settings of a deployment. ``busy``: requests that a replica is kept busy by."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        scaling = {"min_replicas": self.replicas, "max_replicas": self.max_replicas, "target_ongoing_requests": busy}
        return {"autoscaling_config": scaling}


@dataclass(frozen=True, slots=True)
class Address:
    """Where Ray Serve's proxies listen, and how long they wait for an answer (None: for ever)."""

    host: str
    port: int
    request_timeout: float | None

    def __str__(self) -> str:
        return f"{self.host}:{self.port} and {self.request_timeout or 'any number of'} s"


class Replica:
    """What is asked of a replica besides its routes."""

    async def check_health(self) -> None:
        """Returns once the engine's thread has a moment. A replica that takes too long over it is replaced."""
        await asyncio.wrap_future(submit(int))
