"""The sums of a step: of losses, samples, correct predictions and metrics, and what has to be
updated.
"""

from __future__ import annotations

import dataclasses

from ..optim import Update


@dataclasses.dataclass(eq=False)
class Sums:
    """Result of a step: sums over the samples of the global batch, and what this rank has to
    update.
    """

    values: list[float]  # losses, samples, correct predictions, -, metrics
    samples_address: int  # of the number of samples as float32
    updates: list[Update]
    #: Runs of gradients (address, floats) that are this rank's share of the global norm; None:
    #: those of the updates.
    counted: list[tuple[int, int]] | None = None

    @property
    def loss(self) -> float:
        """Sum over the samples of the global batch."""
        return self.values[0]

    @property
    def samples(self) -> float:
        """How many there are."""
        return self.values[1]

    @property
    def correct(self) -> float:
        """Number of them that were predicted right, as the loss counts."""
        return self.values[2]
