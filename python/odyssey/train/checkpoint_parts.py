"""Checkpoints of which each rank writes its part, in a separate file (docs/checkpoints.md).

So no rank needs memory for more than it trains with. `resume.shared` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..comm import Communicator
from .resume import by_first, on_all_ranks

if TYPE_CHECKING:
    from ..checkpoints import Snapshot, Store


def save(
    comm: Communicator, store: Store | None, snapshot: Snapshot, marks: Sequence[str] = ()
) -> bool:
    """Writes a checkpoint of which each rank has a part; a collective call.

    Args:
        comm: all ranks.
        store: on rank 0; None on other ranks.
        snapshot: the part of this rank: pieces of tensors, and arrays that no other rank has.
        marks: names by which callbacks mark the checkpoint.

    Returns:
        False if not all ranks see the directory of the store: nothing was written. Else True.

    Raises:
        OutputError, NumericsError: As Store.save, on all ranks.
    """
    from ..checkpoints.manifest import encode_file, parse_file
    from ..checkpoints.snapshot import TensorSlice, plain_values
    from ..checkpoints.writer import write_file

    local_pieces = [
        TensorSlice.of(stem, name, array)
        for stem, arrays in snapshot.arrays.items()
        for name, array in arrays.items()
    ]
    local_pieces += snapshot.pieces
    folder = Path(by_first(comm, lambda: str(store.begin(snapshot.step))))
    entries = None
    try:
        if not comm.all_gather(np.array([folder.is_dir()], np.int32)).all():
            return False
        text = b""
        with on_all_ranks(comm):
            if local_pieces:
                file = write_file(folder, f"rank-{comm.rank:05}", snapshot.step, local_pieces, True)
                text = encode_file(file).encode()
        entries = comm.all_gather_each(np.frombuffer(text, np.uint8))
    finally:
        if entries is None and store is not None:
            store.abandon(snapshot.step)
    files = (parse_file(json.loads(text.tobytes())) for text in entries if text.size)
    values = snapshot.values

    def finish() -> str:
        saved_values = plain_values(snapshot.step, values)
        return str(store.finish(snapshot.step, saved_values, list(files), marks))

    by_first(comm, finish)
    return True
