"""The order in which one process on one thread computes and adds the shards of a step.

The same tree as python/odyssey/parallel/plan.py, which plans for several threads, workers and ranks as well.
"""

from kernels.reduce import split

from .executor import ADD, RUN


struct Plan(Movable, Sized):
    """Actions (kind, a, b) for the executor. The sum ends in buffer 0."""

    var actions: List[Int64]
    var buffers: Int
    var free: List[Int]

    def __init__(out self, shards: Int):
        """Plans shards 0 .. shards-1."""
        self.actions = List[Int64]()
        self.buffers = 0
        self.free = List[Int]()
        _ = self._node(0, shards)

    def __len__(self) -> Int:
        return len(self.actions) // 3

    def _add(mut self, kind: Int, a: Int, b: Int):
        self.actions.append(Int64(kind))
        self.actions.append(Int64(a))
        self.actions.append(Int64(b))

    def _node(mut self, lo: Int, n: Int) -> Int:
        if n == 1:
            var b = self.buffers
            if len(self.free):
                b = self.free.pop()
            else:
                self.buffers += 1
            self._add(RUN, lo, b)
            return b
        var a = self._node(lo, split(n))
        var b = self._node(lo + split(n), n - split(n))
        self._add(ADD, a, b)
        self.free.append(b)
        return a
