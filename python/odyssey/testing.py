"""Checks of an op against a formula: for the ops of this package (tests/ops_samples.py) and for
a user's own.

`check_op` says what is wrong with an op, or nothing. It computes with the op in every way that a
training does: eagerly and replayed, in rows and in lanes, on threads, workers and ranks, as one of
several ranks that share a layer, on a GPU if there is one. What it is not: a proof; it sees a few
shapes of random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import data, nn, optim
from .comm import mock
from .compile import gpus
from .core import functional as F
from .core import native, program
from .core.tensor import Tensor, make
from .errors import OdysseyError
from .nn.module import Parameter
from .parallel.mesh import Mesh
from .train.trainer import DistributedTrainer

Op = Callable[..., Tensor]
Formula = Callable[..., np.ndarray]
# both sides of where a batch is computed in rows (4), and of whole vectors of lanes (16)
BATCHES = (1, 3, 5, 16, 33)
GUARD = 1024  # bytes behind the memory of every tensor
MARK = 0xA5
COORDINATES = 24  # numbers of each argument whose derivative is compared


class OpError(OdysseyError):
    """An op is not what its formula says, or not the same in every way of computing it."""


def check_op(
    op: Op,
    formula: Formula,
    *shapes: tuple[int, ...],
    parameters: Sequence[tuple[int, ...]] = (),
    batches: Sequence[int] = BATCHES,
    positive: bool = False,
    tolerance: float = 2e-5,
    training: bool = True,
) -> None:
    """Checks an op of tensors, op(x, ..., weight, ...), and its gradients.

    Args:
        op: such as functional.gelu; takes as many tensors as there are shapes, then the parameters.
        formula: the same in NumPy, on float64 arrays.
        shapes: of each tensor, without the batch axis.
        parameters: shapes of the parameters behind them.
        batches: samples of the batches to try.
        positive: the numbers to try are above 0.
        tolerance: of values, relative to the largest one; of gradients ten times that, for the
            formula's differences.
        training: also train a small model with the op, in every layout.

    Raises OpError: what differs, and by how much.
    """
    for batch in batches:
        rng = np.random.default_rng(
            [batch, *(n for shape in (*shapes, *parameters) for n in shape)]
        )
        full_shapes = [*((batch, *shape) for shape in shapes), *parameters]
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in full_shapes]
        if positive:
            arrays = [np.abs(a) + np.float32(0.1) for a in arrays]
        _check_values(op, formula, arrays, len(shapes), tolerance, rng)
    if training:
        _check_training(op, shapes, parameters, positive)


def name_of(op: Op) -> str:
    return getattr(op, "__name__", type(op).__name__)


# --- values and gradients -------------------------------------------------------------------------


class _Guarded(program.Eager):
    """Hands out memory with a mark behind it, and looks whether it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[tuple[np.ndarray, int]] = []
        self.records: list[tuple[str, tuple[Any, ...]]] = []

    def alloc(self, nbytes: int) -> program.Memory:
        room = native.aligned(nbytes + GUARD, np.uint8)
        room[nbytes:] = MARK
        self._blocks.append((room, nbytes))
        return program.OwnMemory(room)

    def emit(self, op: str, *args: Any, layout: str = "lanes", dtype: str = "fp32") -> None:
        super().emit(op, *args, layout=layout, dtype=dtype)
        for room, nbytes in self._blocks:
            if not (room[nbytes:] == MARK).all():
                first = int(np.flatnonzero(room[nbytes:] != MARK)[0])
                raise OpError(
                    f"[check_op] {op} writes past the end of a tensor of {nbytes} bytes, at byte "
                    f"{first} behind"
                )
        self.records.append((op, args))


def _check_values(
    op: Op,
    formula: Formula,
    arrays: list[np.ndarray],
    tensors: int,
    tolerance: float,
    rng: np.random.Generator,
) -> None:
    name = name_of(op)
    batch = len(arrays[0])
    wide = [a.astype(np.float64) for a in arrays]
    executor = _Guarded()
    with program.using(executor):
        arguments: list[Tensor] = []
        for i, a in enumerate(arrays):
            memory = executor.alloc(a.nbytes)
            gradient = executor.alloc(a.nbytes)
            t = make(memory, a.shape) if i < tensors else Parameter(a)
            if isinstance(t, Parameter):
                t.place(memory, gradient)
                t.grad.data[...] = 0
            t.data[...] = a
            t.requires_grad = True
            arguments.append(t)
        y = op(*arguments)
        expected = np.asarray(formula(*wide))
        _compare(f"{name} of {batch} samples", y.numpy(), expected, tolerance)
        dy = rng.standard_normal(expected.shape).astype(np.float32)
        y.backward(dy)
        gradients = [None if t.grad is None else t.grad.numpy() for t in arguments]
    for i, (t, a) in enumerate(zip(arguments, arrays, strict=True)):
        if not np.array_equal(t.numpy(), a):
            raise OpError(f"[check_op] {name} changes its argument {i}")
        computed = gradients[i]
        if computed is None:
            raise OpError(f"[check_op] {name} gives no gradient for its argument {i}")
        places = rng.permutation(a.size)[:COORDINATES]
        slopes = _differences(formula, wide, i, dy, places)
        label = f"{name} of {batch} samples: the gradient of argument {i}"
        _compare(label, computed.reshape(-1)[places], slopes, 10 * tolerance)
    _check_declared(
        executor.records, {id(t.grad.memory): t for t in arguments[tensors:] if t.grad is not None}
    )


