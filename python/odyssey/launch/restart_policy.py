"""Verdict after an attempt: the end, and with which exit code, or another attempt, when, and on
how many ranks.

Pure: `Outcome`s and what was before go in, a `Verdict` and a line for people come out.
supervisor.py acts.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import NamedTuple

from ..errors import counted
from . import rank_ends as ended
from .config import LaunchConfig
from .hosts import Host, capacity
from .rank_ends import HANG, End, Started

STOPPED = 75
GAVE_UP = 69
LONGEST = 60.0  # seconds between two attempts

#: Exit codes of ranks that another attempt would only repeat: usage, data and numerics, a machine
#: that lacks something, output that cannot be written, a program that cannot be started, Ctrl-C.
FINAL = (64, 65, 69, 73, 126, 127, 130)

# failures of one rank, one after the other, after which an elastic run goes on without it
AGAIN = 2


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt went."""

    attempt: int
    ranks: int
    layout: tuple[tuple[str, int], ...] = ()  # hosts and their ranks; empty: this machine
    # both: what rank wrappers wrote
    started: dict[int, Started] = dataclasses.field(default_factory=dict)
    ended: dict[int, End] = dataclasses.field(default_factory=dict)
    code: int | None = None  # of mpirun or srun; negative: its signal; None: it was killed here
    done: bool = False  # the run's record of completion is there
    promised: bool = False  # the program writes that when it is complete
    stop: int | None = None  # the signal by which the launcher was asked to end
    # it was then killed: no rank ran yet, the time was over, or a second SIGINT came
    forced: bool = False
    scale: int | None = None  # how many ranks somebody asked for meanwhile
    # how many there were before such a request was followed by this attempt
    former: int | None = None
    silent: float | None = None  # seconds without a sign of life, after which it was killed
    late: bool = False  # ranks were not all started in time
    # they were, and cannot meet, as what started them has lost a request of theirs
    unmet: bool = False
    lost: tuple[str, ...] = ()  # hosts that do not answer
    unsure: bool = False  # none does, which says more about this one or the network
    step: int | None = None  # the last that anybody is known to have done
    checkpoint: int | None = None  # step of the newest
    # the last step that each rank was seen at
    seen: dict[int, int] = dataclasses.field(default_factory=dict)


class Past(NamedTuple):
    """Memory of decisions: the farthest step, restarts since it was reached, and how the last
    attempts failed.
    """

    step: int = -1
    restarts: int = 0
    rank: int | None = None  # that failed last
    code: int | None = None  # with
    times: int = 0  # that rank so often, one after the other, without progress


class Verdict(NamedTuple):
    """`code`: end with it.

    None: another attempt in `delay` seconds on `ranks` ranks of `hosts`; `past` is for then.
    """

    line: str
    code: int | None = None
    ranks: int = 0
    hosts: tuple[Host, ...] = ()
    delay: float = 0.0
    past: Past = Past()


def decide(outcome: Outcome, past: Past, config: LaunchConfig, hosts: tuple[Host, ...]) -> Verdict:
    """See the top of the file. `hosts`: those that the attempt could use."""
    name = f"attempt {outcome.attempt}"
    if outcome.forced and outcome.stop:
        detail = (
            ", and ranks did not stop in time"
            if outcome.started
            else " came before a rank was started"
        )
        line = (
            f"{name}: ended without a checkpoint of its last step: "
            f"{ended.signal_name(outcome.stop)}{detail}"
        )
        return Verdict(line, 128 + outcome.stop)
    cause = ended.first(outcome.ended)
    good = all(end.good for end in outcome.ended.values())
    complete = len(outcome.ended) == outcome.ranks and (outcome.done or not outcome.promised)
    if good and (complete or (outcome.done and outcome.code == 0)):
        return Verdict(
            f"{name}: complete" if outcome.done else f"{name}: all ranks ended with exit code 0", 0
        )
    stopped = any(end.code == STOPPED for end in outcome.ended.values())
    if stopped and outcome.scale is not None and outcome.stop is None:
        step_text = _step(outcome.checkpoint)
        line = f"{name}: stopped at {step_text}; going on with {counted(outcome.scale)}"
        return Verdict(line, None, outcome.scale, hosts, past=_remembered(outcome, past))
    if stopped:
        by = ended.signal_name(outcome.stop) if outcome.stop else "a request"
        return Verdict(
            f"{name}: stopped by {by} at {_step(outcome.checkpoint)}; the same command goes on",
            STOPPED,
        )
    if outcome.stop is not None and _ended_by_request(outcome):
        line = (
            f"{name}: stopped by {ended.signal_name(outcome.stop)}; no trainer of odyssey had done "
            "a step, so odyssey wrote no checkpoint"
        )
        return Verdict(line, 128 + outcome.stop)
    if outcome.stop is not None:
        return Verdict(
            f"{name}: failed while it was to stop: {_failure(outcome, cause)}", 128 + outcome.stop
        )
    return _failed(outcome, past, config, hosts, cause)


