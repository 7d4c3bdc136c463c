"""Checkpoints of which each rank writes the part that it has, in a file of its own
(docs/checkpoints.md).

No rank has, or is sent, more than it trains with. How they are read, resume.shared says.
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
    """Writes a checkpoint of which each rank has a part (its pieces, and the arrays that it
    alone has); collective. store: on rank 0. Returns False if not all ranks see its
    directory: nothing was written. Raises as Store.save.
    """
    from ..checkpoints.manifest import file_of, file_text
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
                text = file_text(file).encode()
        entries = comm.all_gather_each(np.frombuffer(text, np.uint8))
    finally:
        if entries is None and store is not None:
            store.abandon(snapshot.step)
    files = (file_of(json.loads(text.tobytes())) for text in entries if text.size)
    values = snapshot.values
    by_first(
        comm,
        lambda: str(
            store.finish(snapshot.step, plain_values(snapshot.step, values), list(files), marks)
        ),
    )
    return True
