"""Ranks that differ are refused before their first step, by the name of what differs; equal ones
never are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from odyssey import Mesh, data, manual_seed, nn, optim
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import ConfigError, DataError, OdysseyError, ShapeError
from odyssey.train.agreement import data_set
from odyssey.train.trainer import DistributedTrainer

SAMPLES, CLASSES = 24, 3


@dataclasses.dataclass
class Case:
    """One training: what a rank of it is given."""

    features: int
    hidden: list[int]
    activations: list[str]
    p: float
    slope: float
    optimizer: dict[str, Any]
    images: np.ndarray
    labels: np.ndarray
    batch: int
    seed: int
    order: int
    shuffle: bool
    schedule: list[float]
    made: bool  # samples are made when they are asked for
    flip: int  # seed of what they draw
    start: int = 0  # seed of the weights
    extra: bool = False


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        widths = [case.features, *case.hidden, CLASSES]
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.case, self.drop = case, nn.Dropout(case.p)

    def forward(self, x):
        case = self.case
        for layer, name in zip(list(self.layers)[:-1], case.activations, strict=True):
            x = getattr(F, name)(layer(x))
        if case.extra:
            x = F.relu(x)
        return self.layers[-1](self.drop(x * case.slope))


class Made:
    """Draws what it adds from (seed, sample)."""

    classes = CLASSES

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return len(self.case.images)

    def __getitem__(self, i: int):
        draw = np.random.default_rng([self.case.flip, i])
        image = self.case.images[i].astype(np.float32)
        return image + draw.normal(size=image.shape).astype(np.float32), int(self.case.labels[i])


def drawn(draw: np.random.Generator) -> Case:
    hidden = draw.integers(1, 20, draw.integers(1, 4)).tolist()
    features = int(draw.integers(1, 12))
    count = SAMPLES + int(draw.integers(0, 9))
    bytes_ = draw.random() < 0.3
    images = draw.integers(0, 256, (count, features)).astype(np.uint8)
    return Case(
        features=features,
        hidden=hidden,
        activations=draw.choice(["relu", "tanh", "sigmoid"], len(hidden)).tolist(),
        p=float(draw.choice([0.0, 0.25, 0.5])),
        slope=float(draw.normal()),
        optimizer={
            "lr": float(draw.uniform(0.001, 0.1)),
            "weight_decay": float(draw.choice([0.0, 0.01])),
        },
        images=images if bytes_ else draw.normal(size=images.shape).astype(np.float32),
        labels=draw.integers(0, CLASSES, count),
        batch=int(draw.integers(11, 20)),
        seed=int(draw.integers(100)),
        order=int(draw.integers(100)),
        shuffle=bool(draw.random() < 0.5),
        schedule=draw.uniform(0.1, 1, 8).tolist(),
        made=bool(draw.random() < 0.4),
        flip=int(draw.integers(100)),
    )


def one_other(case: Case, what: str, draw: np.random.Generator) -> Case:
    """The same with one difference."""
    new = dataclasses.replace(
        case,
        images=case.images.copy(),
        labels=case.labels.copy(),
        hidden=[*case.hidden],
        activations=[*case.activations],
        optimizer={**case.optimizer},
        schedule=[*case.schedule],
    )
    at, layer = int(draw.integers(case.batch)), int(draw.integers(len(case.hidden)))
    if what == "pixel":
        flat = new.images[at].reshape(-1)
        flat[draw.integers(flat.size)] += 1
    elif what == "bit":
        flat = new.images[at].reshape(-1)
        flat.view(np.uint8)[draw.integers(flat.size) * flat.itemsize] ^= 1
    elif what == "label":
        new.labels[at] = (new.labels[at] + 1) % CLASSES
    elif what == "length":
        new.images, new.labels = new.images[:-1], new.labels[:-1]
    elif what == "dtype":
        new.images = new.images.astype(np.float32 if new.images.dtype == np.uint8 else np.uint8)
    elif what == "order":
        new.shuffle, new.order = True, case.order + 1
    elif what == "flip":
        new.made, new.flip = True, case.flip + 1
    elif what == "activation":
        new.activations[layer] = "tanh" if case.activations[layer] != "tanh" else "relu"
    elif what == "size":
        new.hidden[layer] += 1
    elif what == "p":
        new.p = 0.125
    elif what == "slope":
        new.slope = float(np.nextafter(np.float32(case.slope), np.float32(9)))
    elif what == "extra":
        new.extra = True
    elif what == "rate":
        new.optimizer["lr"] *= 1.0000001
    elif what == "decay":
        new.optimizer["weight_decay"] += 1e-6
    elif what == "schedule":
        new.schedule[draw.integers(4)] *= 0.99
    elif what == "seed":
        new.seed += 1
    elif what == "batch":
        new.batch += 1
    return new


DIFFERENCES = "pixel bit label length dtype order flip activation size p slope extra rate decay schedule seed batch".split()
LAYOUTS: list[dict[str, Any]] = [
    {},
    {},
    {"zero": 1},
    {"mesh": (1, 2, 1)},
    {"mesh": (1, 1, 2)},
    {"execution": "eager"},
]


def trained(case: Case, comm, **layout: Any) -> str:
    manual_seed(case.start)
    if "mesh" in layout:
        layout = {"mesh": Mesh(*layout["mesh"])}
    t = DistributedTrainer(
        Net(case),
        optim.Adam(**case.optimizer),
        schedule=lambda step: case.schedule[step % len(case.schedule)],
        seed=case.seed,
        shard_size=5,
        threads=1,
        comm=comm,
        **layout,
    )
    samples = Made(case) if case.made else data.arrays(case.images, case.labels, classes=CLASSES)
    loader = data.DataLoader(samples, case.batch, case.shuffle, seed=case.order, drop_last=True)
    t.fit(loader, epochs=1, steps=4)
    return t.weights_sha256()


def ended(cases: list[Case], **layout: Any) -> list[Any]:
    """What each rank's training ended with: a hash of its weights, or an error."""

    def rank(comm):
        try:
            return trained(cases[comm.rank], comm, **layout)
        except OdysseyError as error:
            return error

    return mock.run(len(cases), rank)


