"""Trained models: the description of a model in a checkpoint, models from checkpoints, predictions.

A checkpoint describes a model of odyssey.nn by the names and arguments of its classes. Of a model
of the user's own code it holds only where the code is. Nothing of that is run or unpickled.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import data as datasets
from .. import nn
from ..base import install_packages, registry, userfile
from ..base.files import write_whole
from ..base.outputs import read_weights, write_weights
from ..base.paths import expand_path
from ..checkpoints import Snapshot
from ..comm import Communicator, world
from ..core.program import Eager, current
from ..core.tensor import Tensor, empty, layout_of, no_grad
from ..data import ArrayDataset, Batch
from ..data.nested import mapped
from ..data.sources import unreadable_images
from ..data.tables import Columns
from ..errors import CheckpointError, ConfigError, OdysseyError, ShapeError
from ..nn.module import in_mode, limited
from ..parallel.plan import shard_count, share
from ..settings.recipes import FORMATS
from . import resume

if TYPE_CHECKING:
    from .trainer_base import Trainer

LISTS = {"Sequential": nn.Sequential, "ModuleList": nn.ModuleList}
SHARD_SIZE = 32  # samples that are computed at once, unless a checkpoint has another size
BEST = "best"  # the link of a ModelCheckpoint
MANIFEST = "manifest.json"  # the file that makes a directory a checkpoint
_ARRAY_BATCH_SIZE = 8192  # samples of a batch of an array


def recipe(trainer: Any, loader: Any) -> dict[str, Any]:
    """Returns the description of model, loss and data for a checkpoint, as JSON values."""
    model = getattr(trainer, "model", None) or getattr(trainer, "module", None)
    loss = getattr(trainer, "loss", None)
    source = getattr(trainer, "data_source", {})
    return {
        "model": of_model(model),
        "loss": type(loss).__name__,
        "loss arguments": _arguments_of(loss),
        "data": {**of_data(getattr(loader, "dataset", None)), **source},
    }


def _arguments_of(loss: Any) -> dict[str, Any] | None:
    """Returns the arguments of a loss of odyssey.nn, or None if they aren't known."""
    return loss.arguments if type(loss).__module__.startswith("odyssey.nn.") else None


def of_model(model: Any) -> dict[str, Any]:
    """Returns the description of a model.

    It is {"class", "arguments"} for a built-in model, and {"class", "parts"} for a list of models.
    It is {"user code", "module", "file"} if a class of the model is the user's own.
    """
    kind = type(model)
    if kind.__module__.startswith("odyssey.nn."):
        if kind.__name__ in LISTS and all(name.isdecimal() for name, _ in model.named_children()):
            parts = [of_model(child) for child in model.children()]
            user_part = next((part for part in parts if "class" not in part), None)
            return user_part or {"class": kind.__name__, "parts": parts}
        if model.arguments is not None:
            return {"class": kind.__name__, "arguments": model.arguments}
    try:
        file = inspect.getfile(kind)
    except (TypeError, OSError):
        file = None
    return {"user code": kind.__qualname__, "module": kind.__module__, "file": file}


def of_data(data: Any) -> dict[str, Any]:
    """Returns the description of the samples: their shape, scale and shift, columns and classes."""
    description: dict[str, Any] = {}
    shape = getattr(data, "sample_shape", None)
    classes = getattr(data, "classes", None)
    if isinstance(shape, tuple) and all(isinstance(n, int) for n in shape):
        description["sample_shape"] = list(shape)
    for key in ("scale", "shift"):
        if (value := getattr(data, key, None)) is not None:
            description[key] = np.asarray(value, np.float64).reshape(-1).tolist()
    description["classes"] = list(getattr(data, "class_names", ()) or ()) or classes
    columns = getattr(data, "columns", None)
    description["columns"] = list(columns.names) if isinstance(columns, Columns) else []
    if isinstance(columns, Columns):
        description["table"] = columns.saved
    return description if data is not None else {}


