"""Random collectives of odyssey.distributed against NumPy's formulas: run by
test_collectives.py, on threads and ranks.

Every rank draws the same calls from a seed, and from one of its own what only it sees: kinds and
strides of its arrays, which form of a call it uses, in which order it waits. Arguments: seed, how
many calls.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from odyssey import Tensor
from odyssey import distributed as dist
from odyssey import functional as F

DTYPES = [np.float32, np.float64, np.float16, np.int8, np.int32, np.int64, np.uint8, np.uint16]
COMBINED = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
OPS = list(COMBINED)


class Array:
    """An array or tensor with given values: contiguous, or a view of any strides, beside which
    nothing is written.
    """

    def __init__(self, values: np.ndarray, own: np.random.Generator) -> None:
        kind = own.integers(4)
        self.base = self.expected = None
        if values.dtype == np.float32 and kind == 0:
            self.given: Any = Tensor(np.array(values))
            if values.ndim > 1 and values.size and own.integers(2):
                self.given = F.to_lanes(self.given)
        elif kind < 3:
            steps = own.choice([1, 2, 3, -1, -2], values.ndim)
            turned = own.permutation(values.ndim)
            self.base = np.full(
                [max(1, values.shape[k]) * abs(steps[k]) for k in turned], 77, values.dtype
            )
            where = self.base.transpose(np.argsort(turned))[
                (*(slice(None, None, step) for step in steps), ...)
            ]
            self.given = where[(*(slice(n) for n in values.shape), ...)]
            self.given[...] = values
            self.view = self.given
        else:
            self.given = np.array(values)

    def check(self, expected: np.ndarray, what: str) -> None:
        """The values, and that nothing around them was written."""
        equal(np.asarray(self.given), expected, what)
        if self.base is not None:
            self.view[...] = 77
            assert (self.base == 77).all(), f"{what} wrote beside the view"


def equal(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, got.shape)
    np.testing.assert_array_equal(got, expected, what)


def combined(values: list[np.ndarray], op: str) -> np.ndarray:
    dtype = values[0].dtype
    wide = [v.astype(np.float32) if dtype == np.float16 else v for v in values]
    total = wide[0]
    for v in wide[1:]:
        total = COMBINED[op](total, v)
    if op == "mean":
        total = total / total.dtype.type(len(values))
    with np.errstate(over="ignore"):
        return total.astype(dtype)


class Player:
    """Makes the calls. `pending`: works and what to check when they are over."""

    def __init__(self, seed: int) -> None:
        self.me, self.size = dist.get_rank(), dist.get_world_size()
        self.common, self.own = np.random.default_rng(seed), np.random.default_rng([seed, self.me])
        self.pending: list[tuple[Any, Any]] = []
        ranks = list(range(self.size))
        self.groups = [
            None,
            *(
                dist.new_group(part)
                for part in (ranks[::-1], ranks[: self.size - 1 or 1], ranks[:1])
            ),
        ]

    def draw(self, shape: Any, dtype: Any, count: int) -> list[np.ndarray]:
        return [self.common.integers(0, 4, shape).astype(dtype) for _ in range(count)]

    def play(self, calls: int) -> None:
        for number in range(calls):
            self.call(number)
            while self.pending and self.own.integers(3) == 0:
                self.finish(int(self.own.integers(len(self.pending))))
        while self.pending:
            self.finish(int(self.own.integers(len(self.pending))))

    def finish(self, at: int) -> None:
        work, check = self.pending.pop(at)
        if self.own.integers(2):
            while not work.is_completed():
                pass
            check(work.result)  # what is written in place is there now, without wait()
        else:
            result = work.wait()
            check(lambda: result)

    def call(self, number: int) -> None:
        common, own = self.common, self.own
        group = self.groups[common.integers(len(self.groups))]
        ranks = tuple(range(self.size)) if group is None else group.ranks
        n, dtype = len(ranks), DTYPES[common.integers(len(DTYPES))]
        shape = tuple(int(k) for k in common.integers(0, 5, common.integers(0, 4)))
        op = OPS[common.integers(len(OPS))]
        op = "sum" if op == "mean" and np.dtype(dtype).kind in "iu" else op
        root = int(ranks[common.integers(n)])
        kind = [
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "gather",
            "scatter",
        ]
        kind += ["reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"]
        name, later = kind[common.integers(len(kind))], bool(common.integers(2))
        values = {r: self.draw((n, *shape), dtype, 1)[0] for r in ranks}  # row p of rank r
        cuts = common.integers(0, 3, (n, n))  # rows from rank to rank
        stacked, form = bool(own.integers(2)), int(own.integers(3))
        if self.me not in ranks:
            return
        at = ranks.index(self.me)
        here = values[self.me]
        first = [values[r][0] for r in ranks]
        more = {"group": group, "async_op": later}
        empty = np.zeros(shape, dtype)
        what = (
            f"call {number}: {name} {np.dtype(dtype)} {shape} {op} root {root} of {ranks} on "
            f"{self.me}"
        )

        def run(result: Any, check: Any) -> None:
            if later:
                self.pending.append((result, check))
            else:
                check(lambda: result)

        def same(target: Any, given: Any, expected: np.ndarray) -> Any:
            def check(result: Any) -> None:
                given.check(expected, what)
                assert result() is target, what

            return check

        def each(targets: list[Array], listed: Any, expected: Any) -> Any:
            def check(result: Any) -> None:
                for target, e in zip(targets, expected, strict=True):
                    target.check(e, what)
                assert result() is listed, what

            return check

        def fresh(expected: Any) -> Any:
            def check(result: Any) -> None:
                for got, e in zip(result(), expected, strict=True):
                    equal(np.asarray(got), np.asarray(e), what)

            return check

        if name == "all_reduce":
            t, out = Array(here[0], own), Array(empty, own)
            if form:
                run(dist.all_reduce(t.given, op, **more), same(t.given, t, combined(first, op)))
            else:
                check = same(out.given, out, combined(first, op))
                run(
                    dist.all_reduce(t.given, op, out=out.given, **more),
                    lambda r: (t.check(here[0], what), check(r)),
                )
        elif name == "reduce":
            t = Array(here[0], own)
            ends = root == self.me
            result = combined(first, op) if ends else here[0]
            run(dist.reduce(t.given, root, op, **more), same(t.given if ends else None, t, result))
        elif name == "broadcast":
            t = Array(here[0], own)
            run(dist.broadcast(t.given, root, **more), same(t.given, t, values[root][0]))
        elif name == "all_gather":
            t, outs = Array(here[0], own), [Array(empty, own) for _ in ranks]
            listed = [o.given for o in outs]
            if form == 0:
                run(dist.all_gather(t.given, group, later), fresh(first))
            else:
                given = (t.given,) if form == 1 else (listed, t.given)
                kept = {"out": listed} if form == 1 else {}
                run(dist.all_gather(*given, **kept, **more), each(outs, listed, first))
        elif name == "all_gather_into_tensor":
            stacked = stacked or not shape
            t = Array(here[0], own)
            expected = np.stack(first) if stacked else np.concatenate(first)
            out = Array(np.zeros_like(expected), own)
            run(
                dist.all_gather_into_tensor(out.given, t.given, **more),
                same(out.given, out, expected),
            )
        elif name == "gather":
            t, outs = Array(here[0], own), [Array(empty, own) for _ in ranks]
            listed = [o.given for o in outs]
            if self.me != root:
                run(dist.gather(t.given, None, root, **more), same(None, t, here[0]))
            elif form:
                run(dist.gather(t.given, listed, root, **more), each(outs, listed, first))
            else:
                run(dist.gather(t.given, root, group, later), fresh(first))
        elif name == "scatter":
            give = [Array(v, own).given for v in values[root]]
            out = Array(empty, own)
            if form:
                given = (out.given, give if self.me == root else None, root)
                run(dist.scatter(*given, **more), same(out.given, out, values[root][at]))
            else:
                run(
                    dist.scatter(give if self.me == root else None, root, group, later),
                    lambda r: equal(np.asarray(r()), values[root][at], what),
                )
        elif name == "reduce_scatter":
            give = [Array(v, own).given for v in here]
            out = Array(empty, own)
            expected = combined([values[r][at] for r in ranks], op)
            if form:
                run(
                    dist.reduce_scatter(out.given, give, op, **more), same(out.given, out, expected)
                )
            else:
                run(
                    dist.reduce_scatter(give, op, group, later),
                    lambda r: equal(np.asarray(r()), expected, what),
                )
        elif name == "reduce_scatter_tensor":
            stacked = bool(number % 2) or not shape  # a form that all ranks use
            t = Array(here if stacked else here.reshape(n * shape[0], *shape[1:]), own)
            out = Array(empty, own)
            expected = combined([values[r][at] for r in ranks], op)
            run(
                dist.reduce_scatter_tensor(out.given, t.given, op, **more),
                same(out.given, out, expected),
            )
        elif name == "all_to_all":
            if number % 2:
                run(
                    dist.all_to_all(list(here), group, later), fresh([values[r][at] for r in ranks])
                )
            else:  # pieces of other shapes
                pieces = {
                    (p, q): np.full(cuts[p, q], 10 * p + q, dtype)
                    for p in range(n)
                    for q in range(n)
                }
                outs = [Array(np.zeros_like(pieces[p, at]), own) for p in range(n)]
                listed = [o.given for o in outs]
                give = [Array(pieces[at, q], own).given for q in range(n)]
                run(
                    dist.all_to_all(listed, give, **more),
                    each(outs, listed, [pieces[p, at] for p in range(n)]),
                )
        else:
            row = shape[1:]
            give = np.concatenate(
                [np.full((cuts[at, q], *row), 10 * at + q, dtype) for q in range(n)]
            )
            take = np.concatenate(
                [np.full((cuts[p, at], *row), 10 * p + at, dtype) for p in range(n)]
            )
            out = Array(np.zeros_like(take), own)
            sizes = list(map(int, cuts[:, at])), list(map(int, cuts[at]))
            run(
                dist.all_to_all_single(out.given, Array(give, own).given, *sizes, **more),
                same(out.given, out, take),
            )


def main() -> None:
    dist.init_process_group(*sys.argv[3:])
    Player(int(sys.argv[1])).play(int(sys.argv[2]))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks over {dist.get_backend()}: {sys.argv[2]} calls")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
