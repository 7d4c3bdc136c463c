"""A base class of objects that can't be copied, because they hold threads, connections or
addresses of memory.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ConfigError


def refuse(value: Any, instead: str) -> NoReturn:
    """Raises the ConfigError about a copy of an object. `instead` is what to do."""
    raise ConfigError(
        f"[copy] a {type(value).__name__} can't be copied or pickled, because it holds threads, "
        "connections or "
        f"addresses of memory; {instead}"
    )


class Uncopied:
    """Raises a ConfigError for `copy.copy`, `copy.deepcopy` and pickle."""

    copy_instead = "create another one"

    def __copy__(self) -> NoReturn:
        refuse(self, self.copy_instead)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse(self, self.copy_instead)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse(self, self.copy_instead)
