"""Data sets and their batches: lists of a Mojo program as odyssey.data, and the loader of the Python package."""

from std.python import Python, PythonObject
from std.python.numpy import copy_to_numpy_array

from .bridge import call, odyssey, part


struct Dataset(Movable, Sized):
    """Samples and their labels."""

    var py: PythonObject
    """The Python data set (data.ArrayDataset)."""

    def __init__(out self, py: PythonObject):
        """A data set of the Python package, such as that of `mnist`."""
        self.py = py

    def __init__[
        T: DType, //
    ](
        out self,
        var samples: List[Scalar[T]],
        var labels: List[Int32],
        *,
        channels: Int,
        height: Int = 1,
        width: Int = 1,
        classes: Int,
        scale: Float64 = 1,
        shift: Float64 = 0,
        name: String = "arrays",
    ) raises:
        """Copies samples of bytes or floats.

        Args:
            samples: (samples, channels, height, width), or (samples, features) if height and width are 1.
            labels: (samples).
            channels: Of an image, or features of a sample.
            height: Of an image.
            width: Of an image.
            classes: Labels are from 0 to classes - 1.
            scale: What a number is multiplied with; 1 / (255 std) for (p / 255 - mean) / std.
            shift: What is added then; -mean / std.
            name: What messages call it.

        Raises:
            Error: Sizes do not fit, a number is not finite, or a label is not allowed.
        """
        var shape = Python.list(channels, height, width)
        var settings = Python.dict()
        settings["classes"] = classes
        settings["scale"] = scale
        settings["shift"] = shift
        settings["name"] = name
        self.py = call(
            odyssey(),
            "arrays",
            copy_to_numpy_array(Span(samples)),
            copy_to_numpy_array(Span(labels)),
            shape,
            settings=settings,
        )

    def __len__(self) -> Int:
        """The number of samples."""
        try:
            return Int(py=self.py.__len__())
        except:
            return 0


def shakespeare(train: Bool, length: Int = 64) raises -> Dataset:
    """Sequences of the characters of plays that come with odyssey, 76 different ones, and what follows each."""
    var settings = Python.dict()
    settings["length"] = length
    settings["train"] = train
    return Dataset(call(part("data"), "shakespeare", settings=settings))


@fieldwise_init
struct Batch(ImplicitlyCopyable, Movable):
    """The samples of one global batch: indices into its data set."""

    var py: PythonObject
    """The Python batch (data.Batch)."""
    var samples: Int
    """How many."""
    var device: Int
    """The place it is on; the model of an Engine must be there."""

    def to(self, *, device: Int) -> Self:
        """The same samples on another place."""
        return Self(self.py, self.samples, device)

    def part(self, first: Int, samples: Int) raises -> Self:
        """Samples first .. first + samples - 1, as a batch."""
        var py = call(odyssey(), "part_of", self.py, first, samples)
        return Self(py, samples, self.device)


struct DataLoader(Movable, Sized):
    """The batches of epochs over a data set, in an order that is a function of (seed, epoch)."""

    var py: PythonObject
    """The Python loader (data.DataLoader)."""
    var dataset: Dataset
    """What it takes samples from."""
    var batch_size: Int
    """Samples of one batch over all ranks: the global batch size."""
    var _batches: Int

    def __init__(
        out self,
        var dataset: Dataset,
        batch_size: Int = 64,
        shuffle: Bool = False,
        *,
        seed: UInt64 = 0,
        drop_last: Bool = False,
    ) raises:
        """Checks the settings; `drop_last` leaves out a last batch with fewer samples."""
        var settings = Python.dict()
        settings["shuffle"] = shuffle
        settings["seed"] = Python.int(String(seed))
        settings["drop_last"] = drop_last
        self.py = call(
            part("data"),
            "DataLoader",
            dataset.py,
            batch_size,
            settings=settings,
        )
        self.dataset = dataset^
        self.batch_size = batch_size
        self._batches = Int(py=self.py.__len__())

    def __len__(self) -> Int:
        """Batches of an epoch."""
        return self._batches

    def batch(self, epoch: Int, index: Int, size: Int) raises -> Batch:
        """Samples index * size up to (index + 1) * size of an epoch, from 0; fewer at its end."""
        var py = call(odyssey(), "batch", self.py, epoch, index, size)
        return Batch(py, Int(py=py.__len__()), 0)
