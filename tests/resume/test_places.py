"""State in places that are easy to overlook: a stopped run continues with the same weights, or the
place is named before a checkpoint is written.
"""

from __future__ import annotations

import functools
import importlib
import random
import re

import pytest
from resume import places

from odyssey import DistributedTrainer, nn, optim
from odyssey.errors import ConfigError

KEPT = set(places.KINDS)


def check(seed, kinds, folder):
    """Checks a program with some kinds of state. Returns False if a checkpoint was refused."""
    whole = places.train(seed, kinds)
    rng = random.Random(seed)
    for stop in sorted(rng.sample(range(1, places.STEPS), 2)):
        path = folder / f"stop {stop}"
        try:
            places.train(seed, kinds, path, stop)
        except ConfigError as problem:
            assert str(problem).startswith("[capture] ")
            return False
        assert places.train(seed, kinds, path) == whole, (seed, kinds, stop)
    return True


@pytest.mark.parametrize("kind", places.KINDS, ids=lambda kind: kind.__name__)
def test_a_stopped_run_continues_with_the_same_state(kind, tmp_path):
    kept = [check(seed, [kind], tmp_path / str(seed)) for seed in range(4)]
    assert all(kept) or kind not in KEPT


@pytest.mark.parametrize("seed", range(10, 16))
def test_random_programs_continue_with_the_same_state(seed, tmp_path):
    kinds = random.Random(seed).sample(places.KINDS, 4)
    assert check(seed, kinds, tmp_path)


def grow(loader, held):
    loader.batch_size = 20


def shuffle(loader, held):
    loader.shuffle = True


def reseed(loader, held):
    loader.seed = 5


@pytest.mark.parametrize("change", [grow, shuffle, reseed])
@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_epoch_start"])
def test_another_setting_of_the_loader_is_named(change, event, tmp_path):
    class Change(places.Places):
        pass

    def act(self, context):
        if context.steps >= 2:
            change(context.loader, self)

    setattr(Change, event, act)
    with pytest.raises(ConfigError, match=r"loader\.\w+ was .* when fit\(\) began and is"):
        places.train(0, [], tmp_path, make=Change)


def test_an_object_of_a_step_in_a_new_tuple_is_named(tmp_path):
    class Late(places.Places):
        def on_step_end(self, context):
            self.pair = (places.Item(context.steps), 1)

    with pytest.raises(ConfigError, match=r"callbacks\.Late\.pair"):
        places.train(0, [], tmp_path, make=Late)


def replace_in_a_tuple(owner):
    owner.rules = (owner.rates[1].rate, 1)


def replace_in_a_partial(owner):
    owner.part = functools.partial(owner.rates[1].rate)


def replace_function_in_a_tuple(owner):
    owner.chosen = (vars(places)["decay"], 2)


def use_a_new_object(owner):
    owner.late = places.Rate.__new__(places.Faster).rate


@pytest.mark.parametrize(
    "change, message",
    [
        (replace_in_a_tuple, r"rules\[0\] holds .* where .* was"),
        (replace_in_a_partial, r"part\.func holds .* where .* was"),
        (replace_function_in_a_tuple, r"chosen\[0\] holds .*decay where .*warm was"),
        (use_a_new_object, r"late\.__self__ is a .*Faster that was created in a step"),
    ],
)
def test_methods_that_a_resumed_run_can_not_put_back_are_named(change, message, tmp_path):
    class Late(places.Places):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.rates = [places.Rate(1), places.Rate(2)]
            self.rules = (self.rates[0].rate, 1)
            self.part = functools.partial(self.rates[0].rate)
            self.chosen = (vars(places)["warm"], 2)  # the walk does not meet it elsewhere
            self.late = places.Rate.__new__(places.Rate).rate

        def on_step_end(self, context):
            change(self)

    with pytest.raises(ConfigError, match=rf"callbacks\.Late\.{message}"):
        places.train(0, [], tmp_path, make=Late)


def test_attributes_of_a_thread_that_a_step_creates_are_named(tmp_path, capfd):
    class Late(places.Places):
        thread = None

        def on_step_end(self, context):
            self.thread = self.thread or places.Watcher()
            self.thread.count += 1

    places.train(0, [], tmp_path, make=Late)
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "can't keep" in line]
    assert len(lines) == 1
    assert "callbacks.Late.thread (resume.places.Watcher)" in lines[0]


# --- what holds state that checkpoints don't have ------------------------------------------------


def trainer_of_the_callback(owner):
    net = nn.Linear(4, 3)
    owner.critic = DistributedTrainer(net, optim.Adam(lr=0.05), threads=1)


def trainer_of_pytorch(owner):
    torch = pytest.importorskip("torch")
    module = importlib.import_module("odyssey.torch")
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
    owner.critics = [module.DistributedTrainer(net, optimizer, torch.nn.MSELoss(), metrics={})]


def iterator_of_pytorch(owner):
    torch = pytest.importorskip("torch")
    owner.batches = iter(torch.utils.data.DataLoader(list(range(8)), batch_size=2))


NAMED = {
    trainer_of_the_callback: (
        r"critic \(odyssey\.train\.trainer\.DistributedTrainer; save it with its own "
        r"save_checkpoint\(\)\)"
    ),
    trainer_of_pytorch: r"critics\[0\] \(odyssey\.torch\.trainer\.DistributedTrainer; save it",
    iterator_of_pytorch: r"batches \(torch\.utils\.data\.dataloader\._SingleProcess",
}


@pytest.mark.parametrize("add", NAMED, ids=lambda add: add.__name__)
def test_what_holds_other_state_is_named_at_the_start(add, tmp_path, capfd):
    class Holding(places.Places):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            add(self)

    with pytest.raises(ConfigError, match=r"callbacks\.Holding\." + NAMED[add]):
        places.train(0, [], tmp_path / "strict", make=Holding, state="strict")
    places.train(0, [], tmp_path / "report", make=Holding)
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "can't keep" in line]
    assert len(lines) == 1 and re.search(NAMED[add], lines[0])


def test_the_trainer_itself_and_a_loader_are_not_named(tmp_path):
    """A callback may hold its trainer, and a loader of PyTorch whose workers run."""
    torch = pytest.importorskip("torch")

    class Holding(places.Places):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.loader = torch.utils.data.DataLoader(
                list(range(8)), num_workers=1, persistent_workers=True
            )
            next(iter(self.loader))

        def on_fit_start(self, context):
            self.trainer = context.trainer
            self.known = {"trainers": [context.trainer, context]}

    places.train(0, [], tmp_path, make=Holding, state="strict")
