"""Timers, a monitored training, the table of communication costs; DistributedConfig."""

from __future__ import annotations

import time

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey import distributed as dist
from odyssey.comm import mock
from odyssey.distributed import profiling
from odyssey.distributed.config import DistributedConfig
from odyssey.errors import ConfigError, counted
from odyssey.train.trainer import DistributedTrainer

X = np.random.default_rng(0).normal(size=(64, 1, 28, 28)).astype(np.float32)
Y = np.arange(64) % 10


def test_timers_add_up_by_name(capsys):
    monitor = dist.PerformanceMonitor(show=True)
    for _ in range(3):
        monitor.start_timer("outer")
        with monitor.timer("inner"):
            time.sleep(0.01)
        assert monitor.end_timer("outer") >= 0.01
    s, times = (
        monitor.summary(),
        list(zip(monitor.timings["inner"], monitor.timings["outer"], strict=True)),
    )
    assert s["outer"]["count"] == s["inner"]["count"] == 3
    assert 0.03 <= s["inner"]["total"] <= s["outer"]["total"]
    assert s["inner"]["min"] <= s["inner"]["median"] <= s["inner"]["max"]
    assert capsys.readouterr().out == "".join(
        f"inner: {i:.4f} s\nouter: {o:.4f} s\n" for i, o in times
    )
    monitor.start_timer("a")
    with pytest.raises(ConfigError, match="'a' is running already"):
        monitor.start_timer("a")
    assert monitor.end_timer("b") == 0.0 and "b" not in monitor.timings
    with pytest.raises(ZeroDivisionError), monitor.timer("c"):
        1 / 0  # noqa: B018
    assert monitor.summary()["c"]["count"] == 1


def test_a_training_is_monitored(capsys):
    nn.manual_seed(0)
    loader = data.DataLoader(data.arrays(X, Y), batch_size=24)  # 24, 24, 16
    trainer = DistributedTrainer(nn.LeNet5(), optim.SGD(lr=0.1), threads=1)
    monitor = dist.PerformanceMonitor()
    result = monitor.monitor_training(trainer, loader, num_steps=7, every=3)
    assert result["steps"] == trainer.steps == 7 and result["samples"] == 2 * 64 + 24
    assert result["samples_per_second"] == pytest.approx(result["samples"] / result["seconds"])
    assert 0 < result["step_seconds"] < result["seconds"]
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step 3/7",
        "step 6/7",
        "step 7/7",
    ]

    class Own:
        seen = 0

        def train_step(self, x, target):
            Own.seen += len(target)

    assert (
        monitor.monitor_training(Own(), [(X[:8], Y[:8])], num_steps=2)["samples"] == Own.seen == 16
    )
    with pytest.raises(ConfigError, match="gives no batch"):
        monitor.monitor_training(Own(), [])


@pytest.mark.parametrize("operation", sorted(profiling.FACTORS))
@pytest.mark.parametrize("ranks", [1, 3])
def test_communication_is_measured(operation, ranks, capsys):
    def work(_):
        dist.init_process_group()
        rows = dist.profile_communication((10, 3000), operation, repeats=4, warm_up=1)
        dist.destroy_process_group()
        return rows

    rows = mock.run(ranks, work)
    assert rows[0] == rows[-1]  # the slowest rank counts, on all of them
    for row, floats in zip(rows[0], (10, 3000), strict=True):
        whole = floats if operation in ("all_reduce", "broadcast") else -(-floats // ranks) * ranks
        assert (row["floats"], row["bytes"], row["ranks"], row["backend"]) == (
            whole,
            4 * whole,
            ranks,
            "mock",
        )
        assert 0 < row["best"] <= row["seconds"]
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        factor = {"all_reduce": 4 / 3, "broadcast": 1.0}.get(operation, 2 / 3) if ranks == 3 else 0
        assert row["bus_bytes_per_second"] == pytest.approx(factor * row["bytes_per_second"])
    out = capsys.readouterr().out
    assert (
        out.count(f"{operation} on {counted(ranks, 'rank')}, mock") == 1
        and len(out.splitlines()) == 4
    )


def test_what_cannot_be_measured():
    def work(_):
        dist.init_process_group()
        for arguments in (((10,), "gossip"), ((0,),), ((10,), "all_reduce", 0)):
            with pytest.raises(ConfigError, match="profile"):
                dist.profile_communication(*arguments)
        dist.destroy_process_group()

    mock.run(1, work)


# --- settings under other platforms' names --------------------------------------------------------


def test_a_config_is_the_options_of_a_trainer():
    config = DistributedConfig(
        num_nodes=2,
        gpus_per_node=4,
        batch_size=32,
        epochs=100,
        learning_rate=0.02,
        mixed_precision="bf16",
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        communication_backend="local",
        find_unused_parameters=False,
        mlflow_tracking=False,
        tensorboard=False,
        checkpoint_dir=None,
        seed=3,
    )
    assert config.workers(4) == 8 and config.global_batch_size(4) == 1024
    assert config.loader_options(4)["batch_size"] == 256
    assert config.trainer_options(4)["num_gpus"] == 2
    nn.manual_seed(0)
    trainer = config.trainer(nn.LeNet5(), optim.SGD(), threads=1)
    assert (trainer.workers, trainer.accumulation_steps, trainer.clip_norm, trainer.seed) == (
        8,
        4,
        1.0,
        3,
    )
    assert (trainer.precision, trainer.optimizer.lr) == ("bf16", 0.02)
    assert (
        DistributedConfig(
            batch_size=64, num_gpus=8, gradient_accumulation_steps=4
        ).global_batch_size(1)
        == 2048
    )
    assert DistributedConfig(mixed_precision=True).trainer_options(2)["precision"] == "fp16"
    assert (
        DistributedConfig().trainer_options(2)["num_gpus"] is None
        and DistributedConfig().workers(2) == 2
    )
    assert repr(DistributedConfig(epochs=3)) == "DistributedConfig(epochs=3)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "fp8"}, "compression is 'fp8'"),
        ({"epoch": 3}, "unknown key 'epoch'; did you mean 'epochs'?"),
        ({"xyz": 3}, "unknown key 'xyz'; choose from num_gpus"),
        (
            {"backend": "tensorflow"},
            "another framework; a Keras model trains with KERAS_BACKEND=torch",
        ),
        ({"backend": "deepspeed"}, "another framework; use zero_stage"),
        ({"backend": "nccl"}, "say communication_backend='nccl'"),
        ({"backend": "x"}, "is unknown; choose from pytorch-ddp, horovod, ray"),
        ({"communication_backend": "tcp"}, "choose from auto, mpi"),
        ({"log_every_n_steps": 0}, "log_every_n_steps is 0; it must be at least 1"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"checkpoint_frequency": 0}, "checkpoint_frequency is 0; it must be at least 1"),
        ({"deepspeed_config": {}}, "use zero_stage"),
        (
            {"num_gpus": 8, "num_nodes": 2, "gpus_per_node": 3},
            r"num_nodes\(2\) x gpus_per_node\(3\) = 6, but num_gpus is 8",
        ),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"learning_rate": -1}, "learning_rate is -1"),
        ({"zero_stage": 4}, "from 0 to 3"),
        ({"mixed_precision": "fp8"}, "use True, False, 'fp16' or 'bf16'"),
    ],
)
def test_a_setting_that_is_not_allowed(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        DistributedConfig(**settings)
    assert "\n" not in str(error.value)


def test_workers_that_do_not_divide():
    with pytest.raises(ConfigError, match="8 workers on 3 ranks"):
        DistributedConfig(num_gpus=8).workers(3)
