"""`python -m odyssey.cli`: the same as the command `odyssey`."""

from . import main

main(prog_name="odyssey")
