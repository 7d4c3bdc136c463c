"""The diagnosis of what the watcher sees: ranks that hang, ranks that are slow, and the messages.

Pure functions. The standard library only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.slot import SLOW, format_ranks, parse_ranks

# a slow phase may take so many times the watchdog's time, and at least so many seconds
LONG = 10, 600.0
CALLBACK = 10  # a callback of rank 0 may take so many times the watchdog's time
BUSY = 0.1  # of a core: who uses more than that computes, and does not sleep
STRAGGLER = 1.8  # times the median of own time per step
WINDOW = 20  # steps over which own time is measured

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class Seen(NamedTuple):
    """A rank as its node's watcher sees it now; times in seconds.

    Fields without a word are those of slot.StatusSlot.
    """

    rank: int
    host: str = ""
    pid: int = 0
    # of /proc/PID/stat ("R", "S", "T", ...); "gone": the process is; "?": nothing is known
    state: str = "?"
    step: int = 0
    samples: int = 0
    phase: str = "start"
    doing: str = "start"
    call: int = -1
    call_group: int = 0
    call_text: str = ""
    wait_sequence: int = -1
    wait_group: int = 0
    wait_text: str = ""
    members: str = ""
    missing: str = ""
    note: str = ""
    ended: bool = False
    code: int = 0
    end: str = ""
    idle: float = 0.0  # since the last sign of life
    waited: float = 0.0  # since it waits for what it waits for; 0 for one that does not
    cpu: float = 0.0  # cores used of late
    busy: float = 0.0  # the same since the last sign of life
    rss: int = 0
    rate: float = 0.0
    own: float = 0.0  # before any wait, per step of the last WINDOW; 0 if not known
    own_data: float = 0.0  # of that in data
    times: tuple[float, ...] = ()  # in each phase so far
    link: tuple[int, ...] = ()

    @property
    def waits(self) -> bool:
        return self.doing == "wait"

    @property
    def alive(self) -> bool:
        return self.state not in ("gone", "Z", "X")


def parse_seen(value: Any) -> Seen | None:
    """Returns the `Seen` in JSON from another process; None if it is not one. Any JSON will do."""
    if not isinstance(value, dict) or not set(value) <= set(Seen._fields) or "rank" not in value:
        return None
    default = Seen(0)
    for name, field in value.items():
        default_field = getattr(default, name)
        if isinstance(default_field, tuple):
            is_valid = (
                isinstance(field, list) and len(field) <= 32 and all(_is_number(t) for t in field)
            )
        elif isinstance(default_field, bool):
            is_valid = isinstance(field, bool)
        elif isinstance(default_field, str):
            is_valid = isinstance(field, str) and len(field) <= 400 and field.isprintable()
        else:
            is_valid = _is_number(field) and (
                isinstance(field, int) or not isinstance(default_field, int)
            )
        if not is_valid:
            return None
    if not 0 <= value["rank"] < 1 << 24:
        return None
    return Seen(
        **{
            name: tuple(field) if isinstance(field, list) else field
            for name, field in value.items()
        }
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63


class Hang(NamedTuple):
    """Ranks that others wait for in vain, and one of the waits: the longest.

    `circle`: they wait for each other.
    """

    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    victim: Seen
    circle: bool = False


def allowance(rank: Seen, limit: float, preparing: bool = False) -> float:
    """How long this rank may show no sign of life while others wait for it. preparing: nobody
    has said what the limit is to be. Then a rank that has not completed a step may take long
    in what a program does before it trains, such as `if rank == 0: prepare_data()`: while it
    computes there, or a trainer has begun with its first step. A callback of rank 0 has CALLBACK
    times the limit.
    """
    if rank.waits or rank.ended or not rank.alive:
        return limit
    slow = rank.phase in SLOW
    if preparing and not rank.step and rank.state not in ("T", "t"):
        slow |= rank.busy > BUSY or rank.phase in ("data", "evaluate")
    if slow:
        return max(LONG[0] * limit, LONG[1])
    # Rank 0 draws pictures, samples and exports, and the others wait for it.
    return CALLBACK * limit if rank.phase == "callback" and rank.rank == 0 else limit


def find_awaited(rank: Seen, ranks: Mapping[int, Seen], world: int) -> list[int]:
    """Returns the ranks that this one waits for, as far as that is known.

    These are the ranks that it has noted itself. Otherwise they are the members of its group that
    are not in the same call, or, if all are, those that are stopped or gone. A message may wait
    for any member.
    """
    if rank.missing and (missing_ranks := parse_ranks(rank.missing, world)):
        return missing_ranks
    members = parse_ranks(rank.members, world)
    if members is None:
        members = list(range(world))
    if rank.wait_sequence < 0:
        return members
    other_members = [ranks[p] for p in members if p in ranks and p != rank.rank]
    call = rank.wait_group, rank.wait_sequence
    elsewhere = [
        member.rank
        for member in other_members
        if not (member.waits and (member.wait_group, member.wait_sequence) == call)
    ]
    return elsewhere or [
        member.rank for member in other_members if member.state in ("T", "t") or not member.alive
    ]


def _key_of_wait(rank: Seen) -> tuple[Any, ...]:
    """Returns a key that is equal for waits for the same ranks in the same call."""
    return rank.missing, rank.members, rank.wait_group, rank.wait_sequence


def find_hang(
    ranks: Mapping[int, Seen], world: int, limit: float, preparing: bool = False
) -> Hang | None:
    """Returns the hang that lasts for `limit` seconds, or None.

    A hang has a victim and causes. The victim has waited for at least `limit` seconds. The causes
    are the ranks at the end of the chain of waits: the ranks that it waits for, or that those wait
    for, and so on. It is a hang if each cause has shown no sign of life for its `allowance`. If
    the chain has no end, the ranks wait in a circle, and all of them are causes.

    preparing: as in `allowance`.
    """
    victims = [
        s
        for s in ranks.values()
        if s.alive and s.waits and s.waited >= limit and s.state not in ("T", "t")
    ]
    # Keys of waits that are examined already: ranks in one call wait for the same ranks.
    harmless_waits: set[tuple[Any, ...]] = set()
    for victim in sorted(victims, key=lambda s: -s.waited):
        if _key_of_wait(victim) in harmless_waits:
            continue
        chain = {victim.rank}  # every rank that was reached so far
        unvisited = [victim.rank]
        causes = set()
        has_unseen = False
        followed_waits = set()
        while unvisited:
            rank = ranks[unvisited.pop()]
            if _key_of_wait(rank) in followed_waits:
                continue
            followed_waits.add(_key_of_wait(rank))
            for p in find_awaited(rank, ranks, world):
                has_unseen |= p not in ranks
                if p in chain or p not in ranks:
                    continue
                chain.add(p)
                if (
                    ranks[p].waits
                    and ranks[p].state not in ("T", "t")
                    and ranks[p].alive
                    and not ranks[p].ended
                ):
                    unvisited.append(p)
                else:
                    causes.add(p)
        if causes or has_unseen:
            harmless_waits.add(_key_of_wait(victim))
        if not causes and has_unseen:  # it may be on its way; its machine is not watched
            continue
        circle = not causes
        if circle:
            causes = chain
        if all(ranks[p].idle >= allowance(ranks[p], limit, preparing) for p in causes):
            waiting = sorted(s.rank for s in ranks.values() if s.waits and s.rank not in causes)
            nearest = [s for s in victims if causes & set(find_awaited(s, ranks, world))]
            best = max(nearest or [victim], key=lambda s: s.waited)
            return Hang(tuple(sorted(causes)), tuple(waiting), best, circle)
    return None


def paragraph(
    found: Hang,
    ranks: Mapping[int, Seen],
    stacks: Mapping[int, str],
    stacks_file: str,
    limit: float,
    code: int,
) -> str:
    """Returns what is printed about a hang."""
    victim = found.victim
    whom = name(found.culprits)
    if victim.wait_sequence >= 0:
        of = "" if victim.members in ("all", "") else f" of ranks {victim.members}"
        fault = f"did not come to call {victim.wait_sequence}{of}, {victim.wait_text}"
    else:
        fault = f"did not answer rank {victim.rank}'s {victim.wait_text}"
    waiting = sorted({victim.rank, *found.waiting})
    waits = (
        f"{name(waiting)} {'waits' if len(waiting) == 1 else 'wait'}, {victim.waited:.0f} s by now"
    )
    if found.circle:
        fault = "wait for each other"
        waits = f"{victim.waited:.0f} s by now"
    lines = [f"odyssey: [watch] {whom} {fault}; {waits}"]
    lines += [f"  {about(ranks[p], stacks.get(p, ''))}" for p in found.culprits[:8]]
    if len(found.culprits) > 8:
        lines.append(f"  and {len(found.culprits) - 8} more")
    for s in [ranks[p] for p in found.waiting if ranks[p].wait_text != victim.wait_text][:4]:
        lines.append(f"  rank {s.rank} waits in {s.wait_text} for {s.waited:.0f} s")
    if stacks_file:
        lines.append(f"  stacks of all ranks: {stacks_file}")
    lines.append(f"  all ranks are ended with exit code {code} (--watchdog {limit:g})")
    return "\n".join(lines) + "\n"


def about(rank: Seen, stack: str) -> str:
    """Where a rank is instead of where it should be, in one line."""
    frame = place(stack)
    at_frame = f" at {frame}" if frame else ""
    so_far = f"step {rank.step}" if rank.step else "before the first step"
    if not rank.alive:
        does = "is gone"
    elif rank.ended:
        does = f"has ended{f': {rank.end}' if rank.end else ''} (exit code {rank.code})"
    elif rank.state in ("T", "t"):
        does = (
            "is stopped (SIGSTOP, or a debugger), in "
            f"{rank.wait_text if rank.waits else rank.phase}{at_frame}"
        )
    elif rank.waits:
        of = "" if rank.members in ("all", "") else f" of ranks {rank.members}"
        number = f"call {rank.wait_sequence}{of}, " if rank.wait_sequence >= 0 else ""
        does = f"waits in {number}{rank.wait_text} for {rank.waited:.0f} s"
    elif rank.cpu > 0.1 or rank.state == "R":
        does = (
            f"computes without an end in sight, {100 * rank.cpu:.0f} % of a core, in "
            f"{rank.phase}{at_frame}"
        )
    else:
        does = f"does nothing ({100 * rank.cpu:.0f} % of a core), in {rank.phase}{at_frame}"
    note = f", {rank.note}" if rank.note and not rank.ended else ""
    last = (
        f"; its last call was {rank.call}, {rank.call_text}"
        if rank.call >= 0 and not rank.waits
        else ""
    )
    return f"rank {rank.rank} (pid {rank.pid} on {rank.host}, {so_far}) {does}{note}{last}"


def signal_name(number: int) -> str:
    """ "SIGKILL" of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0-2,5"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"


