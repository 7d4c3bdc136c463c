"""Entry point that `import torch` loads (group torch.backends): the name of the backend "odyssey".

A file beside the package, so that a program that does not ask for the backend imports nothing of
odyssey.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Makes `init_process_group("odyssey")` known to torch.distributed; once per process."""
    import torch.distributed as dist

    if dist.is_available() and "odyssey" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "odyssey", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, backend_options: Any) -> Any:
    from odyssey.torch import c10d

    return c10d.create(options, backend_options)
