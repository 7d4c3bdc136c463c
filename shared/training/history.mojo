"""What a training did, and means over a data set."""

from std.utils.numerics import nan


@fieldwise_init
struct Evaluation(ImplicitlyCopyable, Movable):
    """Means over a data set."""

    var loss: Float64
    """Mean loss."""
    var accuracy: Float64
    """Share of samples that the model names right."""
    var samples: Int
    """How many there were."""


@fieldwise_init
struct EpochRecord(ImplicitlyCopyable, Movable):
    """The figures of one epoch."""

    var epoch: Int
    """From 1."""
    var train_loss: Float64
    """Mean over its samples."""
    var train_accuracy: Float64
    """Share of them that was right when they were used."""
    var seconds: Float64
    """In training steps."""
    var samples_per_second: Float64
    """Of all ranks together."""
    var test: Optional[Evaluation]
    """On the validation set, if there was one."""

    def line(self) -> String:
        """What to print about it.

        Returns:
            One line.
        """
        var out = String(
            "epoch ", self.epoch, ": train loss ", fixed(self.train_loss, 4)
        )
        if self.test:
            var share = 100 * self.test.value().accuracy
            out += String(", test accuracy ", fixed(share, 2), " %")
        return String(out, ", ", Int(self.samples_per_second), " samples/s")


struct History(Movable):
    """What a training did: a record per epoch, and totals."""

    var records: List[EpochRecord]
    """One per epoch."""
    var steps: Int
    """Optimizer steps."""
    var samples: Int
    """Samples trained on, by all ranks."""
    var seconds: Float64
    """In training steps, without evaluation."""

    def __init__(out self):
        """Nothing yet."""
        self.records = List[EpochRecord]()
        self.steps = 0
        self.samples = 0
        self.seconds = 0

    def train_loss(self) -> Float64:
        """Mean training loss over the samples of the last epoch; NaN before there is one.

        Returns:
            The loss.
        """
        if not len(self.records):
            return nan[DType.float64]()
        return self.records[len(self.records) - 1].train_loss

    def test_accuracy(self) -> Optional[Float64]:
        """Share of the validation set that is right after the last epoch.

        Returns:
            The share, or none without a validation set.
        """
        if not len(self.records):
            return None
        var last = self.records[len(self.records) - 1].test
        return last.value().accuracy if last else Optional[Float64](None)

    def test_loss(self) -> Optional[Float64]:
        """Mean loss on the validation set after the last epoch.

        Returns:
            The loss, or none without a validation set.
        """
        if not len(self.records):
            return None
        var last = self.records[len(self.records) - 1].test
        return last.value().loss if last else Optional[Float64](None)

    def best_accuracy(self) -> Optional[Float64]:
        """The best accuracy on the validation set of all epochs.

        Returns:
            The share, or none without a validation set.
        """
        var best = Optional[Float64](None)
        for r in self.records:
            if r.test and (not best or r.test.value().accuracy > best.value()):
                best = r.test.value().accuracy
        return best

    def samples_per_second(self) -> Float64:
        """Training samples of all ranks per second of training.

        Returns:
            The rate; 0 before there is one.
        """
        return Float64(self.samples) / self.seconds if self.seconds > 0 else 0


def fixed(x: Float64, places: Int) -> String:
    """A number with so many places behind the point.

    Args:
        x: The number.
        places: How many.

    Returns:
        The text.
    """
    if not (x - x == 0):
        return String(x)
    var unit = 1
    for _ in range(places):
        unit *= 10
    var n = Int(abs(x) * Float64(unit) + 0.5)
    var rest = String(n % unit)
    while rest.byte_length() < places:
        rest = "0" + rest
    return String("-" if x < 0 and n else "", n // unit, ".", rest)
