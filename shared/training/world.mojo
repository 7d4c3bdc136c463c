"""All ranks of this program, whichever way it was started."""

from std.python import Python, PythonObject

from .bridge import call, part


def connect(backend: String = "auto") raises -> World:
    """All ranks of this program: "auto", "mpi", "shm", "nccl", "gloo" or "local" (docs/communication.md).

    Call it first: whatever is wrong on one rank then ends the others at once.
    """
    return World(call(part("comm"), "world", backend))


struct World(ImplicitlyCopyable, Movable):
    """The ranks; a communicator of the Python package."""

    var py: PythonObject
    """The Python communicator."""
    var _rank: Int
    var _size: Int

    def __init__(out self, py: PythonObject) raises:
        """A communicator of the Python package."""
        self.py = py
        self._rank = Int(py=py.rank)
        self._size = Int(py=py.size)

    def rank(self) -> Int:
        """This process, from 0."""
        return self._rank

    def size(self) -> Int:
        """Returns the number of ranks."""
        return self._size

    def local_rank(self) raises -> Int:
        """This process among those on the same machine."""
        return Int(py=self.py.local_rank)

    def local_size(self) raises -> Int:
        """Returns the number of ranks on this machine."""
        return Int(py=self.py.local_size)

    def why(self) raises -> String:
        """One line: what connects the ranks, and how that was found."""
        return String(py=self.py.why)

    def barrier(self) raises:
        """Waits until all ranks have come here."""
        _ = call(self.py, "barrier")

    def all_reduce_sum(self, value: Int) raises -> Int:
        """The sum over all ranks."""
        return self._all_reduce(value, "sum")

    def all_reduce_max(self, value: Int) raises -> Int:
        """The largest of all ranks."""
        return self._all_reduce(value, "max")

    def all_reduce_min(self, value: Int) raises -> Int:
        """The smallest of all ranks."""
        return self._all_reduce(value, "min")

    def _all_reduce(self, value: Int, how: StaticString) raises -> Int:
        var one = Python.import_module("numpy").array(Python.list(value))
        return Int(py=call(self.py, "all_reduce", one, how)[0])
