"""The state of a training with the engine: taken from the ranks as named tensors that know
nothing of ranks, meshes or ZeRO stages, put back on any layout, and looked at.
"""

from __future__ import annotations

import bisect
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.files import write_whole
from ..base.outputs import write_weights
from ..base.paths import expand_path
from ..capture import Capture
from ..core import fingerprint, setting_versions
from ..core.arena import Arena
from ..core.native import KERNELS
from ..core.products import count_convolutions
from ..core.program import Record
from ..engine.layout import Layout
from ..errors import CheckpointError, ConfigError, NumericsError, counted
from ..parallel.mesh import Mesh
from ..settings.declarations import Training, of_checkpoint
from . import agreement, resume
from .arithmetic import ARITHMETIC, Arithmetic
from .changing import ChangingSettings
from .feed import BatchFeed
from .rank_checks import EngineChecks
from .sharing import BatchSharing
from .stepper import EngineStepper

CAPTURED = "captured"  # the file of a checkpoint with the arrays that the walk has captured

if TYPE_CHECKING:
    from ..checkpoints import Snapshot
    from ..checkpoints.snapshot import TensorSlice


class EngineState:
    """The state of a training with the engine: taken, put back, and looked at.

    checkpoints/trainable.py says what each method does that a trainer has as well.

    Args:
        stepper: has the model, the optimizer, their memory and the engine.
        changing: settings that may change while the training runs.
        checks: are told what a checkpoint says of the next step.
        capture: knows the state beyond weights.
        sharing: has the shard size.
        feed: has the description of the data.
        arithmetic: compares what this process computes with a checkpoint.
        layout, mesh: of all ranks.
        settings: of the trainer.
        say: tells the user a line.
    """

    def __init__(
        self,
        *,
        stepper: EngineStepper,
        changing: ChangingSettings,
        checks: EngineChecks,
        capture: Capture,
        sharing: BatchSharing,
        feed: BatchFeed,
        arithmetic: Arithmetic,
        layout: Layout,
        mesh: Mesh,
        settings: Training,
        say: Callable[[str], None],
    ) -> None:
        self.stepper = stepper
        self.engine = stepper.engine
        self.optimizer = stepper.optimizer
        self.arena = stepper.arena
        self.scaler = stepper.scaler
        self.learning_rate = stepper.learning_rate
        self.mode = stepper.mode
        self.comm = stepper.mode.comm
        self.changing = changing
        self.checks = checks
        self.capture = capture
        self.sharing = sharing
        self.feed = feed
        self.arithmetic = arithmetic
        self.layout = layout
        self.mesh = mesh
        self.settings = settings
        self.say = say
        # by id of a step's updates: these, and what makes their fingerprints
        self._prints: dict[int, tuple[Any, Callable[[], list[int]]]] = {}

    def fingerprints(self) -> tuple[int, int]:
        """Returns those of the last step's gradients and of the weights, as far as this rank
        counts them.
        """
        updates = self.stepper.last.updates
        own = self._prints.get(id(updates))
        if own is None:  # the updates are kept, so that their id stays their own
            counted = self.engine.ownership.counted_updates(updates)
            gradients = [(u.grads, u.n, u.at) for u in counted]
            weights = [(u.params, u.n, u.at) for u in counted]
            own = self._prints[id(updates)] = (
                updates,
                self.engine.fingerprints(gradients, weights, after=updates),
            )
        gradients, weights = own[1]()
        return gradients, weights

    def weights_sha256(self) -> str:
        """SHA-256 over the bytes of the arena: one value for one training, on any layout.

        Collective, as below.
        """
        self.mode.settle()
        return self.engine.ownership.digest()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns copies of the parameters by name, whole on every rank. All ranks call it."""
        self.mode.settle()
        flat = self.engine.ownership.parameters()
        return {name: self.arena.view(flat, name).copy() for name, _ in self.arena.named}

    def optimizer_state(self) -> dict[str, Any]:
        """Step count, rate and state arrays in the arena's layout, whole, on every rank;
        collective likewise.
        """
        self.mode.settle()
        arrays = {name: whole.copy() for name, whole in self.optimizer_arrays().items()}
        return {"steps": self.optimizer.steps, "lr": self.optimizer.lr, **arrays}

    def optimizer_arrays(self) -> dict[str, np.ndarray]:
        """The optimizer's arrays in the arena's layout, whole, on every rank; training may go on
        in them.
        """
        # cut into parts at the first step
        whole = self.engine.ownership.state if self.stepper.is_recorded else lambda state: state
        _ = self.optimizer.state  # as the last step left it, also on GPUs or in a checkpoint
        return {name: whole(own) for name, own in self.optimizer.arrays.items()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes back what optimizer_state() gave, on this layout or another; all ranks call it.

        Raises ConfigError: the state is of another optimizer or model; nothing was changed.
        """
        arrays = {name: np.asarray(state.get(name, ())) for name in self.optimizer.states}
        wrong = next((name for name, a in arrays.items() if a.shape != (self.arena.size,)), None)
        if wrong or "steps" not in state or "lr" not in state:
            raise ConfigError(
                f"[train] the state has no {wrong or 'steps and lr'} of this optimizer and model "
                f"({self.arena.size} numbers); give what optimizer_state() gave"
            )
        self.optimizer.coming = None
        for name, whole in arrays.items():
            own = np.ascontiguousarray(whole, np.float32)
            self.optimizer.arrays[name][...] = (
                self.engine.ownership.own_state(own) if self.stepper.is_recorded else own
            )
        self.optimizer.steps = int(state["steps"])
        self.optimizer.lr = float(state["lr"])

    @property
    def plan(self) -> str:
        """How odyssey has cut the model over ranks, which shards run together, and how many
        convolutions Winograd's algorithm computes.

        It is known after the first step.
        """
        lines = list(self.engine.ownership.plans)
        for runner in self.engine.runners[-1:]:
            lines += [*runner.plan_lines, *_describe_convolutions(runner.programs[0].records)]
        return "\n".join(lines)

    def memory(self) -> dict[str, int]:
        """Bytes that training takes on this rank: parameters, gradients and their reduction,
        optimizer, activations.
        """
        gradients, activations = self.engine.memory()
        return {
            "parameters": self.engine.ownership.parameter_bytes,
            "gradients": gradients,
            "optimizer": sum(a.nbytes for a in self.optimizer.arrays.values()),
            "activations": activations,
        }

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The summed gradients of the last step by the parameters' names; before division,
        scaling and clipping. Raises ConfigError: ranks have parts of them (zero=, or a mesh).
        """
        last = self.stepper.last
        updates = last.updates if last is not None else []
        if sum(u.n for u in updates) != self.arena.size:
            raise ConfigError(
                "[train] the gradients are spread over ranks; they are whole with one rank, or "
                "zero=0"
            )
        flat = self.arena.make(self.arena.size)
        buffers = dict(self.arena.buffers)
        for u in updates:
            flat[u.at : u.at + u.n] = self.engine.gradients(u)
        return {
            name: self.arena.view(flat, name).copy()
            for name, _ in self.arena.named
            if name not in buffers
        }

    def named_state(self) -> dict[str, np.ndarray]:
        arrays = {f"weight {name}": value for name, value in self.state_dict().items()}
        for state, flat in self.optimizer_arrays().items():
            views = ((name, self.arena.view(flat, name).copy()) for name, _ in self.arena.named)
            arrays.update((f"optimizer {state} of {name}", value) for name, value in views)
        return arrays

    def save_weights(self, path: str | Path) -> None:
        """Writes the parameters as safetensors, whole or not at all.

        Rank 0 writes; all ranks call.
        """
        state = self.state_dict()
        if self.comm.rank == 0:
            write_whole(expand_path(path), lambda file: write_weights(file, state), mode=0o666)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Gives weights (p.data) and the optimizer's state (optimizer.state), whole on every
        rank, to be written alike.

        A collective call: all ranks enter and leave it. On layouts where ranks have parts of them
        (ZeRO, pipelines, tensor parallelism) they can be written nowhere else. Raises
        NumericsError: ranks have written other values; nothing was changed. An exception inside
        changes nothing either.
        """
        self.mode.settle()
        whole = self.engine.ownership.parameters().copy()
        states = {name: array.copy() for name, array in self.optimizer_arrays().items()}
        with self.arena.whole(whole), self.optimizer.whole(states):
            yield
        prints = [fingerprint.signed(fingerprint.of(a)) for a in (whole, *states.values())]
        rank, _ = agreement.first_other(self.comm, prints)
        if rank is not None:
            raise NumericsError(
                f"[train] within writing() rank {rank} has written other values than rank 0; write "
                "the same on all ranks, whatever part of the model they have"
            ).on_all_ranks()
        self.engine.ownership.load(lambda lo, out: np.copyto(out, whole[lo : lo + out.size]))
        for name, array in states.items():
            self.optimizer.arrays[name][...] = (
                self.engine.ownership.own_state(array) if self.stepper.is_recorded else array
            )

    @property
    def in_parts(self) -> bool:
        return self.stepper.in_parts

    partial = in_parts  # fingerprints() are then of this rank's part

    @property
    def state_bytes(self) -> int:
        return 4 * self.arena.size * (1 + len(self.optimizer.states))

    def configuration(self) -> dict[str, Any]:
        """Returns what decides the bits of a training beside its data, as it was built.

        Ranks, workers, threads, mesh, ZeRO stage, buckets and execution are not in it: they change
        nothing.
        """
        built = self.changing.built
        frozen = built["frozen"]
        settings = {
            k: v
            for k, v in built["optimizer"].items()
            if isinstance(v, (int, float, tuple, list)) and k[0] != "_"
        }
        strategy = self.layout.reduction
        is_weighted = self.stepper.engine.programs.weight is not None
        return as_json(
            {
                "model": [
                    [name, list(p.shape), *["frozen"] * (name in frozen)]
                    for name, p in self.arena.named
                ],
                "optimizer": [type(self.optimizer).__name__, sorted(settings.items())],
                "shard size": self.sharing.shard_size,
                **built["layers"],
                "loss": type(self.stepper.loss).__name__ + ", weighted" * is_weighted,
                "precision": [
                    self.settings.precision,
                    self.scaler.growth_interval if self.scaler.enabled else 0,
                ],
                "reduction": "tree" if strategy.same_bits else repr(strategy),
                **of_checkpoint(self.settings),
                resume.CONV_ALGORITHM: self.engine.programs.conv_algorithm,
                "schedule": built["schedule"],
                **(self.feed.configuration or {"accumulation": self.settings.accumulation_steps}),
            }
        )

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        from ..checkpoints import Snapshot

        arena = self.arena
        arrays = {}
        if not parts:
            flat = self.engine.ownership.parameters()
            states = self.optimizer_arrays()
            arrays["parameters"] = {name: arena.view(flat, name) for name, _ in arena.named}
            arrays["optimizer"] = {
                f"{state}/{name}": arena.view(whole, name)
                for state, whole in states.items()
                for name, _ in arena.named
            }
        residuals, counts = self._residuals()
        pieces = self._pieces() if parts else []
        captured_arrays: dict[str, np.ndarray] = {}
        captured = self._captured(captured_arrays)
        if self.comm.rank != 0:
            return Snapshot(self.stepper.steps, pieces=pieces) if parts else None
        arrays["residuals"] = residuals
        arrays[CAPTURED] = captured_arrays
        about = {
            "optimizer": {"steps": self.optimizer.steps, "lr": self.optimizer.lr},
            "scaler": self.scaler.state_dict(),
            "lr_scaling": [self.learning_rate.factor, self.learning_rate.is_scaled],
            "changed": {**self.changing.changed(), "program": self.checks.program()},
            "buckets": None if self.layout.reduction.same_bits else self.engine.ownership.cut,
            "configuration": self.configuration(),
            "kernels": KERNELS,
            ARITHMETIC: self.arithmetic.state(),
            "bucket size": self.layout.bucket_size_mb,
            "ranks": self.comm.size,
            "mesh": str(self.mesh),
            "zero": self.layout.zero,
            "layout": f"{self.mesh}, zero {self.layout.zero}, {self.layout.workers} workers",
            "residuals": counts,
            "captured": captured,
        }
        arrays = {stem: tensors for stem, tensors in arrays.items() if tensors}
        return Snapshot(
            self.stepper.steps, arrays, {**about, **values}, make=arena.make, pieces=pieces
        )

    def _captured(self, arrays: dict[str, np.ndarray]) -> dict[str, Any] | None:
        """Returns what the walk has captured on rank 0, and None on others; a collective call.

        arrays: receives the arrays of it. Raises ConfigError, on all ranks: see `Capture.state`.
        """
        with resume.on_all_ranks(self.comm, self.mode.together):
            return self.capture.state(arrays) if self.comm.rank == 0 else None

    def _pieces(self) -> list[TensorSlice]:
        """The parts of parameters and of the optimizer's arrays that this rank saves."""
        from ..checkpoints.header import merge_runs
        from ..checkpoints.snapshot import TensorSlice

        states = dict(self.optimizer.state)
        shapes = {n: p.shape for n, p in self.arena.named}
        made = []
        for name, runs, params, shift, at in self.engine.ownership.saved():
            # the state is cut into parts at the first step
            at = at if self.stepper.is_recorded else self.arena.offsets[name]
            for run in merge_runs(runs):
                made.append(TensorSlice("parameters", name, shapes[name], run, params, shift))
                for state, own in states.items():
                    own = own.view(np.ndarray)
                    path = f"{state}/{name}"
                    made.append(TensorSlice("optimizer", path, shapes[name], run, own, at))
        return made

    def _residuals(self) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        """Returns what a compression still has to send: arrays (replicas, ...) on rank 0, and
        numbers that replicas have alike. The first part of a name is the bucket; in a
        pipeline, where a stage has one, it is the stage.
        """
        groups = self.engine.groups
        arrays: dict[str, np.ndarray] = {}
        counts: dict[str, int] = {}
        for b, memory in sorted(self.engine.memories.items()):
            for name, value in sorted(memory.items()):
                key = f"{b + groups.p}/{name}"
                if isinstance(value, int):
                    counts[key] = value
                    continue
                many = isinstance(value, list)
                for i, array in enumerate(value if many else [value]):
                    merge_runs = groups.dp.gather(array)
                    if merge_runs is not None:
                        arrays[f"{key}/{i}" if many else key] = merge_runs
        # what other stages have comes to the first
        for stage in range(1, groups.pp.size if groups.d == 0 else 1):
            theirs = resume.spread(groups.pp, [arrays, counts], stage)
            if groups.pp.rank == 0:
                arrays.update(theirs[0])
                counts.update(theirs[1])
        return arrays, counts

    def load(self, snapshot: Snapshot, name: str) -> None:
        values = snapshot.values
        arrays = snapshot.arrays
        arena = self.arena
        now = self.configuration()
        saved = _entry(values, "configuration", name)
        algorithm = resume.conv_algorithm_of(saved, name)
        saved = {**saved, resume.CONV_ALGORITHM: algorithm}
        if self.settings.conv_algorithm == "auto":
            now[resume.CONV_ALGORITHM] = algorithm
        own_size = self.layout.shard_size
        size = saved.get("shard size") if own_size is None else own_size
        if saved.get("shard size") is None:  # made before the first step: it had none yet
            now.pop("shard size")
        elif own_size is None:
            now["shard size"] = size
        resume.check(saved, now, name)
        if size is not None and (type(size) is not int or size < 1):
            raise CheckpointError(
                f"[resume] {name} has the shard size {size!r}; it was not written by a trainer"
            )
        self._resume_algorithm(algorithm, name)
        if not resume.has_same_kernels(snapshot):
            self.say(
                f"[resume] {name} was made with kernels {values.get('kernels', 1)}, these are "
                f"{KERNELS}: from here "
                "on the bits may be others than those of a training that was never stopped"
            )
        else:
            self.arithmetic.check_saved(values.get(ARITHMETIC), name, snapshot.step)
        other = self._other_layout(values, "ranks", "mesh", "zero", "bucket size")
        if other and now["reduction"] != "tree":
            self.say(
                f"[resume] {name} was made by {other[0]}, {other[1]}: with this reduction the bits "
                "depend on it, so the training goes on with others"
            )
        optimizer = _entry(values, "optimizer", name)
        scaler = _entry(values, "scaler", name)
        parameters = _Named(arena, arrays.get("parameters", {}), "", name)
        states = {
            s: _Named(arena, arrays.get("optimizer", {}), f"{s}/", name)
            for s in self.optimizer.states
        }
        memories = self._memories(snapshot, name)
        try:
            self.scaler.load_state_dict(scaler)
            self.learning_rate.factor = float(values["lr_scaling"][0])
            self.learning_rate.is_scaled = bool(values["lr_scaling"][1])
            self.optimizer.steps = int(optimizer["steps"])
            self.optimizer.lr = float(optimizer["lr"])
        except (KeyError, ConfigError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: the optimizer's state is not complete: {problem}"
            ) from problem
        self.optimizer.coming = lambda: self._take_states(states)
        with resume.on_all_ranks(self.comm, snapshot.source is not None):
            self.engine.load(parameters.read, memories)
            # else it is not known yet whose parts are whose
            if self.stepper.is_recorded or snapshot.source is None:
                _ = self.optimizer.state
        self.checks.expect_buckets(values.get("buckets"), name)
        if "changed" in values:  # older checkpoints have nothing of it
            self.changing.restore(_entry(values, "changed", name), name)
        self.restore_captured(snapshot, name, final=False)
        self.sharing.shard_size = size
        self.stepper.steps = snapshot.step

    def _resume_algorithm(self, algorithm: str, name: str) -> None:
        """Computes convolutions as before the checkpoint, if the user left that to odyssey."""
        if self.settings.conv_algorithm != "auto":
            return
        if algorithm == "winograd" and self.settings.device == "gpu":
            self.say(
                f"[resume] {name} was made with Winograd's algorithm, which GPUs don't have: from "
                "here on convolutions are computed directly, and results differ from a run that "
                "stays on CPUs"
            )
            return
        for engine in (self.engine, self.stepper.evaluation_engine):
            engine.programs.use_algorithm(algorithm)

    def restore_captured(self, snapshot: Snapshot, name: str, final: bool) -> None:
        """Restores what the walk has captured; checkpoints before 0.3 have nothing of it.

        final: see `Capture.restore`.
        """
        if "captured" in snapshot.values:
            saved = _entry(snapshot.values, "captured", name)
            self.capture.restore(saved, snapshot.arrays.get(CAPTURED, {}), name, final)
            setting_versions.models.rise()
            setting_versions.updates.rise()

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        parameters = _Named(self.arena, snapshot.arrays.get("parameters", {}), "", name)
        with resume.on_all_ranks(self.comm, snapshot.source is not None):
            self.engine.load(parameters.read, {})

    def _take_states(self, states: dict[str, _Named]) -> None:
        """Puts the state of a checkpoint into the optimizer's arrays, as far as this rank has
        them.
        """
        for state, tensors in states.items():
            own = self.optimizer.arrays[state]
            if not self.stepper.is_recorded:
                tensors.read(0, own)
                continue
            for lo, params, at in self.engine.ownership.held():
                tensors.read(lo, own[at : at + params.size])

    def _other_layout(self, values: dict[str, Any], *names: str) -> tuple[str, str] | None:
        """Returns what made a checkpoint and what runs now, in words, of the first part of a
        layout that differs.
        """
        lay = self.layout
        now = {
            "ranks": self.comm.size,
            "mesh": str(lay.mesh),
            "zero": lay.zero,
            "bucket size": lay.bucket_size_mb,
        }
        what = next((name for name in names if values.get(name, now[name]) != now[name]), None)
        if what == "ranks":
            return counted(values[what]), f"{now[what]} run now"
        return None if what is None else (f"{what} {values[what]}", f"{now[what]} now")

    def _memories(self, snapshot: Snapshot, name: str) -> dict[int, dict[str, Any]]:
        """This rank's part of what a compression still has to send."""
        counts = snapshot.values.get("residuals", {})
        arrays = snapshot.arrays.get("residuals", {})
        if not counts and not arrays:
            return {}
        groups = self.engine.groups
        values = (
            snapshot.values if groups.pp.size == 1 else {"mesh": "of replicas", **snapshot.values}
        )
        if other := self._other_layout(values, "ranks", "bucket size", "mesh"):
            raise ConfigError(
                f"[resume] {name} was made by {other[0]} with compression, which keeps on each "
                f"rank what it has not sent yet; {other[1]}. Use as many ranks as then, and give "
                "the same --dp and --pp and bucket size"
            )
        memories: dict[int, dict[str, Any]] = {}
        for key, value in counts.items():
            b, _, what = key.partition("/")
            memories.setdefault(int(b), {})[what] = int(value)
        for key in sorted(
            arrays, key=lambda k: [int(w) if w.isdigit() else w for w in k.split("/")]
        ):
            b, what, *index = key.split("/")
            memory = memories.setdefault(int(b), {})
            own = np.array(np.asarray(arrays[key])[groups.dp.rank], order="C")
            if index:
                memory.setdefault(what, []).append(own)
            else:
                memory[what] = own
        if groups.pp.size == 1:
            return memories
        return {0: memories[groups.p]} if groups.p in memories else {}


