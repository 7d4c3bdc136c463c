"""`python -m odyssey.train`: the same command as `odyssey train`, for launchers that start a module; nothing more."""

from __future__ import annotations

from typing import NoReturn

from odyssey import cli
from odyssey.commands import train


def main() -> NoReturn:
    """Run `odyssey train` with this process's arguments."""
    cli.main(prog_name="python -m odyssey.train", command=train.command)


if __name__ == "__main__":
    main()
