"""Objects as trees of JSON's values and arrays.

The one place that pickles, if the caller wrote allow_pickle=True.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from ..distributed import array_of
from ..errors import ConfigError, DataError


def packed(value: Any, allow_pickle: bool = False) -> Any:
    """A value as such a tree: numbers, texts, None, lists, tuples, dictionaries (keys: texts,
    integers) and tensors. Arrays share the memory of tensors on the CPU. Raises ConfigError:
    it has something else, and no allow_pickle.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        raw = array_of(value).reshape(-1).view(np.uint8)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), raw]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [packed(v, allow_pickle) for v in value]}
    if isinstance(value, dict) and all(type(k) in (str, int) for k in value):
        return {"dict": [[k, packed(v, allow_pickle)] for k, v in value.items()]}
    if not allow_pickle:
        raise ConfigError(
            f"[horovod] a {type(value).__name__} is not sent: only JSON's types and tensors are, "
            "unless you write allow_pickle=True (unpickling runs what the sender says)"
        )
    return {"pickle": np.frombuffer(pickle.dumps(value), np.uint8)}


def unpacked(tree: Any, allow_pickle: bool = False) -> Any:
    """Returns what `packed` was given; tensors have memory of their own.

    Raises DataError: it is not what `packed` gives. ConfigError: it is pickled, and allow_pickle is
    False.
    """
    if not isinstance(tree, dict):
        return tree
    try:
        ((kind, inner),) = tree.items()
        if kind == "tensor":
            dtype, shape, raw = inner
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
            return tensor
        if kind == "dict":
            return {k: unpacked(v, allow_pickle) for k, v in inner}
        if kind == "pickle" and not allow_pickle:
            raise ConfigError(
                "[horovod] another rank sent a pickled object; write allow_pickle=True on all ranks"
            )
        if kind == "pickle":
            return pickle.loads(inner.tobytes())  # noqa: S301 - the caller asked for it
        return {"list": list, "tuple": tuple}[kind](unpacked(v, allow_pickle) for v in inner)
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
        raise DataError(f"[horovod] this is no object as ranks send them: {e}") from None
