"""The server's process: its address, and how it ends."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from secondguess.errors import UserError
from secondguess.server.service import Service

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Says where it serves once it does: warm, and listening."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self.model = model

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            assert sockets, "they are bound beforehand"
            host, port = sockets[0].getsockname()[:2]
            log.info("serving %s at %s (a page for browsers is there, too)", self.model, url_of(host, port))


def url_of(host: str, port: int) -> str:
    """IPv6 addresses have colons of their own."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(app: FastAPI, sock: socket.socket) -> bool:
    """Serve until a signal comes, and until what runs then has ended. Returns whether it could start."""
    service: Service = app.state.service
    drain = max(round(service.settings.drain_timeout), 1)
    config = uvicorn.Config(app, log_config=None, server_header=False, timeout_graceful_shutdown=drain)
    server = Server(config, service.name)
    # uvicorn deals with the signal first. Then it raises it again, and nothing is left to do.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(KeyboardInterrupt):  # Ctrl-C is how a server is stopped, and no mishap
        server.run(sockets=[sock])
    return server.started


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the models are loaded; ``listen`` listens there. Raises UserError if it cannot be had."""
    if not 0 <= port < 2**16:
        raise UserError(f"--port must be in [0, 65535], got {port}")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}; try another --host or --port") from error
    return sock
