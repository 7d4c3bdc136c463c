"""How the partial sums of the ranks become one sum on all of them: the tree of plan.mojo, completed between ranks.

Range p of the floats goes to rank p from everyone (one all-to-all), is added there in the tree's order, and comes back
to everyone (one all-gather): the same additions in the same order on any number of ranks. The same as `TreeReduction` of
python/odyssey/parallel/reduction.py, but for overlap: here a call returns when the sum is there.
"""

from std.memory import unsafe_memcpy

from kernels.elementwise import add
from kernels.lanes import Ptr

from .arena import aligned_zeros
from .communicator import Communicator
from .plan import Exchange, Plan


struct TreeReduction(Movable):
    """The reduction of one plan over buffers of `floats` floats each."""

    var floats: Int
    """Of a buffer."""
    var partial: List[Int]
    """Buffers with this rank's nodes, in order."""
    var exchange: Exchange
    """Who adds what."""
    var send: Ptr
    """What this rank hands on."""
    var receive: Ptr
    """All ranks' nodes, of this rank's range."""
    var send_counts: List[Int]
    """Floats to each rank."""
    var receive_counts: List[Int]
    """Floats from each rank."""
    var starts: List[Int]
    """Where each rank's range begins, and the end."""
    var range_lo: Int
    """Where this rank's range begins."""
    var range_floats: Int
    """Its length."""
    var sent: Int
    """Bytes that this rank has sent so far."""

    def __init__(
        out self,
        plan: Plan,
        rank: Int,
        ranks: Int,
        workers: Int,
        floats: Int,
    ):
        """Plans and allocates; once per batch size.

        Args:
            plan: Of this process.
            rank: This process.
            ranks: Processes.
            workers: Of each.
            floats: Of a buffer.
        """
        self.floats = floats
        self.partial = plan.places.copy()
        self.exchange = Exchange(plan.shards, ranks, workers, floats)
        var mine = self.exchange.ranges[rank]
        self.range_lo = mine.lo
        self.range_floats = mine.hi - mine.lo
        self.send_counts = List[Int]()
        self.receive_counts = List[Int]()
        self.starts = List[Int]()
        var received = 0
        for r in range(ranks):
            var theirs = self.exchange.ranges[r]
            self.send_counts.append(len(self.partial) * (theirs.hi - theirs.lo))
            self.receive_counts.append(
                self.exchange.counts[r] * self.range_floats
            )
            received += self.receive_counts[r]
            self.starts.append(theirs.lo)
        self.starts.append(floats)
        var several = len(self.partial) > 1
        self.send = aligned_zeros(len(self.partial) * floats if several else 16)
        self.receive = aligned_zeros(max(received, 16))
        self.sent = 0

    def __deinit__(deinit self):
        """Frees its memory."""
        self.send.unsafe_free()
        self.receive.unsafe_free()

    def run[
        C: Communicator
    ](mut self, comm: C, buffers: Ptr, result: Ptr) raises:
        """Leaves the sum over all shards in `result` on all ranks; it may be the buffer of the first node.

        Parameters:
            C: The communicator's type.

        Args:
            comm: The ranks; all of them call.
            buffers: Of the plan, one after the other.
            result: (floats).

        Raises:
            Error: The ranks lost each other.
        """
        var out = self.send
        if len(self.partial) == 1:
            out = buffers.unsafe_offset(self.partial[0] * self.floats)
        else:
            var at = 0
            for r in self.exchange.ranges:
                for b in self.partial:
                    unsafe_memcpy(
                        dest=self.send.unsafe_offset(at),
                        src=buffers.unsafe_offset(b * self.floats + r.lo),
                        count=r.hi - r.lo,
                    )
                    at += r.hi - r.lo
        comm.all_to_all_v(
            out, self.send_counts, self.receive, self.receive_counts
        )
        var n = self.range_floats
        ref numbers = self.exchange.adds.numbers
        if n:
            for i in range(len(self.exchange.adds)):
                var a = self.receive.unsafe_offset(Int(numbers[3 * i + 1]) * n)
                var b = self.receive.unsafe_offset(Int(numbers[3 * i + 2]) * n)
                add(a, a, b, n)
            unsafe_memcpy(
                dest=result.unsafe_offset(self.range_lo),
                src=self.receive,
                count=n,
            )
        comm.all_gather_v(result, self.starts)
        var handed_on = 0
        for i in range(len(self.send_counts)):
            handed_on += self.send_counts[i]
        self.sent += 4 * (
            handed_on - len(self.partial) * n + n * (len(self.send_counts) - 1)
        )
