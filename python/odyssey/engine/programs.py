"""Programs of a model, its loss and its metrics for one shard. They are recorded, and kept with the
settings that the model had.

    version     a number that grows when an attribute, a mode or a requires_grad changes
                (core/setting_versions.py). A step compares it with the last one seen.
    settings    the values of all of these (nn/settings.py). For each combination that occurred,
                one program is kept for each size and form of a shard.
    lines       the text of a program (listing.py), for comparison with another recording, another
                rank or a checkpoint

The version doesn't change with what is changed in place. So lists, dicts and small arrays that are
attributes are compared in each step. A change of a global or of a large array shows up when the
program is recorded again (`astray`), at epochs, checkpoints and resumes. A forward() that does
something else in each call would depend on the number of shards of a rank. It raises an error when
it is first recorded.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..base.quiet import without_prints
from ..core import fingerprint, native, setting_versions
from ..core.arena import Arena
from ..core.fingerprint import hash_of
from ..core.placement import FIRST, Device
from ..core.program import Range, Record, Recorder, ShardEager, using
from ..core.tensor import Parameter, Tensor, empty, layout_of, no_grad
from ..data.nested import Form, Leaf, leaves, mapped
from ..errors import ConfigError, OdysseyError
from ..nn import Module, forward_hooks, settings
from ..nn.module import in_mode
from .keeping import Keeper
from .listing import Listed, first_difference, said, watched
from .metrics import record as record_metrics
from .metrics import record_weight

# Settings whose programs are kept. A schedule of dropout has new settings in each step.
MAX_SETTINGS = 8
COMPARED_BYTES = 1 << 16  # of an array that is compared in each step

Executor = Recorder | ShardEager


class ModelSettings(NamedTuple):
    """One combination of settings that the model had."""

    number: int
    snapshot: list[tuple[Any, dict[str, Any]]]  # modules (and loss modules) with their attributes
    frozen: tuple[str, ...]  # names of parameters that aren't trained


# Of settings: the frozen parameters and all attributes. Of a recording: the number of its settings,
# the samples of a shard, True if they must be in lanes, and the form.
Key = tuple[Any, ...]


class Recording(NamedTuple):
    """A recorded program of the whole model, which is the same on all ranks.

    Nobody may change its lists or records.
    """

    records: list[Record]
    lines: list[str]
    fingerprint: int  # 63 bits of a hash over the lines
    # The lines without the ones of metrics. A resumed training run may have other metrics.
    training: list[str]
    extent: int  # lanes of the tensor that has most


class Programs:
    """The programs of a model, with a backward pass if `train`. See the head of this file.

    Args:
        gpu: True if shards are computed on GPUs.
        eager: True if shards are computed op by op. Programs are then only recorded for comparison.
        like: the programs for training, if these are for evaluation.
        keeper: keeps outputs and targets; None: nothing does.
        Others: see Engine.

    Attributes:
        setting: the number of the settings when `current` was called last.
        outputs: the number of the model's outputs, which the loss sets. None before a recording.
        metric_at: the place of each metric among the statistics. Empty before a recording.
    """

    def __init__(
        self,
        model: Module,
        arena: Arena,
        loss: Any,
        metrics: Any,
        weight: Any,
        *,
        train: bool,
        precision: str,
        conv_algorithm: str,
        scaled: bool,
        gpu: bool,
        eager: bool,
        like: Programs | None,
        keeper: Keeper | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.loss = loss
        self.metrics = metrics
        self.keeper = keeper
        self.weight = weight
        self._checked_metrics: set[str] = set() if like is None else like._checked_metrics
        self.train = train
        self.precision = precision
        self.conv_algorithm = conv_algorithm
        self.scaled = scaled
        self.gpu = gpu
        self.eager = eager
        self.shape: tuple[int, Form] | None = None  # samples and form of a shard of the last batch
        self._used_setting = 0  # number of the settings that the last batch was computed with
        # (number of the settings, samples, form) of the batches since the last call of `astray`.
        self._recent_runs: dict[tuple[int, int, Form], None] = {}
        # The change that `astray` reports for settings that aren't kept any more. Empty if none.
        self._dropped_change = ""
        # First record of metrics and one past the last, in the latest recording.
        self._metric_records = 0, 0
        self.metric_at: dict[str, int] = {}
        self.outputs: int | None = None
        # Attributes that forward() sets: id of the module, name. They aren't settings.
        self.by_forward: set[tuple[int, str]] = set() if like is None else like.by_forward
        self._seen_version = -1  # version of the settings at the last `look`. -1: look again
        self._numbers = itertools.count(1)
        self._settings_by_key: dict[Key, ModelSettings] = {}
        self._recordings: dict[Key, Recording] = {}
        self._modules = dict(self.model.named_modules())
        self._parameters = dict(self.model._state())
        # Settings that are lists or dicts, with copies. Changes in them don't change the version.
        self._mutable_values: list[tuple[Any, Any]] = []
        # Settings with arrays, with their contents. They too may change in place.
        self._arrays: list[tuple[Any, Any]] = []
        # Large arrays by their keys, with their fingerprints when they were first seen.
        self._large_arrays: dict[str, tuple[np.ndarray, int]] = {}
        self.setting = 0

    # --- settings ---

    def current(self) -> int:
        """Returns the number of the model's settings.

        Raises:
            ConfigError: The model has other parameters or submodules than before.
        """
        if (
            setting_versions.models.value != self._seen_version
            or any(value != copied for value, copied in self._mutable_values)
            or any(_content_of(value) != content for value, content in self._arrays)
        ):
            self.look()
        return self.setting

    def look(self) -> None:
        """Reads all settings of the model and sets `setting` to their number.

        If the model had the same settings before, the number and the programs are the same again.

        Raises:
            ConfigError: The model has other parameters or submodules than before.
        """
        self._seen_version = setting_versions.models.value
        self._check_structure()
        snapshot: dict[int, tuple[Any, dict[str, Any]]] = {}
        entries: list[tuple[str, Any]] = []
        self._mutable_values = []
        self._arrays = []
        for prefix, module in (("", self.model), ("loss.", self.loss)):
            if not isinstance(module, Module):
                continue
            for key, owner, name, value in settings.attributes(module):
                if name in vars(owner) and not self._is_setting(owner, name):
                    continue
                content = _content_of(value)
                entries.append((prefix + key, id(value) if content is None else content))
                if content is None:
                    self._note_large_array(prefix + key, value)
                elif not settings.is_value(value):
                    self._arrays.append((value, content))
                    value = copy.deepcopy(value)
                elif _may_change(value):
                    self._mutable_values.append((value, copy.deepcopy(value)))
                    value = self._mutable_values[-1][1]
                snapshot.setdefault(id(owner), (owner, {}))[1][name] = value
        frozen = tuple(name for name, p in self.arena.named if not p.requires_grad)
        key = (frozen, *entries)
        model_settings = self._settings_by_key.pop(key, None)
        if model_settings is None or (
            model_settings.number != self.setting and self._is_stale(model_settings.number)
        ):
            model_settings = ModelSettings(next(self._numbers), list(snapshot.values()), frozen)
        self._settings_by_key[key] = model_settings  # as the last one
        self.setting = model_settings.number
        while len(self._settings_by_key) > MAX_SETTINGS:
            self._drop_oldest_settings()

    def _note_large_array(self, key: str, value: Any) -> None:
        """Notes the fingerprint of an array that is too large to be compared in each step."""
        array = _array_of(value)
        if array is not None and array.nbytes and not array.dtype.hasobject:
            known = self._large_arrays.get(key)
            if known is None or known[0] is not array:
                self._large_arrays[key] = array, fingerprint.of_bytes(array)

    def changed_array(self) -> str | None:
        """Returns the key of a large array that was changed in place since it was first seen."""
        for key, (array, first) in self._large_arrays.items():
            if fingerprint.of_bytes(array) != first:
                return key
        return None

    def _drop_oldest_settings(self) -> None:
        """Drops the settings that were used least recently, with their programs.

        Their programs can't be recorded again later, so they are compared now (`astray`).
        """
        dropped = self._settings_by_key[next(iter(self._settings_by_key))]
        for run in [run for run in self._recent_runs if run[0] == dropped.number]:
            self._dropped_change = self._dropped_change or self._describe_change(*run)
            del self._recent_runs[run]
        self._settings_by_key = {
            key: model_settings
            for key, model_settings in self._settings_by_key.items()
            if model_settings is not dropped
        }
        self._recordings = {
            key: recording
            for key, recording in self._recordings.items()
            if key[0] != dropped.number
        }

    def _is_stale(self, number: int) -> bool:
        """Returns True if the model computes something else than its recording for these settings.

        The model has the settings again, but forward() may read a global that has changed. One
        program is recorded again for the comparison.
        """
        kept_key = next((key for key in self._recordings if key[0] == number), None)
        if kept_key is None:
            return False
        _, samples, lanes, *form = kept_key
        recording, _ = self._record_once(samples, Form(*form), lanes)
        return first_difference(self._recordings[kept_key].lines, recording.lines) is not None

    def _check_structure(self) -> None:
        """Raises ConfigError if a submodule or parameter was added, replaced or removed since the
        trainer was created.
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
        """Returns the model's settings by key, as a checkpoint holds them.

        Attributes that forward() sets are not among them.
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

    def recorded(self, samples: int, form: Form, lanes: bool = False) -> Recording:
        """Returns the program of a shard for the current settings, and records it if necessary.

        Args:
            samples: the samples of the shard.
            form: the arrays of one sample.
            lanes: True: the samples must be in lanes, even if there are few.

        Raises:
            ConfigError: forward() looks at values, or isn't the same twice.
        """
        key = (self.current(), samples, lanes, *form)
        if key not in self._recordings:
            recording = self._record_twice(samples, form, lanes)
            # The recording shows which attributes forward() sets. They aren't settings, so the
            # number of the settings may be another one now.
            self._seen_version = -1
            key = (self.current(), samples, lanes, *form)
            self._recordings[key] = recording
        return self._recordings[key]

    def tail(self, samples: int, tail_size: int, form: Form) -> int:
        """Returns the samples of the program that the last shard of a batch uses.

        The result is `tail_size` if a smaller program saves work, and if it differs from the
        program for full shards only in sizes. Otherwise it is `samples`: the last shard uses the
        program for full shards, and its missing samples are zeros.

        Args:
            samples: the samples of a full shard.
            tail_size: the samples of the last shard. 0 if that is full, too.
            form: the arrays of one sample.
        """
        full_recording = self.recording(samples, form) if tail_size and not self.gpu else None
        if full_recording is None:
            return samples
        lanes = layout_of(samples) == "lanes"
        if lanes:
            # Kernels compute whole vectors of lanes. As many vectors are as much work.
            vector = native.library().lanes
            extent = full_recording.extent
            if -(-extent // vector) == -(-extent * tail_size // samples // vector):
                return samples
        try:
            tail_recording = self.recorded(tail_size, form, lanes)
        except OdysseyError:
            # The model requires the size of a full shard.
            return samples
        same_ops = _list_ops(tail_recording.records) == _list_ops(full_recording.records)
        return tail_size if same_ops else samples

    def rows(self, form: Form) -> int:
        """Returns how many lanes one sample takes in the largest tensor of the model.

        That is 1 for an image, and the number of tokens for a text.
        """
        recorder, _ = self._trace_for_check(1, form, lanes=True)
        return max(recorder.extent, 1)

    def recording(self, samples: int, form: Form) -> Recording | None:
        """Returns the program of a shard, as `recorded` does.

        Returns None if shards are computed op by op and forward() looks at values, because such a
        model can't be recorded.
        """
        try:
            return self.recorded(samples, form)
        except ConfigError as problem:
            if not (self.eager and is_about_values(problem)):
                raise
            return None

    def _record_twice(self, samples: int, form: Form, lanes: bool) -> Recording:
        """Records a program twice and returns the first recording.

        Raises:
            ConfigError: The recordings differ, or forward() sets an attribute to another value in
                each call.
        """
        first, wrote = self._record_once(samples, form, lanes, prints=not self.eager)
        second, wrote_again = self._record_once(samples, form, lanes)
        name = type(self.model).__name__
        for key, value in wrote_again.items():
            if wrote.get(key, value) != value:
                raise ConfigError(
                    f"[train] forward() of {name} sets {key} to something else each time "
                    f"({wrote[key]}, then {value}): how often it runs depends on the layout; count "
                    "steps in a callback (on_step_end) instead"
                )
        index = first_difference(first.lines, second.lines)
        if index is not None:
            raise ConfigError(
                f"[train] forward() of {name} is not the same twice: op {index + 1}, "
                f"{self.told(second, index, samples, form)}. It draws from random or NumPy, or "
                "counts its calls, and how often it runs depends on the layout; use nn.Dropout "
                "or a transform of the data, or set an attribute by step in a callback"
            )
        return first

    def _record_once(
        self, samples: int, form: Form, lanes: bool = False, prints: bool = False
    ) -> tuple[Recording, dict[str, str]]:
        """Returns a recording, and the values as text of the attributes that forward() has set.

        The values are by path of the module and name of the attribute. prints: False keeps back
        what forward() prints, unless it fails.
        """
        if prints:
            recorder = self.recorder(samples, lanes)
            attributes = self.traced(recorder, samples, form)
        else:
            recorder, attributes = self._trace_for_check(samples, form, lanes)
        paths = {id(m): path for path, m in self.model.named_modules()}
        wrote = {
            f"{paths[id(owner)]}.{name}".lstrip("."): repr(vars(owner)[name])
            for owner, name in attributes
            if id(owner) in paths and settings.is_value(vars(owner).get(name, ...))
        }
        lines = Listed(recorder.records).lines()
        first, last = self._metric_records
        training = Listed([*recorder.records[:first], *recorder.records[last:]]).lines()
        return Recording(recorder.records, lines, hash_of(lines), training, recorder.extent), wrote

    def _trace_for_check(
        self, samples: int, form: Form, lanes: bool
    ) -> tuple[Recorder, list[tuple[Any, str]]]:
        """Runs the model with a recorder, without prints and, if shards are computed op by op,
        without hooks where possible. Returns the recorder, and what `traced` returns.
        """

        def trace() -> tuple[Recorder, list[tuple[Any, str]]]:
            recorder = self.recorder(samples, lanes)
            return recorder, self.traced(recorder, samples, form)

        with without_prints(lambda error: not (self.eager and is_about_values(error))):
            return forward_hooks.run_check(self.model, trace) if self.eager else trace()

    def recorder(self, samples: int, lanes: bool = False) -> Recorder:
        """Returns a recorder for a shard of `samples` samples."""
        recorder = Recorder(self.arena, 4 * self.arena.size, samples, self.precision)
        recorder.in_lanes = self.gpu or lanes
        recorder.gpu = self.gpu
        return recorder

    def note_run(self, samples: int, form: Form) -> None:
        """Notes that a batch runs with the current settings, for `shape` and `astray`."""
        self.shape = (samples, form)
        self._used_setting = self.setting
        self._recent_runs[self.setting, samples, form] = None

    def astray(self) -> str:
        """Records the programs of recent batches again and describes the first op that differs.

        Recent batches are the last one and all others since the last call. Each program is recorded
        with the settings of its batch. A difference means that forward() reads something that isn't
        a setting and has changed. Returns an empty string if no program differs.
        """
        message = self._dropped_change
        self._dropped_change = ""
        for run in self._recent_runs:
            message = message or self._describe_change(*run)
        self._recent_runs = {} if self.shape is None else {(self._used_setting, *self.shape): None}
        return message

    def _describe_change(self, number: int, samples: int, form: Form) -> str:
        """Records a program again and describes the first op that differs from the kept recording.

        `number` is the number of the settings. Returns an empty string if no op differs, or if the
        settings or the recording aren't kept.
        """
        original = self._recordings.get((number, samples, False, *form))
        candidates = (s for s in self._settings_by_key.values() if s.number == number)
        model_settings = next(candidates, None)
        if original is None or model_settings is None:
            return ""
        with self._restore_settings(model_settings):
            repeated, _ = self._record_once(samples, form)
            index = first_difference(original.lines, repeated.lines)
            if index is None:
                return ""
            return f"op {index + 1}, {self.told(repeated, index, samples, form)}"

    @contextlib.contextmanager
    def _restore_settings(self, model_settings: ModelSettings) -> Iterator[None]:
        """Gives the model earlier settings within a `with` block, and its own ones after it.

        `current` doesn't regard that as a change.
        """
        previous = [(vars(owner), dict(vars(owner))) for owner, _ in model_settings.snapshot]
        trained = {name: p.requires_grad for name, p in self.arena.named}
        version = setting_versions.models.value
        try:
            for owner, values in model_settings.snapshot:
                attributes = vars(owner)
                set_later = [
                    name
                    for name in attributes
                    if name not in values and self._is_setting(owner, name)
                ]
                for name in set_later:
                    del attributes[name]
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
            if self._seen_version == version:
                # Setting requires_grad has changed the version. The settings are the same again.
                self._seen_version = setting_versions.models.value

    def _is_setting(self, owner: Any, name: str) -> bool:
        """Returns True if an attribute of a module is a setting that programs depend on."""
        ours = name in settings.OURS or (id(owner), name) in self.by_forward
        return not ours and not isinstance(vars(owner)[name], (Module, Parameter))

    def refresh(self) -> None:
        """Updates the programs to what the model computes now.

        All programs are dropped if one of them has changed without a change of settings. They are
        also dropped before the first batch, when there is no batch to compare with.
        """
        if self.shape is None or self.astray():
            self.forget()
        self._large_arrays.clear()
        self.look()

    def forget(self) -> None:
        """Drops all recorded programs.

        It is called when forward() computes something else though no setting has changed.
        """
        self._settings_by_key.clear()
        self._recordings.clear()
        self._recent_runs.clear()
        self._seen_version = -1
        self._dropped_change = ""

    def use_algorithm(self, conv_algorithm: str) -> None:
        """Sets how convolutions are computed from now on."""
        if conv_algorithm != self.conv_algorithm:
            self.conv_algorithm = conv_algorithm
            self.forget()

    def told(self, recording: Recording, index: int, samples: int, form: Form) -> str:
        """Returns op number `index` of a program in words, with its layer and source line.

        The model runs once more to learn the layers and lines.
        """
        layers = Listed()
        # The layers that were noted before an error are still useful for the message.
        with contextlib.suppress(Exception), watched(self.model) as active_layers:
            recorder = self.recorder(samples)
            layers.listen(recorder, active_layers)
            self.traced(recorder, samples, form)
        return said(recording.records, index, layers.where)

    # --- a pass ---

    def traced(self, executor: Executor, samples: int, form: Form) -> list[tuple[Any, str]]:
        """Runs the model once with an executor, forward and, if `train`, backward.

        Returns:
            The attributes that forward() has set, as (module, name).
        """
        executor.conv_algorithm = self.conv_algorithm
        with contextlib.ExitStack() as stack:
            if not self.train:
                # For training, the user has set the mode of each layer.
                stack.enter_context(in_mode(self.model, False))
                stack.enter_context(no_grad())
            stack.enter_context(using(executor))
            attributes = stack.enter_context(setting_versions.unnoticed())
            self._run_pass(executor, samples, form)
        self.outputs = executor.outputs
        self.by_forward.update((id(owner), name) for owner, name in attributes)
        return attributes

    def _run_pass(self, executor: Executor, samples: int, form: Form) -> None:
        """Runs the forward and backward pass of one shard.

        `executor` must be the current one. listing.py finds the user's code by the name of this
        function.

        Raises:
            ConfigError: forward() returns None, or the loss isn't one number.
        """
        layout = layout_of(samples)
        array_numbers = itertools.count()  # of the arrays that are read unchanged

        def read_array(leaf: Leaf, device: Device = FIRST, target: bool = False) -> Tensor:
            """Emits the op that reads one array of the samples, and returns its tensor."""
            sequence = leaf.dtype == "int32" and len(leaf.shape) == 1
            array = empty((samples, *leaf.shape), "tokens" if sequence else layout)
            array.dtype = np.dtype(leaf.dtype).type
            array.device = device
            if leaf.normalised:
                channels = leaf.shape[0] if len(leaf.shape) > 1 else 1
                sizes = array.groups, array.features, channels
                executor.emit("input", array.memory, *sizes, layout=layout)
            else:
                # Lanes without a sample get this value. The loss ignores labels of -1.
                filler = -1 if target and leaf.dtype == "int32" else 0
                lanes_per_sample = array.lanes // samples
                number = next(array_numbers)
                sizes = array.groups, array.features, lanes_per_sample, number, filler
                executor.emit("array", array.memory, *sizes, layout=array.layout)
            executor.close(device)
            return array

        x = mapped(read_array, form.inputs)
        y = self.model(*x) if isinstance(x, tuple) else self.model(x)
        if y is None:
            raise ConfigError(
                f"[train] forward() of {type(self.model).__name__} returned None; return its result"
            )
        # The targets are read on the device of the output, where the loss is computed.
        loss_device = next((t.device for t in leaves(y) if isinstance(t, Tensor)), FIRST)
        target = mapped(lambda leaf: read_array(leaf, loss_device, target=True), form.targets)
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
            if stats is None:
                # The loss doesn't count correct predictions.
                stats = executor.alloc(16)
                executor.emit("fill", stats, 0.0, 4)
            if self.weight is not None:
                record_weight(executor, self.weight, y, target)
            start = len(getattr(executor, "records", ()))
            self.metric_at = record_metrics(
                executor, self.metrics, form, y, target, self._checked_metrics
            )
            if self.keeper is not None:
                self.keeper.record(executor, form, y, target)
            self._metric_records = start, len(getattr(executor, "records", ()))
        executor.emit("stats", executor.stats, loss.memory, stats, 0)
        executor.close(loss.device)
        if self.train:
            executor.scaled = self.scaled
            loss.backward()


def is_about_values(error: BaseException) -> bool:
    """Tells whether an error says that forward() looks at values while a step is recorded."""
    return isinstance(error, ConfigError) and str(error).startswith("[replay]")


def _array_of(value: Any) -> np.ndarray | None:
    """Returns the array that a value is or holds as a tensor, also one of PyTorch; None for other
    values.
    """
    if isinstance(value, np.ndarray):
        return value
    if not (hasattr(value, "__array__") and hasattr(value, "nbytes") or isinstance(value, Tensor)):
        return None
    try:
        return np.asarray(value)
    except Exception:  # it has no numbers now, or NumPy has no such dtype
        return None


def _content_of(value: Any) -> Any:
    """Returns what a program depends on of a setting: equal contents are equal settings.

    Returns None if it depends on the object itself.
    """
    if settings.is_value(value):
        return repr(settings.encoded(value))
    array = _array_of(value)
    if array is not None:
        is_compared = array.nbytes <= COMPARED_BYTES and not array.dtype.hasobject
        return (array.dtype.str, array.shape, array.tobytes()) if is_compared else None
    if type(value) not in (list, tuple, dict):
        return None
    items = [*value, *value.values()] if isinstance(value, dict) else value
    contents = [_content_of(item) for item in items]
    return None if None in contents else (type(value).__name__, *contents)


def _may_change(value: Any) -> bool:
    """Returns True if a value can be changed in place: a list, a dict or a tuple with one."""
    return isinstance(value, (list, dict)) or (
        isinstance(value, tuple) and any(map(_may_change, value))
    )


def _list_ops(records: list[Record]) -> list[Any]:
    """Returns the ops of a program without sizes: what they are, where they run, and which
    parameters they use.

    The results are equal for programs that differ only in sizes.
    """
    return [
        (r.op, r.layout, r.dtype, r.device, r.tag, r.phase, r.recompute)
        + tuple((a.space, a.offset) for a in r.args if isinstance(a, Range))
        for r in records
    ]