def build(description: dict[str, Any], max_numbers: int = 2**31) -> nn.Module:
    """Returns the model that a description of of_model() is for.

    max_numbers: of its weights. A damaged or hostile description fails before it takes more memory.

    Raises KeyError, TypeError, ValueError or ConfigError: the description isn't valid.
    """
    # three times as many, because a model may share a weight, or draw values again (GPT)
    with limited(3 * max_numbers):
        return _build_module(description, max_numbers)


def _build_module(description: dict[str, Any], max_numbers: int) -> nn.Module:
    """Returns the module of a description, and raises the errors of build()."""
    name = description["class"]
    if name in LISTS:
        parts = [_build_module(part, max_numbers) for part in description["parts"]]
        return nn.Sequential(*parts) if name == "Sequential" else nn.ModuleList(parts)
    kind = getattr(nn, name) if name in nn.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise KeyError(name)
    arguments = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in description["arguments"].items()
    }
    if name in ("LayerNorm", "RMSNorm") and "features" in arguments:  # as version 0.2 wrote it
        arguments["normalized_shape"] = arguments.pop("features")
    sizes = (
        size
        for value in arguments.values()
        for size in (value if isinstance(value, tuple) else (value,))
        if isinstance(size, int)
    )
    if any(size > max(max_numbers, 1 << 16) for size in sizes):
        raise ValueError(f"{name}{arguments} is larger than its weights")
    return kind(**arguments)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model from a checkpoint, in eval mode, with the description of its data (see of_data)."""

    model: nn.Module
    data: dict[str, Any]
    loss: str
    name: str
    step: int
    vocabulary: dict[str, str] | None = None  # of text (data.Vocabulary.restored)
    algorithm: str = "direct"  # conv_algorithm of its training
    loss_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def find_checkpoint(path: str | Path, best: bool = False) -> tuple[Snapshot, str]:
    """Returns the checkpoint at a path, or one of a directory or run, and its name.

    best: of a directory or run take the one that a ModelCheckpoint marked as the best, if there is
    one, and add to the name which one it is. False: take the newest.

    Raises CheckpointError: no checkpoint there is valid.
    """
    folder = expand_path(path)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    marked = folder / BEST
    if best and marked.is_dir() and not (folder / MANIFEST).exists():
        try:
            snapshot, _ = resume.find(marked, lambda line: None)
        except CheckpointError as problem:
            raise CheckpointError(f"{problem}; or take the newest (--newest)") from None
        return snapshot, f"{folder.name}/{marked.resolve().name} (the best)"
    try:
        return resume.find(expand_path(path), lambda line: None)
    except CheckpointError as problem:
        if "no valid checkpoint" not in str(problem):
            raise
        raise CheckpointError(
            f"[load] {path} has no valid checkpoint; name a run, or a directory that has"
        ) from None


def opened(path: str | Path, model: nn.Module | None = None, best: bool = False) -> Saved:
    """Returns the model of a checkpoint, a directory of checkpoints, or a run; see load().

    model: takes the weights; None builds it from the description. best: see find_checkpoint().
    Raises ConfigError or CheckpointError, as load().
    """
    snapshot, name = find_checkpoint(path, best)
    about = snapshot.values.get("recipe") or {}
    description = about.get("model") or {}
    weights = snapshot.arrays.get("parameters", {})
    mismatch = "the checkpoint is of another model: give the one that was trained"
    if model is None:
        mismatch = "the model was changed after it was built: give it"
        floats = sum(value.size for value in weights.values())
        model = _build_described(description, floats, name)
    try:
        module = getattr(model, "wrapped", model)  # the PyTorch module of a wrapper
        if isinstance(module, nn.Module):
            module.load_state_dict(weights)
        else:
            arrays = {**weights, **snapshot.arrays.get("buffers", {})}
            registry.load("weights", "torch").to_torch(arrays, module)
    except (ShapeError, RuntimeError, AttributeError) as problem:
        raise ConfigError(f"[load] {name}: {problem}; {mismatch}") from problem
    settings = snapshot.values.get("configuration") or {}
    return Saved(
        model=model.eval(),
        data=about.get("data") or {},
        loss=about.get("loss") or "",
        name=name,
        step=snapshot.step,
        vocabulary=settings.get("vocabulary"),
        algorithm=resume.conv_algorithm_of(settings, name),
        loss_arguments=about.get("loss arguments") or {},
    )


def _build_described(description: dict[str, Any], floats: int, name: str) -> nn.Module:
    """Returns the model of a description in a checkpoint called `name`, of so many floats.

    Raises ConfigError: the description is missing, or the model is of the user's own code.
    CheckpointError: the description isn't valid.
    """
    todo = "build it and give odyssey.load(path, model)"
    if kind := description.get("user code"):
        source = description.get("file") or description.get("module")
        label = f"a model of your own, {kind} of {source}"
        place = f"{source}:{kind}"
        if str(description.get("module")).startswith("torch."):
            label = f"a PyTorch module, {kind}"
            place = "FILE.py:NAME (a class or a function that builds it)"
        raise ConfigError(
            f"[load] {name} is of {label}; {todo}, or say --model {place} on the command line"
        )
    if not description:
        raise ConfigError(
            f"[load] {name} does not say what its model is, as it is of an older version; {todo}"
        )
    try:
        return build(description, max_numbers=floats)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as problem:
        raise CheckpointError(
            f"[load] {name}: its model cannot be built: {problem}; {todo}"
        ) from problem


def own_model(place: str | None) -> nn.Module | None:
    """Returns the model of the user's own code that "FILE.py:NAME" names; None without a place.

    NAME is a class or a function without arguments. The file is run, as an import does it. A
    PyTorch module is wrapped.

    Raises ConfigError: FILE.py or NAME is missing, or the call returns no model.
    """
    if place is None:
        return None
    kind = userfile.named("[load] --model", place, "net.py:Net")
    try:
        model = kind()
    except TypeError as problem:
        raise ConfigError(
            f"[load] --model {place}: {problem}; name a function without arguments that builds "
            "the model"
        ) from problem
    if (
        not isinstance(model, nn.Module)
        and hasattr(model, "named_parameters")
        and "torch" in sys.modules
    ):
        model = registry.load("weights", "torch").Wrapped(model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[load] --model {place} gives a {type(model).__name__}; an nn.Module is needed"
        )
    return model


def exported(
    path: str | Path, kind: str, model: nn.Module | None = None, best: bool = False
) -> tuple[bytes, str]:
    """Returns the model of a checkpoint as the bytes of a file of the format `kind`, and the name
    of the checkpoint.

    best: see find_checkpoint(). Raises ConfigError: as content(), or it is a PyTorch module, which
    has no ONNX form here.
    """
    snapshot, name = find_checkpoint(path, best)
    arrays = {**snapshot.arrays.get("parameters", {}), **snapshot.arrays.get("buffers", {})}
    shape = None
    options = {}
    if kind == "onnx":
        if hasattr(model, "wrapped"):
            raise ConfigError(
                "[export] this is a PyTorch module; odyssey.load() it, and torch.onnx.export()"
            )
        from_checkpoint = opened(path, model, best)
        model = from_checkpoint.model
        shape = tuple(from_checkpoint.data.get("sample_shape") or ())
        if columns := _restore_columns(from_checkpoint.data):
            options = {"columns": columns}
    return content(kind, model, arrays, shape, **options), name


def _restore_columns(data: dict[str, Any]) -> Columns | None:
    """Returns the conversion of a table's columns to samples; None if the data were no table."""
    return Columns.of_saved(data.get("table"), data["columns"]) if data.get("columns") else None