def _ended_by_request(outcome: Outcome) -> bool:
    """Returns whether the request ended ranks that ran no trainer, as it ends any program."""
    by_request = (signal.SIGTERM, signal.SIGINT, outcome.stop)
    codes = {128 + number for number in by_request if number is not None}
    ends = [end for end in outcome.ended.values() if not end.good]
    return bool(ends) and all(
        not end.step and end.oom is None and (end.signal in by_request or end.code in codes)
        for end in ends
    )


def _failed(
    outcome: Outcome, past: Past, config: LaunchConfig, hosts: tuple[Host, ...], cause: End | None
) -> Verdict:
    summary = f"attempt {outcome.attempt}: {_failure(outcome, cause)}"
    code = None if cause is None else cause.code
    exit_code = GAVE_UP if code is None else code
    # the run is as healthy as it was
    if outcome.former is not None and _remembered(outcome, past) == past:
        line = f"{summary}; going on with {counted(outcome.former)}, as before"
        return Verdict(line, None, outcome.former, hosts, 0.0, past)
    machines = {rank.host for rank in outcome.started.values()}
    # one of several machines may be lost
    if code in FINAL and not (code == GAVE_UP and len(machines) > 1):
        return Verdict(f"{summary}; another attempt would not help", exit_code)
    if (
        outcome.promised
        and len(outcome.ended) == outcome.ranks
        and cause is None
        and outcome.step is None
    ):
        # not one step: it did something else
        return Verdict(f"{summary}; another attempt would not help", GAVE_UP)
    if not outcome.started and past == Past():
        return Verdict(f"{summary}; nothing is tried again", GAVE_UP)
    new_past = _remembered(outcome, past)
    repeated = code is not None and code not in (HANG, GAVE_UP) and code == new_past.code
    times = new_past.times + 1 if cause is not None and cause.rank == new_past.rank else 1
    restarts = new_past.restarts + 1
    new_past = Past(new_past.step, restarts, cause.rank if cause else None, code, times)
    if config.max_restarts == 0:
        if cause is not None and cause.signal is not None:
            exit_code = 128 + cause.signal
        return Verdict(summary, exit_code)
    since = f"no progress since step {new_past.step}" if new_past.step >= 0 else "no progress"
    if restarts > config.max_restarts:
        return Verdict(
            f"{summary}; {since} in {counted(restarts - 1, 'restart')}: given up", exit_code
        )
    if repeated:
        return Verdict(
            f"{summary}, as before; {since}: given up, another attempt would do the same", exit_code
        )
    ranks, hosts, note = _choose_ranks(outcome, config, hosts, new_past)
    if ranks < 1:
        return Verdict(f"{summary}; {note}: given up", GAVE_UP)
    room = capacity(hosts)
    if outcome.scale is not None and (room is None or outcome.scale <= room):
        ranks = outcome.scale
    delay = (
        0.0
        if restarts == 1 and not outcome.unsure
        else min(config.backoff * 2 ** max(restarts - 2, 0), LONGEST)
    )
    origin = (
        ""
        if outcome.step is None and outcome.checkpoint is None
        else f" from {_step(outcome.checkpoint)}"
    )
    line = (
        f"{summary}; restarting{origin} on {counted(ranks)}{note} ({restarts} of "
        f"{config.max_restarts} restarts)"
    )
    return Verdict(
        line + (f" in {delay:g} s" if delay else ""), None, ranks, hosts, delay, new_past
    )


def in_doubt(outcome: Outcome) -> bool:
    """Returns whether a failure on several hosts may be the loss of one, so that they are asked
    before another attempt. Not said by how ranks ended: those of a host that is there are
    killed, or end with a code that their MPI chose, when another host is lost. Only an end
    after which nothing is tried again leaves no doubt.
    """
    if len(outcome.layout) < 2 or outcome.done or outcome.stop is not None:
        return False
    cause = ended.first(outcome.ended)
    return cause is None or cause.code == GAVE_UP or cause.code not in FINAL


