"""odyssey.tune: studies in one process."""

from __future__ import annotations

import math

import numpy as np
import pytest

import odyssey
from odyssey import comm, data, nn, optim
from odyssey.comm import mock
from odyssey.errors import ConfigError

optuna = pytest.importorskip("optuna", reason="Optuna is not installed (extra: tune)")
tune = pytest.importorskip("odyssey.tune")  # which imports it
DistributedTuner = tune.DistributedTuner

SPACE = {
    "x": tune.uniform(-1, 1),
    "kind": ["a", "b"],
    "n": tune.randint(1, 4),
    "lr": tune.loguniform(1e-4, 1),
}


def figure(config):
    return -((config["x"] - 0.3) ** 2) - 0.1 * config["n"]


def tried(tuner) -> list:
    return [(t.number, t.state.name, t.params, t.value) for t in tuner.study.get_trials()]


def test_the_seeds_call_as_written():
    best = DistributedTuner(
        train_fn=figure, search_space=SPACE, num_gpus=32, trials_per_gpu=1
    ).tune(num_samples=12)
    assert (
        set(best) == set(SPACE)
        and -1 <= best["x"] <= 1
        and best["kind"] in "ab"
        and 1 <= best["n"] <= 3
    )


@pytest.mark.parametrize(
    "sampler",
    ["tpe", "random", lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)],
)
def test_a_seed_gives_the_same_trials(sampler):
    def trials(seed):
        tuner = DistributedTuner(figure, SPACE, sampler=sampler, seed=seed, verbose=False)
        tuner.tune(15)
        return tried(tuner)

    assert trials(3) == trials(3) != trials(4)


@pytest.mark.parametrize("place", ["study.db", "study.log"])
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_study_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path, place, sampler):
    class Cut(Exception):
        pass

    def cut(config):
        if len(seen) in (3, 7):
            seen.append(None)
            raise Cut
        seen.append(config)
        return figure(config)

    seen: list = []
    whole = DistributedTuner(figure, SPACE, sampler=sampler, verbose=False)
    whole.tune(12)
    for _ in range(2):
        with pytest.raises(Cut):
            DistributedTuner(
                cut, SPACE, sampler=sampler, storage=tmp_path / place, verbose=False
            ).tune(12)
    last = DistributedTuner(cut, SPACE, sampler=sampler, storage=tmp_path / place, verbose=False)
    assert last.tune(12) == whole.best_params
    assert tried(last) == tried(whole)
    assert last.tune(14) and len(tried(last)) == 14


def test_groups_of_ranks_have_a_study_together():
    def train_fn(config, trial):
        world = comm.world()
        assert world.size == 2
        assert world.all_gather(np.array([trial.number]))[:, 0].tolist() == [trial.number] * 2
        return figure(config)

    def job(world):
        tuner = DistributedTuner(
            train_fn, SPACE, ranks_per_trial=2, sampler="random", verbose=False
        )
        best = tuner.tune(20)
        assert comm.world() is world
        trials = tried(tuner) if tuner.study else None
        world.barrier()  # the temporary storage goes with rank 0's tuner
        return best, tuner.best_value, trials

    alone = DistributedTuner(figure, SPACE, sampler="random", verbose=False)
    alone.tune(20)
    for ranks in (2, 4, 5):  # of 5 one is left over
        results = mock.run(ranks, job)
        assert all(
            best == alone.best_params and value == alone.best_value for best, value, _ in results
        )
        assert all(trials in (None, tried(alone)) for *_, trials in results)


