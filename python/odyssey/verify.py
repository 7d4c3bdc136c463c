"""`odyssey.audit.verify` by the name that users import."""

import sys

from .audit import verify as _module
from .audit.verify import *  # noqa: F403

sys.modules[__name__] = _module
