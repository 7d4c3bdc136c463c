"""Batches and outputs as Hugging Face has them: batches that are dicts, outputs that hold a loss
and logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import ConfigError

IGNORED = -100  # a label of a token that has no loss
#: Parts of the names of classes whose loss is the mean over the labels that aren't IGNORED.
_MEAN_OVER_LABELS = re.compile(
    "For(CausalLM|ConditionalGeneration|MaskedLM|SequenceClassification|TokenClassification)"
    "|LMHeadModel"
)


def label_counter(module: Any) -> Callable[[Any, Any], Any] | None:
    """Returns a function of (output, batch) that counts the labels over which a model takes the
    mean of its losses; None if the class of the model isn't one that is known to do so.

    A model that predicts the next token doesn't use the first label of a text.
    """
    base = module.get_base_model() if hasattr(module, "get_base_model") else module  # of PEFT
    names = [kind.__name__ for kind in type(getattr(base, "_orig_mod", base)).__mro__]
    name = next(filter(_MEAN_OVER_LABELS.search, names), None)
    config = getattr(base, "config", None)
    if name is None or not hasattr(config, "model_type"):
        return None
    is_decoder = not getattr(config, "is_encoder_decoder", False)
    first = int(
        "ForCausalLM" in name
        or (name.endswith("LMHeadModel") and "With" not in name and "XLNet" not in name)
        or ("ForConditionalGeneration" in name and is_decoder)
    )

    def count_labels(out: Any, batch: Any) -> Any:
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        used = labels[:, first:] if labels.dim() > 1 else labels
        return (used != IGNORED).sum()

    return count_labels


def is_whole(x: Any, y: Any) -> bool:
    """Returns whether the inputs are a whole batch, a dict that holds the targets as well: then
    there are no others.
    """
    return isinstance(x, dict) and isinstance(y, tuple) and not y


def field(out: Any, name: str) -> Any:
    """An attribute of an output, or an entry where the output is a dict; None where it has
    neither.
    """
    return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)


def loss(out: Any) -> Any:
    """The loss in an output. Raises ConfigError: it has none."""
    model_loss = field(out, "loss")
    if model_loss is None:
        raise ConfigError(
            f"[torch] the batch is a dict and the output, a {type(out).__name__}, has no loss; "
            "give batches with the "
            "labels that the model computes it from, or the trainer loss=lambda output, batch: ..."
        )
    return model_loss


def predictions(out: Any) -> Any:
    """The logits of an output that has some, else the output."""
    logits = None if isinstance(out, torch.Tensor) else field(out, "logits")
    return out if logits is None else logits


def compared(out: Any, y: Any) -> tuple[Any, Any]:
    """Returns what metrics compare: output and target; of a batch that is a dict the logits and
    the labels, both of shape (B,) where the model gives one number per sample. Raises
    ConfigError: there are none.
    """
    if not isinstance(y, dict):
        return out, y
    logits = field(out, "logits")
    labels = y.get("labels")
    if logits is None or labels is None:
        raise ConfigError(
            "[torch] metrics by name compare the output's logits with batch['labels'], and these "
            "are not there; give metrics={name: function of (output, batch)}"
        )
    return (logits.squeeze(-1) if logits.shape == (*labels.shape, 1) else logits), labels
