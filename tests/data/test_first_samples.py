"""Data sets that differ between ranks or between two readings are refused before the first step, and
those that draw from the generators of the process train alike on any ranks.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.comm import Communicator, mock
from odyssey.core import random_scopes
from odyssey.data.reader import draws_nothing
from odyssey.errors import DataError, Stopped

sys.path.insert(0, str(Path(__file__).parent))
import trial_data  # noqa: E402
from trial_data import REFUSED, REPEATABLE, Samples  # noqa: E402


def train(
    comm: Any,
    samples: Any,
    validation: Any = None,
    stop: int | None = None,
    fit: dict[str, Any] | None = None,
    **loading: Any,
) -> tuple[str, list[float]]:
    """Returns the weights after two epochs, and losses of the validation."""
    nn.manual_seed(0)
    random.seed(comm.rank)
    loader = data.DataLoader(samples, 8, shuffle=True, **loading)
    trainer = DistributedTrainer(
        nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=2, threads=1, comm=comm
    )

    def look(context: callbacks.Context) -> None:
        if context.steps == stop:
            context.stop = "the test"

    listeners = [callbacks.LambdaCallback(on_step_end=look)]
    history = trainer.fit(
        loader, validation, epochs=2, verbose=False, callbacks=listeners, **(fit or {})
    )
    return trainer.weights_sha256(), [record["test_loss"] for record in history.records]


def on_ranks(count: int, *arguments: Any, make: Any = Samples, kind: str = "", **options: Any):
    """Returns what `train` returns on each of some ranks, each with its own data set."""
    return mock.run(count, lambda comm: train(comm, make(kind, comm.rank), *arguments, **options))


@pytest.mark.parametrize("kind", REPEATABLE)
def test_repeatable_data_sets_train_alike(kind):
    (expected,) = on_ranks(1, kind=kind)
    draws = random.Random(kind)
    for ranks in (2, 3):
        prefetch = draws.choice([0, 1, 3])
        assert set(map(repr, on_ranks(ranks, kind=kind, prefetch=prefetch))) == {repr(expected)}


@pytest.mark.parametrize("kind", ["numpy", "python", "cache", "lazy file", "drawn by set_epoch"])
def test_workers_train_alike(kind):
    expected = train(Communicator(), Samples(kind))
    assert train(Communicator(), Samples(kind), num_workers=2) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_other_data_sets_are_refused(kind, ranks):
    trial_data.remembered.cache_clear()
    messages = mock.run(ranks, lambda comm: refusal(comm, Samples(kind)))
    assert len(set(messages)) == 1
    assert REFUSED[kind] in messages[0]
    assert "\n" not in messages[0]


def refusal(comm: Any, samples: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        train(comm, samples, **options)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_data_sets_that_differ_between_ranks(ranks):
    messages = mock.run(ranks, lambda comm: refusal(comm, Samples("rank", comm.rank)))
    assert set(messages) == {messages[0]}
    assert "sample 0 of the training data has other values on rank 1 than on rank 0" in messages[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_data_are_checked_before_the_first_step(ranks):
    steps: list[int] = []

    def work(comm: Any) -> str:
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=2, threads=1, comm=comm
        )
        loader = data.DataLoader(Samples("plain"), 8)
        with pytest.raises(DataError) as caught:
            trainer.fit(loader, Samples("held"), verbose=False)
        steps.append(trainer.steps)
        with pytest.raises(DataError, match="validation data"):
            trainer.evaluate(Samples("unseeded"))
        if comm.size > 1:
            with pytest.raises(DataError, match="of the validation data has other values on rank"):
                trainer.evaluate(Samples("rank", comm.rank))
        return str(caught.value)

    assert all("of the validation data" in message for message in mock.run(ranks, work))
    assert set(steps) == {0}


@pytest.mark.parametrize("kind", ["numpy", "python", "all three"])
def test_evaluations_and_predictions_of_data_sets_that_draw(kind):
    def work(comm: Any) -> list[Any]:
        nn.manual_seed(0)
        trainer = DistributedTrainer(
            nn.Linear(4, 3), optim.SGD(lr=0.1), shard_size=2, threads=1, comm=comm
        )
        loader = data.DataLoader(Samples(kind), 8, seed=3)
        losses = [trainer.evaluate(one).loss for one in (Samples(kind), loader, loader)]
        return [*losses, trainer.predict(Samples(kind)).tobytes()]

    (expected,) = mock.run(1, work)
    assert mock.run(3, work) == [expected] * 3


@pytest.mark.parametrize("kind", ["plain", "numpy"])
def test_transforms_may_draw_but_not_hold_a_generator(kind):
    (expected,) = on_ranks(1, kind=kind, transform=trial_data.noisy)
    for ranks in (2, 3):
        results = on_ranks(ranks, kind=kind, transform=trial_data.noisy)
        assert set(map(repr, results)) == {repr(expected)}
    message = refusal(Communicator(), Samples(kind), transform=trial_data.Held())
    assert "draws from transform[0].generator" in message


@pytest.mark.parametrize("kind", ["numpy", "python", "plain"])
def test_a_loop_of_your_own_reads_the_same_samples(kind):
    def numbers(seed: int, **options: Any) -> list[bytes]:
        random.seed(seed)
        np.random.seed(seed)
        loader = data.DataLoader(Samples(kind), 5, shuffle=True, seed=2, **options)
        state = random.getstate()
        batches = []
        for _ in range(2):
            for batch in loader:
                batches.append(batch.inputs.tobytes())
                np.random.rand()  # the program draws as well
        assert random.getstate() == state
        return batches

    expected = numbers(1, prefetch=0)
    assert expected == numbers(2) == numbers(3, num_workers=1)
    assert (len(set(expected)) == 10) or kind == "plain"


@pytest.mark.parametrize("kind", ["counter", "cache", "large cache", "lazy file"])
def test_the_check_leaves_no_trace(kind):
    samples = Samples(kind)
    trainer = DistributedTrainer(nn.Linear(4, 3), optim.SGD(lr=0.1), threads=1)
    seen: list[Any] = []

    class Looks(callbacks.Callback):
        _not_state = ("seen",)

        def on_step_end(self, context: callbacks.Context) -> None:
            seen.append(samples.reads)

    before = random_scopes.marks()
    loader = data.DataLoader(samples, 8, prefetch=0)
    trainer.fit(loader, steps=1, verbose=False, callbacks=[Looks()])
    assert seen == [8]
    assert random_scopes.marks() == before
    if kind == "lazy file":
        assert samples.file is not None
    else:
        filled = [one for one in samples.cache if one is not None]
        assert len(filled) == (0 if kind == "counter" else 8)


def test_a_resumed_run_of_a_data_set_that_draws(tmp_path):
    expected = train(Communicator(), Samples("numpy"))
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(Stopped):
        train(Communicator(), Samples("numpy"), stop=4, fit=saving)

    def resume(comm: Any) -> tuple[str, list[float]]:
        return train(comm, Samples("numpy"), fit=saving)

    assert mock.run(2, resume) == [expected] * 2


@pytest.mark.parametrize("case", range(24))
def test_random_programs(case, tmp_path):
    """Programs are identical on any ranks, and when they are stopped and resumed on others."""
    choice = random.Random(case).choice
    kind = choice(REPEATABLE)
    validation = choice([None, *REPEATABLE])
    transform = choice([None, trial_data.noisy])

    def run(ranks: int, stop: int | None = None, **saving: Any) -> set[str]:
        def work(comm: Any) -> str:
            try:
                result = train(
                    comm,
                    Samples(kind),
                    None if validation is None else Samples(validation),
                    stop,
                    saving,
                    prefetch=prefetch,
                    seed=3,
                    transform=transform,
                )
            except Stopped:
                return "stopped"
            return repr(result)

        prefetch = choice([0, 1, 4])
        return set(mock.run(ranks, work))

    expected = run(1)
    assert run(choice([2, 3])) == expected
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": choice([None, 1, 2])}
    assert run(choice([1, 2, 3]), choice([1, 2, 3, 4, 5]), **saving) == {"stopped"}
    assert run(choice([1, 2, 3]), **saving) == expected


def test_nondeterministic_data_are_reported_only(capfd):
    train(Communicator(), Samples("unseeded"), fit={"allow_nondeterministic_data": True})
    assert "its results can't be repeated" in capfd.readouterr().err


def test_data_sets_of_odyssey_are_not_read():
    pairs = data.arrays(np.ones((4, 3, 8, 8), np.float32), np.arange(4) % 2)
    assert draws_nothing(pairs, [])
    assert draws_nothing(pairs, [data.transforms.HorizontalFlip()])
    assert not draws_nothing(pairs, [data.transforms.Paired(trial_data.noisy)])
    assert not draws_nothing(pairs, [trial_data.noisy])
    assert not draws_nothing(Samples("plain"), [])
