"""Packages that odyssey needs, and the command that installs those that are missing.

The distribution is `ml-odyssey`, the import is `odyssey`. The package index has another project's
`odyssey` and no `ml-odyssey` yet, so a message names the packages that are missing themselves. That
is right in a checkout, after an installation from a wheel's file, and in a folder of `odyssey build
--output`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

DISTRIBUTION = "ml-odyssey"
FILE_NAME = "ml_odyssey"  # how names of wheels and of metadata spell it
REINSTALL = f"install {DISTRIBUTION} again, from its wheel or checkout"

#: Copies of lines of pyproject.toml, which an installed package does not have; a test compares
#: them.
DEPENDENCIES = {
    "max": "max==26.7.0",
    "mpi4py": "mpi4py>=4.0,<5",
    "mpich": "mpich>=4.2",
    "numpy": "numpy>=1.26,<3",
    "safetensors": "safetensors>=0.5,<1",
}
EXTRAS = {
    "export": ("onnx>=1.16",),
    "image": ("pillow>=10",),
    "ray": ("ray>=2.40", "torch>=2.4"),
    "text": ("tokenizers>=0.20",),
    "torch": ("torch>=2.4",),
    "track": ("tensorboardX>=2.6",),
    "tune": ("optuna>=4",),
}


def install_extra(extra: str) -> str:
    """Returns the command that installs the packages of an extra of pyproject.toml."""
    return shlex.join(["pip", "install", *EXTRAS[extra]])


def install_packages(names: Iterable[str]) -> str:
    """Returns the command that installs packages, those that odyssey depends on in a version
    that it takes.
    """
    return shlex.join(["pip", "install", *(DEPENDENCIES.get(name, name) for name in names)])
