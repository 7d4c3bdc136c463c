"""Tensors and their ops, the program that is recorded of a step, and the compiled kernels that run it.

| file | what it is |
|---|---|
| native.py, gpu_native.py | the C interface of the compiled kernels: for processors, for GPUs; the table of ops |
| tensor.py, functional.py | tensors and their gradients; every op's shape rule and derivative, once |
| program.py | a step as a list of kernel calls: recorded, made shorter, placed in memory, run |
| arena.py | all parameters in one buffer |
| precision.py, norm.py, fingerprint.py | mixed precision; the norm of gradients; sums that bits are compared by |
| placement.py, recipes.py, settings.py | devices; defaults; every setting of a training, declared once |
| own_ops.py | `odyssey.load_ops` |
"""