def content(
    kind: str,
    model: Any,
    arrays: dict[str, np.ndarray],
    shape: tuple[int, ...] | None,
    **options: Any,
) -> bytes:
    """Returns a model as the bytes of a file of the format `kind`. options: for the format.

    Raises ConfigError: the format is unknown, its package is missing, or it doesn't support the
    model.
    """
    if kind == "safetensors":
        file = io.BytesIO()
        write_weights(file, arrays)
        return file.getvalue()
    if kind not in registry.provided("formats"):
        raise ConfigError(f"[export] format {kind!r} is unknown; choose from {', '.join(FORMATS)}")
    try:
        encode = registry.load("formats", kind)
    except ImportError as problem:
        package = (problem.name or kind).partition(".")[0]
        remedy = install_packages([package])
        raise ConfigError(
            f"[export] format {kind!r} needs the package {package}; {remedy}"
        ) from None
    return encode(model, arrays, shape, **options)


def export(
    model: nn.Module | Trainer,
    path: str | Path,
    format: str | None = None,
    sample_shape: tuple[int, ...] | None = None,
) -> None:
    """Writes a model for other programs, in eval mode.

    Rank 0 calls it with a model. All ranks call it with a trainer, which gathers the weights of
    its model, and rank 0 writes:

        odyssey.export(trainer, "weights.safetensors")

    format: "safetensors" or "torch", weights by name; "onnx", the whole model; None: by the path's
    ending, .safetensors, .pt or .onnx. sample_shape: of one sample, without the batch; needed for
    ONNX, but not of a GPT. Raises ConfigError: the ending says no format, or an op of the model has
    no form. OutputError: the file cannot be written; one that was there stays.
    """
    endings = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".onnx": "onnx"}
    kind = format or endings.get(Path(path).suffix)
    if kind is None:
        raise ConfigError(f"[export] {path} has no ending of {', '.join(endings)}; give format=")
    from .trainer_base import Trainer

    if not isinstance(model, (nn.Module, Trainer)):
        raise ConfigError(
            f"[export] the model is a {type(model).__name__}; give an odyssey.nn.Module or a "
            "trainer"
        )
    arrays = model.state_dict()
    if isinstance(model, Trainer):
        if model.comm.rank > 0:
            return
        model = vars(model).get("model") or vars(model)["module"]
    file_bytes = content(kind, model, arrays, sample_shape)
    write_whole(expand_path(path), lambda file: file.write(file_bytes), mode=0o666)


