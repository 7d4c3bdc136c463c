"""Short trainings on GPUs in one process, for test_gpu_training.py and scripts/gpu-check; prints
a JSON object.

    python tests/gpu/trainings.py [--list] [NAME ...]

Each check returns what is to be compared; "ok" is what must be true of it, and a line says so when
it is done. Devices are shared (oversubscribe), so one GPU is enough. Exit code: 0, 1 if a check
failed, 3 if the GPU can no longer be used by this process: what is left has to be done in another
one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from records import LOST

sys.path.insert(0, str(Path(__file__).parents[1] / "layouts"))
from draws import AdamRule, MadeUp

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.core import functional as F
from odyssey.errors import ConfigError, NumericsError

CHECKS: dict[str, Callable[[], dict[str, Any]]] = {}
MNIST = data.load("mnist", train=True).take(2000)


def check(f: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    CHECKS[f.__name__] = f
    return f


def trainer(
    model: str | nn.Module = "lenet5",
    optimizer: Any = None,
    device: str = "gpu",
    num_gpus: int | None = 1,
    **settings: Any,
) -> DistributedTrainer:
    return DistributedTrainer(
        nn.models.build(model, seed=1) if isinstance(model, str) else model,
        optimizer or optim.SGD(lr=0.05, momentum=0.9),
        backend="local",
        device=device,
        num_gpus=num_gpus,
        oversubscribe=True,
        threads=1,
        **settings,
    )


def loader(batch: int = 80, seed: int = 1) -> data.DataLoader:
    return data.DataLoader(MNIST, batch_size=batch, shuffle=True, seed=seed)


def steps(t: DistributedTrainer, n: int = 3, batch: int = 80) -> str:
    it = iter(loader(batch))
    for _ in range(n):
        t.train_step(next(it))
    return t.weights_sha256()


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest difference of two sets of weights, relative to the largest weight of each."""
    return max(float(np.abs(a[k] - b[k]).max() / np.abs(b[k]).max()) for k in b)


def compare(gpu: DistributedTrainer, cpu: DistributedTrainer, n: int = 3, batch: int = 80) -> float:
    steps(gpu, n, batch)
    steps(cpu, n, batch)
    return apart(gpu.state_dict(), cpu.state_dict())


@check
def workers() -> dict[str, Any]:
    """The same bits on 1, 2, 3 and 4 workers, and where 80 samples are five shards and there are
    seven workers.
    """
    hashes = {n: steps(trainer(num_gpus=n)) for n in (1, 2, 3, 7)}
    large = {n: steps(trainer(num_gpus=n), 2, 416) for n in (1, 4)}
    return {
        "ok": len(set(hashes.values())) == 1 and len(set(large.values())) == 1,
        "hashes": hashes,
        "large": large,
    }


@check
def copied() -> dict[str, Any]:
    """A copy of a model and its optimizer has what the GPUs have now, trains as the original
    would, and without it.
    """
    hashes: dict[str, list[str]] = {}
    for name in ("lenet5", "with running statistics"):
        nn.manual_seed(1)
        norm = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
        )
        original = trainer(name if name == "lenet5" else norm, optim.Adam(lr=0.001))
        steps(original, 2)
        alone, pair = (
            copy.deepcopy(original.model),
            copy.deepcopy((original.model, original.optimizer)),
        )
        kept = copy.copy(original.optimizer).state["m"].copy()
        before = [
            original.weights_sha256(),
            trainer(alone).weights_sha256(),
            pair[1].arena.sha256(),
        ]
        kept_alike = np.array_equal(kept, original.optimizer.state["m"])
        after = [steps(original, 2)]
        untouched = pair[1].arena.sha256() == before[0]
        del original
        gc.collect()
        after.append(steps(trainer(*pair), 2))
        hashes[name] = [*{*before}, *{*after}, *([] if untouched and kept_alike else ["moved"])]
    return {"ok": all(len(found) == 2 for found in hashes.values()), "hashes": hashes}


