"""Data sets and their batches: lists of a Mojo program as odyssey.data, and the loader of the Python package."""

from std.python import PythonObject
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
    ](out self, var samples: List[Scalar[T]], var labels: List[Int32], var **settings: PythonObject) raises:
        """Copies samples of bytes or floats.

        Args:
            samples: (samples, channels, height, width), or (samples, features) if height and width are 1.
            labels: (samples), from 0 to classes - 1.
            settings: The sizes `channels` (or features of a sample), `height` and `width` (1), and `classes`; `scale`,
                with which a number is multiplied, 1 / (255 std) for (p / 255 - mean) / std, and `shift`, which is added
                then, -mean / std; `name`, for messages.

        Raises:
            Error: Sizes do not fit, a number is not finite, or a label is not allowed.
        """
        self.py = call(
            odyssey(), "arrays", copy_to_numpy_array(Span(samples)), copy_to_numpy_array(Span(labels)), **settings^
        )

    def __len__(self) -> Int:
        """The number of samples."""
        try:
            return Int(py=self.py.__len__())
        except:
            return 0


def shakespeare(train: Bool, length: Int = 64) raises -> Dataset:
    """Sequences of the characters of plays that come with odyssey, 76 different ones, and what follows each."""
    return Dataset(call(part("data"), "shakespeare", length=length, train=train))


@fieldwise_init
struct Batch(ImplicitlyCopyable, Movable):
    """The samples of one global batch: indices into its data set."""

    var py: PythonObject
    """The Python batch (data.Batch)."""
    var samples: Int
    """Number of them."""
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
    """Data set that it takes samples from."""
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
        self.py = call(
            part("data"), "DataLoader", dataset.py, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
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
