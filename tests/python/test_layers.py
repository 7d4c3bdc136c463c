"""Who may import whom: read from the sources, so that a shortcut between layers is seen when it
is written.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

import odyssey
from odyssey.base import registry
from odyssey.compile import library as build
from odyssey.core import ONNX, functional, native  # noqa: F401 - functional declares the ops

PACKAGE = Path(odyssey.__file__).parent
ROOT = build.source_root()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, *, top: bool = False) -> set[str]:
    """Full names of what a file imports, of the package's own as "odyssey.x", those given to
    import_module() as text too; `top`: when it is itself imported.
    """
    here = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    ["odyssey", *here[: len(here) - node.level], *filter(None, [node.module])]
                )
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = node.args[0]
            # of f"..." what stands first
            known = text.values[0] if isinstance(text, ast.JoinedStr) else text
            if isinstance(known, ast.Constant) and isinstance(known.value, str):
                level = len(known.value) - len(known.value.lstrip("."))
                base = [
                    *(["odyssey", *here[: len(here) - level]] if level else []),
                    known.value.lstrip("."),
                ]
                found.add(".".join(filter(None, base)).rstrip("."))
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not top or not (later or typing):
                visit(child)

    visit(parse(path))
    return found


def pairs(path: Path) -> set[tuple[str, str]]:
    """(module, name) of each `from module import name` of a file."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            base = ["odyssey", *here[: len(here) - node.level]] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found.update((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(
                (alias.name, "") for alias in node.names if alias.name.startswith("odyssey.")
            )
    return found


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def importers(name: str) -> set[str]:
    return {
        file
        for file, path in FILES.items()
        if any(m == name or m.startswith(f"{name}.") for m in imported(path))
    }


def test_the_sources_are_found():
    assert {"core/tensor.py", "nn/layers.py", "parallel/plan.py", "data/loader.py"} <= set(FILES)
    assert "odyssey.core.program.current" in imported(FILES["core/functional.py"])
    assert "mpi4py.MPI" in imported(FILES["comm/mpi.py"])


@pytest.mark.parametrize(
    ("library", "files"),
    [
        ("mpi4py", {"comm/mpi.py"}),
        (
            "ctypes",
            {
                "compile/compiler.py",
                "core/native.py",
                "core/gpu_native.py",
                "engine/gpu/graph.py",
                "core/cuda.py",
                "compile/gpus.py",
                "comm/nccl.py",
                "comm/peer.py",
                "base/files.py",
                "base/die_with_parent.py",
                "base/exits.py",
            },
        ),
        ("safetensors", {"base/outputs.py"}),
        ("rich", {"train/progress.py", "view/commands/top.py"}),
        ("pickle", {"torch/objects.py"}),
        ("ray", {"torch/ray.py"}),
        ("torch", set()),
    ],
)
def test_one_file_knows_each_library(library, files):
    assert {
        file
        for file in importers(library)
        if not (library == "torch" and file.startswith("torch/"))
    } == files


def test_only_commands_know_the_command_line():
    commands = {home.replace(".", "/") for home in registry.provided("commands").values()}
    assert all(f.startswith("cli/") or f"odyssey/{f[:-3]}" in commands for f in importers("click"))


def test_nothing_is_pickled():
    for file, path in FILES.items():
        names = {n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)}
        # where the caller wrote allow_pickle=True
        if file not in ("torch/objects.py", "torch/horovod.py"):
            assert not names & {"pickle", "marshal", "dill", "allow_pickle"}, file
        if file == "comm/mpi.py":  # mpi4py's methods in small letters pickle their arguments
            calls = [n for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)]
            comms = re.compile(
                r"(data|comm\._data|self\._(data|head|alarm)|MPI\.(COMM_WORLD|Comm))$"
            )
            methods = [n.attr for n in calls if comms.match(ast.unparse(n.value))]
            assert "Iallreduce" in methods and "Isend" in methods
            assert all(name[0].isupper() for name in methods), methods


#: The rooms of the core, lowest first: a room imports those before it, never one after it, not even
#: in a function.
ROOMS = (
    "base",
    "compile",
    "settings",
    "core",
    "capture",
    "comm",
    "optim",
    "nn",
    "data",
    "metrics",
    "parallel",
    "engine",
    "checkpoints",
    "callbacks",
    "audit",
    "train",
    "inexact",
    "watch",
    "launch",
    "distributed",
    "cli",
)
#: Other names that users import modules by, with the modules: `odyssey.functional` is
#: `odyssey.core.functional`.
ALIASES = {
    "build": "compile",
    "functional": "core.functional",
    "loggers": "callbacks.loggers",
    "lr_schedules": "optim.schedules",
    "parallel.auto": "parallel.auto_placement",
    "parallel.tensor": "parallel.tensor_parallel",
    "placement": "core.placement",
    "ray": "torch.ray",
    "steplog": "audit.steplog",
    "tensor": "core.tensor",
    "trainer": "train.trainer",
    "verify": "audit.verify",
}
#: Modules of one file, or of public names alone, by the room that they belong to.
MODULES = {
    "errors": "base",
    "testing": "cli",
    **{alias: home.partition(".")[0] for alias, home in ALIASES.items()},
}
#: Folders that can be deleted: they import the core's public names alone, and the core finds them
#: by base/registry.py.
SATELLITES = {name: name for name in ("torch", "mojo", "view", "tune", "jobs", "onnx")}
SATELLITES["torch"] += " horovod"  # which is an alias
FOLDERS = {name: satellite for satellite, names in SATELLITES.items() for name in names.split()}


