"""Programs, and commands that are not blocks of a page (those: test_pages.py).

Every script and benchmark starts; every option that a page or a program's own lines give is there;
every pytest command selects something.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("scripts", "benchmarks", "benchmarks/faults")
    for path in (ROOT / folder).iterdir()
    if path.is_file()
    and path.name != "calls_odyssey.py"
    and re.search(r"\A#!|^if __name__ ==", path.read_text(), re.M)
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
#: Names in CONTRIBUTING.md that stand for what a reader adds: what is there in their place.
EXAMPLES = {
    "softsign": "tanh",
    "beacon": "mock",
    "FILE": "tests/parallel/test_heads.py",
    "tests/hello": "tests/cli",
}


def said(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )


@functools.cache
def help_of(program: str) -> subprocess.CompletedProcess[str]:
    """What a program says to --help; the test is skipped where a package of its is not there."""
    done = said(
        *([sys.executable] if program.endswith(".py") else []), str(ROOT / program), "--help"
    )
    if missing := re.search(
        r"^ModuleNotFoundError: No module named '(?!odyssey)(\w+)'$", done.stderr, re.M
    ):
        pytest.skip(f"could not import {missing[1]!r}")
    return done


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_what_it_is(program):
    done = help_of(program)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10 and "Traceback" not in done.stderr


#: Programs in benchmarks/ that draw what others have measured, or that others start.
UNMEASURED = ("benchmarks/picture.py", "benchmarks/faults/calls.py")
BENCHMARKS = [
    program
    for program in PROGRAMS
    if program.startswith("benchmarks/") and program not in UNMEASURED
]


@pytest.mark.parametrize("program", BENCHMARKS)
def test_a_benchmark_prints_its_machine_once(program):
    """Times mean little without the processor, its hardware threads and its peak."""
    assert (ROOT / program).read_text().count("common.print_machine(") == 1


def test_the_machine_is_printed_with_hardware_threads_and_peaks():
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import common; common.print_machine(gpu='X')"
    )
    done = said(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    processor, peaks, versions = done.stdout.splitlines()
    assert re.search(r" cores?, (\d+|unknown) threads? per core, ", processor)
    pattern = r"fp32 ([\d,]+) on one core, ([\d,]+) on \d+ at once"
    assert all(int(number) > 0 for number in re.search(pattern, peaks).groups())
    assert versions.startswith("odyssey ") and versions.endswith("; gpu X")


def test_other_ranks_print_no_machine():
    code = "import sys; sys.path.insert(0, 'benchmarks'); import common; common.print_machine()"
    done = said("env", "PMI_RANK=1", "PMI_SIZE=2", sys.executable, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def commands() -> set[str]:
    """Commands in backticks of pages, and in backticks or indented lines at the beginning of
    programs.
    """
    found = set()
    for page in PAGES:
        if page.name not in ("log.md", "CHANGELOG.md"):  # which say what was done once
            text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
            found.update(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    for program in PROGRAMS:
        begin = (ROOT / program).read_text()[:3000]
        found.update(
            re.findall(r"^(?:# )?    (\S.*)$", begin, re.M) + re.findall(r"`([^`\n]+)`", begin)
        )
    return found


@pytest.mark.parametrize(
    "command", sorted(c for c in commands() if re.match(r"(\w+=\S+ )*pytest\b(?! \d)", c))
)
def test_a_pytest_command_selects_something(command):
    words = [EXAMPLES.get(word, word) for word in shlex.split(command) if "=" not in word][1:]
    done = said(
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *words,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert re.search(r"[1-9]\d* tests", done.stdout), command


OWN = re.compile(
    rf"(?:mpirun -n \d+ )?(?:python )?({'|'.join(map(re.escape, PROGRAMS))})(?: (.*))?$"
)


@pytest.mark.parametrize("command", sorted(c for c in commands() if (m := OWN.match(c)) and m[2]))
def test_the_options_of_a_command_are_there(command):
    program, arguments = OWN.match(command).groups()
    own = arguments.split(" --program ")[0]  # what stands behind it is the program's
    for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", own):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(program).stdout), (
            f"{program} has no {option}"
        )


def test_commands_were_found():
    """So that a change of form on the pages does not empty the lists above."""
    assert len(PROGRAMS) > 35
    assert sum(c.startswith("pytest") for c in commands()) > 8
    assert sum(bool((m := OWN.match(c)) and m[2]) for c in commands()) > 15


def test_files_of_tests_that_programs_name_are_there():
    for program in (
        *PROGRAMS,
        ".ci/run",
        "pixi.toml",
        "pyproject.toml",
        "tests/conftest.py",
        "CONTRIBUTING.md",
    ):
        for path in re.findall(r"(?<![\w/.-])tests/[\w/.-]*\w", (ROOT / program).read_text()):
            assert (ROOT / EXAMPLES.get(path, path)).exists(), f"{program}: {path}"


@pytest.mark.parametrize(
    "program",
    [("benchmarks/watch.py", "--rounds", "1", "--steps", "2")],
    ids=lambda words: words[0],
)
def test_a_benchmark_of_the_inside_runs(program):
    """Those that reach into classes, which types and layers do not guard."""
    done = said(sys.executable, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it, in a run" in done.stdout