@check
def like_the_cpu() -> dict[str, Any]:
    """After some steps weights are those of the CPU, up to rounding."""

    def far(
        model: str = "lenet5", n: int = 3, batch: int = 80, adam: bool = False, **settings: Any
    ) -> float:
        sides = [
            trainer(model, optim.AdamW(lr=0.001) if adam else None, device=device, **settings)
            for device in ("gpu", "cpu")
        ]
        return compare(*sides, n, batch)

    found = {
        "lenet5": far(),
        "mlp, AdamW": far("mlp", batch=33, adam=True),
        "convnet with dropout": far("convnet", n=1, batch=16),
        "small batch": far("mlp", batch=3),
        "clipped": far(clip_norm=0.05),
        "accumulated": far("mlp", accumulation_steps=2),
    }
    # where a gradient is nearly 0, Adam moves by the rate in the direction that rounding gives
    ok = all(value < (1e-3 if "Adam" in name else 1e-4) for name, value in found.items())
    return {"ok": ok, "relative difference": found}


class Grouped(nn.Module):
    """Convolutions with groups and dilation, of images and then of what is left as signals."""

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.images = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, 1, 1, groups=6),
            nn.Conv2d(6, 8, (3, 2), 2, 2, dilation=2, groups=2, bias=False),
        )
        self.signals = nn.Sequential(
            nn.Conv1d(8, 12, 3, 2, 3, dilation=3, groups=4), nn.Tanh(), nn.Flatten()
        )
        self.last = nn.Linear(12 * 28, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Any) -> Any:
        x = self.images(x)
        return self.last(self.signals(x.reshape(x.shape[0], 8, -1)))


@check
def grouped() -> dict[str, Any]:
    """Convolutions with groups and dilation: the same bits on 1 and 2 workers, in bf16 too,
    close to the CPU's.
    """
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        one, two = (trainer(Grouped(), num_gpus=n, precision=precision) for n in (1, 2))
        found[precision] = steps(one) == steps(two)
    cpu = trainer(Grouped(), device="cpu")
    found["far"] = compare(trainer(Grouped()), cpu)
    return {"ok": found["fp32"] and found["bf16"] and found["far"] < 1e-4, **found}


class Normalised(nn.Module):
    """Batch norm and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.images = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, 3)
        )
        self.middle = nn.Sequential(
            nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 150), nn.Tanh()
        )
        self.last = nn.Sequential(nn.LayerNorm(150), nn.Linear(150, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.images(x)))


@check
def normalised() -> dict[str, Any]:
    """Normalisations, whose small gradients and pieces of AdamW share launches: the same bits on
    1 to 3 workers.
    """

    def made(momentum: bool, **settings: Any) -> DistributedTrainer:
        optimizer = optim.SGD(lr=0.05, momentum=0.9) if momentum else optim.AdamW(lr=0.001)
        optimizer.undecayed = optim.vectors
        return trainer(Normalised(), optimizer, **settings)

    hashes = {(m, n): steps(made(m, num_gpus=n)) for m in (False, True) for n in (1, 2, 3)}
    far = compare(made(True), made(True, device="cpu"))
    alike = all(hashes[m, n] == hashes[m, 1] for m, n in hashes)
    return {
        "ok": alike and far < 1e-4,
        "hashes": {f"{m} {n}": h for (m, n), h in hashes.items()},
        "far": far,
    }


class Looking(nn.Module):
    """Images as texts of 98 tokens, two tiles of a GPU's attention, of which each looks back,
    with dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        nn.manual_seed(1)
        self.parts, self.last, self.loss = (
            nn.Linear(8, 24),
            nn.Linear(784, 10),
            nn.CrossEntropyLoss(),
        )

    def forward(self, x: Any) -> Any:
        return self.last(
            F.attention(self.parts(x.reshape(-1, 98, 8)), None, None, 2, 0, dropout=0.1).reshape(
                -1, 784
            )
        )


@check
def looking() -> dict[str, Any]:
    """Attention: the same bits on 1, 2 and 3 workers, close to the CPU's."""
    hashes = {n: steps(trainer(Looking(), num_gpus=n), 2) for n in (1, 2, 3)}
    far = compare(trainer(Looking()), trainer(Looking(), device="cpu"), 2)
    return {"ok": len(set(hashes.values())) == 1 and far < 1e-4, "hashes": hashes, "far": far}


