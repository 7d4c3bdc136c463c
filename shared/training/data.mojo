"""Data: images and labels in memory, and the order in which batches take them.

The order of an epoch is a pure function of (samples, seed, epoch), the one of python/odyssey/data/sampler.py to the bit.
A batch is only its indices; the engine gathers the samples. Nothing here downloads or augments.
"""

from std.math import ceildiv
from std.memory import ArcPointer

from kernels.lanes import Ptr

from .arena import aligned_zeros

# SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
comptime _GAMMA: UInt64 = 0x9E3779B97F4A7C15
comptime _MIX_1: UInt64 = 0xBF58476D1CE4E5B9
comptime _MIX_2: UInt64 = 0x94D049BB133111EB
comptime _DIGIT = 11  # bits of a radix sort's pass; six passes sort 64 bits


def _mix(value: UInt64) -> UInt64:
    var v = (value ^ (value >> 30)) * _MIX_1
    v = (v ^ (v >> 27)) * _MIX_2
    return v ^ (v >> 31)


def permutation(n: Int, seed: UInt64, epoch: UInt64) -> List[Int64]:
    """The order of an epoch: 0..n-1 once each, by the size of n numbers of a SplitMix64 stream.

    Args:
        n: Samples.
        seed: From 0 to 2^64 - 1.
        epoch: From 0.

    Returns:
        The order.
    """
    var start = _mix(_mix(seed + _GAMMA) + (epoch + 1) * _GAMMA)
    var keys = List[UInt64](length=n, fill=0)
    var order = List[Int64](length=n, fill=0)
    for i in range(n):
        keys[i] = _mix(start + UInt64(i + 1) * _GAMMA)
        order[i] = Int64(i)
    var other_keys = List[UInt64](length=n, fill=0)
    var other_order = List[Int64](length=n, fill=0)
    for shift in range(0, 64, _DIGIT):
        var starts = List[Int](length=(1 << _DIGIT) + 1, fill=0)
        for i in range(n):
            starts[
                (Int(keys[i] >> UInt64(shift)) & ((1 << _DIGIT) - 1)) + 1
            ] += 1
        for d in range(1 << _DIGIT):
            starts[d + 1] += starts[d]
        for i in range(n):
            var d = Int(keys[i] >> UInt64(shift)) & ((1 << _DIGIT) - 1)
            other_keys[starts[d]] = keys[i]
            other_order[starts[d]] = order[i]
            starts[d] += 1
        swap(keys, other_keys)
        swap(order, other_order)
    return order^


