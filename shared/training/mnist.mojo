"""MNIST: the files that come with odyssey, or yours.

Nothing is downloaded.

MNIST: Yann LeCun, Corinna Cortes, Christopher Burges; licence CC BY-SA 3.0.
"""

from std.os import getenv
from std.python import PythonObject

from .arguments import argument
from .bridge import call, part
from .data import Dataset


def mnist(train: Bool, folder: String = "") raises -> Dataset:
    """The 60,000 training or 10,000 test images, (pixel / 255 - mean) / std, with their labels.

    `folder` has the four files, plain or .gz; "" is the option --data-dir, else ODYSSEY_DATA_DIR, else the files that
    come with odyssey.
    """
    var given = folder
    if given == "":
        given = argument("data-dir", getenv("ODYSSEY_DATA_DIR"))
    var folders = PythonObject(given) if given != "" else PythonObject(None)
    return Dataset(call(part("data"), "load", "mnist", train=train, data_dir=folders))
