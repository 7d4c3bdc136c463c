"""The GPUs of this process: one per worker, each with the parameters, the optimizer's state and
room to compute in.

All workers hold the same parameters and take the same steps. Here is what lasts; plan.py and
runner.py decide per step.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core import fingerprint
from ...core import native as host
from ...core.arena import Arena
from ...core.gpu_native import BLOCK_BYTES, COMPUTE, COPY, Gpu, GpuStep, StepBlock, library
from ...data import ArrayDataset
from ...errors import DeviceError
from ...optim import Optimizer, Update
from .mirror import Mirror
from .offloaded import Offloaded

# A data set is kept on a device if it leaves this share of the free memory to the training.
DATA_SHARE = 0.5

GRADIENTS = ("sums", "gradients", "result", "met")  # areas that hold some


class Worker:
    """One worker's device and what it holds there.

    Areas grow when more is asked for and keep nothing then.
    """

    def __init__(self, number: int) -> None:
        self.gpu = Gpu(number)
        self._areas: dict[str, tuple[int, int]] = {}
        self._pinned: dict[str, np.ndarray] = {}
        self.generation = 0  # goes up when an area moves
        self.written_for: Any = None  # whom the block's lasting fields were written for
        self.turn = 0  # of the two places for batches that are brought
        self.prefetched: Any = None  # the last one: who asked for it, the batch, where it is
        # of the two places: the copy into it is done
        self.events = [self.gpu.event(), self.gpu.event()]
        self.block = self.area("block", BLOCK_BYTES)
        self.host_block = self.pinned("block", BLOCK_BYTES)
        self.host_params = StepBlock.from_address(self.host_block.ctypes.data)

    def area(self, name: str, nbytes: int, *, clear: bool = False) -> int:
        """Address of device memory that all runners use for the same thing, as one runs at a
        time.
        """
        address, size = self._areas.get(name, (0, -1))
        if size < nbytes:
            if size >= 0:
                self.idle()
                self.gpu.free(address)
                self.generation += 1
            address = self.gpu.allocate(nbytes)
            self._areas[name] = (address, nbytes)
            if clear:
                self.gpu.clear(address, nbytes)
        return address

    def pinned(self, name: str, nbytes: int) -> np.ndarray:
        """The same of pinned host memory (nbytes,) uint8."""
        if len(self._pinned.get(name, ())) < max(nbytes, 1):
            if name in self._pinned:
                self.idle()
                self.gpu.free(self._pinned.pop(name).ctypes.data)
            self._pinned[name] = self.gpu.pinned(max(nbytes, 16))
        return self._pinned[name][:nbytes]

    def copy(self, source: Worker, to: int, address: int, nbytes: int) -> None:
        """Enqueues a copy of `nbytes` to an address here from one on another worker's device, or
        on this one.
        """
        if source is self:
            self.gpu.move(to, address, nbytes)
        else:
            self.gpu.take(source.gpu, to, address, nbytes)

    def idle(self) -> None:
        """Waits until nothing is under way."""
        self.gpu.synchronize(COMPUTE)
        self.gpu.synchronize(COPY)

    @property
    def flag(self) -> int:
        """Address of the flag on the device: 1 while all numbers checked in this step were
        finite.
        """
        return self.block + StepBlock.flag.offset

    @property
    def divisor(self) -> int:
        """Address of the number on the device that gradients are divided by, where the host has
        set one.
        """
        return self.block + StepBlock.divisor.offset

    def run(self, records: np.ndarray) -> None:
        """Enqueues records whose operands are addresses."""
        step = GpuStep(
            program=records.ctypes.data,
            records=len(records),
            context=self.block,
            flag=self.flag,
            shards=1,
            fold=1,
        )
        self.gpu.run(step)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory in areas."""
        return sum(size for _, size in self._areas.values())

    def memory(self) -> tuple[int, int]:
        """Bytes of device memory for gradients and their sums, and for everything else in areas."""
        gradients = sum(
            size for name, (_, size) in self._areas.items() if name.split()[0] in GRADIENTS
        )
        return gradients, self.nbytes - gradients


