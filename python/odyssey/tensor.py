"""`odyssey.core.tensor` by the name that users import."""

import sys

from .core import tensor as _module
from .core.tensor import *  # noqa: F403

sys.modules[__name__] = _module
