"""`odyssey.core.functional` by PyTorch's path: `import odyssey.nn.functional as F`.

It is the same object as that module; see odyssey/functional.py.
"""

import sys

from ..core import functional as _module
from ..core.functional import *  # noqa: F403

sys.modules[__name__] = _module
