"""History of a training, and means over a data set: numbers of the Python package as Mojo's."""

from std.python import PythonObject
from std.utils.numerics import nan


struct Evaluation(ImplicitlyCopyable, Movable):
    """Means over a data set."""

    var loss: Float64
    """Mean loss."""
    var accuracy: Float64
    """Share of samples that the model names right; NaN if they have no classes, as sequences."""
    var samples: Int
    """Number of samples."""

    def __init__(out self, py: PythonObject) raises:
        """The numbers of a Python evaluation."""
        self.loss = Float64(py=py.loss)
        self.accuracy = number_of(py.accuracy).or_else(nan[DType.float64]())
        self.samples = Int(py=py.samples)


@fieldwise_init
struct EpochRecord(ImplicitlyCopyable, Movable):
    """The figures of one epoch."""

    var epoch: Int
    """From 1."""
    var train_loss: Float64
    """Mean over its samples."""
    var train_accuracy: Float64
    """Share of them that was right when they were used; NaN if they have no classes, as sequences."""
    var seconds: Float64
    """In training steps."""
    var samples_per_second: Float64
    """Samples per second of all ranks together."""
    var test_loss: Optional[Float64]
    """Mean on the validation set, if there was one."""
    var test_accuracy: Optional[Float64]
    """Share of the validation set that is right, if there was one."""


struct History(Movable):
    """History of a training: a record per epoch, and totals."""

    var records: List[EpochRecord]
    """One per epoch."""
    var steps: Int
    """Optimizer steps."""
    var samples: Int
    """Samples trained on, by all ranks."""
    var seconds: Float64
    """In training steps, without evaluation."""
    var py: PythonObject
    """The Python history."""

    def __init__(out self, py: PythonObject) raises:
        """The numbers of a Python history."""
        self.py = py
        self.records = List[EpochRecord]()
        for r in py.records:
            self.records.append(
                EpochRecord(
                    Int(py=r["epoch"]),
                    number_of(r["train_loss"]).or_else(nan[DType.float64]()),
                    number_of(r.get("train_accuracy")).or_else(nan[DType.float64]()),
                    Float64(py=r["seconds"]),
                    Float64(py=r["samples_per_second"]),
                    number_of(r["test_loss"]),
                    number_of(r.get("test_accuracy")),
                )
            )
        self.steps = Int(py=py.steps)
        self.samples = Int(py=py.samples)
        self.seconds = Float64(py=py.seconds)

    def train_loss(self) -> Float64:
        """Mean training loss over the samples of the last epoch; NaN before there is one."""
        if not len(self.records):
            return nan[DType.float64]()
        return self.records[len(self.records) - 1].train_loss

    def test_loss(self) raises -> Optional[Float64]:
        """Mean loss on the validation set after the last epoch, if there was one."""
        return number_of(self.py.test_loss)

    def test_accuracy(self) raises -> Optional[Float64]:
        """Share of the validation set that is right after the last epoch, if there was one."""
        return number_of(self.py.test_accuracy)

    def best_accuracy(self) raises -> Optional[Float64]:
        """The best test_accuracy of all epochs, if there was one."""
        return number_of(self.py.best_accuracy)

    def samples_per_second(self) -> Float64:
        """Training samples of all ranks per second of training; 0 before there is one."""
        return Float64(self.samples) / self.seconds if self.seconds > 0 else 0


def number_of(x: PythonObject) raises -> Optional[Float64]:
    """A Python number, or nothing for None."""
    if x is PythonObject(None):
        return None
    return Float64(py=x)
