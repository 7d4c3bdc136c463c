"""The watcher: a small process on each machine of a job that reads the slots of its ranks four
times a second.

It is no thread of a rank, as a rank that is stopped, or that holds the interpreter's lock for ever,
cannot watch itself. That of rank 0's machine, the main one, hears from the others, says what hangs,
ends the job, keeps the heartbeat of a run, and answers `odyssey top`. A watcher ends with the last
rank of its machine, and leaves nothing.

Started by start_watcher.py as `python -I -S watcher.py`, with its settings on stdin; the standard
library only. Nothing that happens to it can hurt the ranks, unless machines lose each other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

# -I: the package is found by its place alone, and its own __init__.py does not run
if __name__ == "__main__":
    sys.modules["odyssey"] = type(sys)("odyssey")
    sys.modules["odyssey"].__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from odyssey.base import runs  # noqa: E402
from odyssey.base.files import FILE_MODE, read_json  # noqa: E402
from odyssey.errors import DataError  # noqa: E402
from odyssey.watch import diagnosis, messages, watcher_output
from odyssey.watch.rank_process import WatchedRank  # noqa: E402

SECRET_MODE = 0o600  # of the file that opens the connection of the watchers
TICK = 0.25  # seconds between looks
BEAT = 0.5  # seconds between messages of machines
HUNG = 77
LOST = 69
DEFECT = 70
WORDS_S = 1.5  # seconds in which words and files must be out before ranks are ended
LAST_LOOK = 0.3  # seconds for which the last heartbeat stays
GRACE = 1.0  # seconds that ranks have for ending the job themselves
QUIET = 60.0  # seconds between lines about stragglers
# in a row, before a rank is called slow: a busy machine slows one down for a moment
SLOW_LOOKS = 20
STACKS_S = 2.0  # seconds for answers, of ranks that may have to wait for a core
SETTLED_S = 0.15  # an answer that has not grown for so long is whole
UNAUTHENTICATED_TIMEOUT = 2.0  # seconds that who calls has to show that it knows the secret
UNAUTHENTICATED_LIMIT = 64  # callers that may be about to


class Watcher:
    """See the head of this file. `settings`: as start_watcher.py makes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.world = int(settings["world"])
        self.limit = float(settings["watchdog"])
        self.preparing = not settings.get("given", True)  # nobody has said what the limit is to be
        self.patience = float(settings["heartbeat"])
        self.run_dir = settings["run"]
        self.attempt = int(settings["attempt"])
        self.secret = bytes.fromhex(settings["secret"])
        self.main = bool(settings["main"])
        self.address = settings["address"]
        self.files = {
            path: os.lstat(path).st_ino for path in settings["files"] if os.path.lexists(path)
        }
        self.ranks = {rank: WatchedRank(rank, *process) for rank, *process in settings["ranks"]}
        self.nodes = [set(ranks) for ranks in settings["nodes"]]
        self.writer = watcher_output.Writer()
        self.host = os.uname().nodename
        self.pid = self.ranks[0].pid if 0 in self.ranks else 0  # of rank 0, which a job is known by
        self.seen: dict[int, diagnosis.Seen] = {}
        self.poll = select.poll()
        self.floor = self.last_tick = self.begun = time.monotonic()
        self.next_beat = self.next_file = self.next_maps = 0.0
        self.ending: float = 0.0  # when the ranks that are left are killed
        self.slow: dict[int, int] = {}  # rank, or ~rank for its link -> looks at which it was slow
        self.next_slow = self.floor + 5
        self.files_by_handle: dict[int, Any] = {}
        for watched in self.ranks.values():
            if watched.handle >= 0:
                self._listen_to(watched.handle, watched)
        # Between machines. Of the main one: who has called; of the others: their connection.
        self.peers: dict[int, messages.Lines] = {}
        # who has called and not yet shown the secret, and when
        self.unauthenticated: dict[messages.Lines, float] = {}
        self.heard: dict[int, float] = {}  # index of a node -> when it was last heard of
        self.left: set[int] = set()  # nodes whose ranks have all ended
        self.answers: dict[int, str] = {}
        self.listener = self.local = self.up = None
        self.up_heard = self.next_call = 0.0
        self.told_unwatched = self.told_unseen = False
        if self.main:
            if settings["listen"] >= 0:
                self.listener = socket.socket(fileno=settings["listen"])
                self.listener.setblocking(False)
                self._listen_to(self.listener.fileno(), self.listener)
            self._open_local()

    def _listen_to(self, handle: int, source: Any) -> None:
        self.files_by_handle[handle] = source
        self.poll.register(handle, select.POLLIN)

    def _forget(self, handle: int) -> None:
        if self.files_by_handle.pop(handle, None) is not None:
            with contextlib.suppress(KeyError, OSError):
                self.poll.unregister(handle)

    def _open_local(self) -> None:
        """Where `odyssey top` asks: a name that is no file, ends with this process, and that
        nobody can take before.
        """
        try:
            self.local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.local.bind(
                f"\0odyssey-watch-{os.getuid()}-{self.ranks[0].pid}-{os.urandom(8).hex()}"
            )
            self.local.listen(8)
            self.local.setblocking(False)
            self._listen_to(self.local.fileno(), self.local)
        except (OSError, KeyError):
            self.local = None

    def run(self) -> None:
        """Until all ranks of this machine are gone."""
        self._write_address()
        try:
            self.tick()
            while any(watched.alive for watched in self.ranks.values()):
                self.pump(TICK)
                if time.monotonic() - self.last_tick >= TICK:
                    self.tick()
        finally:
            self._finish()

    def pump(self, seconds: float) -> None:
        """Takes what comes within some time."""
        for handle, _ in self.poll.poll(max(int(1000 * seconds), 1)):
            source = self.files_by_handle.get(handle)
            if source is None:  # dropped meanwhile
                continue
            if isinstance(source, WatchedRank):
                self._forget(handle)
                self._handle_deaths([source, *self._find_other_deaths()])
            elif source is self.listener or source is self.local:
                self._accept(source)
            elif isinstance(source, messages.Lines):
                self._hear(source)

    def tick(self) -> None:
        now_s = time.monotonic()
        # it was stopped, or starved: what it did not see does not count
        if now_s - self.last_tick > 2 + 4 * TICK:
            self.floor = now_s
            self.up_heard = now_s if self.up_heard else 0.0
            self.heard = dict.fromkeys(self.heard, now_s)
        self.last_tick = now_s
        for rank, watched in self.ranks.items():
            was_alive = watched.alive
            self.seen[rank] = watched.look(now_s, self.floor)
            if was_alive and not watched.alive and watched.handle < 0:  # no handle told it
                self._handle_deaths([watched])
        if not self.told_unseen and now_s > self.begun + 2:
            self.told_unseen = True
            unseen = sorted(w.rank for w in self.ranks.values() if w.alive and w.last is None)
            if unseen:
                self._say(
                    f"odyssey: [watch] {diagnosis.name(unseen)} cannot be watched: no slot of "
                    "theirs opens\n"
                )
        if now_s >= self.next_maps:
            self.next_maps = now_s + 5
            for watched in self.ranks.values():
                watched.map_files()
        if self.main:
            self._tick_main(now_s)
        elif self.address:
            self._tick_other(now_s)
        if self.ending and now_s >= self.ending:
            self._kill()

    def _tick_main(self, now_s: float) -> None:
        for peer, since in list(self.unauthenticated.items()):
            if now_s - since > UNAUTHENTICATED_TIMEOUT:
                self._drop(peer)
        if now_s >= self.next_beat:
            self.next_beat = now_s + BEAT
            self._tell_nodes({"beat": True})
        if self.run_dir and now_s >= self.next_file:
            self.next_file = now_s + 1
            self._write_heartbeat()
        if self.ending:
            return
        for node, heard_at in self.heard.items():
            if now_s - heard_at > self.patience and node not in self.left:
                self._lost(node, now_s - heard_at)
                return
        if (
            not self.told_unwatched
            and len(self.nodes) > 1
            and now_s > self.floor + 4 * self.patience
        ):
            self.told_unwatched = True
            absent = sorted(
                r for n, ranks in enumerate(self.nodes) if n and n not in self.heard for r in ranks
            )
            if absent:
                self._say(
                    f"odyssey: [watch] {diagnosis.name(absent)} cannot be watched: their machines "
                    "did not call\n"
                )
        if self.limit:
            hang = diagnosis.find_hang(self.seen, self.world, self.limit, self.preparing)
            if hang is not None:
                self._hang(hang)
                return
        self._look_for_stragglers(now_s)

    def _look_for_stragglers(self, now_s: float) -> None:
        seen_ranks = list(self.seen.values())
        slow = sorted(diagnosis.stragglers(seen_ranks), key=lambda straggler: -straggler[1])
        lines = {
            rank: diagnosis.slow_line(self.seen[rank], times, activity)
            for rank, times, activity in slow
        }
        if (late := diagnosis.slow_link(seen_ranks)) is not None and late.link[0] in self.seen:
            lines[~late.link[0]] = diagnosis.link_line(late, self.seen[late.link[0]].host)
        self.slow = {key: self.slow.get(key, 0) + 1 for key in lines}
        if now_s < self.next_slow:
            return
        for key, line in lines.items():
            if self.slow[key] >= SLOW_LOOKS:
                self.next_slow = now_s + QUIET
                self._say(line)
                return

    def _hang(self, hang: diagnosis.Hang) -> None:
        stacks = self._gather_stacks()
        for rank, watched in self.ranks.items():
            self.seen[rank] = watched.look(time.monotonic(), self.floor)
        if diagnosis.find_hang(self.seen, self.world, self.limit, self.preparing) is None:
            return  # it went on while the stacks were gathered
        path = self._write_stacks(stacks)
        self._say(diagnosis.paragraph(hang, self.seen, stacks, path, self.limit, HUNG))
        for rank in hang.culprits:
            self._write_reason(
                rank, HUNG, f"hang: {diagnosis.about(self.seen[rank], stacks.get(rank, ''))}"
            )
        self._end(HUNG, avoid=set(hang.culprits))

    def _gather_stacks(self) -> dict[int, str]:
        starts = {rank: watched.ask_for_stacks() for rank, watched in self.ranks.items()}
        self.answers = {}
        self._tell_nodes({"stacks": True})
        remote_ranks = {
            rank for node in self.heard if node not in self.left for rank in self.nodes[node]
        }
        local_stacks = self._settled(
            starts, STACKS_S, self.pump, lambda: remote_ranks <= self.answers.keys()
        )
        return {**local_stacks, **self.answers}

    def _settled(
        self,
        starts: dict[int, int],
        seconds: float,
        pause: Callable[[float], None],
        others_answered: Callable[[], bool] = lambda: True,
    ) -> dict[int, str]:
        """Returns what ranks of this machine answer, when all have and the others too, or
        after so many seconds.
        """
        sizes = []
        since = time.monotonic()
        until = since + seconds
        while (now_s := time.monotonic()) < until:
            previous_sizes = sizes
            sizes = [
                self.ranks[r].answer(offset) for r, offset in starts.items() if self.ranks[r].alive
            ]
            if sizes != previous_sizes:
                since = now_s
            elif 0 not in sizes and now_s - since >= SETTLED_S and others_answered():
                break
            pause(0.03)
        return {rank: self.ranks[rank].stacks(offset) for rank, offset in starts.items()}

    def _write_stacks(self, stacks: dict[int, str]) -> str:
        folder = (
            os.path.join(self.run_dir, "logs", f"attempt-{self.attempt}") if self.run_dir else ""
        )
        name = "stacks.txt" if folder else f"odyssey-stacks-{self.ranks[0].pid}.txt"
        parts = []
        for rank in sorted(self.seen):
            about = diagnosis.about(self.seen[rank], "")
            parts.append(f"=== {about}\n{stacks.get(rank) or '(no stacks)'}\n")
        path = os.path.join(folder, name)
        text = "\n".join(parts)
        results = []
        self.writer.put(lambda: results.append(watcher_output.write(path, text)))
        self.writer.drain(WORDS_S)
        return path if any(results) else ""

    def _say(self, text: str) -> None:
        self.writer.put(lambda: watcher_output.say(text))

    def _find_other_deaths(self) -> list[WatchedRank]:
        """Other ranks of which the kernel says at this moment that they are gone."""
        ready = {handle: self.files_by_handle.get(handle) for handle, _ in self.poll.poll(0)}
        dead_ranks = {
            handle: source for handle, source in ready.items() if isinstance(source, WatchedRank)
        }
        for handle in dead_ranks:
            self._forget(handle)
        return list(dead_ranks.values())

    def _handle_deaths(self, ranks: list[WatchedRank]) -> None:
        """Some ranks are gone, at the same time as far as can be told."""
        statuses = {watched.rank: watched.code() for watched in ranks}
        for watched in ranks:
            self.seen[watched.rank] = watched.look(time.monotonic(), self.floor)._replace(
                state="gone"
            )
            watched.alive = False
        # Who was gone before anybody could look may have said why, unless it was killed.
        spoke = {w.rank for w in ranks if w.last is None and not (statuses[w.rank] or 0) & 0x7F}
        silent = [w.rank for w in ranks if not self.seen[w.rank].ended and w.rank not in spoke]
        # somebody has said why the job ends
        reason_known = any(s.ended and s.code for s in self.seen.values())
        if self.ending or reason_known or not silent or (len(silent) == len(self.ranks) > 1):
            return
        now_s = time.monotonic()
        # who waited was ended with the first, as a rule
        silent.sort(key=lambda rank: self.seen[rank].waits)
        first = self.seen[silent[0]]
        status = statuses[silent[0]]
        cause = "was killed by a signal, or called os._exit"
        code = None
        number = None
        if status is not None and status & 0x7F:
            number = status & 0x7F
            cause = f"was killed by {diagnosis.signal_name(number)}"
        elif status is not None:
            cause = f"exited without reporting an error (exit code {status >> 8}; os._exit?)"
            code = status >> 8 or DEFECT
        last = f"; its last call was {first.call}, {first.call_text}" if first.call >= 0 else ""
        doing = f"waiting in {first.wait_text}" if first.waits else f"in {first.phase}"
        subject = (
            f"rank {first.rank} (pid {first.pid} on {first.host or self.host}, step "
            f"{first.step}, {doing})"
        )
        # before the words: a launcher waits for these
        self._write_reason(first.rank, code, f"{cause}, {doing}", number)
        if not self._asked_to_stop():  # the launcher then says what has ended the ranks
            self._say(f"odyssey: [watch] {subject} {cause}{last}; all ranks are ended\n")
        self.ending = now_s + GRACE  # as a rule the launcher ends them before
        if self.up is not None:
            self._tell(self.up, {"down": code or DEFECT})

    def _asked_to_stop(self) -> bool:
        """Returns whether the launcher was asked to end the ranks, by a signal."""
        request = None
        with contextlib.suppress(DataError):
            if self.run_dir:
                request = read_json(Path(self.run_dir, "control.json"))
        if not isinstance(request, dict) or request.get("attempt") != self.attempt:
            return False
        return str(request.get("stop")).startswith("SIG")

    def _end(self, code: int, avoid: set[int]) -> None:
        """Ends the job: by a rank that can, here or elsewhere; who is left is killed."""
        self.writer.drain(WORDS_S)
        self.ending = time.monotonic() + GRACE
        self._tell_nodes({"end": code, "order": not self._order(code, avoid)})

    def _order(self, code: int, avoid: Collection[int] = ()) -> bool:
        """Has ranks of this machine end the job, those that wait before others; whether there is
        one that can.
        """
        able = [
            w
            for rank, w in self.ranks.items()
            if w.alive and rank not in avoid and self.seen[rank].state != "T"
        ]
        return any([w.order(code) for w in sorted(able, key=lambda w: not self.seen[w.rank].waits)])

    def _kill(self) -> None:
        for watched in self.ranks.values():
            if watched.alive:
                watched.signal(signal.SIGKILL)

    def _finish(self) -> None:
        """The last to leave: what MPI leaves behind in shared memory goes, and what is this
        watcher's own.
        """
        for watched in self.ranks.values():
            self.files |= watched.files
        for path, inode in self.files.items():
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                if status.st_ino == inode and status.st_uid == os.getuid():
                    os.unlink(path)
        for peer in [*self.peers.values(), *([self.up] if self.up else [])]:
            self._tell(peer, {"bye": True})
            peer.close()
        if self.main and self.run_dir:
            if watcher_output.is_of(
                os.path.join(self.run_dir, "heartbeat.json"), attempt=self.attempt
            ):
                self._write_heartbeat()
                self.writer.drain(WORDS_S)
                time.sleep(LAST_LOOK)
            identities = (
                {"attempt": self.attempt},
                {"attempt": self.attempt, "host": self.host, "pid": self.pid},
            )
            for name, identity in zip(("heartbeat.json", "watch.json"), identities, strict=True):
                # No heartbeat: these ranks are not watched any more.
                path = os.path.join(self.run_dir, name)
                self.writer.put(functools.partial(watcher_output.remove, path, **identity))
        self.writer.drain(WORDS_S)

    def _write(self, name: str, value: Any, mode: int = FILE_MODE) -> None:
        path = os.path.join(self.run_dir, name)
        self.writer.put(lambda: watcher_output.write(path, json.dumps(value) + "\n", mode))

    def _write_heartbeat(self) -> None:
        ranks = [
            {"rank": s.rank, "step": s.step, "phase": s.doing} for _, s in sorted(self.seen.items())
        ]
        value = {"attempt": self.attempt, "time": time.time(), "ranks": ranks}
        path = os.path.join(self.run_dir, "heartbeat.json")
        self.writer.put(
            lambda: watcher_output.renew(path, value, attempt=self.attempt), "heartbeat"
        )

    def _write_address(self) -> None:
        if self.main and self.run_dir:
            secret = self.secret.hex() if self.address else ""
            identity = {"host": self.host, "pid": self.pid, "attempt": self.attempt}
            content = {**identity, "address": self.address, "secret": secret}
            self._write("watch.json", content, SECRET_MODE if secret else FILE_MODE)

    def _write_reason(
        self, rank: int, code: int | None, reason: str, number: int | None = None
    ) -> None:
        """For a rank that cannot do it. code: None where it is not known, or a signal (`number`)
        has ended it.
        """
        if not self.run_dir:
            return
        status = self.seen[rank]
        value = runs.end_record(rank, status.host, code, number, status.step, reason, self.attempt)
        self._write(os.path.join("ends", f"{rank}.reason.json"), value)

    # --- between machines, and `odyssey top` ---

    def _accept(self, listener: Any) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        local = listener is self.local
        refused = len(self.peers) > 2 * len(self.nodes) + 16
        if local:
            refused |= messages.user_of(connection) not in (os.getuid(), 0)
        else:
            refused |= len(self.unauthenticated) >= UNAUTHENTICATED_LIMIT
        peer: messages.Lines | None = None
        if not refused:
            with contextlib.suppress(messages.Closed):
                peer = (
                    messages.Lines(connection)
                    if local
                    else messages.Sealed(connection, self.secret, caller=False)
                )
        if peer is None:
            connection.close()
            return
        if not local:
            self.unauthenticated[peer] = time.monotonic()
        self.peers[peer.fileno()] = peer
        self._listen_to(peer.fileno(), peer)

    def _tell(self, peer: messages.Lines, value: Any) -> None:
        try:
            peer.send(value)
        except messages.Closed:
            self._drop(peer)

    def _tell_nodes(self, value: Any) -> None:
        for peer in [peer for peer in self.peers.values() if peer.role == "node"]:
            self._tell(peer, value)

    def _drop(self, peer: messages.Lines) -> None:
        handle = peer.fileno()
        self._forget(handle)
        self.peers.pop(handle, None)
        self.unauthenticated.pop(peer, None)
        if peer is self.up:
            self.up = None
        peer.close()

    def _hear(self, peer: messages.Lines) -> None:
        try:
            values = peer.receive()
        except messages.Closed:
            self._drop(peer)
            return
        if peer.ready:
            self.unauthenticated.pop(peer, None)
        if peer is self.up and peer.ready:
            self.up_heard = time.monotonic()
        for value in values:
            if isinstance(value, dict):
                if peer is self.up:
                    self._from_main(value)
                elif peer.role == "node":
                    self._from_node(peer, value)
                elif value.get("look"):
                    self._tell(peer, self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Returns what `odyssey top` shows."""
        slow = {
            str(rank): [times, activity]
            for rank, times, activity in diagnosis.stragglers(list(self.seen.values()))
        }
        ranks = [brief(s) for _, s in sorted(self.seen.items())]
        job = {
            "host": self.host,
            "pid": self.pid,
            "world": self.world,
            "attempt": self.attempt,
            "run": self.run_dir,
        }
        return {**job, "watchdog": self.limit, "ranks": ranks, "slow": slow}

    # --- the main watcher and the others ---

    def _from_node(self, peer: messages.Lines, value: dict[str, Any]) -> None:
        node = value.get("node")
        if not isinstance(node, int) or not 0 < node < len(self.nodes):
            return
        self.heard[node] = time.monotonic()
        items = value.get("seen")
        for status in map(diagnosis.parse_seen, items if isinstance(items, list) else ()):
            if status is not None and status.rank in self.nodes[node]:
                self.seen[status.rank] = status
        stacks = value.get("answer")
        if isinstance(stacks, dict):
            for rank, text in stacks.items():
                if rank.isdigit() and int(rank) in self.nodes[node] and isinstance(text, str):
                    self.answers[int(rank)] = text
        if value.get("bye"):
            self.left.add(node)
        if isinstance(value.get("down"), int) and not self.ending:
            self.ending = time.monotonic() + GRACE

    def _lost(self, node: int, seconds: float) -> None:
        ranks = sorted(self.nodes[node])
        host = next((self.seen[r].host for r in ranks if r in self.seen), "?")
        self._say(
            f"odyssey: [watch] no sign of life from {host} ({diagnosis.name(ranks)}) for "
            f"{seconds:.0f} s: it is dead or cut off; all ranks are ended\n"
        )
        for rank in ranks:
            if rank in self.seen:
                self._write_reason(rank, LOST, f"no sign of life from {host} for {seconds:.0f} s")
        self._end(LOST, avoid=set(ranks))

    def _tick_other(self, now_s: float) -> None:
        """Tells the main watcher, from a machine without rank 0, and looks whether it is there."""
        if self.up is None and now_s >= self.next_call:
            self.next_call = now_s + BEAT
            self._call()
        up = self.up
        if up is not None and up.ready and now_s >= self.next_beat:
            self.next_beat = now_s + BEAT
            ranks = [brief(self.seen[rank]) for rank in self.ranks]
            self._tell(up, {"node": self._node, "seen": ranks})
        # late alone is not cut off: as long as that machine answers, its kernel keeps the
        # connection
        if (
            self.up is None
            and self.up_heard
            and now_s - self.up_heard > self.patience
            and not self.ending
        ):
            ended = (
                f"{diagnosis.name(sorted(self.ranks))} "
                f"{'is' if len(self.ranks) == 1 else 'are'} ended"
            )
            problem = f"is cut off from rank 0's machine for {now_s - self.up_heard:.0f} s"
            self._say(f"odyssey: [watch] {self.host} {problem}; {ended}\n")
            for rank in self.ranks:
                self._write_reason(rank, LOST, f"{self.host} was cut off from rank 0's machine")
            self.writer.drain(WORDS_S)
            self.ending = now_s
            self._kill()

    @property
    def _node(self) -> int:
        return next(n for n, ranks in enumerate(self.nodes) if next(iter(self.ranks)) in ranks)

    def _call(self) -> None:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.settimeout(0.2)
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.patience)
        )
        try:
            connection.connect((self.address[0], int(self.address[1])))
            self.up = messages.Sealed(connection, self.secret, caller=True, role="node")
        except (OSError, messages.Closed):
            connection.close()
            return
        self._listen_to(self.up.fileno(), self.up)

    def _from_main(self, value: dict[str, Any]) -> None:
        if value.get("stacks"):
            starts = {rank: watched.ask_for_stacks() for rank, watched in self.ranks.items()}
            local_stacks = self._settled(
                starts, min(0.75 * STACKS_S, self.patience / 2), time.sleep
            )
            texts = {str(rank): text[:65536] for rank, text in local_stacks.items()}
            if self.up is not None:
                self._tell(self.up, {"node": self._node, "answer": texts})
        if isinstance(value.get("end"), int):
            self.ending = time.monotonic() + GRACE
            if value.get("order"):
                self._order(value["end"] & 0xFF)
        if value.get("bye"):
            # rank 0's machine has ended in order
            self.up_heard = 0.0
            self.address = None


def brief(status: diagnosis.Seen) -> dict[str, Any]:
    """A `Seen` as JSON, without what is as it is when nothing is said."""
    default = diagnosis.Seen(0)
    return {k: v for k, v in status._asdict().items() if k == "rank" or v != getattr(default, k)}


def main() -> None:
    """Reads the settings and watches."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGPIPE,
    ):
        # meant for the ranks, or for nobody; it ends with them
        signal.signal(number, signal.SIG_IGN)
    try:
        settings = json.loads(sys.stdin.readline(16 << 20))
    except ValueError:  # the rank that started this one is gone already
        return
    if settings.get("detach") and os.fork():
        # what goes on is no child of a rank: nobody waits for it, or takes it for one of his own
        os._exit(0)
    try:
        Watcher(settings).run()
    except Exception as problem:
        host = os.uname().nodename
        last = watcher_output.Writer()
        line = (
            f"odyssey: [watch] defect: the ranks on {host} go on unwatched: "
            f"{type(problem).__name__}: {problem}\n"
        )
        last.put(lambda: watcher_output.say(line))
        last.drain(WORDS_S)


if __name__ == "__main__":
    main()
