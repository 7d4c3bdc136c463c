"""Which link a rank calls slow."""

from __future__ import annotations

from odyssey.base import slot
from odyssey.comm.link_times import EVERY_NS, Links

MS = 1_000_000


def counted(seen: dict[int, tuple[int, int]], steps: int = 4) -> tuple[int, ...]:
    """What the slot says after steps in which so many bytes of each rank took so many ms."""
    links = Links({0})
    for step in range(steps):
        for rank, (size, ms) in seen.items():
            links.came(rank, size, ms * MS)
        links.judge((step + 1) * EVERY_NS)
    return slot.read_current().link


def test_a_link_is_slow_that_takes_much_longer_than_others():
    rank, size, ns, times = counted({1: (1000, 2), 2: (500, 400), 3: (1000, 2)})
    assert (rank, times) == (2, 400)
    assert (size, ns) == (937, 750 * MS)  # the last step, half of the one before, ...


def test_links_that_are_all_slow_or_all_quick_are_not():
    assert counted({1: (1000, 400), 2: (1000, 500), 3: (2000, 900)})[3] == 0
    assert counted({1: (1000, 0), 2: (1000, 20)})[3] == 0
    assert counted({1: (1000, 900)})[3] == 0  # with nothing to compare
    assert counted({1: (1000, 100), 2: (9000, 950)})[3] == 0  # by bytes


def test_a_link_that_has_become_quick_is_slow_no_more():
    links = Links({0})
    for step in range(20):
        links.came(1, 1000, MS)
        links.came(2, 1000, 500 * MS if step < 5 else MS)
        links.judge((step + 1) * EVERY_NS)
        if not 5 <= step < 10:
            assert (slot.read_current().link[3] > 0) == (step < 5), step
