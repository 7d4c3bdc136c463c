"""Whether less or more of a metric is better, by its name: one rule for callbacks and searches."""

from __future__ import annotations

import re

# Words of names. The last word that is in one of the sets decides: "top5_error" is an error.
_MINIMIZED = frozenset(
    "loss error err mae mse msle rmse rmsle mape smape nll perplexity ppl bits wer cer brier ece "
    "deviance divergence kl seconds".split()
)
_MAXIMIZED = frozenset(
    "accuracy acc f1 fbeta precision recall sensitivity specificity auc auroc auprc map r2 "
    "correlation pearson spearman kappa mcc iou dice bleu rouge psnr ssim reward".split()
)
# Ends of words that are written together, such as "logloss".
_MINIMIZED_ENDS = ("loss", "error")
_MAXIMIZED_ENDS = ("accuracy",)


def direction_of(name: str) -> str | None:
    """Returns "minimize" if less of a metric is better, "maximize" if more is, by its name.

    None if the name has no word that says so. The last such word decides, so less of "top5_error"
    is better. "test_mae" and "val/MAE" are alike.

        direction_of("test_mae"), direction_of("test_f1"), direction_of("test_mine")
        # "minimize", "maximize", None
    """
    direction = None
    for word in re.findall("[a-z]+[0-9]*", name.lower()):
        if word in _MINIMIZED or word.endswith(_MINIMIZED_ENDS):
            direction = "minimize"
        elif word in _MAXIMIZED or re.fullmatch(r"top\d+", word) or word.endswith(_MAXIMIZED_ENDS):
            direction = "maximize"
    if name.lower().endswith("_per_second"):
        direction = "maximize"
    return direction
