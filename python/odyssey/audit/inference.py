"""The comparison behind `odyssey verify --inference`: a sample, or a token, must have the same
outputs, bit for bit, however they are computed.

The outputs of all samples in one batch are the expected ones. `ways` compares the outputs of other
ways with them. The functions that build a trainer and that predict belong to a higher room, so they
are arguments; `odyssey.train.inference.ways` passes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import nn
from ..comm.base import Communicator
from ..core.tensor import Tensor, no_grad
from ..data import Batch, DataLoader
from .verify import Difference, first


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute outputs, and the first difference from the expected ones."""

    name: str
    compared: str  # for example "48 samples"
    values: int
    difference: Difference | None

    @property
    def same(self) -> bool:
        """Returns whether every bit was the same."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"DIFFERS  {self.difference}"
        return f"same bits  {self.values:,} values of {self.compared}"

    def json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**dataclasses.asdict(self), "same": self.same}


Steps = Iterator[tuple[str, np.ndarray, np.ndarray]]  # label, expected, actual


def _way(name: str, compared: str, steps: Steps) -> Way:
    values = 0
    for label, expected, actual in steps:
        difference = first(0, label, np.ascontiguousarray(expected), np.ascontiguousarray(actual))
        if difference is not None:
            return Way(name, compared, values, difference)
        values += actual.size
    return Way(name, compared, values, None)


def ways(
    load: Callable[[], nn.Module],
    data: Any,
    loss: Any = None,
    max_samples: int = 48,
    seed: int = 0,
    algorithm: str = "auto",
    *,
    predict: Callable[..., np.ndarray],
    build_trainer: Callable[..., Any],
) -> Iterator[Way]:
    """Compares the ways, one by one.

    Args:
        load: returns the model, with the same weights each time.
        data: the data set; max_samples of its samples are compared.
        loss: the loss of the training run; None for the model's own.
        max_samples: the number of samples.
        seed: draws the samples and the batches.
        algorithm: the conv_algorithm of the training run.
        predict: computes the outputs of batches, as `odyssey.train.trained_models.predicted` does.
        build_trainer: builds a trainer of a model, with an optimizer and the settings that are
            passed by keyword.
    """
    rng = np.random.default_rng(seed)
    full_batch = next(
        iter(
            DataLoader(
                data,
                batch_size=max_samples,
                sampler=rng.permutation(len(data))[:max_samples].tolist(),
            )
        )
    )
    model = load().eval()
    n = len(full_batch.indices)

    def outputs(positions: np.ndarray, shard: int) -> np.ndarray:
        batch = Batch(full_batch.dataset, full_batch.indices[positions], 0, 0)
        return predict(model, [batch], Communicator(), shard, algorithm)

    expected = outputs(np.arange(n), n)

    def one_by_one() -> Steps:
        actual = outputs(np.arange(n), 1)
        yield from ((f"output of sample {i}", expected[i], actual[i]) for i in range(n))

    def batches() -> Steps:
        for size in (1, 2, 3, 4, 5, 15, 16, 17, *rng.integers(1, n + 1, 8).tolist()):
            positions = rng.integers(0, n, size)
            yield (
                f"output in a batch of {size}",
                expected[positions],
                outputs(positions, int(rng.integers(1, size + 1))),
            )

    yield _way("one by one", f"{n} samples", one_by_one())
    yield _way("random batches", "16 batches, in random shards", batches())
    plain = not any(
        isinstance(m, nn.BatchNorm1d) or (isinstance(m, nn.Dropout) and m.p > 0)
        for m in model.modules()
    )
    name = "forward pass of a training step" if plain else "forward pass of a training's evaluation"
    steps = _in_training(build_trainer, load, full_batch, expected, loss, plain, algorithm)
    yield _way(name, "shards of 1, 3, 16", steps)
    if isinstance(model, nn.GPT):
        texts = full_batch.dataset.gather(full_batch.indices[:8])[0]
        yield _way(
            "texts that go on from a cache",
            f"{len(texts)} texts",
            _generated(model, texts, expected, rng),
        )


def _in_training(
    build_trainer: Callable[..., Any],
    load: Callable[[], nn.Module],
    batch: Batch,
    expected: np.ndarray,
    loss: Any,
    plain: bool,
    algorithm: str,
) -> Steps:
    """Yields the outputs of a step, or of an evaluation, as its loss receives them; then the loss
    and the weights of the same step when it is replayed.
    """
    for shard in (1, 3, 16):
        outputs: list[np.ndarray] = []

        def look(
            loss_function: Any, y: Any, target: Any, outputs: list[np.ndarray] = outputs
        ) -> Any:
            outputs.append(np.array(y.numpy()))
            return loss_function(y, target)

        ends: list[np.ndarray] = []
        for execution in ("eager", "replay"):
            model = load()
            loss_function = loss or model.loss
            options = {
                "execution": execution,
                "conv_algorithm": algorithm,
                "backend": "local",
                "threads": 1,
                "metrics": [],
            }
            options["loss"] = (
                (lambda y, t, loss_function=loss_function: look(loss_function, y, t))
                if execution == "eager"
                else loss_function
            )
            trainer = build_trainer(model, shard_size=shard, **options)
            total = trainer.train_step(batch)[0] if plain else trainer.evaluate([batch]).loss
            weights = [a.reshape(-1) for a in trainer.state_dict().values()]
            ends.append(np.concatenate([np.array([total], np.float64), *weights]))
        # the last shard is filled up
        yield f"output in shards of {shard}", expected, np.concatenate(outputs)[: len(expected)]
        yield f"loss and weights of the replayed step in shards of {shard}", *ends


def _generated(
    model: nn.GPT, texts: np.ndarray, expected: np.ndarray, rng: np.random.Generator
) -> Steps:
    """Yields the outputs of texts that are cut at random places: the beginning is computed at
    once, the rest token by token, with the keys and values of a cache.
    """
    for i, ids in enumerate(texts):
        cut = int(rng.integers(1, len(ids)))
        cache = model.empty_cache()
        ends = [0, cut, *range(cut + 1, len(ids) + 1)]
        for lo, hi in zip(ends, ends[1:], strict=False):
            with no_grad():
                actual = model(Tensor(ids[None, lo:hi], dtype=np.int32), cache).numpy()[0]
            yield f"output of text {i} from token {lo}", expected[i, lo:hi], actual
