"""Optimizers over an arena.

An optimizer is a rule over all parameters (optim/rule.py), or one kernel
(mojo/kernels/optimizer.mojo); this file holds its settings and state. `step()` is for a custom
training loop; a trainer calls `apply()` with the summed gradients of the whole global batch. Both
check first that the gradients are finite and change nothing if they are not.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import functional as F
from ..core import native, setting_versions
from ..core.arena import Arena
from ..core.partial_arrays import guarded
from ..core.tensor import Parameter, Tensor
from ..errors import ConfigError, NumericsError, check_number
from ..settings.declarations import brief, explain_keywords
from ..settings.recipes import OPTIMIZERS, check_listed
from .rule import MAX_STATES, RulePrograms
from .schedules import Schedule, cosine, linear, sequential, step_decay

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LambdaLR",
    "Lion",
    "Optimizer",
    "RMSprop",
    "lr_scheduler",
    "vectors",
]

_ONE = np.ones(1, np.float32)  # the divisor of `Optimizer.step()`


class Update(NamedTuple):
    """A run of n parameters to update: addresses of it and its gradients, where it is in state
    and arena (floats).

    arrays: addresses of the state arrays, if they are not the optimizer's own.
    worker: whose GPU has them (engine/gpu/group.py), if one has.
    """

    params: int
    grads: int
    state: int
    n: int
    at: int
    arrays: tuple[int, ...] = ()
    worker: Any = None


@dataclasses.dataclass(slots=True)
class Kind:
    """The pieces of an update that decay, or those that don't.

    first: the first piece.
    records: the records of the first piece, as they were built.
    rows: the rows of all pieces in the table.
    """

    first: Update
    records: list[Any]
    rows: np.ndarray


class KeptTable:
    """The table of records of an optimizer's last step.

    key: everything that the table depends on, except for the numbers of a step.
    checks: how many of the records, the first, check gradients.
    kinds: the pieces by whether they decay.
    """

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.table = np.zeros((0, 0), np.int64)
        self.checks = 0
        self.kinds: dict[bool, Kind] = {}


class Group(MutableMapping[str, Any]):
    """An optimizer's numbers by name ("lr", ...), and "params", its parameters; what is set is
    set in the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._of = optimizer

    def __iter__(self) -> Iterator[str]:
        numbers = (k for k, v in self._of.settings.items() if not isinstance(v, str))
        yield from ("params", *numbers)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Any:
        if name not in list(self):
            raise KeyError(name)
        return (
            [p for _, p in self._of._bound().named] if name == "params" else getattr(self._of, name)
        )

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "params" or name not in list(self):
            raise KeyError(f"{name}; {', '.join(list(self)[1:])} can be set")
        setattr(self._of, name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"an optimizer keeps its {name}")


