"""What goes wrong on several ranks at once is told once: as the first of them has it."""

from __future__ import annotations

import pytest

from odyssey.comm import mock
from odyssey.errors import NumericsError, OutputError
from odyssey.train import resume

pytestmark = pytest.mark.unit


def test_all_ranks_raise_the_first_ones_problem():
    def play(comm):
        with (
            pytest.raises(NumericsError, match="rank 1 has NaN") as caught,
            resume.on_all_ranks(comm),
        ):
            if comm.rank in (1, 3):
                raise (NumericsError if comm.rank == 1 else OutputError)(
                    f"rank {comm.rank} has NaN"
                )
        assert caught.value.raised_on_all_ranks

    mock.run(4, play)
