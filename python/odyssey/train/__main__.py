"""`python -m odyssey.train`: the same command as `odyssey train`, for launchers that start a
module; nothing more.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # until the training begins: what a start makes stays, and looking through it is a tenth of the
    # time
    gc.disable()

from odyssey import cli  # noqa: E402

from ..cli.commands import train  # noqa: E402

if __name__ == "__main__":
    cli.main(prog_name="python -m odyssey.train", command=train.command)
