"""The server's application as replicas behind Ray Serve's proxy. Whoever imports this needs the extra ``ray``.

A replica is a whole server: its own models, scheduler and batch. Ray sends requests to the replicas that have the
fewest, asks each whether its engine still moves, and starts another where one has died. Requests are not routed by
their prefix: no engine of ours keeps the K/V of what has ended, so it helps nobody to have seen a prefix before.

The cluster may run other applications of Ray Serve, whose proxy and address then serve ours as well.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic, sleep

import ray
from fastapi import FastAPI
from ray import serve

from secondguess.errors import require
from secondguess.integrations.ray_cluster import connect
from secondguess.integrations.ray_inside import address, begin_to_delete, routes
from secondguess.server.replicas import Address, Replica, Replicas
from secondguess.server.settings import Settings

NAME = "secondguess"
ROUTE = "/"
HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 120.0  # an engine answers between two passes, and the longest prompt is one
BUSY = {"status_code": 429, "retry_after_s": 1}  # as our server says it

log = logging.getLogger(__name__)


@contextmanager
def deployed(
    make: Callable[[], FastAPI], replicas: Replicas, settings: Settings, batch: int, wanted: Address
) -> Generator[Address]:
    """Replicas that answer, each around what ``make`` returns; afterwards they end. Yields where they are to be had.

    ``batch``: requests that a replica decodes together. Twice as many are sent to it, so that the next one is there
    when a slot is free; the others wait at the proxy. Takes the cluster that RAY_ADDRESS names, else starts one on this
    machine. ``wanted`` is heard unless Ray Serve runs there already. Raises UserError if an application is in the way.
    """
    connect((replicas.max_replicas or replicas.replicas) * replicas.replica_cpus)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # after Ray has put a handler of its own there
    name, there = name_of(settings.served_model_name or ""), address()
    if there:
        check_free(name, routes())
        if there != wanted:
            log.warning("Ray Serve runs there already: its host, port and timeout stay, %s", there)
    else:
        options = {"host": wanted.host, "port": wanted.port, "request_timeout_s": wanted.request_timeout}
        serve.start(http_options=options)
    try:
        application = deployment(replicas, settings, batch)(serve.ingress(make)(Replica)).bind()
        serve.run(application, name=name, route_prefix=ROUTE)
        yield there or wanted
    finally:
        end(name, settings.drain_timeout, started=there is None)


def deployment(replicas: Replicas, settings: Settings, batch: int) -> Callable[..., serve.Deployment]:
    return serve.deployment(
        name=NAME,
        max_ongoing_requests=2 * batch,
        max_queued_requests=max(settings.max_queue, 1),  # Ray knows no queue of none
        backpressure_config=BUSY,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        ray_actor_options={"num_cpus": replicas.replica_cpus, "num_gpus": replicas.replica_gpus},
        **replicas.sizes(batch),
    )


def name_of(model: str) -> str:
    """An application's name: Ray parts names at #, and folders have slashes."""
    return "-".join([NAME, *re.findall(r"[\w.]+", model)])


def check_free(name: str, running: Mapping[str, str | None]) -> None:
    """Raises UserError rather than replace one of the applications that run, by name their routes."""
    other = next((other for other, route in running.items() if route == ROUTE or other == name), None)
    what = f"application {other} of that cluster has the route {ROUTE} or the name {name}"
    require(other is None, f"{what}: end it (ray's serve.delete), or take another cluster")


def wait() -> None:
    """Until Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def end(name: str, drain: float, started: bool) -> None:
    """Requests that run may end within ``drain`` seconds. Ray Serve ends as well if we have ``started`` it, and nobody
    else uses it meanwhile.
    """
    begin_to_delete(name)
    last = monotonic() + drain + HEALTH_PERIOD_S
    while name in serve.status().applications and monotonic() < last:
        sleep(0.2)
    if started and not routes().keys() - {name}:
        serve.shutdown()
    ray.shutdown()
