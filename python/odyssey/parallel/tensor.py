"""`odyssey.parallel.tensor_parallel` by the name that it had before."""

import sys

from . import tensor_parallel as _module
from .tensor_parallel import *  # noqa: F403

sys.modules[__name__] = _module
