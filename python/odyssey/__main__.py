"""`python -m odyssey`: the same as the command `odyssey`. No code of its own."""

from __future__ import annotations

from odyssey.cli import main

if __name__ == "__main__":
    main(prog_name="python -m odyssey")
