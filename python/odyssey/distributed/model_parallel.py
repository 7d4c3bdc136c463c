"""Other platforms' name for layers that ranks share: `DistributedTrainer(model, optimizer,
mesh=TensorParallel(2))`.
"""

from ..parallel.mesh import Mesh


def TensorParallel(size: int) -> Mesh:
    """`Mesh(tp=size)`: `size` ranks share each layer, the others are replicas
    (docs/tensor-parallel.md).
    """
    return Mesh(tp=size)