@pytest.mark.parametrize("seed", range(3))
def test_one_difference_is_found_and_equal_ranks_are_not_refused(seed):
    draw = np.random.default_rng(seed)
    for i in range(len(DIFFERENCES)):
        what = DIFFERENCES[i]
        case = drawn(draw)
        layout = LAYOUTS[draw.integers(len(LAYOUTS))]
        ranks = 2 if layout.get("mesh") else int(draw.integers(2, 4))
        if what == "flip":
            case.made = True
        if what in ("pixel", "bit", "label"):
            # of samples that are made only those of a batch are compared: have it in the first
            case.shuffle = False
            case.made = case.made and what != "bit"  # which a sum with noise may round away
        if what == "dtype" and case.made:
            # would be the same samples
            case.images = case.images.astype(np.uint8).astype(np.float32)
            case.made = False
        same = ended(
            [dataclasses.replace(case, images=case.images.copy()) for _ in range(ranks)], **layout
        )
        assert len(set(same)) == 1 and isinstance(same[0], str), (what, layout, same)
        other = int(draw.integers(1, ranks))
        if draw.random() < 0.1:  # weights are those of rank 0
            started = [dataclasses.replace(case, start=r) for r in range(ranks)]
            assert ended(started, **layout) == same
        cases = [one_other(case, what, draw) if r == other else case for r in range(ranks)]
        found = ended(cases, **layout)
        assert all(isinstance(e, OdysseyError) for e in found), (what, layout, found)
        assert len({str(e) for e in found}) == 1, (what, found)
        assert f"rank {other}" in str(found[0]) and getattr(
            found[0], "raised_on_all_ranks", False
        ), (what, found)


# --- what is said --------------------------------------------------------------------------------


def case(**changes: Any) -> Case:
    return dataclasses.replace(
        drawn(np.random.default_rng(77)), made=False, shuffle=False, p=0.5, **changes
    )


@pytest.mark.parametrize(
    "layout", [{}, {"execution": "eager"}, {"mesh": (1, 2, 1)}, {"mesh": (1, 1, 2)}]
)
def test_an_op_that_differs_is_named_with_its_layer_and_line(layout):
    a = case()
    b = dataclasses.replace(a, activations=["sigmoid", *a.activations[1:]])
    error = ended([a, b], **layout)[0]
    assert isinstance(error, ConfigError)
    line = "in layer Net at python/test_agreement.py:"
    assert str(error).startswith(
        "[train] the model of rank 1 differs from that of rank 0 in op 3: sigmoid_forward (240) "
        f"{line}"
    ), error
    assert f"; on rank 0 {a.activations[0]}_forward (240) {line}" in str(error)
    error = ended([a, dataclasses.replace(a, p=0.25)], **layout)[0]
    assert "in op 5: dropout_forward (1, 15, 0.25, 0, 1) in layer drop (Dropout) at " in str(error)
    assert not any("forward" in vars(m) for m in Net(a).modules())


def test_another_size_is_named():
    a = case()
    error = ended([a, a, dataclasses.replace(a, hidden=[16, *a.hidden[1:]])])[0]
    assert (
        "the model of rank 2 differs from that of rank 0 in parameter 1: layers.0.weight (16, 7)"
        in str(error)
    )


