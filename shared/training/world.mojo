"""All ranks of this program, whichever way it was started, and how it ends when something is wrong.

`connect()` gives a `World`: alone without a launcher (no MPI is loaded then), over MPI under mpirun or srun. `stop(e)`
tells an error in one line and ends all ranks with the exit code of docs/fault-tolerance.md.
"""

from std.ffi import c_int, external_call
from std.os import getenv, setenv
from std.sys import exit, stderr
from std.utils import Variant

from kernels.lanes import BytePtr, Ptr

from .communicator import Communicator, ReduceOp, Solo
from .launcher import announced_rank, launched, rendezvous_size
from .mpi import Mpi, abort_all, is_connected

comptime _ALONE = (  # from connect() to stop() of this process; a program has no other such memory
    "ODYSSEY_STOPS_ALONE"
)


def connect(backend: String = "auto") raises -> World:
    """All ranks of this program; made by all of them.

    Args:
        backend: What connects them: "local" is this process alone, "mpi" all that the launcher started, "auto" the
            latter where a launcher announced several processes, else the former; ODYSSEY_BACKEND=mpi or local takes
            the place of "auto".

    Returns:
        The ranks.

    Raises:
        Error: an unknown backend; a launcher and no MPI library; a launcher that MPI does not understand.
    """
    var found = launched()
    var asked = backend
    if backend == "auto" and getenv("ODYSSEY_BACKEND") in ["mpi", "local"]:
        asked = getenv("ODYSSEY_BACKEND")  # the others are Python's own
    if asked == "auto":
        if found and found.value().size > 1:
            return World(Mpi())
        if not found and rendezvous_size() > 1:
            raise Error(
                "[comm] WORLD_SIZE speaks of ",
                rendezvous_size(),
                " processes, but Mojo programs are connected by MPI only;",
                " start them with mpirun or srun, or give backend local",
            )
        if found:
            return World(Solo(found.value().launcher + " started one"))
        return World(Solo())
    if asked == "mpi":
        return World(Mpi())
    if asked == "local":
        _ = setenv(_ALONE, "1")
        return World(Solo("as asked"))
    raise Error(
        "[comm] backend ", backend, " is unknown; choose auto, mpi or local"
    )


def exit_code(message: String) -> Int:
    """The exit code for an error with this message, by the name in brackets that it begins with.

    Args:
        message: The error's.

    Returns:
        The code.
    """
    if message.startswith("[mpi]"):
        return 70 if " failed on rank " in message else 69
    if message.startswith("[checkpoint]"):
        return 65 if " is refused" in message else 73
    if message.startswith("[data]") or message.startswith("[numbers]"):
        return 65
    return 64 if message.startswith("[") else 70


def stop(error: Error):
    """Says what is wrong, in one line on stderr, and ends all ranks. Does not return.

    What all ranks have alike is told once, by rank 0, with which the others end while they wait a moment. A rank that
    fails before connect() connects now, to end the others: they wait for it there. Where MPI itself cannot be used the
    first rank of each machine says so.

    Args:
        error: What is wrong.
    """
    var message = String(error)
    var code = exit_code(message)
    var rank = announced_rank()
    var found = launched()
    var early = Bool(found) and found.value().size > 1 and not is_connected()
    if early and message.startswith("[mpi]"):
        if found.value().local_rank > 0:
            _wait()
            exit(code)
        early = False
    if rank == 0:
        print("odyssey: ", message, sep="", file=stderr, flush=True)
    if early and getenv(_ALONE) == "":
        try:
            _ = Mpi()
        except:
            pass  # it could not have been used at all
    if rank > 0:
        _wait()
        var line = String("odyssey: [rank ", rank, "] ", message)
        print(line, file=stderr, flush=True)
    abort_all(code)
    exit(code)


def _wait():
    _ = external_call["usleep", c_int](c_int(300_000))


struct World(Communicator):
    """The ranks of this program: `Solo` or `Mpi`, chosen when it starts."""

    var _one: Variant[Solo, Mpi]

    def __init__(out self, var solo: Solo):
        """This process alone.

        Args:
            solo: The world of one.
        """
        self._one = solo^

    def __init__(out self, var mpi: Mpi):
        """All that a launcher started.

        Args:
            mpi: The ranks.
        """
        self._one = mpi^

    def rank(self) -> Int:
        """This process, from 0.

        Returns:
            The rank.
        """
        return self._one[Mpi].rank() if self._one.isa[Mpi]() else 0

    def size(self) -> Int:
        """How many there are.

        Returns:
            The number of ranks.
        """
        return self._one[Mpi].size() if self._one.isa[Mpi]() else 1

    def local_rank(self) -> Int:
        """This process among those on the same machine.

        Returns:
            The rank on this machine.
        """
        return self._one[Mpi].local_rank() if self._one.isa[Mpi]() else 0

    def local_size(self) -> Int:
        """How many there are on this machine.

        Returns:
            The number of ranks on this machine.
        """
        return self._one[Mpi].local_size() if self._one.isa[Mpi]() else 1

    def why(self) -> String:
        """One line: what connects the ranks, and how that was found.

        Returns:
            The line.
        """
        if self._one.isa[Mpi]():
            return self._one[Mpi].why()
        return self._one[Solo].why()

    def barrier(self) raises:
        """Waits until all ranks have come here.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].barrier()

    def broadcast(self, data: BytePtr, bytes: Int, root: Int = 0) raises:
        """Gives bytes of rank `root` to all, in place.

        Args:
            data: The bytes.
            bytes: How many; the same on all ranks.
            root: The rank that has them.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].broadcast(data, bytes, root)
        else:
            self._one[Solo].broadcast(data, bytes, root)

    def all_to_all_v(
        self,
        send: Ptr,
        send_counts: List[Int],
        receive: Ptr,
        receive_counts: List[Int],
    ) raises:
        """Exchanges floats of all with all; see the contract.

        Args:
            send: The floats for all ranks, one after the other.
            send_counts: How many are for each rank.
            receive: Where those of all ranks go, one after the other.
            receive_counts: How many come from each rank.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].all_to_all_v(
                send, send_counts, receive, receive_counts
            )
        else:
            self._one[Solo].all_to_all_v(
                send, send_counts, receive, receive_counts
            )

    def all_gather_v(self, data: Ptr, starts: List[Int]) raises:
        """Completes `data` in place on all ranks; see the contract.

        Args:
            data: `starts[size]` floats.
            starts: Where the floats of each rank begin, and the end: `size + 1` positions, ascending.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].all_gather_v(data, starts)
        else:
            self._one[Solo].all_gather_v(data, starts)

    def all_reduce(self, mut values: List[Int64], op: ReduceOp) raises:
        """Combines numbers over the ranks, element by element, in place.

        Args:
            values: The numbers; the same count on all ranks.
            op: How they are combined.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].all_reduce(values, op)

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
        if self._one.isa[Mpi]():
            self._one[Mpi].send(data, floats, to, tag)
        else:
            self._one[Solo].send(data, floats, to, tag)

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
        if self._one.isa[Mpi]():
            self._one[Mpi].receive(data, floats, source, tag)
        else:
            self._one[Solo].receive(data, floats, source, tag)

    def finish(mut self) raises:
        """Ends the connection; nothing is called after it. On Linux the end of the program does it.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if self._one.isa[Mpi]():
            self._one[Mpi].finish()
