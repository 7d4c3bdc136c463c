"""`DistributedDataParallel` for your own training loop: torch runs fixed shards, and odyssey adds
up their gradients along a tree.

    net = odyssey.torch.DistributedDataParallel(module, shard_size=16)
    for batch in loader:
        for x, y in net.shards(batch):
            loss(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

When the inner loop ends, `p.grad` is the mean over the global batch, with the same bits on any
number of ranks. It differs from torch's class of this name, whose sums depend on the number of
ranks. That one works over `init_process_group("odyssey")`.

A net counts its loops over shards in `steps`, because step and shard seed the random numbers of a
shard. `state_dict()` holds that number, so a loop that is saved and resumed draws the masks of one
that never stopped.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from .. import comm as communication
from ..capture import is_own_class, mark, walk
from ..comm import Communicator
from ..data import Batch
from ..errors import ConfigError, check_integer
from ..parallel import Strategy
from . import captured  # noqa: F401 (it registers torch's generators)
from .data import Shared, tree_of
from .device import default_shard_size, host_array, to_host
from .modes import flushes_subnormals
from .shard_draws import generator
from .shards import LoopError, Shards, weight_of

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
ADVICE_ONE_NET = "make one DistributedDataParallel of nn.ModuleDict({name: module, ...})"
_LEAVES = (torch.Tensor, int, float, str, bytes, type(None))  # of a batch
SAVED_KEY = "odyssey"  # the entry of a state dict's metadata that holds the progress of a net


class SavedProgress(NamedTuple):
    """The progress of a net, as a state dict holds it.

    steps: loops over shards that had ended.
    shard_size: samples per shard; None if it was not known yet.
    seed: of torch's generator.
    batch: (epoch, number) of the last batch of an odyssey `DataLoader`; None if there was none.
    is_pending: True if gradients were waiting for an optimizer's step. They are not in the state.
    """

    steps: int
    shard_size: int | None
    seed: int
    batch: tuple[int, int] | None
    is_pending: bool


class DistributedDataParallel(torch.nn.Module):
    """A module trained by a loop of one's own, with the same bits on any number of ranks.

    The loss must be a mean over the samples that `shards` gave. Gradients add up over several
    `shards(...)` loops until an optimizer steps, or zero_grad(): accumulation is leaving the step
    out. Bits depend on shard_size, seed, threads, torch's version and the processor, not on the
    ranks.

    Args:
        module: parameters of float32 on one device; rank 0's values are sent to all.
        shard_size: samples per shard; None: the loader's, or the default for the first batch's
            size.
        seed: of torch's generator, which is seeded anew for each shard.
        threads: torch's threads; not more, where a rank has more cores, as sums depend on it.
        deterministic: "error": an operation without a deterministic form, or a buffer that nothing
            merges, ends the training; "warn": it is told, and bits are not promised.

    Attributes:
        steps: loops over shards that have ended. `state_dict()` holds it. Set it before the first
            loop if you save weights in a form that loses it, for example with safetensors.

    Raises ConfigError: a parameter or module that cannot be held; ranks whose modules or settings
    differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        shard_size: int | None = None,
        seed: int = 0,
        *,
        threads: int = 1,
        deterministic: str = "error",
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = communication.world() if comm is None else comm
        self._shards = Shards(
            module,
            self.comm,
            Strategy("tree"),
            shard_size=None if shard_size is None else check_integer("shard_size", shard_size, 1),
            seed=check_integer("seed", seed, 0, 2**63 - 1),
            threads=check_integer("threads", threads, 1),
            deterministic=deterministic,
            tell=lambda line: warnings.warn(line, stacklevel=2),
            custom_loop=True,
        )
        self._shards.agree(
            {
                "shard_size": shard_size,
                "seed": seed,
                "deterministic": deterministic,
                # the optimizer's step is in the loop, where no mode is set
                "treatment of subnormal numbers (torch.set_flush_denormal)": flushes_subnormals(),
            }
        )
        self._arena = self._shards.arena
        self._trained = [p for _, p in self._arena.named[: self._arena.trained]]
        self._has_fixed_size = shard_size is not None  # by the program
        self.steps = 0
        self._is_first_loop = True  # of this process
        self._has_drawn = False  # the first loop began at step 0, and shard 0 drew random numbers
        self._last_batch: tuple[int, int] | None = None  # epoch and number, of our loader
        # what load_state_dict() has read; the next loop over shards compares it
        self._loaded: SavedProgress | None = None
        self._loop_is_open = False  # a loop over shards has begun and not ended
        # ids of parameters whose gradient an optimizer has used
        self._stepped_ids: set[int] = set()
        self._runs_shards = False  # shards() is between its first shard and its end
        # the version of each gradient after the last backward(), by the parameter's id
        self._backward_versions: dict[int, int] = {}
        self._shards.backward_versions = self._backward_versions
        for p in self._trained:
            p.register_post_accumulate_grad_hook(self._note_backward)
        _nets.add(self)

    @property
    def shard_size(self) -> int | None:
        """Samples per shard; None as long as neither it nor a batch is known."""
        return self._shards.shard_size

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.module(*inputs, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the module's state dict, which also holds the progress of this net.

        Names and values are those of the module, without `module.` in front, so the module and
        other programs can load it. The progress is in the dict's attribute `_metadata`, which
        torch.save, torch.load and copy.deepcopy keep. An entry, as torch's `get_extra_state` makes
        one, would be an unexpected key for the module itself, and not a tensor for programs that
        walk over the values. A dict that you rebuild, and a file of safetensors, lose the progress.
        Then save `net.steps` yourself.

            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)

        Save after optimizer.step(), because gradients are not in the state. Not a collective call.
        """
        state = self.module.state_dict(*arguments, **keywords)
        prefix = arguments[1] if len(arguments) > 1 else keywords.get("prefix", "")
        if not hasattr(state, "_metadata"):
            with contextlib.suppress(AttributeError):  # a plain dict
                state._metadata = {}
        metadata = getattr(state, "_metadata", None)
        if metadata is not None:
            entry = metadata.setdefault(prefix[:-1], {})
            entry[SAVED_KEY] = self._describe_progress()._asdict()
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Loads values into the module, and continues with the step of the net that was saved.

        All ranks must load the same state. A state of the module alone, or of an older version of
        odyssey, has no step. Then `steps` stays as it is.

            saved = torch.load(path)
            net.load_state_dict(saved["net"])

        Returns the names that are missing and unexpected, as torch does. Raises ConfigError: the
        progress in the state is damaged. RuntimeError of torch: names or shapes differ.
        """
        progress = _read_progress(state_dict)
        names = self.module.load_state_dict(state_dict, *arguments, **keywords)
        if progress is not None:
            self.steps = progress.steps
            self._loaded = progress
            self._last_batch = progress.batch
        return names

    def _describe_progress(self) -> SavedProgress:
        """Returns the progress of this net, for a state dict."""
        is_stepped = any(id(p) in self._stepped_ids for p in self._trained)
        gradients = [] if is_stepped or self._is_first_loop else [p.grad for p in self._trained]
        is_pending = any(g is not None and bool(g.any()) for g in gradients)
        return SavedProgress(
            steps=self.steps,
            shard_size=self.shard_size,
            seed=self._shards.seed,
            batch=self._last_batch,
            is_pending=is_pending or self._loop_is_open,
        )

    def shards(self, batch: Any, weight: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        """This rank's shards of a global batch, to run forward and backward on; to be used up.

            for x, y in net.shards(batch, weight=lambda shard: (shard[1] != -100).sum()):
                loss = F.cross_entropy(net(x), y)  # a mean over the labels that are not -100
                loss.backward()
                losses.append((loss, (y != -100).sum()))

        batch: what an `odyssey.torch.DataLoader` yields, or the whole global batch, alike on all
            ranks: tensors (samples, ...) in tuples, lists or dictionaries.
        weight: a function of a shard that returns its weight: the number that the shard's loss
            divides a sum by. None: the number of its samples. A batch of one shard needs none.
        Raises LoopError: zero_grad(), clipping or a step inside the loop, a shard without
        backward(), one loop inside another, or another net's running statistics or gradients moved
        by it. ConfigError: no tensor in the batch, or a loader with another shard_size.
        """
        if self._runs_shards:
            raise LoopError("[torch] shards() inside a loop over shards(); end that one first")
        samples, cut_shard = self._cut_batch(batch)
        position = (batch.epoch, batch.index) if isinstance(batch, Batch) else None
        self._compare_loaded(position)
        is_new = self._is_first_loop and not self.steps
        is_resumed_data = position is not None and position > (0, 0) and not _loops_of_process[0]
        other_nets = [(net, net._read_norms()) for net in _nets if net is not self]
        old_gradients = self._copy_gradients()
        self._loop_is_open = True
        shard_ranges = self._shards(samples, self.steps)
        watch = contextlib.ExitStack()
        if (self._is_first_loop or (position and not position[1])) and not _compiles():
            watch.enter_context(self._watch_other_modules())
        states = self._find_generators(sys._getframe(1), position)
        self._runs_shards = True
        try:
            for lo, hi in shard_ranges:
                state_before = generator.get_state() if is_new and not lo else None
                shard = cut_shard(lo, hi)
                if weight is not None:
                    self._shards.weigh(weight_of(weight(shard), self._arena.device))
                yield shard  # the user's loop runs the shard here
                if not self._backward_versions:
                    raise LoopError(
                        "[torch] a shard without backward(); call loss.backward() for each of "
                        "shards()"
                    )
                states = self._check_generators(states)
                if state_before is not None:
                    self._has_drawn = not torch.equal(state_before, generator.get_state())
        finally:
            watch.close()
            shard_ranges.close()
            self._runs_shards = False
        if any(net._read_norms() != norms for net, norms in other_nets):
            raise LoopError(
                "[torch] the shards of one net move the running statistics of another, and ranks "
                f"would go apart: eval() that one, or {ADVICE_ONE_NET}"
            )
        sums = self._shards.sums()
        for parameter, mean, old, is_reached in zip(
            self._trained, self._arena.gradients, old_gradients, sums.reached, strict=True
        ):
            if not is_reached:
                parameter.grad = old
            else:
                parameter.grad = mean if old is None else old.add_(mean)
        self._shards.settle()
        self._stepped_ids.clear()
        self._loop_is_open = False
        self.steps += 1
        self._is_first_loop = False
        self._last_batch = position
        _loops_of_process[0] += 1
        if position is not None and is_resumed_data and self._has_drawn:
            self._tell_lost_steps(f"its first batch is number {position[1]} of epoch {position[0]}")

    def _find_generators(
        self, frame: types.FrameType, position: tuple[int, int] | None
    ) -> dict[str, tuple[Any, str]]:
        """Returns the generators that the program holds, and hashes of their states, by name: those
        in variables of the loop and its file, in objects and functions there, and in the module.

        Empty except in the first loop over shards of this process and of each epoch.
        """
        if not self._is_first_loop and (position is None or position[1]):
            return {}
        variables = {**frame.f_globals, **frame.f_locals}
        roots = {name: one for name, one in variables.items() if _may_draw(one)}
        kept_ids = {id(one) for _, one in (*self._arena.named, *self._arena.buffers)}
        entries = walk({**roots, "module": self.module}, kept_ids).entries
        return {
            path: (entry.value, entry.mark)
            for path, entry in entries.items()
            if _is_generator(entry.value)
        }

    def _check_generators(self, states: dict[str, tuple[Any, str]]) -> dict[str, Any]:
        """Raises ConfigError: a shard has drawn from a generator that the program holds.

        Returns an empty dict, because one shard of a loop is looked at.
        """
        for path, (one, state) in states.items():
            if mark(one) == state:
                continue
            message = (
                f"[torch] a shard draws from {path}, a generator of the program. How many shards a "
                "rank computes depends on the number of ranks, so its numbers would too; draw from "
                "torch, numpy.random or random, which odyssey seeds for each shard, or before the "
                "loop over shards()"
            )
            if self._shards.strict:
                raise ConfigError(message)
            self._shards.tell(message)
        return {}

    def mean(self, values: Iterable[tuple[Any, float]]) -> float:
        """Returns the mean of (number, weight) pairs of all ranks; a collective call.

        Pairs are, for example, the loss and the samples of each shard. A rank without shards passes
        none. The mean is the same on all ranks, and on any number of ranks. It is NaN if no rank
        passes a pair. A number of weight 0 isn't used, so it may be NaN.
        """
        numbers = [number for pair in values for number in pair]
        on_host = iter(to_host([one.detach() for one in numbers if isinstance(one, torch.Tensor)]))
        local_pairs = np.array(
            [float(next(on_host) if isinstance(one, torch.Tensor) else one) for one in numbers]
        ).reshape(-1, 2)
        max_pairs = int(self.comm.all_reduce(np.array([len(local_pairs)], np.int64), "max")[0])
        padded = np.zeros((max_pairs, 2))  # pairs of weight 0 add nothing
        padded[: len(local_pairs)] = local_pairs
        numbers, weights = self.comm.all_gather(padded).reshape(-1, 2).T
        total = math.fsum(weights)
        # fsum rounds once: the order of the pairs, and so the ranks, make no difference
        terms = np.multiply(numbers, weights, where=weights != 0, out=np.zeros(len(weights)))
        return math.fsum(terms) / total if total else math.nan

    def _compare_loaded(self, position: tuple[int, int] | None) -> None:
        """Reports differences between the net whose state was loaded and this one, before the first
        loop over shards that follows.

        position: the epoch and number of the next batch, if an odyssey `DataLoader` gives it.
        """
        loaded = self._loaded
        self._loaded = None
        if loaded is None or self.comm.rank:
            return
        problems = []
        for name, saved_value, value in (
            ("shard_size", loaded.shard_size, self.shard_size),
            ("seed", loaded.seed, self._shards.seed),
        ):
            if saved_value is not None and saved_value != value:
                problems.append(
                    f"{name} was {saved_value} and is {value}; use {name}={saved_value}"
                )
        if loaded.is_pending:
            problems.append(
                "it was saved between shards() and optimizer.step(), and gradients are not in it; "
                "save after optimizer.step()"
            )
        if position is not None and loaded.batch is not None and position <= loaded.batch:
            problems.append(
                f"its last batch was number {loaded.batch[1]} of epoch {loaded.batch[0]}, and the "
                f"next one is number {position[1]} of epoch {position[0]}; call "
                "loader.set_epoch(epoch) before each epoch"
            )
        for problem in problems:
            self._shards.tell(
                "[torch] the state that was loaded does not continue as if it had never stopped: "
                + problem
            )

    def _tell_lost_steps(self, reason: str) -> None:
        """Reports, once, that this net began at step 0 although a run was probably resumed."""
        self._has_drawn = False
        self._shards.tell(
            f"[torch] this net began at step 0, but {reason}. If this run was resumed, its dropout "
            "masks and other random numbers differ from those of a run that never stopped. Save "
            "net.state_dict() as it is and use net.load_state_dict(), or set net.steps before the "
            "first loop"
        )

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Reports an optimizer that has taken steps before the first loop over shards ended."""
        if not self._has_drawn:
            return
        own_ids = {id(p) for p in self._trained}
        states = [
            optimizer.state.get(p)
            for g in optimizer.param_groups
            for p in g["params"]
            if id(p) in own_ids
        ]
        if not states:
            return
        if any(map(_has_stepped, states)):
            self._tell_lost_steps("its optimizer has taken steps before")
        self._has_drawn = False

    @contextlib.contextmanager
    def _watch_other_modules(self) -> Iterator[None]:
        """Checks, in the block, that no module outside of all nets updates running statistics.

        They would be those of this rank's shards. It looks at the modules that this thread calls.
        Raises LoopError from their call, or reports them if deterministic is "warn".
        """
        held_ids = {id(part) for net in _nets for part in net.modules()}
        thread = threading.get_ident()
        called: dict[int, torch.nn.Module] = {}  # outside of all nets, the outermost first

        def check(module: torch.nn.Module, inputs: Any) -> None:
            if threading.get_ident() != thread or id(module) in held_ids or id(module) in called:
                return
            called[id(module)] = module
            if not _updates_statistics(module):
                return
            message = (
                f"[torch] {_describe_module(module, called.values())} is called inside the loop "
                "over shards(), and updates running statistics, but no net holds it: they would "
                f"differ on each rank. Call eval() on it, or {ADVICE_ONE_NET}"
            )
            if self._shards.strict:
                raise LoopError(message)
            self._shards.tell(message)

        handle = torch.nn.modules.module.register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()

    def _copy_gradients(self) -> list[torch.Tensor | None]:
        """Returns copies of the gradients that the next loop over shards adds to, for each trained
        parameter.

        A gradient is None if there is none, if an optimizer has used it, or if the last loop was
        left before its end.
        """
        copies: list[torch.Tensor | None] = []
        for parameter in self._trained:
            is_used = self._loop_is_open or id(parameter) in self._stepped_ids
            gradient = None if is_used else parameter.grad
            copies.append(None if gradient is None else gradient.clone())
        return copies

    def _cut_batch(self, batch: Any) -> tuple[int, Callable[[int, int], Any]]:
        """Returns the samples of a batch, and a function from a shard's (first sample, one past the
        last) to its data.

        Sets the shard size if it is not known yet. Raises ConfigError: the batch has no samples,
        holds something that cannot be cut, or is of a loader with another shard size.
        """
        shards = self._shards
        if isinstance(batch, Batch) and isinstance(shared_batch := batch.dataset, Shared):
            self._agree_on_size(shared_batch)
            return len(shared_batch), shared_batch.shard
        batch = pytree.tree_map(lambda t: tree_of(t) if isinstance(t, Mapping) else t, batch)
        leaves = pytree.tree_leaves(batch)
        tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
        strange = next((t for t in leaves if not isinstance(t, _LEAVES)), None)
        if strange is not None:
            name = type(strange).__name__
            raise ConfigError(
                f"[torch] shards() of a batch with a {name}, which is not cut; give tensors (n, "
                "...)"
            )
        if not tensors or not len(tensors[0]):
            raise ConfigError(
                "[torch] shards() of a batch without samples; give tensors (samples, ...)"
            )
        samples = len(tensors[0])
        is_host = shards.arena.device.is_host
        shards.shard_size = self._find_size() or default_shard_size(samples, is_host)

        def cut_shard(lo: int, hi: int) -> Any:
            def cut(leaf: Any) -> Any:
                has_samples = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == samples
                return leaf[lo:hi].clone() if has_samples else leaf  # a copy, as in data.part()

            return pytree.tree_map(cut, batch)

        return samples, cut_shard

    def _find_size(self) -> int | None:
        """Returns the shard size so far; None if neither the program, nor the state that was
        loaded, nor an earlier batch has set it.
        """
        if self.shard_size is None and self._loaded is not None:
            return self._loaded.shard_size  # the default for the first batch back then
        return self.shard_size

    def _agree_on_size(self, batch: Shared) -> None:
        """Sets one shard size for this net and the loader of a batch: the one that the program
        has set, for either of them.

        Raises ConfigError: the program has set different sizes.
        """
        size = self._find_size()
        if size is not None and (self._has_fixed_size or not batch.loader.fixed_size):
            batch.follow(size)
        self._shards.shard_size = batch.shard_size

    def _read_norms(self) -> tuple[bytes, list[int]]:
        """Returns the current running statistics and counters of the normalisations."""
        norms = self._arena.norms
        return host_array(norms.running).tobytes(), [int(counter) for _, counter in norms.counters]

    def _note_backward(self, parameter: torch.Tensor) -> None:
        """Notes the version of a gradient after a backward pass has added to it.

        So other writes, such as clipping, can be told from those of backward(). It runs once for
        each tensor of each shard, so it does nothing else.

        Raises LoopError: backward() was called outside of this net's loop over shards.
        """
        if not self._runs_shards:
            self._refuse_backward()
        self._backward_versions[id(parameter)] = parameter.grad._version  # type: ignore[union-attr]

    def _refuse_backward(self) -> None:
        """Raises LoopError, because backward() has reached this net outside of its shards."""
        if any(net._runs_shards for net in _nets):
            raise LoopError(
                "[torch] backward() inside of one net's shards() reaches the parameters of "
                f"another: set requires_grad_(False) on them meanwhile, or {ADVICE_ONE_NET}"
            )
        raise LoopError(
            "[torch] backward() outside of shards(): `for x, y in net.shards(batch): "
            "loss(net(x), y).backward()`"
        )


_nets: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_loops_of_process = [0]  # loops over shards that have ended, of all nets


def _may_draw(value: Any) -> bool:
    """Tells whether a variable of a loop is a generator, or may hold one that a shard draws from.

    Loaders and data sets may draw too, but they do so outside of the shards.
    """
    if _is_generator(value) or isinstance(value, functools.partial):
        return True
    is_data = any(hasattr(type(value), name) for name in ("__iter__", "__getitem__", "__len__"))
    is_module = isinstance(value, (nn.Module, torch.optim.Optimizer, types.ModuleType))
    return not (is_data or is_module or isinstance(value, type)) and is_own_class(type(value))


def _is_generator(value: Any) -> bool:
    """Tells whether a value is a random number generator that odyssey does not seed."""
    seeded = (np.random.mtrand._rand, torch.default_generator)
    return isinstance(value, _GENERATORS) and all(value is not one for one in seeded)


def _read_progress(state_dict: Any) -> SavedProgress | None:
    """Returns the progress that a state dict holds; None if it holds none.

    Raises ConfigError: it is damaged.
    """
    metadata = getattr(state_dict, "_metadata", None)
    entry = metadata.get("") if isinstance(metadata, Mapping) else None
    saved = entry.get(SAVED_KEY) if isinstance(entry, Mapping) else None
    if saved is None:
        return None
    try:
        batch = saved["batch"]
        size = saved["shard_size"]
        return SavedProgress(
            steps=check_integer("steps", saved["steps"], 0),
            shard_size=None if size is None else check_integer("shard_size", size, 1),
            seed=check_integer("seed", saved["seed"], 0),
            batch=None
            if batch is None
            else (check_integer("epoch", batch[0], 0), check_integer("batch", batch[1], 0)),
            is_pending=bool(saved["is_pending"]),
        )
    except (KeyError, IndexError, TypeError, ConfigError) as problem:
        raise ConfigError(
            f"[torch] the state dict's progress is damaged ({problem}); use one that "
            "net.state_dict() returned"
        ) from problem


def _has_stepped(state: Mapping[str, Any] | None) -> bool:
    """Returns whether the state of a parameter shows that its optimizer has taken a step.

    Some optimizers make their state before the first step: it is of zeros, or counts 0 steps.
    """
    if not state:
        return False
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(t, torch.Tensor) and bool(t.any()) for t in state.values())


def _compiles() -> bool:
    """Returns whether this process has called torch.compile.

    Hooks on all modules would be compiled with the modules, and then again without them.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def _updates_statistics(module: torch.nn.Module) -> bool:
    """Returns whether a call of this layer updates its running statistics."""
    return (
        isinstance(module, torch.nn.modules.batchnorm._NormBase)
        and module.training
        and module.track_running_stats
        and module.running_mean is not None
    )


def _describe_module(module: torch.nn.Module, called: Iterable[torch.nn.Module]) -> str:
    """Returns the name of a module within the first of some modules that holds it."""
    kind = type(module).__name__
    for outer in called:
        for name, part in outer.named_modules():
            if part is module and name:
                return f"{name} ({kind}) of a {type(outer).__name__}"
    return f"a {kind}"


def _list_parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ids of the parameters that an optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check_no_open_loop(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Raises LoopError if a net's loop over shards is open; called before an optimizer's step."""
    for net in _nets:
        if net._loop_is_open and _list_parameter_ids(optimizer) & {id(p) for p in net._trained}:
            raise LoopError(
                "[torch] optimizer.step() before the loop over shards() has ended; step after it"
            )
        net._note_optimizer(optimizer)


def _note_stepped(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    """Notes the parameters whose gradients an optimizer's step has used; called after it."""
    for net in _nets:
        net._stepped_ids |= _list_parameter_ids(optimizer)


optimizers.register_optimizer_step_pre_hook(_check_no_open_loop)
optimizers.register_optimizer_step_post_hook(_note_stepped)
