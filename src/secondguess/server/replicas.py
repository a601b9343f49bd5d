"""How many servers stand behind one address (``serve --ray``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from secondguess.config import option
from secondguess.errors import require
from secondguess.fields import check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Raises UserError when a field is out of range."""

    replicas: int = option(1, "with --ray: servers behind the address")
    max_replicas: int | None = option(None, "with --ray: up to so many while they are busy, --replicas at the least")
    replica_cpus: float = option(1.0, "with --ray: CPU cores that a replica counts for")
    replica_gpus: float = option(0.0, "with --ray: GPUs that a replica counts for")

    def __post_init__(self) -> None:
        check_numbers(self)
        require(self.replicas >= 1, f"replicas must be at least 1, got {self.replicas}")
        most = self.max_replicas
        require(most is None or most >= self.replicas, f"max_replicas must be at least {self.replicas}, got {most}")
        for name in ("replica_cpus", "replica_gpus"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}")

    def sizes(self, busy: int) -> dict[str, Any]:
        """As Ray Serve's settings of a deployment. ``busy``: requests that a replica is kept busy by."""
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        scaling = {"min_replicas": self.replicas, "max_replicas": self.max_replicas, "target_ongoing_requests": busy}
        return {"autoscaling_config": scaling}