def predict(model: nn.Module, samples: Any, batch_size: int = 1024) -> Any:
    """Returns the outputs of a model for all samples, in eval mode; a collective call.

    The outputs are (N, ...) float32, or a tuple or dict of such arrays.

    samples: an array (N, ...), a tensor of PyTorch or another object that NumPy converts, a data
    set, or a DataLoader. Raises ConfigError: it is none of these, or empty.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[predict] the model is a {type(model).__name__}; give an odyssey.nn.Module"
        )
    if isinstance(samples, (np.ndarray, Tensor)) or hasattr(samples, "__array__"):
        array = samples.numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        batches = batches_of_array(
            np.ascontiguousarray(array, None if array.dtype == np.uint8 else np.float32)
        )
    else:
        batches = (
            datasets.DataLoader(samples, batch_size=batch_size)
            if hasattr(samples, "__getitem__")
            else samples
        )
    return predicted(model, batches, world("auto"))


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Returns the model of a checkpoint, in eval mode.

    path: a checkpoint, a directory of them (the newest valid one), or a run. `DIR/best`: of a
    ModelCheckpoint. model: takes its weights; needed where the model is of your own code. Raises
    ConfigError: the model is of your own code, or is another. CheckpointError: no checkpoint is
    valid.
    """
    return opened(path, model).model


def samples(
    saved_model: Saved,
    dataset: str | None = None,
    data_dir: Path | None = None,
    train: bool = False,
) -> Any:
    """Returns the test (or `train`) part of the data set of a model, or of another `dataset`.

    Raises ConfigError: the model's data set isn't known, and no other is given.
    """
    source = saved_model.data.get("source") or {}
    name = dataset or source.get("dataset")
    if name is None:
        raise ConfigError(
            f"[load] {saved_model.name} does not say what its data are, as odyssey train has not "
            "made it; give --dataset and --data-dir"
        )
    folder = data_dir or (
        Path(source["data_dir"]) if source.get("data_dir") and not dataset else None
    )
    options = {
        key: source[key]
        for key in ("size", "target", "length", "numbers")
        if source.get(key) is not None
    }
    if (
        name == "image-folder"
        and "size" not in options
        and len(saved_model.data.get("sample_shape") or ()) == 3
    ):
        options["size"] = saved_model.data["sample_shape"][1:]
    if name == "csv":
        options["like"] = _restore_columns(saved_model.data)
    if name == "image-folder" and folder is not None and source.get("skip_unreadable"):
        options["skip"] = unreadable_images(folder, thorough=True)
    return datasets.opened(name, folder, train=train, **options)