def room_of(file: str) -> str:
    """The room of a file of the package, or its satellite; "": the package's own two files."""
    name = file.partition("/")[0].removesuffix(".py")
    return "" if name in ("__init__", "__main__") else MODULES.get(name, FOLDERS.get(name, name))


def test_every_file_has_a_room():
    assert {room_of(file) for file in FILES} == {"", *ROOMS, *SATELLITES}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_lower_ones_only(room):
    higher = {*ROOMS[ROOMS.index(room) + 1 :], *SATELLITES}
    for file, path in FILES.items():
        if room_of(file) == room and not file.endswith("__main__.py"):
            rooms = {
                m: room_of(m.split(".")[1]) for m in imported(path) if m.startswith("odyssey.")
            }
            above = {module for module, other in rooms.items() if other in higher}
            assert not above, f"{file} imports {above}"


@pytest.mark.parametrize("satellite", SATELLITES)
def test_a_satellite_imports_public_names_of_the_core(satellite):
    for file, path in FILES.items():
        if room_of(file) != satellite:
            continue
        folders = [f"odyssey.{name}" for name in SATELLITES[satellite].split()]
        for module, name in pairs(path):
            if not module.startswith("odyssey") or any(
                module == f or module.startswith(f"{f}.") for f in folders
            ):
                continue
            public = getattr(importlib.import_module(module), "__all__", None)
            one_file = module.split(".")[1:] in (
                ["errors"],
                ["cli", "commands"],
            )
            allowed = (
                not name.startswith("_")
                if one_file or module == "odyssey"
                else name in (public or ())
            )
            assert allowed, f"{file}: {name} is not a public name of {module}"


def test_what_is_provided_is_there():
    for path in PACKAGE.glob("*/provides.json"):
        for kind, names in json.loads(path.read_text()).items():
            assert f"| {kind}" in registry.__doc__ or f", {kind} |" in registry.__doc__, (
                f"{path}: {kind}"
            )
            for home in names.values():
                module, _, name = home.partition(":")
                at = path.parent.joinpath(*filter(None, module.split(".")))
                source = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
                assert source.is_file(), f"{path}: {home}"
                assert not name or re.search(
                    rf"^(class |def )?{name}\b", source.read_text(), re.M
                ), f"{path}: {home}"


def test_plans_and_the_rows_of_ops_know_no_processes():
    for file in (
        "parallel/plan.py",
        "parallel/schedule.py",
        "parallel/auto_placement.py",
        "comm/base.py",
        "comm/mpi.py",
    ):
        names = imported(FILES[file])
        assert not any(
            re.match(r"odyssey\.core\.(native|program|tensor)(\.|$)", m) for m in names
        ), file


@pytest.mark.parametrize("plan", ["plan", "schedule", "auto_placement"])
def test_a_plan_is_plain_python(plan):
    assert not any(
        m.split(".")[0] in ("numpy", "mpi4py", "ctypes")
        for m in imported(FILES[f"parallel/{plan}.py"])
    )


def test_the_files_can_be_read_in_an_order():
    """What a file needs to be imported was read before it: no cycles."""
    names = {
        file: "odyssey." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for file in FILES
    }
    names["__init__.py"] = "odyssey"
    needs = {
        names[f]: (imported(p, top=True) & set(names.values())) - {names[f], "odyssey"}
        for f, p in FILES.items()
    }
    done: list[str] = []

    def read(name: str, below: tuple[str, ...]) -> None:
        assert name not in below, " -> ".join((*below, name))
        if name not in done:
            for other in sorted(needs[name]):
                # a package is read when its parts are: parts may import each other
                if not (other.startswith(f"{name}.") or name.startswith(f"{other}.")):
                    read(other, (*below, name))
            done.append(name)

    for name in needs:
        read(name, ())
    assert (
        done.index("odyssey.core.native")
        < done.index("odyssey.core.program")
        < done.index("odyssey.core.tensor")
    )
    assert done.index("odyssey.core.tensor") < done.index("odyssey.nn.layers")
    assert done.index("odyssey.nn") < done.index("odyssey.train.trainer")