@check
def precisions() -> dict[str, Any]:
    """tf32, bf16 and fp16 train close to float32, with bits that do not depend on workers."""
    plain = trainer()
    steps(plain)
    found: dict[str, Any] = {}
    for precision in ("tf32", "bf16", "fp16"):
        settings = {
            "precision": precision,
            **({"scaler_init_scale": 256.0} if precision == "fp16" else {}),
        }
        one, two = trainer(**settings), trainer(num_gpus=2, **settings)
        same = steps(one) == steps(two)
        found[precision] = {"same": same, "far": apart(one.state_dict(), plain.state_dict())}
    ok = all(f["same"] and 0 < f["far"] < 0.02 for f in found.values())
    return {"ok": ok, **found}


@check
def overflow() -> dict[str, Any]:
    """An overflow at a large loss scale skips the step on all workers and halves the scale."""
    t = trainer(num_gpus=2, precision="fp16", scaler_init_scale=2.0**40)
    before = t.weights_sha256()
    first = steps(t, 1)
    return {"ok": before == first and t.scaler.value == 2.0**39, "scale": t.scaler.value}


@check
def not_finite() -> dict[str, Any]:
    """A loss that is not finite ends the training, and the weights stay those of the step
    before.
    """
    t = trainer(optimizer=optim.SGD(lr=1e30))
    it = iter(loader())
    t.train_step(next(it))
    before = t.weights_sha256()
    try:
        t.train_step(next(it))
    except NumericsError as error:
        return {"ok": t.weights_sha256() == before and t.optimizer.steps == 1, "error": str(error)}
    return {"ok": False}


@check
def pieces() -> dict[str, Any]:
    """Shards computed in several pieces, for want of memory, give the same bits; so do those
    with one fold.
    """
    from odyssey.engine.gpu import plan
    from odyssey.engine.gpu.runner import GpuRunner

    whole = steps(trainer(), 2, 416)
    limit, fold = GpuRunner._limit, plan.SIDE_BY_SIDE
    GpuRunner._limit = lambda self, most: 3  # type: ignore[method-assign]
    try:
        cut = steps(trainer(num_gpus=2), 2, 416)
    finally:
        GpuRunner._limit = limit  # type: ignore[method-assign]
    plan.SIDE_BY_SIDE = 1
    try:
        folded = steps(trainer(), 2, 416)
    finally:
        plan.SIDE_BY_SIDE = fold
    return {"ok": whole == cut == folded, "hashes": [whole, cut, folded]}


@check
def data_that_does_not_fit() -> dict[str, Any]:
    """A data set brought batch by batch, ahead of its step, gives the bits of one that lies on
    the device.
    """
    from odyssey.engine.gpu import group

    def run(workers: int) -> tuple[str, float]:
        t = trainer(num_gpus=workers)
        t.fit(loader(), MNIST.take(100), epochs=1, steps=4)
        return t.weights_sha256(), t.evaluate(MNIST.take(100)).loss

    share = group.DATA_SHARE
    whole = run(1)
    group.DATA_SHARE = 0.0
    try:
        parts = [run(1), run(2)]
    finally:
        group.DATA_SHARE = share
    return {"ok": parts == [whole, whole], "results": [whole, *parts]}


@check
def checkpoints() -> dict[str, Any]:
    """A training that is stopped and resumed, with another number of workers, ends with the same
    bits; and the CPU goes on from a GPU's checkpoint, and a GPU from the CPU's.
    """

    def fit(t: DistributedTrainer, folder: str, n: int) -> str:
        t.fit(loader(), epochs=1, steps=n, checkpoint_dir=folder, checkpoint_every=2)
        return t.weights_sha256()

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        at = [str(Path(name) / str(i)) for i in range(4)]
        adam = {"optimizer": optim.Adam(lr=0.001)}
        whole = fit(trainer("mlp", optim.Adam(lr=0.001)), at[0], 5)
        fit(trainer("mlp", optim.Adam(lr=0.001)), at[1], 3)
        found["resumed on 2"] = (
            fit(trainer("mlp", optim.Adam(lr=0.001), num_gpus=2), at[1], 5) == whole
        )
        fit(trainer("mlp", **adam, device="cpu"), at[2], 3)
        gpu = trainer("mlp", optim.Adam(lr=0.001))
        fit(gpu, at[2], 5)
        cpu = trainer("mlp", optim.Adam(lr=0.001), device="cpu")
        fit(cpu, at[3], 5)
        found["from the CPU"] = apart(gpu.state_dict(), cpu.state_dict()) < 2e-4
    return {"ok": all(found.values()), **found}


