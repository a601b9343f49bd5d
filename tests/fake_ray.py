"""As much of Ray Serve as our deployment touches: modules under its names, and one cluster behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Client:
    """What tells of Ray Serve on a cluster."""

    cluster: Cluster

    @property
    def http_config(self) -> SimpleNamespace | None:
        return self.cluster.http

    def get_serve_details(self) -> dict[str, Any]:
        routes = self.cluster.routes
        return {"applications": {n: {"route_prefix": r, "status": "RUNNING"} for n, r in routes.items()}}


@dataclass
class Cluster:
    """``http``: options of Ray Serve's proxies, None where it does not run. ``routes``: applications."""

    http: SimpleNamespace | None = None
    routes: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of what was deployed last
    broken: bool = False  # replicas cannot start
    connected: bool = False

    def init(self, **_: Any) -> None:
        self.connected = True

    def disconnect(self) -> None:
        self.connected = False

    def deployment(self, **options: Any) -> Callable[[type], SimpleNamespace]:
        self.options = options
        return lambda kind: SimpleNamespace(bind=lambda: kind)

    def start(self, http_options: dict[str, Any]) -> None:
        assert self.http is None
        self.http = SimpleNamespace(**http_options)

    def run(self, application: Any, name: str, route_prefix: str) -> None:
        self.routes[name] = route_prefix
        if self.broken:
            raise RuntimeError("deploying failed")

    def delete(self, name: str, _blocking: bool = True) -> None:
        del self.routes[name]

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=self.routes)

    def shutdown(self) -> None:
        self.http = None
        self.routes.clear()

    def client(self, raise_if_no_controller_running: bool = True) -> Client | None:
        return Client(self) if self.http else None

    def packages(self) -> dict[str, ModuleType]:
        """For ``sys.modules``."""
        ray, serve, context = (ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.context"))
        vars(ray).update(__version__="2.99", init=self.init, shutdown=self.disconnect, serve=serve)
        for name in ("deployment", "start", "run", "delete", "status", "shutdown"):
            setattr(serve, name, getattr(self, name))
        vars(serve).update(ingress=lambda make: lambda kind: kind, context=context)
        vars(context).update(_get_global_client=self.client, ServeControllerClient=Client)
        return {module.__name__: module for module in (ray, serve, context)}
