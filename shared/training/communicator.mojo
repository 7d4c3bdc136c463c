"""How bytes move between ranks: one contract, and the world of one that keeps it alone.

`Communicator` is the contract, `Solo` this process alone; mpi.mojo has `Mpi`, world.mojo picks one. All ranks make the
same calls in the same order: unlike python/odyssey/comm, nothing here compares them, so a program whose ranks differ
waits, or is ended by MPI. What it is not: who sends which bytes when; that is the trainer's plan.
"""

from kernels.lanes import BytePtr, Ptr

comptime COUNT_LIMIT = 1 << 31
"""MPI counts elements in 32 bits."""


@fieldwise_init
struct ReduceOp(Equatable, ImplicitlyCopyable, Movable):
    """How an all-reduce combines numbers: `ReduceOp.SUM`, `MAX` or `MIN`."""

    var _code: Int

    comptime SUM = Self(0)
    """The sum; wraps around as integers do."""
    comptime MAX = Self(1)
    """The largest."""
    comptime MIN = Self(2)
    """The smallest."""


trait Communicator(Deinitable, Movable):
    """The ranks of a program and what they do together. A world of one does everything alone, so no program asks how
    many there are. Every call but the first five is made by all ranks, in the same order.
    """

    def rank(self) -> Int:
        """This process, from 0.

        Returns:
            The rank.
        """
        ...

    def size(self) -> Int:
        """How many there are.

        Returns:
            The number of ranks.
        """
        ...

    def local_rank(self) -> Int:
        """This process among those on the same machine.

        Returns:
            The rank on this machine.
        """
        ...

    def local_size(self) -> Int:
        """How many there are on this machine.

        Returns:
            The number of ranks on this machine.
        """
        ...

    def why(self) -> String:
        """One line: what connects the ranks, and how that was found.

        Returns:
            The line.
        """
        ...

    def barrier(self) raises:
        """Waits until all ranks have come here.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def broadcast(self, data: BytePtr, bytes: Int, root: Int = 0) raises:
        """Gives `bytes` bytes of rank `root` to all, in place. All ranks name the same number.

        Args:
            data: The bytes.
            bytes: How many; the same on all ranks.
            root: The rank that has them.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def all_to_all_v(
        self,
        send: Ptr,
        send_counts: List[Int],
        receive: Ptr,
        receive_counts: List[Int],
    ) raises:
        """Gives the first `send_counts[0]` floats of `send` to rank 0, the next `send_counts[1]` to rank 1 and so on,
        and puts what all give to this rank into `receive`, in the order of the ranks.

        Args:
            send: The floats for all ranks, one after the other.
            send_counts: How many are for each rank.
            receive: Where those of all ranks go, one after the other.
            receive_counts: How many come from each rank.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def all_gather_v(self, data: Ptr, starts: List[Int]) raises:
        """Completes `data` in place on all ranks: rank r has floats `starts[r]` up to `starts[r + 1]`.

        Args:
            data: `starts[size]` floats.
            starts: `size + 1` positions, ascending, the same on all ranks.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def all_reduce(self, mut values: List[Int64], op: ReduceOp) raises:
        """Combines numbers over the ranks, element by element, in place.

        Args:
            values: The numbers; the same count on all ranks.
            op: How they are combined.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def send(self, data: Ptr, floats: Int, to: Int, tag: Int = 0) raises:
        """Sends floats to another rank; may wait until it receives them.

        Args:
            data: The floats.
            floats: How many.
            to: The other rank.
            tag: What distinguishes messages.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def receive(self, data: Ptr, floats: Int, source: Int, tag: Int = 0) raises:
        """Receives as many floats as another rank sends with this tag.

        Args:
            data: Where they go.
            floats: How many.
            source: The other rank.
            tag: What distinguishes messages.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    def finish(mut self) raises:
        """Ends the connection; nothing is called after it. On Linux the end of the program does it.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        ...

    # --- made of those above ---

    def all_reduce_max(self, value: Int) raises -> Int:
        """The largest of the ranks' numbers.

        Args:
            value: This rank's number.

        Returns:
            The largest, on all ranks.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        return _reduced(self, value, ReduceOp.MAX)

    def all_reduce_min(self, value: Int) raises -> Int:
        """The smallest of the ranks' numbers.

        Args:
            value: This rank's number.

        Returns:
            The smallest, on all ranks.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        return _reduced(self, value, ReduceOp.MIN)

    def all_reduce_sum(self, value: Int) raises -> Int:
        """The sum of the ranks' numbers.

        Args:
            value: This rank's number.

        Returns:
            The sum, on all ranks.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        return _reduced(self, value, ReduceOp.SUM)

    def broadcast_floats(self, data: Ptr, floats: Int, root: Int = 0) raises:
        """Gives floats of rank `root` to all, in place.

        Args:
            data: The floats.
            floats: How many.
            root: The rank that has them.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        self.broadcast(data.unsafe_bitcast[UInt8](), 4 * floats, root)

    def broadcast_text(self, text: String, root: Int = 0) raises -> String:
        """The text of rank `root`, on all ranks.

        Args:
            text: The text, on rank `root`.
            root: The rank that has them.

        Returns:
            The text.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        var length: List[Int64] = [Int64(text.byte_length())]
        self.broadcast(_bytes(length), 8, root)
        var data = List[UInt8](length=Int(length[0]), fill=0)
        if self.rank() == root:
            data = List[UInt8](text.as_bytes())
        self.broadcast(
            data.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin](),
            len(data),
            root,
        )
        return String(StringSpan(unsafe_from_utf8=Span(data)))


struct Solo(Communicator):
    """This process alone."""

    var _why: String

    def __init__(out self, why: String = "no launcher"):
        """A world of one.

        Args:
            why: How that came about.
        """
        self._why = why

    def rank(self) -> Int:
        """0.

        Returns:
            The rank.
        """
        return 0

    def size(self) -> Int:
        """1.

        Returns:
            The number of ranks.
        """
        return 1

    def local_rank(self) -> Int:
        """0.

        Returns:
            The rank on this machine.
        """
        return 0

    def local_size(self) -> Int:
        """1.

        Returns:
            The number of ranks on this machine.
        """
        return 1

    def why(self) -> String:
        """One line: what it is, and how that was found.

        Returns:
            The line.
        """
        return String("local: one process; ", self._why)

    def barrier(self) raises:
        """Nobody is waited for.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        pass

    def broadcast(self, data: BytePtr, bytes: Int, root: Int = 0) raises:
        """All ranks have the bytes.

        Args:
            data: The bytes.
            bytes: How many; the same on all ranks.
            root: The rank that has them.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        check_rank(root, 1)

    def all_to_all_v(
        self,
        send: Ptr,
        send_counts: List[Int],
        receive: Ptr,
        receive_counts: List[Int],
    ) raises:
        """Copies `send` to `receive`.

        Args:
            send: The floats for all ranks, one after the other.
            send_counts: How many are for each rank.
            receive: Where those of all ranks go, one after the other.
            receive_counts: How many come from each rank.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        check_counts(send_counts, 1, "all_to_all_v")
        check_counts(receive_counts, 1, "all_to_all_v")
        if send_counts[0] != receive_counts[0]:
            raise Error(
                "[comm] all_to_all_v: rank 0 gives ",
                send_counts[0],
                " floats to rank 0, which expects ",
                receive_counts[0],
            )
        for i in range(send_counts[0]):
            receive[unsafe_offset=i] = send[unsafe_offset=i]

    def all_gather_v(self, data: Ptr, starts: List[Int]) raises:
        """All ranks have the floats.

        Args:
            data: `starts[size]` floats.
            starts: Where the floats of each rank begin, and the end: `size + 1` positions, ascending.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        check_starts(starts, 1)

    def all_reduce(self, mut values: List[Int64], op: ReduceOp) raises:
        """The numbers are those of all ranks.

        Args:
            values: The numbers; the same count on all ranks.
            op: How they are combined.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        pass

    def send(self, data: Ptr, floats: Int, to: Int, tag: Int = 0) raises:
        """There is no other rank: an error.

        Args:
            data: The floats.
            floats: How many.
            to: The other rank.
            tag: What distinguishes messages.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        raise Error("[comm] a world of one has no rank ", to, " to send to")

    def receive(self, data: Ptr, floats: Int, source: Int, tag: Int = 0) raises:
        """There is no other rank: an error.

        Args:
            data: Where they go.
            floats: How many.
            source: The other rank.
            tag: What distinguishes messages.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        raise Error("[comm] a world of one has no rank ", source)

    def finish(mut self) raises:
        """Nothing is to be ended.

        Raises:
            Error: ranks or counts that a world of one does not have.
        """
        pass


