"""What comes after an attempt, without ranks: the decision is a pure function."""

from __future__ import annotations

import pytest

from odyssey.errors import ConfigError
from odyssey.launch.config import LaunchConfig, allowed, parse_elastic
from odyssey.launch.hosts import capacity, parse_hosts
from odyssey.launch.rank_ends import End, Started, first
from odyssey.launch.restart_policy import Outcome, Past, Verdict, decide, in_doubt, taken_back

CONFIG = LaunchConfig(nproc_per_node=4, max_restarts=3)
NONE = Past()
STARTED = {rank: Started(rank, "h", 100 + rank) for rank in range(4)}


def end(
    rank: int, code: int | None = None, signal: int | None = None, time: float = 1.0, **more
) -> End:
    return End(rank, "h", code, signal, time, **more)


def outcome(*ended: End, **more) -> Outcome:
    fields = {"started": STARTED, **more}
    return Outcome(
        more.pop("attempt", 1), fields.pop("ranks", 4), ended={e.rank: e for e in ended}, **fields
    )


def after(
    *ended: End, past: Past = NONE, config: LaunchConfig = CONFIG, hosts=(), **more
) -> Verdict:
    return decide(outcome(*ended, **more), past, config, hosts)


ALL = [end(rank, 0) for rank in range(4)]


def test_success_is_every_rank_s_own_word():
    assert after(*ALL, code=0).code == 0
    assert after(*ALL, code=9).code == 0  # what mpirun says does not count
    assert after(*ALL[:3], code=0).code is None  # one is missing
    assert after(*ALL[:3], code=0, done=True).code == 0  # but the record of completion is there
    assert (
        after(*ALL[:3], end(3, None, 9), done=True).code is None
    )  # it did something after the training, and was killed


def test_a_training_is_complete_when_its_record_is_there():
    done = [end(rank, 0, step=9) for rank in range(4)]
    assert after(*done, code=0, promised=True, done=True, step=9).code == 0
    again = after(*done, code=0, promised=True, step=9)
    assert (
        again.code is None
        and "no DONE.json: the training is not complete; restarting" in again.line
    )
    assert after(*done, code=0, promised=True).code == 69  # not one step
    assert after(*done, code=0, step=9).code == 0  # a script need not write it


def test_the_first_end_is_the_cause():
    assert first({e.rank: e for e in (end(0, 76, time=1), end(1, None, 9, time=1.2))}).rank == 1
    assert first({e.rank: e for e in (end(0, 76, time=1), end(1, None, 15, time=1.2))}).rank == 0
    assert first({e.rank: e for e in (end(0, None, 11, time=2), end(1, None, 9, time=1))}).rank == 1
    assert (
        first({e.rank: e for e in (end(0, 70, time=1, following=True), end(1, 65, time=2))}).rank
        == 1
    )
    assert first({e.rank: e for e in (end(0, 0), end(1, 75))}) is None


def test_restarts_are_at_once_then_later_and_end():
    past, delays = NONE, []
    for _ in range(3):
        action = after(end(2, None, 9), past=past, step=35, checkpoint=30)
        assert action.code is None and action.ranks == 4
        delays.append(action.delay)
        past = action.past
    assert delays == [0.0, 1.0, 2.0]
    assert (
        "rank 2 on host h was killed by SIGKILL; restarting from step 30 on 4 ranks (3 of 3 "
        "restarts)" in action.line
    )
    last = after(end(2, None, 9), past=past, step=35, checkpoint=30)
    assert last.code == 69 and "no progress since step 35 in 3 restarts: given up" in last.line


def test_progress_forgets_restarts():
    past = Past(step=35, restarts=3, rank=2, times=3)
    action = after(end(2, None, 9), past=past, step=36)
    assert (
        action.code is None
        and action.past.restarts == 1
        and action.delay == 0
        and action.past.step == 36
    )


def test_exit_codes_are_kept():
    assert after(end(1, 65)).code == 65
    assert after(end(1, 70), config=LaunchConfig(nproc_per_node=4)).code == 70
    assert after(end(1, None, 11), config=LaunchConfig(nproc_per_node=4)).code == 139
    again = after(end(1, 70, step=8), step=8)
    assert again.code is None
    # on another rank, but the same
    assert after(end(3, 70, step=8), step=8, past=again.past).code == 70
    hung = after(end(1, 77), step=8)
    # a machine may hang; all restarts are used
    assert after(end(1, 77), step=8, past=hung.past).code is None


