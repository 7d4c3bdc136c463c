"""The state of a training of a torch module: named tensors that know nothing of ranks, put back
on any number of them; and what decides its bits, compared between ranks and with checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..checkpoints import Snapshot
from ..core import fingerprint
from ..errors import CheckpointError, ConfigError
from ..parallel import Strategy
from ..settings import of_checkpoint
from ..train import Sharing, as_json, check_replicas, resume
from .arena import ModuleArena
from .changing import ModuleSettings
from .generators import Orders
from .shards import Shards, described, environment


class TrainerState(Sharing):
    """The part of a DistributedTrainer that is about its state; checkpoints/trainable.py says
    what each method does.
    """

    strategy: Strategy
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    per_epoch: bool
    loss: Any
    gather: bool
    arena: ModuleArena
    shards: Shards
    deterministic: str
    zero: int
    _given: dict[str, Any]
    _scheduled: int
    _orders: Orders  # of the latest fit()
    _built: ModuleSettings
    _first: list[str]  # names of the parameters that are trained, as the trainer was made

    @property
    def partial(self) -> bool:
        return self.zero > 1 and self.comm.size > 1

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The module with all of its parameters, for what a program or callback does with them;
        a collective call with zero=3, where ranks have them in parts. What it writes into
        them must be the same on all ranks.
        """
        with self.shards.whole():
            yield self.module

    def memory(self) -> dict[str, int]:
        """Bytes that training takes on this rank: parameters, gradients and their reduction,
        optimizer. With zero 2 and 3 at most, where backward passes reach parameters in the
        reverse of their order.
        """
        parameters, gradients = self.shards.nbytes
        state = [
            v
            for some in self.optimizer.state.values()
            for v in some.values()
            if isinstance(v, torch.Tensor)
        ]
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": sum(v.nbytes for v in state),
        }

    def _description(self) -> dict[str, Any]:
        """The training as it was given: what must be alike on all ranks, and when it goes on."""
        names = {id(p): name for name, p in self.arena.named}
        groups = [
            [[names[id(p)] for p in group["params"]], _hyper(group)]
            for group in self.optimizer.param_groups
        ]
        scheduler = None if self.scheduler is None else _plain(self.scheduler.state_dict())
        return as_json(
            {
                **described(self.arena),
                "optimizer": [type(self.optimizer).__name__, groups],
                "scheduler": [type(self.scheduler).__name__, self.per_epoch, scheduler],
                "loss": getattr(self.loss, "__name__", type(self.loss).__name__)
                + ", gathered" * self.gather,
                "deterministic algorithms": self.deterministic,
            }
        )

    def configuration(self) -> dict[str, Any]:
        return as_json(
            {
                **environment(),
                **self._given,
                "shard size": self.shard_size,
                "precision": self.precision,
                "reduction": "tree" if self.strategy.same_bits else repr(self.strategy),
                **of_checkpoint(self.settings),
                **(self.data_configuration or {"accumulation": self.accumulation_steps}),
            }
        )

    @functools.cached_property
    def _prints(self) -> tuple[fingerprint.Runs, fingerprint.Runs]:
        arena = self.arena
        lo = self.arena.end(self.arena.held.start)
        weights = self.shards.kept_parameters()
        if arena.norms.floats and not (self.partial and self.comm.rank):
            weights.append((arena.norms.running.ctypes.data, arena.norms.floats, arena.extent))
        return fingerprint.Runs(
            [(arena.grads.ctypes.data, arena.grads.size, lo)]
        ), fingerprint.Runs(weights)

    def fingerprints(self) -> tuple[int, int]:
        """Returns those of the mean gradients of the last step, and of parameters and running
        statistics.
        """
        gradients, weights = self._prints
        return gradients(), weights()

    def check_replicas(self) -> None:
        arena = self.arena
        # with zero=3 the latter alone
        own = [fingerprint.of(array) for array in (arena.params, arena.norms.running)]
        check_replicas(self.comm, self.steps, {"weights": fingerprint.hash_of(own)})

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters and buffers by name, copies; tied parameters once. Collective with zero=3."""
        with self.shards.whole():
            return {
                name: t.detach().numpy().copy()
                for name, t in (*self.arena.named, *self.arena.buffers)
            }

    def last_gradients(self) -> dict[str, np.ndarray]:
        """The last step's mean gradients by their names, as the optimizer saw them; collective
        with zero 2 and 3.
        """
        held = [
            (self.arena.named[i][0], g)
            for i, g in zip(self.arena.held, self.arena.gradients, strict=True)
        ]
        found = {name: g.numpy().copy() for name, g in held}
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
                digest.update(t.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def named_state(self) -> dict[str, np.ndarray]:
        """Parameters as "weight NAME", buffers as "buffer NAME", "optimizer STATE of NAME";
        collective with zero.
        """
        with self.shards.whole():
            arrays = {f"weight {n}": p.detach().numpy().copy() for n, p in self.arena.named}
        arrays.update((f"buffer {n}", b.detach().numpy().copy()) for n, b in self.arena.buffers)
        for key, value in self._optimizer_state().items():
            state, _, name = key.partition("/")
            arrays[f"optimizer {state} of {name}"] = np.array(value)
        return arrays

    # --- what may change while it runs ---

    def standing(self) -> dict[str, Any]:
        groups = {
            f"group {i} of the optimizer": _hyper(g)
            for i, g in enumerate(self.optimizer.param_groups)
        }
        written = self.arena.norms.written.items()
        prints = {
            f"the fingerprint of values written into {name} between steps": value
            for name, value in written
        }
        return {**groups, "clip_norm": self.clip_norm, **self._built.values(), **prints}

    def check_alike(self) -> None:
        self._built.share(self.comm)
        with contextlib.suppress(ConfigError):  # the next step raises it, on all ranks
            self.arena.norms.take_over()
        super().check_alike()

    @property
    def _trained(self) -> list[str]:
        """The names of the parameters that have places for gradients."""
        return [name for name, _ in self.arena.named[: self.arena.trained]]

    def _arrange(self, trained: list[str]) -> None:
        """Has places for the gradients of these; a collective call with zero, where others own
        them then.
        """
        state = self._optimizer_state() if self.zero else {}
        self.shards.arrange(trained)
        for name in ("_prints", "_runs"):
            vars(self).pop(name, None)
        if self.zero:
            with self.shards.holding():
                made = self._state_of(state)
            self.optimizer.state.clear()
            self.optimizer.state.update(made)

    def _unfreeze(self) -> None:
        """Parameters that a callback has unfrozen get places for their gradients."""
        if any(p.requires_grad for _, p in self.arena.named[self.arena.trained :]):
            found = {name for name, p in self.arena.named if p.requires_grad} | set(self._trained)
            self._arrange([name for name, _ in self.arena.named if name in found])

    # --- the optimizer's state, of which with zero=1 each rank has a part ---

    @functools.cached_property
    def _runs(self) -> list[range]:
        """The trained parameters that each rank updates: with zero=1 a run of them, else all."""
        trained = self.arena.trained
        ranks = self.comm.size
        return self.arena.shares(0, trained, ranks) if self.zero else [range(trained)] * ranks

    @property
    def owned(self) -> range:
        """Returns the parameters that this rank updates; its optimizer may have state of others,
        and never uses it.
        """
        return self._runs[self.comm.rank]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The floats of the parameters that each rank updates with zero=1."""
        return [(self.arena.end(r.start), self.arena.end(r.stop)) for r in self._runs]

    @property
    def _kept(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters whose state this rank keeps."""
        return self.arena.named[self.owned.start : self.owned.stop]

    @property
    def in_parts(self) -> bool:
        return self.zero > 0 and self.comm.size > 1

    def _optimizer_state(self, parts: bool = False) -> dict[str, Any]:
        """Arrays and numbers as "STATE/NAME", whole, or of the arrays this rank's; a collective
        call with zero=1.
        """
        found: dict[str, Any] = {}
        for name, p in self._kept:
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{key}/{name}"] = value.detach().cpu().numpy()
                elif isinstance(value, (int, float, bool)):
                    found[f"{key}/{name}"] = value
                elif value is not None:
                    raise ConfigError(
                        f"[torch] {type(self.optimizer).__name__} keeps {key} of {name} as a "
                        f"{type(value).__name__}; "
                        "checkpoints hold tensors and numbers"
                    )
        if not self.in_parts:
            return found
        whole: dict[str, Any] = {}
        sent = {
            key: value
            for key, value in found.items()
            if not (parts and isinstance(value, np.ndarray))
        }
        for rank in range(self.comm.size):
            whole.update(resume.spread(self.comm, sent, rank))
        whole.update(found)
        order = {name: i for i, (name, _) in enumerate(self.arena.named)}
        return dict(sorted(whole.items(), key=lambda item: order[item[0].partition("/")[2]]))

    @property
    def state_bytes(self) -> int:
        """About the bytes of a checkpoint: parameters, and two arrays as large for the
        optimizer.
        """
        return 12 * self.arena.extent + 4 * self.arena.norms.floats

    def state(self, values: dict[str, Any], parts: bool = False) -> Snapshot | None:
        optimizer = self._optimizer_state(parts)
        arrays = {key: v for key, v in optimizer.items() if isinstance(v, np.ndarray)}
        self._built.share(self.comm)
        parameters = self._parameters(parts)
        if self.comm.rank != 0:
            return (
                Snapshot(self.steps, {"parameters": parameters, "optimizer": arrays})
                if parts
                else None
            )
        names = {id(p): name for name, p in self.arena.named}
        arrays = {
            "parameters": parameters,
            "buffers": {name: b.detach().numpy() for name, b in self.arena.buffers},
            "optimizer": arrays,
            "generators": self._orders.state(),
        }
        return Snapshot(
            step=self.steps,
            arrays={stem: tensors for stem, tensors in arrays.items() if tensors},
            values={
                "configuration": self.configuration(),
                "optimizer": {
                    "groups": [_hyper(group) for group in self.optimizer.param_groups],
                    "names": [
                        [names[id(p)] for p in group["params"]]
                        for group in self.optimizer.param_groups
                    ],
                    "numbers": {
                        key: v for key, v in optimizer.items() if not isinstance(v, np.ndarray)
                    },
                },
                "scheduler": None
                if self.scheduler is None
                else _plain(self.scheduler.state_dict()),
                "scheduled": self._scheduled,
                "changed": {
                    "clip_norm": self.clip_norm,
                    "modules": self._built.changed(),
                    "trained": []
                    if set(self._trained) == set(self._first)
                    else sorted(self._trained),
                },
                "ranks": self.comm.size,
                "layout": f"{self.comm.size} ranks, zero {self.zero}",
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
            arrays = {name: p.detach().numpy() for name, p in own}
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
        size = saved.get("shard size") if self.shard_size is None else self.shard_size
        if saved.get("shard size") is None or self.shard_size is None:
            now.pop("shard size")
        resume.check(saved, now, name)
        tensors = self._weights_of(snapshot, name)
        try:
            norm = self.clip_norm
            modules = None
            if changed := values.get("changed"):  # 0.2.0 kept none: settings are left as they are
                norm = changed["clip_norm"]
                modules = changed["modules"]
                trained = changed["trained"] or self._first
                if set(trained) != set(self._trained):
                    self.optimizer.state.clear()  # it is replaced below
                    self._arrange(list(trained))
            groups = values["optimizer"]["groups"]
            numbers = values["optimizer"]["numbers"]
            if "names" in values["optimizer"]:
                self._regroup(groups, values["optimizer"]["names"])
            with self.shards.holding():  # strides of states are those of parameters
                state = self._state_of({**arrays.get("optimizer", {}), **numbers})
            scheduler = values["scheduler"]
            scheduled = int(values["scheduled"])
            hyper = [
                _merged(_hyper(g), new)
                for g, new in zip(self.optimizer.param_groups, groups, strict=True)
            ]
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"[resume] {name}: its optimizer is not complete: {problem}"
            ) from problem
        if now["reduction"] != "tree" and values.get("ranks") != self.comm.size:
            self.say(
                f"[resume] {name} was made by {values.get('ranks')} ranks, {self.comm.size} run "
                "now: with this "
                "reduction the bits depend on it, so the training goes on with others"
            )
        self._take(tensors)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        for group, new in zip(self.optimizer.param_groups, hyper, strict=True):
            group.update(new)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(_merged(self.scheduler.state_dict(), scheduler))
        self._scheduled = scheduled
        if modules is not None:
            self._built.restore(modules, name)
        self.clip_norm = None if norm is None else float(norm)
        self._orders.load(arrays.get("generators", {}), name)
        self.shard_size = size
        self.steps = snapshot.step

    def load_weights(self, snapshot: Snapshot, name: str) -> None:
        self._take(self._weights_of(snapshot, name))

    def _weights_of(self, snapshot: Snapshot, name: str) -> list[tuple[torch.Tensor, Any]]:
        """Each parameter and buffer with its value in a snapshot.

        Raises CheckpointError: one is missing.
        """
        return [
            (
                t,
                resume.tensor(
                    snapshot.arrays.get(stem, {}), n, tuple(t.shape), t.detach().numpy().dtype, name
                ),
            )
            for stem, named in (("parameters", self.arena.named), ("buffers", self.arena.buffers))
            for n, t in named
        ]

    def _take(self, values: list[tuple[torch.Tensor, Any]]) -> None:
        # owners are taken
        shared = {id(alias.tensor) for alias in (*self.arena.aliases, *self.arena.norms.aliases)}
        with torch.no_grad(), self.shards.holding() as mine:
            for t, value in values:
                if id(t) in shared:
                    continue
                if mine is None or not isinstance(t, nn.Parameter) or id(t) in mine:
                    t.copy_(torch.from_numpy(np.array(value)))
        self.arena.norms.keep()
        self.arena.norms.written.clear()

    def _regroup(self, groups: list[dict[str, Any]], names: list[list[str]]) -> None:
        """Gives the optimizer the groups that were added to it before a checkpoint, and no
        others.
        """
        own = self.optimizer.param_groups
        parameters = dict(self.arena.named)
        del own[len(groups) :]
        for hyper, wanted in zip(groups[len(own) :], names[len(own) :], strict=True):
            made = _merged(self.optimizer.defaults, hyper)  # whose tuples are tuples
            self.optimizer.add_param_group(
                {**made, "params": [parameters[name] for name in wanted]}
            )

    def _state_of(self, given: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        """The optimizer's state by parameter, of what this rank keeps."""
        mine = dict(self._kept)
        known = {name for name, _ in self.arena.named[: self.arena.trained]}
        state: dict[Any, dict[str, Any]] = {}
        for key, value in given.items():
            what, _, name = key.partition("/")
            if name not in known:
                raise KeyError(key)
            if name not in mine:
                continue
            p = mine[name]
            if not isinstance(value, (int, float)):
                like = torch.from_numpy(np.array(value))
                value = (
                    torch.empty_like(p, dtype=like.dtype).copy_(like)
                    if like.shape == p.shape
                    else like
                )
            state.setdefault(p, {})[what] = value
        return state


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters."""
    return {k: v for k, v in group.items() if k != "params" and _is_plain(v)}


def _plain(value: Any) -> Any:
    """The part of a state that JSON has, and gives back as it was."""
    if isinstance(value, dict):
        named = {k: v for k, v in value.items() if isinstance(k, str)}
        return {k: _plain(v) for k, v in named.items() if _is_plain(v)}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) for k in value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str)


def _merged(own: Any, saved: Any) -> Any:
    """A state with the values that were saved, where JSON had them; tuples are tuples again."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return {**own, **{k: _merged(own.get(k), v) for k, v in saved.items()}}
    if isinstance(own, (list, tuple)) and isinstance(saved, list) and len(own) == len(saved):
        return type(own)(_merged(a, b) for a, b in zip(own, saved, strict=True))
    return saved