class Optimizer:
    """Base: binds to an arena, keeps state of the arena's layout, updates both by a `rule`
    (docs/tour.md).

    Args:
        params: `model.parameters()` or `model.named_parameters()`; may be left out when a trainer
            binds the model.
        lr: learning rate; change the attribute to change it.
        settings: the others, which become attributes: numbers, tuples of numbers, texts, True or
            False.

    `undecayed` says of which parameters (name, parameter) the weight decay is 0; set it before the
    first step.
    """

    undecayed: Callable[[str, Parameter], bool] | None = None
    states: tuple[str, ...] = ()  # names of the state arrays
    locked = False  # ranks have parts of the state: written only within a trainer's writing()
    unwatched = frozenset({"steps", "arena", "arrays", "mirror", "locked", "coming"})
    # attributes of this class, which are no settings
    _internal = unwatched | {"_recorded", "_kept", "_context", "_floats", "_make", "_addresses"}
    _not_copied = _internal - {"steps"}
    __repr__ = brief

    def __init_subclass__(cls) -> None:
        # of a class that has a kernel: no longer
        if "rule" in vars(cls) and "_records" not in vars(cls):
            cls._records = Optimizer._records  # type: ignore[method-assign]

    def __init__(
        self, params: Iterable[Any] | None = None, lr: float = 0.01, **settings: Any
    ) -> None:
        owner = type(self)
        if owner.rule is Optimizer.rule and owner._records is Optimizer._records:
            raise ConfigError(
                f"[{owner.__name__}] has no rule; write `def rule(self, p, g, "
                f"{', '.join(self.states) or '*states'})`, which returns the new p and states"
            )
        if len(self.states) > MAX_STATES:
            raise ConfigError(
                f"[{owner.__name__}] has {len(self.states)} states; at most {MAX_STATES} are "
                "supported"
            )
        for name, value in settings.items():
            setattr(self, name, _checked(owner.__name__, name, value))
        self.lr = lr
        self._recorded = RulePrograms()
        self._kept = KeptTable()
        self._addresses: list[int] = []  # of the state arrays
        self.steps = 0
        self.arena: Arena | None = None
        # state as this process last saw it: GPUs may be ahead
        self.arrays: dict[str, np.ndarray] = {}
        self.mirror: Any = None  # of the state on GPUs (gpu/mirror.py)
        # brings the state of a checkpoint, once it is known whose it is
        self.coming: Callable[[], None] | None = None
        if params is not None:
            named_params = [
                p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)
            ]
            if any(not isinstance(p, Parameter) for _, p in named_params):
                raise ConfigError(
                    f"[{type(self).__name__}] params must be parameters; give model.parameters(), "
                    "and for groups without weight decay set optimizer.undecayed = optim.vectors, "
                    "or a function of (name, parameter)"
                )
            self.bind(Arena.of(named_params))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Numbers of NumPy become Python's, and lists of numbers tuples, so
        that checkpoints hold them. Raises ConfigError: the constructor would refuse the number.
        """
        if name not in self._internal:
            value = _as_setting(type(self).__name__, name, value)
            if not setting_versions.is_unchanged(vars(self).get(name), value):
                setting_versions.updates.rise()
        object.__setattr__(self, name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """The numbers that an update is made with by name ("lr", ...), also a rule's own such as
        `_scale`; they may be set in the middle of a training.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name not in self._internal and isinstance(value, (int, float, str, tuple))
        }

    @property
    def undecayed_names(self) -> list[str]:
        """The names of the parameters that `undecayed` exempts from weight decay."""
        return [
            name for name, p in self._bound().named if self.undecayed and self.undecayed(name, p)
        ]

    def restore(self, settings: Mapping[str, Any], undecayed: Sequence[str]) -> None:
        """Sets `settings`, as this property gave them, and the parameters that do not decay."""
        for name, value in settings.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        if list(undecayed) != self.undecayed_names:
            self.undecayed = (
                functools.partial(_is_one_of, frozenset(undecayed)) if undecayed else None
            )

    @property
    def param_groups(self) -> list[Group]:
        """The only group, as loops written for PyTorch use it: `for g in opt.param_groups:
        g["lr"] *= 2`.
        """
        return [Group(self)]

    def bind(self, arena: Arena) -> None:
        """Attaches the optimizer to the parameters it updates; its state starts at zero."""
        if self.arena is arena:
            # buffers have been added, or it is in files
            if self._floats < arena.size or self._make is not arena.make:
                old_arrays = self.arrays
                self._start(arena)
                for name, a in old_arrays.items():
                    self.arrays[name][: a.size] = a
            return
        if self.arena is not None:
            raise ConfigError(
                f"[{type(self).__name__}] already updates another model; create a second "
                "optimizer, or copy a model and its optimizer in one call: model, optimizer = "
                "copy.deepcopy((model, optimizer))"
            )
        self.arena = arena
        self._context = native.Context(what="optimizer")
        self._start(arena)

    def _start(self, arena: Arena) -> None:
        self._floats = arena.size
        self._make = arena.make
        self.keep({name: arena.make(arena.size) for name in self.states})

    # --- copies: each has its own state; programs and addresses are of one optimizer only ---

    def __copy__(self) -> Optimizer:
        """An optimizer of the same parameters that continues with its own state."""
        new = type(self).__new__(type(self))
        new.__setstate__(self.__getstate__())
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """An optimizer of copies of the parameters; those of a model that the same call copies
        are the model's.
        """
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = self.__getstate__()
        arrays = state.pop("arrays")
        new.__setstate__({**copy.deepcopy(state, memo), "arrays": arrays})  # which are copied there
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything that pickle keeps: the settings, the parameters and the state."""
        if self.arena is not None:
            self.arena.check_copied()
            if self.locked or any(a.size != self.arena.size for a in self.arrays.values()):
                raise ConfigError(
                    f"[copy] ranks have parts of the state of this {type(self).__name__}, so a "
                    "copy on one would miss the others' parts; copy within `with "
                    "trainer.writing():`, on all ranks, or use trainer.save_checkpoint()"
                )
        settings = {
            name: value for name, value in vars(self).items() if name not in self._not_copied
        }
        return {"settings": settings, "arena": self.arena, "arrays": dict(self.state)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Becomes what `__getstate__` described."""
        vars(self).update(state["settings"], arena=None, arrays={}, mirror=None, coming=None)
        # Programs and tables hold addresses of one optimizer's memory.
        vars(self).update(_recorded=RulePrograms(), _kept=KeptTable())
        if state["arena"] is not None:
            self.bind(state["arena"])
        for name, values in state["arrays"].items():
            self.arrays[name][...] = values

    def keep(self, state: dict[str, np.ndarray]) -> None:
        """Takes these arrays as the state: of the whole arena, or of the parameters that this
        rank updates.
        """
        self.arrays = state
        self._addresses = [a.ctypes.data for a in state.values()]

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The state arrays by name, as the last step left them; read-only where ranks have parts
        of them.
        """
        if self.mirror is not None:
            self.mirror.read()
        if self.coming is not None:
            come = self.coming
            self.coming = None
            come()
        return {k: guarded(v) for k, v in self.arrays.items()} if self.locked else self.arrays

    @contextlib.contextmanager
    def whole(self, arrays: dict[str, np.ndarray]) -> Iterator[None]:
        """Inside, `state` is these arrays, which may be written."""
        previous_arrays = self.arrays
        self.arrays = arrays
        locked = self.locked
        self.locked = False
        try:
            yield
        finally:
            self.arrays = previous_arrays
            self.locked = locked

    def check_whole(self) -> None:
        """Raises ConfigError if this rank keeps only a part of the state: another trainer has
        spread it over ranks.
        """
        if any(a.size != self._bound().size for a in self.state.values()):
            raise ConfigError(
                f"[{type(self).__name__}] its state is spread over the ranks of a trainer "
                "(zero=, or a mesh); "
                "use its save_checkpoint() and load_checkpoint(), or make a new optimizer"
            )

    def apply(
        self,
        updates: Sequence[Update],
        divisor: int,
        lr: float,
        agree: Callable[[bool], bool] | None = None,
        samples: int | None = None,
    ) -> bool:
        """Updates runs of parameters if all gradients are finite; returns whether they were.

        Args:
            updates: where parameters, gradients (summed over samples) and state are.
            divisor: address of the number (float32) that gradients are divided by.
            lr: learning rate of this step.
            agree: asked with what was found here, says whether to go on; for ranks with different
                updates.
            samples: address of the number of samples, if that is not the divisor.
        """
        if self.mirror is not None:
            self.mirror.read()
        lib = native.library()
        self.steps += 1
        self._recorded.begin_step()
        table, checks = self._table(
            lib, updates, divisor, lr, divisor if samples is None else samples
        )
        address = table.ctypes.data
        if agree is None:
            ok = lib.run(address, len(table), self._context) < 0
        else:
            ok = agree(lib.run(address, checks, self._context) < 0)
            if ok:
                lib.run(address + 8 * checks * lib.record, len(table) - checks, self._context)
        if not ok:
            self.steps -= 1
        return ok

    def _table(
        self, lib: native.Library, updates: Sequence[Update], divisor: int, lr: float, samples: int
    ) -> tuple[np.ndarray, int]:
        """Returns the records of a step, int64 (records, numbers), and how many of them, the
        first, check gradients.

        The table of the step before is kept. If nothing but the numbers of the step has changed,
        such as the rate and the corrections of the bias, only these are written: with `undecayed`,
        a model has a record for each layer.
        """
        arena = self.arena
        frozen = [] if arena is None else arena.frozen
        exempt = self._exempt()
        layout = None if arena is None else (arena, arena.size, arena.trained)
        key = [lib.table, list(updates), divisor, samples, layout, frozen, exempt, self._addresses]
        kept = self._kept
        if kept.key != key or not self._renewed(lib, kept, divisor, lr):
            kept.key = []  # an error below leaves a table that is not complete
            self._build(lib, kept, self.trained(updates), exempt, divisor, lr, samples)
            kept.key = key
        return kept.table, kept.checks

    def _build(
        self,
        lib: native.Library,
        kept: KeptTable,
        updates: Sequence[Update],
        exempt: list[bool] | None,
        divisor: int,
        lr: float,
        samples: int,
    ) -> None:
        """Writes the table of a step from nothing, and notes which records have the numbers of
        the step.
        """
        records: list[Any] = [[lib.codes["finite"], u.grads, u.n] for u in updates]
        kept.checks = len(records)
        kept.kinds = {}
        rows: dict[bool, list[int]] = {True: [], False: []}
        for u in updates:
            for piece, decays in self._pieces(u, exempt):
                of_piece = self._records(lib, piece, divisor, lr, decays)
                if not rows[decays]:
                    kept.kinds[decays] = Kind(piece, of_piece, np.zeros(0, np.int64))
                rows[decays] += range(len(records), len(records) + len(of_piece))
                records += of_piece
            records += self._buffers(lib, u, samples)
        if len(records) == kept.checks:
            self._refuse_as_others_do(lib, divisor, lr)
        for decays, kind in kept.kinds.items():
            kind.rows = np.array(rows[decays], np.int64)
        kept.table = np.zeros((len(records), lib.record), np.int64)
        for row, record in zip(kept.table, records, strict=True):
            row[: len(record)] = record

    def _renewed(self, lib: native.Library, kept: KeptTable, divisor: int, lr: float) -> bool:
        """Writes the numbers of this step into the kept table; False if more than these have
        changed.

        The first record of each kind is built: its numbers are those of all records of its kind.
        """
        if len(kept.table) == kept.checks:
            self._refuse_as_others_do(lib, divisor, lr)
        for decays, kind in kept.kinds.items():
            of_piece = self._records(lib, kind.first, divisor, lr, decays)
            if len(of_piece) != 1 or len(kind.records) != 1:
                return False
            record = of_piece[0]
            numbers = self._first_number(record)
            if record[:numbers] != kind.records[0][:numbers]:
                return False
            kept.table[kind.rows, numbers : len(record)] = record[numbers:]
        return True

    def _refuse_as_others_do(self, lib: native.Library, divisor: int, lr: float) -> None:
        """Raises the error of a rule that is not supported also on a rank that has nothing to
        update.
        """
        self._records(lib, Update(0, 0, 0, 0, 0), divisor, lr)

    def _first_number(self, record: list[int]) -> int:
        """The index of the first number of the step in a record.

        A rule's record has none: its slots hold them.
        """
        if type(self)._records is Optimizer._records:
            return len(record)
        # after the code, the addresses and the count that _places returns
        return 5 + len(self.states)

    def records(
        self, lib: native.Library, u: Update, divisor: int, lr: float, samples: int
    ) -> list[list[int]]:
        """The update of one run as records: of parameters, and of the buffers behind them
        (arena.Buffer).
        """
        pieces = self._pieces(u, self._exempt())
        rules = [
            record
            for piece, decays in pieces
            for record in self._records(lib, piece, divisor, lr, decays)
        ]
        return rules + self._buffers(lib, u, samples)

    def _parameters(self, u: Update) -> int:
        """How many floats of a run are parameters. The buffers are behind them."""
        if self.arena is None:
            return u.n
        return min(max(self.arena.trained - u.at, 0), u.n)

    def _buffers(self, lib: native.Library, u: Update, samples: int) -> list[list[int]]:
        """The record that updates the buffers of a run (arena.Buffer), if it has any."""
        n = self._parameters(u)
        if n == u.n:
            return []
        at = u.params + 4 * n
        return [
            [
                lib.codes["sgd"],
                at,
                at,
                u.grads + 4 * n,
                samples,
                u.n - n,
                native.float_bits(1.0),
                0,
                0,
                0,
            ]
        ]

    def trained(self, updates: Sequence[Update]) -> Sequence[Update]:
        """The same without the parameters that are frozen (requires_grad=False)."""
        frozen = [] if self.arena is None else self.arena.frozen
        if not frozen:
            return updates
        pieces = []
        for u in updates:
            start = u.at
            end = u.at + u.n
            for lo, hi in [*frozen, (end, end)]:
                if start < (stop := min(lo, end)):
                    pieces.append(run(u, start, stop))
                start = max(start, min(hi, end))
        return pieces

    def _exempt(self) -> list[bool] | None:
        """For each parameter of the arena whether its weight decay is 0; None if no parameter
        has been exempted.

        `undecayed` is called in each step, because its answer may change with what the function
        reads.
        """
        if self.undecayed is None:
            return None
        return [bool(self.undecayed(name, p)) for name, p in self._bound().named]

    def _pieces(self, u: Update, exempt: list[bool] | None) -> list[tuple[Update, bool]]:
        """The parameters of a run, cut where the weight decay starts and ends; each piece with
        whether it decays.
        """
        n = self._parameters(u)
        if n == 0:
            return []
        if exempt is None:
            return [(u._replace(n=n), True)]
        pieces: list[tuple[Update, bool]] = []
        arena = self._bound()
        starts = [*arena.offsets.values(), arena.size]
        for undecayed, lo, hi in zip(exempt, starts, starts[1:], strict=False):
            first = max(lo, u.at)
            end = min(hi, u.at + n)
            if first >= end:
                continue
            if pieces and pieces[-1][1] is not undecayed:
                pieces[-1] = (run(u, pieces[-1][0].at, end), not undecayed)
            else:
                pieces.append((run(u, first, end), not undecayed))
        return pieces

    def rule(self, p: Tensor, g: Tensor, *states: Tensor) -> Any:
        """The new parameters and states of a run of the arena, elementwise; g is the mean
        gradient, clipped. Settings and `steps` are numbers of the step in it, for + - * / **
        and F.sqrt.
        """
        raise NotImplementedError

    def _records(
        self, lib: Any, u: Update, divisor: int, lr: float, decays: bool = True
    ) -> list[Any]:
        """The update of one run as records of ops.mojo; without weight decay if it does not
        `decay`.
        """
        places = u.params, u.grads, *(a + 4 * u.state for a in u.arrays or self._addresses)
        return self._recorded.records(self, lib, u, places, divisor, lr, decays)

    def _places(self, op: str, lib: native.Library, u: Update, divisor: int) -> list[int]:
        """Returns what the records of all update rules begin with."""
        state = (a + 4 * u.state for a in u.arrays or self._addresses)
        return [lib.codes[op], u.params, *state, u.grads, divisor, u.n]

    def step(self) -> None:
        """Updates the parameters from their `grad`.

        Raises NumericsError: a gradient is not finite, nothing changed.
        """
        arena = self._bound()
        self.check_whole()
        if not self.apply_whole(arena.address(native.GRADS), _ONE.ctypes.data, self.lr):
            raise NumericsError(
                "[optimizer] a gradient is NaN or infinite; nothing was changed. Lower the rate"
            )

    def apply_whole(self, gradients: int, divisor: int, lr: float) -> bool:
        """Updates all parameters from the gradients at an address; see `apply`."""
        arena = self._bound()
        update = Update(arena.address(native.PARAMS), gradients, 0, arena.size, 0)
        return self.apply([update], divisor, lr)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to zero."""
        self._bound().grads[:] = 0

    def _bound(self) -> Arena:
        if self.arena is None:
            raise ConfigError(
                f"[{type(self).__name__}] has no parameters; give model.parameters() or use a "
                "trainer"
            )
        return self.arena

    def state_dict(self) -> dict[str, Any]:
        """Step count, rate and copies of the state arrays."""
        return {"steps": self.steps, "lr": self.lr, **{k: v.copy() for k, v in self.state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what state_dict() gave; the optimizer must be bound to a model of the same
        layout.
        """
        self._bound()
        self.check_whole()
        missing = sorted({"steps", "lr"} - state.keys())
        if missing:
            raise ConfigError(
                f"[{type(self).__name__}] the state has no {' and no '.join(missing)}"
            )
        for k, v in self.state.items():
            if k not in state or state[k].shape != v.shape:
                raise ConfigError(
                    f"[{type(self).__name__}] the state has no {k} of {v.size} numbers"
                )
        for k, v in self.state.items():
            v[...] = state[k]
        self.steps = int(state["steps"])
        self.lr = float(state["lr"])


def run(u: Update, lo: int, hi: int) -> Update:
    """The part of an update from `lo` up to `hi`, of the arena's floats."""
    by = lo - u.at
    return u._replace(
        params=u.params + 4 * by, grads=u.grads + 4 * by, state=u.state + by, n=hi - lo, at=lo
    )


def _is_one_of(names: frozenset[str], name: str, p: Parameter) -> bool:
    """For `Optimizer.undecayed`: the parameters that have one of these names."""
    return name in names


def vectors(name: str, p: Parameter) -> bool:
    """For `Optimizer.undecayed`: parameters of less than two axes, which are biases and norms
    (nanoGPT's rule).
    """
    return p.ndim < 2


# Of settings by their names: the least that is allowed, and what is not reached. Of others: any
# finite number.
_BOUNDS = {
    "lr": (0,),
    "momentum": (0, 1),
    "alpha": (0, 1),
    "betas": (0, 1),
    "eps": (0,),
    "weight_decay": (0,),
    "lr_decay": (0,),
}


def _as_setting(owner: str, name: str, value: Any) -> Any:
    """Returns the value of an attribute as a setting has it: a number of NumPy as Python's, and a
    setting that the constructor checks (lr, betas, ...) as it leaves it; anything else as it is.

    Raises ConfigError: the constructor would refuse the value.
    """
    if isinstance(value, (np.number, np.bool_)):
        value = value.item()
    elif isinstance(value, np.ndarray) and value.ndim <= (name == "betas"):
        value = value.tolist()
    return _checked(owner, name, value) if name in _BOUNDS else value


def _checked(owner: str, name: str, value: Any) -> Any:
    """A setting that is allowed, numbers as floats. Raises ConfigError."""

    def number(label: str, v: Any) -> float:
        return check_number(
            f"[{owner}] {label}", v, *_BOUNDS.get(name, (-math.inf,)), open_low=name == "eps"
        )

    if isinstance(value, (bool, str)) and name not in _BOUNDS:
        return value
    if isinstance(value, (tuple, list)) and (name == "betas" or name not in _BOUNDS):
        return tuple(number(f"{name.removesuffix('s')}{i}", v) for i, v in enumerate(value, 1))
    return number(name, value)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, in
    PyTorch's form.
    """

    states = ("momentum",)

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 0.01,
        momentum: float = 0.0,
        *,  # PyTorch's next one is the dampening
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and momentum == 0:
            raise ConfigError("[SGD] nesterov needs a momentum above 0")
        super().__init__(
            params, lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
        )

    def _records(
        self, lib: Any, u: Update, divisor: int, lr: float, decays: bool = True
    ) -> list[Any]:
        numbers = lr, self.momentum, self.weight_decay if decays else 0.0
        return [
            [
                *self._places("sgd", lib, u, divisor),
                *map(native.float_bits, numbers),
                int(self.nesterov),
            ]
        ]


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient."""

    states = ("m", "v")
    decoupled = False

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _records(
        self, lib: Any, u: Update, divisor: int, lr: float, decays: bool = True
    ) -> list[Any]:
        numbers = lr, *self.betas, self.eps, self.weight_decay if decays else 0.0
        places = self._places("adam", lib, u, divisor)
        corrections = (1 - beta**self.steps for beta in self.betas)
        numbers, corrections = (map(native.float_bits, values) for values in (numbers, corrections))
        return [[*places, *numbers, int(self.decoupled), *corrections]]


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    decoupled = True

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class RMSprop(Adam):
    """Gradients divided by the root of a running mean of their squares (Tieleman, Hinton 2012);
    decay is added to them.

    As PyTorch's without momentum: Adam's kernel with beta1 = 0 and no corrections.
    """

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.alpha = check_number("[RMSprop] alpha", alpha, 0, 1)
        super().__init__(params, lr, (0.0, self.alpha), eps, weight_decay)

    def _records(
        self, lib: Any, u: Update, divisor: int, lr: float, decays: bool = True
    ) -> list[Any]:
        self.betas = 0.0, self.alpha  # which may have been changed
        one = native.float_bits(1.0)
        return [[*super()._records(lib, u, divisor, lr, decays)[0][:-2], one, one]]


class Lion(Optimizer):
    """The sign of a mean of momentum and gradient, with decoupled weight decay (Chen et al.
    2023).
    """

    states = ("m",)

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)

    def rule(self, p: Tensor, g: Tensor, m: Tensor) -> Any:
        c = self.betas[0] * m + (1 - self.betas[0]) * g
        return p - self.lr * (F.sign(c) + self.weight_decay * p), self.betas[1] * m + (
            1 - self.betas[1]
        ) * g


class Adagrad(Optimizer):
    """Gradients divided by the root of the sum of their squares (Duchi et al. 2011); weight
    decay is added to them.
    """

    states = ("v",)

    @explain_keywords
    def __init__(
        self,
        params: Iterable[Any] | None = None,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        *,  # PyTorch's next one is the initial accumulator
        eps: float = 1e-10,
    ) -> None:
        super().__init__(params, lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)

    def rule(self, p: Tensor, g: Tensor, v: Tensor) -> Any:
        d = g + self.weight_decay * p
        v = v + d * d
        return p - self.lr / (1 + (self.steps - 1) * self.lr_decay) * d / (F.sqrt(v) + self.eps), v


_KINDS = [
    kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Optimizer)
]
#: The optimizers of this file by the names of `--optimizer`, their own in small letters.
BY_NAME: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in _KINDS if kind is not Optimizer
}
check_listed("optimizers", BY_NAME, OPTIMIZERS)


