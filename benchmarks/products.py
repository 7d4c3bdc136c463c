"""The kernels of linear layers and convolutions, shape by shape: GFLOP/s and share of the FMA
peak of forward, gradient of the weights and gradient of the input, on one core, by processor
time (products.mojo).

    python benchmarks/products.py [--layers linear:384:1536:256 bf16-conv:64:64:32:32] [--kernels
    OTHER/mojo]

A layer is linear:INPUTS:OUTPUTS:ROWS or conv:INPUTS:OUTPUTS:PIXELS:SAMPLES[:KERNEL[:STRIDE]] (3 x 3
and 1 unless given, with a frame of zeros), or winograd:... the same by Winograd's algorithm: what a
direct convolution would have to reach for the same time. bf16-linear and bf16-conv are those with
bf16 products, as shares of the peak of bf16 products.

--kernels takes the kernels of another checkout, whose functions must have the same arguments.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import common

LINEARS = [
    f"linear:{s}:{n}"
    for s in ("384:384", "384:1536", "1536:384", "384:65")
    for n in (48, 256, 1024, 4096)
]
CONVOLUTIONS = ["conv:64:64:32:32", "conv:128:128:16:32", "conv:256:256:8:32", "conv:512:512:4:32"]
STRIDED = ["conv:64:128:32:32:3:2", "conv:128:256:16:32:3:2", "conv:256:512:8:32:3:2"]
WINOGRAD = [layer.replace("conv", "winograd") for layer in CONVOLUTIONS[:3]]
LAYERS = LINEARS + CONVOLUTIONS + STRIDED + WINOGRAD
LAYERS += [f"bf16-{layer}" for layer in LINEARS + CONVOLUTIONS + STRIDED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="LAYER")
    parser.add_argument(
        "--kernels", type=Path, default=common.HERE.parent / "mojo", metavar="DIRECTORY"
    )
    options = parser.parse_args()
    common.print_machine()
    program = common.program("products", options.kernels)
    done = subprocess.run([program, *options.layers], capture_output=True, text=True, check=True)
    headers = ["layer", "forward", "% of peak", "dW", "% of peak", "dx", "% of peak"]
    print(common.table(headers, [line.split() for line in done.stdout.splitlines()]))


if __name__ == "__main__":
    main()
