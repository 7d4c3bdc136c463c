"""An array is read in pieces, and ranges of it from any place: also where a range ends within a
piece.
"""

from __future__ import annotations

import numpy as np
import pytest

from odyssey.checkpoints import Snapshot, Store, reader

pytestmark = pytest.mark.unit


def test_ranges_of_an_array_of_many_pieces(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    whole = random.normal(size=(40, 25)).astype(np.float32)
    with Store(tmp_path) as store:
        path = store.save(Snapshot(1, {"parameters": {"w": whole}}, {}))
    monkeypatch.setattr(reader, "PIECE", 96)  # bytes
    stored = reader.open_snapshot(path)[0].arrays["parameters"]["w"]
    for _ in range(200):
        lo, hi = np.sort(random.integers(0, whole.size + 1, 2))
        out = np.full(hi - lo, np.nan, np.float32)
        stored.read(int(lo), out)
        assert (out == whole.reshape(-1)[lo:hi]).all()