@check
def touched() -> dict[str, Any]:
    """What a user writes into parameters or state between steps is what the next step starts
    from.
    """
    one, two = trainer("mlp"), trainer("mlp")
    steps(one, 2)
    steps(two, 2)
    state, optimizer = two.state_dict(), two.training_state.optimizer_state()
    for name, p in two.model.named_parameters():
        p.data[...] = 0.5 * state[name]
    two.training_state.load_optimizer_state({**optimizer, "momentum": 0 * optimizer["momentum"]})
    halved = two.state_dict()
    same = all(np.array_equal(halved[k], 0.5 * state[k]) for k in state)
    third = trainer("mlp")
    steps(third, 2)
    for name, p in third.model.named_parameters():
        p.data[...] = halved[name]
    third.optimizer.state["momentum"][...] = 0
    equal = steps(two, 1) == steps(third, 1)
    return {"ok": same and equal and steps(one, 1) != two.weights_sha256()}


@check
def without_a_shard() -> dict[str, Any]:
    """A worker that has no shard of a batch takes the step of the others: as first batch, and
    after a skipped step.
    """

    def run(n: int) -> str:
        t = trainer("mlp", num_gpus=n, nonfinite="skip")
        t.train_step(data.Batch(MNIST, np.arange(20), 0, 0))
        good = t.state_dict()
        t.arena.params[0] = np.nan
        t.train_step(data.Batch(MNIST, np.arange(20, 100), 0, 1))
        assert not t.last.taken
        for name, p in t.model.named_parameters():
            p.data[...] = good[name]
        t.train_step(data.Batch(MNIST, np.arange(100, 120), 0, 2))
        t.evaluate(MNIST.take(20))
        t.check_replicas()
        return steps(t, 1)

    hashes = [run(n) for n in (1, 2, 3)]
    return {"ok": len(set(hashes)) == 1, "hashes": hashes}


@check
def several_trainers() -> dict[str, Any]:
    """A second trainer of a model, on GPUs or the CPU, starts from what the first has learned;
    and so on in turns.
    """

    def run(second: str) -> tuple[bool, bool]:
        one = trainer("mlp")
        steps(one, 2)
        learned = one.weights_sha256()
        two = DistributedTrainer(
            one.model,
            optim.SGD(lr=0.05),
            backend="local",
            device=second,
            num_gpus=1,
            oversubscribe=True,
            threads=1,
        )
        start = two.weights_sha256()
        steps(two, 1)
        between = two.weights_sha256()
        loss = one.evaluate(MNIST.take(64)).loss
        same = abs(loss - two.evaluate(MNIST.take(64)).loss) < 1e-4
        steps(one, 1)
        return start == learned, same and one.weights_sha256() == two.weights_sha256() != between

    found = {second: run(second) for second in ("gpu", "cpu")}
    return {"ok": all(all(r) for r in found.values()), **found}


@check
def evaluated_between_steps() -> dict[str, Any]:
    """An evaluation between two steps does not touch the batch that was brought ahead."""
    from odyssey.engine.gpu import group

    def run(evaluate: bool) -> str:
        t = trainer("mlp")
        own = t.train_step
        if evaluate:
            t.train_step = lambda batch: (own(batch), t.evaluate(MNIST.take(80)))[0]  # type: ignore[method-assign]
        t.fit(loader(), epochs=1, steps=4)
        return t.weights_sha256()

    share, group.DATA_SHARE = group.DATA_SHARE, 0.0
    try:
        hashes = [run(False), run(True)]
    finally:
        group.DATA_SHARE = share
    return {"ok": hashes[0] == hashes[1], "hashes": hashes}


