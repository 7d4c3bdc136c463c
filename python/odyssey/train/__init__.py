"""Training: `DistributedTrainer`, its session of epochs and steps, what it saves and resumes from.

docs/data-flow.md says what each file is. `python -m odyssey.train` is `odyssey train`.
"""

from typing import TYPE_CHECKING

from ..base.lazy import attach

if TYPE_CHECKING:
    # so that the site's reference finds the methods of torch's trainer
    from .trainer_base import Trainer as Trainer

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "train.agreement": "agreement",
        "train.arithmetic": "ARITHMETIC NOT_REPEATABLE Arithmetic repeats_itself",
        "train.captured": "roots_of",
        "train.feed": "BatchFeed",
        "train.loader_state": "PROCESS_GENERATORS ProcessGenerator",
        "train.rank_checks": "RankChecks compare_settings",
        "train.sharing": "BatchSharing",
        "train.stepper": "Stepper",
        "train.batches": "batch_of check_batches check_sampler in_batches own_steps",
        "train.numerics": "check_replicas",
        "train.progress": "progress",
        "train.resume": "by_first resume spread",
        "train.trained_models": "trained_models",
        "train.trainer_base": "Trainer",
        "train.state": "CAPTURED as_json",
        "train.construction": "shard_size_of",
        "train.trainer": "DistributedTrainer",
        "train.whole_set": "WholeSet split_metrics",
    },
)