def _compare(label: str, y: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    if y.shape != expected.shape:
        raise OpError(f"[check_op] {label} has the shape {y.shape}, the formula {expected.shape}")
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.abs(y - expected).max()) / scale
    if not error <= tolerance:
        i = np.unravel_index(int(np.abs(y - expected).argmax()), expected.shape)
        raise OpError(
            f"[check_op] {label} is off by {error:.1e} of the largest value ({tolerance:.0e} is "
            f"allowed); at {tuple(map(int, i))} it is {y[i]:.7g}, by the formula {expected[i]:.7g}"
        )


def _differences(
    formula: Formula, wide: list[np.ndarray], i: int, dy: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """Central differences of the formula at some places of argument i, in the direction dy."""
    x = wide[i]
    step = 1e-5
    slopes = []
    for place in places:
        old = x.flat[place]
        values = []
        for moved in (old + step, old - step):
            x.flat[place] = moved
            values.append(float((np.asarray(formula(*wide)) * dy).sum()))
        x.flat[place] = old
        slopes.append((values[0] - values[1]) / (2 * step))
    return np.array(slopes)


def _check_declared(
    records: list[tuple[str, tuple[Any, ...]]], gradients: dict[int, Tensor]
) -> None:
    """Checks that what adds to a parameter's gradient says so."""
    ops = native.library().ops
    for name, args in records:
        op = ops[name]
        for a, role in zip(args, op.outputs, strict=False):
            if id(a) not in gradients:
                continue
            if role not in op.added:
                raise OpError(
                    f"[check_op] {name} writes {role}, a parameter's gradient; gradients of "
                    f"parameters are added to: declare +{role}, and add"
                )
            if "sums" not in op.traits:
                raise OpError(
                    f"[check_op] {name} adds to {role}, a parameter's gradient, and lacks the "
                    'trait "sums": without '
                    "it a GPU clears all gradient buffers before every chunk of shards"
                )


# --- training -------------------------------------------------------------------------------------


class _Around(nn.Module):
    """The op between linear layers, so that tensor parallelism hands it values that lie split."""

    def __init__(
        self,
        op: Op,
        shapes: Sequence[tuple[int, ...]],
        parameters: Sequence[tuple[int, ...]],
        positive: bool,
    ):
        super().__init__()
        self.op = op
        self.shapes = list(shapes)
        self.positive = positive
        self.input_layers = nn.ModuleList([nn.Linear(12, math.prod(shape)) for shape in shapes])
        rng = np.random.default_rng(3)
        self.names = [f"p{i}" for i in range(len(parameters))]
        for name, shape in zip(self.names, parameters, strict=True):
            setattr(self, name, Parameter(rng.standard_normal(shape).astype(np.float32)))
        with program.using(program.Eager()):
            samples = [Tensor(np.ones((5, *shape), np.float32)) for shape in shapes]
            out = op(*samples, *(getattr(self, name) for name in self.names))
        self.output_layer = nn.Linear(out.size // 5, 8)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        values = [
            F.reshape(layer(x), n, *shape)
            for layer, shape in zip(self.input_layers, self.shapes, strict=True)
        ]
        if self.positive:
            values = [F.add(F.sigmoid(v), 0.1) for v in values]
        y = self.op(*values, *(getattr(self, name) for name in self.names))
        return self.output_layer(F.reshape(y, n, -1))


def _check_training(
    op: Op, shapes: Sequence[tuple[int, ...]], parameters: Sequence[tuple[int, ...]], positive: bool
) -> None:
    rng = np.random.default_rng(11)
    images = rng.standard_normal((80, 12)).astype(np.float32)
    labels = rng.integers(0, 8, 80)
    dataset = data.arrays(images, labels, classes=8)

    def trained(**settings: Any) -> DistributedTrainer:
        nn.manual_seed(4)
        model = _Around(op, shapes, parameters, positive)
        options = {"shard_size": 16, "threads": 1, "device": "cpu", "backend": "local", **settings}
        trainer = DistributedTrainer(model, optim.SGD(lr=0.05, momentum=0.9), **options)
        for batch in data.DataLoader(dataset, batch_size=40, shuffle=True, seed=1):
            trainer.train_step(batch)
        return trainer

    def train(**settings: Any) -> str:
        return trained(**settings).weights_sha256()

    name = name_of(op)
    reference = train()
    for label, settings in {
        "eager": {"execution": "eager"},
        "on 2 threads": {"threads": 2},
        "on 3 workers": {"num_gpus": 3, "threads": 3},
    }.items():
        if train(**settings) != reference:
            raise OpError(
                f"[check_op] {name}: a training {label} gives other weights than replayed on one "
                "thread"
            )
    if train(shard_size=3) != train(shard_size=3, execution="eager"):
        raise OpError(
            f"[check_op] {name}: trained in rows (shards of 3), eager gives other weights than "
            "replayed"
        )
    for label, ranks, settings in (
        ("on 2 ranks", 2, {}),
        ("whose layers 2 ranks share (mesh tp=2)", 2, {"mesh": Mesh(tp=2)}),
        ("whose layers 3 ranks share (mesh tp=3)", 3, {"mesh": Mesh(tp=3)}),
    ):
        digests = mock.run(ranks, lambda comm, settings=settings: train(comm=comm, **settings))
        if set(digests) != {reference}:
            raise OpError(
                f"[check_op] {name}: a training {label} gives other weights than one alone; an op "
                "with the trait "
                '"features" must compute every feature by itself'
            )
    if gpus.count():
        gpu_trainers = {n: trained(device="gpu", num_gpus=n, oversubscribe=True) for n in (1, 3)}
        if gpu_trainers[1].weights_sha256() != gpu_trainers[3].weights_sha256():
            raise OpError(
                f"[check_op] {name}: a training on 3 workers on GPUs gives other weights than on "
                "one"
            )
        for label, expected in trained().state_dict().items():
            _compare(
                f"{name}: {label}, trained on a GPU",
                gpu_trainers[1].state_dict()[label],
                expected,
                1e-3,
            )
