"""State in places that are easy to overlook: a stopped run continues with the same weights, or the
place is named before a checkpoint is written.
"""

from __future__ import annotations

import random

import pytest
from resume import places

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
