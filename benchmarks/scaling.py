"""Samples per second on several ranks and on several workers of one process, against one worker
on one core.

Every row is a run of `odyssey train`; each is preceded by a run of the baseline (one process, one
thread, bound to one core), and its speed-up is against that. "peak" is the speed-up of fused
multiply-adds in registers on as many cores: no row can have more, and it is far less than the
number of cores if they are hardware threads of the same core. All rows train the same number of
steps and must end with the same weights, to the bit: exit code 1 if not. More threads than cores
are in the table to show what they cost, not because they help.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import common


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a run computes. ranks 0 is a process without a launcher."""

    ranks: int
    workers: int
    threads: int
    pinned: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        if self.ranks:
            return f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.threads} thread"
        many = (
            f"{self.workers} worker{'s' * (self.workers > 1)}, {self.threads} "
            f"thread{'s' * (self.threads > 1)}"
        )
        return many + ", bound to a core" * self.pinned


MODELS = ("lenet5", "mlp", "convnet", "resnet18", "gpt-mini")
BASELINE = Layout(0, 1, 1, pinned=True)


def layouts() -> list[Layout]:
    """All rows but the baseline."""
    available = len(common.cores()) or os.cpu_count() or 1
    rows = [Layout(ranks, 1, 1) for ranks in (1, 2, 4)]
    rows += [Layout(0, workers, min(workers, available)) for workers in (1, 2, 4)]
    if available < 4:
        rows.append(Layout(0, 4, 4))
    return rows


def run(layout: Layout, options: Any, folder: Path) -> dict[str, Any]:
    """One training: samples per second, seconds and the SHA-256 of the weights."""
    file = folder / "run.json"
    command = common.train_command(
        *("--model", options.model, "--steps", str(options.steps), "--no-eval"),
        *("--global-batch-size", str(options.global_batch_size)),
        *("--num-gpus", str(layout.workers), "--device", "cpu", "--threads", str(layout.threads)),
        ranks=layout.ranks,
        json_file=file,
    )
    core = common.cores()[-1] if layout.pinned and common.cores() else None
    common.child(command, core=core)
    result = json.loads(file.read_text())
    file.unlink()
    expected = max(layout.ranks, 1) * layout.workers
    if result["workers"] != expected:
        raise SystemExit(
            f"{layout.name}: {result['workers']} workers took part instead of {expected}"
        )
    return {key: result[key] for key in ("samples_per_second", "seconds", "weights_sha256")}


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--global-batch-size", type=int, default=512, help="samples of a step")
    parser.add_argument(
        "--steps", type=int, default=800, help="of each run; enough for two seconds"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row")
    parser.add_argument("--model", default="lenet5", choices=MODELS, help="the network")
    options = parser.parse_args()
    facts = common.print_machine()
    rows = layouts()
    found: dict[Layout, list[dict[str, Any]]] = {layout: [] for layout in (BASELINE, *rows)}
    ups: dict[Layout, list[float]] = {layout: [] for layout in (BASELINE, *rows)}
    with common.scratch() as folder:
        for _ in range(options.rounds):
            for layout in rows:
                before = run(BASELINE, options, folder)
                own = run(layout, options, folder)
                found[BASELINE].append(before)
                found[layout].append(own)
                ups[layout].append(own["samples_per_second"] / before["samples_per_second"])
    core_peak = facts["peak_of_one_core"]["fp32"]
    sums = sorted({one["weights_sha256"] for runs in found.values() for one in runs})
    lines, content = [], []
    for layout, runs in found.items():
        speed = common.spread([one["samples_per_second"] for one in runs])
        seconds = common.median([one["seconds"] for one in runs])
        up = common.spread(ups[layout]) if ups[layout] else None
        peak_up = common.peak(max(layout.ranks, 1) * layout.threads)["fp32"] / core_peak
        own_sums = sorted({one["weights_sha256"] for one in runs})
        lines.append(
            [
                layout.name,
                common.number(speed["median"]),
                common.number(up["median"], 2) if up else "1",
                common.number(peak_up, 2),
            ]
        )
        lines[-1] += [common.number(seconds, 1), " ".join(value[:16] for value in own_sums)]
        row = {
            "samples_per_second": speed,
            "speed_up": up,
            "peak_speed_up": peak_up,
            "seconds": seconds,
            "weights_sha256": own_sums,
        }
        content.append({"layout": layout.name, **dataclasses.asdict(layout), **row})
    print(
        f"\n{options.model}, global batch {options.global_batch_size}, {options.steps} steps, "
        f"{options.rounds} rounds"
    )
    print(common.table(["", "samples/s", "speed-up", "peak", "s", "weights"], lines))
    settings = {k: getattr(options, k) for k in ("model", "global_batch_size", "steps", "rounds")}
    common.write_json(
        options.json, "scaling", facts, options=settings, rows=content, same_weights=len(sums) == 1
    )
    if len(sums) > 1:
        print(
            f"FAILED: {len(sums)} different results: {', '.join(value[:16] for value in sums)}",
            file=sys.stderr,
        )
        return 1
    print(f"all {sum(map(len, found.values()))} runs end with the same weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