@check
def fingerprints() -> dict[str, Any]:
    """Fingerprints and norms taken on the device are those of the same numbers on the host."""
    from odyssey.core import fingerprint
    from odyssey.nn import utils

    t = trainer()
    steps(t, 1)
    team = t.stepper.engine.team
    at = team.parameters.addresses[0][0]
    whole = [(at, t.arena.size, 0)]
    device, pieces = team.fingerprints(
        [whole, [(at + 4 * 160, t.arena.size - 160, 160), (at, 160, 0)]]
    )()
    gradients = t.stepper.engine.gradients(t.last.updates[0])
    here = utils.global_norm([(gradients.ctypes.data, gradients.size)])
    there = utils.global_norm([(t.last.updates[0].grads, gradients.size)], machine=team)
    host = fingerprint.of(t.arena.params)
    return {
        "ok": device == pieces == host and here == there,
        "values": [device, pieces, host, here, there],
    }


@check
def offloaded() -> dict[str, Any]:
    """State in host memory, or in files: the bits of state on the device, also over resumes in
    both directions, and the device is asked for fewer bytes, by all of the state or all but a
    window.
    """
    from odyssey.core.gpu_native import Gpu

    asked, own = [0], Gpu.allocate

    def allocate(self: Gpu, nbytes: int) -> int:
        asked[0] += nbytes
        return own(self, nbytes)

    def fit(n: int, folder: str, **settings: Any) -> tuple[Any, ...]:
        make = settings.pop("make")
        gc.collect()  # trainers go by that, with what they have on the device
        asked[0] = 0
        t = trainer("mlp", make(), **settings)
        t.fit(loader(), epochs=1, steps=n, checkpoint_dir=folder, checkpoint_every=2)
        state = {k: np.asarray(v).tobytes() for k, v in t.training_state.optimizer_state().items()}
        return (t.weights_sha256(), state), asked[0] / (4 * t.arena.size), len(t.optimizer.states)

    def momentum() -> Any:
        return optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3)

    def adamw() -> Any:
        made = optim.AdamW(lr=0.001)
        made.undecayed = optim.vectors
        return made

    found: dict[str, Any] = {}
    Gpu.allocate = allocate  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as name:
            at = iter(range(1000))

            def new() -> str:
                return str(Path(name) / str(next(at)))

            for make, more in (
                (momentum, {}),
                (adamw, {"num_gpus": 3}),
                (momentum, {"clip_norm": 0.05, "precision": "fp16", "scaler_init_scale": 256.0}),
            ):
                more = {**more, "make": make}
                plain, before, states = fit(5, new(), **more)
                for where in ("cpu", f"{name}/files"):
                    what = f"{make.__name__} {more.get('precision', 'fp32')} {where[-5:]}"
                    there, after, _ = fit(5, new(), **more, offload=where)
                    out, into = new(), new()
                    fit(3, out, **more, offload=where)
                    fit(3, into, **more)
                    resumed = fit(5, out, **more)[0], fit(5, into, **more, offload=where)[0]
                    saved = (before - after) / more.get("num_gpus", 1)
                    found[what] = [there == plain, resumed == (plain, plain), saved == states]
    finally:
        Gpu.allocate = own  # type: ignore[method-assign]
    return {"ok": all(all(f) for f in found.values()), **found}


@check
def offloaded_in_turns() -> dict[str, Any]:
    """Trainers with the state here and there, of one model and one optimizer, go on where the
    other was; what a user writes into state in host memory is what the next step starts from,
    and it outlives its trainer.
    """

    def run(*places: str | None) -> str:
        model, optimizer = nn.models.build("mlp", seed=1), optim.AdamW(lr=0.001)
        of = [
            DistributedTrainer(
                model,
                optimizer,
                backend="local",
                device="gpu",
                num_gpus=2,
                oversubscribe=True,
                threads=1,
                offload=place,
            )
            for place in places
        ]
        it = iter(loader())
        for k in range(6):
            of[k % len(of)].train_step(next(it))
        optimizer.state["m"][...] *= 0.5
        of[0].train_step(next(it))
        found = of[0].weights_sha256()
        del of
        gc.collect()
        return found + str(float(np.abs(optimizer.state["v"]).sum()))

    with tempfile.TemporaryDirectory() as folder:
        found = [
            run(*p)
            for p in (
                (None,),
                ("cpu",),
                (None, "cpu"),
                ("cpu", None),
                ("cpu", "cpu"),
                (folder, "cpu"),
            )
        ]
    return {"ok": len(set(found)) == 1, "found": found}


