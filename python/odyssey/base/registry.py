"""Registry of what folders of the package add to it: each says so in a file `provides.json`.

So what lies below finds what lies above without an import: a folder that is not there adds nothing.
The file is an object of kinds, each of names, each with "module:object" of that folder; ":object"
of its __init__.py, and "module" or "" for a module itself. CONTRIBUTING.md shows how to add a
folder.

| kind | name | object |
|---|---|---|
| names, modules | of `odyssey` | what `odyssey.NAME` is; a module, which needs a file or folder `NAME` to be imported |
| commands | of `odyssey --help` | a module with the click command `command` |
| backends | of `comm.world` | a module with `connect() -> Communicator`; the first is the one of RANK and MASTER_ADDR |
| compressions | of the setting | a Reduction |
| modes | of the setting `reduction` | a module with mode(trainer, strategy) and alone(layout, comm): ranks step apart |
| joining | a variable of the environment | a function that gives a Callback for each trainer, where it is set |
| listeners | free | a Callback, made with (run, number of the fit()), for each run that has a directory |
| recordings | free | a Callback, made with (file, run, table), for fit(trace=, profile=) |
| trainers | `backend` of DistributedConfig | makes a trainer of a torch module: (model, optimizer, **settings) |
| weights | a framework | a module with to_torch(arrays, model), which puts weights into a model of it |
| tensors | a framework | turns an array into a tensor of it, for its metrics |
| captured | a package of Python | a module that registers how the walk (capture/) looks into objects of that package |
| formats | of `odyssey export --format` | (model or None, arrays by name, shape of a sample or None) -> bytes |
"""  # noqa: E501 - a table

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
FILE = "provides.json"


@functools.cache
def _everything() -> dict[str, dict[str, str]]:
    kinds: dict[str, dict[str, str]] = {}
    for path in sorted(PACKAGE.glob(f"*/{FILE}")):
        for kind, names in json.loads(path.read_text()).items():
            folder = f"odyssey.{path.parent.name}"
            homes = {name: folder + "." * home[:1].isalpha() + home for name, home in names.items()}
            kinds.setdefault(kind, {}).update(homes)
    return kinds


def provided(kind: str) -> dict[str, str]:
    """The names of a kind with where their objects are, as "odyssey.folder.module:object"."""
    return _everything().get(kind, {})


def load(kind: str, name: str) -> Any:
    """The object of a name; its module is imported. Raises KeyError: nothing provides it."""
    module, _, attribute = provided(kind)[name].partition(":")
    loaded_module = importlib.import_module(module)
    return getattr(loaded_module, attribute) if attribute else loaded_module
