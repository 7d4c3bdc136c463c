"""Tensors and their ops, the program that is recorded of a step, and the compiled kernels that run it."""
