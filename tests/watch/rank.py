"""A process that only has a slot and takes orders: a rank for a watcher that a test has started
by hand.

Arguments: rank, world size. Prints its pid and the slot's descriptor, then takes a step every 20 ms
until its parent's end of stdin is closed, or a line there holds an exit code; then it ends with
that, after a word if the line has one.
"""

from __future__ import annotations

import select
import sys

from odyssey.base import exits, slot

rank, world = map(int, sys.argv[1:3])
slot.describe(rank, world)
descriptor = slot.publish()
exits.listen()
slot.phase("compute")
import os  # noqa: E402

print(os.getpid(), descriptor, flush=True)
steps = 0
while not select.select([sys.stdin], [], [], 0.02)[0]:
    steps += 1
    slot.step(steps, 4)
code, _, word = sys.stdin.readline().strip().partition(" ")
if word or not code:
    slot.note_end(int(code or 0), word)
os._exit(int(code or 0))