class DeviceGroup:
    """The workers of this process.

    Args:
        numbers: the device of each worker; one may come several times (oversubscribed).
        arena: the parameters that they train.

    Raises DeviceError: a device cannot be opened, or has too little memory.
    """

    def __init__(self, numbers: Sequence[int], arena: Arena) -> None:
        self.workers = [Worker(n) for n in numbers]
        self.arena = arena
        _ = arena.params  # as another trainer's GPUs left them
        self.parameters = Mirror(self.gpus, lambda: [arena.host])
        arena.mirror = self.parameters
        self._state: Mirror | None = None
        self._offloaded: Offloaded | None = None
        # of an update
        self._records = [np.zeros((3, host.library().record), np.int64) for _ in self.workers]
        self._checks: list[Fingerprints] = []
        self._step_fingerprints: dict[int, Fingerprints] = {}  # by the id of a step's updates
        self._norm = (0.0, np.zeros(2, np.int64))  # the last one's largest number, and squares
        # are used where they can be (graph.py)
        self.graphs = os.environ.get("ODYSSEY_GPU_GRAPHS", "1") != "0"
        self.notes: list[str] = []  # what the user should know, until it was shown
        # sums of the last step, whose blocks are being read until they are fetched
        self.pending: Any = None
        self._data: dict[int, tuple[weakref.ref[Any], list[Placed | None]]] = {}
        for a, b in itertools.permutations(self.gpus, 2):
            if a.number != b.number:
                # may read its memory from now on, if it can; else the driver copies through the
                # host
                a.reaches(b)

    @property
    def gpus(self) -> list[Gpu]:
        return [w.gpu for w in self.workers]

    def describe(self) -> str:
        """One line for the user."""
        devices = {g.number: g.name for g in self.gpus}
        text = ", ".join(f"gpu:{n} {name}" for n, name in sorted(devices.items()))
        return f"{text} ({len(self.gpus)} workers)" if len(devices) < len(self.gpus) else text

    def keep(
        self, optimizer: Optimizer, offload: str | Path | None = None, window: int = 0
    ) -> None:
        """Takes the optimizer's state to the devices, or offloads it: "cpu", or files, `window`
        floats at a time.
        """
        _ = optimizer.state
        self._optimizer = optimizer
        if offload is not None:
            size = self.arena.size
            self._offloaded = Offloaded(
                self.workers, optimizer, size, None if offload == "cpu" else window
            )
            return
        self._state = Mirror(self.gpus, lambda: list(optimizer.arrays.values()))
        optimizer.mirror = self._state

    def write(self) -> None:
        """Brings the devices what the host, or another trainer of the same parameters, may have
        changed.
        """
        if self.arena.mirror is not self.parameters:
            _ = self.arena.params
            self.arena.mirror = self.parameters
            self.parameters.outdated()
        self.parameters.write()
        if self._state is not None:
            if self._optimizer.mirror is not self._state:
                _ = self._optimizer.state
                self._optimizer.mirror = self._state
                self._state.outdated()
            self._state.write()
        elif self._offloaded is not None:
            self._offloaded.take_back()

    def update(self, w: int, result: int) -> Update:
        """The update of all parameters on worker w from gradients at `result`."""
        state = () if self._state is None else tuple(self._state.addresses[w])
        return Update(
            self.parameters.addresses[w][0], result, 0, self.arena.size, 0, state, self.workers[w]
        )

    def _enqueue(self, w: int, records: list[list[int]]) -> None:
        """Enqueues records on worker w, written into memory that stays: most steps have the same
        number of them.
        """
        if len(self._records[w]) < len(records):
            self._records[w] = np.zeros((len(records), host.library().record), np.int64)
        for i, record in enumerate(records):
            self._records[w][i, : len(record)] = record
        self.workers[w].run(self._records[w][: len(records)])

    def commit_step(self, optimizer: Optimizer, sums: Any, divisor: int, lr: float) -> bool:
        """Takes the step on all workers if the loss and all gradients are finite; returns
        whether they were.

        The devices decide that themselves: the update is enqueued behind the check and does nothing
        if it failed.

        sums: of runner.GpuRunner; those of its own step. divisor: address of the number gradients
        are divided by: sums.samples_address, or one of the host.
        """
        lib = library()
        n = self.arena.size
        self.write()
        optimizer.steps += 1
        optimizer._recorded.begin_step()
        by_samples = divisor == sums.samples_address
        value = 0.0 if by_samples else host.float_at(divisor)
        for w, worker in enumerate(self.workers):
            result = sums.results[w]
            by = result + 4 * (n + 1)
            if not by_samples:
                if worker.host_params.divisor != value:  # else the block has it
                    worker.host_params.divisor = value
                    worker.gpu.upload(
                        worker.divisor, worker.host_block[StepBlock.divisor.offset :][:4]
                    )
                by = worker.divisor
            counted = result + 4 * (n + 1)  # the samples
            checked = [[lib.codes["finite"], result, n + host.library().stats]]

            def rules(u: Update, by: int = by, counted: int = counted) -> list[list[int]]:
                pieces = optimizer.trained([u])
                return [
                    rule
                    for piece in pieces
                    for rule in optimizer.records(lib, piece, by, lr, counted)
                ]

            update = self.update(w, result)
            if self._offloaded is None:
                self._enqueue(w, checked + rules(update))
                continue
            self._enqueue(w, checked)
            self._offloaded.update(
                w, update, lambda u, w=w, rules=rules: self._enqueue(w, rules(u))
            )
        if self._offloaded is not None:
            self._offloaded.exchange(self.parameters.addresses)
        self.parameters.changed()
        if self._state is not None:
            self._state.changed()
        fingerprints = self._step_fingerprints.get(id(sums.updates))
        if fingerprints is not None:
            fingerprints.enqueue()
        ok = sums.fetch()
        if fingerprints is not None:
            fingerprints.came()
        if not ok:
            optimizer.steps -= 1
        return ok

    # --- numbers on the first worker's device ---

    def read(self, address: int, array: np.ndarray) -> np.ndarray:
        """Fills an array from the first worker's memory."""
        gpu = self.gpus[0]
        gpu.download(array, address)
        gpu.synchronize()
        return array

    def largest(self, runs: Sequence[tuple[int, int]]) -> float:
        """The largest absolute value of a run (address, floats) there; its squares are counted
        behind it.
        """
        ((address, floats),) = runs  # all ranks hold all gradients, in one run
        worker = self.workers[0]
        result = worker.area("norm", 24)
        back = worker.pinned("norm", 24)
        worker.gpu.norm(result, address, floats)
        worker.gpu.download(back, result)
        worker.gpu.synchronize()
        self._norm = float(back[16:20].view(np.float32)[0]), back[:16].view(np.int64).copy()
        return self._norm[0]

    def squares(self, runs: Sequence[tuple[int, int]], unit: float) -> np.ndarray:
        """The sum of squares, int64 (2,), of the run that `largest` was just asked for, in the
        unit that follows.
        """
        largest, squares = self._norm
        assert 0.5 <= largest * unit < 1, (largest, unit)
        return squares

    def weights(self) -> list[int]:
        """The fingerprint of the parameters of each worker; all must be equal."""
        if not self._checks:
            of = zip(self.workers, self.parameters.addresses, strict=True)
            self._checks = [
                Fingerprints(worker, [[(addresses[0], self.arena.size, 0)]])
                for worker, addresses in of
            ]
        self.write()
        for check in self._checks:
            check.enqueue()
        return [check()[0] for check in self._checks]

    def fingerprints(
        self, wholes: Sequence[Sequence[fingerprint.Run]], after: list[Update] | None = None
    ) -> Callable[[], list[int]]:
        """See Engine.fingerprints.

        Those of a step's updates are enqueued with it: the host waits for both at once.
        """
        fingerprints = Fingerprints(self.workers[0], wholes)
        if after is not None:
            self._step_fingerprints[id(after)] = fingerprints
            fingerprints.after = after  # kept, so that its id stays its own
        return fingerprints

    # --- data ---

    def place(self, data: ArrayDataset, samples: int) -> list[Placed | None]:
        """The data set on the devices of all workers; None where it is brought batch by batch,
        as it does not fit.

        One that has no more than the samples of a batch is brought as a batch: a loader of arrays
        makes a new one each.
        """
        if len(data) <= samples:
            return [None] * len(self.workers)
        key = id(data)
        entry = self._data.get(key)
        if entry is not None and entry[0]() is data:
            return entry[1]
        for k in [k for k, (alive, _) in self._data.items() if alive() is None]:
            for worker, stale in zip(self.workers, self._data.pop(k)[1], strict=True):
                if stale is not None:
                    stale.free(worker)
        nbytes = sum(a.nbytes for a in data.all_arrays)
        placed = [
            Placed(w, data) if nbytes <= DATA_SHARE * w.gpu.memory()[0] else None
            for w in self.workers
        ]
        self._data[key] = (weakref.ref(data), placed)
        return placed


