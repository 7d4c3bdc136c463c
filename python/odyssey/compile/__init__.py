"""Compiled kernels: found, compiled, checked, packed. docs/data-flow.md says what each file is."""

from .compiler import source_root

__all__ = ["source_root"]