def test_a_training_gives_the_same_figures_on_one_rank_and_two():
    digits = data.load("mnist", train=True).take(96)

    def train_fn(config, trial):
        nn.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        trainer = odyssey.DistributedTrainer(model, optim.SGD(lr=config["lr"]), shard_size=16)
        loader = data.DataLoader(digits, batch_size=32)
        return trainer.fit(
            loader, loader, epochs=2, verbose=False, callbacks=[trial.pruning("test_loss")]
        )

    def job(world=None):
        tuner = DistributedTuner(
            train_fn, {"lr": tune.loguniform(1e-3, 1)}, metric="test_loss", ranks_per_trial=world.size if world else 1,
            verbose=False,
        )  # fmt: skip
        tuner.tune(8)
        return tried(tuner) if tuner.study else None

    alone = job()
    assert "PRUNED" in {state for _, state, *_ in alone} and min(v for *_, v in alone) < 2
    assert mock.run(2, job)[0] == alone


def test_what_a_trial_can_end_with():
    outcomes = [0.5, {"accuracy": 0.7}, math.nan, None, optuna.TrialPruned(), KeyError("gone"), 0.6]

    def train_fn(config):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    tuner = DistributedTuner(train_fn, {"x": tune.uniform(0, 1)}, catch=(KeyError,), verbose=False)
    tuner.tune(7)
    states = [state for _, state, *_ in tried(tuner)]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED", "PRUNED", "FAIL", "COMPLETE"]
    assert tuner.best_value == 0.7


def train_at(config):
    """Trains a linear model of numbers, which diverges with a high rate."""
    nn.manual_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(128, 4)).astype("float32")
    loader = data.DataLoader(data.arrays(x, x[:, :1] * 3), batch_size=32)
    trainer = odyssey.DistributedTrainer(
        nn.Linear(4, 1), optim.SGD(lr=config["lr"]), loss=nn.MSELoss(), shard_size=8
    )
    return trainer.fit(loader, loader, epochs=40, verbose=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trial_that_diverges_fails_and_the_search_goes_on(ranks, capsys):
    rates = [0.01, 1e6, 0.1]

    def job(world):
        tuner = DistributedTuner(
            train_at, {"lr": rates}, metric="test_loss", ranks_per_trial=ranks, sampler="random"
        )
        tuner.tune(8)
        return tried(tuner) if tuner.study is not None else None, tuner.best_params

    trials, best = mock.run(ranks, job)[0]
    failed = [params["lr"] for _, state, params, _ in trials if state == "FAIL"]
    assert failed and set(failed) == {1e6} and best == {"lr": 0.1}
    lines = capsys.readouterr().err.splitlines()
    [line] = [line for line in lines if "failed" in line][:1]
    assert "lr 1e+06" in line and "NumericsError: [train] the loss is not finite at step" in line


def test_all_trials_diverge():
    tuner = DistributedTuner(train_at, {"lr": [1e6, 1e7]}, metric="test_loss", verbose=False)
    with pytest.raises(ConfigError, match=r"no trial was completed.*trial 2: NumericsError"):
        tuner.tune(3)


@pytest.mark.parametrize("metric", ["test_mae", "test_mse", "test_perplexity", "test_loss"])
def test_less_of_an_error_is_better(metric):
    tuner = DistributedTuner(lambda config: {metric: config["x"]}, {"x": [3, 1, 2]}, metric=metric)
    assert tuner.tune(8) == {"x": 1}


def test_a_name_without_a_direction_asks():
    space = {"x": [3, 1, 2]}
    with pytest.raises(ConfigError, match=r"'test_mine' may be better; give direction='minimize'"):
        DistributedTuner(lambda config: {"test_mine": 1}, space, metric="test_mine")
    tuner = DistributedTuner(
        lambda config: {"test_mine": config["x"]}, space, metric="test_mine", direction="minimize"
    )
    assert tuner.tune(8) == {"x": 1}


def test_a_search_that_ends_early_keeps_what_is_finished(capsys):
    calls: list = []

    def train_fn(config):
        calls.append(config["x"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return config["x"]

    tuner = DistributedTuner(train_fn, {"x": tune.uniform(0, 1)})
    with pytest.raises(KeyboardInterrupt):
        tuner.tune(8)
    assert tuner.best_value == max(calls[:3]) == tuner.best_params["x"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert "ends early, after 3 trials: the best is trial" in last


def test_ray_tunes_spelling():
    found = tune.run(
        figure, config=SPACE, num_samples=3, resources_per_trial={"gpu": 1}, verbose=False
    )
    assert found.best_config["x"] and found.best_result <= 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"search_space": {}}, "search_space is {}; give"),
        ({"search_space": {"lr": 3}}, r"search_space\['lr'\] is 3"),
        ({"train_fn": 3}, "train_fn is 3; give a function"),
        ({"direction": "up"}, "direction is 'up'; choose from maximize, minimize"),
        ({"sampler": "grid"}, "sampler is 'grid'; choose from tpe, random"),
        ({"ranks_per_trial": 2}, "ranks_per_trial is 2, and the job has 1 rank;"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"train_fn": lambda config: {"a": 1, "b": 2}}, "returned 'a', 'b'; say with metric="),
        ({"train_fn": lambda config: {"test_loss": 1}}, "returned 'test_loss'; say with metric="),
        ({"metric": "test_mine"}, "less or more of 'test_mine' may be better"),
        ({"train_fn": lambda config: "good"}, "returned a str; return a number"),
        ({"train_fn": lambda config: None}, "no trial was completed"),
        ({"storage": "/dev/null/study.log"}, "the storage '/dev/null/study.log' cannot be used"),
        ({"storage": "/dev/null/study.db"}, "the storage '/dev/null/study.db' cannot be used"),
    ],
)
def test_what_is_wrong_is_named(more, message):
    with pytest.raises(ConfigError, match=message):
        DistributedTuner(
            **{"train_fn": figure, "search_space": SPACE, "verbose": False, **more}
        ).tune(2)


