"""Who may import whom: read from the sources, so that a shortcut between layers is seen when it is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import odyssey
from odyssey import build

PACKAGE = Path(odyssey.__file__).parent
ROOT = build.source_root()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, *, top: bool = False) -> set[str]:
    """Full names of what a file imports, of the package's own as "odyssey.x"; `top`: when it is itself imported."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["odyssey", *here[: len(here) - node.level], *filter(None, [node.module])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not top or not (later or typing):
                visit(child)

    visit(parse(path))
    return found


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def importers(name: str) -> set[str]:
    return {file for file, path in FILES.items() if any(m == name or m.startswith(f"{name}.") for m in imported(path))}


def test_the_sources_are_found():
    assert {"tensor.py", "nn/layers.py", "parallel/plan.py", "data/loader.py"} <= set(FILES)
    assert "odyssey.program.current" in imported(FILES["functional.py"])
    assert "mpi4py.MPI" in imported(FILES["comm/mpi.py"])


@pytest.mark.parametrize(
    ("library", "files"),
    [
        ("mpi4py", {"comm/mpi.py"}),
        (
            "ctypes",
            {
                "native.py",
                "gpu/native.py",
                "gpu/graph.py",
                "gpus.py",
                "comm/nccl.py",
                "files.py",
                "launch/die_with_parent.py",
                "process/entry.py",
            },
        ),
        ("safetensors", {"outputs.py"}),
        ("rich", {"progress.py", "commands/top.py"}),
        ("pickle", set()),
        ("torch", {"comm/gloo.py"}),
    ],
)
def test_one_file_knows_each_library(library, files):
    assert importers(library) == files


def test_only_commands_know_the_command_line():
    assert all(f in ("cli.py", "configfile.py") or f.startswith("commands/") for f in importers("click"))


def test_nothing_is_pickled():
    for file, path in FILES.items():
        names = {n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)}
        assert not names & {"pickle", "marshal", "dill", "allow_pickle"}, file
        if file == "comm/mpi.py":  # mpi4py's methods in small letters pickle their arguments
            calls = [n for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)]
            comms = re.compile(r"(data|comm\._data|self\._(data|head|alarm)|MPI\.(COMM_WORLD|Comm))$")
            methods = [n.attr for n in calls if comms.match(ast.unparse(n.value))]
            assert "Iallreduce" in methods and "Isend" in methods
            assert all(name[0].isupper() for name in methods), methods


@pytest.mark.parametrize(
    ("folder", "may_not"),
    [
        ("nn/", ["comm", "trainer", "engine", "parallel", "optim", "arena", "cli"]),
        ("data/", ["trainer", "engine", "parallel", "nn", "optim", "native", "tensor"]),
        ("tensor.py", ["comm", "trainer", "engine", "parallel", "nn", "optim"]),
        ("functional.py", ["comm", "trainer", "engine", "parallel", "nn", "optim"]),
        ("program.py", ["comm", "trainer", "engine", "parallel", "nn", "optim", "functional"]),
        ("native.py", ["comm", "trainer", "engine", "parallel", "nn", "optim", "functional", "program", "tensor"]),
        ("placement.py", ["comm", "trainer", "engine", "parallel", "nn", "optim", "native", "tensor", "program"]),
        ("parallel/plan.py", ["comm", "native", "program", "tensor", "engine", "trainer"]),
        ("parallel/schedule.py", ["comm", "native", "program", "tensor", "engine", "trainer", "nn"]),
        ("parallel/auto.py", ["comm", "native", "program", "tensor", "engine", "trainer", "nn"]),
        ("comm/", ["trainer", "engine", "parallel", "nn", "optim", "tensor", "gpu", "watch", "preflight"]),
        ("process/", ["comm", "native", "build", "watch", "preflight", "trainer", "session"]),
        ("comm/base.py", ["native"]),
        ("comm/mpi.py", ["native"]),
        ("optim.py", ["comm", "trainer", "engine", "parallel", "nn"]),
        ("errors.py", ["comm", "trainer", "engine", "parallel", "nn", "optim", "native", "tensor", "program"]),
    ],
)
def test_a_lower_layer_does_not_know_a_higher_one(folder, may_not):
    files = [path for file, path in FILES.items() if file.startswith(folder)]
    assert files
    for path in files:
        for module in may_not:
            names = {m for m in imported(path) if m == f"odyssey.{module}" or m.startswith(f"odyssey.{module}.")}
            assert not names, f"{path.name} imports {names}"


@pytest.mark.parametrize("plan", ["plan", "schedule", "auto"])
def test_a_plan_is_plain_python(plan):
    assert not any(m.split(".")[0] in ("numpy", "mpi4py", "ctypes") for m in imported(FILES[f"parallel/{plan}.py"]))


def test_the_files_can_be_read_in_an_order():
    """What a file needs to be imported was read before it: no cycles."""
    names = {file: "odyssey." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in FILES}
    names["__init__.py"] = "odyssey"
    needs = {names[f]: (imported(p, top=True) & set(names.values())) - {names[f], "odyssey"} for f, p in FILES.items()}
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
    assert done.index("odyssey.native") < done.index("odyssey.program") < done.index("odyssey.tensor")
    assert done.index("odyssey.tensor") < done.index("odyssey.nn.layers")
    assert done.index("odyssey.nn") < done.index("odyssey.trainer")


def test_mojo_kernels_know_nothing_above_them():
    kernels = sorted((ROOT / "mojo" / "kernels").glob("*.mojo"))
    assert len(kernels) > 5
    for path in kernels:
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            assert module.split(".")[0] in ("std", ""), f"{path.name} imports {module}"
    for path in sorted((ROOT / "shared" / "training").glob("*.mojo")):
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            own = module.startswith("shared.training")  # in the examples of docstrings
            assert own or module.split(".")[0] in ("std", "max", "kernels", ""), f"{path.name} imports {module}"
            assert module != "std.python", path.name
            assert not module.startswith(".face") or path.stem in ("__init__", "mnist"), path.name
    for path in (ROOT / "shared" / "training" / "face").glob("*.mojo"):
        for module in re.findall(r"^\s*(?:from|import)\s+([\w.]+)", path.read_text(), re.M):
            assert re.match(r"std\b|\.\w|shared\.training", module), f"{path.name} imports {module}"


HEAVY = ("mpi4py", "rich", "click", "max", "mojo", "safetensors", "torch")


def loaded(launch, code: str) -> str:
    done = launch.python("-c", f"{code}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_cheap(launch):
    assert loaded(launch, "import odyssey") == "[]"
    assert loaded(launch, "import odyssey, sys; assert 'numpy' not in sys.modules; odyssey.nn, odyssey.trainer") == "[]"


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


def test_every_public_name_is_there(launch):
    code = "import odyssey\nfor name in odyssey.__all__: assert getattr(odyssey, name) is not None, name"
    assert launch.python("-c", code).returncode == 0
    assert set(odyssey.__all__) <= set(dir(odyssey))
    with pytest.raises(AttributeError, match="no attribute 'zork'"):
        _ = odyssey.zork
