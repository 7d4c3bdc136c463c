"""Capture: the one place that decides what a training run depends on.

values.py says what a checkpoint can hold, edges.py what an object holds, resources.py what is never
looked into, walk.py how everything is met, sharing.py and containers.py what is held at several
places, capture.py what is kept, compared and put back, and undo.py how code is run on trial.
docs/state.md explains it to users.
"""

from .capture import COMPARED_ROOTS, Capture, last_name
from .edges import (
    Edge,
    Place,
    edges_of_host,
    edges_of_object,
    is_own_class,
    is_own_file,
    names_in,
    register_contents,
    register_edges,
    register_value_host,
    register_walkable,
)
from .resources import is_resource
from .sharing import ARRAYS, Memory, register_memory
from .undo import Change, Undo
from .values import (
    Kind,
    NotAValue,
    decode,
    encode,
    is_value,
    mark,
    put_into,
    register,
    register_remark,
    register_tracked,
)
from .walk import LOADER_ROOTS, REFERENCE, Picture, walk

__all__ = [
    "ARRAYS",
    "COMPARED_ROOTS",
    "Capture",
    "Change",
    "Edge",
    "Kind",
    "LOADER_ROOTS",
    "Memory",
    "NotAValue",
    "Picture",
    "Place",
    "REFERENCE",
    "Undo",
    "decode",
    "edges_of_host",
    "edges_of_object",
    "encode",
    "is_own_class",
    "is_own_file",
    "is_resource",
    "is_value",
    "last_name",
    "mark",
    "names_in",
    "put_into",
    "register",
    "register_contents",
    "register_edges",
    "register_memory",
    "register_remark",
    "register_tracked",
    "register_value_host",
    "register_walkable",
    "walk",
]
