"""What a rank sends in each part of a run grows with the ranks as docs/scaling.md says."""

from __future__ import annotations

import pytest

from odyssey.parallel.mesh import Mesh

from .growth import counted, largest, train, train_in_steps, words

LAYOUTS = [
    {},
    {"reduction": "ring"},
    {"reduction": "hierarchical", "ranks_per_node": 4},
    {"reduction": "parameter_server"},
    {"reduction": "mpi"},
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"mesh": Mesh(pp=2)},
    {"mesh": Mesh(tp=2)},
]


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_headers_of_a_step_grow_with_the_logarithm_of_the_ranks(settings):
    """The calls of a step are the same on any number of ranks, and each costs the logarithm.

    Messages from one rank to another, of which a ring has two for each other rank, have an envelope
    each.
    """
    few, many = (largest(counted(ranks, train, settings)) for ranks in (8, 16))
    assert {"step", "evaluate"} <= set(few)
    for name in set(few) - {"start"}:
        # a round more between 4 machines than between 2
        more = 2 if settings.get("reduction") == "hierarchical" else 0
        assert few[name].calls <= many[name].calls <= few[name].calls + more
        assert many[name].words - many[name].envelopes <= many[name].calls * words(16)
        around = 2 if settings.get("reduction") == "ring" else 1
        assert many[name].envelopes <= around * few[name].envelopes + around


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        (2, 9),
        (5, 26),
        (6, 26),
        (7, 27),
        (8, 29),
        (12, 45),
        (16, 55),
        (17, 50),
        (31, 65),
        (32, 65),
        (33, 70),
        (64, 110),
    ],
)
def test_messages_of_a_step_stay_few(ranks, most):
    """Words, pieces of gradients and what the library sends for the sum in which ranks agree
    whether to stop.
    """
    parts = largest(counted(ranks, train_in_steps))
    steps = [parts["step 2"], parts["step 3"]]
    assert all(3 <= step.calls <= 4 for step in steps)
    assert all(step.words + step.messages <= most for step in steps), steps
