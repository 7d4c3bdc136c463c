"""Decisions before a trainer is built: settings, ranks, devices; and what is refused by then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import comm as communication
from ..base import launcher
from ..comm.cores import default_threads
from ..compile import gpus
from ..core.fingerprint import hash_of
from ..core.products import fits_winograd
from ..errors import ConfigError, DeviceError, check_kind
from ..nn import CrossEntropyLoss, Module, PipelineParallel
from ..nn.models import MODELS
from ..nn.module import Parameter
from ..optim import Optimizer
from ..optim.optimizers import BY_NAME
from ..parallel.mesh import PARTS, Mesh
from ..parallel.strategy import MODES, Strategy
from ..settings import declarations as declaration
from ..settings.declarations import Training

FP16_SETTINGS = ("scaler_init_scale", "scaler_growth_interval")


def make_settings(num_gpus: int | None, backend: str, keywords: dict[str, Any]) -> Training:
    """Returns the checked settings of a trainer.

    Raises ConfigError: one is unknown or not allowed.
    """
    if keywords.get("precision") != "fp16":  # the same call may serve every precision
        keywords = {k: v for k, v in keywords.items() if k not in FP16_SETTINGS}
    return declaration.make_settings(
        Training, {"num_gpus": num_gpus, "backend": backend, **keywords}
    )


def check_arguments(model: Any, optimizer: Any, schedule: Any, mesh: Any) -> None:
    """Raises ConfigError for arguments of another kind than a trainer takes."""
    models = {name: f"nn.models.build({name!r})" for name in MODELS}
    optimizers = {name: f"optim.{kind.__name__}()" for name, kind in BY_NAME.items()}
    check_kind("train", "model", model, Module, "a subclass of ", by_name=models)
    check_kind("train", "optimizer", optimizer, Optimizer, "a subclass of ", by_name=optimizers)
    if schedule is not None and not callable(schedule):
        raise ConfigError(
            f"[train] schedule is {schedule!r}; give a function, such as optim.cosine(total_steps)"
        )
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"[train] mesh is {mesh!r}; give Mesh(dp=, pp=, tp=)")


def completed(
    settings: Training,
    model: Module,
    devices: tuple[int, ...],
    comm: communication.Communicator,
) -> Training:
    """Returns the settings with a value for each that was left to odyssey."""
    settings = dataclasses.replace(
        settings,
        num_gpus=settings.num_gpus or 1,
        device="gpu" if devices else "cpu",
        threads=settings.threads or default_threads(comm.local_size),
        shard_size=shard_size_of(model, settings.shard_size),
        pipeline_schedule=settings.pipeline_schedule or getattr(model, "schedule", None) or "1f1b",
    )
    declaration.check(Training, {"pipeline_schedule": settings.pipeline_schedule})
    return settings


def conv_algorithm_of(settings: Training, parameters: Iterable[Parameter]) -> str:
    """Returns how convolutions are computed: "direct" or "winograd".

    "auto" is Winograd's algorithm for models that have a convolution for it, and only on CPUs and
    in fp32.

    settings: completed.
    """
    if settings.conv_algorithm != "auto":
        return settings.conv_algorithm
    allowed = settings.device == "cpu" and settings.precision == "fp32"
    return "winograd" if allowed and any(fits_winograd(p.shape) for p in parameters) else "direct"


def make_strategy(settings: Training, mesh: Mesh) -> Strategy:
    """Returns how gradients are summed. Raises ConfigError where that can't be done."""
    strategy = declaration.part(Strategy, settings)
    strategy.check(mesh, settings.zero, settings.precision)
    if strategy.reduction in MODES and settings.nonfinite != "stop":
        raise ConfigError(
            f"[train] nonfinite is {settings.nonfinite!r}, but with "
            f"reduction={settings.reduction!r} a rank's step is its own; use 'stop'"
        )
    return strategy


