"""odyssey.tune over processes: groups of ranks, a rank that is killed, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest

optuna = pytest.importorskip("optuna", reason="Optuna is not installed (extra: tune)")

PROGRAM = """
import os, signal, sys
from odyssey import comm, data, nn, optim, tune
import odyssey

digits = data.load("mnist", train=True).take(128)
loader = data.DataLoader(digits, batch_size=64)

def train_fn(config, trial):
    if trial.number == 7 and comm.world().rank == 1 and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    nn.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    trainer = odyssey.DistributedTrainer(model, optim.SGD(lr=config["lr"]), shard_size=16)
    return trainer.fit(loader, loader, epochs=1, verbose=False)

tuner = odyssey.DistributedTuner(
    train_fn, {"lr": tune.loguniform(1e-3, 1)}, metric="test_loss", ranks_per_trial=2, sampler="random",
    storage=sys.argv[1],
)
best = tuner.tune(20)
if comm.world().rank == 0:
    print(best["lr"], tuner.best_value, tuner.groups)
"""


@pytest.mark.parametrize("place", ["study.db", pytest.param("study.log", marks=pytest.mark.long)])
def test_twenty_trials_on_two_groups_of_two_ranks_one_killed(launch, place):
    (launch.folder / "program.py").write_text(PROGRAM)
    killed = launch.python("program.py", place, "kill", ranks=4)
    assert killed.returncode != 0
    done = launch.python("program.py", place, ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "2"
    storage = f"sqlite:///{launch.folder / place}"
    if place == "study.log":
        storage = optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(launch.folder / place))
        )
    # as Optuna and its dashboard open it
    study = optuna.load_study(study_name="odyssey", storage=storage)
    assert [(t.number, t.state.name) for t in study.get_trials()] == [
        (n, "COMPLETE") for n in range(20)
    ]
    # the same trials, one after the other
    again = launch.python("program.py", f"again-{place}", ranks=2)
    assert again.stdout.split()[:2] == done.stdout.split()[:2]


def test_the_command(launch):
    more = "--epochs 1 --steps 8 --global-batch-size 32".split()
    options = [
        "tune",
        "--param",
        "lr:log:1e-3:1",
        "--param",
        "optimizer:sgd,adam",
        "--trials",
        "4",
        "--json",
        "out.json",
    ]
    done = launch.python("-m", "odyssey.cli", *options, *more, ranks=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((launch.folder / "out.json").read_text())
    assert [t["state"] for t in found["trials"]] == ["complete"] * 4
    words = done.stdout.split(": ")[1].split()
    assert words[0] == "--lr" and float(words[1]) == found["best_params"]["lr"]
    run = launch.result(*more, *words)  # what it says can be given to train
    assert run["test_accuracy"] == found["best_value"]


TABLE = "--dataset csv:t.csv --model mlp --normalize --epochs 2 --global-batch-size 64".split()


@pytest.fixture
def table(launch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    rows = [f"{a:.4f},{b:.4f},{1000 * a + 300 * b:.2f}" for a, b in x]
    (launch.folder / "t.csv").write_text("\n".join(["a,b,price", *rows]))
    return launch


# The random sampler draws high rates, with which trials diverge, for some of the trials.
DIVERGING = ["--param", "lr:log:1e-3:1e5", "--optimizer", "sgd", "--trials", "8"]
DIVERGING += ["--sampler", "random", "--json", "out.json"]


def test_a_search_with_diverging_trials_that_is_killed_and_resumed(table):
    command = ["-m", "odyssey.cli", "tune", *DIVERGING, *TABLE]
    whole = table.python(*command, ranks=2)
    assert whole.returncode == 0, whole.stderr
    trials = json.loads((table.folder / "out.json").read_text())
    states = [trial["state"] for trial in trials["trials"]]
    assert {"fail", "complete"} == set(states) and trials["metric"] == "test_loss"
    for trial in trials["trials"]:
        line = next(
            line for line in whole.stderr.splitlines() if f"trial {trial['number']}:" in line
        )
        assert f"lr {trial['params']['lr']:.6g}" in line
        assert ("failed" in line) == (trial["state"] == "fail")
    # Each job is killed at the beginning of a trial, until one ends by itself.
    (table.folder / "killing.py").write_text(KILLING)
    codes = []
    for _ in range(8):
        killed = table.python("killing.py", *DIVERGING, *TABLE, "--storage", "s.db", ranks=2)
        codes.append(killed.returncode)
        if not killed.returncode:
            break
    assert codes[-1] == 0 and len(codes) > 2, killed.stderr
    assert json.loads((table.folder / "out.json").read_text()) == trials


KILLING = """
import os, signal, sys
from odyssey import tune
from odyssey.tune import command

played = []

def run(settings, **options):
    played.append(None)
    if len(played) > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_run(settings, **options)

train_run = command.train.run
command.train.run = run
command.command(sys.argv[1:])
"""


def test_what_is_finished_is_kept_without_a_storage(table):
    (table.folder / "killing.py").write_text(KILLING)
    killed = table.python("killing.py", *DIVERGING, *TABLE)
    assert killed.returncode != 0
    trials = json.loads((table.folder / "out.json").read_text())["trials"]
    assert [trial["state"] for trial in trials[:-1]] and trials[-1]["state"] == "running"


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ("", "test_loss"),
        ("--metrics mae --metric test_mae", "test_mae"),
        ("--no-eval", "train_loss"),
    ],
)
def test_the_default_metric_is_that_of_numbers(table, words, metric):
    done = table.python(
        *f"-m odyssey.cli tune --param lr:log:1e-3:1e-2 --trials 1 {words}".split(), *TABLE
    )
    assert done.stdout.startswith(f"best {metric} "), done.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--metric test_mae", "--metric test_mae: an epoch has no such figure; choose from test_l"),
        ("--metric test_accuracy", "choose from test_loss, train_loss, or measure more"),
        ("--no-eval --metric test_loss", "choose from train_loss"),
    ],
)
def test_a_metric_that_no_epoch_has_is_named_before_the_first_trial(table, words, line):
    done = table.python(
        *f"-m odyssey.cli tune --param lr:log:1e-3:1e-2 --trials 1 {words}".split(), *TABLE
    )
    assert done.returncode == 64 and line in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--param lr:log:1", "[tune] --param lr:log:1; give NAME:LOW:HIGH, NAME:log:LOW:HIGH"),
        ("--param lr:2:1", "[tune] --param lr:2:1; give NAME:LOW:HIGH"),
        ("--param lrr:1:2", "No such option '--lrr'"),
        ("--param lr:1:2 --stepps 3", "No such option '--stepps'"),
        ("--param lr:1:2 --ranks 2", "--ranks is of one training"),
        ("--param lr:1:2 --save-weights x", "--save-weights is of one training"),
        ("--param lr:1:2 --layout auto", "--layout auto is of one training; give --dp"),
        ("--param momentum:-3:-2", "--momentum"),
        ("--param lr:1:2 --trials 0", "num_samples"),
        ("--param lr:1:2 --lr 3", "--param lr draws what is given a second time"),
        ("--param lr:1:2 --param lr:3:4", "--param lr draws what is given a second time"),
        ("", "Missing option '--param'"),
    ],
)
def test_what_is_wrong_is_one_line(launch, words, line):
    done = launch.python("-m", "odyssey.cli", "tune", *words.split())
    assert done.returncode == 64 and line in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