class Fingerprints:
    """The fingerprints (fingerprint.py) of several wholes on a worker's device, taken again and
    again.

    Calling it gives one number per whole: those that were enqueued, or those of now.

    wholes: of each its runs (address, floats, start).
    """

    def __init__(self, worker: Worker, wholes: Sequence[Sequence[fingerprint.Run]]) -> None:
        self._gpu = gpu = worker.gpu
        self.after: list[Update] | None = None
        tables = [np.array(list(runs), np.int64).reshape(-1, 3) for runs in wholes]
        self._out = gpu.pinned(8 * len(tables)).view(np.uint64)
        self._address = gpu.allocate(8 * len(tables))
        gpu.clear(self._address, 8 * len(tables))
        self._calls: list[tuple[int, ...]] = []  # of Gpu.fingerprint
        for i, table in enumerate(tables):
            longest = int(table[:, 1].max(initial=0))
            if longest:
                runs = gpu.allocate(table.nbytes + gpu.fingerprint_scratch(len(table), longest))
                gpu.upload(runs, table)
                self._calls.append(
                    (self._address + 8 * i, runs + table.nbytes, runs, len(table), longest)
                )
        gpu.synchronize()
        self._enqueued = self._on_host = False

    def enqueue(self) -> None:
        """They are taken behind what is in the COMPUTE queue."""
        for call in self._calls:
            self._gpu.fingerprint(*call)
        self._gpu.download(self._out.view(np.uint8), self._address)
        self._enqueued = True
        self._on_host = False

    def came(self) -> None:
        """The host has waited for them."""
        self._on_host = self._enqueued

    def __call__(self) -> list[int]:
        if not self._enqueued:
            self.enqueue()
        if not self._on_host:
            self._gpu.synchronize()
        self._enqueued = self._on_host = False
        return [int(value) for value in self._out]


