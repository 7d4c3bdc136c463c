"""From a tape to a program: fusion, and a place in the workspace for every piece of memory.

The same as `fused` and `place` of python/odyssey/program.py, so both front ends run the same records.
"""

from .ops import code
from .record import ROWS, WORK
from .program import ALIGNMENT, Program, operand
from .tape import Arg, Entry, SLOT, Tape

comptime PAGE = 4096
"""Bytes of a page; workspaces of threads do not share one."""


def compiled(tape: Tape) -> Program:
    """The program of a tape: a forward pass, with or without a backward pass.

    Args:
        tape: What was traced.

    Returns:
        The program.
    """
    var entries = fused(tape.entries)
    var offsets = List[Int](length=len(tape.slots), fill=0)
    var program = Program()
    program.work_bytes = place(entries, tape.slots, offsets)
    for e in entries:
        encode(program, e, offsets)
    return program^


def encode(mut program: Program, e: Entry, offsets: List[Int]):
    """Appends a record whose memory has its place.

    Args:
        program: It gets the record.
        e: The record.
        offsets: Of each piece of memory in the workspace, in bytes.
    """
    var numbers = List[Int](capacity=len(e.args))
    for a in e.args:
        numbers.append(
            operand(WORK, offsets[a.value]) if a.kind == SLOT else a.value
        )
    program.append(e.op + (ROWS if e.rows else 0), numbers)


def fused(given: List[Entry]) -> List[Entry]:
    """The same records with pairs of ops made one where not a bit changes.

    A ReLU becomes the epilogue of the convolution or linear layer before it; the backward of a ReLU whose output went
    only into a max-pool becomes part of the pool's backward.

    Args:
        given: The records of a tape.

    Returns:
        The records to run.
    """
    var users = Dict[Int, List[Int]]()  # slot -> records that name it
    var pooled = Dict[Int, Int]()  # input of a max-pool -> its record
    for i in range(len(given)):
        ref e = given[i]
        for a in e.args:
            if a.kind == SLOT:
                users.setdefault(a.value, List[Int]()).append(i)
        if e.op == comptime (code("maxpool_forward")):
            pooled[e.args[2].value] = i
    var out = given.copy()
    var dropped = List[Bool](length=len(given), fill=False)
    for i in range(len(given)):
        ref e = given[i]
        if e.op == comptime (code("relu_forward")):
            var x = e.args[1]
            var maker = _only_maker(users, x, i)
            if maker < 0 or dropped[maker]:
                continue
            ref m = out[maker]
            if (
                m.op == comptime (code("conv2d_forward"))
                or m.op == comptime (code("linear_forward"))
            ) and _same(m.args[0], x):
                m.args[0] = e.args[0]
                m.args[len(m.args) - 1] = 1
                dropped[i] = True
        elif e.op == comptime (code("relu_backward")):
            var maker = _only_maker(users, e.args[1], i)
            var pool = pooled.get(e.args[2].value)
            if maker < 0 or dropped[maker] or not pool:
                continue
            ref m = out[maker]
            if m.op == comptime (code("maxpool_backward")) and _same(
                m.args[2], given[pool.value()].args[1]
            ):
                m.args[0] = e.args[0]
                m.args[len(m.args) - 1] = 1
                dropped[i] = True
    var kept = List[Entry]()
    for i in range(len(out)):
        if not dropped[i]:
            kept.append(out[i].copy())
    return kept^


def _only_maker(users: Dict[Int, List[Int]], a: Arg, i: Int) -> Int:
    """The record that made memory which nobody but record i reads; -1 if there is none.
    """
    var found = users.get(a.value)
    if a.kind != SLOT or not found:
        return -1
    ref names = found.value()
    return names[0] if len(names) == 2 and names[1] == i else -1


def _same(a: Arg, b: Arg) -> Bool:
    return a.kind == b.kind and a.value == b.value


def place(
    entries: List[Entry], sizes: List[Int], mut offsets: List[Int]
) -> Int:
    """Gives every piece of memory an offset so that those in use at the same time do not overlap.

    First fit over the intervals between a piece's first and last record, largest pieces first.

    Args:
        entries: The records.
        sizes: Bytes of each piece.
        offsets: They are written.

    Returns:
        Bytes of the workspace.
    """
    var first = List[Int](length=len(sizes), fill=-1)
    var last = List[Int](length=len(sizes), fill=-1)
    var order = List[Int]()  # slots in use, largest first, then by first use
    for i in range(len(entries)):
        for a in entries[i].args:
            if a.kind == SLOT:
                if first[a.value] < 0:
                    first[a.value] = i
                    var at = len(order)
                    while at and sizes[order[at - 1]] < sizes[a.value]:
                        at -= 1
                    order.insert(at, a.value)
                last[a.value] = i
    var placed = List[Int]()  # in order of offset
    var total = 0
    for s in order:
        var at = 0
        for p in placed:
            if first[p] <= last[s] and first[s] <= last[p]:
                if at + sizes[s] <= offsets[p]:
                    break
                at = max(at, _up(offsets[p] + sizes[p], ALIGNMENT))
        offsets[s] = at
        total = max(total, at + sizes[s])
        var i = len(placed)
        while i and offsets[placed[i - 1]] > at:
            i -= 1
        placed.insert(i, s)
    return _up(total, PAGE)


def _up(n: Int, unit: Int) -> Int:
    return (n + unit - 1) // unit * unit
