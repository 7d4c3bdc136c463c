"""The state of a training with the engine: taken from the ranks as named tensors that know
nothing of ranks, meshes or ZeRO stages, put back on any layout, and looked at.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.files import write_whole
from ..base.outputs import write_weights
from ..core.arena import Arena
from ..core.native import KERNELS
from ..core.precision import GradScaler
from ..engine.layout import Layout
from ..errors import CheckpointError, ConfigError, NumericsError
from ..optim import Schedule
from ..parallel.mesh import Mesh
from ..settings.declarations import of_checkpoint
from . import resume
from .changing import Changing
from .numerics import check_replicas

if TYPE_CHECKING:
    from ..checkpoints import Snapshot
    from ..checkpoints.snapshot import TensorSlice


def _per_step(key: str, text: str) -> Any:
    """A figure of the engine for each training step so far."""
    return property(lambda trainer: getattr(trainer._train, key) / max(trainer.steps, 1), doc=text)


class EngineState(Changing):
    """The part of a DistributedTrainer that is about its state; checkpoints/trainable.py says
    what each method does.
    """

    layout: Layout
    mesh: Mesh
    loss: Any
    schedule: Schedule
    scaler: GradScaler
    _replicas: Callable[[], list[int]] | None = None
    # by id of a step's updates: these, and what makes them
    _prints: dict[int, tuple[Any, Callable[[], list[int]]]]

    def fingerprints(self) -> tuple[int, int]:
        """Returns those of the last step's gradients and of the weights, as far as this rank
        counts them.
        """
        updates = self.last.updates
        own = self._prints.get(id(updates))
        if own is None:  # the updates are kept, so that their id stays their own
            counted = self._train.ownership.counted_updates(updates)
            gradients = [(u.grads, u.n, u.at) for u in counted]
            weights = [(u.params, u.n, u.at) for u in counted]
            own = self._prints[id(updates)] = (
                updates,
                self._train.fingerprints(gradients, weights, after=updates),
            )
        gradients, weights = own[1]()
        return gradients, weights

    def check_replicas(self) -> None:
        """Compares what the ranks hold alike; a collective call.

        Raises NumericsError: on all ranks: they differ, as after a flipped bit in one rank's
        memory.
        """
        if self.layout.zero == 3:
            return
        if self._train.team is not None:
            own = self._train.team.weights()
            wrong = [w for w, value in enumerate(own) if value != own[0]]
            if wrong:
                raise NumericsError(
                    f"[check] step {self.steps}: the weights of worker {wrong[0]} of rank "
                    f"{self.comm.rank} differ from "
                    "those of its worker 0; a memory or hardware error. Go on from the last "
                    "checkpoint (--resume auto)"
                )
            mine = own[0]
        else:
            if self._replicas is None:
                at = self._train.parameters_address
                # none on a rank whose stage has no parameters
                runs = self._train.ownership.replicated()
                self._replicas = self._train.fingerprints([(at + 4 * lo, n, lo) for lo, n in runs])
            (mine,) = self._replicas()
        check_replicas(self.comm, self.steps, {"weights": mine}, self._train.groups.model.rank)

    def weights_sha256(self) -> str:
        """SHA-256 over the bytes of the arena: one value for one training, on any layout.

        Collective, as below.
        """
        self.mode.settle()
        return self._train.ownership.digest()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns copies of the parameters by name, whole on every rank. All ranks call it."""
        self.mode.settle()
        flat = self._train.ownership.parameters()
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
        whole = self._train.ownership.state if self._warned else lambda state: state
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
                self._train.ownership.own_state(own) if self._warned else own
            )
        self.optimizer.steps = int(state["steps"])
        self.optimizer.lr = float(state["lr"])

    @property
    def plan(self) -> str:
        """How the model is cut over ranks, where odyssey decided it; known after the first step."""
        return "\n".join(self._train.ownership.plans)

    def memory(self) -> dict[str, int]:
        """Bytes that training takes on this rank: parameters, gradients and their reduction,
        optimizer, activations.
        """
        gradients, activations = self._train.memory()
        return {
            "parameters": self._train.ownership.parameter_bytes,
            "gradients": gradients,
            "optimizer": sum(a.nbytes for a in self.optimizer.arrays.values()),
            "activations": activations,
        }

    bytes_per_step = _per_step(
        "bytes_sent", "Bytes that this rank sends: gradients, ZeRO's parameters, pp's and tp's."
    )
    wire_bytes_per_step = _per_step(
        "bytes_wire", "Bytes of them to other machines, of gradients along the tree."
    )
    bytes_per_step_uncompressed = _per_step("bytes_plain", "The same along the tree, uncompressed.")

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The summed gradients of the last step by the parameters' names; before division,
        scaling and clipping. Raises ConfigError: ranks have parts of them (zero=, or a mesh).
        """
        updates = self.last.updates if self.last is not None else []
        if sum(u.n for u in updates) != self.arena.size:
            raise ConfigError(
                "[train] the gradients are spread over ranks; they are whole with one rank, or "
                "zero=0"
            )
        flat = self.arena.make(self.arena.size)
        buffers = dict(self.arena.buffers)
        for u in updates:
            flat[u.at : u.at + u.n] = self._train.gradients(u)
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
            write_whole(Path(path), lambda file: write_weights(file, state), mode=0o666)

    @property
    def state_bytes(self) -> int:
        return 4 * self.arena.size * (1 + len(self.optimizer.states))

    def _layers(self) -> dict[str, Any]:
        modules = list(self.model.modules())
        layers = []
        for m in modules:
            named = (getattr(m, name, None) for name in ("p", *getattr(m, "configured", ())))
            # "p" may be a layer
            layers.append((type(m).__name__, *(v for v in named if isinstance(v, (int, float)))))
        return {
            "layers": layers,
            "settings of layers": [said for m in modules for said in resume.settings_of(m)],
            "settings of the loss": resume.settings_of(self.loss),
        }

    def configuration(self) -> dict[str, Any]:
        """Returns what decides the bits of a training beside its data, as it was built.

        Ranks, workers, threads, mesh, ZeRO stage, buckets and execution are not in it: they change
        nothing.
        """
        built = self._built
        frozen = self._built["frozen"]
        settings = {
            k: v for k, v in built["optimizer"].items() if isinstance(v, (int, float, tuple, list))
        }
        strategy = self.layout.reduction
        return as_json(
            {
                "model": [
                    [name, list(p.shape), *["frozen"] * (name in frozen)]
                    for name, p in self.arena.named
                ],
                "optimizer": [type(self.optimizer).__name__, sorted(settings.items())],
                "shard size": self.shard_size,
                **built["layers"],
                "loss": type(self.loss).__name__,
                "precision": [
                    self.precision,
                    self.scaler.growth_interval if self.scaler.enabled else 0,
                ],
                "reduction": "tree" if strategy.same_bits else repr(strategy),
                **of_checkpoint(self.settings),
                "schedule": resume.probed(self.schedule),
                **(self.data_configuration or {"accumulation": self.accumulation_steps}),
            }
        )

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        from ..checkpoints import Snapshot

        arena = self.arena
        arrays = {}
        if not parts:
            flat = self._train.ownership.parameters()
            states = self.optimizer_arrays()
            arrays["parameters"] = {name: arena.view(flat, name) for name, _ in arena.named}
            arrays["optimizer"] = {
                f"{state}/{name}": arena.view(whole, name)
                for state, whole in states.items()
                for name, _ in arena.named
            }
        (residuals, counts) = self._residuals()
        pieces = self._pieces() if parts else []
        if self.comm.rank != 0:
            return Snapshot(self.steps, pieces=pieces) if parts else None
        arrays["residuals"] = residuals
        about = {
            "optimizer": {"steps": self.optimizer.steps, "lr": self.optimizer.lr},
            "scaler": self.scaler.state_dict(),
            "lr_scaling": [self._lr_factor, self._lr_scaled],
            "changed": self.changed(),
            "buckets": None if self.layout.reduction.same_bits else self._train.ownership.cut,
            "configuration": self.configuration(),
            "kernels": KERNELS,
            "bucket size": self.layout.bucket_size_mb,
            "ranks": self.comm.size,
            "mesh": str(self.mesh),
            "zero": self.layout.zero,
            "layout": f"{self.mesh}, zero {self.layout.zero}, {self.layout.workers} workers",
            "residuals": counts,
        }
        arrays = {stem: tensors for stem, tensors in arrays.items() if tensors}
        return Snapshot(self.steps, arrays, {**about, **values}, make=arena.make, pieces=pieces)

    def _pieces(self) -> list[TensorSlice]:
        """The parts of parameters and of the optimizer's arrays that this rank saves."""
        from ..checkpoints.header import rows
        from ..checkpoints.snapshot import TensorSlice

        states = dict(self.optimizer.state)
        shapes = {n: p.shape for n, p in self.arena.named}
        made = []
        for name, runs, params, shift, at in self._train.ownership.saved():
            # the state is cut into parts at the first step
            at = at if self._warned else self.arena.offsets[name]
            for run in rows(runs):
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
        groups = self._train.groups
        arrays: dict[str, np.ndarray] = {}
        counts: dict[str, int] = {}
        for b, memory in sorted(self._train.memories.items()):
            for name, value in sorted(memory.items()):
                key = f"{b + groups.p}/{name}"
                if isinstance(value, int):
                    counts[key] = value
                    continue
                many = isinstance(value, list)
                for i, array in enumerate(value if many else [value]):
                    rows = groups.dp.gather(array)
                    if rows is not None:
                        arrays[f"{key}/{i}" if many else key] = rows
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
        kernels = values.get("kernels", 1)
        if kernels != KERNELS:
            self.say(
                f"[resume] {name} was made with kernels {kernels}, these are {KERNELS}: from "
                "here on the bits may be "
                "others than those of a training that was never stopped"
            )
        other = self._other_layout(values, "ranks", "mesh", "zero", "bucket size")
        if other and now["reduction"] != "tree":
            self.say(
                f"[resume] {name} was made by {other[0]}, {other[1]}: with this reduction the "
                "bits depend on it, "
                "so the training goes on with others"
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
            self._lr_factor = float(values["lr_scaling"][0])
            self._lr_scaled = bool(values["lr_scaling"][1])
            self.optimizer.steps = int(optimizer["steps"])
            self.optimizer.lr = float(optimizer["lr"])
        except (KeyError, ConfigError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: the optimizer's state is not complete: {problem}"
            ) from problem
        self.optimizer.coming = lambda: self._take_states(states)
        with resume.on_all_ranks(self.comm, snapshot.source is not None):
            self._train.load(parameters.read, memories)
            # else it is not known yet whose parts are whose
            if self._warned or snapshot.source is None:
                _ = self.optimizer.state
        self._expected_cut = values.get("buckets"), name
        if "changed" in values:  # older checkpoints have nothing of it
            self.take_back(_entry(values, "changed", name), name)
        self.shard_size = size
        self.steps = snapshot.step

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        parameters = _Named(self.arena, snapshot.arrays.get("parameters", {}), "", name)
        with resume.on_all_ranks(self.comm, snapshot.source is not None):
            self._train.load(parameters.read, {})

    def _take_states(self, states: dict[str, _Named]) -> None:
        """Puts the state of a checkpoint into the optimizer's arrays, as far as this rank has
        them.
        """
        for state, tensors in states.items():
            own = self.optimizer.arrays[state]
            if not self._warned:
                tensors.read(0, own)
                continue
            for lo, params, at in self._train.ownership.held():
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
            return f"{values[what]} ranks", f"{now[what]} run now"
        return None if what is None else (f"{what} {values[what]}", f"{now[what]} now")

    def _memories(self, snapshot: Snapshot, name: str) -> dict[int, dict[str, Any]]:
        """This rank's part of what a compression still has to send."""
        counts = snapshot.values.get("residuals", {})
        arrays = snapshot.arrays.get("residuals", {})
        if not counts and not arrays:
            return {}
        groups = self._train.groups
        values = (
            snapshot.values if groups.pp.size == 1 else {"mesh": "of replicas", **snapshot.values}
        )
        if other := self._other_layout(values, "ranks", "bucket size", "mesh"):
            raise ConfigError(
                f"[resume] {name} was made by {other[0]} with compression, which keeps on each "
                "rank what it has not "
                f"sent yet; {other[1]}. Use as many ranks as then, and give the same --dp and "
                "--pp and bucket size"
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
