"""`python -m odyssey.launch`: command_line.py. No code of its own."""

from .command_line import main

if __name__ == "__main__":
    main()
