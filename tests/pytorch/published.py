"""Programs of tests/third_party, changed where a user would change them, and the data that they
look for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from odyssey import data

HERE = Path(__file__).parent
RUN = HERE / "run_example.py"


def changed(launch, program: str, *changes: tuple[str, str]) -> Path:
    """A copy of the program in the launch's folder with these (text, what stands in its place);
    each must be there.
    """
    text = (HERE.parent / "third_party" / program).read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = launch.folder / Path(program).name
    path.write_text(text)
    # the compiled kernels
    launch.environment.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    launch.environment["HOME"] = str(launch.folder)  # some programs lock a file there
    return path


def mnist(folder: Path) -> None:
    """A small MNIST where torchvision looks for it."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, prefix, n in ((True, "train", 320), (False, "t10k", 80)):
        some = data.load("mnist", train=part).take(n)
        images, labels = (
            np.asarray(some.images, np.uint8).reshape(n, 28, 28),
            np.asarray(some.labels, np.uint8),
        )
        for values, kind in ((images, "images-idx3-ubyte"), (labels, "labels-idx1-ubyte")):
            head = bytes([0, 0, 8, values.ndim]) + b"".join(
                int(d).to_bytes(4, "big") for d in values.shape
            )
            (raw / f"{prefix}-{kind}").write_bytes(head + values.tobytes())
