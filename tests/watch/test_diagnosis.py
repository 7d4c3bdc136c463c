"""Who hangs and who is slow, from what is seen: pure functions."""

from __future__ import annotations

import random

from odyssey.watch import diagnosis
from odyssey.watch.diagnosis import Seen

CALL = "all_reduce float32 (8,) sum at train.py:32"


def waiting(rank: int, seconds: float = 9.0, **more) -> Seen:
    base = {
        "wait_sequence": 4,
        "wait_text": CALL,
        "members": "all",
        "waited": seconds,
        "idle": seconds,
        "state": "S",
    }
    return Seen(**{"rank": rank, "host": "a", "doing": "wait", "phase": "compute", **base, **more})


def busy(rank: int, idle: float = 9.0, **more) -> Seen:
    return Seen(
        **{
            "rank": rank,
            "host": "a",
            "doing": "compute",
            "phase": "compute",
            "idle": idle,
            "state": "R",
            **more,
        }
    )


def ranks(*seen: Seen) -> dict[int, Seen]:
    return {s.rank: s for s in seen}


def test_nobody_hangs_who_is_not_waited_for():
    assert diagnosis.find_hang(ranks(busy(0), busy(1)), 2, 3) is None


def test_a_rank_that_does_not_come():
    found = diagnosis.find_hang(ranks(waiting(0), busy(1), waiting(2)), 3, 3)
    assert found.culprits == (1,) and found.waiting == (0, 2) and not found.circle


def test_a_rank_that_shows_signs_of_life_does_not_hang():
    assert diagnosis.find_hang(ranks(waiting(0), busy(1, idle=2.9)), 2, 3) is None


def test_a_wait_that_is_short_is_none():
    assert diagnosis.find_hang(ranks(waiting(0, 2.9), busy(1)), 2, 3) is None


def test_slow_phases_may_take_longer():
    slow = busy(1, idle=500, phase="checkpoint", doing="checkpoint")
    assert diagnosis.find_hang(ranks(waiting(0, 500), slow), 2, 60) is None
    assert diagnosis.find_hang(ranks(waiting(0, 601), slow._replace(idle=601)), 2, 60).culprits == (
        1,
    )
    assert diagnosis.find_hang(ranks(waiting(0, 601), slow._replace(idle=601)), 2, 100) is None


def test_a_callback_of_rank_0_may_take_ten_times_as_long():
    for rank, most in ((0, 30), (1, 3)):
        callback = busy(rank, idle=most - 0.1, phase="callback", doing="callback")
        waits = waiting(1 - rank, 40)
        assert diagnosis.find_hang(ranks(waits, callback), 2, 3) is None
        found = diagnosis.find_hang(ranks(waits, callback._replace(idle=most + 0.1)), 2, 3)
        assert found.culprits == (rank,)


def test_who_the_rank_itself_misses_counts_more_than_who_is_elsewhere():
    found = diagnosis.find_hang(ranks(waiting(0, missing="2"), busy(1), busy(2)), 3, 3)
    assert found.culprits == (2,)


def test_through_others_that_wait_as_well():
    found = diagnosis.find_hang(
        ranks(waiting(0, missing="1"), waiting(1, 8.0, wait_sequence=-1, members="2"), busy(2)),
        3,
        3,
    )
    assert found.culprits == (2,) and found.victim.rank == 1


def test_ranks_that_wait_for_each_other():
    one = waiting(0, wait_sequence=-1, members="1")
    found = diagnosis.find_hang(ranks(one, waiting(1, 8.0, wait_sequence=-1, members="0")), 2, 3)
    assert found.circle and found.culprits == (0, 1)
    assert "ranks 0-1 wait for each other; 9 s by now" in diagnosis.paragraph(
        found, ranks(one, waiting(1)), {}, "", 3, 77
    )


def test_a_stopped_rank_inside_the_call_that_all_have_reached():
    found = diagnosis.find_hang(ranks(waiting(0), waiting(1, state="T")), 2, 3)
    assert found.culprits == (1,)


def test_a_job_of_which_all_ranks_are_stopped_is_left_alone():
    assert diagnosis.find_hang(ranks(waiting(0, state="T"), waiting(1, state="T")), 2, 3) is None