def loss_of(saved_model: Saved) -> nn.Module | None:
    """Returns the loss that a model was trained with; None if it is not one of odyssey.nn."""
    if saved_model.loss not in nn.__all__:
        return None
    try:
        return getattr(nn, saved_model.loss)(**saved_model.loss_arguments)
    except (TypeError, ConfigError) as problem:
        raise CheckpointError(
            f"[load] {saved_model.name}: its loss cannot be built: {problem}; use another "
            "checkpoint"
        ) from problem


def save_model(model: nn.Module, path: str | Path = "checkpoint.safetensors") -> None:
    """Writes a model of odyssey.nn as one safetensors file, from which load_model() builds it.

    Not collective: rank 0 calls it, then all wait in a barrier(). Raises OutputError: it cannot be
    written; a file that was there stays.
    """
    state = model.state_dict()
    metadata = {"odyssey": json.dumps(of_model(model))}
    write_whole(expand_path(path), lambda file: write_weights(file, state, metadata), mode=0o666)


def load_model(
    path: str | Path = "checkpoint.safetensors", model: nn.Module | None = None
) -> nn.Module:
    """Returns the model of a file of save_model(), in training mode.

    model: takes the weights; needed if it is of your own code. Raises ConfigError: the model is of
    your own code, or another one. CheckpointError: this is not a file of save_model().
    """
    weights, about = read_weights(expand_path(path))
    try:
        loaded_model = model or build(
            json.loads(about["odyssey"]), sum(value.size for value in weights.values())
        )
        loaded_model.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, AttributeError, OdysseyError) as problem:
        raise ConfigError(
            f"[load] {path} does not say how to build this model ({problem}); build it and give "
            "load_model(path, model)"
        ) from problem
    return loaded_model


# as other platforms call them
save_checkpoint = save_model
load_checkpoint = load_model


def predicted(
    model: nn.Module,
    batches: Iterable[Batch],
    comm: Communicator,
    shard: int | None = None,
    algorithm: str = "auto",
) -> Any:
    """Returns the outputs of a model for all samples of batches, in order; a collective call.

    The outputs are (N, ...) float32, or a tuple or dict of such arrays, the same on every rank.

    Args:
        model: runs in eval mode.
        batches: the same on all ranks. Each rank computes its shards of each batch.
        comm: all ranks.
        shard: samples that are computed at once. The last bits of the outputs depend on it, but not
            on the number of ranks.
        algorithm: conv_algorithm of the training run.

    Raises:
        ConfigError: There is no batch, or an output has another form.
    """
    size = shard or SHARD_SIZE
    executor = current()
    previous_algorithm = executor.conv_algorithm
    executor.conv_algorithm = algorithm
    try:
        with in_mode(model, False), no_grad():
            outputs = [_predict_batch(model, batch, comm, size) for batch in batches]
    finally:
        executor.conv_algorithm = previous_algorithm
    if not outputs:
        raise ConfigError("[predict] the loader gave no batch; give it data")
    return _join_outputs(outputs)