def taken_back(
    action: Verdict, back: tuple[str, ...], config: LaunchConfig, usual_ranks: int
) -> Verdict:
    """The same with hosts that were lost before an earlier attempt and answer again.
    back: their names, of config.hosts. usual_ranks: those of the run while nothing fails.
    """
    names = {host.name for host in action.hosts}.union(back)
    hosts = tuple(host for host in config.hosts if host.name in names)
    room = capacity(hosts)
    return action._replace(
        hosts=hosts,
        ranks=max(action.ranks, usual_ranks if room is None else min(room, usual_ranks)),
    )


def _remembered(outcome: Outcome, past: Past) -> Past:
    """The past, forgotten as far as the attempt got farther than those before."""
    reached = max(-1 if step is None else step for step in (outcome.step, outcome.checkpoint))
    return Past(step=reached) if reached > past.step else past


def _choose_ranks(
    outcome: Outcome, config: LaunchConfig, hosts: tuple[Host, ...], past: Past
) -> tuple[int, tuple[Host, ...], str]:
    """Ranks and hosts to go on with, and what to say about it; 0 ranks: it cannot go on, and
    why.
    """
    if config.elastic is None:
        return outcome.ranks, hosts, ""
    min_ranks, max_ranks = config.elastic
    if outcome.lost:
        remaining_hosts = tuple(host for host in hosts if host.name not in outcome.lost)
        room = capacity(remaining_hosts) if remaining_hosts else 0
        ranks = outcome.ranks - sum(count for name, count in outcome.layout if name in outcome.lost)
        ranks = min(max_ranks, ranks if room is None else min(room, outcome.ranks))
        names = ", ".join(outcome.lost)
        if ranks < min_ranks or not remaining_hosts:
            return (
                0,
                remaining_hosts,
                f"without {names} {counted(ranks)} would be left, --elastic asks for {min_ranks}",
            )
        return ranks, remaining_hosts, f" without {names}"
    if past.times >= AGAIN and past.rank is not None and outcome.ranks - 1 >= min_ranks:
        return outcome.ranks - 1, hosts, f", as rank {past.rank} failed {past.times} times"
    return outcome.ranks, hosts, ""


def _failure(outcome: Outcome, cause: End | None) -> str:
    if outcome.lost and cause is None:
        of = [r for r, s in sorted(outcome.started.items()) if s.host in outcome.lost]
        ranks = f" (rank{'s' * (len(of) > 1)} {', '.join(map(str, of))})" if of else ""
        return f"host {', '.join(outcome.lost)}{ranks} does not answer"
    if cause is not None:
        seen_step = outcome.seen.get(cause.rank)
        if cause.step is not None:
            cause = cause._replace(step=max(cause.step, seen_step or 0))
        return str(cause) + (
            f", last seen at step {seen_step}"
            if cause.step is None and seen_step is not None
            else ""
        )
    if outcome.silent is not None:
        return f"no sign of life for {outcome.silent:.0f} s"
    if outcome.unmet:
        return "the ranks that srun started have not met"
    if outcome.late:
        return f"{len(outcome.started)} of {counted(outcome.ranks)} were started in time"
    ending = "was killed" if outcome.code is None else f"ended with exit code {outcome.code}"
    if outcome.code is not None and outcome.code < 0:
        ending = f"was killed by {ended.signal_name(-outcome.code)}"
    if not outcome.started:
        hosts = f" on {', '.join(name for name, _ in outcome.layout)}" if outcome.layout else ""
        return f"the MPI launcher {ending} and had started no rank{hosts}"
    early = [end for end in outcome.ended.values() if end.good]
    if len(early) == outcome.ranks:
        return (
            "all ranks ended with exit code 0, but there is no DONE.json: the training is not "
            "complete"
        )
    if early:
        end = min(early, key=lambda end: end.time)
        return (
            f"{end}, but others had not ended: the script returned early there, or called "
            "os._exit(0)"
        )
    silent = sorted(set(range(outcome.ranks)) - set(outcome.ended))
    silent_note = (
        f"; nothing is known of rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        if silent
        else ""
    )
    return f"the MPI launcher {ending}" + (
        silent_note if len(silent) < outcome.ranks else " and no rank said why"
    )


def _step(step: int | None) -> str:
    return "the beginning" if step is None else f"step {step}"
