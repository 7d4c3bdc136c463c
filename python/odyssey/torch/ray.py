"""Ray: the ranks of a training as actors, on one machine or a cluster; needs the extra `[ray]`.

Each actor is a rank: it is given the variables of env:// and connects to the others by backend
gloo. Functions and results travel by Ray's own serialization. What it is not: `odyssey launch`; a
job that lost a rank ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..base import free_port, install_extra
from ..checkpoints import History
from ..errors import CollectiveError, ConfigError, LaunchError, check_integer

try:
    import ray
except ImportError as e:
    raise ConfigError(f"[ray] odyssey.ray needs Ray ({e}); {install_extra('ray')}") from e

GRACE_S = 5.0  # seconds, after a rank has failed, in which others tell what they know


class _Rank:
    """Rank that runs in an actor."""

    def address(self) -> tuple[str, int]:
        """This machine, and a port of it that is free now."""
        return ray.util.get_node_ip_address(), free_port()

    def run(
        self,
        variables: dict[str, str],
        function: Callable[..., Any],
        arguments: tuple,
        keywords: dict,
    ) -> Any:
        """The function's result, on this rank; the ranks part when all have it."""
        from .. import comm

        os.environ.update(variables)
        world = comm.world("gloo") if int(variables["WORLD_SIZE"]) > 1 else comm.world()
        result = function(*arguments, **keywords)
        world.barrier()
        return result


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    num_workers: int = 4,
    cpus_per_worker: float = 1,
    environment: dict[str, str] | None = None,
    **keywords: Any,
) -> list[Any]:
    """Runs function(*arguments, **keywords) on `num_workers` ranks, each an actor of Ray; their
    results by rank.

    Uses the Ray that is there (RAY_ADDRESS, or ray.init() before), or starts one of this machine.
    The function, its arguments and results are serialized by Ray, so a model that it trains is a
    copy: return its weights.

    cpus_per_worker: cores that Ray is to keep free for each rank. environment: variables of the
    ranks. Raises ConfigError: num_workers is not allowed, or Ray will not have so many cores.
    LaunchError: a rank failed; the message is its own. The others are ended.
    """
    check_integer("[ray] num_workers", num_workers, 1)
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    need = num_workers * cpus_per_worker
    cores = ray.cluster_resources().get("CPU", 0)
    if need > cores:
        raise ConfigError(
            f"[ray] {num_workers} workers of {cpus_per_worker:g} cores are asked for, and Ray has "
            f"{cores:g}; give fewer num_workers, or cpus_per_worker=0.5"
        )
    actor = ray.remote(num_cpus=cpus_per_worker, max_restarts=0)(_Rank)
    ranks = [actor.remote() for _ in range(num_workers)]
    try:
        host, port = ray.get(ranks[0].address.remote())
        base = {
            **(environment or {}),
            "WORLD_SIZE": str(num_workers),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
        calls = [
            r.run.remote({**base, "RANK": str(i)}, function, arguments, keywords)
            for i, r in enumerate(ranks)
        ]
        try:
            waiting = calls
            while waiting:
                finished, waiting = ray.wait(waiting)
                ray.get(finished)
        except ray.exceptions.RayError as first:
            raise _find_failure(calls) from first
        return ray.get(calls)
    finally:
        for r in ranks:
            ray.kill(r)


def _find_failure(calls: list[Any]) -> LaunchError:
    """Names the rank that failed by itself, not those that then missed it."""
    failures = []
    for rank, call in enumerate(calls):
        try:
            ray.get(call, timeout=GRACE_S)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError as e:
            cause = getattr(e, "cause", None) or e
            message = str(cause).strip().partition("\n")[0]
            failures.append(
                (isinstance(cause, CollectiveError), rank, f"{type(cause).__name__}: {message}")
            )
    _, rank, message = min(failures)
    return LaunchError(f"[ray] rank {rank} failed: {message}")


def serve(*_: Any, **keywords: Any) -> None:
    """Refused: models are not served here."""
    raise ConfigError(
        "[ray] Ray Serve is not there; `odyssey export` writes an ONNX file that servers take, "
        "`odyssey predict` computes a data set, and odyssey.load() gives the model to a Ray Serve "
        "deployment of your own"
    )


class RayTrainer:
    """PyTorchDDPTrainer with ranks as actors of Ray: `RayTrainer(model, {"lr": 1e-3,
    "num_workers": 4}).fit(loader)`.

    Args:
        model: a torch.nn.Module; fit() gives it the weights of the trained one.
        config: `lr`, `num_workers` (default 1: in this process) and arguments of
            odyssey.torch.PyTorchDDPTrainer (batch_size, epochs, ...). Other keys, such as those of
            a search that the model was made from, are not used.
        optimizer: a function of the parameters that gives a torch optimizer; default Adam.
        cpus_per_worker: cores for each rank.
    """

    def __init__(
        self,
        model: Any,
        config: dict[str, Any] | None = None,
        *,
        optimizer: Callable[[Any], Any] | None = None,
        cpus_per_worker: float = 1,
    ) -> None:
        from ..distributed import DistributedConfig
        from ..settings import Training, declared

        allowed_names = {*DistributedConfig.KEYS, *declared(Training), "loss_fn"}
        values = dict(config or {})
        self.num_workers = int(values.pop("num_workers", 1))
        self.cpus_per_worker = cpus_per_worker
        values = {
            "learning_rate" if name == "lr" else name: value for name, value in values.items()
        }
        self.settings = {name: value for name, value in values.items() if name in allowed_names}
        self.model = model
        self.optimizer = optimizer
        self.history = History()

    def fit(self, train_loader: Any, val_loader: Any = None, **options: Any) -> History:
        """Trains on all workers; batches are those of one rank. See PyTorchDDPTrainer.fit()."""
        arguments = (self.model, self.settings, self.optimizer, train_loader, val_loader, options)
        if self.num_workers == 1:
            self.history, _ = _fit(*arguments)
        else:
            results = launch(
                _fit, *arguments, num_workers=self.num_workers, cpus_per_worker=self.cpus_per_worker
            )
            self.history, weights = results[0]
            self.model.load_state_dict(weights)
        return self.history

    train = fit

    @property
    def best_accuracy(self) -> float | None:
        """The best of all epochs, on the validation set."""
        return self.history.best_accuracy


def from_settings(model: Any, optimizer: Any = None, **settings: Any) -> RayTrainer:
    """The trainer of a DistributedConfig's settings."""
    settings.pop("backend", None)
    from ..distributed import DistributedConfig

    return RayTrainer(
        model,
        {"num_workers": DistributedConfig(**settings).workers(1), **settings},
        optimizer=optimizer,
    )


def _fit(
    model: Any,
    settings: dict[str, Any],
    optimizer: Any,
    train_loader: Any,
    val_loader: Any,
    options: dict[str, Any],
) -> tuple[History, dict[str, Any]]:
    """RayTrainer.fit() on a rank: the history, and the weights that it ends with (on rank 0)."""
    from . import PyTorchDDPTrainer

    torch_optimizer = optimizer and optimizer(model.parameters())
    trainer = PyTorchDDPTrainer(model, optimizer=torch_optimizer, **settings)
    history = trainer.fit(train_loader, val_loader, **options)
    return history, dict(model.state_dict()) if trainer.comm.rank == 0 else {}
