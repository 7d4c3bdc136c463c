"""Checks before a run begins: that the ranks fit together, and that this machine has room for them.

`at_start` is one all-gather of hashes: every rank compares the same numbers, so all raise the same
error or none does.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.hooks import machine
from ..base.launcher import mpi_library
from ..base.limits import MIB
from ..base.runs import ATTEMPT, EXPECTED_RANKS
from ..comm import Communicator
from ..errors import ConfigError, OutputError, printable
from ..settings.declarations import Settings, declared
from .agreement import hash_of, texts

#: Settings that may differ between ranks: places on their hosts, and what only rank 0 does.
PER_RANK = frozenset(name for name, s in declared(Settings).items() if not s.same_on_ranks)

# of the newest there must be room for: the old one, the new one, what surrounds them
CHECKPOINTS = 2.2

_CORES = 1024  # that a mask tells apart
_MAX_TEXT_BYTES = 16 << 10  # bytes by which ranks explain a difference


def version(package: str) -> str:
    """The installed version of a package, "none" where it is not."""
    loaded_version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded_version, str):
        return loaded_version  # a look at files takes longer
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """Returns what must be the same on all ranks; "MPI" where this process has started it."""
    mpi = sys.modules.get("odyssey.comm.mpi")
    return {
        "odyssey": version("odyssey"),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "numpy": version("numpy"),
        "mpi4py": version("mpi4py"),
        "MPI": "none" if mpi is None else mpi_library(mpi.MPI.Get_library_version()),
    }


def odd_one(rows: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """The first column whose numbers are not all the same, a rank that has another one than
    most, one of these.
    """
    for column in range(len(rows[0])):
        values = [row[column] for row in rows]
        if len(set(values)) > 1:
            counts = Counter(values)
            usual = max(counts, key=lambda value: (counts[value], value == values[0]))
            return (
                column,
                next(r for r, value in enumerate(values) if value != usual),
                values.index(usual),
            )
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
            do = ["lower --threads"] * (max_threads > 1) + ["start fewer ranks"] * (len(ranks) > 1)
            warnings.append(
                f"{count} thread{'s' * (threads > len(ranks))} on {machine_label}, which has "
                f"{cores} "
                f"core{'s' * (cores > 1)}: "
                f"they take turns; {', or '.join(do)}"
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
        return crowded([RankPlace(0, threads, _mask())])
    configuration = json.dumps(
        {k: v for k, v in (settings or {}).items() if k not in PER_RANK},
        sort_keys=True,
        default=str,
    )
    fields = {**versions(), "attempt": environment.get(ATTEMPT, ""), "configuration": configuration}
    local_row = np.array([*map(hash_of, fields.values()), machine(), threads], np.int64)
    mask = np.frombuffer(_mask().to_bytes(_CORES // 8, "little"), "<i8")
    rows = comm.all_gather(np.concatenate([local_row, mask]))
    n = len(fields)
    if (odd := odd_one(rows[:, :n].tolist())) is not None:
        raise _explain_difference(comm, fields, *odd)
    masks = [int.from_bytes(row.tobytes(), "little") for row in rows[:, n + 2 :].astype("<u8")]
    return crowded(
        [RankPlace(*map(int, row[n : n + 2]), mask) for row, mask in zip(rows, masks, strict=True)]
    )


def _explain_difference(
    comm: Communicator, fields: Mapping[str, str], column: int, rank: int, other_rank: int
) -> ConfigError:
    """Returns what differs, in words: every rank sends its value. All ranks come here together."""
    name, value = list(fields.items())[column]
    values = texts(comm, value, _MAX_TEXT_BYTES)
    if name != "configuration":
        advice = (
            "start all ranks by one command"
            if name == "attempt"
            else "install the same on every host"
        )
        a, b = (printable(values[r], limit=60) or "none" for r in (rank, other_rank))
        return ConfigError(
            f"[preflight] rank {rank} has {name} {a}, rank {other_rank} has {b}; {advice}"
        )
    try:
        ours = json.loads(values[rank])
        theirs = json.loads(values[other_rank])
        key = next(key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key))
        a, b = (printable(json.dumps(side.get(key)), limit=60) for side in (ours, theirs))
        difference = f"{key} = {a}, and rank {other_rank} {key} = {b}"
    except (ValueError, StopIteration):
        difference = f"another configuration than rank {other_rank}"
    return ConfigError(
        f"[preflight] rank {rank} has {difference}; start all ranks with the same options"
    )


def _mask() -> int:
    """The cores of this process as bits; 0 where that is not known."""
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 0)
    )
    return sum(1 << core for core in cores) if max(cores, default=0) < _CORES else 0


def free(directory: Path) -> int:
    """Bytes that are free where `directory` is or will be; very many where that cannot be seen:
    the others wait for this rank, and who writes there will say what is wrong.
    """
    place = os.path.abspath(directory)
    while not os.path.exists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    try:
        stats = os.statvfs(place)
    except OSError:
        return 2**62
    return stats.f_bavail * stats.f_frsize
