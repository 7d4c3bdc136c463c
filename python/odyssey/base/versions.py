"""Versions of the packages that a run needs, as every rank and every machine must have them."""

from __future__ import annotations

import sys

from .launcher import mpi_library


def version(package: str) -> str:
    """Returns the installed version of a package, "none" if it is not installed."""
    loaded_version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(loaded_version, str):
        return loaded_version  # reading the metadata of a distribution takes longer
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """Returns what must be the same on all ranks; "MPI" is "none" before this process starts it."""
    mpi = sys.modules.get("odyssey.comm.mpi")
    return {
        "odyssey": version("odyssey"),
        "Python": ".".join(map(str, sys.version_info[:2])),
        "numpy": version("numpy"),
        "mpi4py": version("mpi4py"),
        "MPI": "none" if mpi is None else mpi_library(mpi.MPI.Get_library_version()),
    }