def test_a_rank_that_has_ended():
    found = diagnosis.find_hang(
        ranks(waiting(0), busy(1, ended=True, code=0, end="returned")), 2, 3
    )
    assert (
        "rank 1 (pid 0 on a, before the first step) has ended: returned (exit code 0)"
        in diagnosis.paragraph(
            found, ranks(waiting(0), busy(1, ended=True, end="returned")), {}, "", 3, 77
        )
    )


def test_a_machine_that_is_not_watched_is_not_accused():
    assert (
        diagnosis.find_hang(ranks(waiting(0, missing="2"), waiting(1, missing="2")), 3, 3) is None
    )
    assert diagnosis.find_hang(ranks(waiting(0), busy(1)), 3, 3).culprits == (1,)


def test_any_slots_are_judged_without_harm():
    random.seed(1)
    words = ["", "all", "0-3", "9", "1,?", "x", "0-99999"]
    for _ in range(3000):
        seen = [
            Seen(
                rank,
                state=random.choice("RSTZ?"),
                phase=random.choice(["start", "compute", "end"]),
                doing=random.choice(["wait", "compute"]),
                wait_sequence=random.choice([-1, 0, 5]),
                members=random.choice(words),
                missing=random.choice(words),
                idle=random.choice([0.0, 10.0, 1e6]),
                waited=random.choice([0.0, 10.0, 1e6]),
                ended=random.random() < 0.2,
            )
            for rank in range(random.randint(1, 5))
        ]
        found = diagnosis.find_hang(ranks(*seen), 5, 3)
        if found:
            assert diagnosis.paragraph(found, ranks(*seen), {}, "f", 3, 77)


def test_the_place_is_the_innermost_of_the_users_own():
    text = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/odyssey/watch/entry.py", line 3 in _take_orders\n'
        "\n"
        "Current thread 0x2 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 5 in wait\n'
        '  File "/x/odyssey/comm/base.py", line 7 in wait\n'
        '  File "/src/train.py", line 32 in forward\n'
        '  File "/src/train.py", line 90 in <module>\n'
    )
    assert diagnosis.place(text) == "src/train.py:32 in forward"
    assert diagnosis.place(text.rsplit("\n", 3)[0]) == "python3.11/threading.py:5 in wait"
    assert diagnosis.place("") == "" and diagnosis.place("garbage (most recent call first):") == ""


def test_a_straggler_is_told_with_where():
    def own(rank, compute, data):
        return busy(rank, own=compute + data, own_data=data)

    even = [own(r, 0.01, 0.001) for r in range(3)]
    assert diagnosis.stragglers(even) == []
    assert diagnosis.stragglers([*even, own(3, 0.01, 0.02)]) == [
        (3, 0.03 / 0.011, "in data loading")
    ]
    assert diagnosis.stragglers([*even, own(3, 0.03, 0.001)])[0][2] == "in computing"
    assert (
        diagnosis.stragglers([own(0, 0.01, 0.0), own(1, 0.02, 0.0)])[0][0] == 1
    )  # of two, the faster one is the measure
    assert diagnosis.stragglers([own(0, 0.01, 0.0)]) == []
    line = diagnosis.slow_line(own(3, 0.01, 0.02)._replace(step=40), 2.73, "in data loading")
    assert line == "odyssey: [watch] rank 3 on a is 2.7x the median, in data loading (step 40)\n"


def test_what_another_machine_sends_is_checked():
    good = {"rank": 3, "host": "b", "step": 5, "times": [0.5, 1], "ended": True, "idle": 2}
    assert diagnosis.parse_seen(good) == Seen(
        3, host="b", step=5, times=(0.5, 1), ended=True, idle=2
    )
    for wrong in (
        {"rank": -1},
        {"rank": True},
        {"rank": 1.5},
        {"step": 1},
        {"rank": 1, "more": 1},
        {"rank": 1, "host": 5},
        {"rank": 1, "host": "a\x1b[2J"},
        {"rank": 1, "host": "a" * 401},
        {"rank": 1, "step": 2**64},
        {"rank": 1, "times": ["x"]},
        {"rank": 1, "times": [0] * 33},
        {"rank": 1, "ended": 1},
        [],
        None,
    ):
        assert diagnosis.parse_seen(wrong) is None, wrong