class Placed:
    """A whole data set on one worker's device: addresses of its arrays; `bytes` is 1 if images
    are uint8.
    """

    def __init__(self, worker: Worker, data: ArrayDataset) -> None:
        self._addresses: list[int] = []

        def upload(a: np.ndarray) -> int:
            self._addresses.append(worker.gpu.allocate(max(a.nbytes, 16)))
            worker.gpu.upload(self._addresses[-1], np.ascontiguousarray(a))
            worker.gpu.synchronize()
            return self._addresses[-1]

        self.images = upload(data.images) if data.normalised else 0
        self.bytes = int(data.normalised and data.images.dtype.itemsize == 1)
        self.arrays = upload(np.array([upload(a) for a in data.gathered], np.int64))
        self.scale = upload(data.scale)
        self.shift = upload(data.shift)

    def free(self, worker: Worker) -> None:
        worker.gpu.synchronize()
        for address in self._addresses:
            worker.gpu.free(address)


def devices(
    count: int,
    workers: int,
    local_rank: int,
    local_size: int,
    oversubscribe: bool,
    exclusive: bool = False,
) -> list[int]:
    """The devices of a process's workers: consecutive ones, rank after rank on a machine with
    `count` GPUs.

    exclusive: this rank sees GPUs that no other rank sees, as some launchers arrange it.

    Raises DeviceError: there are too few, and they are not to be shared.
    """
    if exclusive:
        local_rank = 0
        local_size = 1
    num_gpus = workers * local_size
    if count < 1:
        raise DeviceError("[gpu] this machine has no GPU that can be used; use --device cpu")
    if num_gpus > count and not oversubscribe:
        request = (
            f"{local_size} ranks x {workers} = {num_gpus} GPUs"
            if local_size > 1
            else f"{num_gpus} GPUs"
        )
        raise DeviceError(
            f"[gpu] {request} were asked for and this {'rank' if exclusive else 'machine'} has "
            f"{count}; use "
            + (f"--num-gpus {count}, " if local_size == 1 else f"-n {max(count // workers, 1)}, ")
            + "--oversubscribe to share them, or --device cpu"
        )
    return [(local_rank * workers + w) % count for w in range(workers)]
