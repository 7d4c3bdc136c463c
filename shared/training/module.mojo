"""Module: what a model, or a part of one, has to be."""

from .parameter import Parametric
from .tensor import AnyTensor


trait Module(Parametric):
    """A model, or a part of one: layers and modules as fields, and `forward`, which is traced once.

    A struct needs `comptime Input = Tensor[...]`, `comptime Output = Tensor[...]`, an `__init__` without arguments'
    worth of its layers, and `def forward(self, x: Self.Input) raises -> Self.Output`.
    """

    comptime Input: AnyTensor
    """What forward() takes: a tensor type with the shape of one sample and its place."""
    comptime Output: AnyTensor
    """What it returns."""

    def forward(self, x: Self.Input) raises -> Self.Output:
        """What the module computes; backward passes are derived from it.

        Args:
            x: The input.

        Returns:
            The output.

        Raises:
            Error: The samples do not fit, or a parameter was not found.
        """
        ...

    @staticmethod
    def micro_batch() -> Int:
        """The shard size that the model asks for; 0: the trainer's.

        Returns:
            Samples.
        """
        return 0
