"""Arrays of which this rank has a part that no other rank has: they can be read, and say how
they are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ConfigError


class Guarded(np.ndarray):
    """A read-only view. What is computed from it is an ordinary array."""

    def _refuse(self) -> None:
        raise ConfigError(
            "[train] ranks have parts of the weights and of the optimizer's state on this layout, "
            "so a write on one would be lost; write within `with trainer.writing():`, on all ranks"
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse()

    def fill(self, value: Any) -> None:
        self._refuse()

    # A copy has its own memory, so it can be written.

    def copy(self, order: Any = "C") -> np.ndarray:  # type: ignore[override]
        return np.array(self, order=order)

    def __copy__(self) -> np.ndarray:
        return np.array(self)

    def __deepcopy__(self, memo: Any) -> np.ndarray:
        return np.array(self)

    def __reduce__(self) -> Any:
        return np.array(self).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return np.array(self).__reduce_ex__(protocol)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **kwargs: Any
    ) -> Any:
        if any(isinstance(a, Guarded) for a in out):
            self._refuse()
        plain = [a.view(np.ndarray) if isinstance(a, Guarded) else a for a in inputs]
        return getattr(ufunc, method)(*plain, **({"out": out} if out else {}), **kwargs)


def guarded(array: np.ndarray) -> np.ndarray:
    """A view of an array that cannot be written."""
    view = array.view(Guarded)
    view.flags.writeable = False
    return view