def _predict_batch(model: nn.Module, batch: Batch, comm: Communicator, size: int) -> Any:
    """Returns the outputs for all samples of a batch, on every rank; a collective call.

    size: samples per shard, which are computed at once.
    """
    samples = len(batch.indices)
    shards = shard_count(samples, size)
    shard_runs = [share(shards, comm.size, rank) for rank in range(comm.size)]
    # (first sample, one past the last) of each rank
    spans = [(min(lo * size, samples), min(hi * size, samples)) for lo, hi in shard_runs]
    first, stop = spans[comm.rank]
    shard_outputs = [
        forward(model, batch, lo, min(lo + size, stop)) for lo in range(first, stop, size)
    ]
    if comm.size == 1:
        return _join_outputs(shard_outputs)
    # a rank without a shard computes one sample, to know the form of the outputs
    outputs = _join_outputs(shard_outputs) if shard_outputs else forward(model, batch, 0, 1)

    def gather_rows(local_rows: np.ndarray) -> np.ndarray:
        row_shape = local_rows.shape[1:]
        all_rows = np.zeros((samples, *row_shape), np.float32)
        all_rows[first:stop] = local_rows[: stop - first]
        floats = math.prod(row_shape)
        comm.all_gather_v(all_rows.reshape(-1), [(lo * floats, hi * floats) for lo, hi in spans])
        return all_rows

    return mapped(gather_rows, outputs)


def _join_outputs(trees: list[Any]) -> Any:
    """Returns one tree of arrays, with the rows of all trees one after the other."""
    return mapped(lambda *parts: np.concatenate(parts), *trees)


def forward(model: nn.Module, batch: Batch, lo: int, hi: int) -> Any:
    """Returns the outputs for samples lo to hi - 1 of a batch.

    They are (hi - lo, ...), or a tuple or dict of such arrays.

    Raises ConfigError: an output has another form.
    """
    data = batch.dataset
    indices = batch.indices[lo:hi]
    if isinstance(data, ArrayDataset) and data.normalised:
        x = _normalise_samples(data, indices)
    else:
        inputs, _ = data.gather(indices)
        x = mapped(
            lambda a: Tensor(a, dtype=np.int32 if a.dtype.kind in "iu" else np.float32), inputs
        )
    y = model(*x) if isinstance(x, tuple) else model(x)

    def copy_numbers(t: Any) -> np.ndarray:
        if not isinstance(t, Tensor) or t.shape[:1] != (hi - lo,):
            output_kind = f"a tensor {t.shape}" if isinstance(t, Tensor) else type(t).__name__
            raise ConfigError(
                f"[predict] forward() gives {output_kind} for {hi - lo} samples; a tensor (N, "
                "...), or a tuple or dict of such, is needed"
            )
        return np.array(t.numpy(), np.float32)

    return mapped(copy_numbers, y)


def _normalise_samples(data: ArrayDataset, indices: np.ndarray) -> Tensor:
    """Returns samples normalised by the kernel that training steps use.

    It has the same bits as in training: the kernel rounds once, and NumPy would round twice.
    """
    images, *_ = data.rows(indices)
    rows = np.arange(len(indices))
    executor = Eager()
    x = empty(images.shape, layout_of(len(indices)))
    context = executor.context
    context.images = images.ctypes.data
    context.bytes = int(images.dtype.itemsize == 1)
    context.valid = len(indices)
    context.rows = rows.ctypes.data
    context.scale = data.scale.ctypes.data
    context.shift = data.shift.ctypes.data
    executor.emit("input", x.memory, x.groups, x.features, len(data.scale), layout=x.layout)
    return x


def batches_of_array(x: np.ndarray, scale: Any = 1.0, shift: Any = 0.0) -> Iterable[Batch]:
    """Returns samples (N, ...), float32 or pixels, in batches. scale, shift: as in data.arrays."""
    channels = x.shape[1] if x.ndim == 4 else 1
    scale_and_shift = (np.full(channels, np.asarray(v, np.float32)) for v in (scale, shift))
    labels = np.zeros(len(x), np.int32)  # no label is used
    data = ArrayDataset(x, labels, 1, *scale_and_shift, "x")
    return [
        Batch(data, np.arange(lo, min(lo + _ARRAY_BATCH_SIZE, len(x))), epoch=0, index=number)
        for number, lo in enumerate(range(0, len(x), _ARRAY_BATCH_SIZE))
    ]
