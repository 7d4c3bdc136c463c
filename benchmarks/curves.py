"""Training curves of GPT on Shakespeare: `odyssey train`'s settings for gpt-mini, and PyTorch's
with the same.

From the same initial weights, the same samples in the same order, for each seed; one thread each.
The loss is measured on the last tenth of the text every so many steps. Written are a JSON file and
a plot, after each training.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import common
import nets

IMAGE = common.HERE.parent / "docs" / "images" / "gpt-mini.png"
Curve = list[tuple[int, float]]  # steps, and the loss after them


class Setting:
    """What a seed is trained with on both sides."""

    def __init__(self, name: str, seed: int, steps: int | None) -> None:
        from odyssey import data, nn, optim
        from odyssey.settings import recipes

        self.own, self.recipe = recipes.MODEL_DEFAULTS[name], recipes.RECIPES[name]
        self.steps, self.batch = steps or self.own["steps"], self.own["global_batch_size"]
        length = self.own["sequence_length"]
        train, self.test = (data.shakespeare(length=length, train=part) for part in (True, False))
        self.loader = data.DataLoader(train, batch_size=self.batch, shuffle=True, seed=seed)
        self.sizes = {
            "vocab_size": train.classes,
            "context": length,
            "dropout": recipes.GPT_DROPOUT[name],
        }
        self.model = nn.models.build(name, seed=seed, **self.sizes)
        self.rate = optim.schedule(self.recipe["schedule"], self.steps, self.recipe["warmup_steps"])

    def ours(self, every: int) -> Curve:
        """Losses of odyssey."""
        from odyssey import DistributedTrainer, callbacks, data, optim
        from odyssey.settings.recipes import GPT_BETAS

        optimizer = optim.AdamW(
            lr=self.recipe["lr"], betas=GPT_BETAS, weight_decay=self.recipe["weight_decay"]
        )
        optimizer.undecayed = optim.vectors
        trainer = DistributedTrainer(
            self.model,
            optimizer,
            schedule=self.rate,
            shard_size=self.own["shard_size"],
            clip_norm=self.own["clip_norm"],
            threads=1,
            backend="local",
        )
        held, curve = data.DataLoader(self.test, batch_size=64), []

        def look(context: Any) -> None:
            if trainer.steps % every == 0:
                curve.append((trainer.steps, trainer.evaluate(held).loss))

        listener = callbacks.LambdaCallback(on_step_end=look)
        epochs = -(-self.steps // len(self.loader))
        trainer.fit(
            self.loader, epochs=epochs, steps=self.steps, callbacks=[listener], verbose=False
        )
        return curve

    def torch(self, every: int) -> Curve:
        """Losses of PyTorch, eager."""
        import numpy as np
        import torch
        from torch.nn.functional import cross_entropy

        from odyssey.settings.recipes import GPT_BETAS

        torch.set_num_threads(1)
        blocks = self.model.transformer.h
        shape = {"layers": len(blocks), "heads": blocks[0].attn.heads, "width": self.model.width}
        net = nets.torch_gpt(**self.sizes, **shape)
        net.load_state_dict(
            {k: torch.from_numpy(v.copy()) for k, v in self.model.state_dict().items()}
        )
        decay = self.recipe["weight_decay"]
        groups = [
            {
                "params": [p for p in net.parameters() if (p.ndim > 1) == matrix],
                "weight_decay": decay * matrix,
            }
            for matrix in (True, False)
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.recipe["lr"], betas=GPT_BETAS)

        def loss_of(x: Any, y: Any) -> Any:
            x, y = (torch.from_numpy(np.asarray(a)).long() for a in (x, y))
            return cross_entropy(net(x).flatten(0, 1), y.flatten())

        curve: Curve = []
        for step, (x, y) in enumerate(itertools.islice(_epochs(self.loader), self.steps)):
            for group in optimizer.param_groups:
                group["lr"] = self.recipe["lr"] * self.rate(step)
            optimizer.zero_grad()
            loss_of(x, y).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), self.own["clip_norm"])
            optimizer.step()
            if (step + 1) % every == 0:
                net.eval()
                total = 0.0
                with torch.no_grad():
                    for at in range(0, len(self.test), 64):
                        x, y = self.test.gather(np.arange(at, min(at + 64, len(self.test))))
                        total += loss_of(x, y).item() * len(x)
                net.train()
                curve.append((step + 1, total / len(self.test)))
        return curve


def _epochs(loader: Any) -> Any:
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Last losses of each side: mean, least and greatest, in nats and the mean in bits per
    character.
    """
    found = {}
    for kind in dict.fromkeys(run["kind"] for run in runs):
        last = [run["curve"][-1][1] for run in runs if run["kind"] == kind]
        mean = sum(last) / len(last)
        found[kind] = {
            "mean": mean,
            "least": min(last),
            "greatest": max(last),
            "bits": mean / math.log(2),
        }
    return found


def plot(runs: list[dict[str, Any]], steps: int, path: Path) -> None:
    """The curves in bits per character; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=150)
    for kind, colour, style, name in (
        ("torch", "#495057", "--", "PyTorch"),
        ("ours", "#d9480f", "-", "odyssey"),
    ):
        for i, run in enumerate(run for run in runs if run["kind"] == kind):
            at, loss = zip(*run["curve"], strict=True)
            label = f"{name}, a line per seed" if i == 0 else None
            axes.plot(
                at,
                [one / math.log(2) for one in loss],
                style,
                color=colour,
                lw=1.6,
                alpha=0.85,
                label=label,
            )
    axes.set_xlim(0, steps)
    axes.set_xlabel("steps")
    axes.set_title(
        "GPT mini on Shakespeare: bits per character of the held-out tenth", fontsize=11, loc="left"
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model", choices=("gpt-mini", "gpt"), default="gpt-mini", help="the network"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="a training for each"
    )
    parser.add_argument(
        "--steps", type=int, help="of each training; as many as the model's recipe has"
    )
    parser.add_argument(
        "--every", type=int, default=125, help="steps between two looks at the loss"
    )
    parser.add_argument("--plot", type=Path, default=IMAGE, metavar="FILE", help="the picture")
    options = parser.parse_args()
    facts = common.print_machine()
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for kind in ["ours", *["torch"] * common.have_torch()]:
            setting = Setting(options.model, seed, options.steps)
            start = time.process_time()
            curve = getattr(setting, kind)(options.every)
            runs.append(
                {
                    "kind": kind,
                    "seed": seed,
                    "cpu_seconds": time.process_time() - start,
                    "curve": curve,
                }
            )
            last = curve[-1][1]
            print(
                f"{kind}, seed {seed}: {last:.4f}, {last / math.log(2):.4f} bits per character",
                flush=True,
            )
            found = summary(runs)
            asked = {
                "model": options.model,
                "seeds": options.seeds,
                "steps": setting.steps,
                "every": options.every,
            }
            common.write_json(
                options.json, "curves", facts, options=asked, summary=found, runs=runs
            )
            plot(runs, setting.steps, options.plot)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
