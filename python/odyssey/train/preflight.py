"""Checks before a run begins: that the ranks fit together, and that this machine has room for them.

`at_start` is one all-gather of hashes: every rank compares the same numbers, so all raise the same
error or none does.
"""

from __future__ import annotations

import functools
import json
import operator
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.files import nearest
from ..base.hooks import machine
from ..base.limits import MIB
from ..base.runs import ATTEMPT, EXPECTED_RANKS
from ..base.versions import versions
from ..comm import Communicator
from ..comm.cores import MASK_BITS, core_mask
from ..errors import ConfigError, OutputError, printable
from ..settings.declarations import Settings, declared
from .agreement import hash_of, texts

#: Settings that may differ between ranks: places on their hosts, and what only rank 0 does.
PER_RANK = frozenset(name for name, s in declared(Settings).items() if not s.same_on_ranks)

# of the newest there must be room for: the old one, the new one, what surrounds them
CHECKPOINTS = 2.2

_MAX_TEXT_BYTES = 16 << 10  # bytes by which ranks explain a difference


def odd_one(rows: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """Returns (column, rank, other rank) of the first column whose numbers differ, or None.

    The rank has another number than most ranks. The other rank is the first that has the usual one.
    """
    for column in range(len(rows[0])):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            counts = Counter(values)
            usual = max(counts, key=lambda value: (counts[value], value == values[0]))
            odd_rank = next(rank for rank, value in enumerate(values) if value != usual)
            return column, odd_rank, values.index(usual)
    return None


class RankPlace(NamedTuple):
    """Place of a rank: its host, its threads, and the cores that it may use, as bits."""

    host: int
    threads: int
    cores: int


def crowded(places: Sequence[RankPlace]) -> list[str]:
    """A warning for each machine with more threads than cores; pure.

    Ranks bound to a core each are not crowded.
    """
    warnings = []
    hosts: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    for ranks in hosts.values():
        threads = sum(places[r].threads for r in ranks)
        cores = functools.reduce(operator.or_, (places[r].cores for r in ranks)).bit_count()
        if cores and threads > cores:
            max_threads = max(places[r].threads for r in ranks)
            count = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
            count += (
                f" x {max_threads}" if len(ranks) * max_threads == threads else f" with {threads}"
            )
            machine_label = "this machine" if 0 in ranks else f"the machine of rank {ranks[0]}"
            remedies = ["lower --threads"] * (max_threads > 1) + ["start fewer ranks"] * (
                len(ranks) > 1
            )
            warnings.append(
                f"{count} thread{'s' * (threads > len(ranks))} on {machine_label}, which has "
                f"{cores} core{'s' * (cores > 1)}: they take turns; {', or '.join(remedies)}"
            )
    return warnings


def check_space(free: int, checkpoint: int, directory: str) -> list[str]:
    """A warning where checkpoints of so many bytes will be tight; pure.

    Raises OutputError: not even one fits.
    """
    if checkpoint <= 0 or free >= CHECKPOINTS * checkpoint:
        return []
    message = (
        f"{directory} has {free / MIB:,.1f} MiB left and a checkpoint takes {checkpoint / MIB:,.1f}"
    )
    if free < checkpoint:
        raise OutputError(f"[preflight] {message}; make room, or name another directory")
    return [
        f"{message}: room for {CHECKPOINTS} of them is needed, the old one and the new one; make "
        "room"
    ]


def at_start(
    comm: Communicator,
    settings: Mapping[str, Any] | None = None,
    *,
    threads: int = 1,
    environment: Mapping[str, str] = os.environ,
) -> list[str]:
    """Checks that the ranks of a run belong together.

    Every rank calls it, once, before the first step. settings: the configuration; all but PER_RANK
    must be the same on all ranks. threads: that this rank computes with. environment: instead of
    that of the process. Returns warnings, the same on every rank: rank 0 shows them. Raises
    ConfigError: on every rank alike: not as many ranks as were started, or a rank with another
    version or configuration; the rank and the field are named.
    """
    expected = environment.get(EXPECTED_RANKS, "")
    if expected.isascii() and expected.isdigit() and int(expected) != comm.size:
        raise ConfigError(
            f"[preflight] {expected} ranks were started, but this world has {comm.size}; "
            "use the mpirun of the MPI that mpi4py uses (see `odyssey doctor`)"
        )
    if comm.size == 1:
        return crowded([RankPlace(0, threads, core_mask())])
    configuration = json.dumps(
        {k: v for k, v in (settings or {}).items() if k not in PER_RANK},
        sort_keys=True,
        default=str,
    )
    fields = {**versions(), "attempt": environment.get(ATTEMPT, ""), "configuration": configuration}
    local_row = np.array([*map(hash_of, fields.values()), machine(), threads], np.int64)
    mask = np.frombuffer(core_mask().to_bytes(MASK_BITS // 8, "little"), "<i8")
    rows = comm.all_gather(np.concatenate([local_row, mask]))
    field_count = len(fields)
    if (odd := odd_one(rows[:, :field_count].tolist())) is not None:
        raise _explain_difference(comm, fields, *odd)
    masks = [
        int.from_bytes(row.tobytes(), "little") for row in rows[:, field_count + 2 :].astype("<u8")
    ]
    return crowded(
        [
            RankPlace(*map(int, row[field_count : field_count + 2]), mask)
            for row, mask in zip(rows, masks, strict=True)
        ]
    )


def _explain_difference(
    comm: Communicator, fields: Mapping[str, str], column: int, rank: int, other_rank: int
) -> ConfigError:
    """Returns an error about the field in which two ranks differ; a collective call.

    Args:
        fields: the fields of this rank by name.
        column: the number of the field.
        rank, other_rank: two ranks that differ in it.
    """
    name, value = list(fields.items())[column]
    values = texts(comm, value, _MAX_TEXT_BYTES)
    if name != "configuration":
        advice = (
            "start all ranks by one command"
            if name == "attempt"
            else "install the same on every host"
        )
        value_here, value_there = (
            printable(values[r], limit=60) or "none" for r in (rank, other_rank)
        )
        return ConfigError(
            f"[preflight] rank {rank} has {name} {value_here}, rank {other_rank} has "
            f"{value_there}; {advice}"
        )
    try:
        ours = json.loads(values[rank])
        theirs = json.loads(values[other_rank])
        key = next(key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key))
        value_here, value_there = (
            printable(json.dumps(side.get(key)), limit=60) for side in (ours, theirs)
        )
        difference = f"{key} = {value_here}, and rank {other_rank} {key} = {value_there}"
    except (ValueError, StopIteration):
        difference = f"another configuration than rank {other_rank}"
    return ConfigError(
        f"[preflight] rank {rank} has {difference}; start all ranks with the same options"
    )


def free(directory: Path) -> int:
    """Bytes that are free where `directory` is or will be; very many where that cannot be seen:
    the others wait for this rank, and who writes there will say what is wrong.
    """
    try:
        stats = os.statvfs(nearest(directory))
    except OSError:
        return 2**62
    return stats.f_bavail * stats.f_frsize
