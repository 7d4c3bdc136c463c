"""Training neural networks from Mojo: a typed face over the Python package (face/), and beside it what computes.

    from shared.training import DistributedTrainer, LeNet5, SGD

Layers, tensors and models have their sizes and places in their types (docs/mojo.md). What is recorded of a model runs
natively (executor.mojo, ops.mojo, gpu.mojo); these files import nothing of the face, and no step goes through it.
"""

from .face import *
