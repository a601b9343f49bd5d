"""The server's process: its address, and how it ends."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from secondguess.errors import UserError
from secondguess.server.service import Service


class Server(uvicorn.Server):
    """Tells the service that it is about to end, for from then on uvicorn says of every client that it has left."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.draining = True
        super().handle_exit(sig, frame)


def listen(app: FastAPI, sock: socket.socket) -> bool:
    """Serve until a signal comes, and until what runs then has ended. Returns whether it could start."""
    service: Service = app.state.service
    drain = max(round(service.settings.drain_timeout), 1)
    server = Server(uvicorn.Config(app, log_config=None, server_header=False, timeout_graceful_shutdown=drain), service)
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
