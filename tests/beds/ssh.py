"""An ssh for the hosts of netns.py: a program that MPI launchers find in PATH, and the thread
that answers it.

The program hands its standard streams and the command to the thread, over a unix socket in the
bed's folder; the thread starts the command on the host, with no more of the environment than a
login gives, and returns its exit code. As with a real one: the end of the program does not end the
command, and nothing is heard of a host that is dead or cut off; a new connection to it times out,
sooner than a real one. What it is not: secure, or a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATH = "/usr/local/bin:/usr/bin:/bin"  # of a command
TIMES_OUT = 2.0  # seconds
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "USER": "root", "SHELL": "/bin/sh", "LANG": "C.UTF-8"}
_PROGRAM = r"""#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    word = words.pop(0)
    if word == "--":
        break
    if len(word) == 2 and word[1] in "bcDEeFIiJLlmOopQRSWw":
        words.pop(0)
host, *words = words
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect({address!r})
asked = {{"host": host.rpartition("@")[2], "command": " ".join(words), "token": os.environ.get({token!r}, "")}}
socket.send_fds(peer, [json.dumps(asked).encode()], [0, 1, 2])
answer = b""
while data := peer.recv(4096):
    answer += data
code, _, said = answer.decode().partition(" ")
sys.stderr.write(said)
sys.exit(int(code or 255))
"""


class Server:
    """Answers the program `folder`/bin/ssh.

    Args:
        enter: gives the words by which a command is run on a host, None if nothing comes from there
            now; KeyError for an unknown name. token: name of the variable that is passed on.
    """

    def __init__(self, folder: Path, enter: Callable[[str], list[str] | None], token: str) -> None:
        self.enter, self.token = enter, token
        (folder / "bin").mkdir()
        # The name of a unix socket may have about 100 characters; that of a test's folder may be
        # longer.
        short = Path(f"/dev/shm/bed-{os.getpid()}-{time.monotonic_ns():x}.ssh")
        self.address = folder / "ssh" if len(str(folder)) < 90 else short
        address = str(self.address)
        program = folder / "bin" / "ssh"
        program.write_text(
            _PROGRAM.format(python=os.path.realpath(sys.executable), address=address, token=token)
        )
        program.chmod(0o755)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            data, streams, *_ = socket.recv_fds(peer, 1 << 20, 3)
            try:
                asked = json.loads(data)
                answer = self._run(asked["host"], asked["command"], asked["token"], streams)
            finally:
                for stream in streams:
                    os.close(stream)
            if answer is None:
                with contextlib.suppress(OSError):
                    peer.recv(1)  # until the program is ended
                return
            with contextlib.suppress(OSError):
                peer.sendall(answer.encode())

    def _run(self, host: str, command: str, token: str, streams: list[int]) -> str | None:
        try:
            words = self.enter(host)
        except KeyError:
            return f"255 ssh: Could not resolve hostname {host}: Name or service not known\n"
        if words is None:
            time.sleep(TIMES_OUT)
            return f"255 ssh: connect to host {host} port 22: Connection timed out\n"
        environment: Mapping[str, str] = {**ENVIRONMENT, self.token: token}
        started = subprocess.Popen(
            [*words, "/bin/sh", "-c", command],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        code = started.wait()
        with contextlib.suppress(KeyError):
            if self.enter(host) is None:
                return None
        return str(code if code >= 0 else 255)

    def close(self) -> None:
        """Answers no more."""
        self._socket.close()
        self.address.unlink(missing_ok=True)
