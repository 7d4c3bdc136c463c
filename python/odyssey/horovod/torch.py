"""`odyssey.torch.horovod` under the name that Horovod's scripts have in mind."""

import sys

from ..torch import horovod

sys.modules[__name__] = horovod
