"""Programs of a model, its loss and metrics for a shard: recorded, and kept for the settings
they were recorded with.

    number      core/setting_versions.py: one comparison a step; an attribute, mode or requires_grad
                changed
    settings    all of these (nn/settings.py); for each that was met a program per form of a shard
                is kept
    lines       of a program (listing.py): what it is, to be compared with another recording, rank
                or checkpoint

What no number tells of, a global or a list that forward() reads, is found by recording again
(`again`), at epochs, checkpoints and resumes. A forward() that is not the same twice would depend
on how many shards a rank computes: it is refused when it is first recorded.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core import native, setting_versions
from ..core.arena import Arena
from ..core.fingerprint import hash_of
from ..core.placement import FIRST, Device
from ..core.program import Range, Record, Recorder, ShardEager, using
from ..core.tensor import Parameter, Tensor, empty, layout_of, no_grad
from ..data.nested import Form, Leaf, leaves, mapped
from ..errors import ConfigError, OdysseyError
from ..nn import Module, settings
from ..nn.module import in_mode
from .listing import Listed, first_difference, said, watched
from .metrics import record as record_metrics

MAX_SETTINGS = 8  # settings whose programs are kept; a schedule of dropout has one a step

Executor = Recorder | ShardEager


class ModelSettings(NamedTuple):
    """Settings that were met: their number, the attributes of each module, and the names of what
    is not trained.
    """

    number: int
    snapshot: list[tuple[Any, dict[str, Any]]]
    frozen: tuple[str, ...]


Key = tuple[Any, ...]  # samples of a shard, whether they must be in lanes, and the form


class Recording(NamedTuple):
    """A recorded program: as the model makes it, the same on all ranks.

    Neither is to be changed.
    """

    records: list[Record]
    lines: list[str]
    fingerprint: int  # 63 bits of a hash over the lines
    # the lines without those of metrics, which a resumed training may have others of
    training: list[str]
    extent: int  # the most lanes of one of its tensors


class Programs:
    """The programs of a model, with a backward pass if `train`.

    See the head of this file.

    Args:
        gpu: whether the shards are computed on GPUs.
        eager: whether shards are computed op by op. Programs are then recorded to compare them.
        like: the programs for training, where these are for evaluation.
        Others: as Engine has them.

    Attributes:
        setting: a number for what the model was set to when `current` was called last.
        outputs: of the model, as the loss saw them; metric_at: places of metrics among the
            statistics; once recorded.
    """

    def __init__(
        self,
        model: Module,
        arena: Arena,
        loss: Any,
        metrics: Any,
        *,
        train: bool,
        precision: str,
        conv_algorithm: str,
        scaled: bool,
        gpu: bool,
        eager: bool,
        like: Programs | None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.loss = loss
        self.metrics = metrics
        self.train = train
        self.precision = precision
        self.conv_algorithm = conv_algorithm
        self.scaled = scaled
        self.gpu = gpu
        self.eager = eager
        self.shape: tuple[int, Form] | None = None  # of a shard of the last batch
        self._used = 0  # the settings that it was computed with
        # settings and shapes since `astray` was asked last
        self._recent_runs: dict[tuple[int, int, Form], None] = {}
        self._strayed = ""  # what it has to say of those that are not known any more
        self._of_metrics = 0, 0  # records of metrics, in the latest recording
        self.metric_at: dict[str, int] = {}
        self.outputs: int | None = None
        # attributes that it sets
        self.by_forward: set[tuple[int, str]] = set() if like is None else like.by_forward
        self._seen_version = -1  # the number at which the settings were looked at
        self._numbers = itertools.count(1)
        self._settings_by_key: dict[Key, ModelSettings] = {}
        self._recordings: dict[Key, Recording] = {}
        self._modules = dict(self.model.named_modules())
        self._parameters = dict(self.model._state())
        # lists and dicts, which change without a word, and their copies
        self._inside: list[tuple[Any, Any]] = []
        self.setting = 0

    # --- settings ---

    def current(self) -> int:
        """The number of what the model is set to now.

        Raises ConfigError: it has other parameters or submodules.
        """
        if setting_versions.models.value != self._seen_version or any(
            value != copied for value, copied in self._inside
        ):
            self.look()
        return self.setting

    def look(self) -> None:
        """Looks at all settings once more."""
        self._seen_version = setting_versions.models.value
        self._check_structure()
        snapshot: dict[int, tuple[Any, dict[str, Any]]] = {}
        entries: list[tuple[str, Any]] = []
        self._inside = []
        for prefix, module in (("", self.model), ("loss.", self.loss)):
            if not isinstance(module, Module):
                continue
            for key, owner, name, value in settings.attributes(module):
                if name in vars(owner) and not self._is_setting(owner, name):
                    continue
                plain = settings.is_value(value)
                entries.append(
                    (prefix + key, repr(settings.encoded(value)) if plain else id(value))
                )
                if plain and _may_change(value):
                    self._inside.append((value, copy.deepcopy(value)))
                    value = self._inside[-1][1]
                snapshot.setdefault(id(owner), (owner, {}))[1][name] = value
        frozen = tuple(name for name, p in self.arena.named if not p.requires_grad)
        key = (frozen, *entries)
        model_settings = self._settings_by_key.pop(key, None)
        if model_settings is None or (
            model_settings.number != self.setting and self._is_stale(model_settings.number)
        ):
            model_settings = ModelSettings(next(self._numbers), list(snapshot.values()), frozen)
        self._settings_by_key[key] = model_settings
        self.setting = model_settings.number
        while len(self._settings_by_key) > MAX_SETTINGS:
            dropped = self._settings_by_key[next(iter(self._settings_by_key))]
            for run in [run for run in self._recent_runs if run[0] == dropped.number]:
                self._strayed = self._strayed or self._differs(*run)
                del self._recent_runs[run]
            self._settings_by_key = {
                key: model_settings
                for key, model_settings in self._settings_by_key.items()
                if model_settings is not dropped
            }
            self._recordings = {k: r for k, r in self._recordings.items() if k[0] != dropped.number}

    def _is_stale(self, number: int) -> bool:
        """Returns True if the program kept for these settings, which are set again, is another
        one now: meanwhile what forward() reads beyond attributes of modules has changed.
        """
        kept_key = next((key for key in self._recordings if key[0] == number), None)
        if kept_key is None:
            return False
        _, n, lanes, *form = kept_key
        recording, _ = self._recorded_once(n, Form(*form), lanes)
        return first_difference(self._recordings[kept_key].lines, recording.lines) is not None

    def _check_structure(self) -> None:
        """Raises ConfigError: a module or parameter was added, replaced or taken away since the
        trainer was made.
        """
        modules = dict(self.model.named_modules())
        parameters = dict(self.model._state())
        for kind, old, new, instead in (
            ("submodule", self._modules, modules, "build the model first"),
            (
                "parameter",
                self._parameters,
                parameters,
                "change values in place (p.data[...] = ..., load_state_dict)",
            ),
        ):
            for name in {**old, **new}:
                if new.get(name) is not old.get(name):
                    does = (
                        "is new"
                        if name not in old
                        else "is gone"
                        if name not in new
                        else "is another one"
                    )
                    raise ConfigError(
                        f"[train] the {kind} {name} {does} since the trainer was made; "
                        f"{instead}, or make a new trainer"
                    )

    def values(self) -> dict[str, Any]:
        """Returns what the model is set to, as a checkpoint has it: without what forward()
        itself sets.
        """
        forward_keys = {
            key
            for key, owner, name, _ in settings.attributes(self.model)
            if (id(owner), name) in self.by_forward
        }
        return {
            key: value
            for key, value in settings.values(self.model).items()
            if key not in forward_keys
        }

    # --- recordings ---

    def recorded(self, n: int, form: Form, lanes: bool = False) -> Recording:
        """The program of a shard of n samples, of the present settings; however few, in `lanes`.

        Raises ConfigError: forward() looks at values, or is not the same twice.
        """
        key = (self.current(), n, lanes, *form)
        if key not in self._recordings:
            recording = self._recorded_twice(n, form, lanes)
            self._seen_version = -1  # forward() may have set attributes, known as its own now
            key = (self.current(), n, lanes, *form)
            self._recordings[key] = recording
        return self._recordings[key]

    def tail(self, n: int, tail_size: int, form: Form) -> int:
        """Samples of the program of a last shard that has `tail_size` where the others have n: so
        many, where that saves work and nothing but sizes is another, in the layout of the
        others; else n, the missing ones being zeros.
        """
        full_recording = self.recording(n, form) if tail_size and not self.gpu else None
        lanes = layout_of(n) == "lanes"
        groups = native.library().lanes
        if full_recording is None or (
            lanes
            and -(-full_recording.extent // groups)
            == -(-full_recording.extent * tail_size // n // groups)
        ):
            return n
        try:
            tail_recording = self.recorded(tail_size, form, lanes)
        except OdysseyError:  # a model that counts on the size
            return n
        return (
            tail_size
            if _skeleton(tail_recording.records) == _skeleton(full_recording.records)
            else n
        )

    def rows(self, form: Form) -> int:
        """Rows of a sample in lanes, as most of one tensor of the model's: 1 for an image, for a
        text its tokens.
        """
        recorder = self.recorder(1, lanes=True)
        self.traced(recorder, 1, form)
        return max(recorder.extent, 1)

    def recording(self, n: int, form: Form) -> Recording | None:
        """The same; None where shards are computed op by op and forward() looks at values."""
        try:
            return self.recorded(n, form)
        except ConfigError as problem:
            if not (self.eager and str(problem).startswith("[replay]")):
                raise
            return None

    def _recorded_twice(self, n: int, form: Form, lanes: bool) -> Recording:
        first, wrote = self._recorded_once(n, form, lanes)
        second, wrote_again = self._recorded_once(n, form, lanes)
        name = type(self.model).__name__
        for key, value in wrote_again.items():
            if wrote.get(key, value) != value:
                raise ConfigError(
                    f"[train] forward() of {name} sets {key} to something else each time "
                    f"({wrote[key]}, then {value}): "
                    "how often it runs depends on the layout; count steps in a callback "
                    "(on_step_end) instead"
                )
        index = first_difference(first.lines, second.lines)
        if index is not None:
            raise ConfigError(
                f"[train] forward() of {name} is not the same twice: op {index + 1}, "
                f"{self.told(second, index, n, form)}. "
                "It draws from random or NumPy, or counts its calls, and how often it runs "
                "depends on the layout; use "
                "nn.Dropout or a transform of the data, or set an attribute by step in a callback"
            )
        return first

    def _recorded_once(
        self, n: int, form: Form, lanes: bool = False
    ) -> tuple[Recording, dict[str, str]]:
        """A recording, and the values that forward() has set."""
        recorder = self.recorder(n, lanes)
        attributes = self.traced(recorder, n, form)
        paths = {id(m): path for path, m in self.model.named_modules()}
        wrote = {
            f"{paths[id(owner)]}.{name}".lstrip("."): repr(vars(owner)[name])
            for owner, name in attributes
            if id(owner) in paths and settings.is_value(vars(owner).get(name, ...))
        }
        lines = Listed(recorder.records).lines()
        first, last = self._of_metrics
        training = Listed([*recorder.records[:first], *recorder.records[last:]]).lines()
        return Recording(recorder.records, lines, hash_of(lines), training, recorder.extent), wrote

    def recorder(self, n: int, lanes: bool = False) -> Recorder:
        """A recorder for a shard of n samples."""
        recorder = Recorder(self.arena, 4 * self.arena.size, n, self.precision)
        recorder.in_lanes = self.gpu or lanes
        recorder.gpu = self.gpu
        return recorder

    def note_run(self, n: int, form: Form) -> None:
        """A batch is run, with the program of the present settings."""
        self.shape = (n, form)
        self._used = self.setting
        self._recent_runs[self.setting, n, form] = None

    def astray(self) -> str:
        """The first op of a program, of the last batch or one since this was asked last, that is
        another one when it is recorded again with the settings of that batch, in words;
        empty: none is, or there was no such program.
        """
        message = self._strayed
        self._strayed = ""
        for run in self._recent_runs:
            message = message or self._differs(*run)
        self._recent_runs = {} if self.shape is None else {(self._used, *self.shape): None}
        return message

    def _differs(self, number: int, n: int, form: Form) -> str:
        original = self._recordings.get((number, n, False, *form))
        model_settings = next(
            (
                model_settings
                for model_settings in self._settings_by_key.values()
                if model_settings.number == number
            ),
            None,
        )
        if original is None or model_settings is None:
            return ""
        with self._set_to(model_settings):
            repeated, _ = self._recorded_once(n, form)
            index = first_difference(original.lines, repeated.lines)
            return "" if index is None else f"op {index + 1}, {self.told(repeated, index, n, form)}"

    @contextlib.contextmanager
    def _set_to(self, model_settings: ModelSettings) -> Iterator[None]:
        """Within it the model is set to what it was then; nobody notices."""
        previous = [(vars(owner), dict(vars(owner))) for owner, _ in model_settings.snapshot]
        trained = {name: p.requires_grad for name, p in self.arena.named}
        number = setting_versions.models.value
        try:
            for owner, values in model_settings.snapshot:
                attributes = vars(owner)
                for name in [
                    n for n in attributes if n not in values and self._is_setting(owner, n)
                ]:
                    del attributes[name]  # it was set later
                attributes.update(values)
            for name, p in self.arena.named:
                if (name in model_settings.frozen) == trained[name]:
                    p.requires_grad = not trained[name]
            yield
        finally:
            for attributes, values in previous:
                attributes.clear()
                attributes.update(values)
            for name, p in self.arena.named:
                if p.requires_grad != trained[name]:
                    p.requires_grad = trained[name]
            if self._seen_version == number:
                self._seen_version = setting_versions.models.value

    def _is_setting(self, owner: Any, name: str) -> bool:
        """True for an attribute of a module that programs depend on."""
        ours = name in settings.OURS or (id(owner), name) in self.by_forward
        return not ours and not isinstance(vars(owner)[name], (Module, Parameter))

    def refresh(self) -> None:
        """Takes up what the model computes now, also by what it reads beyond attributes of
        modules.
        """
        if self.shape is None or self.astray():
            self.forget()  # what was recorded before the first batch, for its parts, may be older
        self.look()

    def forget(self) -> None:
        """Drops all programs: the model computes something else now, though its settings are the
        same.
        """
        self._settings_by_key.clear()
        self._recordings.clear()
        self._recent_runs.clear()
        self._seen_version = -1
        self._strayed = ""

    def told(self, recording: Recording, index: int, n: int, form: Form) -> str:
        """Op number `index` of a program in words, with its layer and source line."""
        layers = Listed()
        # it has run before: its error is not news
        with contextlib.suppress(Exception), watched(self.model) as active_layers:
            recorder = self.recorder(n)
            layers.listen(recorder, active_layers)
            self.traced(recorder, n, form)
        return said(recording.records, index, layers.where)

    # --- a pass ---

    def traced(self, executor: Executor, n: int, form: Form) -> list[tuple[Any, str]]:
        """Runs the model once with an executor; returns the attributes of modules that this has
        set.
        """
        executor.conv_algorithm = self.conv_algorithm
        with contextlib.ExitStack() as stack:
            if not self.train:  # in training each layer is in the mode that the user has put it in
                stack.enter_context(in_mode(self.model, False))
                stack.enter_context(no_grad())
            stack.enter_context(using(executor))
            attributes = stack.enter_context(setting_versions.unnoticed())
            self._pass(executor, n, form)
        self.outputs = executor.outputs
        self.by_forward.update((id(owner), name) for owner, name in attributes)
        return attributes

    def _pass(self, executor: Executor, n: int, form: Form) -> None:
        """Forward and backward of one shard of n samples, through whatever executor is current."""
        layout = layout_of(n)  # `executor` is the current one
        number = itertools.count()  # of the array that is gathered

        def gathered(leaf: Leaf, device: Device = FIRST, target: bool = False) -> Tensor:
            sequence = leaf.dtype == "int32" and len(leaf.shape) == 1
            t = empty((n, *leaf.shape), "tokens" if sequence else layout)
            t.dtype = np.dtype(leaf.dtype).type
            t.device = device
            if leaf.normalised:
                channels = leaf.shape[0] if len(leaf.shape) > 1 else 1
                executor.emit("input", t.memory, t.groups, t.features, channels, layout=layout)
            else:  # lanes without a sample: labels of -1, zeros
                filler = -int(target and leaf.dtype == "int32")
                sizes = t.groups, t.features, t.lanes // n, next(number), filler
                executor.emit("array", t.memory, *sizes, layout=t.layout)
            executor.close(device)
            return t

        x = mapped(gathered, form.inputs)
        y = self.model(*x) if isinstance(x, tuple) else self.model(x)
        if y is None:
            raise ConfigError(
                f"[train] forward() of {type(self.model).__name__} returned None; return its result"
            )
        place = next((t.device for t in leaves(y) if isinstance(t, Tensor)), FIRST)
        # where the loss is computed
        target = mapped(lambda leaf: gathered(leaf, place, True), form.targets)
        loss = self.loss(y, target)
        if not isinstance(loss, Tensor) or loss.shape != ():
            description = (
                f"has shape {loss.shape}"
                if isinstance(loss, Tensor)
                else f"is a {type(loss).__name__}"
            )
            raise ConfigError(
                f"[train] the loss {description}; it must be one number, a sum or mean over samples"
            )
        stats = executor.first_stats
        with executor.within(executor.scope.ops - 1, loss.device):
            if stats is None:  # nobody counted correct predictions
                stats = executor.alloc(16)
                executor.emit("fill", stats, 0.0, 4)
            start = len(getattr(executor, "records", ()))
            self.metric_at = record_metrics(executor, self.metrics, form, y, target)
            self._of_metrics = start, len(getattr(executor, "records", ()))
        executor.emit("stats", executor.stats, loss.memory, stats, 0)
        executor.close(loss.device)
        if self.train:
            executor.scaled = self.scaled
            loss.backward()


def _may_change(value: Any) -> bool:
    """True for a value that can be changed in place: a list, a dict, a tuple that has one."""
    return isinstance(value, (list, dict)) or (
        isinstance(value, tuple) and any(map(_may_change, value))
    )


def _skeleton(records: list[Record]) -> list[Any]:
    """Returns what programs that differ in sizes alone have alike: ops, where they run, which
    parameters they read.
    """
    return [
        (r.op, r.layout, r.dtype, r.device, r.tag, r.phase, r.recompute)
        + tuple((a.space, a.offset) for a in r.args if isinstance(a, Range))
        for r in records
    ]
