"""A decorator of classes whose objects can't be copied, because they hold threads, connections or
addresses of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError

_Class = TypeVar("_Class", bound=type)


def refuse(value: Any, instead: str) -> NoReturn:
    """Raises the ConfigError about a copy of an object. `instead` is what to do."""
    raise ConfigError(
        f"[copy] a {type(value).__name__} can't be copied or pickled, because it holds threads, "
        f"connections or addresses of memory; {instead}"
    )


def uncopied(instead: str = "create another one") -> Callable[[_Class], _Class]:
    """Decorates a class so that `copy.copy`, `copy.deepcopy` and pickle of its objects raise a
    ConfigError.

        @uncopied("open the file again")
        class Reader: ...

    Args:
        instead: what the error says to do.
    """

    def refuse_copy(self: Any, *_: Any) -> NoReturn:
        refuse(self, instead)

    def decorate(decorated: _Class) -> _Class:
        for name in ("__copy__", "__deepcopy__", "__reduce_ex__"):
            setattr(decorated, name, refuse_copy)
        return decorated

    return decorate
