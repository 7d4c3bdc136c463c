"""The op table: the lists of all families, one after the other.

An op's place in it is its code.

A family is a file of mojo/families, a root file that is compiled by itself, into an object that this one is linked
with: who edits a kernel waits for its family alone.
"""

from std.ffi import external_call

from kernels.op import Op
from kernels.record import Record

from .executor import tiles


def _unknown(r: Record):
    r.context[].stopped = 1


def ops() -> List[Op]:
    """All ops of the CPU. The last one is what codes stand for that are no op's: it ends the program."""
    var all = List[Op]()
    external_call["odyssey_elementwise", NoneType](Pointer(to=all))
    external_call["odyssey_layers", NoneType](Pointer(to=all))
    external_call["odyssey_convolutions", NoneType](Pointer(to=all))
    external_call["odyssey_linear", NoneType](Pointer(to=all))
    external_call["odyssey_text", NoneType](Pointer(to=all))
    all.append(
        Op("tiles", "; ; table, program, records, rest, records of the rest, tile, n, gaps, how many, at, runs", tiles)
    )
    all.append(Op("unknown", "", _unknown))
    return all^