def test_a_study_with_another_direction(tmp_path):
    DistributedTuner(figure, SPACE, storage=tmp_path / "s.log", verbose=False).tune(1)
    with pytest.raises(ConfigError, match="is to maximize its figure, this tuner to minimize"):
        DistributedTuner(
            figure, SPACE, direction="minimize", storage=tmp_path / "s.log", verbose=False
        ).tune(2)


@pytest.mark.parametrize(
    ("name", "other"),
    [("lr", tune.uniform(1e-4, 1)), ("kind", ["a", "c"]), ("n", tune.uniform(1, 4))],
)
def test_a_study_with_another_space(tmp_path, name, other):
    """Optuna keeps one kind of distribution for a name; bounds may change."""
    where = {"storage": tmp_path / "s.db", "verbose": False}
    DistributedTuner(figure, SPACE, **where).tune(2)
    with pytest.raises(
        ConfigError, match=rf"the study 'odyssey' draws '{name}' from \w+\(.*another study_name="
    ):
        DistributedTuner(figure, {**SPACE, name: other}, **where).tune(3)
    wider = DistributedTuner(figure, {**SPACE, "x": tune.uniform(-2, 2)}, **where)
    wider.tune(3)
    assert [state for _, state, *_ in tried(wider)] == ["COMPLETE"] * 3


def test_a_figure_that_was_not_measured():
    with pytest.raises(ConfigError, match="train_fn has no 'test_accuracy': it did not evaluate"):
        DistributedTuner(
            lambda config: {"test_accuracy": None}, SPACE, metric="test_accuracy", verbose=False
        ).tune(1)


def test_a_second_job_takes_the_study_over(tmp_path):
    def train_fn(config):
        if not others:
            others.append(
                DistributedTuner(figure, SPACE, storage=tmp_path / "s.log", verbose=False)
            )
            others[0].tune(3)
        return figure(config)

    others: list = []
    first = DistributedTuner(train_fn, SPACE, storage=tmp_path / "s.log", verbose=False)
    with pytest.raises(ConfigError, match="another job works on the study"):
        first.tune(3)
    assert [state for _, state, *_ in tried(others[0])] == ["COMPLETE"] * 3
