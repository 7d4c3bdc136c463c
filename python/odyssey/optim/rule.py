"""An optimizer's rule, recorded once: elementwise ops over a run of the arena, and numbers of
the step beside them.

Settings, `steps` and what is computed of them are `Scalar`s: float64 on the host, evaluated before
each step, rounded once into the float32 slot that the ops read. The ops run tile by tile: on CPUs
in one native call (mojo/runtime/executor.mojo), on GPUs as a launch each, behind launches that fill
the slots. Each number is computed alone, so where a run is cut changes no bit.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core import native
from ..core.arena import ALIGN
from ..core.operators import multiply
from ..core.program import (
    Memory,
    OwnMemory,
    Range,
    Record,
    Recorder,
    Slot,
    encode,
    plan_memory,
    using,
)
from ..core.tape import Tensor, make, no_grad
from ..errors import ConfigError

# floats: a dozen arrays of a tile are in a core's first cache, and begin on other lines of it
TILE = 960
GPU_TILE = 1 << 22  # what fits a GPU's cache; the arrays on the way want some of this size
NUMBERS = (int, float, np.number)
MAX_STATES = 9  # state arrays: the addresses of more do not fit a record
# spaces on a GPU, behind those of parameters, gradients and states
WORK = MAX_STATES + 3
DIVISOR = MAX_STATES + 4


class Scalar(Tensor):
    """A number of the step: a setting, `steps`, or what + - * / ** sqrt and comparisons make of
    them.

    value: float64, as of the last `evaluate`; the slot `memory` has it as float32.
    """

    __slots__ = ("value", "names", "_of", "_all", "_slot")

    def __init__(
        self,
        everyone: list[Scalar],
        names: Sequence[str],
        of: Callable[..., Any] | None,
        *args: Any,
    ) -> None:
        self._set(OwnMemory(native.aligned(1)), (), "rows", np.float32)
        self.names = tuple(dict.fromkeys(names))
        self._of = (of, args)
        self._all = everyone
        self.value = 0.0
        self._slot = memoryview(self.memory.array)  # type: ignore[union-attr]
        everyone.append(self)

    def computed(self, of: Callable[..., Any], *args: Any) -> Scalar:
        """The number that a function of numbers and scalars gives."""
        names = [name for a in args if isinstance(a, Scalar) for name in a.names]
        return Scalar(
            self._all,
            names,
            of,
            *(a if isinstance(a, Scalar) else SimpleNamespace(value=a) for a in args),
        )

    def root(self) -> Scalar:
        return self.computed(math.sqrt, self)

    def evaluate(self, numbers: Mapping[str, float]) -> None:
        """Takes the value of this step.

        Raises ArithmeticError, TypeError, ValueError: there is none.
        """
        of, args = self._of
        if of is None:
            value = numbers[self.names[0]]
        else:
            value = of(args[0].value, args[1].value) if len(args) == 2 else of(args[0].value)
        self.value = value
        if not -3.4e38 < value < 3.4e38:
            raise OverflowError(f"it is {value}")
        self._slot[0] = value

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"rule() asks for the value of {' and '.join(self.names)}, as `if`, float() and math "
            "do: it is recorded once and these change; compute with + - * / ** and F.sqrt, choose "
            "by F.where(condition, a, b)"
        )

    __bool__ = __float__ = __int__ = __index__ = item = numpy = _refuse
    __hash__ = object.__hash__


def _scalar_first(name: str, of: Callable[..., Any], swapped: bool) -> Callable[[Scalar, Any], Any]:
    def method(self: Scalar, operand: Any) -> Any:
        if isinstance(operand, (Scalar, int, float)):
            return self.computed(of, operand, self) if swapped else self.computed(of, self, operand)
        return getattr(Tensor, name)(self, operand)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _r in ("", "r"):
        setattr(
            Scalar,
            f"__{_r}{_name}__",
            _scalar_first(f"__{_r}{_name}__", getattr(operator, _name), bool(_r)),
        )
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Scalar, f"__{_name}__", _scalar_first(f"__{_name}__", getattr(operator, _name), False))
# once, not for each number
Scalar.__rtruediv__ = lambda self, x: x * self.computed(operator.truediv, 1.0, self)
Scalar.__neg__ = lambda self: self.computed(operator.neg, self)  # type: ignore[method-assign]


class _Value(Slot):
    """An array that the rule computes with: it has no values yet."""

    __slots__ = ()

    @property
    def address(self) -> int:
        raise ConfigError(
            "rule() looks at values (`if`, float(), .numpy()): it is recorded once; use F.where"
        )


class _Rules(Recorder):
    shard = False

    def alloc(self, nbytes: int) -> Memory:
        return _Value(nbytes)


class RuleProgram:
    """Recording of an optimizer's rule() for a run of n floats, or of fewer.

    optimizer: has `rule(p, g, *states)` and the names `states`; its attributes that are numbers
    become scalars. lib: the library that runs it, of CPUs or of GPUs.
    """

    def __init__(self, optimizer: Any, n: int, lib: Any) -> None:
        self.owner = type(optimizer).__name__
        self.n = n
        self._lib = lib
        self._on_gpu = "tiles" not in lib.codes
        self._scalars: list[Scalar] = []
        self._numbers: Mapping[str, float] = {}  # what the scalars are of
        # by the ops, and by these: in the order in which they are evaluated
        self._used: list[Scalar] = []
        view = object.__new__(type(optimizer))
        vars(view).update({k: self._scalar(k, v) for k, v in vars(optimizer).items()})
        view_before = dict(vars(view))
        recorder = _Rules(None, 0, n)
        runs = [make(_Value(4 * n), (n,)) for _ in range(2 + len(optimizer.states))]
        try:
            with using(recorder), no_grad():
                mean = multiply(runs[1], Scalar(self._scalars, ["mean"], None))
                results = view.rule(runs[0], mean, *runs[2:])
            results = (
                [results]
                if isinstance(results, Tensor)
                else list(results)
                if isinstance(results, (tuple, list))
                else []
            )
            self._check(optimizer.states, results)
            if changed := [k for k, v in vars(view).items() if v is not view_before.get(k, self)]:
                raise ConfigError(
                    f"rule() sets self.{changed[0]}: it is recorded once; keep what changes in "
                    "`states`"
                )
            records = self._write_results(recorder.records, runs, results)
        except ConfigError as problem:
            raise ConfigError(f"[{self.owner}] {problem}").on_all_ranks() from problem
        self._encode(records)

    def _scalar(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._scalar(f"{name}[{i}]", v) for i, v in enumerate(value))
        number = isinstance(value, NUMBERS) and not isinstance(value, bool)
        return Scalar(self._scalars, [name], None) if number else value

    def _check(self, states: Sequence[str], results: list[Any]) -> None:
        expected = ["p", *states]
        shapes = [getattr(y, "shape", type(y).__name__) for y in results]
        if shapes != [(self.n,)] * len(expected) or any(y.dtype != np.float32 for y in results):
            raise ConfigError(
                f"rule() gave {', '.join(map(str, shapes)) or 'no tensors'}; it must return the "
                f"new {', '.join(expected)}, each of the shape of p, ({self.n},)"
            )

    def _write_results(
        self, records: list[Record], runs: list[Tensor], results: list[Tensor]
    ) -> list[Record]:
        """The records, with what the rule returns written into the run itself: by the op that
        makes it, if what was there is not read afterwards, else by a copy at the end.
        """
        spaces = {id(t.memory): Range(None, space, 0) for space, t in enumerate(runs, 1)}
        slots = {id(s.memory): s for s in self._scalars}
        for r in records:
            op = r.declared
            every = op.sizes[-1:] == ("n",) or op.sizes[:1] == ("d0",)
            if (
                not every
                or len(op.outputs) != 1
                or op.added
                or op.scratch is not None
                or "sums" in op.traits
            ):
                raise ConfigError(
                    f"rule() uses {r.op}, which is not elementwise: a run is a piece of the "
                    "arena that holds parts of "
                    "any parameters; use functions of each number, and the optimizer's settings"
                )
            if any(isinstance(a, OwnMemory) and id(a) not in slots for a in r.args):
                raise ConfigError(
                    f"rule() gives {r.op} a tensor or array of its own; use p, g, the states and "
                    "numbers"
                )
            if op.inputs and not any(isinstance(a, Slot) for a in r.args[1:]):
                raise ConfigError(
                    f"rule() uses {r.op} of settings alone; of these + - * / ** F.sqrt and "
                    "comparisons"
                )
        records = records if self._on_gpu else self._joined(records, results)
        used = {id(a) for r in records for a in r.args}
        # what no op needs is not evaluated: it may be any number
        for scalar in reversed(self._scalars):
            if id(scalar.memory) in used:
                self._used.insert(0, scalar)
                used.update(id(a.memory) for a in scalar._of[1] if isinstance(a, Scalar))
        records = [r.changed(args=[spaces.get(id(a), a) for a in r.args]) for r in records]
        last = []
        makers = {id(r.args[0]): i for i, r in enumerate(records)}
        targets = [spaces[id(runs[i].memory)] for i in (0, *range(2, len(runs)))]
        returned = [spaces.get(id(y.memory), y.memory) for y in results]
        for k, (memory, target) in enumerate(zip(returned, targets, strict=True)):
            if memory is target:
                continue
            i = makers.get(id(memory))
            other_results = returned[:k] + returned[k + 1 :]
            separate = (
                i is not None
                and not self._on_gpu
                and target not in other_results
                and memory not in other_results
            )
            if separate and not any(a is target for r in records[i + 1 :] for a in r.args):
                for r in records[i:]:
                    r.args = [target if a is memory else a for a in r.args]
                continue
            held = memory
            if isinstance(memory, Range):  # which may be written before it is read
                held = _Value(4 * self.n)
                records.append(Record("copy", [held, memory, self.n]))
            last.append(
                Record("taken", [target, held, None, 0, 0])
                if self._on_gpu
                else Record("copy", [target, held])
            )
            last[-1].args.append(self.n)
        self._last = len(last)  # records that write what is returned
        return records + last

    def _joined(self, records: list[Record], results: list[Tensor]) -> list[Record]:
        """The records, those of a sum of products or a quotient by a root as one that makes the
        same roundings: of what is in the cache, an op takes the time of its loads and stores.
        """
        scalars = {id(s.memory): s for s in self._scalars}
        reads = Counter(
            [id(a) for r in records for a in r.args[1:]] + [id(y.memory) for y in results]
        )
        makers = {id(r.args[0]): (r.op, r.args) for r in records if reads[id(r.args[0])] == 1}

        def number(of: Callable[..., Any], of_what: Any) -> Any:
            made_of = self._scalars[0].computed(of, of_what)
            made_of.evaluate({})
            scalars[id(made_of.memory)] = made_of
            return made_of.memory

        def ordered(a: Any, b: Any) -> list[Any]:
            return sorted((a, b), key=lambda memory: id(memory) in scalars)

        def factors(memory: Any, arrays: bool = False) -> tuple[Any, Any]:
            """An array and a number whose product it is, or of two arrays."""
            op, args = makers.get(id(memory), ("", [None] * 3))
            if op == "scale" and args[2] == -1:
                x, s = factors(args[1])
                return x, number(operator.neg, scalars[id(s)])
            x, by = ordered(*args[1:3])
            product = (op == "multiply_strided" and id(by) in scalars) or (
                op == "multiply" and arrays
            )
            return (x, by) if product else (memory, one)

        one = number(float, 1.0)
        for i, r in enumerate(records):
            y, u, v = r.args[:3]
            if r.op == "add" and r.args[3] == self.n:
                (a, s) = factors(u)
                (b, c) = factors(v, True)
                if s is not one or c is not one:
                    records[i] = r.changed(
                        op="scaled_sum", args=[y, a, s, b, c, int(id(c) not in scalars), self.n]
                    )
            elif (
                r.op == "divide"
                and r.args[12] == r.args[17] == 1
                and makers.get(id(v), " ")[0] == "add_strided"
            ):
                root, eps = ordered(*makers[id(v)][1][1:3])
                op, args = makers.get(id(root), ("", []))
                if op == "sqrt" and id(eps) in scalars:
                    records[i] = r.changed(
                        op="root_quotient", args=[y, *factors(u), *factors(args[1]), eps, self.n]
                    )
        read = {id(y.memory) for y in results}
        live = []
        for r in reversed(records):
            if id(r.args[0]) in read:
                read.update(map(id, r.args[1:]))
                live.append(r)
        return live[::-1]

    def _encode(self, records: list[Record]) -> None:
        lib = self._lib
        self.nbytes = plan_memory(records)
        # each slot is filled; that of the mean then divided by the divisor, which the device has
        if self._on_gpu:
            slots = {
                id(s.memory): WORK << 56 | self.nbytes + 4 * i for i, s in enumerate(self._used)
            }
            fills = [Record("fill", [s.memory, 0.0, 1]) for s in self._used]
            mean = next(s.memory for s in self._used if s.names == ("mean",))
            over = Record("divide", [mean, mean, Range(None, DIVISOR, 0), *([1] * 5), *([0] * 10)])
            records = [*fills, over, *records]
            self.nbytes = self.nbytes + 4 * len(slots)
        else:
            self._work = native.aligned(self.nbytes, np.uint8)
        table = np.zeros((len(records), native.library().record), np.int64)
        self._counts = np.zeros_like(table, bool)  # where a number of floats is

        def operand(memory: Any) -> int:
            if isinstance(memory, Range):
                return memory.space << 56
            if self._on_gpu:
                return WORK << 56 | memory.offset if isinstance(memory, Slot) else slots[id(memory)]
            return (
                self._work.ctypes.data + memory.offset
                if isinstance(memory, Slot)
                else memory.address
            )

        for row, counts, r in zip(table, self._counts, records, strict=True):
            row[: len(r.args) + 1] = encode(lib, r.op, r.args, operand, r.layout, r.dtype)
            counts[1 : len(r.args) + 1] = [isinstance(a, int) and a == self.n for a in r.args]
        self._tables = {self.n: (table, table.ctypes.data, len(table))}

    def of(self, n: int) -> tuple[np.ndarray, int, int]:
        """The records for n floats, where they are, and how many."""
        if n not in self._tables:
            table = self._tables[self.n][0].copy()
            table[self._counts] = n
            self._tables[n] = table, table.ctypes.data, len(table)
        return self._tables[n]

    def launches(
        self, n: int, runs: Sequence[int], work: int, divisor: int, ends: np.ndarray, start: int
    ) -> np.ndarray:
        """The records for n floats on a GPU, as of the last `evaluate`; what they give is taken
        if the step is.

        Args:
            runs: addresses of parameters, gradients and states.
            work: address of `nbytes` bytes.
            divisor: address of what the gradients are divided by.
            ends: where the parameters of the arena begin and end, (n, 2) int64 in pinned memory.
            start: place of the floats in the arena.
        """
        first = np.searchsorted(ends[:, 1], start, "right")
        end = np.searchsorted(ends[:, 0], start + n)
        table = self.of(n)[0]
        if first == end:
            return table[:0]
        bases = np.zeros(DIVISOR + 1, np.int64)
        bases[1 : 1 + len(runs)] = runs
        bases[WORK] = work
        bases[DIVISOR] = divisor
        rows = (table & (1 << 56) - 1) + bases[table >> 56]
        rows[: len(self._used), 2] = [native.float_bits(s.value) for s in self._used]
        rows[len(rows) - self._last :, 3:6] = ends[first:].ctypes.data, end - first, start
        return rows

    def evaluate(self, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of this step. Raises ConfigError: one of them is not finite."""
        previous = self._numbers
        self._numbers = {}
        changed = {name for name, value in numbers.items() if value is not previous.get(name)}
        try:
            for scalar in self._used:
                if not changed.isdisjoint(scalar.names):
                    scalar.evaluate(numbers)
        except (ArithmeticError, TypeError, ValueError) as problem:
            values = " and ".join(f"{name} = {numbers[name]:g}" for name in scalar.names)
            raise ConfigError(
                f"[{self.owner}] rule(): a number made of {values} cannot be computed: {problem}; "
                "it must be finite in every step"
            ).on_all_ranks() from None
        self._numbers = numbers