def test_a_model_that_runs_on_some_ranks_only():
    class Some(nn.Linear):
        def forward(self, x):
            if self.bad:
                raise ShapeError("[some] not here")
            return super().forward(x)

    def rank(comm, bad):
        model = Some(4, CLASSES)
        model.bad = bad[comm.rank]
        t = DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=4, comm=comm)
        try:
            t.fit(data.DataLoader(Late(False, 0), batch_size=16))
        except OdysseyError as error:
            return str(error)

    expected = "[train] the model runs on rank 0, but not on rank 1: [some] not here"
    assert mock.run(3, rank, (False, True, False)) == [expected] * 3
    assert mock.run(2, rank, (True, True)) == ["[some] not here"] * 2


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_one_changed_sample_is_named_wherever_it_is(dtype):
    draw = np.random.default_rng(1)
    images = draw.integers(0, 200, (700, 5)).astype(dtype)
    labels = draw.integers(0, 3, 700)
    for at in (0, 1, 255, 256, 698, 699):
        for what in ("image", "label"):
            x, y = images.copy(), labels.copy()
            if what == "image":
                x[at, 4] += 1
            else:
                y[at] = (y[at] + 1) % 3
            a, b = data.arrays(images, labels, classes=3), data.arrays(x, y, classes=3)
            with pytest.raises(
                DataError, match=f"sample {at} of the training set of rank 1 differs"
            ):
                mock.run(2, lambda comm, a=a, b=b: data_set(comm, (a, b)[comm.rank]))


def test_equal_samples_are_equal_however_they_lie():
    draw = np.random.default_rng(2)
    images = draw.normal(size=(33, 5)).astype(np.float32)
    images[3, 1], images[4, 2] = -0.0, 0.0
    labels = draw.integers(0, 3, 33)
    raw = draw.integers(0, 256, (33, 5)).astype(np.uint8)
    odd = np.empty(raw.size + 1, np.uint8)[1:].reshape(raw.shape)
    odd[...] = raw
    same = [
        (images, images.astype(np.float64)),
        (images, np.asfortranarray(images)),
        (images, images[::-1][::-1]),
        (raw, odd),
    ]
    for pair in same:
        kinds = zip(pair, ("int64", "uint8"), strict=True)
        sets = [data.arrays(x, labels.astype(k), classes=3, name=k) for x, k in kinds]
        mock.run(2, lambda comm, sets=sets: data_set(comm, sets[comm.rank]))
    unsigned = images.copy()
    unsigned[3, 1] = 0.0
    sets = [data.arrays(x, labels, classes=3) for x in (images, unsigned)]
    with pytest.raises(DataError, match="sample 3 "):  # another zero is another number
        mock.run(2, lambda comm: data_set(comm, sets[comm.rank]))


# --- what is found later, and what is allowed ----------------------------------------------------


class Late:
    """One sample that is another on rank 1."""

    classes = CLASSES

    def __init__(self, other: bool, at: int) -> None:
        self.x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        if other:
            self.x[at] += 1

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int):
        return self.x[i], i % CLASSES


def fitted(comm, loader, epochs: int = 1, fit: dict[str, Any] | None = None, **settings: Any):
    manual_seed(0)
    t = DistributedTrainer(
        nn.Linear(4, CLASSES), optim.SGD(lr=0.1), shard_size=4, threads=1, comm=comm, **settings
    )
    try:
        t.fit(loader, epochs=epochs, **(fit or {}))
    except OdysseyError as error:
        return t.steps, error
    return t.steps, t.weights_sha256()


def test_samples_that_are_made_are_looked_at_every_so_many_steps():
    def rank(comm):
        return fitted(comm, data.DataLoader(Late(comm.rank == 1, 37), batch_size=16), check_every=2)

    (steps, error), (_, other) = mock.run(2, rank)
    assert steps == 2 and str(error) == str(other)
    assert "[data] at step 3 sample 37 of Late is not on rank 1 what it is on rank 0" in str(error)
    assert (
        "draw random numbers from (seed, epoch, sample index), as transform= of DataLoader does"
        in str(error)
    )


def test_batches_of_a_list_are_compared_as_well():
    def rank(comm):
        late = Late(comm.rank == 1, 3)
        return fitted(
            comm, [(late.x[at : at + 16], np.arange(16) % CLASSES) for at in range(0, 64, 16)]
        )

    assert "sample 3 of the batch" in str(mock.run(2, rank)[0][1])