def test_nothing_that_never_started_is_tried_again():
    action = after(started={}, code=255, layout=(("h1", 2), ("h2", 2)))
    assert action.code == 69 and "had started no rank on h1, h2" in action.line
    assert after(started={}, code=255, past=Past(step=3)).code is None  # it did before


def test_requests_to_stop():
    assert after(end(0, 75), end(1, 75), stop=15, checkpoint=8).code == 75
    # mpirun ended it when the first had ended
    assert after(end(0, 75), end(1, None, 15, time=2), stop=15).code == 75
    assert after(stop=15, forced=True, started={}).code == 143
    assert after(stop=2, forced=True).code == 130
    assert after(end(1, 70), stop=15).code == 143
    for ends in ([end(0, None, 15), end(1, 143)], [end(0, 130)], [end(0, None, 2), end(1, 0)]):
        loop = after(*ends, stop=2)  # a program without a trainer ends as any program does
        assert loop.code == 130 and "stopped by SIGINT; no trainer of odyssey" in loop.line
    for ends in ([end(0, None, 15), end(1, 70)], [end(0, None, 15, step=3)]):
        assert "failed while it was to stop" in after(*ends, stop=15).line
    assert after(end(0, 75)).code == 75  # somebody told a rank


def test_scaling():
    action = after(end(0, 75), scale=2, checkpoint=8)
    assert (action.code, action.ranks, action.delay) == (None, 2, 0.0)
    assert "stopped at step 8; going on with 2 ranks" in action.line
    assert after(end(0, 75), scale=2, stop=15).code == 75  # to stop comes first
    assert after(end(0, None, 9), scale=2).ranks == 2  # a failure on the way


def test_a_number_of_ranks_that_does_not_work_is_taken_back():
    past = Past(step=8)
    for tried in (
        after(end(1, 64), ranks=100, former=4, past=past),
        after(started={}, code=1, former=4, past=past),
    ):
        assert (tried.code, tried.ranks, tried.past) == (None, 4, past)
        assert tried.line.endswith("; going on with 4 ranks, as before")
    assert after(end(1, 64), former=4, past=past, step=9).code == 64  # it worked for a step
    hosts = parse_hosts("h1:2,h2:2")
    config = LaunchConfig(nproc_per_node=4, max_restarts=3, hosts=hosts)
    # more than the hosts take
    assert after(end(1, None, 9), config=config, hosts=hosts, scale=5).ranks == 4
    room = capacity(hosts)
    assert allowed(5, (1, 8), room) == "its hosts have 4 slots" and allowed(3, None, room) is None
    assert (
        allowed(0, None, None) and allowed(9, (1, 8), None) == "1 to 8 are allowed (--elastic 1:8)"
    )


def test_hosts_that_answer_again_are_used_again():
    hosts = parse_hosts("h1:2,h2:2,h3:2")
    config = LaunchConfig(nproc_per_node=6, max_restarts=3, elastic=(2, 8), hosts=hosts)
    action = Verdict("", None, 2, hosts[2:])
    assert taken_back(action, ("h1",), config, 6)[2:4] == (4, (hosts[0], hosts[2]))
    assert taken_back(action, ("h1", "h2"), config, 6)[2:4] == (6, hosts)
    assert taken_back(action, ("h1", "h2"), config, 5).ranks == 5
    hosts = parse_hosts("h1,h2")
    config = LaunchConfig(nproc_per_node=4, max_restarts=3, elastic=(2, 4), hosts=hosts)
    assert taken_back(Verdict("", None, 2, hosts[:1]), ("h2",), config, 4)[2:4] == (4, hosts)


def test_hosts_that_all_do_not_answer_get_time():
    action = after(end(1, None, 9), unsure=True)
    assert action.code is None and action.delay == CONFIG.backoff