class RulePrograms:
    """The programs of an optimizer's rule, made as they are needed: a step has runs of several
    kinds.
    """

    def __init__(self) -> None:
        self._programs: dict[Any, RuleProgram] = {}
        self._step: dict[Any, RuleProgram] = {}  # those that this step has evaluated
        # of the arena, in floats; between its parameters: address, number
        self._size = 0
        self._gaps = (0, 0, None)

    def begin_step(self) -> None:
        """Settings may have changed."""
        self._step.clear()

    def _program(
        self, optimizer: Any, n: int, lib: Any, mean: float, lr: float, decays: bool
    ) -> RuleProgram:
        numbers: dict[str, float] = {}
        kinds: list[Any] = [n, lib.table, decays]  # what a recording depends on
        for name, value in vars(optimizer).items():
            kind = type(value)
            if kind is float or kind is int:
                numbers[name] = value
            elif kind is tuple:
                for i, v in enumerate(value):
                    numbers[f"{name}[{i}]"] = v
                kinds.append((name, len(value)))
            elif kind is bool or kind is str or value is None:
                kinds.append((name, value))
            elif isinstance(value, NUMBERS):  # NumPy's
                numbers[name] = float(value)
        numbers |= (
            {"mean": mean, "lr": lr} if decays else {"mean": mean, "lr": lr, "weight_decay": 0.0}
        )
        key = tuple(kinds)
        if key not in self._programs:
            self._programs[key] = RuleProgram(optimizer, n, lib)
        self._programs[key].evaluate(numbers)
        return self._programs[key]

    def records(
        self,
        optimizer: Any,
        lib: Any,
        u: Any,
        addresses: Sequence[int],
        divisor: int,
        lr: float,
        decays: bool,
    ) -> list[Any]:
        """The update of a run (optim.Update) as records; addresses: of parameters, gradients,
        states.

        Between parameters all stays 0, whatever the rule makes of zeros: not every layout computes
        there.
        """
        arena = optimizer.arena
        on_gpu = "tiles" not in lib.codes
        program = self._step.get(decays)
        if program is None:
            n = min(GPU_TILE, arena.size) if on_gpu else TILE
            mean = 1.0 if on_gpu else 1 / (native.float_at(divisor) or math.nan)
            program = self._step[decays] = self._program(optimizer, n, lib, mean, lr, decays)
        if on_gpu:
            return self._launches(program, arena, u, addresses, divisor)
        if arena is not None and self._size != arena.size:
            ends = [(arena.offsets[name] + p.size, -p.size % ALIGN) for name, p in arena.named]
            gaps = np.array([(end, end + padding) for end, padding in ends if padding], np.int64)
            self._size = arena.size
            self._gaps = (gaps.ctypes.data, len(gaps), gaps)
        runs = *self._gaps[:2], u.at, len(addresses), *addresses
        tail = program.of(u.n % TILE or TILE)
        return [[lib.codes["tiles"], lib.table, *program.of(TILE)[1:], *tail[1:], TILE, u.n, *runs]]

    def _launches(
        self, program: RuleProgram, arena: Any, u: Any, addresses: Sequence[int], divisor: int
    ) -> list[np.ndarray]:
        ends = u.worker.pinned("parameters", 16 * len(arena.named)).view(np.int64).reshape(-1, 2)
        ends[:] = [(start := arena.offsets[name], start + p.size) for name, p in arena.named]
        work = u.worker.area("rule", program.nbytes)
        launches = []
        for start in range(0, u.n, program.n):
            n = min(program.n, u.n - start)
            runs = [a + 4 * start for a in addresses]
            launches += [*program.launches(n, runs, work, divisor, ends, u.at + start)]
        return launches
