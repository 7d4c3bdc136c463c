"""The state of a training of a torch module: named tensors that know nothing of ranks, put back
on any number of them; and what decides its bits, compared between ranks and with checkpoints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..capture import Capture, mark
from ..checkpoints import Snapshot
from ..core import fingerprint
from ..errors import CheckpointError, ConfigError, counted
from ..nn import settings as of_modules
from ..parallel import Strategy
from ..settings import Training, of_checkpoint
from ..train import ARITHMETIC, CAPTURED, BatchSharing, as_json, resume
from .arena import plain_name
from .changing import share
from .device import host_array
from .feed import ModuleFeed
from .optimizer_state import SavedState, merged
from .shards import described, environment, machine
from .stepper import ModuleStepper

# the file of a checkpoint with the arrays of values of the optimizer that are not plain tensors
OPTIMIZER_VALUES = "optimizer_values"


class ModuleState:
    """The state of a training of a torch module: taken, put back, and looked at.

    checkpoints/trainable.py says what each method does that a trainer has as well.

    Args:
        stepper: has the module, the optimizer, their memory and the shards.
        capture: knows the state beyond weights.
        sharing: has the shard size.
        feed: has the description of the data, and the order of samples.
        strategy: how gradients are summed.
        deterministic: "error" or "warn", as the trainer was given it.
        settings: of the trainer.
        say: tells the user a line.
    """

    def __init__(
        self,
        *,
        stepper: ModuleStepper,
        capture: Capture,
        sharing: BatchSharing,
        feed: ModuleFeed,
        strategy: Strategy,
        deterministic: str,
        settings: Training,
        say: Callable[[str], None],
    ) -> None:
        self.stepper = stepper
        self.module = stepper.module
        self.optimizer = stepper.optimizer
        self.scheduler = stepper.scheduler
        self.shards = stepper.shards
        self.arena = stepper.arena
        self.parts = stepper.parts
        self.partial = stepper.partial
        self.comm = stepper.comm
        self.capture = capture
        self.sharing = sharing
        self.feed = feed
        self.strategy = strategy
        self.deterministic = deterministic
        self.settings = settings
        self.say = say
        self.description = self._describe()
        # names of the parameters that are trained, as the trainer was created
        self._first_trained = self.parts.trained
        # the version of the parts that these are of, and fingerprints of gradients and weights
        self._prints: tuple[int, fingerprint.Runs, fingerprint.Runs] | None = None

    @property
    def in_parts(self) -> bool:
        return self.parts.in_parts

    def memory(self) -> dict[str, int]:
        """Bytes that training takes on this rank: parameters, gradients and their reduction,
        optimizer. With zero 2 and 3 at most, where backward passes reach parameters in the
        reverse of their order.
        """
        parameters, gradients = self.shards.nbytes
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": self.parts.nbytes,
        }

    def _describe(self) -> dict[str, Any]:
        """The training as it was given: what must be alike on all ranks, and when it goes on."""
        self.parts.normalize_groups()
        optimizer = self.parts.state
        groups = list(zip(optimizer.group_names(), optimizer.describe_groups(), strict=True))
        state = {} if self.scheduler is None else self.scheduler.state_dict()
        scheduler = {str(key): mark(value) for key, value in state.items()}
        return as_json(
            {
                **described(self.arena),
                "optimizer": [type(self.optimizer).__name__, groups],
                "scheduler": [type(self.scheduler).__name__, self.stepper.per_epoch, scheduler],
                "loss": getattr(self.stepper.loss, "__name__", type(self.stepper.loss).__name__)
                + ", gathered" * self.stepper.gather
                + ", weighted" * (self.stepper.weight is not None),
                "deterministic algorithms": self.deterministic,
            }
        )

    def configuration(self) -> dict[str, Any]:
        scaler = self.stepper.scaler
        return as_json(
            {
                **environment(self.shards.modes, self.arena.device),
                **self.description,
                "shard size": self.sharing.shard_size,
                "precision": self.settings.precision,
                **({"growth of the loss scale": scaler.growth_interval} if scaler.enabled else {}),
                "reduction": "tree" if self.strategy.same_bits else repr(self.strategy),
                **of_checkpoint(self.settings),
                **(self.feed.configuration or {"accumulation": self.settings.accumulation_steps}),
            }
        )

    def fingerprints(self) -> tuple[int, int]:
        """Returns those of the mean gradients of the last step, and of parameters and running
        statistics.
        """
        arena = self.arena
        if not arena.device.is_host:
            return tuple(  # type: ignore[return-value]
                arena.device.fingerprint(tensors) for tensors in self._printed_tensors()
            )
        version = self.parts.version
        if self._prints is None or self._prints[0] != version:
            gradients, weights = (
                fingerprint.Runs(
                    [(flat.data_ptr(), flat.numel(), start) for flat, start in tensors]
                )
                for tensors in self._printed_tensors()
            )
            self._prints = version, gradients, weights
        _, gradient_prints, weight_prints = self._prints
        return gradient_prints(), weight_prints()

    def _printed_tensors(self) -> tuple[list[tuple[torch.Tensor, int]], ...]:
        """Returns the gradients, and the weights with running statistics, of this rank: flat
        tensors with their offsets in floats.
        """
        arena = self.arena
        weights = self.shards.kept_parameters()
        if arena.norms.floats and not (self.partial and self.comm.rank):
            weights.append((arena.norms.running, arena.extent))
        return [(arena.grads, arena.end(arena.held.start))], weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters and buffers by name, copies; tied parameters once. Collective with zero=3."""
        with self.shards.whole():
            return {
                name: host_array(t).copy() for name, t in (*self.arena.named, *self.arena.buffers)
            }

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The last step's mean gradients by their names, as the optimizer saw them; collective
        with zero 2 and 3.
        """
        held = [
            (self.arena.named[i][0], g)
            for i, g in zip(self.arena.held, self.arena.gradients, strict=True)
        ]
        found = {name: host_array(g).copy() for name, g in held}
        if not self.partial:
            return found
        return {
            k: v
            for rank in range(self.comm.size)
            for k, v in resume.spread(self.comm, found, rank).items()
        }

    def weights_sha256(self) -> str:
        """SHA-256 over parameters and buffers: one value of a training on any ranks.

        Collective with zero=3.
        """
        digest = hashlib.sha256()
        with self.shards.whole():
            for _, t in sorted([*self.arena.named, *self.arena.buffers], key=lambda pair: pair[0]):
                digest.update(host_array(t.detach().contiguous()).tobytes())
        return digest.hexdigest()

    def named_state(self) -> dict[str, np.ndarray]:
        """Parameters as "weight NAME", buffers as "buffer NAME", "optimizer STATE of NAME";
        collective with zero.
        """
        with self.shards.whole():
            arrays = {f"weight {n}": host_array(p).copy() for n, p in self.arena.named}
        arrays.update((f"buffer {n}", host_array(b).copy()) for n, b in self.arena.buffers)
        optimizer = self.parts.gathered()
        for key, value in {**optimizer.numbers, **optimizer.arrays, **optimizer.tensors}.items():
            state, slash, name = key.partition("/")
            if isinstance(value, (dict, list, str)):  # its arrays have other keys
                value = np.frombuffer(json.dumps(value).encode(), np.uint8)
            if slash and value is not None:
                arrays[f"optimizer {state} of {name}"] = np.array(value)
        return arrays

    @property
    def state_bytes(self) -> int:
        """About the bytes of a checkpoint: parameters, and two arrays as large for the
        optimizer.
        """
        return 12 * self.arena.extent + 4 * self.arena.norms.floats

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        self.parts.normalize_groups()
        scaler = self.stepper.scaler
        group_names = self.parts.state.group_names()
        optimizer = self.parts.gathered(parts)
        share(self.comm, self.capture)
        captured_arrays: dict[str, np.ndarray] = {}
        group_arrays: dict[str, np.ndarray] = {}
        with resume.on_all_ranks(self.comm):
            captured = self.capture.state(captured_arrays) if self.comm.rank == 0 else None
            groups = self.parts.state.encode_groups(group_arrays)
        arrays = {
            "parameters": self._parameters(parts),
            "optimizer": optimizer.tensors,
            OPTIMIZER_VALUES: optimizer.arrays,
        }
        if self.comm.rank != 0:
            return Snapshot(self.stepper.steps, arrays) if parts else None
        arrays |= {
            "buffers": {name: host_array(_as_real(b)) for name, b in self.arena.buffers},
            OPTIMIZER_VALUES: {**optimizer.arrays, **group_arrays},
            "generators": self.feed.orders.state(),
            CAPTURED: captured_arrays,
        }
        return Snapshot(
            step=self.stepper.steps,
            arrays={stem: tensors for stem, tensors in arrays.items() if tensors},
            values={
                "configuration": self.configuration(),
                "optimizer": {
                    "typed": True,  # as capture/values.py has values, not as plain JSON
                    "groups": groups,
                    "names": group_names,
                    "order": self.parts.state.order(),
                    "numbers": optimizer.numbers,
                    "others": optimizer.others,
                },
                "captured": captured,
                ARITHMETIC: self.shards.arithmetic.state(),
                "scheduled": self.stepper.scheduled,
                **({"scaler": scaler.state_dict()} if scaler.enabled else {}),
                "empty buffers": self._list_empty_buffers(),
                "changed": {
                    "clip_norm": self.stepper.clip_norm,
                    "trained": []
                    if set(self.parts.trained) == set(self._first_trained)
                    else sorted(self.parts.trained),
                },
                "ranks": self.comm.size,
                "layout": f"{self.comm.size} ranks, zero {self.settings.zero}",
                **values,
            },
        )

    def _parameters(self, parts: bool) -> dict[str, np.ndarray]:
        """The parameters for a checkpoint: all, or `parts`: of each rank what no other has.

        Collective with zero=3.
        """
        with self.shards.holding() if parts else self.shards.whole() as mine:
            own = [
                (n, p)
                for n, p in self.arena.named
                if (self.comm.rank == 0 if mine is None else id(p) in mine)
            ]
            arrays = {name: host_array(p) for name, p in own}
            return (
                arrays
                if parts or not self.partial
                else {name: a.copy() for name, a in arrays.items()}
            )

    def load(self, snapshot: Snapshot, name: str) -> None:
        values = snapshot.values
        arrays = snapshot.arrays
        saved = values.get("configuration")
        now = self.configuration()
        if not isinstance(saved, dict) or "torch version" not in saved:
            raise ConfigError(f"[resume] {name} is not of a PyTorch module; name another directory")
        saved = {"device": ["cpu"], **saved}  # before 0.3, modules were on the CPU
        size = (
            saved.get("shard size") if self.sharing.shard_size is None else self.sharing.shard_size
        )
        if saved.get("shard size") is None or self.sharing.shard_size is None:
            now.pop("shard size")
        is_compiled = now.pop("torch.compile")
        if saved.get("torch.compile", is_compiled) != is_compiled:
            self.say(
                f"[resume] {name} was made {'without' if is_compiled else 'with'} torch.compile, "
                f"this module is {'' if is_compiled else 'not '}compiled: results may differ in "
                "their last bits from here on"
            )
        if "captured" not in values:  # before 0.3, the scheduler was described in another way
            saved = {**saved, "scheduler": saved.get("scheduler", [])[:2]}
            now["scheduler"] = now["scheduler"][:2]
        libraries = {
            key: (now[key], saved[key])
            for key in machine(self.arena.device)
            if key in saved and saved[key] != now[key]
        }
        resume.check({**saved, **{key: now[key] for key in libraries}}, now, name)
        self.shards.arithmetic.check_saved(values.get(ARITHMETIC), name, snapshot.step, libraries)
        self._empty_buffers(values.get("empty buffers", ()))
        tensors = self._weights_of(snapshot, name)
        optimizer = values.get("optimizer")
        self.parts.check_saved(optimizer, name)
        try:
            norm = self.stepper.clip_norm
            if changed := values.get("changed"):  # 0.2.0 kept none: settings are left as they are
                norm = changed["clip_norm"]
                trained = changed["trained"] or self._first_trained
                if set(trained) != set(self.parts.trained):
                    self.optimizer.state.clear()  # it is replaced below
                    self.parts.arrange(list(trained))
            state, groups = self._read_optimizer(optimizer, arrays)
            scheduled = int(values["scheduled"])
            loss_scale = values["scaler"] if self.stepper.scaler.enabled else {}
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: its optimizer is not complete: {problem}"
            ) from problem
        self._warn_of_ranks(values, now, name)
        self.parts.state.regroup(groups, optimizer.get("names"))
        self._take(tensors)
        self.parts.state.replace(state)
        self.stepper.scheduled = scheduled
        self._restore_scale(loss_scale)
        if "captured" in values:
            self.restore_captured(snapshot, name, final=False)
        else:
            self._restore_older(values, name)
        self.stepper.clip_norm = None if norm is None else float(norm)
        self.feed.orders.load(arrays.get("generators", {}), name)
        self.sharing.shard_size = size
        self.stepper.steps = snapshot.step

    def _warn_of_ranks(self, values: dict[str, Any], now: dict[str, Any], name: str) -> None:
        """Reports to the user if results depend on the number of ranks, which has changed."""
        if now["reduction"] != "tree" and values.get("ranks") != self.comm.size:
            self.say(
                f"[resume] {name} was made by {counted(values.get('ranks'))}, {self.comm.size} run "
                "now: with this "
                "reduction the bits depend on it, so the training goes on with others"
            )

    def _restore_scale(self, saved: dict[str, Any]) -> None:
        """Restores the loss scale of fp16; saved: its state, or empty in other precisions."""
        if saved:
            self.stepper.scaler.load_state_dict(saved)

    def restore_captured(self, snapshot: Snapshot, name: str, final: bool) -> None:
        """Restores what the walk has captured; checkpoints before 0.3 have nothing of it.

        final: see `Capture.restore`.
        """
        saved = snapshot.values.get("captured")
        if saved is not None:
            self.capture.restore(saved, snapshot.arrays.get(CAPTURED, {}), name, final)

    def _restore_older(self, values: dict[str, Any], name: str) -> None:
        """Restores the scheduler, and settings of modules, from a checkpoint before 0.3."""
        if self.scheduler is not None:
            state = merged(self.scheduler.state_dict(), values.get("scheduler"))
            self.scheduler.load_state_dict(state)
        roots = {"module": self.module, "loss": self.stepper.loss}
        by_root: dict[str, dict[str, Any]] = {}
        for key, value in values.get("changed", {}).get("modules", {}).items():
            root, _, path = key.partition(".")
            by_root.setdefault(root, {})[path] = of_modules.decoded(value)
        for root, saved in by_root.items():
            try:
                of_modules.restore(roots[root], saved)
            except (AttributeError, KeyError, TypeError, ValueError) as problem:
                raise CheckpointError(
                    f"[resume] {name}: settings of the {root} can't be restored: {problem}"
                ) from problem

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        self._take(self._weights_of(snapshot, name))

    def _weights_of(self, snapshot: Snapshot, name: str) -> list[tuple[torch.Tensor, Any]]:
        """Returns each parameter and buffer with its value in a snapshot.

        A buffer that the program has registered as None, or that has grown, takes the shape that
        it has there.

        Raises CheckpointError: one is missing, or has another shape or dtype.
        """
        self._fill_buffers(snapshot.arrays.get("buffers", {}), name)
        growing = {id(buffer) for _, buffer in self.arena.norms.fixed_buffers}
        pairs = []
        for stem, named in (("parameters", self.arena.named), ("buffers", self.arena.buffers)):
            saved = snapshot.arrays.get(stem, {})
            for tensor_name, tensor in named:
                real = _as_real(tensor)
                shape = tuple(real.shape)
                if id(tensor) in growing and tensor_name in saved:
                    shape = tuple(saved[tensor_name].shape)
                dtype = host_array(real).dtype
                pairs.append((real, resume.tensor(saved, tensor_name, shape, dtype, name)))
        return pairs

    def _list_empty_buffers(self) -> list[str]:
        """Returns the names of the buffers that are registered as None."""
        return sorted(
            plain_name(f"{path}.{attribute}").lstrip(".")
            for path, part in self.module.named_modules()
            for attribute, buffer in part._buffers.items()
            if buffer is None
        )

    def _empty_buffers(self, names: Iterable[str]) -> None:
        """Sets buffers to None that a program had set to None."""
        names = set(names)
        for path, part in self.module.named_modules():
            for attribute in part._buffers:
                if plain_name(f"{path}.{attribute}").lstrip(".") in names:
                    part._buffers[attribute] = None

    def _fill_buffers(self, saved: Mapping[str, Any], name: str) -> None:
        """Makes tensors for buffers that are None, and have a value in a snapshot.

        Raises CheckpointError: a buffer of the snapshot isn't registered.
        """
        present = {buffer_name for buffer_name, _ in self.arena.buffers}
        modules = {plain_name(f"{path}."): one for path, one in self.module.named_modules()}
        for buffer_name in sorted({*saved} - present):
            path, _, attribute = buffer_name.rpartition(".")
            owner = modules.get(f"{path}." if path else ".")
            if owner is None or owner._buffers.get(attribute, 0) is not None:
                raise CheckpointError(
                    f"[resume] {name} has the buffer {buffer_name}, and the module has none of "
                    "this name; build it as before"
                )
            value = torch.from_numpy(np.array(saved[buffer_name]))
            owner._buffers[attribute] = self.arena.device.put(value)
        self.arena.norms.list_buffers()

    def _take(self, values: list[tuple[torch.Tensor, Any]]) -> None:
        # owners are taken
        shared = {id(alias.tensor) for alias in (*self.arena.aliases, *self.arena.norms.aliases)}
        with torch.no_grad(), self.shards.holding() as mine:
            for t, value in values:
                if id(t) in shared:
                    continue
                if mine is None or not isinstance(t, nn.Parameter) or id(t) in mine:
                    source = torch.from_numpy(np.array(value))
                    if t.shape == source.shape:
                        t.copy_(source)
                    else:  # a buffer that grows
                        t.data = self.arena.device.put(source)
        self.arena.norms.keep()
        self.arena.norms.written.clear()

    def _read_optimizer(
        self, saved: dict[str, Any], arrays: dict[str, dict[str, Any]]
    ) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
        """Returns the state of the optimizer in a checkpoint, and the groups' hyperparameters.

        saved: the optimizer's part of the checkpoint's values. arrays: all of the checkpoint.

        Raises KeyError, TypeError or ValueError: the checkpoint is damaged.
        """
        value_arrays = arrays.get(OPTIMIZER_VALUES, {})
        others = saved.get("others", [])  # missing before version 0.3
        state = SavedState(arrays.get("optimizer", {}), saved["numbers"], others, value_arrays)
        order = saved.get("order", ())  # missing before version 0.3
        decoded = self.parts.state.in_order(self.parts.decode(state), order)
        return decoded, self.parts.state.decode_groups(saved, value_arrays)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a complex tensor (...) as pairs (..., 2), because files of
    checkpoints have no complex numbers. Other tensors stay as they are.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
