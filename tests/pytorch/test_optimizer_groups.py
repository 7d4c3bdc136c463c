"""Groups and state of a torch optimizer that callbacks and optimizers change: a resumed training
run has the weights of one that was never stopped, on any number of ranks.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from odyssey import callbacks  # noqa: E402
from odyssey.comm import mock  # noqa: E402
from odyssey.errors import CheckpointError, ConfigError  # noqa: E402
from odyssey.torch import DistributedTrainer  # noqa: E402

MAKING = threading.Lock()  # ranks are threads here, and torch has one generator
WIDTH = 5
CLASSES = 3
STEPS = 6
G = torch.Generator().manual_seed(5)
BATCHES = [
    (torch.randn(12, WIDTH, generator=G), torch.randint(0, CLASSES, (12,), generator=G))
    for _ in range(STEPS)
]


class Keeper(torch.optim.Optimizer):
    """An optimizer that keeps state of every kind, also under keys that are no parameters.

    The update depends on the types of what is in groups and state.
    """

    def __init__(self, parameters: Any, lr: float, kind: str, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr, "extra": None, "kind": kind, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gain = weigh(group["extra"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = getattr(self, f"by_{group['kind']}")(self.state[p], p.grad)
                p.add_(update, alpha=-group["lr"] * gain)

    def by_list(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        history = state.setdefault("history", [])
        history.append(gradient.clone())
        del history[:-3]
        return sum(history) / len(history)

    def by_tuple(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        count, mean = state.get("mean", (0, torch.zeros_like(gradient)))
        state["mean"] = (count + 1, mean * 0.5 + gradient)
        return state["mean"][1] / state["mean"][0]

    def by_dict(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        inner = state.setdefault(
            "inner", {"moments": {1: torch.zeros_like(gradient)}, "none": None}
        )
        inner["moments"][1].mul_(0.8).add_(gradient)
        inner["none"] = None if inner["none"] == "some" else "some"
        return inner["moments"][1] * (1.0 if inner["none"] is None else 1.5)

    def by_array(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        total = state.get("total")
        if total is None:
            total = state["total"] = np.zeros(gradient.shape, np.float64)
            state["first"] = None
        assert isinstance(total, np.ndarray) and "first" in state
        total *= 0.7
        total += gradient.numpy()
        return torch.from_numpy(total.astype(np.float32))

    def by_half(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        half = state.setdefault("a/b", torch.zeros_like(gradient, dtype=torch.bfloat16))
        half.mul_(0.9).add_(gradient)
        state[0] = state.get(0, 0) + 1
        return half.float() / state[0]

    def by_global(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        shared = self.state["all"]
        norms = shared.setdefault("norms", collections.deque(maxlen=3))
        norms.append(float(gradient.norm()))
        step = shared.setdefault("step", torch.zeros((), dtype=torch.int64))
        step += 1
        state["m"] = state.get("m", 0.0) * 0.5 + gradient
        return state["m"] / (1 + sum(norms)) * (1 + 1 / int(step))

    def by_reference(self, state: dict[Any, Any], gradient: torch.Tensor) -> torch.Tensor:
        slots = self.state["slots"].setdefault("of", {})
        first = self.param_groups[0]["params"][0] if self.param_groups[0]["params"] else None
        slot = slots.setdefault((1, tuple(gradient.shape)), torch.zeros_like(gradient))
        slot.mul_(0.9).add_(gradient)
        before = self.state["slots"].get("first", [first])[0]
        self.state["slots"]["first"] = [first]
        return slot * (1.0 if before is first else 2.0)


def weigh(extra: Any) -> float:
    """Returns a factor that depends on the type and the values of a hyperparameter."""
    kind = len(type(extra).__name__) / 5
    if isinstance(extra, (np.ndarray, torch.Tensor)):
        return kind + float(extra.sum()) + len(str(extra.dtype)) / 10
    if isinstance(extra, dict):
        return kind + sum(weigh(v) * len(repr(k)) for k, v in extra.items())
    if isinstance(extra, (list, tuple)):
        return kind + sum(weigh(v) * (i + 1) for i, v in enumerate(extra))
    return kind + (float(extra) if isinstance(extra, (int, float, np.number)) else 0.0)


EXTRAS: list[Callable[[random.Random], Any]] = [
    lambda r: [r.random(), None],
    lambda r: (r.random(), [1, "word"]),
    lambda r: np.array([r.random(), 0.5], np.float32),
    lambda r: np.array(r.random(), np.float32),
    lambda r: np.float32(r.random()),
    lambda r: torch.tensor([r.random(), 0.25], dtype=torch.float64),
    lambda r: torch.tensor(r.random(), dtype=torch.bfloat16),
    lambda r: {"a": (r.random(),), 3: torch.ones(2), (1, "x"): None},
    lambda r: None,
    lambda r: {},
    lambda r: r.randint(0, 3),
]
KINDS = [k.removeprefix("by_") for k in vars(Keeper) if k.startswith("by_")]


def take_out(r: random.Random, optimizer: Any) -> None:
    group = r.choice(optimizer.param_groups)
    if len(group["params"]) > 1:
        group["params"].pop(r.randrange(len(group["params"])))


def move(r: random.Random, optimizer: Any) -> None:
    first, second = (r.choice(optimizer.param_groups) for _ in range(2))
    if first["params"]:
        second["params"].append(first["params"].pop(r.randrange(len(first["params"]))))


def move_to_a_new_group(r: random.Random, optimizer: Any) -> None:
    group = r.choice(optimizer.param_groups)
    if group["params"]:
        p = group["params"].pop(r.randrange(len(group["params"])))
        optimizer.add_param_group({"params": [p], "lr": r.choice([0.01, 0.05])})


def add_copy_of_a_group(r: random.Random, optimizer: Any) -> None:
    group = r.choice(optimizer.param_groups)
    half = len(group["params"]) // 2
    optimizer.param_groups.append({**group, "params": group["params"][half:], "lr": 0.02})
    group["params"] = group["params"][:half]


def reorder(r: random.Random, optimizer: Any) -> None:
    r.shuffle(optimizer.param_groups)


def drop_a_group(r: random.Random, optimizer: Any) -> None:
    if len(optimizer.param_groups) > 1:
        optimizer.param_groups.pop()


def shuffle(r: random.Random, optimizer: Any) -> None:
    r.shuffle(r.choice(optimizer.param_groups)["params"])


def use_collection(r: random.Random, optimizer: Any) -> None:
    group = r.choice(optimizer.param_groups)
    parameters = list(group["params"])
    group["params"] = r.choice([tuple, iter])(parameters)


def set_extra(r: random.Random, optimizer: Any) -> None:
    r.choice(optimizer.param_groups)["extra"] = r.choice(EXTRAS)(r)


def set_rate(r: random.Random, optimizer: Any) -> None:
    of = r.choice([np.float32, np.array, torch.tensor, float])
    r.choice(optimizer.param_groups)["lr"] = of(r.choice([0.01, 0.03, 0.07]))


def forget_key(r: random.Random, optimizer: Any) -> None:
    group = r.choice(optimizer.param_groups)
    if "note" in group:
        del group["note"]
    else:
        group["note"] = float("inf")


EDITS = [
    take_out,
    move,
    move_to_a_new_group,
    add_copy_of_a_group,
    reorder,
    drop_a_group,
    shuffle,
    use_collection,
    set_extra,
    set_extra,
    set_rate,
    forget_key,
]


class Edits(callbacks.Callback):
    """Edits the optimizer's groups after steps, the same on all ranks and after a resume."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step_end(self, context: callbacks.Context) -> None:
        r = random.Random(1000 * self.number + context.steps)
        for _ in range(r.choice([0, 1, 1, 2]) if context.steps < STEPS else 0):
            edit = r.choice(EDITS)
            edit(r, context.trainer.optimizer)
            if edit is use_collection:  # the next step makes a list of it
                break


