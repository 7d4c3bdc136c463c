"""MNIST from its files, normalised as python/odyssey/data/datasets.py does it. Nothing is downloaded.

MNIST: Yann LeCun, Corinna Cortes, Christopher Burges; licence CC BY-SA 3.0.
"""

from std.os import getenv

from .arguments import argument
from .data import Dataset
from .files import is_there
from .idx import Idx, read_idx, read_unpacked

comptime _MEAN = 0.1307
comptime _STD = 0.3081
comptime _SHIPPED = "python/odyssey/data/mnist"  # in a checkout

# SHA-256 of the files as they were published, unpacked.
comptime _TRAIN = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
)
comptime _TRAIN_LABELS = (
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
)
comptime _TEST = (
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
)
comptime _TEST_LABELS = (
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
)


def mnist(train: Bool, folder: String = "") raises -> Dataset:
    """The 60,000 training or 10,000 test images, (pixel / 255 - mean) / std, with their labels.

    Args:
        train: Which of them.
        folder: With the four files, plain or .gz, or with a folder `mnist` or `MNIST/raw` that has them; "" is the
            option --data-dir, else ODYSSEY_DATA_DIR, else the files that come with odyssey if the program is started
            in a checkout. The latter are verified, yours may be other images in the same format.

    Returns:
        The data set.

    Raises:
        Error: Files are missing, damaged or of another kind.
    """
    var given = folder
    if given == "":
        given = argument("data-dir", getenv("ODYSSEY_DATA_DIR"))
    var stem = String("train" if train else "t10k")
    var images_file = String(stem, "-images-idx3-ubyte")
    var labels_file = String(stem, "-labels-idx1-ubyte")
    var images: Idx
    var labels: Idx
    if given == "":
        var path = String(_SHIPPED, "/", images_file, ".gz")
        if not is_there(path):
            raise Error(
                "[data] mnist: no --data-dir is given; give a folder with ",
                images_file,
                " and its like, plain or .gz",
            )
        var cache = String(_cache(), "/data")
        images = read_unpacked(path, cache, 3, _TRAIN if train else _TEST)
        labels = read_idx(
            String(_SHIPPED, "/", labels_file, ".gz"),
            1,
            _TRAIN_LABELS if train else _TEST_LABELS,
        )
    else:
        images = read_idx(_find(given, images_file), 3)
        labels = read_idx(_find(given, labels_file), 1)
    if images.shape[1] != 28 or images.shape[2] != 28:
        raise Error(
            "[data] ",
            images_file,
            " has images of ",
            images.shape[1],
            " x ",
            images.shape[2],
            "; mnist has 28 x 28; check that it is the right file",
        )
    if len(labels.data) != images.shape[0]:
        raise Error(
            "[data] ",
            images.shape[0],
            " images but ",
            len(labels.data),
            " labels; the two files must belong together",
        )
    var classes = List[Int32](capacity=len(labels.data))
    for label in labels.data:
        classes.append(label.cast[DType.int32]())
    var pixels = List[UInt8]()
    swap(pixels, images.data)
    return Dataset(
        pixels^,
        classes^,
        channels=1,
        height=28,
        width=28,
        classes=10,
        scale=1.0 / (255.0 * _STD),
        shift=-_MEAN / _STD,
        name="mnist",
    )


def _find(root: String, file: String) raises -> String:
    """The file in a folder or in those that it may have."""
    for inner in [String("/mnist"), String("/MNIST/raw"), String("")]:
        for end in [String(""), String(".gz")]:
            var path = String(root, inner, "/", file, end)
            if is_there(path):
                return path
    raise Error(
        "[data] mnist: ",
        file,
        " not found in ",
        root,
        " nor in its folders mnist, MNIST/raw; put the files there (plain or",
        " .gz) or give another --data-dir",
    )


def _cache() -> String:
    """Where python/odyssey/build.py keeps what can be made again."""
    var own = getenv("ODYSSEY_CACHE_DIR")
    if own != "":
        return own
    var xdg = getenv("XDG_CACHE_HOME")
    if xdg.startswith("/"):
        return xdg + "/odyssey"
    return getenv("HOME") + "/.cache/odyssey"
