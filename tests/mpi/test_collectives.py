"""odyssey.distributed as people know it from PyTorch: in place, on any strides, in any order;
and what it refuses.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from odyssey import Tensor, nn, optim
from odyssey import distributed as dist
from odyssey import functional as F
from odyssey.comm import mock
from odyssey.errors import CollectiveError, ConfigError, OdysseyError, ShapeError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import random_collectives  # noqa: E402


def on(ranks, function):
    """Results of function() on ranks that have initialized the world."""

    def work(_):
        dist.init_process_group()
        try:
            return function()
        finally:
            dist.destroy_process_group()

    return mock.run(ranks, work)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_collectives_give_what_numpy_gives(ranks, seed):
    on(ranks, lambda: random_collectives.Player(seed).play(40))


@pytest.mark.parametrize("backend", ["mpi", "shm"])
def test_random_collectives_of_processes(launch, backend):
    done = launch.python(HERE / "random_collectives.py", 8, 60, backend, ranks=3)
    assert done.stdout == f"3 ranks over {backend}: 60 calls\n", done.stderr


def tutorial(average_gradients):
    """The parameters after a loop of the tutorial "Writing distributed applications", on each of
    two ranks.
    """

    def work():
        nn.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        rng = np.random.default_rng(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(Tensor(rng.normal(size=(8, 5)))), rng.integers(0, 3, 8))
            loss.backward()
            average_gradients(model)
            optimizer.step()
        return np.concatenate([p.data.ravel().copy() for p in model.parameters()])

    return on(2, work)


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def average_with_handles(model):
    handles = [
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, async_op=True) for p in model.parameters()
    ]
    for handle in handles:
        handle.wait()
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def average_by_avg(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def average_as_the_seeds(model):
    for p in model.parameters():
        p.grad = dist.all_reduce_sum(p.grad) / dist.get_world_size()


def average_on_one_rank(model):
    for p in model.parameters():
        parts = [np.zeros(p.shape, np.float32) for _ in range(2)]
        dist.gather(p.grad, parts if dist.get_rank() == 0 else None, dst=0)
        if dist.get_rank() == 0:
            p.grad = (parts[0] + parts[1]) / 2
        dist.broadcast(p.grad, 0)


def test_loops_of_tutorials_keep_replicas_alike():
    first, other = tutorial(average_gradients)
    np.testing.assert_array_equal(first, other)
    for way in (average_with_handles, average_by_avg, average_as_the_seeds, average_on_one_rank):
        again = tutorial(way)
        np.testing.assert_array_equal(again[0], again[1])
        np.testing.assert_array_equal(again[0], first)
    apart = tutorial(lambda model: None)
    assert not np.array_equal(apart[0], apart[1])


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, n: dist.all_reduce(read_only()), "this one is read-only; give array.copy()"),
        # a copy is made
        (lambda t, n: dist.all_reduce(Tensor(np.broadcast_to(np.float32(1), 3))), None),
        (
            lambda t, n: dist.all_reduce([1.0]),
            "all_reduce of a list; give a Tensor, a NumPy array or a number",
        ),
        (lambda t, n: dist.all_reduce(t, ["sum"]), r"operation \['sum'\]; it must be sum"),
        (
            lambda t, n: dist.all_reduce(t, out=np.ones(4)),
            r"is float64 \(3,\), but it is to go into float64 \(4,\)",
        ),
        (lambda t, n: dist.all_reduce(t != 0), "dtype bool; it must be one of"),
        (lambda t, n: dist.broadcast(t, 5), "broadcast from rank 5; it must be one of"),
        (lambda t, n: dist.all_gather([t] * n, t), "has one array several times"),
        (lambda t, n: dist.all_gather([t], t), "into a list of 1, but the group has 2 ranks"),
        (
            lambda t, n: dist.all_gather([np.ones(4), np.ones(4)], t),
            r"is float64 \(3,\), but .* float64 \(4,\)",
        ),
        (lambda t, n: dist.all_gather(np.ones((n, 3)), t), "all_gather_into_tensor"),
        (lambda t, n: dist.all_gather_into_tensor(np.ones(7), t), r"give \(2, 3\) or \(6,\)"),
        (
            lambda t, n: dist.gather(t, [np.ones(3)] * n, dst=1),
            "other than 1; leave it out|several times",
        ),
        (
            lambda t, n: dist.scatter(t, [t] * 3),
            "scatter of 3 values for 2 ranks|on a rank other than 0",
        ),
        (lambda t, n: dist.reduce_scatter(t, np.ones(6)), "reduce_scatter_tensor"),
        (
            lambda t, n: dist.reduce_scatter(t, [t, np.ones(2)]),
            r"of float64 \(3,\) and float64 \(2,\)",
        ),
        (
            lambda t, n: dist.reduce_scatter_tensor(np.ones(3), np.ones(7)),
            r"give \(2, 3\) or \(6,\)",
        ),
        (lambda t, n: dist.all_to_all([t], [t]), "two lists of 2"),
        (lambda t, n: dist.all_to_all(np.ones(2), np.ones(2)), "all_to_all_single"),
        (lambda t, n: dist.all_to_all_single(np.ones(3), t), "input of 3 rows is cut into"),
    ],
)
def test_what_is_refused_on_one_rank_is_an_error_on_all(call, message):
    def work():
        n, t = dist.get_world_size(), np.ones(3)
        if message is None:
            call(t, n)
            return
        with pytest.raises((ShapeError, ConfigError), match=message):  # all alike
            call(t, n)
        ended = None
        try:
            call(t, n) if dist.get_rank() == 1 else dist.all_reduce(t.astype(np.float32))
        except OdysseyError as error:
            ended = error
        assert isinstance(
            ended, CollectiveError if dist.get_rank() == 0 else (ShapeError, ConfigError)
        )
        if dist.get_rank() == 0:
            assert re.search(
                r"but rank 1 calls \w+ \(refused: .*test_collectives\.py:\d+", str(ended)
            )
        assert dist.all_reduce(1) == 2  # the group goes on

    on(2, work)


def test_a_work_is_over_only_once():
    def work():
        t = np.zeros((4, 6))[::2, ::3]
        t += dist.get_rank() + 1
        handle = dist.all_reduce(t, async_op=True)
        while not handle.is_completed():
            pass
        np.testing.assert_array_equal(t, 3)
        t[...] = 5
        assert handle.wait() is handle.result() is t and (t == 5).all()

    on(2, work)


def test_the_line_that_is_named_is_the_users(launch):
    script = launch.folder / "mine.py"
    script.write_text(
        "import numpy as np\n"
        "from odyssey import data, nn, optim\n"
        "from odyssey import distributed as dist\n"
        "from odyssey.train.trainer import DistributedTrainer\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 0:\n"
        "    dist.all_reduce(np.ones(4, np.float32))\n"
        "else:\n"
        "    trainer = DistributedTrainer(model=nn.Sequential(nn.Linear(3, 2)), "
        "optimizer=optim.SGD(lr=0.1))\n"
        "    loader = data.DataLoader((np.ones((64, 3), np.float32), np.zeros(64, int)), "
        "batch_size=64)\n"
        "    trainer.fit(loader, epochs=1)\n"
    )
    done = launch.python(script, ranks=2)
    assert done.returncode == 76
    name = f"{launch.folder.name}/mine.py"
    assert re.search(
        rf"rank 0 calls all_reduce \S+ \(4,\) sum at \S*{name[-20:]}:7, but rank 1 calls",
        done.stderr,
    )
    assert re.search(rf"but rank 1 calls .* at \S*{name[-20:]}:(9|11);", done.stderr), done.stderr
