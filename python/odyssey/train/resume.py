"""Resuming from a checkpoint: the settings that must be equal for the same bits, and how all ranks
get the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from ..base.files import parse_json
from ..base.paths import expand_path
from ..capture import NotAValue, encode
from ..core.native import KERNELS
from ..core.offload import maker
from ..data import ArrayDataset, Vocabulary
from ..data.datasets import digest
from ..data.nested import leaves
from ..data.sources import fingerprint
from ..errors import CheckpointError, ConfigError, OdysseyError
from ..settings.recipes import CONV_ALGORITHMS

if TYPE_CHECKING:
    from ..callbacks import Callback
    from ..checkpoints import Snapshot
    from ..comm import Communicator
    from ..data import DataLoader
    from ..optim import Schedule

#: Values of `resume` that are no path. "weights" is another, which a path may follow.
RESUME = ("auto", "never")
#: Steps whose learning-rate factor is compared, because schedules are functions, which can't be.
PROBES = (0, *(n * 10**k for k in range(6) for n in (1, 2, 5)))
_NO_SETTINGS = ("training", "arguments")  # attributes of a module that are no settings
_ARRAY = "\0sent array"  # the key in JSON for the dtype and shape of an array that follows
# the file and the tensor of a checkpoint with the records of all epochs but the last one, as JSON
EARLIER = ("history", "records")
# the file of a checkpoint with the arrays of what the state_dict() of callbacks returns
CALLBACK_ARRAYS = "callbacks"
# the key in the configuration of a checkpoint for how convolutions are computed
CONV_ALGORITHM = "convolution algorithm"
#: The advice for users who changed settings on purpose.
ANEW = (
    "take its weights alone into a new training (resume='weights', --resume weights), or start "
    "anew (resume='never', --resume never, and another directory)"
)
#: Settings that are missing in older checkpoints, and in those of user-written loops.
OPTIONAL_KEYS = ("accumulation", "settings of layers", "settings of the loss", "default dtype")


def probed(schedule: Schedule, steps: Iterable[int] = PROBES) -> list[float | None]:
    """Returns a schedule's factors at these steps; None for a step where the schedule fails.

    For example, a schedule made from a table has no factor after the table's end.
    """
    factors: list[float | None] = []
    for step in steps:
        try:
            factors.append(float(schedule(step)))
        except Exception:
            factors.append(None)
    return factors


def settings_of(module: object) -> list[list[Any]]:
    """Returns [class, name, value] of each setting of a layer or loss of odyssey.nn.

    The list is empty for classes of the user's own, because their attributes may be counters.
    """
    if not type(module).__module__.startswith("odyssey."):
        return []
    settings: list[list[Any]] = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, np.ndarray):
            value = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        if (
            isinstance(value, (int, float, str, tuple, type(None)))
            and name[0] != "_"
            and name not in _NO_SETTINGS
        ):
            settings.append([type(module).__name__, name, value])
    return settings


def data_configuration(loader: DataLoader, batch_size: int) -> dict[str, Any]:
    """Returns the settings that decide which samples a step uses, and a fingerprint of data."""
    data = loader.dataset
    sampler = loader.sampler
    vocabulary = getattr(data, "vocabulary", None)
    return {
        **({"vocabulary": vocabulary.saved} if isinstance(vocabulary, Vocabulary) else {}),
        "batch size": batch_size,
        "data set": [len(data), fingerprint(data), _digest_samples(data)],
        "data order": [
            loader.seed,
            loader.shuffle,
            None if sampler is None else type(sampler).__name__,
        ],
        "short last batch": not loader.drop_last,
    }


def _digest_samples(data: Any) -> str:
    """Returns the fingerprint in checkpoints before 0.3: of three samples of an ArrayDataset.

    For other data sets it is the fingerprint of nothing.
    """
    if not isinstance(data, ArrayDataset):
        return digest()
    indices = sorted({0, len(data) // 2, len(data) - 1})
    return digest(*leaves(data.gather(np.array(indices))))


def conv_algorithm_of(configuration: dict[str, Any], name: str) -> str:
    """Returns how convolutions were computed before a checkpoint: "direct" or "winograd".

    Checkpoints of kernels before 7 may have "auto" or nothing. Both meant "direct".

    Args:
        configuration: of the checkpoint.
        name: of the checkpoint, for messages.

    Raises:
        CheckpointError: It is another algorithm.
    """
    algorithm = configuration.get(CONV_ALGORITHM, "auto")
    if algorithm not in CONV_ALGORITHMS:
        raise CheckpointError(
            f"[resume] {name} has the {CONV_ALGORITHM} {algorithm!r}, which this version doesn't "
            f"have; use another checkpoint, or {ANEW}"
        )
    return "direct" if algorithm == "auto" else algorithm


def has_same_kernels(snapshot: Snapshot) -> bool:
    """Returns whether these kernels compute the same bits as those that a checkpoint was made with.

    Kernels 7 differ from kernels 6 only in which convolutions Winograd's algorithm computes.
    """
    kernels = snapshot.values.get("kernels", 1)
    configuration = snapshot.values.get("configuration") or {}
    is_direct = configuration.get(CONV_ALGORITHM, "auto") != "winograd"
    return kernels == KERNELS or (kernels == 6 and is_direct)


def check(saved: dict[str, Any], current: dict[str, Any], name: str) -> None:
    """Compares the settings that a checkpoint was made with to the current ones.

    Args:
        saved, current: settings by name.
        name: of the checkpoint, for messages.

    Raises:
        ConfigError: They differ, so a resumed run would have other results.
    """
    for key, value in current.items():
        if key not in saved and key in OPTIONAL_KEYS:
            continue
        if key not in saved:
            raise ConfigError(
                f"[resume] {name} says nothing of the {key}; use --resume never, or another "
                "checkpoint"
            )
        # the values are factors at some steps, which would not help a user
        if saved[key] != value and key == "schedule":
            raise ConfigError(
                f"[resume] {name} was made with another learning rate over time than this "
                "training has; give the same "
                f"schedule and length (--schedule, --warmup-steps, --epochs, --steps), or {ANEW}"
            )
        if (
            saved[key] != value
            and key == "model"
            and (differs := _describe_difference(saved[key], value))
        ):
            raise ConfigError(
                f"[resume] {name} is of another model: {differs}; build that, or take another "
                "directory"
            )
        # before 0.3, checkpoints had (samples, fingerprint of three samples)
        if key == "data set" and isinstance(saved[key], list) and len(saved[key]) == 2:
            value = [value[0], value[2]]
        if saved[key] != value and key == "data set":
            raise ConfigError(
                f"[resume] {name} was made with another data set "
                f"({_describe_data_set(saved[key])}) than this training has "
                f"({_describe_data_set(value)}): files changed, or other ones are given; give the "
                f"same, or {ANEW}"
            )
        if saved[key] != value:
            raise ConfigError(
                f"[resume] {name} was made with {key} {_describe_value(saved[key], value)}, this "
                f"training has {_describe_value(value, saved[key])}; give the same, or {ANEW}"
            )


def _describe_difference(saved: Any, current: Any) -> str:
    """Describes the first parameter that differs between two models; "" if they can't be compared.

    saved, current: [name, shape, and True if it is frozen] of each parameter.
    """
    try:
        saved_parameters, current_parameters = (
            {name: (tuple(shape), *frozen) for name, shape, *frozen in rows}
            for rows in (saved, current)
        )
    except (TypeError, ValueError):
        return ""
    for name in (*current_parameters, *saved_parameters):
        saved_form = saved_parameters.get(name)
        current_form = current_parameters.get(name)
        if saved_form is None or current_form is None:
            return f"{name} is {'not in it' if saved_form is None else 'in it and not in this one'}"
        if saved_form != current_form:
            there, here = (
                f"{shape}{' (frozen)' * bool(frozen)}"
                for shape, *frozen in (saved_form, current_form)
            )
            return f"{name} is {there} there and {here} here"
    return "its parameters come in another order"


def _describe_data_set(value: Any) -> str:
    """Returns the data set of a configuration in words, for a message."""
    count, data_fingerprint, *_ = (
        value if isinstance(value, list) and len(value) > 1 else ("?", None)
    )
    return f"{count} samples" + f", fingerprint {data_fingerprint}" * bool(data_fingerprint)


def _describe_value(value: Any, counterpart: Any) -> str:
    """Returns a value for a message; of a list only the first item that differs in the counterpart.

    It follows nested lists of equal length, and shortens the text to 120 characters.
    """
    while (
        isinstance(value, list) and isinstance(counterpart, list) and len(value) == len(counterpart)
    ):
        pair = next(((a, b) for a, b in zip(value, counterpart, strict=True) if a != b), None)
        if pair is None or not isinstance(pair[0], list):
            break
        value, counterpart = pair
    text = json.dumps(value)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        setting, setting_value = value
        text = f"{setting} = {json.dumps(setting_value)}"
    return text if len(text) <= 120 else text[:117] + "..."


def tensor(tensors: dict[str, Any], key: str, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
    """Returns a tensor of a checkpoint called `name`, in memory or Stored.

    Raises CheckpointError: it is missing, or has another shape or dtype.
    """
    array = tensors.get(key)
    if array is None or array.shape != shape or array.dtype != dtype:
        problem = "is missing" if array is None else f"is {array.dtype} {array.shape}"
        raise CheckpointError(f"[resume] {name}: {key} {problem}; {dtype} {shape} is needed")
    return array


def pack_tree(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Returns a tree of JSON's values and arrays as JSON, and a list of its arrays.

    `read` asks for the arrays in the order of the list. Raises TypeError: the tree has another
    value in it.
    """
    arrays: list[np.ndarray] = []

    def describe_array(array: Any) -> dict[str, Any]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a {type(array).__name__} is not sent; JSON's values and arrays are")
        arrays.append(array)
        return {_ARRAY: [array.dtype.name, list(array.shape)]}

    return json.dumps(value, default=describe_array).encode(), arrays


