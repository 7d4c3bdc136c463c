"""Horovod's shape of names: `import odyssey.horovod.torch as hvd` is `odyssey.torch.horovod`."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError


def run(*arguments: Any, **named: Any) -> None:
    """Refused: functions are not sent to processes here."""
    raise ConfigError(
        "[horovod] run(function, np=4) is not there; start a script with `odyssey launch -n 4 "
        "script.py`"
    )
