"""`odyssey verify`: calls odyssey.audit.verify and prints its results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from odyssey.errors import ConfigError, check_integer

from ...base import launcher as launchers
from ...base import outputs
from . import DIFFERENT, FILE, HELP, JSON, LAUNCHER, on_all_ranks


@click.command(
    "verify",
    short_help="Compare the bits of layouts with those of one process.",
    context_settings={**HELP, "ignore_unknown_options": True},
)
@click.option(
    "--layouts",
    "-l",
    multiple=True,
    metavar="LAYOUT",
    help='What to compare, e.g. "dp=4" "pp=2,dp=2,schedule=gpipe" "tp=2" "dp=2,zero=3"; several '
    "may follow one option.",
)
@click.option("--steps", type=int, default=5, help="Optimizer steps to compare. (default: 5)")
@click.option(
    "--inference",
    type=FILE,
    metavar="RUN|CHECKPOINT_DIR",
    help="Instead: compare the outputs of a trained model, however they are computed.",
)
@click.option("--samples", type=click.IntRange(1), help="How many, with --inference. (default: 48)")
@click.option(
    "--script", type=FILE, help="A script that uses DistributedTrainer, instead of odyssey train."
)
@LAUNCHER
@JSON
@click.argument(
    "arguments", nargs=-1, metavar="[OPTIONS OF TRAIN OR OF THE SCRIPT]...", type=click.UNPROCESSED
)
def command(
    layouts: tuple[str, ...],
    steps: int,
    inference: Path | None,
    samples: int | None,
    script: Path | None,
    launcher: str | None,
    json_file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Train on one process and on each layout, and compare every bit after every step.

    Options that are not listed here are those of `odyssey train` (--model, --global-batch-size,
    ...), or the script's. Ends with 0 if all layouts gave the same bits, with 1 if one did not.

    With --inference RUN: compare the outputs of its model for samples one by one, in random
    batches, in a training's forward pass, and, of a GPT, of texts that go on from a cache.
    """
    from ...audit.verify import Verifier

    started = launchers.launched()
    if started is not None and started.size > 1:
        with on_all_ranks():
            raise ConfigError(
                "[verify] it starts the ranks of each layout itself; run it without mpirun or srun"
            )
    layouts, arguments = layouts_among(layouts, arguments)
    if json_file is not None:
        outputs.check(json_file, "--json")
    if inference is not None:
        if layouts or arguments or script:
            stray_word = (*layouts, *arguments, *["--script"] * bool(script))[0]
            raise ConfigError(
                f"[verify] --inference goes without {stray_word!r}; leave one of them out"
            )
        _verify_inference(inference, samples or 48, json_file)
        return
    if not layouts or samples is not None:
        reason = "--samples is for --inference RUN" if layouts else "nothing to compare is given"
        raise ConfigError(f"[verify] {reason}; give --layouts, e.g. dp=2 tp=2, or --inference RUN")
    check_integer("[verify] --steps", steps, 1)
    words = [
        sys.executable,
        *(["-m", "odyssey.train", "--no-progress"] if script is None else [str(script)]),
        *arguments,
    ]
    width = max(len(text) for text in layouts)

    def show(result: Any) -> None:
        click.echo(
            f"{result.layout:{width}}  {result.ranks} rank{'s' if result.ranks > 1 else ' '}  "
            f"{result}"
        )

    results = Verifier(words, steps, launcher)(layouts, show)
    same_count = sum(result.same for result in results)
    click.echo(f"{same_count} of {len(results)} layouts give the bits of one process")
    if json_file is not None:
        outputs.write_json(
            json_file, "--json", {"command": words[1:], "results": [r.json() for r in results]}
        )
    if same_count < len(results):
        sys.exit(DIFFERENT)


def _verify_inference(run: Path, samples: int, json_file: Path | None) -> None:
    """Compares the outputs of a run's model for each way to compute them, and prints a line each.

    Exits with DIFFERENT if one way differs. json_file: also writes the results there.
    """
    from ...train import trained_models
    from ...train.inference import ways

    checkpoint = trained_models.opened(run)
    data = trained_models.samples(checkpoint)
    results = []
    loss = trained_models.loss_of(checkpoint)
    for way in ways(
        lambda: trained_models.opened(run).model,
        data,
        loss,
        samples,
        algorithm=checkpoint.algorithm,
    ):
        click.echo(f"{way.name:44}  {way}")
        results.append(way)
    same_count = sum(way.same for way in results)
    click.echo(
        f"{same_count} of {len(results)} ways give the bits of one batch of {checkpoint.name}"
    )
    if json_file is not None:
        outputs.write_json(
            json_file,
            "--json",
            {"checkpoint": checkpoint.name, "results": [way.json() for way in results]},
        )
    if same_count < len(results):
        sys.exit(DIFFERENT)


def layouts_among(
    layouts: tuple[str, ...], words: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Moves layouts from the other arguments to the layouts, and returns both.

    After `--layouts dp=2 tp=2`, click passes "tp=2" among the other arguments. A layout is a word
    "key=value" with a key that layouts have.
    """
    from ...audit.verify import KEYS

    layout_words = tuple(word for word in words if word.split("=")[0] in KEYS and "=" in word)
    return layouts + layout_words, tuple(word for word in words if word not in layout_words)
