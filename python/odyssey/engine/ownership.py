"""Which parameters a rank computes with, updates and stands for: under ZeRO, pipelines and
tensor parallelism.

An `Ownership` is settled by the first program that is recorded, and shared by the engine that
trains and the one that evaluates. Runs of the arena are (start, floats).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core import fingerprint, native
from ..core.arena import Arena
from ..core.program import Record
from ..errors import ConfigError
from ..nn.utils import global_norm
from ..optim import Update
from ..parallel import buckets as bucketing
from ..parallel.mesh import Groups
from ..parallel.zero import Parts
from .layout import Layout
from .sums import Sums

if TYPE_CHECKING:
    from ..parallel import tensor_parallel
    from .gpu.group import DeviceGroup


def overlaps(run: tuple[int, int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of a run (start, length) that are also in one of `runs`.

    `runs` must be in order and must not overlap each other.
    """
    start, length = run
    end = start + length
    first = max(bisect.bisect_right(runs, (start, math.inf)) - 1, 0)
    parts = []
    for run_start, run_length in itertools.islice(runs, first, None):
        if run_start >= end:
            break
        part_start = max(start, run_start)
        part_end = min(end, run_start + run_length)
        if part_end > part_start:
            parts.append((part_start, part_end - part_start))
    return parts


def without(runs: list[tuple[int, int]], removed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of `runs` (start, length), in their order, that are in none of `removed`.

    `runs` must be in order.
    """
    removed = sorted(removed)
    remaining = []
    first = 0  # the first removed run that doesn't end before the current run
    for start, length in runs:
        end = start + length
        while first < len(removed) and sum(removed[first]) <= start:
            first += 1
        for removed_start, removed_length in itertools.islice(removed, first, None):
            if removed_start >= end:
                break
            if removed_start > start:
                remaining.append((start, removed_start - start))
            start = max(start, removed_start + removed_length)
        if start < end:
            remaining.append((start, end - start))
    return remaining


WINDOW_FLOATS = 1 << 20  # parameters that `Ownership.digest` sums between ranks at a time


class Owned(NamedTuple):
    """Part of a parameter that is a rank's; runs of the arena are (start, floats)."""

    updated_run: tuple[int, int]  # the run that it updates
    # the runs of it that come out right, and that other ranks take from it
    valid: list[tuple[int, int]]
    counted: bool  # whether its gradients are this rank's share of the global norm


def owned(
    offset: int, shape: tuple[int, ...], piece: tensor_parallel.Piece | None, t: int
) -> Owned:
    """Returns the share of one rank of a tensor-parallel group in a parameter.

    Args:
        offset: the place of the parameter in the arena.
        shape: the shape of the whole parameter.
        piece: how the parameter is split. None: every rank has all of it.
        t: the rank in the group.
    """
    floats = -(-math.prod(shape) // 16) * 16
    if piece is None or piece.axis is None:
        return Owned((offset, floats), [(offset, floats)], t == 0)
    lo, hi = piece.ranges[t]
    row = math.prod(shape[1:])
    if piece.axis == 0:
        run = (offset + lo * row, (hi - lo) * row)
        return Owned(run, [run], True)
    # A split by columns isn't one run, so this rank updates the whole parameter. The gradients of
    # other ranks' columns are zero here, and nobody uses the parameters in them.
    columns = [(offset + r * row + lo, hi - lo) for r in range(shape[0])]
    return Owned((offset, floats), columns, True)


class Ownership:
    """Ownership of a model's parameters by this rank.

    Args:
        arena: the model's parameters. groups: this rank's communicators along the axes of the mesh.
        team: the GPUs of this process, if the layout names some.
    """

    def __init__(
        self, arena: Arena, layout: Layout, groups: Groups, team: DeviceGroup | None
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.groups = groups
        self._team = team
        self.settled = False
        # of tensor parallelism: what this rank trains
        self.pieces: dict[str, tensor_parallel.Piece] = {}
        # runs that are this rank's share of the global norm
        self.counted: list[tuple[int, int]] = []
        self.warnings: list[str] = []  # once it is settled: what the user should know,
        self.plans: list[str] = []  # and how the model was cut
        self.cut_by: int | None = None  # the ops of the program that was cut automatically
        # the position in the pipeline of a record
        self._place_of: Callable[[Record], int] = lambda r: 0
        # parameter (offset) -> positions in the pipeline of the ops that read it
        self._positions_by_offset: dict[int, list[int]] = {}
        # parameters of several positions, and the one that updates them
        self._shared_params: dict[str, int] = {}
        self._parts: Parts
        self._shared_bytes_sent = (
            0  # bytes of parameters of several positions that this rank has sent
        )
        self._valid: list[tuple[int, int]] = []  # runs that come out right here,
        # and of them those of no rank before this one of its model
        self._unique_in_model: list[tuple[int, int]] | None = None

    def settle(self, records: list[Record], samples: int) -> None:
        """Cuts the parameters into buckets, by the program of one shard. Call it once.

        Args:
            records: the program of a shard on one rank.
            samples: the samples of the shard.

        Raises:
            ConfigError: The model's placement doesn't fit the pipeline.
        """
        lay = self.layout
        constant = [name for name, _ in self.arena.buffers]
        unused = [name for name in bucketing.unused(records, self.arena) if name not in constant]
        if unused:
            self.warnings.append(f"no gradient reaches {', '.join(unused)}: counted as zero")
        if lay.split:
            buckets = [self._settle_share(records, samples)]
        else:
            cuts = lay.comm.size > 1 or lay.offload
            limit = lay.bucket_floats(self.arena.size) if cuts else self.arena.size
            buckets = bucketing.cut(records, self.arena, limit)
            if lay.offload or (lay.zero > 1 and self.groups.dp.size > 1):
                self.warnings += bucketing.too_large(
                    buckets, f"zero={lay.zero}" if lay.zero > 1 else "offload"
                )
        self._parts = Parts(lay.zero, buckets, self.groups.dp, self.arena)
        self.settled = True

    @property
    def parts(self) -> Parts:
        """The parameters that this rank computes with and updates; known once this is settled."""
        assert self.settled
        return self._parts

    @property
    def cut(self) -> int | None:
        """A hash of how the parameters are cut into buckets, or over a pipeline; None: this is
        not settled.
        """
        if not self.settled:
            return None
        if self.layout.split:
            return fingerprint.hash_of(
                [(o, places[0]) for o, places in sorted(self._positions_by_offset.items())]
            )
        return fingerprint.hash_of([(b.names, b.floats) for b in self._parts.buckets])

    def placing(self, records: list[Record]) -> Callable[[Record], int]:
        """The position in the pipeline of each record of a program of one rank, before tensor
        parallelism.

        An automatic cut was made by the numbers of the ops of one program. In others, of an
        evaluation without dropout or of another layout, ops have other numbers.
        """
        if self.layout.mesh.pp == 1:
            return self._place_of
        from ..parallel import stages

        place_of = self._place_of
        if self.cut_by not in (None, stages.ops_of(records)):
            place_of = stages.placed_like(records, self.arena, self._positions_by_offset)
        if self._positions_by_offset:
            stages.check_used(records, self.arena, place_of, self._positions_by_offset)
        return place_of

    def _place_model(self, records: list[Record], samples: int) -> Callable[[Record], int]:
        """Returns a function from records to positions in the pipeline.

        A model that the user hasn't placed on devices is cut automatically.

        Raises:
            ConfigError: The model is placed on a number of devices that doesn't fit the pipeline.
        """
        pp = self.layout.mesh.pp
        interleaved = self.layout.schedule == "interleaved"
        devices = sorted({r.device for r in records})
        placed = len(devices)
        if placed == 1:
            from ..parallel import costs, stages

            self.cut_by = stages.ops_of(records)
            count = 2 * pp if interleaved else pp
            measured = self.layout.reduction.same_bits
            stage_of, plan = costs.stages(
                records, self.arena, samples, count, self.layout.comm, measured=measured
            )
            by = "measured cost" if measured else "bytes touched"
            self.plans.append(f"the model is cut into {len(plan.parts)} stages by {by}:\n{plan}")
            return lambda r: stage_of(r) % pp
        if placed < pp or (interleaved and placed % pp):
            raise ConfigError(
                f"[pipeline] the model is placed on {placed} devices and pp is {pp}; "
                f"use --pp {placed}, or place it on {'a multiple of ' if interleaved else ''}{pp}"
            )
        index = {d: i for i, d in enumerate(devices)}
        return lambda r: index[r.device] % pp if interleaved else index[r.device] * pp // placed

    def _settle_share(self, records: list[Record], n: int) -> bucketing.Bucket:
        """Settles this rank's part of the model, and returns its parameters as one bucket."""
        if self.layout.mesh.pp > 1:
            self._place_of = self._place_model(records, n)
        place_of = self.placing(records)
        users: dict[int, dict[int, int]] = {}
        for r in sorted(records, key=lambda r: r.tag):
            for o in bucketing.touched(r, self.arena, native.PARAMS):
                users.setdefault(o, {}).setdefault(r.tag, place_of(r))
        self._positions_by_offset = {o: list(by_op.values()) for o, by_op in users.items()}
        positions = {
            n: self._positions_by_offset.get(o, [self.groups.p])
            for n, o in self.arena.offsets.items()
        }
        self._shared_params = {
            n: places[0] for n, places in positions.items() if len(set(places)) > 1
        }
        local_params = [n for n, places in positions.items() if places[0] == self.groups.p]
        if self.layout.mesh.tp > 1:
            from ..parallel import tensor_parallel

            unsplit = dict.fromkeys(self._shared_params, tensor_parallel.Piece())
            split = tensor_parallel.rewrite(records, self.groups.t, self.layout.mesh.tp, unsplit)
            self.pieces = split.ownership
            self.plans.append(
                f"each layer is shared by {self.layout.mesh.tp} ranks; received per shard by the "
                "first of them:\n"
                f"{tensor_parallel.describe(split.layers)}"
            )
        runs = []
        for name, p in self.arena.named:
            if name in local_params:
                runs.append(
                    owned(self.arena.offsets[name], p.shape, self.pieces.get(name), self.groups.t)
                )
        self._valid = [run for r in runs for run in r.valid]
        self.counted = [
            r.updated_run for r in runs if r.counted and r.updated_run[0] < self.arena.trained
        ]
        return bucketing.of_ranges([r.updated_run for r in runs], tuple(local_params))

    def own_state(self, flat: np.ndarray) -> np.ndarray:
        """This rank's part of an array of the arena's layout, as the optimizer keeps it."""
        return flat if not self.settled else self._parts.cut_state(flat)

    @property
    def parameter_bytes(self) -> int:
        return self.arena.params.nbytes if not self.settled else self._parts.nbytes

    def norm(self, sums: Sums) -> float:
        """Returns the Euclidean norm of all gradients, with the same bits in every layout.

        Collective if ranks have different gradients.
        """
        groups = self.groups
        comm = self.layout.comm

        def largest(a: np.ndarray) -> np.ndarray:
            return comm.all_reduce(a, "max") if self.layout.split or self.layout.zero else a

        def total(a: np.ndarray) -> np.ndarray:
            if self.layout.zero and groups.dp.size > 1:
                a = groups.dp.all_reduce(a, "sum")
            return groups.model.all_reduce(a, "sum") if self.layout.split else a

        runs = sums.counted
        if runs is None:
            # Buffers, which have no gradients, are after all parameters in the arena.
            trained = self.arena.trained
            candidates = ((u.grads, min(trained - u.at, u.n)) for u in sums.updates)
            runs = [(address, floats) for address, floats in candidates if floats > 0]
        return global_norm(runs, largest, total, self._team)

    # --- what of all parameters this rank stands for ---

    def replicated(self) -> list[tuple[int, int]]:
        """Runs of the arena whose parameters are the same on all ranks of the data-parallel
        group, on this rank.
        """
        if self.layout.zero == 3 and self.layout.comm.size > 1:
            return []
        return self._valid if self.layout.split and self.settled else [(0, self.arena.size)]

    def counted_updates(self, updates: list[Update]) -> list[Update]:
        """Returns the parts of the updates that this rank counts. Collective.

        All ranks together count each parameter once.
        """
        layout = self.layout
        if not layout.split:
            return updates if layout.zero or layout.comm.rank == 0 else []
        counted = []
        unique_runs = self._unique_runs
        for update in updates:
            for start, floats in overlaps((update.at, update.n), unique_runs):
                shift = 4 * (start - update.at)  # in bytes
                params = update.params + shift
                grads = update.grads + shift
                counted.append(Update(params, grads, state=0, n=floats, at=start))
        return counted

    @property
    def _unique_runs(self) -> list[tuple[int, int]]:
        """Runs that no rank before this one of its model has; collective when it is asked for
        first.
        """
        lay = self.layout
        groups = self.groups
        if not lay.split:
            return [(0, self.arena.size)] if lay.zero or lay.comm.rank == 0 else []
        if self._unique_in_model is None:
            everyone = groups.model.all_gather_each(np.array(self._valid, np.int64).reshape(-1, 2))
            earlier = [
                (lo, n) for valid in everyone[: groups.model.rank] for lo, n in valid.tolist()
            ]
            self._unique_in_model = without(self._valid, earlier)
        return self._unique_in_model if lay.zero or groups.dp.rank == 0 else []

    def held(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """Returns what this rank has of the parameters: see Parts."""
        return self._parts.held() if self.settled else iter([(0, self.arena.params, 0)])

    def saved(self) -> Iterator[tuple[str, list[tuple[int, int]], np.ndarray, int, int]]:
        """Yields the parameters that this rank saves. All ranks together save each number once.

        Each is (name, runs, array, array shift, state shift). The runs (start, length) are numbers
        of the parameter. Number i of the parameter is number i + array shift of the array, and
        number i + state shift of the optimizer's state.
        """
        unique_runs = (
            self._unique_runs
            if self.settled
            else [(0, self.arena.size)] * (self.layout.comm.rank == 0)
        )
        tensors = [(self.arena.offsets[name], p.size, name) for name, p in self.arena.named]
        for lo, params, state in self.held():
            first = max(bisect.bisect_right(tensors, (lo, math.inf)) - 1, 0)
            hi = lo + params.size
            for offset, size, name in tensors[first:]:
                if offset >= hi:
                    break
                start = max(offset, lo)
                end = min(offset + size, hi)
                if start >= end:
                    continue
                saved_runs = overlaps((start, end - start), unique_runs)
                runs = [(run_start - offset, n) for run_start, n in saved_runs]
                if runs:
                    shift = offset - lo
                    yield name, runs, params, shift, shift + state

    def digest(self) -> str:
        """Returns the SHA-256 over all parameters in the arena's layout.

        Collective if the parameters are spread over ranks.
        """
        if not self.settled or not (self._parts.partitioned or self.groups.model.size > 1):
            return hashlib.sha256(self.parameters()).hexdigest()
        digest = hashlib.sha256()
        window = np.empty(min(WINDOW_FLOATS, self.arena.size), np.int32)
        unique_runs = self._unique_runs
        parts = [(lo, params.view(np.int32)) for lo, params, _ in self.held()]
        # The bits are summed as integers. One rank has them, and all other ranks add zeros.
        for start in range(0, self.arena.size, WINDOW_FLOATS):
            part = window[: self.arena.size - start]
            part[:] = 0
            for lo, params in parts:
                a = max(lo, start)
                b = min(lo + params.size, start + part.size)
                for first, n in overlaps((a, b - a), unique_runs) if a < b else []:
                    part[first - start : first - start + n] = params[first - lo : first - lo + n]
            digest.update(self.layout.comm.all_reduce(part, "sum"))
        return digest.hexdigest()

    # --- everything on every rank ---

    def parameters(self) -> np.ndarray:
        """Returns all parameters in the arena's layout, on every rank.

        Collective if the parameters are spread over ranks.
        """
        return self._complete_model(self._parts.parameters()) if self.settled else self.arena.params

    def load(self, read: Callable[[int, np.ndarray], None]) -> None:
        """Loads the parameters that this rank keeps.

        Args:
            read: called as read(place, array), fills the array with the parameters that start at
                a place (in floats) of the arena.
        """
        if not self.settled:
            read(0, self.arena.params)
        else:
            self._parts.load(read)

    def state(self, array: np.ndarray) -> np.ndarray:
        """Returns an array of the optimizer's state in the arena's layout, on every rank.

        It has the parts of all ranks. Collective.
        """
        return self._complete_model(self._parts.state(array)) if self.settled else array

    def _complete_model(self, flat: np.ndarray) -> np.ndarray:
        """Fills in the floats of the other ranks' shares of the model, and returns the array."""
        comm = self.groups.model
        if comm.size == 1:
            return flat
        valid_runs = np.array(self._valid, np.int64).reshape(-1, 2)
        runs = np.concatenate(comm.all_gather_each(valid_runs)).tolist()
        values = np.concatenate(
            comm.all_gather_each(
                np.concatenate([flat[:0], *(flat[a : a + n] for a, n in valid_runs)])
            )
        )
        offset = 0
        for lo, n in runs:
            flat[lo : lo + n] = values[offset : offset + n]
            offset += n
        return flat

    def updated(self) -> None:
        """Brings parameters to the ranks that compute with them, after an update. Collective."""
        if self.settled:
            self._parts.changed()
        for name, place in self._shared_params.items():
            value = self.arena.view(self.arena.params, name)
            self.groups.pp.broadcast(value, place)
            self._shared_bytes_sent += (
                value.nbytes * (self.groups.pp.size - 1) * (place == self.groups.p)
            )

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters that this rank has sent to ranks that compute with them, so far."""
        return self._shared_bytes_sent + (self._parts.bytes_sent if self.settled else 0)
