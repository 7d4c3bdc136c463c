"""Pictures per second from a folder of JPEGs: 1 and 2 ranks, with and without workers, beside
PyTorch's DataLoader.

    python benchmarks/data.py [--pictures 2000] [--pixels 256] [--size 64]

The pictures are made with Pillow in a folder of their own. A rank is a process that reads its part
of each batch, as in a training; PyTorch's ranks have a DistributedSampler each and the same
transforms (resize, cut). Both read an epoch; a second one, with workers that are there, is
measured. A line per case.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import numpy as np

BATCH = 64


def make(root: Path, count: int, pixels: int) -> None:
    """So many JPEGs of noise that is smooth enough to look like pictures, in two folders."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for i in range(count):
        coarse = draw.integers(0, 256, (pixels // 8, pixels // 8, 3), dtype=np.uint8)
        path = root / str(i % 2) / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(coarse).resize((pixels, pixels), Image.Resampling.BICUBIC).save(
            path, quality=90
        )


def ours(root: Path, rank: int, ranks: int, workers: int, size: int):
    """A function that reads this rank's part of an epoch with odyssey."""
    from odyssey import data

    made = data.ImageFolder(root, size)
    loader = data.DataLoader(made, BATCH, shuffle=True, num_workers=workers)
    return lambda: list(loader.steps(part=lambda n: (n * rank // ranks, n * (rank + 1) // ranks)))


def pytorch(root: Path, rank: int, ranks: int, workers: int, size: int):
    """The same with PyTorch."""
    import torch
    from PIL import Image, ImageOps
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    torch.set_num_threads(1)
    files = sorted(root.glob("*/*.jpg"))

    class Folder(Dataset):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, i: int):
            with Image.open(files[i]) as image:
                image.draft("RGB", (size, size))
                image = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
                return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)), int(
                    files[i].parent.name
                )

    folder = Folder()
    sampler = DistributedSampler(folder, ranks, rank)
    loader = DataLoader(
        folder, BATCH // ranks, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: list(loader)


def measure(which: str, root: Path, rank: int, ranks: int, workers: int, size: int) -> None:
    """In a rank: reads an epoch, says that it is ready, and reads another when it is told to."""
    epoch = {"ours": ours, "torch": pytorch}[which](root, rank, ranks, workers, size)
    epoch()
    print("ready", flush=True)
    sys.stdin.readline()
    epoch()
    print("done", flush=True)


def run(which: str, root: Path, ranks: int, workers: int, size: int) -> float:
    """Seconds of an epoch on so many ranks."""
    words = [
        sys.executable,
        __file__,
        "--rank",
        which,
        str(root),
        str(ranks),
        str(workers),
        str(size),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*words, str(rank)], **pipes) for rank in range(ranks)]
    for p in processes:
        assert p.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for p in processes:
        p.stdin.write("go\n")
        p.stdin.flush()
    for p in processes:
        assert p.stdout.readline() == "done\n"
    seconds = time.perf_counter() - start
    for p in processes:
        p.communicate()
    return seconds


def main() -> None:
    """See the top of the file."""
    if sys.argv[1:2] == ["--rank"]:
        which, root, ranks, workers, size, rank = sys.argv[2:]
        measure(which, Path(root), int(rank), int(ranks), int(workers), int(size))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--size", type=int, default=64)
    asked = parser.parse_args()
    common.print_machine()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make(root, asked.pictures, asked.pixels)
        for ranks in (1, 2):
            for workers in (0, 2):
                rates = {
                    w: asked.pictures / run(w, root, ranks, workers, asked.size)
                    for w in ("ours", "torch")
                }
                print(
                    f"{ranks} ranks, {workers} workers each: odyssey {rates['ours']:,.0f} "
                    f"pictures/s, PyTorch {rates['torch']:,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
