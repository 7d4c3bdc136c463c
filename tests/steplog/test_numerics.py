"""What is done about non-finite numbers, and who is named when replicas differ."""

from __future__ import annotations

import json

import numpy as np
import pytest

from odyssey.comm import Communicator
from odyssey.comm.mock import run
from odyssey.core import fingerprint
from odyssey.errors import ConfigError, NumericsError
from odyssey.train.numerics import NonFinite, check_replicas, replicas_differ


def test_stop():
    with pytest.raises(
        NumericsError, match=r"the loss is not finite at step 7 \(epoch 1, batch 4, rate 0.1\)"
    ):
        NonFinite().handle_nonfinite(7, 0, 3, None, "loss", 0.1)


def test_skip_at_most_limit_in_a_row():
    policy = NonFinite("skip")
    for _ in range(2):
        for k in range(10):
            assert (
                f"the step is skipped ({k + 1} of at most 10 in a row)"
                in policy.handle_nonfinite(10 + k, 0, k, None)
            )
        policy.fine()
    for k in range(10):
        policy.handle_nonfinite(20 + k, 0, k, None)
    with pytest.raises(NumericsError, match="the 10 steps before it were skipped"):
        policy.handle_nonfinite(30, 0, 10, None)


def test_rollback_leaves_the_batch_out():
    policy = NonFinite("rollback")
    said = policy.handle_nonfinite(37, 1, 5, 30)
    assert "going back to step 30 and leaving this batch out (1 of at most 3 times)" in said
    assert policy.leaves_out(1, 5)
    assert not policy.leaves_out(1, 4) and not policy.leaves_out(0, 5)


def test_three_rollbacks_to_one_checkpoint_and_new_ones_to_the_next():
    policy = NonFinite("rollback")
    for k in range(3):
        assert "going back to step 30" in policy.handle_nonfinite(37, 1, k, 30)
        policy.fine()
    assert "going back to step 40" in policy.handle_nonfinite(47, 2, 0, 40)
    with pytest.raises(NumericsError, match="went back to step 30 3 times already"):
        policy.handle_nonfinite(39, 1, 9, 30)


def test_rollback_without_a_checkpoint():
    with pytest.raises(NumericsError, match="no checkpoint to go back to"):
        NonFinite("rollback").handle_nonfinite(1, 0, 0, None)


def test_state_goes_through_json():
    policy = NonFinite("rollback")
    policy.handle_nonfinite(37, 1, 5, 30)
    policy.handle_nonfinite(38, 1, 6, 30)
    other = NonFinite("rollback")
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert other.leaves_out(1, 5) and other.leaves_out(1, 6)
    assert other.handle_nonfinite(39, 1, 7, 30).endswith("(3 of at most 3 times)")
    skipping, again = NonFinite("skip"), NonFinite("skip")
    for step in range(9):
        skipping.handle_nonfinite(step, 0, step, None)
    again.load_state_dict(skipping.state_dict())
    again.handle_nonfinite(9, 0, 9, None)
    with pytest.raises(NumericsError):
        again.handle_nonfinite(10, 0, 10, None)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"row": 0},
        {"row": "x", "gone_back": [], "left_out": []},
        {"row": 0, "gone_back": 3, "left_out": []},
    ],
)
def test_no_state(state):
    with pytest.raises(ConfigError, match="no state"):
        NonFinite().load_state_dict(state)


def table(*fingerprints, groups=None):
    return np.array(
        [[g, f] for g, f in zip(groups or [0] * len(fingerprints), fingerprints, strict=True)],
        np.int64,
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (table(5, 5, 9, 5), "the weights of rank 2 differ from those of ranks 0, 1, 3"),
        (table(9, 5, 5), "the weights of rank 0 differ from those of ranks 1, 2"),
        (table(5, 9), "the weights of ranks 0 and 1 differ"),
        (table(1, 5, 2, 5, 5), "the weights of ranks 0, 2 differ from those of ranks 1, 3, 4"),
        (table(5, 5, 9, 9), "the weights of ranks 0, 1 differ from those of ranks 2, 3"),
        (table(1, 2, 3), "the weights of ranks 0, 1 and 2 differ"),
        (
            table(*[5] * 12, 6),
            "the weights of rank 12 differ from those of 12 ranks (0, 1, 2, 3, 4, 5, 6, 7, ...)",
        ),
        (table(5, 6, 5, 7, groups=[0, 1, 0, 1]), "the weights of ranks 1 and 3 differ"),
    ],
)
def test_who_differs(rows, said):
    message = replicas_differ(300, ["weights"], rows)
    assert message.startswith(f"[check] step 300: {said}; ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "rows",
    [
        table(5),
        table(5, 5),
        table(5, 6, 5, 6, groups=[0, 1, 0, 1]),
        table(1, 2, 3, groups=[0, 1, 2]),
    ],
)
def test_who_does_not(rows):
    assert replicas_differ(300, ["weights"], rows) is None


def test_several_things_are_compared():
    rows = np.array([[0, 1, 2], [0, 1, 2], [0, 1, 3]], np.int64)
    assert "the optimizer state of rank 2 differ" in replicas_differ(
        1, ["weights", "optimizer state"], rows
    )


def test_a_flipped_bit_on_one_rank_is_named_on_all():
    def rank(comm):
        weights = np.arange(1000, dtype=np.float32)
        check_replicas(comm, 299, {"weights": fingerprint.of(weights)})
        if comm.rank == 2:
            weights.view(np.uint32)[417] ^= 1 << 19
        with pytest.raises(
            NumericsError,
            match=r"step 300: the weights of rank 2 differ from those of ranks 0, 1, 3",
        ) as e:
            check_replicas(comm, 300, {"weights": fingerprint.of(weights)})
        return e.value.raised_on_all_ranks

    assert run(4, rank) == [True] * 4


def test_one_rank_is_always_in_order():
    check_replicas(Communicator(), 1, {"weights": 2**64 - 1})
