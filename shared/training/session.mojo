"""One call of train(): how far it has come, how far it is to go, where its checkpoints go.
"""

from .checkpoint import Store
from .json import Json, null
from .resume import Progress


struct Session(Movable):
    """One call of train(): how far it has come, how far it is to go, and where its checkpoints go.
    """

    var progress: Progress
    var epochs: Int
    var limit: Optional[Int]
    var every: Int
    var complete: Bool  # the limit was reached within an epoch
    var saves: Bool
    var saved: Int  # step of the newest checkpoint
    var store: Optional[Store]  # on rank 0
    var configuration: Json

    def __init__(
        out self,
        loader_epoch: Int,
        epochs: Int,
        limit: Optional[Int],
        every: Int,
    ):
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
        """Whether all steps have been taken."""
        return Bool(self.limit) and self.progress.steps() >= self.limit.or_else(
            0
        )

    def finished(self) -> Bool:
        """Whether there is nothing left to do."""
        return (
            self.complete
            or self.progress.cursor.epoch >= self.epochs
            or (self.at_limit() and self.progress.tally.samples == 0)
        )
