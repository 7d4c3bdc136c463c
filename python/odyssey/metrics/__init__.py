"""Metrics of the whole set: `F1`, `Precision`, `Recall`, `AUC`, `R2`, `Correlation`, and `Gathered`
for any function.

    from odyssey import metrics
    trainer = DistributedTrainer(net, optimizer, metrics={"f1": metrics.F1(), "auc": metrics.AUC()})

The mean of the F1 of shards isn't the F1 of all samples. So these objects keep counts or values of
all samples, and compute the metric at the end of an epoch or an evaluation (docs/losses.md).
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "metrics.base": "Metric check_methods is_of_whole_set",
        "metrics.direction": "direction_of",
        "metrics.classes": "AUC F1 Precision Recall",
        "metrics.means": "check_mean",
        "metrics.numbers": "Correlation R2",
        "metrics.gathered": "Gathered",
    },
)
