"""What we use of Ray Serve that is not public: where its proxies listen, which routes are taken, an end that returns.

Nothing public tells this (``serve.status`` leaves routes out) or does it (``serve.delete`` waits for a minute), and any
release may change it. Which Ray it is, a cluster's owner decides, so no release is shut out: what is needed is looked
for when this is loaded. Whoever imports this needs the extra ``ray``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import ray
from ray import serve
from ray.serve import context

from secondguess.errors import require
from secondguess.server.replicas import Address

TESTED = "2.60"
CALLED = ((context, "_get_global_client", "raise_if_no_controller_running"), (serve, "delete", "_blocking"))
READ = ("http_config", "get_serve_details")  # of the client


def check() -> None:
    """Raises UserError if this Ray lacks what is used here."""
    lacks = ", ".join(missing())
    other = f"Ray {ray.__version__} has no {lacks} as Ray {TESTED} has"
    require(not lacks, f"{other}, with which --ray was tested: pip install 'ray[serve,data]=={TESTED}.*'")


def missing() -> Iterator[str]:
    for module, name, parameter in CALLED:
        found = getattr(module, name, None)
        if found is None or parameter not in inspect.signature(found).parameters:
            yield f"{module.__name__}.{name}({parameter})"
    client = getattr(context, "ServeControllerClient", None)
    yield from (f"ServeControllerClient.{name}" for name in READ if not hasattr(client, name))


def address() -> Address | None:
    """Of Ray Serve on this cluster, None if it does not run."""
    client = context._get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    http = client.http_config
    return Address(http.host, http.port, http.request_timeout_s)


def routes() -> dict[str, str | None]:
    """By name, of the applications that are not about to end."""
    found = context._get_global_client().get_serve_details()["applications"]
    return {name: about.get("route_prefix") for name, about in found.items() if about["status"] != "DELETING"}


def begin_to_delete(name: str) -> None:
    """An application, which is gone once what runs in it has ended."""
    serve.delete(name, _blocking=False)


check()