def test_mojo_kernels_know_nothing_above_them():
    kernels = sorted((ROOT / "mojo" / "kernels").glob("*.mojo"))
    assert len(kernels) > 5
    for path in kernels:
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            assert module.split(".")[0] in ("std", ""), f"{path.name} imports {module}"
    for path in sorted((ROOT / "mojo" / "runtime").glob("*.mojo")):
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            assert module.split(".")[0] in ("std", "max", "kernels", ""), (
                f"{path.name} imports {module}"
            )
            assert module != "std.python", path.name
    for path in (ROOT / "shared" / "training").glob("*.mojo"):
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            assert re.match(r"std\b|\.\w|shared\.training", module), f"{path.name} imports {module}"


HEAVY = ("mpi4py", "rich", "click", "max", "mojo", "safetensors", "torch")
#: What a training of one process with one bucket has no use for: imported where it is used, so that
#: a start is short.
LAZY = tuple(
    "numpy.ma multiprocessing concurrent.futures odyssey.audit.verify odyssey.audit.replay "
    "odyssey.comm.mock odyssey.audit.steplog odyssey.checkpoints.store "
    "odyssey.checkpoints.manifest odyssey.train.stop_requests odyssey.engine.bucketed "
    "odyssey.engine.pipeline odyssey.engine.gpu odyssey.inexact.compression "
    "odyssey.parallel.tensor_exchange odyssey.parallel.hierarchical "
    "odyssey.parallel.tensor_collectives odyssey.parallel.ring odyssey.parallel.schedule "
    "odyssey.parallel.shared_memory_tree odyssey.parallel.stages odyssey.parallel.tensor_parallel "
    "odyssey.inexact.asynchronous odyssey.watch.diagnosis odyssey.watch.rank_process "
    "odyssey.launch".split()
)


def loaded(launch, code: str) -> str:
    done = launch.python(
        "-c", f"{code}\nimport sys\nprint([m for m in {HEAVY + LAZY} if m in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_cheap(launch):
    assert loaded(launch, "import odyssey") == "[]"
    assert (
        loaded(
            launch,
            "import odyssey, sys; assert 'numpy' not in sys.modules; odyssey.nn, odyssey.trainer",
        )
        == "[]"
    )


def test_a_training_of_one_process_needs_no_mpi(launch):
    code = """
import numpy as np, odyssey
from odyssey import data, nn, optim
model = nn.MLP()
trainer = odyssey.DistributedTrainer(model, optim.SGD(), num_gpus=2, device="cpu", backend="auto")
x, y = np.zeros((64, 1, 28, 28), np.uint8), np.zeros(64, int)
trainer.fit([(x, y)])
"""
    assert loaded(launch, code) == "[]"


SAME_MODULE = """
import sys
alias, home = sys.argv[1:]
package, _, name = f"odyssey.{alias}".rpartition(".")
exec(f"import odyssey.{alias} as a; from {package} import {name} as b; import odyssey.{home} as c")
assert a is b is c and c.__name__ == c.__spec__.name == f"odyssey.{home}", (a, b, c)
"""


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_module_itself(launch, alias):
    if alias == "ray":
        pytest.importorskip("ray")
    done = launch.python("-c", SAME_MODULE, alias, ALIASES[alias])
    assert done.returncode == 0, done.stderr


THREADS = """
import sys, threading
barrier = threading.Barrier(8)
imported = []
def work():
    barrier.wait()
    from odyssey.functional import relu
    imported.append(relu)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(imported) == 8 and len(set(imported)) == 1, imported
"""


def test_threads_can_import_an_alias_at_the_same_time(launch):
    for _ in range(3):
        done = launch.python("-c", THREADS)
        assert done.returncode == 0, done.stderr


def test_importing_the_package_changes_no_imports_of_others(launch):
    code = (
        "import sys; finders = list(sys.meta_path); import odyssey; assert sys.meta_path == "
        "finders, sys.meta_path"
    )
    done = launch.python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there(launch):
    code = (
        "import odyssey\nfor name in odyssey.__all__: assert getattr(odyssey, name) is not "
        "None, name"
    )
    assert launch.python("-c", code).returncode == 0
    assert set(odyssey.__all__) <= set(dir(odyssey))
    with pytest.raises(AttributeError, match="no attribute 'zork'"):
        _ = odyssey.zork


def test_ops_are_named_where_they_are_declared():
    """What others must know of an op stands in its kernel file, or beside its function (ONNX)."""
    ops = native.library().ops
    passes = {name for name in ops if name.endswith(("_forward", "_backward"))}
    assert len(passes) > 20
    for file, path in FILES.items():
        words = {
            n.value
            for n in ast.walk(parse(path))
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        named = words & (set(ops) if file == "onnx/graph.py" else passes)
        assert not named or file.startswith("core/") and file != "core/program.py", (
            f"{file}: {named}"
        )
    assert set(ONNX) <= set(ops)
