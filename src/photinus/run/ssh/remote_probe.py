"""What a host answers to `photinus doctor --hosts`: versions, clock, and how well it reaches another host.

Each host listens at an address of its own on any free port. A probe from another host proves that it knows the
examination's secret, goes back and forth some times with one byte, and then sends for a second, or 64 MiB.
"""

from __future__ import annotations

import errno
import hmac
import importlib.metadata
import os
import platform
import secrets
import socket
import statistics
import threading
import time
from typing import Any

from ...job.ports import listen_as
from ...version import __version__

_CONNECT_S = 3.0
_PROOF_S = 2.0
_TRANSFER_S = 10.0
_ROUNDS = 20
_PIECE_BYTES = 256 * 1024
_NONCE_BYTES, _PROOF_BYTES, _COUNT_BYTES = 32, 32, 8


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Carries out one question; LaunchError: this host cannot listen."""
    if order["do"] == "facts":
        return {"facts": _facts()}
    if order["do"] == "serve":
        listener = listen_as(order["name"], 0, or_another=False, otherwise=order["otherwise"], alone=order["alone"])
        threading.Thread(target=_serve, args=(listener, order["secret"]), daemon=True).start()
        address, port = listener.getsockname()[:2]
        return {"serving": {"address": address, "port": port}}
    assert order["do"] == "probe", order
    try:
        return {"probed": _probe(order)}
    except OSError as error:
        return {"probed": {"error": _why(error)}}


def _facts() -> dict[str, Any]:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return {
        "photinus": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "cores": len(os.sched_getaffinity(0)),
        "clock_s": time.time(),
    }


def _probe(order: dict[str, Any]) -> dict[str, Any]:
    with socket.create_connection((order["address"], order["port"]), timeout=_CONNECT_S) as connection:
        connection.settimeout(_PROOF_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_proof(order["secret"], _exactly(connection, _NONCE_BYTES)))
        trips = []
        for _ in range(_ROUNDS):
            begun_s = time.perf_counter()
            connection.sendall(b"?")
            _exactly(connection, 1)
            trips.append(time.perf_counter() - begun_s)
        connection.sendall(b"!")  # from here on bytes are only counted
        connection.settimeout(_TRANSFER_S)
        piece, sent = bytes(_PIECE_BYTES), 0
        begun_s = time.perf_counter()
        while sent < order["bytes"] and time.perf_counter() - begun_s < order["seconds"]:
            connection.sendall(piece)
            sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        received = int.from_bytes(_exactly(connection, _COUNT_BYTES), "big")
        elapsed_s = time.perf_counter() - begun_s
    return {"rtt_s": statistics.median(trips), "bytes": received, "bytes_per_s": received / elapsed_s}


def _serve(listener: socket.socket, secret: str) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(connection, secret), daemon=True).start()


def _serve_one(connection: socket.socket, secret: str) -> None:
    try:
        with connection:
            connection.settimeout(_PROOF_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(nonce)
            if not hmac.compare_digest(_exactly(connection, _PROOF_BYTES), _proof(secret, nonce)):
                return
            connection.settimeout(_TRANSFER_S)
            while _exactly(connection, 1) == b"?":
                connection.sendall(b"?")
            count, piece = 0, bytearray(_PIECE_BYTES)
            while received := connection.recv_into(piece):
                count += received
            connection.sendall(count.to_bytes(_COUNT_BYTES, "big"))
    except OSError:
        return  # the other side is told by its own end of the connection


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"photinus doctor" + nonce, "sha256")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
        data += piece
    return data


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    no_route = dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH), "no route")
    known = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "cut off", **no_route}
    return known.get(error.errno or 0, error.strerror or str(error))
