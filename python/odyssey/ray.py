"""`odyssey.torch.ray` by the name that users import. It needs Ray."""

import sys

from .torch import ray as _module
from .torch.ray import *  # noqa: F403

sys.modules[__name__] = _module