class Net(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        sizes = [WIDTH, *(r.choice([4, 5]) for _ in range(r.randint(1, 3)))]
        pairs = zip(sizes, sizes[1:], strict=False)
        self.body = nn.ModuleList(nn.Linear(a, b, bias=r.random() < 0.7) for a, b in pairs)
        self.norm = nn.BatchNorm1d(sizes[-1]) if r.random() < 0.5 else nn.Identity()
        self.out = nn.Linear(sizes[-1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.out(self.norm(x))


def build(number: int, keeper: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    r = random.Random(number)
    with MAKING:
        torch.manual_seed(number)
        net = Net(r)
    parameters = list(net.parameters())
    cut = r.randint(1, len(parameters) - 1)
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 0.04}]
    if keeper:
        more = {"extra": r.choice(EXTRAS)(r)}
        return net, Keeper(groups, lr=0.05, kind=r.choice(KINDS), **more)
    kind, given = r.choice(
        [
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.AdamW, {"amsgrad": r.random() < 0.5}),
            (torch.optim.Adagrad, {}),
            (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
            (torch.optim.NAdam, {}),
            (torch.optim.Adafactor, {}),
        ]
    )
    return net, kind(groups, lr=0.05, **given)


def trained(
    comm: Any,
    number: int,
    keeper: bool,
    zero: int,
    steps: int | None = None,
    folder: Path | None = None,
) -> tuple[str, list[Any]]:
    net, optimizer = build(number, keeper)
    trainer = DistributedTrainer(
        net, optimizer, comm=comm, zero=zero, shard_size=random.Random(number).choice([3, 5])
    )
    saving = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 1}
    trainer.fit(BATCHES, epochs=1, steps=steps, callbacks=[Edits(number)], verbose=False, **saving)
    names = {id(p): name for name, p in net.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return trainer.weights_sha256(), groups


LONG = [pytest.param(n, marks=pytest.mark.long) for n in range(60, 600)]


@pytest.mark.parametrize("number", [*range(60), *LONG])
def test_edited_groups_and_state_survive_a_restart(number, tmp_path):
    r = random.Random(-1 - number)
    keeper = r.random() < 0.6
    zeros = [0] if keeper else [0, 1, 2, 3]
    (whole,) = mock.run(1, trained, number, keeper, 0)
    stop = r.randint(1, STEPS - 1)
    mock.run(r.randint(1, 3), trained, number, keeper, r.choice(zeros), stop, tmp_path)
    ranks = r.randint(1, 3)
    for found in mock.run(ranks, trained, number, keeper, r.choice(zeros), None, tmp_path):
        assert found == whole


# --- what is refused, by name ---


def small(
    comm: Any = None, optimizer: Any = None, zero: int = 0, **more: Any
) -> DistributedTrainer:
    """Returns a trainer of a small module; optimizer is a function of the module."""
    with MAKING:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    made = torch.optim.SGD(net.parameters(), 0.1) if optimizer is None else optimizer(net)
    return DistributedTrainer(net, made, comm=comm, zero=zero, shard_size=4, **more)


def with_note(note: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.SGD([{"params": net.parameters(), "note": note}], 0.1)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("note", "says"),
    [
        (print, ".note is a builtin_function_or_method"),
        ([1, {"a": (2, object())}], ".note[1].a[1] is a object"),
        (np.array([object()]), ".note is a numpy.ndarray"),
        (torch.empty(2, device="meta"), ".note is a torch.Tensor"),
        ({torch.ones(2): 1}, " has tensors as keys"),
        (nn.Parameter(torch.ones(2)), " has a parameter that is not the module's"),
        (CIRCLE, " contains itself"),
    ],
)
def test_a_hyperparameter_that_no_checkpoint_holds_is_refused(note, says):
    with pytest.raises(ConfigError) as refused:
        small(optimizer=with_note(note))
    assert f"can't hold what SGD has: group 0{says}" in str(refused.value)


def test_memory_of_a_parameter_is_refused():
    trainer = small()
    trainer.optimizer.state[trainer.module[0].weight]["slow"] = [trainer.module[0].weight.data]
    with pytest.raises(ConfigError, match="SGD has: slow/0.weight has the memory of a param"):
        trainer.named_state()


def test_state_that_no_checkpoint_holds_is_refused():
    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(net.parameters(), 0.1)
        made.state[net[0].bias]["draw"] = [threading.Lock()]
        return made

    with pytest.raises(ConfigError, match=r"SGD has: draw/0.bias\[0\] is a _thread.lock"):
        small(optimizer=optimizer)

    def with_foreign_state(net: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(net.parameters(), 0.1)
        made.state[torch.ones(3)]["m"] = 1
        return made

    with pytest.raises(ConfigError, match=r"state of a tensor \(3,\) that is not a parameter"):
        small(optimizer=with_foreign_state)


class Does(callbacks.Callback):
    def __init__(self, step: int, change: Callable[[Any], None]) -> None:
        self.step = step
        self.change = change

    def on_step_end(self, context: callbacks.Context) -> None:
        if context.steps == self.step:
            self.change(context.trainer)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_refuses_state_of_no_parameter(zero, ranks):
    def global_state(optimizer: Any) -> None:
        optimizer.state["all"]["count"] = 1

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(net.parameters(), 0.1)
        global_state(made)
        return made

    says = f"zero={zero} with SGD, which has state under 'all'"
    with pytest.raises(ConfigError, match=says):
        mock.run(ranks, small, optimizer, zero)

    def later(comm: Any) -> None:
        change = Does(2, lambda trainer: global_state(trainer.optimizer))
        small(comm, zero=zero).fit(BATCHES, epochs=1, callbacks=[change], verbose=False)

    with pytest.raises(ConfigError, match=says):
        mock.run(ranks, later)


def test_zero_refuses_a_checkpoint_with_state_of_no_parameter(tmp_path):
    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(net.parameters(), 0.1)
        made.state["all"]["count"] = 1
        return made

    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "verbose": False}
    small(optimizer=optimizer).fit(BATCHES, epochs=1, steps=2, **saving)
    trainer = small(zero=1)
    before = trainer.weights_sha256()
    with pytest.raises(ConfigError, match="state of the optimizer under 'all'.*use zero=0"):
        trainer.fit(BATCHES, epochs=1, **saving)
    assert trainer.weights_sha256() == before


def test_ranks_that_move_parameters_differently_are_told():
    def run(comm: Any) -> None:
        def move_on_one(trainer: Any) -> None:
            if comm.rank:
                trainer.optimizer.param_groups[0]["params"].pop()

        trainer = small(comm, check_every=1)
        trainer.fit(BATCHES, epochs=1, callbacks=[Does(2, move_on_one)], verbose=False)

    with pytest.raises(ConfigError, match="the list of parameters in group 0 of the optimizer"):
        mock.run(2, run)


def test_a_parameter_of_another_module_is_refused():
    stranger = nn.Parameter(torch.ones(2))
    adds = Does(2, lambda trainer: trainer.optimizer.add_param_group({"params": [stranger]}))
    with pytest.raises(ConfigError, match="group 1 of SGD has a parameter that is not the mod"):
        trainer = small()
        trainer.fit(BATCHES, epochs=1, callbacks=[adds], verbose=False)
        trainer.training_state.state({})


# --- state when the trainer is created ---


def momentum_on(rank: int) -> Callable[[Any], Callable[[nn.Module], torch.optim.Optimizer]]:
    """Returns a function of a communicator that makes an optimizer, with state on one rank."""

    def of_rank(comm: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def optimizer(net: nn.Module) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(net.parameters(), 0.1)
            if comm.rank == rank:
                for i, p in enumerate(net.parameters()):
                    made.state[p] = {
                        "step": torch.tensor(3.0),
                        "exp_avg": torch.full_like(p, i + 1.0),
                        "exp_avg_sq": torch.full_like(p, i + 2.0),
                    }
            return made

        return optimizer

    return of_rank


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_state_of_rank_0_goes_to_all_ranks(rank, zero):
    def run(comm: Any, zero: int, of_rank: Any) -> str:
        trainer = small(comm, of_rank(comm), zero)
        trainer.fit(BATCHES, epochs=1, verbose=False)
        return trainer.weights_sha256()

    # State that only rank 1 has is dropped, as are the weights of rank 1.
    (one,) = mock.run(1, run, 0, momentum_on(rank))
    for ranks in (2, 3):
        assert mock.run(ranks, run, zero, momentum_on(rank)) == [one] * ranks


def test_state_of_every_type_goes_to_all_ranks():
    def run(comm: Any) -> list[Any]:
        def optimizer(net: nn.Module) -> torch.optim.Optimizer:
            made = torch.optim.SGD(net.parameters(), 0.1)
            if comm.rank == 0:
                shared = torch.arange(3.0)
                weight = net[0].weight
                made.state["all"] = {"a": [shared, (1, None)], "of": [weight]}
                made.state[weight] = {"list": [np.float32(0.5)], "half": shared.bfloat16()}
            return made

        trainer = small(comm, optimizer)
        state = trainer.optimizer.state
        weight = trainer.module[0].weight
        assert state["all"]["of"][0] is weight
        assert type(state[weight]["list"][0]) is np.float32
        assert state[weight]["half"].dtype is torch.bfloat16
        return [repr(state["all"]["a"]), repr(state[weight])]

    first, *others = mock.run(3, run)
    assert others == [first, first]


# --- other cases ---


def test_state_of_a_frozen_parameter_is_saved(tmp_path):
    """It counts when a callback unfreezes the parameter after the resume."""

    def run(comm: Any, zero: int, steps: int | None = None, folder: Path | None = None) -> str:
        def optimizer(net: nn.Module) -> torch.optim.Optimizer:
            net[0].weight.requires_grad_(False)
            made = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            if steps is not None or folder is None:  # not after the resume
                for p in net.parameters():
                    made.state[p]["momentum_buffer"] = torch.ones_like(p)
            return made

        unfreezes = Does(4, lambda trainer: trainer.module[0].weight.requires_grad_(True))
        saving = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": 1}
        trainer = small(comm, optimizer, zero)
        trainer.fit(BATCHES, epochs=1, steps=steps, callbacks=[unfreezes], verbose=False, **saving)
        return trainer.weights_sha256()

    (whole,) = mock.run(1, run, 0)
    for i, (first, second) in enumerate([((2, 1), (3, 3)), ((3, 2), (1, 0)), ((1, 0), (2, 2))]):
        mock.run(*(first[0], run, first[1]), 2, tmp_path / str(i))
        for found in mock.run(second[0], run, second[1], None, tmp_path / str(i)):
            assert found == whole


def test_a_checkpoint_without_names_and_types_is_loaded():
    """As version 0.2.0 wrote it: tuples are lists, and groups have no names."""

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        first, *others = net.parameters()
        groups = [{"params": [first], "lr": 0.02}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))

    trainer = small(optimizer=optimizer)
    trainer.fit(BATCHES, epochs=1, steps=3, verbose=False)
    snapshot = trainer.training_state.state({})
    old = snapshot.values["optimizer"]
    for name in ("typed", "names", "others"):
        del old[name]
    for group in old["groups"]:
        group["betas"] = [0.8, 0.9]
        group["weight_decay"] = 0.125
    resumed = small(optimizer=optimizer)
    resumed.training_state.load(snapshot, "step_3")
    assert resumed.weights_sha256() == trainer.weights_sha256()
    for new, group in zip(
        resumed.optimizer.param_groups, trainer.optimizer.param_groups, strict=True
    ):
        assert {**new, "params": 0} == {**group, "params": 0, "weight_decay": 0.125}
        assert new["params"] != [] and len(new["params"]) == len(group["params"])
    old["groups"].pop()
    with pytest.raises(CheckpointError, match="it has 1 groups; 2 are needed"):
        small(optimizer=optimizer).training_state.load(snapshot, "step_3")


def test_the_plain_state_of_a_scheduler_in_an_older_checkpoint_is_loaded():
    def scheduled(kind: Any = torch.optim.lr_scheduler.LinearLR) -> DistributedTrainer:
        trainer = small()
        optimizer = torch.optim.SGD(trainer.module.parameters(), 0.1)
        return DistributedTrainer(trainer.module, optimizer, scheduler=kind(optimizer))

    trainer = scheduled()
    plain = dict(trainer.scheduler.state_dict())
    trainer.fit(BATCHES, epochs=1, steps=3, verbose=False)
    snapshot = trainer.training_state.state({})
    del snapshot.values["captured"]
    snapshot.values["configuration"]["scheduler"][2] = plain
    snapshot.values["scheduler"] = dict(trainer.scheduler.state_dict())
    resumed = scheduled()
    resumed.training_state.load(snapshot, "step_3")
    assert resumed.scheduler.state_dict() == trainer.scheduler.state_dict()
    other = scheduled(torch.optim.lr_scheduler.ConstantLR)
    with pytest.raises(ConfigError, match="was made with scheduler"):
        other.training_state.load(snapshot, "step_3")


def test_tools_find_tensors_of_state_by_name_and_dtype():
    trainer = small(optimizer=lambda net: torch.optim.AdamW(net.parameters()))
    trainer.fit(BATCHES, epochs=1, steps=1, verbose=False)
    weight = trainer.module[0].weight
    state = trainer.optimizer.state[weight]
    state["half"] = torch.ones(2, dtype=torch.float16)
    state["by_column"] = torch.arange(6, dtype=torch.int16).reshape(2, 3).T
    tensors = trainer.training_state.state({}).arrays["optimizer"]
    assert (tensors["exp_avg/0.weight"] == state["exp_avg"].numpy()).all()
    assert tensors["half/0.weight"].dtype == np.float16
    assert tensors["by_column/0.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("first", "second"), [((2, 1), (3, 3)), ((3, 2), (1, 0)), ((1, 0), (2, 2))]
)
def test_ranks_save_all_values_of_their_parameters(first, second, tmp_path):
    def run(comm: Any, zero: int, steps: int | None, change: Callable[[Any], None]) -> None:
        trainer = small(
            comm, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), zero
        )
        saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
        changes = [Does(2, change), Does(3, change)]
        trainer.fit(BATCHES, epochs=1, steps=steps, callbacks=changes, verbose=False, **saving)

    def note(trainer: Any) -> None:
        for name, p in trainer.module.named_parameters():
            if p in trainer.optimizer.state:
                value = torch.full((2,), float(name[0]), dtype=torch.bfloat16)
                trainer.optimizer.state[p]["note"] = [name, value]

    notes = {}

    def collect(trainer: Any) -> None:
        for name, p in trainer.module.named_parameters():
            if p in trainer.optimizer.state:
                notes[name] = trainer.optimizer.state[p]["note"]

    mock.run(first[0], run, first[1], 2, note)
    mock.run(second[0], run, second[1], 3, collect)
    assert set(notes) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, (saved_name, value) in notes.items():
        assert saved_name == name and value.dtype is torch.bfloat16
        assert value.tolist() == [float(name[0])] * 2


def test_an_unknown_name_is_refused_before_anything_is_changed():
    trainer = small()
    trainer.fit(BATCHES, epochs=1, steps=2, verbose=False)
    snapshot = trainer.training_state.state({})
    snapshot.values["optimizer"]["names"][0][1] = "0.weights"
    resumed = small()
    before = resumed.weights_sha256()
    with pytest.raises(CheckpointError, match="group 0 has 0.weights, which is not in the module"):
        resumed.training_state.load(snapshot, "step_2")
    assert resumed.weights_sha256() == before


def test_a_tensor_of_a_group_stays_the_tensor_that_the_optimizer_has():
    class Counts(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, 0.1)
            self.count = self.param_groups[0]["count"] = torch.zeros(2)

    trainer = small(optimizer=lambda net: Counts(net.parameters()))
    trainer.optimizer.count += 3
    snapshot = trainer.training_state.state({})
    resumed = small(optimizer=lambda net: Counts(net.parameters()))
    resumed.training_state.load(snapshot, "step_0")
    assert resumed.optimizer.param_groups[0]["count"] is resumed.optimizer.count
    assert resumed.optimizer.count.tolist() == [3.0, 3.0]
