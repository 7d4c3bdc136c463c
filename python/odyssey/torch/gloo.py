"""Ranks connected by PyTorch's Gloo, without MPI; extra `[torch]`.

Processes find each other by a store that init_process_group was given (`meet`), or by the variables
of env:// (`connect`). Gloo moves bytes in threads of its own, so a rank that waits uses no core. A
process group of torch.distributed that the program makes for itself is left alone.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ..base import install_extra, launcher, machine
from ..comm import Communicator, Message, Met, ReduceOp, Staged, adopt, calls, cores, deadline
from ..errors import CollectiveError, ConfigError

try:
    import torch
    import torch.distributed as dist
except ImportError as e:
    raise ConfigError(
        f"[comm] backend gloo needs PyTorch ({e}); {install_extra('torch')}, or use mpi"
    ) from e

_OPS = {ReduceOp[name]: getattr(dist.ReduceOp, name) for name in ("SUM", "MAX", "MIN", "PRODUCT")}
# what Gloo can add
_SUMMABLE_DTYPES = {
    np.dtype(name) for name in ("float32", "float64", "int8", "uint8", "int32", "int64")
}


class GlooCommunicator(Staged):
    """A communicator over two Gloo groups: one for headers, one for data.

    Sums are added in the order of the library; integers that Gloo cannot add (16 bits, and unsigned
    of 32 and 64) are gathered and added here.
    """

    name = "gloo"

    def __init__(
        self, store: Any, ranks: tuple[int, ...], me: int, of: GlooCommunicator | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self.ranks = ranks
        self.rank = ranks.index(me)
        self.size = len(ranks)
        # A group's name is its parent's, and how often that had a part of these ranks: the same for
        # all members.
        self._parts: dict[tuple[int, ...], int] = {}
        self._path = (
            "odyssey"
            if of is None
            else f"{of._path}/{of._parts[ranks]}:{'.'.join(map(str, ranks))}"
        )
        self._data = self._connect("data")
        self._head = self._connect("head")
        self._lines: dict[tuple[str, int | None, int], ThreadPoolExecutor] = {}
        self._noted: set[int] = set()
        if of is None:
            machines = np.zeros((self.size, 1), np.int64)
            self._head.allgather(
                [list(torch.from_numpy(machines))], [torch.from_numpy(np.array([machine()]))]
            ).wait()
            self._nodes = machines.reshape(-1).tolist()
            self.why = f"gloo: {self.size} ranks, PyTorch {torch.__version__}"
            self._crowded = self._nodes.count(self._nodes[me]) > cores.cores()
            self._world_size = self.size
        else:
            self._nodes = of._nodes
            self.why = of.why
            self._crowded = of._crowded
            self._world_size = of._world_size
        local_ranks = [p for p in self.ranks if self._nodes[p] == self._nodes[me]]
        self.local_rank = local_ranks.index(me)
        self.local_size = len(local_ranks)

    def _connect(self, name: str) -> Any:
        # torch's own deadline comes after ours, which names the ranks
        limit = datetime.timedelta(seconds=min(2 * deadline() + 60, 1e6))
        try:
            store = dist.PrefixStore(f"{self._path}/{name}", self._store)
            return dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        except RuntimeError as e:
            raise _lost_rank_error(e) from None

    def _send_header(self, header: calls.Header) -> tuple:
        packed = np.zeros(calls.header_bytes(self.size), np.uint8)
        calls.pack(header, packed)
        heads = np.zeros((self.size, len(packed)), np.uint8)
        work = self._head.allgather([list(torch.from_numpy(heads))], [torch.from_numpy(packed)])
        return work, heads, packed, header.sequence

    def _poll_headers(self, handle: tuple, local_header: calls.Header) -> Met | None:
        work, heads, *_ = handle
        if not _is_done(work):
            return None
        headers = calls.unpack(heads, local_header)
        return Met(
            headers,
            headers[max(local_header.root, 0)].tail,
            all(header.blocking for header in headers),
        )

    def _find_missing(self, handle: tuple) -> list[int]:
        """Ranks that wait long leave a note in the store; those without one did not come."""
        sequence = handle[3]
        key = f"{self._path}/{sequence}"
        try:
            if sequence not in self._noted:
                self._noted.add(sequence)
                self._store.set(f"{key}/{self.rank}", "here")
            return [
                p
                for p in range(self.size)
                if p != self.rank and not self._store.check([f"{key}/{p}"])
            ]
        except RuntimeError:  # the process that holds the store has ended
            return []

    # --- data ---

    def _post(self, call: calls.Call, blocking: bool) -> Callable[[], bool]:
        kind = call.kind
        send = call.send
        out = call.out
        n = self.size
        group = self._data
        bulk = send if send is not None else out
        if kind in ("barrier", "group") or (not bulk.size and kind != "all_to_all_v"):
            return lambda: True
        if call.op is not None:
            return self._combine(call)
        if kind == "broadcast":
            return _completion_test(
                group.broadcast([_bytes(out)], _options(dist.BroadcastOptions(), call.root)), out
            )
        if kind == "all_gather":
            return _completion_test(
                group.allgather([list(_bytes(out).view(n, -1))], [_bytes(send)]), send, out
            )
        gives, takes = call.routes(self.rank, n)
        outgoing = _in_line(bulk if send is None else send, gives)
        incoming = _in_line(bulk if out is None else out, takes)
        sizes = [[bulk.itemsize * (b - a) for a, b in runs] for runs in (takes, gives)]

        def place() -> None:
            offset = 0
            for a, b in takes if incoming.base is None else ():
                out.reshape(-1)[a:b] = incoming[offset : offset + b - a]
                offset += b - a

        return _completion_test(
            group.alltoall_base(_bytes(incoming), _bytes(outgoing), *sizes), outgoing, finish=place
        )

    def _combine(self, call: calls.Call) -> Callable[[], bool]:
        """Sums and the like, into an array of its own first; what Gloo cannot add is gathered
        and added here.
        """
        kind = call.kind
        send = call.send
        out = call.out
        group = self._data
        every = send.copy()
        if send.dtype not in _SUMMABLE_DTYPES:
            every = np.empty((self.size, send.size), send.dtype)
            work = group.allgather([list(_bytes(every).view(self.size, -1))], [_bytes(send)])
        elif kind == "reduce":
            options = _options(dist.ReduceOptions(), call.root, call.op)
            work = group.reduce([torch.from_numpy(every.reshape(-1))], options)
        else:
            options = _options(dist.AllreduceOptions(), op=call.op)
            work = group.allreduce([torch.from_numpy(every.reshape(-1))], options)

        def write_result() -> None:
            if out is not None:
                total = (
                    every
                    if send.dtype in _SUMMABLE_DTYPES
                    else calls.tree_reduce(list(every), call.op)
                )
                part = (
                    total.reshape(self.size, -1)[self.rank] if kind == "reduce_scatter" else total
                )
                out.reshape(-1)[...] = part.reshape(-1)

        return _completion_test(work, send, every, finish=write_result)

    def _data_arrived(self, is_done: Callable[[], bool]) -> bool:
        return is_done()

    # --- one to one: an envelope that says what follows, then the data; threads wait for
    #     them, in order

    def _in_line(self, way: str, peer: int | None, tag: int, work: Callable[[], Any]) -> Future:
        line = self._lines.get((way, peer, tag))
        if line is None:
            line = self._lines[way, peer, tag] = ThreadPoolExecutor(
                1, f"odyssey {way} {peer} {tag}"
            )
        return line.submit(work)

    def _send(self, array: np.ndarray, dest: int, tag: int, envelope: calls.Header) -> _Message:
        def work() -> None:
            self._data.send(
                [torch.from_numpy(calls.pack_envelope(envelope))], dest, 2 * tag + 1
            ).wait()
            if array.size:
                self._data.send([_bytes(array)], dest, 2 * tag).wait()

        message = _Message(self, envelope, dest)
        message.future = self._in_line("send", dest, tag, work)
        return message

    def _recv(
        self, out: np.ndarray, source: int | None, tag: int, envelope: calls.Header
    ) -> _Message:
        def work() -> np.ndarray:
            paper = np.zeros(calls.envelope_bytes(), np.uint8)
            get = self._data.recv_anysource
            arguments = (2 * tag + 1,)
            if source is not None:
                get = self._data.recv
                arguments = (source, *arguments)
            request = get([torch.from_numpy(paper)], *arguments)
            request.wait()
            message.source = peer = request._source_rank() if source is None else source
            sent, text = calls.unpack_envelope(paper)
            wrong = calls.check_envelope(
                sent, text, out, envelope, self.ranks[peer], self.ranks[self.rank]
            )
            target = np.empty(sent[1], list(calls.CODES)[sent[0]]) if wrong else out
            if target.size:
                self._data.recv([_bytes(target)], peer, 2 * tag).wait()
            if wrong:
                raise CollectiveError(wrong)
            return out

        message = _Message(self, envelope, source)
        message.future = self._in_line("recv", source, tag, work)
        return message

    def _create_subgroup(self, members: tuple[int, ...]) -> GlooCommunicator:
        ranks = tuple(self.ranks[p] for p in members)
        self._parts[ranks] = self._parts.get(ranks, 0) + 1
        return GlooCommunicator(self._store, ranks, self.ranks[self.rank], self)

    def close(self) -> None:
        if not self._is_world:
            for line in self._lines.values():
                line.shutdown(wait=False)
            self._data = self._head = None
            self._mark_closed()

    def abort(self, code: int) -> None:
        """Ends this process; the others see its connections close and end with an error of their
        own.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Message(Message):
    __slots__ = ("future",)
    future: Future

    def test(self) -> bool:
        if not self._complete and self.future.done():
            error = self.future.exception()
            if error is None:
                self._result = self.future.result()
                self._complete = True
            else:
                self._fail(error if isinstance(error, CollectiveError) else _lost_rank_error(error))
        return self._complete


