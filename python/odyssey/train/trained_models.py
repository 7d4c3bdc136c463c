"""Trained models: how a checkpoint says to build one, the model of a checkpoint, predictions.

A model of odyssey.nn's own classes is said by their names and arguments; of a model of the user's
own code, only where that is: nothing of it is run or unpickled.
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
from typing import Any

import numpy as np

from .. import data as datasets
from .. import nn
from ..base import install_packages, registry, userfile
from ..base.files import write_whole
from ..base.outputs import read_weights, write_weights
from ..checkpoints import Snapshot
from ..comm import Communicator, world
from ..core.program import Eager, current
from ..core.tensor import Tensor, empty, layout_of, no_grad
from ..data import ArrayDataset, Batch
from ..data.nested import mapped
from ..data.tables import Columns
from ..errors import CheckpointError, ConfigError, OdysseyError, ShapeError
from ..nn.module import in_mode, limited
from ..parallel.plan import shard_count, share
from ..settings.recipes import FORMATS
from . import resume

LISTS = {"Sequential": nn.Sequential, "ModuleList": nn.ModuleList}
SHARD_SIZE = 32  # samples that are computed at once, where no training says


def recipe(trainer: Any, loader: Any) -> dict[str, Any]:
    """Returns what a checkpoint says of the model and of what it was trained on, as JSON values."""
    model = getattr(trainer, "model", None) or getattr(trainer, "module", None)
    loss = type(getattr(trainer, "loss", None)).__name__
    source = getattr(trainer, "data_source", {})
    return {
        "model": of_model(model),
        "loss": loss,
        "data": {**of_data(getattr(loader, "dataset", None)), **source},
    }


def of_model(model: Any) -> dict[str, Any]:
    """{"class", "arguments"} of a built-in model, {"class", "parts"} of a list of such; {"user
    code", "module", "file"} of one that is, or has in it, a class of the user's.
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
    """Returns what a sample is: its shape, the numbers that normalise it, the names of columns
    and classes.
    """
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
    """A model as of_model() says, of at most so many numbers.

    Raises KeyError, TypeError, ValueError, ConfigError.
    """
    # of a weight that two layers share, and where values are drawn again (GPT)
    with limited(3 * max_numbers):
        return _build(description, max_numbers)


def _build(description: dict[str, Any], max_numbers: int) -> nn.Module:
    name = description["class"]
    if name in LISTS:
        parts = [_build(part, max_numbers) for part in description["parts"]]
        return nn.Sequential(*parts) if name == "Sequential" else nn.ModuleList(parts)
    kind = getattr(nn, name) if name in nn.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise KeyError(name)
    arguments = {
        k: tuple(v) if isinstance(v, list) else v for k, v in description["arguments"].items()
    }
    sizes = (
        n
        for v in arguments.values()
        for n in (v if isinstance(v, tuple) else (v,))
        if isinstance(n, int)
    )
    if any(n > max(max_numbers, 1 << 16) for n in sizes):
        raise ValueError(f"{name}{arguments} is larger than its weights")
    return kind(**arguments)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model out of a checkpoint, in eval mode, and what the checkpoint says of its data
    (of_data).
    """

    model: nn.Module
    data: dict[str, Any]
    loss: str
    name: str
    step: int
    vocabulary: dict[str, str] | None = None  # of text (data.Vocabulary.restored)
    algorithm: str = "auto"  # conv_algorithm of its training


def find_checkpoint(path: str | Path) -> tuple[Snapshot, str]:
    """The checkpoint of a path: one, the newest of a directory of them, or of a run."""
    try:
        return resume.find(Path(path), lambda line: None)
    except CheckpointError as problem:
        if "no valid checkpoint" not in str(problem):
            raise
        raise CheckpointError(
            f"[load] {path} has no valid checkpoint; name a run, or a directory that has"
        ) from None


def opened(path: str | Path, model: nn.Module | None = None) -> Saved:
    """The model of a checkpoint, a directory of checkpoints, or a run; see load()."""
    snapshot, name = find_checkpoint(path)
    about = snapshot.values.get("recipe") or {}
    description = about.get("model") or {}
    weights = snapshot.arrays.get("parameters", {})
    mismatch = "the checkpoint is of another model: give the one that was trained"
    if model is None:
        mismatch = "the model was changed after it was built: give it"
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
                f"[load] {name} does not say what its model is, as it is of an older version; "
                f"{todo}"
            )
        try:
            model = build(description, sum(value.size for value in weights.values()))
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as problem:
            raise CheckpointError(
                f"[load] {name}: its model cannot be built: {problem}; {todo}"
            ) from problem
    try:
        theirs = getattr(model, "wrapped", model)
        if isinstance(theirs, nn.Module):
            theirs.load_state_dict(weights)
        else:
            arrays = {**weights, **snapshot.arrays.get("buffers", {})}
            registry.load("weights", "torch").to_torch(arrays, theirs)
    except (ShapeError, RuntimeError, AttributeError) as problem:
        raise ConfigError(f"[load] {name}: {problem}; {mismatch}") from problem
    settings = snapshot.values.get("configuration") or {}
    algorithm = settings.get("convolution algorithm") or "auto"
    data = about.get("data") or {}
    loss = about.get("loss") or ""
    return Saved(
        model.eval(), data, loss, name, snapshot.step, settings.get("vocabulary"), algorithm
    )


def own_model(place: str | None) -> nn.Module | None:
    """The model of the user's own code that "FILE.py:NAME" names, a class or a function without
    arguments; the file is run as an import would run it. None: no place was given. Raises
    ConfigError: it is not there, or gives no model.
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


def exported(path: str | Path, kind: str, model: nn.Module | None = None) -> bytes:
    """The model of a checkpoint, as the bytes of a file of a format.

    Raises ConfigError: as content().
    """
    snapshot, _ = find_checkpoint(path)
    arrays = {**snapshot.arrays.get("parameters", {}), **snapshot.arrays.get("buffers", {})}
    shape = None
    options = {}
    if kind == "onnx":
        if hasattr(model, "wrapped"):
            raise ConfigError(
                "[export] this is a PyTorch module; odyssey.load() it, and torch.onnx.export()"
            )
        from_checkpoint = opened(path, model)
        model = from_checkpoint.model
        shape = tuple(from_checkpoint.data.get("sample_shape") or ())
        if columns := _columns(from_checkpoint.data):
            options = {"columns": columns}
    return content(kind, model, arrays, shape, **options)


def _columns(data: dict[str, Any]) -> Columns | None:
    """How a table's columns become samples, if what was trained on was one."""
    return Columns.of_saved(data.get("table"), data["columns"]) if data.get("columns") else None


def content(
    kind: str,
    model: Any,
    arrays: dict[str, np.ndarray],
    shape: tuple[int, ...] | None,
    **options: Any,
) -> bytes:
    """A model as the bytes of a file of a format, which may be given more.

    Raises ConfigError: there is no such format, its package is missing, or it has no form for the
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
    model: nn.Module,
    path: str | Path,
    format: str | None = None,
    sample_shape: tuple[int, ...] | None = None,
) -> None:
    """Writes a model for other programs, in eval mode.

    Not collective: rank 0 calls it.

    format: "safetensors" or "torch", weights by name; "onnx", the whole model; None: by the path's
    ending, .safetensors, .pt or .onnx. sample_shape: of one sample, without the batch; needed for
    ONNX, but not of a GPT. Raises ConfigError: the ending says no format, or an op of the model has
    no form. OutputError: the file cannot be written; one that was there stays.
    """
    endings = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".onnx": "onnx"}
    kind = format or endings.get(Path(path).suffix)
    if kind is None:
        raise ConfigError(f"[export] {path} has no ending of {', '.join(endings)}; give format=")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"[export] the model is a {type(model).__name__}; give an odyssey.nn.Module"
        )
    file_bytes = content(kind, model, model.state_dict(), sample_shape)
    write_whole(Path(path), lambda file: file.write(file_bytes), mode=0o666)


def predict(model: nn.Module, samples: Any, batch_size: int = 1024) -> Any:
    """Returns what a model gives for all samples, in eval mode: (N, ...) float32, or a tuple or
    dict of such; collective.

    samples: an array (N, ...), or what NumPy makes one of, such as PyTorch's tensors; a data set,
    or a DataLoader. Raises ConfigError: it is none of them, or empty.
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
    """The model that a checkpoint holds, in eval mode.

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
    """A part of the data set that a model was trained on, or of another.

    Raises ConfigError: neither is known.
    """
    source = saved_model.data.get("source") or {}
    name = dataset or source.get("dataset")
    if name is None:
        raise ConfigError(
            f"[load] {saved_model.name} does not say what its data are, as odyssey train has not "
            "made "
            "it; give --dataset and "
            "--data-dir"
        )
    folder = data_dir or (
        Path(source["data_dir"]) if source.get("data_dir") and not dataset else None
    )
    options = {
        key: source[key] for key in ("size", "target", "length") if source.get(key) is not None
    }
    if (
        name == "image-folder"
        and "size" not in options
        and len(saved_model.data.get("sample_shape") or ()) == 3
    ):
        options["size"] = saved_model.data["sample_shape"][1:]
    if name == "csv":
        options["like"] = _columns(saved_model.data)
    return datasets.opened(name, folder, train=train, **options)


def loss_of(saved_model: Saved) -> nn.Module | None:
    """The loss that a model was trained with, if it is one of odyssey.nn's; None: the model's
    own.
    """
    return getattr(nn, saved_model.loss)() if saved_model.loss in nn.__all__ else None


def save_model(model: nn.Module, path: str | Path = "checkpoint.safetensors") -> None:
    """Writes a model of odyssey.nn as one safetensors file, from which load_model() builds it.

    Not collective: rank 0 calls it, then all wait in a barrier(). Raises OutputError: it cannot be
    written; a file that was there stays.
    """
    state = model.state_dict()
    metadata = {"odyssey": json.dumps(of_model(model))}
    write_whole(Path(path), lambda file: write_weights(file, state, metadata), mode=0o666)


def load_model(
    path: str | Path = "checkpoint.safetensors", model: nn.Module | None = None
) -> nn.Module:
    """The model of a file of save_model(), in training mode; `model` takes its weights, where it
    is of your own code. Raises ConfigError: the model is of your own code, or another.
    CheckpointError: this is no such file.
    """
    weights, about = read_weights(Path(path))
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
    """Returns what a model gives for all samples of some batches, in their order, whole on every
    rank: (N, ...) float32, or a tuple or dict of such; a collective call. batches: the same
    on all ranks, each of which computes its shards of each. shard: samples that are computed
    at once; the result depends on it in its last bits, and on no number of ranks. algorithm:
    conv_algorithm of the training.
    """
    size = shard or SHARD_SIZE
    executor = current()
    previous_algorithm = executor.conv_algorithm
    executor.conv_algorithm = algorithm
    try:
        with in_mode(model, False), no_grad():
            wholes = [_of_batch(model, batch, comm, size) for batch in batches]
    finally:
        executor.conv_algorithm = previous_algorithm
    if not wholes:
        raise ConfigError("[predict] the loader gave no batch; give it data")
    return _joined(wholes)


def _of_batch(model: nn.Module, batch: Batch, comm: Communicator, size: int) -> Any:
    n = len(batch.indices)
    cuts = [share(shard_count(n, size), comm.size, rank) for rank in range(comm.size)]
    runs = [(min(lo * size, n), min(hi * size, n)) for lo, hi in cuts]
    lo, hi = runs[comm.rank]
    rows = [forward(model, batch, a, min(a + size, hi)) for a in range(lo, hi, size)]
    if comm.size == 1:
        return _joined(rows)
    outputs = (
        _joined(rows) if rows else forward(model, batch, 0, 1)
    )  # one sample has the form as well

    def gathered(local_rows: np.ndarray) -> np.ndarray:
        all_rows = np.zeros((n, *local_rows.shape[1:]), np.float32)
        all_rows[lo:hi] = local_rows[: hi - lo]
        floats = math.prod(local_rows.shape[1:])
        comm.all_gather_v(all_rows.reshape(-1), [(a * floats, b * floats) for a, b in runs])
        return all_rows

    return mapped(gathered, outputs)


def _joined(trees: list[Any]) -> Any:
    return mapped(lambda *parts: np.concatenate(parts), *trees)


def forward(model: nn.Module, batch: Batch, lo: int, hi: int) -> Any:
    """Computes the outputs of some samples of a batch; (hi - lo, ...), or a tuple or dict of
    such.
    """
    data = batch.dataset
    indices = batch.indices[lo:hi]
    if isinstance(data, ArrayDataset) and data.normalised:
        x = _normalised(data, indices)
    else:
        x = mapped(
            lambda a: Tensor(a, dtype=np.int32 if a.dtype.kind in "iu" else np.float32),
            data.gather(indices)[0],
        )
    y = model(*x) if isinstance(x, tuple) else model(x)

    def numbers(t: Any) -> np.ndarray:
        if not isinstance(t, Tensor) or t.shape[:1] != (hi - lo,):
            output_kind = f"a tensor {t.shape}" if isinstance(t, Tensor) else type(t).__name__
            raise ConfigError(
                f"[predict] forward() gives {output_kind} for {hi - lo} samples; a tensor (N, "
                "...), or "
                "a tuple or dict of "
                "such, is needed"
            )
        return np.array(t.numpy(), np.float32)

    return mapped(numbers, y)


def _normalised(data: ArrayDataset, indices: np.ndarray) -> Tensor:
    """Samples as a training's steps gather them: by that kernel, which rounds once where NumPy
    rounds twice.
    """
    images = data.rows(indices)[0]
    rows = np.arange(len(indices))
    executor = Eager()
    x = empty(images.shape, layout_of(len(indices)))
    c = executor.context
    c.images = images.ctypes.data
    c.bytes = int(images.dtype.itemsize == 1)
    c.valid = len(indices)
    c.rows = rows.ctypes.data
    c.scale = data.scale.ctypes.data
    c.shift = data.shift.ctypes.data
    executor.emit("input", x.memory, x.groups, x.features, len(data.scale), layout=x.layout)
    return x


def batches_of_array(x: np.ndarray, scale: Any = 1.0, shift: Any = 0.0) -> Iterable[Batch]:
    """Samples (N, ...), float32 or pixels, in batches; scale, shift: as in data.arrays."""
    channels = x.shape[1] if x.ndim == 4 else 1
    scale_and_shift = (np.full(channels, np.asarray(v, np.float32)) for v in (scale, shift))
    data = ArrayDataset(x, np.zeros(len(x), np.int32), 1, *scale_and_shift, "x")
    return [
        Batch(data, np.arange(a, min(a + 8192, len(x))), 0, i)
        for i, a in enumerate(range(0, len(x), 8192))
    ]
