"""Objects as bytes: JSON with tensors behind it. The one place that pickles, where the caller wrote allow_pickle=True.

What it is not: a file format for sharing; horovod.py sends it between ranks, elastic.py keeps it beside a run.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, DataError
from .c10d import host

_JSON, _PICKLE = b"J", b"P"


def encode(value: Any, allow_pickle: bool = False) -> bytes:
    """A value as bytes: numbers, texts, None, lists, tuples, dictionaries (keys: texts, integers) and tensors.

    Raises:
        ConfigError: something else is in it, and allow_pickle is False.
    """
    tensors: list[bytes] = []

    def plain(v: Any) -> Any:
        if v is None or isinstance(v, (bool, int, float, str)):
            return v
        if isinstance(v, torch.Tensor):
            values = host(v)
            tensors.append(values.reshape(-1).view(torch.uint8).numpy().tobytes())
            return {"tensor": [str(v.dtype).removeprefix("torch."), list(v.shape)]}
        if type(v) in (list, tuple):
            return {type(v).__name__: [plain(x) for x in v]}
        if isinstance(v, dict) and all(type(k) in (str, int) for k in v):
            return {"dict": [[k, plain(x)] for k, x in v.items()]}
        raise TypeError(type(v).__name__)

    try:
        text = json.dumps(plain(value)).encode()
    except TypeError as e:
        if not allow_pickle:
            raise ConfigError(
                f"[horovod] an object of type {e} is not sent: only JSON's types and tensors are, unless you write "
                "allow_pickle=True (unpickling runs what the sender says)"
            ) from None
        import pickle

        return _PICKLE + pickle.dumps(value)
    return _JSON + len(text).to_bytes(8, "little") + text + b"".join(tensors)


def decode(data: bytes, allow_pickle: bool = False) -> Any:
    """What `encode` was given.

    Raises:
        DataError: it is not what `encode` writes.
        ConfigError: it is pickled, and allow_pickle is False.
    """
    if data[:1] == _PICKLE:
        if not allow_pickle:
            raise ConfigError("[horovod] another rank sent a pickled object; write allow_pickle=True on all ranks")
        import pickle

        return pickle.loads(data[1:])  # noqa: S301 - the caller asked for it
    at = 9 + int.from_bytes(data[1:9], "little")

    def value(v: Any) -> Any:
        nonlocal at
        if not isinstance(v, dict):
            return v
        ((kind, inner),) = v.items()
        if kind == "tensor":
            dtype, shape = getattr(torch, inner[0]), inner[1]
            count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            raw = torch.frombuffer(bytearray(data[at : at + count]), dtype=torch.uint8) if count else torch.empty(0)
            at += count
            return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        if kind == "dict":
            return {k: value(x) for k, x in inner}
        return {"list": list, "tuple": tuple}[kind](value(x) for x in inner)

    try:
        if data[:1] != _JSON or at > len(data):
            raise ValueError("no header")
        found = value(json.loads(data[9:at]))
        if at != len(data):
            raise ValueError("bytes are missing, or left over")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
        raise DataError(f"[horovod] this is no object as ranks send them: {e}") from None
