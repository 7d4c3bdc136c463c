"""The order in which processes and threads compute and add the shards of a step.

Shards 0..V-1 of a global batch are added along one fixed binary tree: a node over n shards splits after the largest
power of two smaller than n. Whoever owns a run of shards computes the largest nodes inside it; the rest of the tree is
completed from those. So the result depends on V alone (docs/determinism.md). The same plans as
python/odyssey/parallel/plan.py makes; what to send comes from here too (`Exchange`), sending is reduction.mojo's.
"""

from std.math import ceildiv

from kernels.lanes import LANES
from kernels.reduce import split

from .executor import ADD, RUN


@fieldwise_init
struct Run(Equatable, ImplicitlyCopyable, Movable):
    """A run from `lo` up to `hi`, or the first shard and the number of shards of a node.
    """

    var lo: Int
    """The first, or the first shard."""
    var hi: Int
    """Behind the last, or the number of shards."""


def share(n: Int, parts: Int, i: Int) -> Run:
    """Part i of 0..n-1 cut into contiguous runs whose lengths differ by at most one.

    Args:
        n: How many there are.
        parts: How many parts.
        i: Which of them, from 0.

    Returns:
        The run, which may be empty.
    """
    return Run(n * i // parts, n * (i + 1) // parts)


def nodes(run: Run, shards: Int) -> List[Run]:
    """The largest nodes (first shard, shards) of the tree over `shards` leaves inside a run, in order.

    Args:
        run: Of shards.
        shards: Of the global batch.

    Returns:
        The nodes.
    """
    var found = List[Run]()
    if shards:
        _inside(found, run, 0, shards)
    return found^


def _inside(mut found: List[Run], run: Run, lo: Int, n: Int):
    if run.hi <= lo or lo + n <= run.lo:
        return
    if run.lo <= lo and lo + n <= run.hi:
        found.append(Run(lo, n))
        return
    _inside(found, run, lo, split(n))
    _inside(found, run, lo + split(n), n - split(n))


struct Actions(Copyable, Movable, Sized):
    """Actions (kind, a, b) as the executor reads them."""

    var numbers: List[Int64]
    """Three for each."""

    def __init__(out self):
        """None."""
        self.numbers = List[Int64]()

    def __len__(self) -> Int:
        """How many actions there are.

        Returns:
            The number.
        """
        return len(self.numbers) // 3

    def address(self) -> Int:
        """Where they are, as long as none is added.

        Returns:
            The address.
        """
        return Int(self.numbers.unsafe_ptr())

    def add(mut self, kind: Int, a: Int, b: Int):
        """Appends one.

        Args:
            kind: RUN or ADD.
            a: The shard to compute, or the buffer that is added to.
            b: The buffer to compute into, or the one that is added.
        """
        self.numbers.append(Int64(kind))
        self.numbers.append(Int64(a))
        self.numbers.append(Int64(b))


struct Plan(Movable):
    """What one process does in one step.

    `threads` are the lists of actions that run side by side, `final` what follows when all have ended. Then the nodes
    `partial` of the tree are complete, in the buffers `places`. It needs `buffers` buffers.
    """

    var shards: Int
    """Of the global batch."""
    var run: Run
    """Those of this process."""
    var threads: List[Actions]
    """The actions of each thread."""
    var final: Actions
    """The actions when all threads have ended."""
    var partial: List[Run]
    """Nodes of the tree that are complete then."""
    var places: List[Int]
    """The buffer of each of them."""
    var buffers: Int
    """How many there must be."""
    var _free: List[Int]
    var _have: Dict[Int, Int]  # node -> buffer

    def __init__(
        out self,
        shards: Int,
        rank: Int = 0,
        ranks: Int = 1,
        workers: Int = 1,
        threads: Int = 1,
    ):
        """The plan of process `rank` of `ranks`, each with `workers` workers whose shards `threads` threads compute.

        Worker w of all ranks * workers owns run w, which is empty for some if a last batch has fewer shards than
        workers. Threads take whole workers, or share one if there are more threads.

        Args:
            shards: Of the global batch.
            rank: This process.
            ranks: Processes.
            workers: Of each process.
            threads: Of this process.
        """
        self.shards = shards
        self.threads = List[Actions]()
        self.final = Actions()
        self.partial = List[Run]()
        self.places = List[Int]()
        self.buffers = 0
        self._free = List[Int]()
        self._have = Dict[Int, Int]()
        var pieces = max(1, threads // workers)
        var cut = List[Run]()
        var all = ranks * workers
        for w in range(workers):
            var run = share(shards, all, rank * workers + w)
            for i in range(pieces):
                var piece = share(run.hi - run.lo, pieces, i)
                if piece.hi > piece.lo:
                    cut.append(Run(run.lo + piece.lo, run.lo + piece.hi))
        self.run = Run(
            share(shards, all, rank * workers).lo,
            share(shards, all, (rank + 1) * workers - 1).hi,
        )
        var used = max(1, min(threads, len(cut)))
        for t in range(used):
            var actions = Actions()
            self._free.clear()  # buffers are not handed from thread to thread
            var mine = share(len(cut), used, t)
            for i in range(mine.lo, mine.hi):
                for node in nodes(cut[i], shards):
                    self._have[_key(node)] = self._subtree(node, actions)
            self.threads.append(actions^)
        for node in nodes(self.run, shards):
            self.partial.append(node)
            self.places.append(self._complete(node))
        self.buffers = max(self.buffers, 1)

    def _subtree(mut self, node: Run, mut actions: Actions) -> Int:
        if node.hi == 1:
            var b = self.buffers
            if len(self._free):
                b = self._free.pop()
            else:
                self.buffers += 1
            actions.add(RUN, node.lo, b)
            return b
        var left = split(node.hi)
        var a = self._subtree(Run(node.lo, left), actions)
        var b = self._subtree(Run(node.lo + left, node.hi - left), actions)
        actions.add(ADD, a, b)
        self._free.append(b)
        return a

    def _complete(mut self, node: Run) -> Int:
        var found = self._have.get(_key(node))
        if found:
            return found.value()
        var left = split(node.hi)
        var a = self._complete(Run(node.lo, left))
        var b = self._complete(Run(node.lo + left, node.hi - left))
        self.final.add(ADD, a, b)
        return a


def _key(node: Run) -> Int:
    return node.lo << 32 | node.hi


struct Exchange(Movable):
    """How the ranks complete the tree: rank p sums range p of the floats over all nodes of all ranks.

    Rank r hands on `counts[r]` nodes, in order; `adds` are the additions over all of them, numbered through; the sum
    ends in node 0.
    """

    var ranges: List[Run]
    """Of each rank, in floats."""
    var counts: List[Int]
    """Nodes that each rank hands on."""
    var adds: Actions
    """The additions."""
    var _number: Dict[Int, Int]

    def __init__(out self, shards: Int, ranks: Int, workers: Int, floats: Int):
        """For `ranks` processes of `workers` workers over buffers of `floats` floats.

        Args:
            shards: Of the global batch.
            ranks: Processes.
            workers: Of each process.
            floats: Of a buffer.
        """
        self.ranges = List[Run]()
        self.counts = List[Int]()
        self.adds = Actions()
        self._number = Dict[Int, Int]()
        for p in range(ranks):
            var r = share(ceildiv(floats, LANES), ranks, p)
            self.ranges.append(
                Run(min(r.lo * LANES, floats), min(r.hi * LANES, floats))
            )
            var run = Run(
                share(shards, ranks * workers, p * workers).lo,
                share(shards, ranks * workers, (p + 1) * workers - 1).hi,
            )
            var own = nodes(run, shards)
            for node in own:
                self._number[_key(node)] = len(self._number)
            self.counts.append(len(own))
        _ = self._complete(Run(0, shards))

    def _complete(mut self, node: Run) -> Int:
        var found = self._number.get(_key(node))
        if found:
            return found.value()
        var left = split(node.hi)
        var a = self._complete(Run(node.lo, left))
        var b = self._complete(Run(node.lo + left, node.hi - left))
        self.adds.add(ADD, a, b)
        return a
