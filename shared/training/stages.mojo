"""A placed model on as many ranks as it has places: each rank runs the records of its place, activations are sent.

Rank r has the r-th place. Micro-batches are the shards: all go forward through the stages, one behind the other, then
back (GPipe, Huang et al. 2019), so ranks work on different micro-batches at the same time. Every rank adds the gradients
of its own layers along the tree, then tells them to the others, so all take the same step on the same parameters: the
same bits as one process. What it is not: a way to train what does not fit one rank; every rank keeps all parameters.

All messages of a step have one order, that of (phase, shard, record), and every rank keeps to it: none waits for ever.
"""

from std.memory import unsafe_memset_zero

from kernels.elementwise import add
from kernels.lanes import Ptr
from kernels.layout import LongPtr
from kernels.reduce import split

from .arena import aligned_zeros
from .communicator import Communicator
from .compile import encode, fused, place
from .executor import run_program
from .record import Context, GRADS, OFFSET, PARAMS, RECORD, SPACES, STATS, WORK
from .plan import Run
from .program import Program
from .tape import Arg, Entry, PLACE, SLOT, Tape

comptime RUN = 0
"""Kind of a move: records first .. first + count - 1."""
comptime SEND = 1
"""Kind of a move: bytes first .. of the workspace, so many floats, to a rank."""
comptime RECEIVE = 2
"""Kind of a move: the same from a rank."""


@fieldwise_init
struct Move(ImplicitlyCopyable, Movable):
    """One thing that a rank does for a shard."""

    var kind: Int
    """RUN, SEND or RECEIVE."""
    var first: Int
    """The first record, or the first byte."""
    var count: Int
    """Records, or floats."""
    var peer: Int
    """The other rank."""


def places(tape: Tape) -> List[Int]:
    """The places of a model, ascending.

    Args:
        tape: The model and its loss.

    Returns:
        The places.
    """
    var found = List[Int]()
    for e in tape.entries:
        var i = 0
        while i < len(found) and found[i] < e.device:
            i += 1
        if i == len(found) or found[i] != e.device:
            found.insert(i, e.device)
    return found^


