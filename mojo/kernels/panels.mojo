"""One head of one sequence out of tensors whose lanes are tokens (attention.mojo), and back."""

from std.math import ceildiv
from std.sys import masked_store

from .lanes import LANES, Ptr, Vec, first, load, load_first, store


@fieldwise_init
struct Panel(TrivialRegisterPassable):
    """Some features of one sequence, whose token t is lane t % 16 of group t // 16.

    Lanes behind the last token may hold anything.
    """

    var p: Ptr
    var step: Int  # floats from one group to the next

    @always_inline
    def group(self, g: Int) -> Ptr:
        return self.p.unsafe_offset(g * self.step)


def panel_of(x: Ptr, of: Int, at: Int, n: Int, tokens: Int, D: Int, room: Ptr) -> Panel:
    """Features at .. at + D - 1 of sequence n of x (G, of, L): where they are, or copied to `room`."""
    var shift = n * tokens % LANES
    var p = x.unsafe_offset((n * tokens // LANES * of + at) * LANES)
    if shift == 0:
        return Panel(p, of * LANES)
    for g in range(ceildiv(tokens, LANES)):
        var here = LANES - shift
        var rest = min(tokens - g * LANES, LANES) - here  # in the next group
        for d in range(D):
            var i = (g * of + d) * LANES
            var to = (g * D + d) * LANES
            store(room, to, load_first(p, i + shift, here))
            if rest > 0:
                var v = load_first(p, i + of * LANES, rest)
                masked_store[LANES](v, room.unsafe_offset(to + here), first(rest))
    return Panel(room, D * LANES)


def put_group(x: Ptr, of: Int, at: Int, n: Int, tokens: Int, D: Int, y: Ptr, group: Int):
    """Writes group `group` of sequence n, y (D, L), to features at .. at + D - 1 of x (G, of, L)."""
    var start = n * tokens + group * LANES
    var valid = min(tokens - group * LANES, LANES)
    var shift = start % LANES
    var here = min(LANES - shift, valid)
    var p = x.unsafe_offset((start // LANES * of + at) * LANES)
    for d in range(D):
        var v = load(y, d * LANES)
        if here == LANES:
            store(p, d * LANES, v)
            continue
        masked_store[LANES](v, p.unsafe_offset(d * LANES + shift), first(here))
        if valid > here:
            v = load_first(y, d * LANES + here, valid - here)
            masked_store[LANES](v, p.unsafe_offset((of + d) * LANES), first(valid - here))


def clear_rest(x: Ptr, of: Int, at: Int, tokens: Int, D: Int):
    """Zeros in the lanes behind the last of `tokens` tokens."""
    var used = tokens % LANES
    if used:
        var p = x.unsafe_offset((tokens // LANES * of + at) * LANES)
        for d in range(D):
            masked_store[LANES](Vec(0), p.unsafe_offset(d * LANES), ~first(used))
