"""Arguments of a trainer of a torch module that are refused, each with its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, check_kind
from ..parallel import MODES
from ..settings import Training

OWN_MODEL_SETTINGS = (
    "num_gpus oversubscribe execution pipeline_schedule bucket_size_mb overlap lr_scaling "
    "conv_algorithm offload"
).split()

OPTIMIZERS = {
    name.lower(): f"torch.optim.{name}(module.parameters())" for name in ("Adam", "AdamW", "SGD")
}


def check_arguments(
    training: Training, module: Any, optimizer: Any, loss: Any, scheduler: Any, interval: str
) -> None:
    """ConfigError for what cannot be trained with, by name."""
    for label, argument, kind in (
        ("module", module, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
    ):
        check_kind("torch", label, argument, kind, "torch's ", by_name=OPTIMIZERS)
    name = type(optimizer).__name__
    module_ids = {id(p) for p in module.parameters()}
    defaults = {f.name: f.default for f in dataclasses.fields(Training)}
    key = next((n for n in OWN_MODEL_SETTINGS if getattr(training, n) != defaults[n]), "")
    optim = torch.optim
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    groups = optimizer.param_groups
    foreign_scheduler = (
        scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer
    )
    foreign_parameters = any(id(p) not in module_ids for group in groups for p in group["params"])
    for wrong, says in (
        (
            isinstance(optimizer, optim.LBFGS),
            "LBFGS runs the model several times in a step; use SGD or AdamW",
        ),
        (
            isinstance(optimizer, optim.SparseAdam),
            "SparseAdam needs sparse gradients, which no tree adds; use Adam",
        ),
        (
            foreign_parameters,
            f"{name} has parameters that are not the module's; make it of module.parameters()",
        ),
        (
            any(isinstance(group["lr"], torch.Tensor) for group in groups),
            f"{name}'s lr is a tensor; give a number",
        ),
        (
            isinstance(scheduler, plateau),
            "scheduler is a ReduceLROnPlateau of torch, which needs a metric at each step(); use "
            "fit(callbacks=[odyssey.callbacks.ReduceLROnPlateau()])",
        ),
        (
            foreign_scheduler,
            f"scheduler is {type(scheduler).__name__}; give a torch scheduler of this optimizer",
        ),
        (
            loss is not None and (isinstance(loss, type) or not callable(loss)),
            f"loss is {loss!r}; give a function of (output, target) or an object such as "
            "nn.CrossEntropyLoss()",
        ),
        (
            interval not in ("step", "epoch"),
            f"scheduler_interval is {interval!r}; choose from step, epoch",
        ),
        (
            key,
            f"{key}={getattr(training, key, None)!r} is a setting of our own models; leave it out",
        ),
        (
            training.precision == "tf32",
            "precision is 'tf32'; use 'fp32' and torch.set_float32_matmul_precision('high')",
        ),
        (
            training.device == "gpu",
            "device is 'gpu', and torch modules are trained on CPUs; use device='cpu'",
        ),
        (
            training.zero > 1 and (training.reduction != "tree" or training.compression),
            f"zero={training.zero} has sums of its own along the tree; leave reduction and "
            "compression out, or use zero=1",
        ),
        (
            training.zero > 1 and training.rebalance,
            f"zero={training.zero} takes shards in rounds of all ranks; rebalance=False",
        ),
        (
            training.zero == 3
            and any(
                type(m).__name__ == "OptimizedModule" or m._compiled_call_impl
                for m in module.modules()
            ),
            "zero=3 looks at each operation, which torch.compile joins; use zero=2, or the "
            "module as it is",
        ),
        (
            training.zero and not type(optimizer).__module__.startswith("torch.optim"),
            f"zero={training.zero} with {name}: only torch.optim's optimizers are known to go by "
            "parameter; use zero=0",
        ),
        (
            training.reduction in MODES,
            f"reduction={training.reduction!r}: ranks take every step together here; use 'tree'",
        ),
    ):
        if wrong:
            raise ConfigError(f"[torch] {says}")


def check_weight(weight: Any, loss: Any, gather: bool) -> None:
    """Raises ConfigError: `weight` is no function, or the loss has no use for it."""
    if weight is None:
        return
    problem = None
    if not callable(weight):
        problem = f"is {weight!r}; use a function of (output, target)"
    elif gather:
        problem = (
            "can't be combined with gather=True, which computes the loss of the whole batch; use "
            "one of them"
        )
    elif getattr(loss, "reduction", "mean") == "sum":
        problem = (
            "can't be combined with a loss of reduction='sum', which is divided by the samples; "
            "use reduction='mean'"
        )
    if problem is not None:
        raise ConfigError(f"[torch] weight {problem}")