@check
def rules() -> dict[str, Any]:
    """Optimizers that are rules: close to the CPU, the bits of 1 GPU on 3 workers, tile by tile,
    offloaded and after a resume, under a schedule, clipping and betas that change; nothing is
    taken of a step that is not finite.
    """
    from odyssey.callbacks import Callback
    from odyssey.optim import rule

    class OtherBetas(Callback):
        def on_step_end(self, context: Any) -> None:
            if context.trainer.steps == 2:
                context.trainer.optimizer.betas = (0.6, 0.8)

    def fit(kind: Any, folder: str, n: int = 5, **settings: Any) -> tuple[Any, ...]:
        optimizer = kind(lr=0.001, weight_decay=0.1)
        optimizer.undecayed = optim.vectors
        schedule = optim.schedule("cosine", 5, 2)
        nn.manual_seed(1)
        layers = nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 10)
        model = nn.Sequential(nn.Flatten(), *layers)
        t = trainer(model, optimizer, clip_norm=0.5, schedule=schedule, **settings)
        t.fit(
            loader(),
            epochs=1,
            steps=n,
            checkpoint_dir=folder,
            checkpoint_every=2,
            callbacks=[OtherBetas()],
        )
        state = {k: np.asarray(v).tobytes() for k, v in t.training_state.optimizer_state().items()}
        gaps = [a.size - sum(p.size for _, p in t.arena.named) for a in optimizer.arrays.values()]
        zeros = [a.size - np.count_nonzero(a) for a in (t.arena.params, *optimizer.state.values())]
        return t.state_dict(), (t.weights_sha256(), state), min(zeros) >= max(gaps) > 0

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        at = iter(range(1000))

        def new() -> str:
            return str(Path(name) / str(next(at)))

        for kind in (optim.Lion, AdamRule, MadeUp):
            weights, plain, zeros = fit(kind, new())
            out = new()
            fit(kind, out, 3)
            same = [fit(kind, out)[1], fit(kind, new(), num_gpus=3)[1]]
            same += [fit(kind, new(), offload=where, num_gpus=2)[1] for where in ("cpu", new())]
            tile, rule.GPU_TILE = rule.GPU_TILE, 4112
            same.append(fit(kind, new())[1])
            rule.GPU_TILE = tile
            far = apart(weights, fit(kind, new(), device="cpu")[0])
            t = trainer("mlp", kind(lr=0.01), nonfinite="skip")
            steps(t, 1)
            t.arena.params[0] = np.nan
            before = [a.tobytes() for a in (t.arena.params, *t.optimizer.state.values())]
            t.train_step(data.Batch(MNIST, np.arange(20), 0, 1))
            same.append([a.tobytes() for a in (t.arena.params, *t.optimizer.state.values())])
            found[kind.__name__] = [
                [*(s == plain for s in same[:-1]), same[-1] == before, not t.last.taken],
                zeros,
                far,
            ]
    return {
        "ok": all(all(same) and zeros and far < 1e-4 for same, zeros, far in found.values()),
        **found,
    }


@check
def refusals() -> dict[str, Any]:
    """What GPUs cannot do is refused before anything runs."""
    from odyssey.parallel.mesh import Mesh

    said = []
    for settings in (
        {"zero": 1},
        {"execution": "eager"},
        {"mesh": Mesh(1, 1, 1), "reduction": "local_sgd"},
    ):
        try:
            trainer("mlp", **settings)
        except ConfigError as error:
            said.append(str(error))
    return {
        "ok": len(said) == 3 and all("not supported on GPUs" in s or "[train]" in s for s in said),
        "said": said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CHECKS)}; default all")
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args()
    if options.list:
        print(*CHECKS)
        return 0
    results = {}
    for name in options.names or CHECKS:
        begun, lost = time.monotonic(), False
        try:
            results[name] = CHECKS[name]()
        except Exception as problem:
            results[name] = {"ok": False, "error": f"{type(problem).__name__}: {problem}"}
            lost = LOST.search(str(problem)) is not None
            if os.environ.get("ODYSSEY_RAISE"):
                raise
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(f"check {name} {json.dumps(results[name])}", flush=True)
        if lost:
            return 3
    print(json.dumps(results))
    return 0 if all(r["ok"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