# --- checks that all communicators share ---


def check_rank(rank: Int, size: Int) raises:
    """Refuses a rank that is not there.

    Args:
        rank: The rank.
        size: How many there are.

    Raises:
        Error: it is not there.
    """
    if not 0 <= rank < size:
        raise Error("[comm] there is no rank ", rank, " among ", size)


def check_counts(counts: List[Int], size: Int, what: String) raises:
    """Refuses numbers of floats that are not one per rank, or more in all than MPI counts.

    Args:
        counts: The numbers.
        size: How many ranks there are.
        what: The call, for the message.

    Raises:
        Error: they are not.
    """
    if len(counts) != size:
        raise Error(
            "[comm] ", what, ": ", len(counts), " counts for ", size, " ranks"
        )
    var total = 0
    for n in counts:
        if not 0 <= n < COUNT_LIMIT:
            raise Error("[comm] ", what, ": a rank cannot have ", n, " floats")
        total += n
    if total >= COUNT_LIMIT:
        raise Error(
            "[comm] ",
            what,
            ": ",
            total,
            " floats in one call, at most ",
            COUNT_LIMIT - 1,
            " are allowed; use smaller pieces",
        )


def check_starts(starts: List[Int], size: Int) raises:
    """Refuses positions that are not those of one range per rank.

    Args:
        starts: The positions.
        size: How many ranks there are.

    Raises:
        Error: they are not.
    """
    if len(starts) != size + 1 or starts[0] < 0:
        raise Error(
            "[comm] all_gather_v: ",
            len(starts),
            " positions for ",
            size,
            " ranks; one more than ranks are needed, from 0 upwards",
        )
    var counts = List[Int]()
    for r in range(size):
        counts.append(starts[r + 1] - starts[r])
    check_counts(counts, size, "all_gather_v")
    if starts[size] >= COUNT_LIMIT:
        raise Error("[comm] all_gather_v: positions beyond ", COUNT_LIMIT - 1)


def _reduced[C: Communicator](comm: C, value: Int, op: ReduceOp) raises -> Int:
    var values: List[Int64] = [Int64(value)]
    comm.all_reduce(values, op)
    return Int(values[0])


def _bytes(ref values: List[Int64]) -> BytePtr:
    return BytePtr(unsafe_from_address=Int(values.unsafe_ptr()))