def test_elastic_runs_go_on_with_what_is_left():
    config = LaunchConfig(nproc_per_node=4, max_restarts=3, elastic=(2, 4))
    action = after(end(3, None, 9), config=config)
    assert action.ranks == 4
    action = after(end(3, None, 9), config=config, past=action.past)
    assert action.ranks == 3 and "as rank 3 failed 2 times" in action.line
    hosts = parse_hosts("h1:2,h2:2")
    layout = (("h1", 2), ("h2", 2))
    lost = after(config=config, hosts=hosts, layout=layout, lost=("h2",))
    assert lost.ranks == 2 and lost.hosts == hosts[:1] and "without h2" in lost.line
    config = LaunchConfig(nproc_per_node=4, max_restarts=3, elastic=(3, 4))
    few = after(config=config, hosts=hosts, layout=layout, lost=("h2",))
    assert few.code == 69 and "without h2 2 ranks would be left, --elastic asks for 3" in few.line
    fixed = after(hosts=hosts, layout=layout, lost=("h2",))
    assert fixed.ranks == 4 and fixed.hosts == hosts  # it may come back


def test_a_lost_machine_is_no_lack_of_this_one():
    started = {0: Started(0, "h1", 1), 1: Started(1, "h2", 1)}
    assert after(end(1, 69), started=started, ranks=2).code is None
    assert after(end(1, 69)).code == 69


def test_hosts_are_asked_before_another_attempt():
    several = {"layout": (("h1", 2), ("h2", 2))}
    killed = [end(1, 69), end(2, None, 9, time=2)]  # those of a host that is there, by the launcher
    aborted = [end(0, 69), end(3, 14, time=2)]  # by Open MPI, whose socket was closed
    for ends in (
        [],
        [end(1, None, 9)],
        [end(3)],
        [end(1, 70)],
        [end(0, 0), end(1, 76)],
        killed,
        aborted,
    ):
        assert in_doubt(outcome(*ends, **several))
        assert not in_doubt(outcome(*ends)) and not in_doubt(outcome(*ends, layout=(("h1", 4),)))
        assert not in_doubt(outcome(*ends, done=True, **several))
        assert not in_doubt(outcome(*ends, stop=15, **several))
    for code in (64, 65, 73, 127, 130):  # nothing is tried again
        assert not in_doubt(outcome(end(1, code), end(2, None, 9, time=2), **several))


def test_words():
    assert "hung at step 4 (why)" in after(end(1, 77, step=4, reason="why")).line
    oom = after(end(1, None, 9, oom=200 << 20, memory=190 << 20)).line
    assert "lack of memory (OOM): it had 190 MiB, the limit is 200 MiB" in oom
    assert "last seen at step 12" in after(end(1, None, 9), seen={1: 12}).line
    assert "\\x1b[2J" in after(end(1, 70, reason="\x1b[2J")).line
    assert "exit code 0, but others had not ended" in after(end(1, 0), code=9).line
    assert "killed by SIGKILL and no rank said why" in after(code=-9).line
    assert "no sign of life for 11 s" in after(silent=11.0).line
    assert "4 of 8 ranks were started in time" in after(late=True, ranks=8).line


@pytest.mark.parametrize(
    "settings",
    [
        {"nproc_per_node": 0},
        {"nproc_per_node": True},
        {"nproc_per_node": 2.0},
        {"max_restarts": -1},
        {"monitor_interval": 0},
        {"grace": float("nan")},
        {"watchdog": "3"},
        {"launcher": "ssh"},
        {"backend": "nccl"},
        {"env": ("A=B",)},
        {"env": ("$(touch x)",)},
        {"bind_if": "-x"},
        {"bind_if": "eth0;x"},
        {"elastic": (2, 1)},
        {"elastic": (2, 4)},
        {"master_port": 0},
        {"nproc_per_node": 3, "hosts": parse_hosts("a:1,b:1")},
    ],
)
def test_settings_that_are_not_allowed(settings):
    with pytest.raises(ConfigError):
        LaunchConfig(**settings)


@pytest.mark.parametrize(
    "text", ["", "2", "2:", ":2", "2:3:4", "a:b", "-1:2", "2:99999999", "1 : 2"]
)
def test_elastic_texts_that_are_refused(text):
    with pytest.raises(ConfigError):
        parse_elastic(text)
