"""Ranks connected by MPI through its C interface: no Python, no headers, no compiler wrapper.

One program serves MPICH (and what has its ABI: Intel MPI, MVAPICH), Open MPI, and libraries with the standard ABI of
MPI 5: what differs are the handles, which are looked up when the library is loaded. Which library that is says
`find_library`. Errors of MPI come back as codes and are raised; a program that ends with another exit code than 0 ends
all ranks. What it is not: a check that all ranks make the same calls (python/odyssey/comm has that).
"""

from std.ffi import OwnedDLHandle, c_int, external_call
from std.memory import Layout, alloc
from std.os import getenv, setenv
from std.sys import CompilationTarget

from kernels.lanes import BytePtr, Ptr

from .communicator import (
    COUNT_LIMIT,
    Communicator,
    ReduceOp,
    check_counts,
    check_rank,
    check_starts,
)
from .launcher import launched
from .mpi_library import (
    _Connection,
    LIBRARY,
    _address_of,
    _handles_of,
    _load_library,
)

comptime _PIECE = 1 << 30  # bytes of one broadcast
comptime _TEXT = 8192  # room for a text of MPI; the longest any library asks for

comptime _ConnectionPtr = Pointer[_Connection, MutUntrackedOrigin]


struct Mpi(Communicator):
    """All ranks of the program under an MPI launcher. Made by all of them; see the head of this file.
    """

    var _c: _ConnectionPtr
    var _rank: Int
    var _size: Int
    var _local_rank: Int
    var _local_size: Int

    def __init__(out self) raises:
        """Loads MPI and starts it.

        Raises:
            Error: no library is found, or the launcher is another library's.
        """
        var found = launched()
        var box = alloc(Layout[_Connection](count=1)).unsafe_leak()
        box.unsafe_write(_load_library(found))
        self._c = box
        self._rank = 0
        self._size = 1
        self._local_rank = 0
        self._local_size = 1
        var running: c_int = 0
        self._check(
            box[].lib.call["MPI_Initialized", c_int](Pointer(to=running)),
            "MPI_Initialized",
        )
        if not running:
            var level: c_int = 0
            # its UCX component says on every rank that it finds no device
            if getenv("OMPI_MCA_osc") == "":
                _ = setenv("OMPI_MCA_osc", "^ucx")
            var code = box[].lib.call["MPI_Init_thread", c_int](
                Int(0), Int(0), c_int(box[].at.serialized), Pointer(to=level)
            )
            if code != 0:
                raise Error(
                    "[mpi] ",
                    box[].path,
                    " cannot start (code ",
                    code,
                    "); is its mpirun in use?",
                )
            _end_with_the_process(box)
        var rank: c_int = 0
        var size: c_int = 1
        var world = box[].at.world
        self._check(
            box[].lib.call["MPI_Comm_rank", c_int](world, Pointer(to=rank)),
            "MPI_Comm_rank",
        )
        self._check(
            box[].lib.call["MPI_Comm_size", c_int](world, Pointer(to=size)),
            "MPI_Comm_size",
        )
        self._rank = Int(rank)
        self._size = Int(size)
        if found:
            ref one = found.value()
            if one.size > 1 and self._size == 1:
                self.finish()
                raise Error(
                    "[mpi] ",
                    one.launcher,
                    " started ",
                    one.size,
                    " processes, but each sees a world of one through ",
                    box[].path,
                    "; use the mpirun of this library",
                    "" if one.mpi else (
                        " or srun --mpi=pmi2 (MPICH), --mpi=pmix (Open MPI)"
                    ),
                    ", or name the launcher's library in ",
                    LIBRARY,
                )
            self._local_rank = one.local_rank
            self._local_size = one.local_size
        else:
            self._local_rank = self._rank
            self._local_size = self._size
        var comm = 0  # a handle has 4 or 8 bytes
        self._check(
            box[].lib.call["MPI_Comm_dup", c_int](world, Pointer(to=comm)),
            "MPI_Comm_dup",
        )
        box[].comm = comm
        self._check(
            box[].lib.call["MPI_Comm_set_errhandler", c_int](
                comm, box[].at.errors_return
            ),
            "MPI_Comm_set_errhandler",
        )

    def rank(self) -> Int:
        """This process, from 0.

        Returns:
            The rank.
        """
        return self._rank

    def size(self) -> Int:
        """How many there are.

        Returns:
            The number of ranks.
        """
        return self._size

    def local_rank(self) -> Int:
        """This process among those on the same machine, as the launcher says.

        Returns:
            The rank on this machine.
        """
        return self._local_rank

    def local_size(self) -> Int:
        """How many there are on this machine, as the launcher says.

        Returns:
            The number of ranks on this machine.
        """
        return self._local_size

    def why(self) -> String:
        """One line: how many ranks, which library, and where it was found.

        Returns:
            The line.
        """
        return String(
            "mpi: ",
            self._size,
            " rank" if self._size == 1 else " ranks",
            ", ",
            self.library(),
            " (",
            self._c[].path,
            ")",
        )

    def library(self) -> String:
        """The library's name and version, such as "MPICH 5.0.2".

        Returns:
            The text.
        """
        var text = List[UInt8](length=_TEXT + 1, fill=0)
        var length: c_int = 0
        _ = self._c[].lib.call["MPI_Get_library_version", c_int](
            text.unsafe_ptr(), Pointer(to=length)
        )
        var line = _text(text, Int(length)).split("\n")[0].split(",")[0]
        var words = String()
        for word in line.split():
            if word == "Version:" or word == "version:":
                continue
            words += ("" if words == "" else " ") + String(word)
        return words

    def barrier(self) raises:
        """Waits until all ranks have come here.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        self._check(
            self._c[].lib.call["MPI_Barrier", c_int](self._c[].comm),
            "MPI_Barrier",
        )

    def broadcast(self, data: BytePtr, bytes: Int, root: Int = 0) raises:
        """Gives bytes of rank `root` to all, in place; in pieces of 1 GiB.

        Args:
            data: The bytes.
            bytes: How many; the same on all ranks.
            root: The rank that has them.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        check_rank(root, self._size)
        var at = 0
        while at < bytes:
            var n = min(_PIECE, bytes - at)
            self._check(
                self._c[].lib.call["MPI_Bcast", c_int](
                    data.unsafe_offset(at),
                    c_int(n),
                    self._c[].at.byte,
                    c_int(root),
                    self._c[].comm,
                ),
                "MPI_Bcast",
            )
            at += n

    def all_to_all_v(
        self,
        send: Ptr,
        send_counts: List[Int],
        receive: Ptr,
        receive_counts: List[Int],
    ) raises:
        """Exchanges floats of all with all; see the contract. At most 2^31 - 1 floats on each side.

        Args:
            send: The floats for all ranks, one after the other.
            send_counts: How many are for each rank.
            receive: Where those of all ranks go, one after the other.
            receive_counts: How many come from each rank.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        check_counts(send_counts, self._size, "all_to_all_v")
        check_counts(receive_counts, self._size, "all_to_all_v")
        var out = _Layout(send_counts)
        var into = _Layout(receive_counts)
        self._check(
            self._c[].lib.call["MPI_Alltoallv", c_int](
                send,
                out.counts.unsafe_ptr(),
                out.starts.unsafe_ptr(),
                self._c[].at.float32,
                receive,
                into.counts.unsafe_ptr(),
                into.starts.unsafe_ptr(),
                self._c[].at.float32,
                self._c[].comm,
            ),
            "MPI_Alltoallv",
        )
        _ = out^
        _ = into^

    def all_gather_v(self, data: Ptr, starts: List[Int]) raises:
        """Completes `data` in place on all ranks; see the contract.

        Args:
            data: `starts[size]` floats.
            starts: Where the floats of each rank begin, and the end: `size + 1` positions, ascending.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        check_starts(starts, self._size)
        var counts = List[c_int]()
        var at = List[c_int]()
        for r in range(self._size):
            counts.append(c_int(starts[r + 1] - starts[r]))
            at.append(c_int(starts[r]))
        self._check(
            self._c[].lib.call["MPI_Allgatherv", c_int](
                self._c[].at.in_place,
                c_int(0),
                self._c[].at.float32,
                data,
                counts.unsafe_ptr(),
                at.unsafe_ptr(),
                self._c[].at.float32,
                self._c[].comm,
            ),
            "MPI_Allgatherv",
        )
        _ = counts^
        _ = at^

    def all_reduce(self, mut values: List[Int64], op: ReduceOp) raises:
        """Combines numbers over the ranks, element by element, in place.

        Args:
            values: The numbers; the same count on all ranks.
            op: How they are combined.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if len(values) >= COUNT_LIMIT:
            raise Error("[comm] all_reduce: ", len(values), " numbers")
        var how = self._c[].at.sum
        if op == ReduceOp.MAX:
            how = self._c[].at.max
        elif op == ReduceOp.MIN:
            how = self._c[].at.min
        self._check(
            self._c[].lib.call["MPI_Allreduce", c_int](
                self._c[].at.in_place,
                values.unsafe_ptr(),
                c_int(len(values)),
                self._c[].at.int64,
                how,
                self._c[].comm,
            ),
            "MPI_Allreduce",
        )

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
        check_rank(to, self._size)
        check_counts([floats], 1, "send")
        self._check(
            self._c[].lib.call["MPI_Send", c_int](
                data,
                c_int(floats),
                self._c[].at.float32,
                c_int(to),
                c_int(tag),
                self._c[].comm,
            ),
            "MPI_Send",
        )

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
        check_rank(source, self._size)
        check_counts([floats], 1, "receive")
        self._check(
            self._c[].lib.call["MPI_Recv", c_int](
                data,
                c_int(floats),
                self._c[].at.float32,
                c_int(source),
                c_int(tag),
                self._c[].comm,
                self._c[].at.status_ignore,
            ),
            "MPI_Recv",
        )

    def finish(mut self) raises:
        """Ends MPI: waits for all ranks. On Linux the end of the program does it.

        Raises:
            Error: MPI failed, or it is a rank or a count that cannot be.
        """
        if not self._c[].finished:
            self._c[].finished = True
            self._check(
                self._c[].lib.call["MPI_Finalize", c_int](), "MPI_Finalize"
            )

    def _check(self, code: c_int, call: String) raises:
        if code == 0:
            return
        var text = List[UInt8](length=_TEXT + 1, fill=0)
        var length: c_int = 0
        _ = self._c[].lib.call["MPI_Error_string", c_int](
            code, text.unsafe_ptr(), Pointer(to=length)
        )
        raise Error(
            "[mpi] ",
            call,
            " failed on rank ",
            self._rank,
            ": ",
            " ".join(_text(text, Int(length)).split()),
        )


struct _Layout(Movable):
    """Numbers of elements and where they begin, as MPI takes them."""

    var counts: List[c_int]
    var starts: List[c_int]

    def __init__(out self, counts: List[Int]):
        self.counts = List[c_int]()
        self.starts = List[c_int]()
        var at = 0
        for n in counts:
            self.counts.append(c_int(n))
            self.starts.append(c_int(at))
            at += n


def _end_with_the_process(c: _ConnectionPtr):
    """Lets MPI end when the process does: in order with exit code 0, at once and for all ranks with another.
    """
    comptime if CompilationTarget.is_macos():
        return  # has no on_exit: a program calls finish()
    var handler = _handler()
    if _stays(handler):
        _ = external_call["on_exit", c_int](handler, Int(c))
        return
    # `mojo run`: our code is gone when handlers run, the libraries' is not. They run last to first and are called with
    # (exit code, 0): ualarm(n) of n > 0 ends a process that fails by a signal, before it waits in MPI_Finalize.
    try:
        _ = external_call["on_exit", c_int](
            _address_of(c[].lib, "MPI_Finalize"), 0
        )
        _ = external_call["on_exit", c_int](
            _address_of(OwnedDLHandle(), "ualarm"), 0
        )
    except:
        pass  # a library without them: the launcher says that a rank ended early


def _at_exit(status: c_int, c: _ConnectionPtr) abi("C"):
    if c[].finished:
        return
    c[].finished = True
    if status == 0:
        _ = c[].lib.call["MPI_Finalize", c_int]()
    else:
        _let_out()
        _ = c[].lib.call["MPI_Abort", c_int](c[].at.world, status)


def _let_out():
    """What was printed goes to the launcher, which may end before it has read it: once in 15 times without the wait.
    """
    _ = external_call["fflush", c_int](Int(0))
    _ = external_call["usleep", c_int](c_int(100_000))


def _handler() -> Int:
    """The address of `_at_exit`."""
    var function: def(c_int, _ConnectionPtr) thin abi("C") -> None = _at_exit
    return Pointer(to=function).unsafe_bitcast[Int]()[]


def _stays(address: Int) -> Bool:
    """Whether code is part of a loaded file, and so is there to the end."""
    var info = List[Int](length=4, fill=0)
    return external_call["dladdr", c_int](address, info.unsafe_ptr()) != 0


def abort_all(code: Int):
    """Ends all ranks at once where `exit(code)` alone does not, under `mojo run`.

    Args:
        code: The exit code.
    """
    if _stays(_handler()) or not is_connected():
        return
    try:
        _let_out()
        var loaded = OwnedDLHandle()
        _ = loaded.call["MPI_Abort", c_int](
            _handles_of(loaded).world, c_int(code)
        )
    except:
        pass


def is_connected() -> Bool:
    """Whether MPI runs in this process.

    Returns:
        True from MPI_Init to MPI_Finalize.
    """
    try:
        var loaded = OwnedDLHandle()  # everything in this process
        if not loaded.check_symbol("MPI_Initialized"):
            return False
        var begun: c_int = 0
        var ended: c_int = 0
        _ = loaded.call["MPI_Initialized", c_int](Pointer(to=begun))
        _ = loaded.call["MPI_Finalized", c_int](Pointer(to=ended))
        return begun != 0 and ended == 0
    except:
        return False


def _text(data: List[UInt8], length: Int) -> String:
    return String(StringSpan(unsafe_from_utf8=Span(data)[0:length]))
