"""Messages between watchers of several machines: JSON lines over TCP, each with a MAC, after
both sides have shown that they know the job's secret. And the same lines without MACs over a
unix socket, where the kernel says who calls.

What it is not: encrypted. Steps, phases and source lines can be read on the way; nothing can be
injected or replayed. The standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

LIMIT = 4 << 20  # bytes of a line, and of what waits to be sent
HELLO_LIMIT = 256  # the same, of one who has called and not yet shown that it knows the secret
NONCE = 32
_HELLO = b"odyssey watch 1"


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts of known lengths."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "little") + part)
    return code.digest()


def user_of(connection: socket.socket) -> int:
    """Who is at the other end of a unix socket."""
    return struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )[1]


class Closed(Exception):
    """The other side is gone, or did not keep to the protocol."""


class Lines:
    """JSON values over a connected, non-blocking socket.

    Reading and writing never wait; both raise Closed.
    """

    # what the caller is, and whether both sides are known to know the secret
    role = ""
    ready = True

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.limit = LIMIT  # bytes of what has come and is no line yet
        self.socket = connection
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def pending(self) -> bool:
        """Returns whether bytes wait to be sent."""
        return bool(self._out)

    def receive(self) -> list[Any]:
        """Returns what has come."""
        while True:
            max_bytes = min(65536, self.limit + 1)
            try:
                data = self.socket.recv(max_bytes)
            except BlockingIOError:
                break
            except OSError as problem:
                raise Closed(str(problem)) from None
            if not data:
                if b"\n" in self._in:
                    break
                raise Closed("closed")
            self._in += data
            if len(self._in) > self.limit:
                raise Closed("a line is too long")
            if len(data) < max_bytes:
                break
        *lines, unfinished_line = self._in.split(b"\n")
        self._in = bytearray(unfinished_line)
        return [self._parse(self._checked(bytes(line))) for line in lines]

    def send(self, value: Any) -> None:
        """Sends a value, or as much of it as the other side takes now."""
        self._send_bytes(json.dumps(value, separators=(",", ":")).encode())

    def _send_bytes(self, data: bytes) -> None:
        self._out += self._sealed(data) + b"\n"
        if len(self._out) > LIMIT:
            raise Closed("it does not read")
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError as problem:
            raise Closed(str(problem)) from None

    def close(self) -> None:
        self.socket.close()

    def _sealed(self, data: bytes) -> bytes:
        return data

    def _checked(self, line: bytes) -> bytes:
        return line

    @staticmethod
    def _parse(line: bytes) -> Any:
        if line.count(b"[") + line.count(b"{") > 200_000:
            raise Closed("it is too nested")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise Closed("it is not JSON") from None


class Sealed(Lines):
    """`Lines` between two that share a secret.

    Usable when `ready`; call `receive` until then. Each side sends a nonce, then a MAC over both
    nonces; from these and the secret come the keys of the lines, one per direction, and each line's
    MAC covers its number. `role` says what the caller is: "node" or "top".
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, *, caller: bool, role: str = ""
    ) -> None:
        super().__init__(connection)
        self._secret = secret
        self._caller = caller
        self.role = role
        self._own_nonce = os.urandom(NONCE).hex().encode()
        self._peer_nonce = b""
        self._sent = self._received = 0
        self._keys = (b"", b"")
        self.ready = False
        self.limit = LIMIT if caller else HELLO_LIMIT
        super()._send_bytes(_HELLO + b" " + self._own_nonce)

    def _sealed(self, data: bytes) -> bytes:
        if not self._keys[0]:
            return data
        self._sent += 1
        return (
            mac(self._keys[0], self._sent.to_bytes(8, "little"), data).hex().encode() + b" " + data
        )

    def _checked(self, line: bytes) -> bytes:
        if not self._peer_nonce:
            hello, _, nonce = line.rpartition(b" ")
            if hello != _HELLO or len(nonce) != 2 * NONCE or nonce == self._own_nonce:
                raise Closed("it is no watcher")
            self._peer_nonce = nonce
            called = (
                (self._own_nonce, self._peer_nonce)
                if self._caller
                else (self._peer_nonce, self._own_nonce)
            )
            ways = [mac(self._secret, way, *called) for way in (b"from caller", b"from called")]
            self._keys = (ways[0], ways[1]) if self._caller else (ways[1], ways[0])
            if self._caller:  # who calls shows first that it knows the secret
                self.send({"role": self.role})
            return b"null"
        code, _, data = line.partition(b" ")
        expected_code = (
            mac(self._keys[1], (self._received + 1).to_bytes(8, "little"), data).hex().encode()
        )
        if not hmac.compare_digest(code, expected_code):
            raise Closed("it does not know the secret")
        self._received += 1
        if not self.ready:
            self.ready = True
            self.limit = LIMIT
            if not self._caller:
                value = self._parse(data)
                self.role = value.get("role", "") if isinstance(value, dict) else ""
                self.send({"hello": True})
            return b"null"
        return data

    def receive(self) -> list[Any]:
        return [value for value in super().receive() if value is not None]
