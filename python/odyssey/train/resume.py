"""Going on from a checkpoint: which settings must be the same for the same bits, and how all
ranks get it.
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
from ..core.offload import maker
from ..data import ArrayDataset, Vocabulary
from ..data.datasets import digest
from ..data.nested import leaves
from ..data.sources import fingerprint
from ..errors import CheckpointError, ConfigError, OdysseyError

if TYPE_CHECKING:
    from ..callbacks import Callback
    from ..checkpoints import Snapshot
    from ..comm import Communicator
    from ..data import DataLoader
    from ..optim import Schedule

#: Steps whose learning-rate factor is compared: schedules are functions and cannot be.
PROBES = (0, *(n * 10**k for k in range(6) for n in (1, 2, 5)))
_NO_SETTINGS = ("training", "arguments")  # of a module
_ARRAY = "\0array"  # in JSON: dtype and shape of one that follows
# file and tensor of a checkpoint: JSON of all epochs' records but the last one's
EARLIER = ("history", "records")
# what a checkpoint was made with that is older than the setting
OLD_DEFAULTS = {"convolution algorithm": "auto"}
#: What helps where settings are others on purpose.
ANEW = (
    "take its weights alone into a new training (resume='weights', --resume weights), or start "
    "anew (resume='never', "
    "--resume never, and another directory)"
)
#: What older checkpoints, and those of loops of one's own, say nothing of.
OPTIONAL_KEYS = ("accumulation", "settings of layers", "settings of the loss")


def probed(schedule: Schedule, steps: Iterable[int] = PROBES) -> list[float | None]:
    """A schedule's factors at these steps; None where it has none, as one made of a table."""
    factors: list[float | None] = []
    for step in steps:
        try:
            factors.append(float(schedule(step)))
        except Exception:
            factors.append(None)
    return factors