def _describe_convolutions(records: list[Record]) -> list[str]:
    """Returns a line about the convolutions by Winograd's algorithm, if there are any."""
    tiled, convolutions = count_convolutions(record.op for record in records)
    return (
        [f"Winograd's algorithm computes {tiled} of {convolutions} convolutions"] if tiled else []
    )


def _entry(values: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise CheckpointError(f"[resume] {name} has no {key}; it was not written by a trainer")
    return found


class _Named:
    """Named tensors of a checkpoint, of the arena's layout.

    Raises CheckpointError: one is missing, or is another.
    """

    def __init__(self, arena: Arena, tensors: dict[str, Any], prefix: str, name: str) -> None:
        each = ((own, p.shape, np.dtype(np.float32)) for own, p in arena.named)
        found = [
            resume.tensor(tensors, prefix + own, shape, dtype, name) for own, shape, dtype in each
        ]
        self._tensors = list(zip(arena.offsets.values(), found, strict=True))

    def read(self, lo: int, out: np.ndarray) -> None:
        """Puts what is from float lo of the arena on into an array."""
        first = max(bisect.bisect_right(self._tensors, lo, key=lambda tensor: tensor[0]) - 1, 0)
        last = bisect.bisect_left(self._tensors, lo + out.size, key=lambda tensor: tensor[0])
        for at, tensor in self._tensors[first:last]:
            a = max(at, lo)
            b = min(at + tensor.size, lo + out.size)
            if a < b and isinstance(tensor, np.ndarray):
                out[a - lo : b - lo] = tensor.reshape(-1)[a - at : b - at]
            elif a < b:
                tensor.read(a - at, out[a - lo : b - lo])


def as_json(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return json.loads(json.dumps(value))
