"""The server's application as replicas behind Ray Serve's proxy. Whoever imports this needs the extra ``ray``.

A replica is a whole server: its own models, scheduler and batch. Ray sends requests to the replicas that have the
fewest, asks each whether its engine still moves, and starts another where one has died. Requests are not routed by
their prefix: no engine of ours keeps the K/V of what has ended, so it helps nobody to have seen a prefix before.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

import ray
from fastapi import FastAPI
from ray import serve

from secondguess.engine.thread import submit
from secondguess.integrations.ray_cluster import connect
from secondguess.server.replicas import Replicas

NAME = "secondguess"
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 120.0  # an engine answers between two passes, and the longest prompt is one


class Replica:
    """What Ray asks of a replica besides its routes."""

    async def check_health(self) -> None:
        """A replica that does not return in time is replaced."""
        await asyncio.wrap_future(submit(int))


def deploy(make: Callable[[], FastAPI], replicas: Replicas, host: str, port: int, batch: int, drain: float) -> None:
    """Start the replicas, each around what ``make`` returns, and wait until they answer at ``host`` and ``port``.

    ``batch``: requests that a replica decodes together. Twice as many are sent to it, so that the next one is there
    when a slot is free; the others wait at the proxy. ``drain``: seconds that a replica gets to end what runs. Takes
    the cluster that RAY_ADDRESS names, else starts one on this machine.
    """
    deployed = serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * batch,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain,
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": replicas.replica_gpus},
        **replicas.sizes(batch),
    )
    connect((replicas.max_replicas or replicas.replicas) * replicas.replica_cpus)
    serve.start(http_options={"host": host, "port": port})
    serve.run(deployed(serve.ingress(make)(Replica)).bind(), name=NAME, route_prefix="/")


def wait_and_stop() -> None:
    """Until Ctrl-C or SIGTERM; then the replicas end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        while True:
            signal.pause()
    serve.shutdown()
    ray.shutdown()
