"""Public names of a package that are loaded when they are first used, so that importing the
package costs little.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def attach(
    package: str, homes: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    homes: modules below `odyssey` -> their names, with spaces between; a name after the module's
    own is the module.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"odyssey.{home[name]}")
        return module if home[name].rpartition(".")[2] == name else getattr(module, name)

    return get, lambda: sorted(home), sorted(home)
