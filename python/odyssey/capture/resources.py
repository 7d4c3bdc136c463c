"""Resources: objects that belong to the process, and are never looked into.

A file that is open, a lock, a worker process or a logger can't be kept in a checkpoint, and another
process has its own. One table says which classes these are.
"""

from __future__ import annotations

import functools
import io
import types
import weakref
from typing import Any

from .edges import is_own_file, is_own_module, is_walkable

# The packages whose objects are resources, or are kept by odyssey elsewhere.
PACKAGES = frozenset(
    """
    _io _thread threading multiprocessing concurrent queue _queue asyncio subprocess socket ssl
    select selectors logging tempfile mmap ctypes _ctypes sqlite3 tarfile zipfile gzip bz2 lzma
    contextvars weakref traceback inspect ast code signal shelve dbm
    h5py lmdb PIL zarr netCDF4 pyarrow fsspec s3fs boto3 botocore requests urllib urllib3 http
    redis pymongo grpc
    mpi4py tqdm rich matplotlib plotly wandb mlflow tensorboard tensorboardX neptune
    comet_ml clearml ray optuna IPython ipykernel click argparse pytest _pytest
    """.split()
)
# Other classes, by module and name; subclasses are resources too.
CLASSES = frozenset(
    {
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "torch.utils.hooks.RemovableHandle",
        "torch.utils.tensorboard.writer.SummaryWriter",
        "torch.profiler.profiler.profile",
        "torch.distributed.distributed_c10d.ProcessGroup",
        "torch.jit._script.ScriptFunction",
        # they hold ids of objects, which are other ones in each process
        "keras.src.utils.tracking.Tracker",
        "keras.src.utils.tracking.TrackedSet",
    }
)
# Objects that hold data of the program. A checkpoint doesn't have them, and the user is told.
HOLDERS = frozenset(
    {
        "queue.Queue",
        "_queue.SimpleQueue",
        "_io.BytesIO",
        "_io.StringIO",
        "_thread._local",
        "threading.Event",
        "threading.Semaphore",
        "multiprocessing.sharedctypes.SynchronizedBase",
        "_ctypes.Array",
        "_ctypes.Structure",
        "_ctypes._SimpleCData",
        "optuna.study.study.Study",
        "weakref.WeakKeyDictionary",
        "weakref.WeakValueDictionary",
        "_weakrefset.WeakSet",
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "odyssey.train.trainer_base.Trainer",
    }
)
# Classes of these packages that are values or hold state all the same.
EXCEPTIONS = frozenset({"argparse.Namespace"})
_TYPES = (
    io.IOBase,
    types.FrameType,
    types.TracebackType,
    types.CodeType,
    types.ModuleType,
    types.MappingProxyType,  # the dict behind it counts
    types.CoroutineType,
    types.AsyncGeneratorType,
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    BaseException,
)


def is_resource(value: Any) -> bool:
    """Tells whether an object is never looked into. Functions of odyssey are resources too: it
    puts some into modules as hooks, on some layouts. Those that compute with tensors are not.
    Modules of the user's own hold numbers, so they are not resources either.
    """
    if isinstance(value, types.ModuleType):
        return not is_own_module(value)
    if isinstance(value, types.FunctionType):
        module = value.__module__ or ""
        return module.startswith("odyssey.") and not module.startswith("odyssey.core.")
    return not isinstance(value, type) and is_resource_class(type(value))


def is_holder(value: Any) -> bool:
    """Tells whether a resource or trainer holds data of the program that are nowhere else."""
    kind = type(value)
    if _is_a(kind, "sqlite3.Connection"):
        return _is_in_memory(value)
    if _is_a(kind, "mmap.mmap"):
        try:
            value.size()  # of its file
        except (OSError, ValueError):
            return not value.closed
        return False
    if _is_a(kind, "functools._lru_cache_wrapper"):
        code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
        return code is not None and is_own_file(code.co_filename)
    return _is_holder_class(kind)


@functools.cache
def _is_a(kind: type, name: str) -> bool:
    """Tells whether a class is or inherits from one of a qualified name, without its package."""
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in kind.__mro__)


def _is_in_memory(database: Any) -> bool:
    """Tells whether a database has no file. False for one that is closed, or of another thread."""
    try:
        return not any(file for _, _, file in database.execute("PRAGMA database_list"))
    except Exception:
        return False


@functools.cache
def _is_holder_class(kind: type) -> bool:
    """Tells whether resources of a class hold data of the program."""
    return any(f"{base.__module__}.{base.__qualname__}" in HOLDERS for base in kind.__mro__)


@functools.cache
def is_resource_class(kind: type) -> bool:
    """Tells whether objects of a class are never looked into."""
    if issubclass(kind, _TYPES):
        return True
    if kind in (types.FunctionType, types.MethodType, types.BuiltinFunctionType):
        return False
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        package = base.__module__.partition(".")[0]
        if name in EXCEPTIONS:
            return False
        if package in PACKAGES or name in CLASSES:
            return True
    is_ours = kind.__module__.partition(".")[0] == "odyssey"
    return is_ours and not is_walkable(kind)
