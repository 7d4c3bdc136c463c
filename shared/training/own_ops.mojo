"""Ops of a program's own: a file of Mojo kernels, compiled once and kept, recorded and replayed like any other."""

from std.python import PythonObject

from .bridge import call, odyssey, part
from .tensor import AnyTensor


def load_ops(path: String) raises:
    """Adds the ops of a Mojo file to the table, compiled first where this machine has not seen it (CONTRIBUTING.md).

    Every rank calls it, before a model is made.

    Raises:
        Error: There is no such file, it does not compile, or an op's name is taken.
    """
    _ = call(odyssey().package, "load_ops", path)


struct Unary(ImplicitlyCopyable, Movable):
    """An elementwise op by its name, with its gradient: `var mish = Unary("mish", saves="x")`, then `mish(x)`."""

    var _op: PythonObject

    def __init__(out self, name: String, *, saves: String = "y") raises:
        """The op of the kernels `name`_forward and `name`_backward; its gradient needs "x" or "y"."""
        self._op = call(part("functional"), "unary", name, saves=saves)

    def __call__[T: AnyTensor](self, x: T) raises -> T:
        """The op of each number."""
        return T(self._op(x.value()))