def make_loss(loss: Any, model: Module) -> Any:
    """Returns the loss of a training: as given, the model's own, or cross-entropy.

    Raises ConfigError: it is no function that gives a mean.
    """
    loss = loss or getattr(model, "loss", None) or CrossEntropyLoss()
    if not callable(loss) or isinstance(loss, type):
        name = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise ConfigError(
            f"[train] loss is {name}; give a function of (output, target), such as nn.MSELoss()"
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ConfigError(
            f"[train] the loss has reduction={reduction!r}, but trainers divide by the global "
            "batch; use 'mean'"
        )
    return loss


def check_weight(weight: Any, reduction: str) -> None:
    """Raises ConfigError: weight is no function, or ranks take steps of their own."""
    if weight is None:
        return
    if not callable(weight):
        raise ConfigError(
            f"[train] weight is {weight!r}; use a function of (output, target), such as "
            "lambda output, target: target >= 0"
        )
    if reduction in MODES:
        raise ConfigError(
            f"[train] weight= isn't supported with reduction={reduction!r}, whose ranks divide "
            "apart; use reduction='tree'"
        )


def shard_size_of(model: Module, shard_size: int | None) -> int | None:
    """The shard size of a training: as given, or as the model's micro-batches are; None: by its
    global batch. Raises ConfigError: two different numbers are given.
    """
    micro = getattr(model, "micro_batch_size", None)
    if micro is not None and shard_size is not None and micro != shard_size:
        raise ConfigError(
            f"[train] shard_size is {shard_size} and the model's micro_batch_size {micro}; "
            "a micro-batch is a shard: give one of them"
        )
    return shard_size if micro is None else micro


def places(model: Module) -> int:
    """On how many devices a model is placed; 1 also for one without parameters, which the arena
    refuses.
    """
    if isinstance(model, PipelineParallel):
        return len(set(model.places))
    return len({d.slot for p in model.parameters() for d in p.places.values() or [p.device]}) or 1


def check_shared(mesh: Mesh, precision: str) -> None:
    """ConfigError, before anything is recorded, for what tensor parallelism cannot share."""
    if mesh.tp > PARTS:
        raise ConfigError(
            f"[mesh] tp is {mesh.tp}; sums are cut in {PARTS} parts, so 1 to {PARTS} is allowed; "
            "raise --dp or --pp instead"
        )
    if mesh.tp > 1 and precision != "fp32":
        raise ConfigError(
            f"[mesh] {mesh} with precision {precision}: only float32 products are shared; "
            "use --precision fp32, or --tp 1"
        )


def connect(backend: str, device: str, num_gpus: int | None) -> communication.Communicator:
    """The ranks that a backend connects; "nccl" in a single process is its GPUs.

    Raises DeviceError: a single process asks for them, and this machine has none.
    """
    launch = launcher.launched()
    if (
        backend != "nccl"
        or num_gpus is None
        or device == "cpu"
        or (launch is not None and launch.size > 1)
    ):
        return communication.world(backend)
    if not gpus.count():
        raise DeviceError(
            f"[train] backend='nccl' with num_gpus={num_gpus} in one process needs GPUs, and no "
            "GPU was found on this machine; use backend='auto', which takes CPU workers then"
        )
    return communication.world("local")


def choose_devices(
    device: str, num_gpus: int | None, comm: communication.Communicator, oversubscribe: bool
) -> tuple[tuple[int, ...], str | None]:
    """The GPU of each worker of this process, none for CPU workers; and what the user should
    know, in one line. Raises DeviceError: GPUs were asked for that are not there.
    """
    if device == "cpu" or (device == "auto" and num_gpus is None):
        return (), None
    gpu_count = gpus.count()
    has_own_gpus = False
    if comm.size > 1:  # what each rank sees: the same GPUs as its neighbours, or GPUs of its own
        uuids_hash = hash_of([gpu.uuid for gpu in gpus.found()])
        everyone = comm.all_gather(np.array([gpu_count, uuids_hash], np.int64))
        if (everyone[:, 0] > 0).any() and (everyone[:, 0] == 0).any():
            gpuless_rank, gpu_rank = (
                int(np.flatnonzero((everyone[:, 0] > 0) == s)[0]) for s in (False, True)
            )
            raise DeviceError(
                f"[gpu] rank {gpuless_rank} sees no GPU and rank {gpu_rank} has some; start all "
                "ranks alike, or use --device cpu"
            ).on_all_ranks()
        has_own_gpus = (
            gpu_count > 0 and comm.local_size > 1 and len(set(everyone[:, 1].tolist())) == comm.size
        )
    if not gpu_count:
        if device == "gpu":
            raise DeviceError(
                "[train] device is 'gpu' but this machine has none; use --device cpu or auto"
            )
        return (), f"no GPU found: {num_gpus} CPU workers are used"
    from ..engine.gpu.group import devices

    return tuple(
        devices(
            gpu_count, num_gpus or 1, comm.local_rank, comm.local_size, oversubscribe, has_own_gpus
        )
    ), None
