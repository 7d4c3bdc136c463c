"""Every op of ops_samples.py trained with on a GPU (odyssey.testing.check_op).

A program, not a test.

    python tests/gpu/samples.py

test_gpu_samples.py runs it on an emulated GPU. Exit code 1 if an op failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ops_samples  # noqa: E402

from odyssey import functional, load_ops  # noqa: E402
from odyssey.testing import OpError, check_op  # noqa: E402


def main() -> int:
    failed = 0
    load_ops(Path(__file__).parents[2] / "examples" / "own_ops.mojo")
    mish = functional.unary("mish", saves="x")
    trained = [s for s in ops_samples.SAMPLES if s.training]
    for sample in (ops_samples.Sample(mish, None, ((16,),)), *trained):
        name = ops_samples.name_of(sample)
        try:
            check_op(
                sample.op, sample.formula, *sample.shapes, parameters=sample.parameters, batches=()
            )
            print(f"{name}: ok", flush=True)
        except OpError as problem:
            failed += 1
            print(f"{name}: {problem}", flush=True)
    print(f"{len(trained) + 1} ops, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