struct Dataset(Movable, Sized):
    """Images and labels in memory; a pixel p of channel c stands for p * scale[c] + shift[c].
    """

    var channels: Int
    """Channels of an image, or features of a sample."""
    var height: Int
    """Its height; 1 for features."""
    var width: Int
    """Its width; 1 for features."""
    var classes: Int
    """Labels are 0 to classes - 1."""
    var name: String
    """What messages call it."""
    var pixels: List[UInt8]
    """The samples if they are bytes."""
    var floats: List[Float32]
    """The samples if they are floats."""
    var labels: List[Int32]
    """One per sample."""
    var scale: Ptr
    """One per channel."""
    var shift: Ptr
    """One per channel."""

    def __init__(
        out self,
        var pixels: List[UInt8],
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
        """Images of bytes.

        Args:
            pixels: (samples, channels, height, width).
            labels: (samples).
            channels: Of an image, or features of a sample.
            height: Of an image.
            width: Of an image.
            classes: Labels are below.
            scale: What a byte is multiplied with; 1 / (255 std) for (p / 255 - mean) / std.
            shift: What is added then; -mean / std.
            name: What messages call it.

        Raises:
            Error: Sizes do not fit, or a label is not allowed.
        """
        self = Self(
            pixels^,
            List[Float32](),
            labels^,
            channels,
            height,
            width,
            classes,
            scale,
            shift,
            name,
        )

    def __init__(
        out self,
        var floats: List[Float32],
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
        """Samples of floats.

        Args:
            floats: (samples, channels, height, width), or (samples, features).
            labels: (samples).
            channels: Of an image, or features of a sample.
            height: Of an image.
            width: Of an image.
            classes: Labels are below.
            scale: What a number is multiplied with.
            shift: What is added then.
            name: What messages call it.

        Raises:
            Error: Sizes do not fit, a number is not finite, or a label is not allowed.
        """
        for i in range(len(floats)):
            if not (floats[i] - floats[i] == 0):
                raise Error(
                    "[data] ", name, ": number ", i, " is not finite; clean it"
                )
        self = Self(
            List[UInt8](),
            floats^,
            labels^,
            channels,
            height,
            width,
            classes,
            scale,
            shift,
            name,
        )

    def __init__(
        out self,
        var pixels: List[UInt8],
        var floats: List[Float32],
        var labels: List[Int32],
        channels: Int,
        height: Int,
        width: Int,
        classes: Int,
        scale: Float64,
        shift: Float64,
        name: String,
    ) raises:
        """Either of the two above; one of `pixels` and `floats` is empty.

        Args:
            pixels: Bytes, or none.
            floats: Numbers, or none.
            labels: One per sample.
            channels: Of a sample.
            height: Of a sample.
            width: Of a sample.
            classes: Labels are below.
            scale: What a number is multiplied with.
            shift: What is added then.
            name: One of them.

        Raises:
            Error: It is not allowed.
        """
        if channels < 1 or height < 1 or width < 1 or classes < 1:
            raise Error(
                "[data] ",
                name,
                ": samples of ",
                channels,
                " x ",
                height,
                " x ",
                width,
                " and ",
                classes,
                " classes; each must be at least 1",
            )
        var n = len(labels)
        var numbers = max(len(pixels), len(floats))
        if n == 0 or numbers != n * channels * height * width:
            raise Error(
                "[data] ",
                name,
                ": ",
                numbers,
                " numbers for ",
                n,
                " samples of ",
                channels,
                " x ",
                height,
                " x ",
                width,
                "; the sizes must fit, and there must be a sample",
            )
        for i in range(n):
            if labels[i] < 0 or labels[i] >= Int32(classes):
                raise Error(
                    "[data] ",
                    name,
                    ": label ",
                    labels[i],
                    " at index ",
                    i,
                    "; 0 to ",
                    classes - 1,
                    " are allowed",
                )
        self.channels = channels
        self.height = height
        self.width = width
        self.classes = classes
        self.name = name
        self.pixels = pixels^
        self.floats = floats^
        self.labels = labels^
        self.scale = aligned_zeros(channels)
        self.shift = aligned_zeros(channels)
        for c in range(channels):
            self.scale[unsafe_offset=c] = Float32(scale)
            self.shift[unsafe_offset=c] = Float32(shift)

    def __deinit__(deinit self):
        """Frees its memory."""
        self.scale.unsafe_free()
        self.shift.unsafe_free()

    def __len__(self) -> Int:
        """The number of samples.

        Returns:
            The number.
        """
        return len(self.labels)

    def of_bytes(self) -> Bool:
        """Whether the samples are bytes, not floats.

        Returns:
            Whether they are.
        """
        return len(self.pixels) > 0

    def address(self) -> Int:
        """Where the samples are.

        Returns:
            The address.
        """
        if self.of_bytes():
            return Int(self.pixels.unsafe_ptr())
        return Int(self.floats.unsafe_ptr())


@fieldwise_init
struct Batch(ImplicitlyCopyable, Movable):
    """The samples of one global batch: `samples` indices into the data set, of an order that it keeps alive.
    """

    var _order: ArcPointer[List[Int64]]  # never changed
    var _first: Int
    var samples: Int
    """How many."""
    var epoch: Int
    """The epoch, from 0."""
    var index: Int
    """The batch within it, from 0."""
    var device: Int
    """The place it is on; a model of a loop of one's own must be there."""

    def to(self, *, device: Int) -> Self:
        """The same samples on another place.

        Args:
            device: The place.

        Returns:
            The batch there.
        """
        return Self(
            self._order,
            self._first,
            self.samples,
            self.epoch,
            self.index,
            device,
        )

    def rows(self) -> Int:
        """Address of its int64 indices into the data set; valid while the batch is.

        Returns:
            The address.
        """
        return Int(self._order[].unsafe_ptr()) + 8 * self._first

    def part(self, first: Int, samples: Int) raises -> Self:
        """Some of its samples, as a batch.

        Args:
            first: The first of them.
            samples: How many.

        Returns:
            The batch.

        Raises:
            Error: It does not have them.
        """
        if first < 0 or samples < 1 or first + samples > self.samples:
            raise Error(
                "[data] samples ",
                first,
                " to ",
                first + samples - 1,
                " of a batch of ",
                self.samples,
                "; there are none",
            )
        return Self(
            self._order,
            self._first + first,
            samples,
            self.epoch,
            self.index,
            self.device,
        )


struct DataLoader(Movable, Sized):
    """The batches of epochs over a data set.

    The order is the one of Python's DataLoader with the same arguments, so is every batch.
    """

    var dataset: Dataset
    """What it takes samples from."""
    var batch_size: Int
    """Samples of one batch over all ranks: the global batch size."""
    var shuffle: Bool
    """Whether each epoch has an order of its own."""
    var seed: UInt64
    """Of the orders."""
    var drop_last: Bool
    """Whether a last batch with fewer samples is left out."""
    var next_epoch: Int
    """The epoch that the next training with it begins with."""
    var _order: ArcPointer[
        List[Int64]
    ]  # batches share it; another epoch has another
    var _epoch: Int  # that _order is of; -1: none

    def __init__(
        out self,
        var dataset: Dataset,
        batch_size: Int = 64,
        shuffle: Bool = False,
        *,
        seed: UInt64 = 0,
        drop_last: Bool = False,
    ) raises:
        """Checks the settings.

        Args:
            dataset: The samples.
            batch_size: Of all ranks together.
            shuffle: A new order each epoch.
            seed: Of the orders.
            drop_last: Leave out a last batch with fewer samples.

        Raises:
            Error: No batch would be left, or the batch size is below 1.
        """
        self.dataset = dataset^
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.next_epoch = 0
        self._order = ArcPointer(List[Int64]())
        self._epoch = -1
        if batch_size < 1 or len(self) == 0:
            raise Error(
                "[data] batch_size is ",
                batch_size,
                " for ",
                len(self.dataset),
                " samples; no batch would be left",
            )

    def __len__(self) -> Int:
        """Batches of an epoch.

        Returns:
            The number.
        """
        var n = len(self.dataset)
        if self.drop_last:
            return n // self.batch_size
        return ceildiv(n, self.batch_size)

    def batch(mut self, epoch: Int, index: Int, size: Int) -> Batch:
        """Samples index * size up to (index + 1) * size of an epoch; fewer at its end.

        Args:
            epoch: From 0.
            index: From 0.
            size: Samples of a batch: batch_size, or a multiple of it to accumulate.

        Returns:
            The batch.
        """
        if self._epoch != epoch:
            var n = len(self.dataset)
            if self.shuffle:
                self._order = ArcPointer(
                    permutation(n, self.seed, UInt64(epoch))
                )
            elif len(self._order[]) != n:
                var order = List[Int64](length=n, fill=0)
                for i in range(n):
                    order[i] = Int64(i)
                self._order = ArcPointer(order^)
            self._epoch = epoch
        var stop = len(self.dataset)
        if self.drop_last:
            stop = stop // self.batch_size * self.batch_size
        var first = index * size
        return Batch(
            self._order,
            first,
            max(0, min(size, stop - first)),
            epoch,
            index,
            0,
        )