# --- PyTorch's names ------------------------------------------------------------------------------


class LambdaLR:
    """For a custom training loop: each step() gives the optimizer its first rate times the next
    factor of a schedule.

    `lr_scheduler` has PyTorch's others. A trainer takes the schedule itself:
    DistributedTrainer(schedule=).
    """

    def __init__(self, optimizer: Optimizer, lr_lambda: Schedule) -> None:
        vars(optimizer).setdefault("_first_lr", optimizer.lr)
        self.optimizer = optimizer
        self.schedule = lr_lambda
        self.last_epoch = -1
        self.step()

    def step(self) -> None:
        """Counts, and sets the rate."""
        self.last_epoch += 1
        self.optimizer.lr = vars(self.optimizer)["_first_lr"] * self.schedule(self.last_epoch)

    def get_last_lr(self) -> list[float]:
        """The rate, in a list."""
        return [self.optimizer.lr]


class lr_scheduler:  # noqa: N801
    """PyTorch's schedulers, by the schedules that they are here."""

    LambdaLR = LambdaLR

    @staticmethod
    def StepLR(optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> LambdaLR:  # noqa: N802
        """`step_decay`."""
        return LambdaLR(optimizer, step_decay(step_size, gamma))

    @staticmethod
    def CosineAnnealingLR(optimizer: Optimizer, T_max: int, eta_min: float = 0.0) -> LambdaLR:  # noqa: N802, N803
        """`cosine`, without the way up again."""
        return LambdaLR(
            optimizer, cosine(T_max, eta_min / vars(optimizer).get("_first_lr", optimizer.lr))
        )

    @staticmethod
    def LinearLR(  # noqa: N802
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
    ) -> LambdaLR:
        """`linear`."""
        return LambdaLR(optimizer, linear(start_factor, total_iters, end_factor))

    @staticmethod
    def SequentialLR(
        optimizer: Optimizer, schedulers: Sequence[LambdaLR], milestones: Sequence[int]
    ) -> LambdaLR:  # noqa: N802
        """`sequential`."""
        return LambdaLR(optimizer, sequential([s.schedule for s in schedulers], milestones))
