"""Compiled kernels: found, compiled, checked, packed.

| file | what it is |
|---|---|
| library.py | the cache of compiled kernels: which library fits these sources and this processor, and is it whole |
| compiler.py, gpus.py | runs Mojo's compiler; which GPUs a machine has |
| folder.py, pack.py | a self-contained folder of kernels, package and launcher: checked; made |
| targets.py, elf.py | what a library was compiled for; which libraries it needs |
"""

from .compiler import source_root

__all__ = ["source_root"]