struct Pass(Movable):
    """What one rank does for batches of one size."""

    var program: Program
    """The records of this rank."""
    var moves: List[List[Move]]
    """What it does for a shard in the forward pass, and in the backward pass."""
    var owned: List[Run]
    """Runs of a gradient buffer, statistics included."""
    var owner: List[Int]
    """The rank that computes each of them."""
    var shards: Int
    """Micro-batches of a batch."""
    var shard_size: Int
    """Samples of one."""
    var floats: Int
    """Of a gradient buffer, statistics included."""
    var buffers: Ptr
    """Gradient buffers, one of each shard."""
    var work: Ptr
    """Workspaces, one of each shard."""
    var sent: Int
    """Bytes that this rank has sent so far."""

    def __init__(
        out self,
        tape: Tape,
        rank: Int,
        shards: Int,
        shard_size: Int,
        grads: Int,
    ):
        """Cuts the program of a shard.

        Args:
            tape: It.
            rank: This process, which has the place of that number.
            shards: Of the batch.
            shard_size: Samples of one.
            grads: Floats of a gradient buffer before the statistics.
        """
        var device = places(tape)
        var entries = fused(tape.entries)
        var offsets = List[Int](length=len(tape.slots), fill=0)
        self.program = Program()
        self.program.work_bytes = place(entries, tape.slots, offsets)
        self.moves = [List[Move](), List[Move]()]
        self.shards = shards
        self.shard_size = shard_size
        self.floats = grads + STATS
        self.sent = 0
        # where a slot was written last, and where else it is by now
        var writer = List[Int](length=len(tape.slots), fill=-1)
        var there = List[List[Bool]]()
        for _ in range(len(tape.slots)):
            there.append(List[Bool](length=len(device), fill=False))
        var owner_of = Dict[Int, Int]()  # gradient -> rank
        for e in entries:
            var here = _index(device, e.device)
            for a in e.args:
                if a.kind == PLACE and a.value >> 56 == GRADS:
                    owner_of[(a.value & OFFSET) // 4] = here
                if a.kind != SLOT or writer[a.value] < 0:
                    continue
                var from_ = writer[a.value]
                if from_ != here and not there[a.value][here]:
                    there[a.value][here] = True
                    var n = (tape.slots[a.value] + 3) // 4
                    ref list = self.moves[Int(e.backward)]
                    if rank == from_:
                        list.append(Move(SEND, offsets[a.value], n, here))
                    elif rank == here:
                        list.append(Move(RECEIVE, offsets[a.value], n, from_))
            for a in e.args:  # the first to name a slot writes it
                if a.kind == SLOT and writer[a.value] < 0:
                    writer[a.value] = here
            if here == rank:
                ref list = self.moves[Int(e.backward)]
                var last = len(list) - 1
                if last >= 0 and list[last].kind == RUN:
                    list[last].count += 1
                else:
                    list.append(Move(RUN, len(self.program), 1, rank))
                encode(self.program, e, offsets)
        self.owned = List[Run]()
        self.owner = List[Int]()
        var at = 0
        var mine = 0
        for i in range(0, self.floats, STATS):
            var who = owner_of.get(i)
            if who:
                if who.value() != mine and i > at:
                    self.owned.append(Run(at, i))
                    self.owner.append(mine)
                    at = i
                mine = who.value()
        self.owned.append(Run(at, self.floats))
        self.owner.append(mine)
        self.buffers = aligned_zeros(shards * self.floats)
        self.work = aligned_zeros(shards * self.program.work_bytes // 4)

    def __deinit__(deinit self):
        """Frees its memory."""
        self.buffers.unsafe_free()
        self.work.unsafe_free()

    def run[
        C: Communicator
    ](
        mut self,
        comm: C,
        params: Ptr,
        samples: Int,
        rows: Int,
        var ctx: Context,
    ) raises:
        """Computes all shards of a batch; then the sums are in the first buffer, on all ranks.

        Parameters:
            C: The communicator's type.

        Args:
            comm: The ranks; all of them call.
            params: The arena.
            samples: Of the batch.
            rows: Address of their indices, int64.
            ctx: Of the run; the shard is filled in.

        Raises:
            Error: A record failed, or the ranks lost each other.
        """
        for phase in range(2):
            for s in range(self.shards):
                var grads = self.buffers.unsafe_offset(s * self.floats)
                if phase == 0:
                    unsafe_memset_zero(grads, self.floats)
                ctx.first = Int64(s * self.shard_size)
                ctx.valid = min(
                    Int64(self.shard_size), Int64(samples) - ctx.first
                )
                ctx.rows = Int64(rows) + 8 * ctx.first
                self.sent += self._shard(comm, phase, params, grads, s, ctx)
        self._sum(0, self.shards)
        for i in range(len(self.owned)):
            var run = self.owned[i]
            comm.broadcast_floats(
                self.buffers.unsafe_offset(run.lo),
                run.hi - run.lo,
                self.owner[i],
            )
            if self.owner[i] == comm.rank():
                self.sent += 4 * (run.hi - run.lo)

    def _shard[
        C: Communicator
    ](
        self,
        comm: C,
        phase: Int,
        params: Ptr,
        grads: Ptr,
        shard: Int,
        ctx: Context,
    ) raises -> Int:
        """One pass over one shard, with what is received and sent on the way; returns the bytes sent.
        """
        var sent = 0
        var work = self.work.unsafe_offset(shard * self.program.work_bytes // 4)
        var bases = List[Int64](length=SPACES, fill=0)
        bases[PARAMS] = Int64(Int(params))
        bases[GRADS] = Int64(Int(grads))
        bases[WORK] = Int64(Int(work))
        for m in self.moves[phase]:
            if m.kind == RUN:
                var stopped = run_program(
                    self.program.address().unsafe_offset(m.first * RECORD),
                    m.count,
                    LongPtr(unsafe_from_address=Int(bases.unsafe_ptr())),
                    ctx,
                )
                if stopped >= 0:
                    raise Error(
                        "record ", m.first + stopped, " of the program failed"
                    )
            elif m.kind == SEND:
                comm.send(work.unsafe_offset(m.first // 4), m.count, m.peer)
                sent += 4 * m.count
            else:
                comm.receive(work.unsafe_offset(m.first // 4), m.count, m.peer)
        _ = bases^
        return sent

    def _sum(self, lo: Int, n: Int):
        """Adds the buffers of n shards along the tree, into the first of them.
        """
        if n <= 1:
            return
        var left = split(n)
        self._sum(lo, left)
        self._sum(lo + left, n - left)
        var a = self.buffers.unsafe_offset(lo * self.floats)
        add(
            a,
            a,
            self.buffers.unsafe_offset((lo + left) * self.floats),
            self.floats,
        )


def _index(list: List[Int], x: Int) -> Int:
    for i in range(len(list)):
        if list[i] == x:
            return i
    return -1