def settings_of(module: object) -> list[list[Any]]:
    """[class, name, value] of what a layer or loss of odyssey.nn was made with; a class of the
    user's own may count.
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
    """Returns what decides which samples a step sees; a data set by its `fingerprint`."""
    data = loader.dataset
    sampler = loader.sampler
    vocabulary = getattr(data, "vocabulary", None)
    return {
        **({"vocabulary": vocabulary.saved} if isinstance(vocabulary, Vocabulary) else {}),
        "batch size": batch_size,
        "data set": [len(data), fingerprint(data), _ends(data)],
        "data order": [
            loader.seed,
            loader.shuffle,
            None if sampler is None else type(sampler).__name__,
        ],
        "short last batch": not loader.drop_last,
    }


def _ends(data: Any) -> str:
    """Returns what checkpoints before 0.3 have for a fingerprint: of three samples of an
    ArrayDataset, or nothing.
    """
    if not isinstance(data, ArrayDataset):
        return digest()
    return digest(*leaves(data.gather(np.array(sorted({0, len(data) // 2, len(data) - 1})))))


def check(saved: dict[str, Any], current: dict[str, Any], name: str) -> None:
    """ConfigError if a checkpoint called `name` was made with other settings: going on would be
    another training.
    """
    for key, value in current.items():
        if key not in saved and key in OPTIONAL_KEYS:
            continue
        if key not in saved and key in OLD_DEFAULTS:
            saved = {**saved, key: OLD_DEFAULTS[key]}
        if key not in saved:
            raise ConfigError(
                f"[resume] {name} says nothing of the {key}; use --resume never, or another "
                "checkpoint"
            )
        # told by probes of its factors, which say nothing to a reader
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
        # of before 0.3
        if key == "data set" and isinstance(saved[key], list) and len(saved[key]) == 2:
            value = [value[0], value[2]]
        if saved[key] != value and key == "data set":
            raise ConfigError(
                f"[resume] {name} was made with another data set "
                f"({_describe_data_set(saved[key])}) than "
                "this training has "
                f"({_describe_data_set(value)}): files changed, or other ones are given; give "
                "the same, or "
                f"{ANEW}"
            )
        if saved[key] != value:
            raise ConfigError(
                f"[resume] {name} was made with {key} {_brief(saved[key], value)}, this training "
                "has "
                f"{_brief(value, saved[key])}; give the same, or {ANEW}"
            )


def _describe_difference(saved: Any, current: Any) -> str:
    """The first parameter that two models do not have alike, in words; "": none was found."""
    try:
        saved_parameters, current_parameters = (
            {name: (tuple(shape), *frozen) for name, shape, *frozen in rows}
            for rows in (saved, current)
        )
    except (TypeError, ValueError):
        return ""
    for name in (*current_parameters, *saved_parameters):
        was = saved_parameters.get(name)
        is_now = current_parameters.get(name)
        if was is None or is_now is None:
            return f"{name} is {'not in it' if was is None else 'in it and not in this one'}"
        if was != is_now:
            descriptions = [
                f"{shape}{' (frozen)' * bool(frozen)}" for shape, *frozen in (was, is_now)
            ]
            return f"{name} is {descriptions[0]} there and {descriptions[1]} here"
    return "its parameters come in another order"


def _describe_data_set(value: Any) -> str:
    """The data set of a configuration, for a message."""
    count, data_fingerprint, *_ = (
        value if isinstance(value, list) and len(value) > 1 else ("?", None)
    )
    return f"{count} samples" + f", fingerprint {data_fingerprint}" * bool(data_fingerprint)


def _brief(value: Any, counterpart: Any) -> str:
    """A value for a message; of two lists only what is the first to differ."""
    while (
        isinstance(value, list) and isinstance(counterpart, list) and len(value) == len(counterpart)
    ):
        pair = next(((a, b) for a, b in zip(value, counterpart, strict=True) if a != b), None)
        if pair is None or not isinstance(pair[0], list):
            break
        value, counterpart = pair
    # of pairs (name, value)
    is_pair = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    text = f"{value[0]} = {json.dumps(value[1])}" if is_pair else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def tensor(tensors: dict[str, Any], key: str, shape: tuple[int, ...], dtype: Any, name: str) -> Any:
    """A tensor of a checkpoint called `name`, in memory or Stored.

    Raises CheckpointError: none of this form.
    """
    array = tensors.get(key)
    if array is None or array.shape != shape or array.dtype != dtype:
        problem = "is missing" if array is None else f"is {array.dtype} {array.shape}"
        raise CheckpointError(f"[resume] {name}: {key} {problem}; {dtype} {shape} is needed")
    return array


def pack_tree(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """A tree of JSON's values and arrays as JSON, and the arrays in the order in which `read`
    asks for them.
    """
    arrays: list[np.ndarray] = []

    def described(array: Any) -> dict[str, Any]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"a {type(array).__name__} is not sent; JSON's values and arrays are")
        arrays.append(array)
        return {_ARRAY: [array.dtype.name, list(array.shape)]}

    return json.dumps(value, default=described).encode(), arrays


def read(text: bytes, take: Callable[[str, list[int]], np.ndarray]) -> Any:
    """Returns what `pack_tree` was given; take(dtype, shape) gives the next array.

    Tuples become lists.
    """
    return json.loads(
        text, object_hook=lambda node: take(*node[_ARRAY]) if _ARRAY in node else node
    )


def spread(comm: Communicator, value: Any, root: int = 0) -> Any:
    """A tree of JSON's values and arrays that rank `root` has, on all ranks; a collective call.

    Tuples become lists.
    """
    if comm.size == 1:
        return value
    text, arrays = pack_tree(value) if comm.rank == root else (b"", [])
    length = int(comm.broadcast(np.array([len(text)], np.int64), root)[0])
    text = comm.broadcast(
        np.frombuffer(bytearray(text) or bytearray(length), np.uint8), root
    ).tobytes()
    outgoing = iter(arrays)

    def received(dtype: str, shape: list[int]) -> np.ndarray:
        array = (
            np.array(next(outgoing), order="C")
            if comm.rank == root
            else maker(np.empty)(shape, dtype)
        )
        # bytes: of any dtype that a checkpoint holds
        comm.broadcast(array.reshape(-1).view(np.uint8), root)
        return array

    return read(text, received)


def by_first(comm: Communicator, act: Callable[[], Any]) -> Any:
    """Returns what `act` gives on rank 0, a tree as `spread` has it, on all ranks, or raises its
    error; collective.
    """
    value = None
    with on_all_ranks(comm):
        if comm.rank == 0:
            value = act()
    return spread(comm, value)


@contextlib.contextmanager
def on_all_ranks(comm: Communicator, agree: bool = True) -> Iterator[None]:
    """Raises what goes wrong inside on one rank, the first of them, on all, if they `agree`: a
    collective call then.
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
    first_error = next(
        (text for text in comm.all_gather_each(np.frombuffer(local_error, np.uint8)) if text.size),
        None,
    )
    if first_error is not None:
        kind, text = json.loads(first_error.tobytes())
        raise (
            error if first_error.tobytes() == local_error else getattr(errors, kind)(text)
        ).on_all_ranks()


