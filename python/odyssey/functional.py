"""`odyssey.core.functional` by the name that users import: `import odyssey.functional as F`.

All modules of this form are the same object as the module that they stand for, so a test that
patches a name by one path patches it for both. `import *` is for type checkers, and for a thread
that imports this while another one does.
"""

import sys

from .core import functional as _module
from .core.functional import *  # noqa: F403

sys.modules[__name__] = _module
