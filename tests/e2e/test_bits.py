"""The same training to the last bit: ranks, workers, threads and execution change no bit of the
weights. Every run is processes as a user starts them, on the MNIST that comes with the
package.
"""

from __future__ import annotations

import functools

import pytest

LENET5 = ("--steps", 20, "--no-eval", "--no-progress")
CONVNET = (
    "--model",
    "convnet",
    "--steps",
    3,
    "--global-batch-size",
    96,
    "--no-eval",
    "--no-progress",
)

LAYOUTS = {
    "one process": ((), 0),
    "mpirun -n 1": ((), 1),
    "mpirun -n 2": ((), 2),
    "mpirun -n 3": ((), 3),
    "mpirun -n 4": ((), 4),
    "2 workers": (("--num-gpus", 2), 0),
    "4 workers": (("--num-gpus", 4), 0),
    "1 thread": (("--threads", 1), 0),
    "2 threads": (("--threads", 2), 0),
    "3 workers, 2 threads": (("--num-gpus", 3, "--threads", 2), 0),
    "2 ranks of 2 workers": (("--num-gpus", 2, "--threads", 2), 2),
    "eager": (("--execution", "eager"), 0),
    "eager, 2 ranks of 2 workers": (("--execution", "eager", "--num-gpus", 2), 2),
}
SHORT = ("one process", "mpirun -n 3", "2 ranks of 2 workers", "eager")
EVEN = (*SHORT, "mpirun -n 2", "mpirun -n 4", "3 workers, 2 threads")


def compare(launch, layouts, *options):
    """Runs all layouts; gives what they agree on."""
    results = {}
    for name in layouts:
        more, ranks = LAYOUTS[name]
        results[name] = launch.result(*options, *more, "--device", "cpu", ranks=ranks)
        assert results[name]["world_size"] == max(ranks, 1)
    hashes = {name: r["weights_sha256"] for name, r in results.items()}
    assert len(set(hashes.values())) == 1, hashes
    assert (
        len({(r["train_loss"], r["history"][0]["train_accuracy"]) for r in results.values()}) == 1
    )
    return next(iter(results.values()))


@pytest.mark.parametrize(
    ("batch", "layouts"),
    [
        pytest.param(256, EVEN, marks=pytest.mark.long),
        (250, (*SHORT, "3 workers, 2 threads")),
        pytest.param(250, LAYOUTS, marks=pytest.mark.long),
    ],
    ids=["256", "250", "250, all"],
)
def test_lenet5(launch, batch, layouts):
    """250 samples are seven shards and a partly filled one."""
    result = compare(launch, layouts, *LENET5, "--global-batch-size", batch)
    assert result["steps"] == 20
    assert result["train_loss"] < 2.4


@pytest.mark.long
def test_lenet5_small_shards(launch):
    compare(launch, SHORT, *LENET5, "--global-batch-size", 250, "--shard-size", 16)


def test_lenet5_tiny_shards(launch):
    """Shards of three samples are computed in rows."""
    compare(launch, SHORT, *LENET5, "--global-batch-size", 20, "--shard-size", 3)


@pytest.mark.long
def test_lenet5_a_last_batch_with_fewer_shards_than_workers(launch):
    """60,000 samples in batches of 59,990: the last has one shard, and three workers have none."""
    options = (
        "--epochs",
        1,
        "--no-eval",
        "--no-progress",
        "--global-batch-size",
        59_990,
        "--shard-size",
        1000,
    )
    result = compare(launch, ("one process", "mpirun -n 4"), *options)
    assert result["steps"] == 2


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adamw", marks=pytest.mark.long)])
def test_convnet_with_dropout(launch, optimizer):
    options = (*CONVNET, "--optimizer", optimizer, "--weight-decay", 0.05)
    compare(launch, ("one process", "mpirun -n 3", "2 threads", "eager"), *options)


@pytest.mark.long
def test_convnet_small_shards(launch):
    compare(launch, ("one process", "2 ranks of 2 workers"), *CONVNET, "--shard-size", 16)


def test_evaluation_is_the_same_too(launch):
    options = ("--steps", 5, "--no-progress")
    results = [launch.result(*options, *LAYOUTS[name][0], ranks=LAYOUTS[name][1]) for name in SHORT]
    assert len({(r["test_accuracy"], r["test_loss"]) for r in results}) == 1
    assert 0 < results[0]["test_accuracy"] < 1


def test_what_is_meant_to_change_the_result_does(launch):
    run = functools.partial(launch.result, "--steps", 3, *LENET5[2:])
    hashes = [
        run()["weights_sha256"],
        run("--seed", 1)["weights_sha256"],
        run("--shard-size", 16)["weights_sha256"],
        run("--global-batch-size", 64)["weights_sha256"],
        run("--nesterov")["weights_sha256"],
    ]
    assert len(set(hashes)) == 5


def test_mpi_reduction_trains_too(launch):
    """Its bits depend on the MPI library; its numbers do not."""
    tree = launch.result(*LENET5, "--global-batch-size", 256)
    other = launch.result(*LENET5, "--global-batch-size", 256, "--reduction", "mpi", ranks=3)
    assert other["reduction"] == "mpi"
    assert other["train_loss"] == pytest.approx(tree["train_loss"], rel=1e-3)