def _in_line(array: np.ndarray, pieces: Sequence[calls.Run]) -> np.ndarray:
    """The pieces of the flat array one after the other: a view where they lie so, else a copy."""
    flat = array.reshape(-1)
    pieces = [(a, b) for a, b in pieces if a < b] or [(0, 0)]
    if all(a[1] == b[0] for a, b in itertools.pairwise(pieces)):
        return flat[pieces[0][0] : pieces[-1][1]]
    return np.concatenate([flat[a:b] for a, b in pieces])


def _bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _options(options: Any, root: int = -1, op: ReduceOp | None = None) -> Any:
    if root >= 0:
        options.rootRank = root
    if op is not None:
        options.reduceOp = _OPS[op]
    return options


def _lost_rank_error(error: BaseException) -> CollectiveError:
    """A failed transfer, in one line: as a rule the process at the other end is gone."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CollectiveError(f"[comm] a rank has ended, or cannot be reached: gloo says {line[:200]}")


def _is_done(work: Any) -> bool:
    if not work.is_completed():
        return False
    try:
        work.wait()
    except RuntimeError as e:
        raise _lost_rank_error(e) from None
    return True


def _completion_test(
    work: Any, *buffers: Any, finish: Callable[[], None] = lambda: None
) -> Callable[[], bool]:
    """A test of a work that holds its buffers, and calls `finish` once when it has ended."""

    def is_done() -> bool:
        if not _is_done(work):
            return False
        finish()
        assert buffers is not None
        return True

    return is_done


def meet(store: Any, rank: int, size: int, timeout: float | None = None) -> Communicator:
    """All processes that share a store of torch.distributed, which are those of this run from
    now on. Raises CollectiveError: some did not come within `timeout` seconds
    (ODYSSEY_TIMEOUT), which it names.
    """
    return adopt(_meet_in_store(store, rank, size, timeout), "they met in torch's store")


def _meet_in_store(
    store: Any, rank: int, size: int, timeout: float | None = None
) -> GlooCommunicator:
    # Each restart of torchrun and each meeting has names of its own: the store outlives the ranks
    # and their groups.
    store = dist.PrefixStore(f"odyssey {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    store = dist.PrefixStore(f"{store.add(f'meetings/{rank}', 1)}", store)
    limit = min(timeout or deadline(), 1e6)
    keys = [f"here/{p}" for p in range(size)]
    store.set(keys[rank], "")
    until = time.monotonic() + limit
    while not store.check(keys):  # not `wait`, at whose end torch prints lines of its own
        if time.monotonic() > until:
            late = [p for p in range(size) if not store.check([keys[p]])]
            raise CollectiveError(
                f"[comm] waited {limit:g} s for {size} ranks to meet: "
                f"{'rank' if len(late) == 1 else 'ranks'} {', '.join(map(str, late))} did not "
                "come; start all of them, with one address and port"
            )
        time.sleep(0.01)
    store.set_timeout(datetime.timedelta(seconds=limit))
    return GlooCommunicator(store, tuple(range(size)), rank)


def connect() -> GlooCommunicator:
    """All processes that the variables of env:// speak of; called once per process."""
    env = launcher.rendezvous() or launcher.launched()
    if env is None or not all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        raise ConfigError(
            "[comm] backend gloo finds its processes by RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; start them with torchrun, or set these"
        )
    limit = datetime.timedelta(seconds=min(deadline(), 1e6))
    query = f"env://?rank={env.rank}&world_size={env.size}"
    try:
        store, rank, size = next(dist.rendezvous(query, timeout=limit))
        return _meet_in_store(store, rank, size)
    except (RuntimeError, ValueError, CollectiveError) as e:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        line = str(e).strip().splitlines()[0][:200]
        raise ConfigError(
            f"[comm] gloo: rank {env.rank} of {env.size} does not meet the others at {place} "
            f"({line}); start all ranks, with an address and a free port of rank 0's machine"
        ) from None
