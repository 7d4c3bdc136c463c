"""Finds what lets a file or a text run code: pickle and its kin, eval, shells, and mpi4py's
methods that unpickle.

Works on the syntax tree, so that comments and texts do not count. What it is not: complete;
`getattr` with a made-up name gets past it. It keeps honest people from a mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {  # whatever they are given
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "tempfile.mktemp",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.fromregex",
    "pandas.read_pickle",
    "runpy.run_path",
}
ONLY_WITH = {"numpy.load": ("allow_pickle", False)}  # must be given so
NEVER_TRUE = {"shell", "allow_pickle"}  # keywords of any call
# methods of mpi4py's communicators that pickle what they are given, and unpickle what a peer sends
OBJECTS = set(
    "send recv bsend ssend isend ibsend issend irecv mrecv imrecv sendrecv bcast gather scatter "
    "allgather alltoall reduce allreduce scan exscan".split()
)


def findings(text: str, communicators: Collection[str] = ()) -> list[str]:
    """What is wrong with a Python file, as "line 3: what".

    communicators: names that hold a communicator of mpi4py, besides those that are given one in the
    file itself.
    """
    tree = ast.parse(text)
    names = _imported(tree)
    found = list(_imports(tree)) + list(_calls(tree, names))
    if communicators or any(name.split(".")[0] == "mpi4py" for name in names.values()):
        found += list(_objects(tree, {"COMM_WORLD", "COMM_SELF", *communicators}))
    return [f"line {line}: {what}" for line, what in sorted(found)]


def _imported(tree: ast.AST) -> dict[str, str]:
    """Name in the file -> what it is the name of."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                names[one.asname or one.name.split(".")[0]] = (
                    one.name if one.asname else one.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                names[one.asname or one.name] = f"{node.module}.{one.name}"
    return names


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        named = []
        if isinstance(node, ast.Import):
            named = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [node.module]
        elif isinstance(node, ast.Call) and _dotted(node.func) in (
            "importlib.import_module",
            "import_module",
        ):
            named = [
                a.value
                for a in node.args[:1]
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
        for name in named:
            if name.split(".")[0] in MODULES:
                yield node.lineno, f"import of {name}"


def _calls(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = _dotted(node.func).partition(".")
        called = names.get(first, first) + (f".{rest}" if rest else "")
        if called in BUILTINS or called.removeprefix("builtins.") in BUILTINS:
            yield node.lineno, f"call of {called}"
        if called in CALLS:
            yield node.lineno, f"call of {called}"
        for keyword in node.keywords:
            if keyword.arg in NEVER_TRUE and not _is(keyword.value, False):
                yield node.lineno, f"{keyword.arg} of {called or 'a call'} is not False"
        if called in ONLY_WITH:
            name, value = ONLY_WITH[called]
            if not any(
                keyword.arg == name and _is(keyword.value, value) for keyword in node.keywords
            ):
                yield node.lineno, f"{called} without {name}={value}"


def _objects(tree: ast.AST, made: set[str]) -> Iterator[tuple[int, str]]:
    """Methods in small letters of communicators of mpi4py: those named so, and what comes from
    one.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and node.value is not None
            and _from_mpi(node.value, made)
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                made.add(_dotted(target).rpartition(".")[2])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            owner = _dotted(node.value).rpartition(".")[2]
            if owner in made:
                yield node.lineno, f"{owner}.{node.attr} pickles; use {node.attr.capitalize()}"


def _from_mpi(value: ast.expr, made: set[str]) -> bool:
    """Whether it is MPI.COMM_WORLD, or a Dup or Split of a communicator."""
    while isinstance(value, ast.Call):
        if not isinstance(value.func, ast.Attribute) or not value.func.attr.startswith(
            ("Dup", "Split", "Create", "Merge")
        ):
            return False
        value = value.func.value
    return _dotted(value).rpartition(".")[2] in made


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value) or '?'}.{node.attr}"
    return ""


def _is(node: ast.expr, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
