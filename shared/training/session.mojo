"""One call of train(): how far it has come, how far it is to go, where its checkpoints go.
"""

from .checkpoint import Store
from .json import Json, null
from .resume import Progress


struct Session(Movable):
    """One call of train(): how far it has come, how far it is to go, and where its checkpoints go.
    """

    var progress: Progress
    """How far the training has come."""
    var epochs: Int
    """How many there are to be."""
    var limit: Optional[Int]
    """Steps there are to be, if it is not whole epochs."""
    var every: Int
    """Steps from one checkpoint to the next; 0: at the ends of epochs."""
    var complete: Bool
    """Whether the limit was reached within an epoch."""
    var saves: Bool
    """Whether checkpoints are written."""
    var saved: Int
    """Step of the newest checkpoint."""
    var store: Optional[Store]
    """Where they go; on rank 0."""
    var configuration: Json
    """What must be the same to go on from one."""

    def __init__(
        out self,
        loader_epoch: Int,
        epochs: Int,
        limit: Optional[Int],
        every: Int,
    ):
        """The beginning of a training.

        Args:
            loader_epoch: The first epoch, as the loader counts them.
            epochs: How many.
            limit: Steps, or none.
            every: Steps from one checkpoint to the next; 0: at the ends of epochs.
        """
        self.progress = Progress(loader_epoch)
        self.epochs = epochs
        self.limit = limit
        self.every = every
        self.complete = False
        self.saves = False
        self.saved = -1
        self.store = None
        self.configuration = null()

    def at_limit(self) -> Bool:
        """Whether all steps have been taken.

        Returns:
            Whether they have.
        """
        return Bool(self.limit) and self.progress.steps() >= self.limit.or_else(
            0
        )

    def finished(self) -> Bool:
        """Whether there is nothing left to do.

        Returns:
            Whether there is nothing.
        """
        return (
            self.complete
            or self.progress.cursor.epoch >= self.epochs
            or (self.at_limit() and self.progress.tally.samples == 0)
        )