def test_a_sampler_that_draws_another_order():
    class Drawn:
        def __init__(self, seed: int) -> None:
            self.draw = np.random.default_rng(seed)

        def __len__(self) -> int:
            return 64

        def __iter__(self):
            return iter(self.draw.permutation(64))

    late = Late(False, 0)
    whole = data.arrays(late.x, np.arange(64) % CLASSES, classes=CLASSES)

    def rank(comm, seeds, samples):
        return fitted(
            comm, data.DataLoader(samples, batch_size=16, sampler=Drawn(seeds[comm.rank]))
        )

    assert len(set(mock.run(2, rank, (5, 5), whole))) == 1
    for samples in (whole, late):
        assert "[data] by step 1 rank 1 is given sample" in str(
            mock.run(2, rank, (5, 6), samples)[0][1]
        )


def test_an_order_that_parts_later_is_found_at_the_end_of_the_epoch():
    whole = data.arrays(Late(False, 0).x, np.arange(64) % CLASSES, classes=CLASSES)

    def rank(comm):
        order = list(range(64))
        if comm.rank == 2:
            order[50], order[60] = order[60], order[50]
        return fitted(comm, data.DataLoader(whole, batch_size=16, sampler=order))

    found = mock.run(3, rank)
    assert "the last batches of rank 2 have other samples than those of rank 0" in str(found[0][1])


def test_rates_that_part_later_are_found_before():
    def rank(comm):
        schedule = lambda step: 0.5 if step == 37 and comm.rank == 1 else 1.0  # noqa: E731
        return fitted(comm, data.DataLoader(Late(False, 0), batch_size=16), schedule=schedule)

    assert "the learning rate of step 38 is 0.05 on rank 1, and 0.1 on rank 0" in str(
        mock.run(2, rank)[0][1]
    )


def test_samples_that_differ_may_be_allowed(capfd):
    def rank(comm):
        loader = data.DataLoader(Late(comm.rank == 1, 3), batch_size=16)
        return fitted(comm, loader, 2, {"allow_nondeterministic_data": True}, check_every=3)

    assert mock.run(2, rank)[0][0] == 8
    assert (
        capfd.readouterr().err.count(
            "sample 3 of Late is not on rank 1 what it is on rank 0; training goes on"
        )
        == 1
    )


@pytest.mark.parametrize(
    "settings", [{"reduction": "local_sgd"}, {"reduction": "async_parameter_server"}]
)
def test_ranks_that_do_not_step_together_compare_their_first_batch(settings):
    def rank(comm, other):
        loader = data.DataLoader(Late(comm.rank == other, 3), batch_size=16)
        return fitted(comm, loader, 2, **settings)

    assert all(steps == 8 for steps, _ in mock.run(3, rank, -1))
    for other in (1, 2):
        assert f"sample 3 of Late is not on rank {other}" in str(mock.run(3, rank, other)[0][1])


def test_the_validation_set_is_compared():
    a, b = Late(False, 0), Late(True, 9)
    train = data.arrays(a.x, np.arange(64) % CLASSES, classes=CLASSES)

    def rank(comm):
        val = data.arrays((a, b)[comm.rank].x, np.arange(64) % CLASSES, classes=CLASSES)
        return fitted(comm, data.DataLoader(train, batch_size=16), fit={"val_loader": val})

    assert "sample 9 of the validation set of rank 1 differs" in str(mock.run(2, rank)[0][1])


@pytest.mark.parametrize("made", [True, False])
def test_validation_samples_that_are_made_are_looked_at(made):
    x, y = np.zeros((40, 4), np.float32), np.zeros(40, int)

    def rank(comm):
        t = DistributedTrainer(nn.Linear(4, 3), optim.SGD(), comm=comm, threads=1, check_every=2)
        # the third batch is looked at again
        mine = x + (np.arange(40) == 25)[:, None] * np.float32(comm.rank)
        pairs = [(mine[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
        try:
            t.evaluate(
                data.DataLoader(list(zip(mine, y.tolist(), strict=True)), batch_size=10)
                if made
                else pairs
            )
        except DataError as error:
            return str(error)

    said = mock.run(2, rank)
    assert said[0] == said[1]
    number = "sample 25 of" if made else "sample 5 of the batch of"
    assert (
        f"[data] at validation batch 3 {number}" in said[0]
        and "is not on rank 1 what it is on rank 0" in said[0]
    )


def restarts():
    """Returns a schedule of restarts that remembers where the last one was."""
    start, period = 0, 2

    def factor(step: int) -> float:
        nonlocal start, period
        if step - start >= period:
            start, period = step, 2 * period
        return 1.0 / (1 + step - start)

    return factor


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_schedule_with_a_memory_is_refused_on_any_number_of_ranks(ranks):
    def train(comm) -> None:
        model = nn.Sequential(nn.Linear(4, 2))
        DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=2, schedule=restarts(), comm=comm)

    with pytest.raises(ConfigError, match="returns other factors when it is called again"):
        mock.run(ranks, train)
