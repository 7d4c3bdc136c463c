"""Pure kernels, one file per family of ops. No state, no Python, no allocation."""
