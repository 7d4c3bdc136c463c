"""What an optimizer costs as a rule (optim/rule.py) beside the kernel that is written out:
processor time of an update, on one core, the two in turns.

    python benchmarks/rule.py [--numbers 4000000] [--rounds 20]

Adam and SGD written out and as rules, the rules that have no kernel beside them, and the bytes per
second that each moves: what bounds an update once its arrays do not fit a cache. The check of the
gradients is in all of them.
"""

from __future__ import annotations

import time
from typing import Any

import common


def optimizers() -> dict[str, Any]:
    """By the name of a row: what makes the optimizer."""
    from odyssey import functional as F
    from odyssey import optim

    class AdamRule(optim.Adam):
        def rule(self, p: Any, g: Any, m: Any, v: Any) -> Any:
            b1, b2 = self.betas
            g = g + self.weight_decay * p
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            return (
                p
                - self.lr
                * (m / (1 - b1**self.steps))
                / (F.sqrt(v / (1 - b2**self.steps)) + self.eps),
                m,
                v,
            )

    class SgdRule(optim.SGD):
        def rule(self, p: Any, g: Any, v: Any) -> Any:
            v = self.momentum * v + (g + self.weight_decay * p)
            return p - self.lr * v, v

    sgd = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
    return {
        "Adam, written out": lambda: optim.Adam(weight_decay=0.01),
        "Adam, a rule": lambda: AdamRule(weight_decay=0.01),
        "SGD, written out": lambda: optim.SGD(**sgd),
        "SGD, a rule": lambda: SgdRule(**sgd),
        "Lion, a rule": lambda: optim.Lion(weight_decay=0.01),
        "Adagrad, a rule": lambda: optim.Adagrad(weight_decay=0.01),
    }


class Timed:
    """An optimizer over n numbers, and the processor time of its updates."""

    def __init__(self, make: Any, n: int) -> None:
        import numpy as np

        from odyssey.core import native
        from odyssey.optim import Update

        self.optimizer, self.n, rng = make(), n, np.random.default_rng(1)
        self.arrays = [native.aligned(n) for _ in range(2 + len(self.optimizer.states))]
        for array in self.arrays[:2]:
            array[:] = rng.standard_normal(n, np.float32)
        self.one = np.ones(1, np.float32)
        w, g, *states = (a.ctypes.data for a in self.arrays)
        self.updates = [Update(w, g, 0, n, 0, tuple(states))]
        self.optimizer._context, self.seconds = native.Context(), []

    def update(self, kept: bool) -> None:
        """One update; its time is kept or not."""
        begun = time.process_time()
        self.optimizer.apply(self.updates, self.one.ctypes.data, 1e-3)
        if kept:
            self.seconds.append(time.process_time() - begun)


def main() -> None:
    parser = common.parser(__doc__.split("\n\n")[0])
    parser.add_argument("--numbers", type=int, default=4_000_000, help="parameters")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    facts = common.print_machine()
    common.pin()
    timed = {name: Timed(make, options.numbers) for name, make in optimizers().items()}
    for i in range(options.rounds + 2):
        for one in timed.values():
            one.update(i > 1)
    rows, found = [], []
    for name, one in timed.items():
        states = len(one.optimizer.states)
        ns = 1e9 * common.median(one.seconds) / one.n
        found.append({"optimizer": name, "ns": ns, "states": states})
        adam = found[0]["ns"] / found[0]["states"]  # the first row
        # the gradients are read twice, first to see that they are finite
        gigabytes = 4 * (4 + 2 * states) / ns
        rows.append([name, states, f"{ns:.3f}", f"{gigabytes:.1f}", f"{ns / states / adam:.2f}"])
    print(common.table(["optimizer", "states", "ns a number", "GB/s", "of Adam's, a state"], rows))
    common.write_json(options.json, "rule", facts, numbers=options.numbers, rows=found)


if __name__ == "__main__":
    main()
