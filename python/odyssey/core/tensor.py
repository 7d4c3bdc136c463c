"""Tensors with all their ops, for everything above: the class is in tape.py, ops and operators
in functional.py.
"""

from . import functional  # noqa: F401 - gives Tensor its operators and methods
from .tape import *  # noqa: F403
from .tape import __all__ as __all__