def place(stack: str) -> str:
    """Where a program is, from what faulthandler wrote: the innermost frame outside of odyssey
    and of Python itself, of the main thread. "" if there is none.
    """
    threads: list[list[tuple[str, str, str]]] = []
    for line in stack.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(match.groups())  # type: ignore[arg-type]
    if not threads or not threads[-1]:
        return ""
    main = threads[-1]  # faulthandler begins with the newest thread
    outside = (frame for frame in main if not re.match(r"<|.*(/odyssey/|/lib/python3)", frame[0]))
    file, line, function = next(outside, main[0])
    return f"{'/'.join(file.split('/')[-2:])}:{line} in {function}"  # as in the texts of calls


def stragglers(ranks: Sequence[Seen]) -> list[tuple[int, float, str]]:
    """(rank, times the median, activity) of ranks that take much longer than others before they
    wait.
    """
    measured_ranks = [s for s in ranks if s.own > 0 and s.alive and not s.ended]
    if len(measured_ranks) < 2:
        return []
    columns = zip(*((s.own, s.own_data) for s in measured_ranks), strict=True)
    middle, middle_data = (sorted(times)[(len(measured_ranks) - 1) // 2] for times in columns)
    slow_ranks = []
    for s in measured_ranks:
        if s.own > STRAGGLER * middle:
            in_data = s.own_data - middle_data > 0.5 * (s.own - middle)
            slow_ranks.append(
                (s.rank, s.own / middle, "in data loading" if in_data else "in computing")
            )
    return slow_ranks


def slow_link(ranks: Sequence[Seen]) -> Seen | None:
    """The rank that has waited longest for data of the one that most ranks on other machines
    wait for; None: none is slow, but for stragglers.
    """
    stragglers_ = {rank for rank, _, _ in stragglers(ranks)}
    waiting = {}
    for s in ranks:
        if s.link[3:] > (0,) and s.alive and not s.ended and s.link[0] not in stragglers_:
            waiting.setdefault(s.link[0], []).append(s)
    return max(max(waiting.values(), key=len), key=lambda s: s.link[2]) if waiting else None


def link_line(rank: Seen, host: str) -> str:
    """Returns what is printed about a slow link, by a rank that waits for its data."""
    peer, size, ns, times = rank.link
    return (
        f"odyssey: [watch] the link of rank {peer} on {host} is slow: of late {size / 1e6:.1f} MB "
        f"took {ns / 1e9:.1f} s to rank {rank.rank}, {times}x as long as from others (step "
        f"{rank.step})\n"
    )


def slow_line(rank: Seen, times: float, activity: str) -> str:
    """Returns what is printed about a straggler."""
    return (
        f"odyssey: [watch] rank {rank.rank} on {rank.host} is {times:.1f}x the median, "
        f"{activity} (step {rank.step})\n"
    )