def test_before_the_first_step_a_rank_that_computes_may_take_long_unless_told_otherwise():
    preparing = busy(0, idle=61, busy=0.9)
    now = ranks(preparing, waiting(1, 61))
    assert diagnosis.find_hang(now, 2, 60, preparing=True) is None
    assert diagnosis.find_hang(now, 2, 60).culprits == (0,)
    assert diagnosis.find_hang(
        ranks(preparing._replace(idle=601), waiting(1, 601)), 2, 60, preparing=True
    ).culprits == (0,)
    for other in ({"state": "T"}, {"state": "S", "busy": 0.01}, {"step": 1}, {"ended": True}):
        assert diagnosis.find_hang(
            ranks(preparing._replace(**other), waiting(1, 61)), 2, 60, preparing=True
        ).culprits == (0,)
    elsewhere = waiting(0, 61, wait_sequence=-1, members="1", busy=0.9)
    assert diagnosis.find_hang(ranks(elsewhere, waiting(1, 61)), 2, 60, preparing=True).circle


def test_the_first_batch_of_a_trainer_may_take_long():
    loading = busy(0, idle=61, state="S", phase="data", doing="data")
    assert diagnosis.find_hang(ranks(loading, waiting(1, 61)), 2, 60, preparing=True) is None
    assert diagnosis.find_hang(
        ranks(loading._replace(step=1), waiting(1, 61)), 2, 60, preparing=True
    ).culprits == (0,)


def test_a_look_at_many_ranks_asks_once_per_call(monkeypatch):
    """All wait in one call for rank 0, which writes a checkpoint: who is to blame is asked once,
    not once per rank.
    """
    asked = []
    blamed = diagnosis.find_awaited
    monkeypatch.setattr(
        diagnosis, "find_awaited", lambda *given: asked.append(given[0].rank) or blamed(*given)
    )
    wait = {
        "doing": "wait",
        "state": "S",
        "wait_sequence": 7,
        "members": "all",
        "waited": 90.0,
        "idle": 90.0,
    }
    ranks = {r: diagnosis.Seen(r, **wait) for r in range(1, 1024)}
    ranks[0] = diagnosis.Seen(0, state="R", doing="checkpoint", phase="checkpoint", idle=90.0)
    assert diagnosis.find_hang(ranks, 1024, 60) is None
    assert len(asked) == 1
    ranks[0] = ranks[0]._replace(phase="compute", doing="compute")
    assert diagnosis.find_hang(ranks, 1024, 60).culprits == (0,)


def test_the_link_that_most_wait_for_is_slow_if_its_rank_is_not():
    def linked(rank, *link, **more):
        return busy(rank, link=link, step=12, **more)

    def own(s, compute):
        return s._replace(own=compute, own_data=0.0)

    quiet = [linked(2), linked(3, 0, 0, 0, 0)]
    assert diagnosis.slow_link(quiet) is None
    told = [linked(0, 3, 2_000_000, 1_500_000_000, 40), linked(1, 3, 2_000_000, 1_900_000_000, 61)]
    other = linked(4, 1, 9_000_000, 9_000_000_000, 5)
    assert diagnosis.slow_link([*told, *quiet, other]) is told[1]
    line = diagnosis.link_line(told[1], "h4")
    assert line == (
        "odyssey: [watch] the link of rank 3 on h4 is slow: of late 2.0 MB took 1.9 s to rank 1, "
        "61x as long as from others (step 12)\n"
    )
    late = [own(s, 0.01) for s in told] + [own(quiet[0], 0.01), own(quiet[1], 0.1)]
    assert diagnosis.slow_link(late) is None  # rank 3 is a straggler
    gone = [s._replace(state="gone") for s in told]
    assert diagnosis.slow_link([*gone, *quiet]) is None
    assert diagnosis.parse_seen({"rank": 1, "link": [3, 2, 1, 0]}).link == (3, 2, 1, 0)
    assert diagnosis.parse_seen({"rank": 1, "link": "3"}) is None