def shared(
    comm: Communicator, read: Callable[[bool], tuple[Snapshot | None, str]], parts: bool = False
) -> tuple[Snapshot | None, str]:
    """The snapshot, or none, and its name that `read` gives on rank 0, on all ranks, as `by_first`.

    `read` is asked whether its arrays must be in memory: not if ranks need `parts` of it and all
    see the files, which each reads.
    """
    from ..checkpoints import Snapshot, reader

    if comm.size == 1:
        return by_first(comm, lambda: read(True))
    own: Snapshot | None = None

    def first() -> list[Any]:
        nonlocal own
        own, name = read(not parts)
        return [own and [own.step, {} if own.source else own.arrays, own.values, own.source], name]

    sent, name = by_first(comm, first)
    if sent is None or sent[3] is None:
        return sent and Snapshot(*sent[:3]), name
    step, _, values, source = sent
    if comm.rank:
        with contextlib.suppress(OdysseyError):
            own = reader.opened(Path(source[0]), follow=True)[0]
    sees_files = own is not None and list(own.source or ()) == list(source)
    if not comm.all_gather(np.array([sees_files], np.int32)).all():
        read_all = (
            (s, {n: np.asarray(t) for n, t in tensors.items()})
            for s, tensors in (own.arrays.items() if own else ())
        )
        return Snapshot(step, by_first(comm, lambda: dict(read_all)), values), name
    return Snapshot(step, own.arrays, values, source=tuple(source)), name


def find(path: Path, tell: Callable[[str], None], in_memory: bool = True) -> tuple[Snapshot, str]:
    """The checkpoint at a path, or the newest valid one of a directory of them or of a run, with
    its name; no collective call. in_memory: its arrays are read at once. Raises CheckpointError:
    there is none that is valid.
    """
    from ..checkpoints import Store, environment_key

    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / "manifest.json").exists():
        return Store(path.parent, owner=False, key=environment_key()).load(
            path, in_memory
        ), path.name
    store = Store(path, owner=False, key=environment_key())
    snapshot, refused = store.newest(in_memory)
    for one in refused:
        tell(one.message(snapshot))
    if snapshot is None:
        raise CheckpointError(
            f"[resume] {path} has no valid checkpoint; name another, or 'auto', 'never' or "
            "'weights'"
        )
    return snapshot, f"{path.name}/{store.path_of(snapshot.step).name}"


def wants_weights(resume: str | Path) -> bool:
    """True if `resume` asks for weights alone: "weights", or "weights:PATH"."""
    return str(resume).partition(":")[0] == "weights"


def weights(
    resume: str, folder: Path | None, say: Callable[[str], None], in_memory: bool
) -> tuple[Snapshot, str]:
    """The checkpoint whose weights a new training begins with, and its name.

    Raises ConfigError: no directory is known. CheckpointError: none is valid there.
    """
    place = resume.partition(":")[2] or folder
    if place is None:
        raise ConfigError(
            "[checkpoint] resume is 'weights', but there is no checkpoint_dir; give 'weights:PATH'"
        )
    return find(Path(place), say, in_memory)


def earlier(snapshot: Snapshot) -> list[Any]:
    """The records of epochs before the last one; in older checkpoints they are among `values`,
    as that one is.
    """
    stem, name = EARLIER
    text = snapshot.arrays.get(stem, {}).get(name)
    return [] if text is None else parse_json(np.asarray(text).tobytes(), f"{stem}/{name}")


def state_of_callback(name: str, callback: Callback) -> dict[str, Any]:
    """Returns what a checkpoint keeps of a callback. Raises ConfigError: it is not JSON."""
    state = callback.state_dict()
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ConfigError(
            f"[{name}] state_dict() gives no JSON: {problem}; give numbers, texts, lists"
        ) from problem
    return state