def read(text: bytes, take: Callable[[str, list[int]], np.ndarray]) -> Any:
    """Returns the tree that `pack_tree` made JSON of; tuples become lists.

    take: a function of (dtype, shape) that returns the next array.
    """
    return json.loads(
        text, object_hook=lambda node: take(*node[_ARRAY]) if _ARRAY in node else node
    )


def spread(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Sends a tree of JSON's values and arrays from rank `root` to all ranks; a collective call.

    Returns the tree. Tuples become lists. Ranks other than `root` ignore their `value`.
    """
    if comm.size == 1:
        return value
    text, arrays = pack_tree(value) if comm.rank == root else (b"", [])
    length = int(comm.broadcast(np.array([len(text)], np.int64), root)[0])
    text = comm.broadcast(
        np.frombuffer(bytearray(text) or bytearray(length), np.uint8), root
    ).tobytes()
    arrays_to_send = iter(arrays)

    def exchange_array(dtype: str, shape: list[int]) -> np.ndarray:
        array = (
            np.array(next(arrays_to_send), order="C")
            if comm.rank == root
            else maker(np.empty)(shape, dtype)
        )
        # as bytes, because checkpoints hold dtypes that a broadcast doesn't support
        comm.broadcast(array.reshape(-1).view(np.uint8), root)
        return array

    return read(text, exchange_array)


def gather_trees(comm: Communicator, value: Any) -> list[Any]:
    """Returns the trees of JSON's values and arrays of all ranks, by rank; a collective call.

    Tuples become lists. Ranks may have different trees.
    """
    if comm.size == 1:
        return [value]
    text, arrays = pack_tree(value)
    head = np.array([len(text)], np.int64)
    parts = [head.tobytes(), text, *(array.tobytes() for array in arrays)]
    payload = np.frombuffer(b"".join(parts), np.uint8)
    return [_unpack_tree(part) for part in comm.all_gather_each(payload)]


def _unpack_tree(payload: np.ndarray) -> Any:
    """Returns the tree of one rank, of the bytes that `gather_trees` sends."""
    length = int(np.frombuffer(payload[:8].tobytes(), np.int64)[0])
    content = payload[8 + length :].tobytes()
    offset = 0

    def take(dtype: str, shape: list[int]) -> np.ndarray:
        nonlocal offset
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(content, dtype, count, offset).reshape(shape)
        offset += array.nbytes
        return array

    return read(payload[8 : 8 + length].tobytes(), take)


def by_first(comm: Communicator, act: Callable[[], Any]) -> Any:
    """Calls `act` on rank 0, and returns its result on all ranks; a collective call.

    The result is a tree, as for `spread`. If `act` raises an OdysseyError, all ranks raise it.
    """
    value = None
    with on_all_ranks(comm):
        if comm.rank == 0:
            value = act()
    return spread(comm, value)


@contextlib.contextmanager
def on_all_ranks(comm: Communicator, agree: bool = True) -> Iterator[None]:
    """Raises an OdysseyError of one rank in the block on all ranks; the first one if several fail.

    The end of the block is a collective call. agree: False does nothing.
    """
    if not agree or comm.size == 1:
        yield
        return
    error: OdysseyError | None = None
    try:
        yield
    except OdysseyError as problem:
        error = problem
    local_error = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
    rank_errors = comm.all_gather_each(np.frombuffer(local_error, np.uint8))
    first_error = next((text.tobytes() for text in rank_errors if text.size), None)
    if first_error is not None:
        class_name, message = json.loads(first_error)
        is_local = first_error == local_error
        raise (error if is_local else getattr(errors, class_name)(message)).on_all_ranks()


def shared(
    comm: Communicator, read: Callable[[bool], tuple[Snapshot | None, str]], parts: bool = False
) -> tuple[Snapshot | None, str]:
    """Calls `read` on rank 0, and returns its snapshot (or None) and name on all ranks; collective.

    If ranks need only parts of the arrays, and all ranks see the files, each rank opens the files
    and reads its parts. Otherwise rank 0 reads all arrays and sends them.

    Args:
        read: a function of True if the arrays must be in memory, else False. If it raises an
            OdysseyError, all ranks raise it.
        parts: True if ranks need only parts.
    """
    from ..checkpoints import Snapshot, reader

    if comm.size == 1:
        return by_first(comm, lambda: read(True))
    local_snapshot: Snapshot | None = None

    def read_first() -> list[Any]:
        nonlocal local_snapshot
        local_snapshot, name = read(not parts)
        if not local_snapshot:
            return [local_snapshot, name]
        # with a source, arrays are in files, which ranks may see
        arrays = {} if local_snapshot.source else local_snapshot.arrays
        content = [local_snapshot.step, arrays, local_snapshot.values, local_snapshot.source]
        return [content, name]

    content, name = by_first(comm, read_first)
    if content is None:
        return None, name
    step, arrays, values, source = content
    if source is None:
        return Snapshot(step, arrays, values), name
    if comm.rank:
        with contextlib.suppress(OdysseyError):
            path, *_ = source
            local_snapshot, _ = reader.open_snapshot(Path(path), follow=True)
    sees_files = local_snapshot is not None and list(local_snapshot.source or ()) == list(source)
    if not comm.all_gather(np.array([sees_files], np.int32)).all():

        def read_all() -> dict[str, dict[str, np.ndarray]]:
            return {
                file: {tensor_name: np.asarray(value) for tensor_name, value in tensors.items()}
                for file, tensors in local_snapshot.arrays.items()
            }

        return Snapshot(step, by_first(comm, read_all), values), name
    return Snapshot(step, local_snapshot.arrays, values, source=tuple(source)), name


def find(path: Path, tell: Callable[[str], None], in_memory: bool = True) -> tuple[Snapshot, str]:
    """Returns the checkpoint at a path, and its name; not a collective call.

    Args:
        path: a checkpoint, a directory of checkpoints or a run. Of the last two it is the newest
            valid one.
        tell: reports a line about each damaged checkpoint to the user.
        in_memory: True reads all arrays now.

    Raises:
        CheckpointError: No checkpoint there is valid.
    """
    from ..checkpoints import Store, environment_key

    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / "manifest.json").exists():
        store = Store(path.parent, owner=False, key=environment_key())
        return store.load(path, in_memory), path.name
    store = Store(path, owner=False, key=environment_key())
    snapshot, damaged = store.newest(in_memory)
    for checkpoint in damaged:
        tell(checkpoint.message(snapshot))
    if snapshot is None:
        raise CheckpointError(
            f"[resume] {path} has no valid checkpoint; name another, or 'auto', 'never' or "
            "'weights'"
        )
    return snapshot, f"{path.name}/{store.path_of(snapshot.step).name}"


def expand_place(resume: str | Path) -> str | Path:
    """Returns `resume` of fit() with the path in it expanded, if there is one.

    Raises ConfigError: a variable in the path isn't set.
    """
    kind, colon, path = str(resume).partition(":")
    if resume in RESUME or (kind == "weights" and not path):
        return resume
    if kind == "weights":
        return f"{kind}{colon}{expand_path(path)}"
    return expand_path(resume)


def wants_weights(resume: str | Path) -> bool:
    """True if `resume` asks for weights alone: "weights", or "weights:PATH"."""
    return str(resume).partition(":")[0] == "weights"


def weights(
    resume: str, folder: Path | None, say: Callable[[str], None], in_memory: bool
) -> tuple[Snapshot, str]:
    """Returns the checkpoint with the weights for a new training run, and its name.

    resume: "weights" for the newest of `folder`, or "weights:PATH".

    Raises ConfigError: no directory is known. CheckpointError: no checkpoint there is valid.
    """
    place = resume.partition(":")[2] or folder
    if place is None:
        raise ConfigError(
            "[checkpoint] resume is 'weights', but there is no checkpoint_dir; give 'weights:PATH'"
        )
    return find(Path(place), say, in_memory)


def earlier(snapshot: Snapshot) -> list[Any]:
    """Returns the records of epochs before the last one, from a tensor of a checkpoint.

    The list is empty for older checkpoints, which have all records in `values`.
    """
    file, tensor_name = EARLIER
    text = snapshot.arrays.get(file, {}).get(tensor_name)
    if text is None:
        return []
    return parse_json(np.asarray(text).tobytes(), f"{file}/{tensor_name}")


def state_of_callback(
    name: str, callback: Callback, arrays: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Returns what the `state_dict()` of a callback returns, as JSON; its arrays go into `arrays`.

    Raises ConfigError: there is something in it that checkpoints can't keep.
    """
    try:
        return encode(callback.state_dict(), arrays, name)
    except (NotAValue, RecursionError) as problem:
        raise ConfigError(
            f"[{name}] state_dict() returns something that checkpoints can't keep: {problem}; "
            "return numbers, strings, arrays and containers of them"
        ) from problem
