"""Advice to install something works: no text sends a reader to the package index for odyssey.

The index's `odyssey` is another project, and `ml-odyssey` is not there until somebody uploads it.
Then `NOT_ON_THE_INDEX` is another project's `odyssey` alone.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from odyssey.base import requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_ON_THE_INDEX = {"odyssey", requirements.DISTRIBUTION}
#: History: these say what was true when they were written.
HISTORY = {"docs/log.md", "CHANGELOG.md"}
#: Other projects' files, results, and build outputs.
SKIPPED = ("tests/third_party/", "benchmarks/results/", "site/", "dist/", "build/")
SUFFIXES = {
    "", ".cff", ".def", ".ipynb", ".json", ".lock", ".md", ".mojo", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip

INSTALLER = re.compile(
    r"\b(?:pip[\d.]*|pipx|uv|pixi|poetry|pdm|conda|mamba)\s+(?:pip\s+|tool\s+)?"
    r"(?:install|add|download|wheel)\b(?P<arguments>[^`\n;|&)]*)"
)


def files() -> Iterator[tuple[str, str]]:
    """Yields (path from the root, text) of each file that a person wrote."""
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        hidden = any(
            part.startswith(".") and part not in (".ci", ".github") for part in name.split("/")
        )
        if (
            hidden
            or "__pycache__" in name
            or name.startswith(SKIPPED)
            or path == Path(__file__).resolve()
        ):
            continue
        if path.is_file() and (path.suffix in SUFFIXES or path.name == "Dockerfile"):
            yield name, path.read_text(encoding="utf-8", errors="replace")


def project(word: str) -> str:
    """Returns the normalized name of the project that pip would ask an index for, "" if the word
    is something else.
    """
    word = word.strip("\"'\\,.:!?()]")
    form = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^]]*\]?)?([=<>!~@].*)?", word)
    if form is None or form[1].endswith((".whl", ".gz", ".zip", ".git")):
        return ""
    return re.sub(r"[-_.]+", "-", form[1]).lower()


def index_installs(text: str) -> list[str]:
    """Returns the commands of a text that install odyssey from an index."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"""["'],\s*f?["']""", " ", text)  # a list of arguments is a command, too
    commands = []
    for command in INSTALLER.finditer(text):
        if NOT_ON_THE_INDEX & set(map(project, command["arguments"].split())):
            commands.append(command[0].strip())
    return commands


@pytest.mark.parametrize(
    "text",
    [
        "pip install odyssey",
        "pip install odyssey, which does",
        'pip install "odyssey[torch]" transformers',
        "pip install 'odyssey[bench]' lightning",
        "It needs `pip install 'odyssey[torch]'`.",
        r'"pip install \"odyssey[torch]\""',
        "pip install torch odyssey==0.2.0",
        "pip install -U ml-odyssey",
        "pip install ML_Odyssey[torch]",
        "pip3 install --quiet odyssey>=0.2",
        "python -m pip install odyssey.",
        "uv pip install odyssey",
        "uv add 'ml-odyssey[torch]'",
        "pixi add --pypi odyssey",
        "pipx install odyssey",
        '[sys.executable, "-m", "pip", "install", "-q", "odyssey"]',
        "RUN pip install \\\n    torch \\\n    odyssey",
    ],
)
def test_an_install_from_an_index_is_found(text):
    assert len(index_installs(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e '.[torch]'",
        "`pip install .`, then odyssey trains",
        "pip install ml_odyssey-*.whl && odyssey train",
        "pip install './ml_odyssey-0.2.0-py3-none-manylinux_2_34_x86_64.whl[torch]'",
        "pip install --no-deps ml_odyssey-0.2.0.tar.gz",
        "pip install -r odyssey/requirements.txt",
        "pip install torch; odyssey doctor",
        "pip uninstall odyssey",
    ],
)
def test_an_install_from_a_file_is_not(text):
    assert index_installs(text) == []


def test_no_text_installs_odyssey_from_an_index():
    mistakes = [f"{name}: {command}" for name, text in files() for command in index_installs(text)]
    assert not mistakes, (
        "another project's package, or none; use -e '.[EXTRA]' or the wheel's file:\n"
        + "\n".join(mistakes)
    )


def test_no_text_writes_an_extra_as_the_index_would_have_it():
    """`install odyssey[image]` reads as an argument of pip."""
    names = "|".join(PROJECT["optional-dependencies"])
    extra = re.compile(rf"(?<![\w/.])(?:ml-)?odyssey\[(?:{names}|\{{)[^]]*\]", re.I)
    mistakes = [f"{name}: {found[0]}" for name, text in files() for found in extra.finditer(text)]
    assert not mistakes, "\n".join(mistakes)


def test_no_message_says_install_odyssey():
    """A reader makes `pip install odyssey` of it."""
    advice = re.compile(r"\b(?<!un)install odyssey\b", re.I)
    mistakes = [
        f"{name}: {found[0]}"
        for name, text in files()
        if name.startswith("python/")
        for found in advice.finditer(text)
    ]
    assert not mistakes, "use requirements.REINSTALL:\n" + "\n".join(mistakes)


def test_files_of_a_release_have_the_distribution_s_name():
    old = re.compile(r"(?<!ml_)\bodyssey-(?:[\d*{<$][^\s`'\"]*)?\.?(?:whl|tar\.gz|dist-info)\b")
    mistakes = [
        f"{name}: {found[0]}"
        for name, text in files()
        if name not in HISTORY
        for found in old.finditer(text)
    ]
    assert not mistakes, "\n".join(mistakes)


def test_requirements_name_neither():
    listed = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    for name in ("requirements.lock", "containers/run.txt"):
        path = ROOT / name
        # containers/ is not in an sdist
        lines = path.read_text().splitlines() if path.exists() else []
        listed += [line for line in lines if not line.lstrip().startswith(("#", "--hash"))]
    assert not NOT_ON_THE_INDEX & {project(re.split(r"[ ;]", line)[0]) for line in listed}


# -- what messages say -----------------------------------------------------------------------------


def test_messages_install_what_pyproject_names():
    assert PROJECT["name"] == requirements.DISTRIBUTION
    for extra, packages in requirements.EXTRAS.items():
        assert list(packages) == PROJECT["optional-dependencies"][extra], extra
    declared = {project(line.partition(";")[0].strip()): line for line in PROJECT["dependencies"]}
    for name, requirement in requirements.DEPENDENCIES.items():
        assert requirement == declared[name]


def test_the_command_is_one_that_a_shell_takes():
    command = requirements.install_extra("torch")
    assert command == "pip install 'torch>=2.4'"
    assert shlex.split(requirements.install_extra("ray")) == [
        "pip",
        "install",
        *requirements.EXTRAS["ray"],
    ]
    assert requirements.install_packages(["max", "no-such-package-here"]) == (
        f"pip install {requirements.DEPENDENCIES['max']} no-such-package-here"
    )


def test_a_message_about_an_extra_comes_from_one_place():
    """A package of an extra that a message names by hand would have another version than
    pyproject.toml.
    """
    packages = {
        project(line): extra for extra, lines in requirements.EXTRAS.items() for line in lines
    }
    packages["max"] = "DEPENDENCIES"
    mistakes = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        for command in INSTALLER.finditer(path.read_text()):
            for word in command["arguments"].split():
                if project(word) in packages and path.name != "requirements.py":
                    mistakes.append(
                        f"{path.relative_to(ROOT)}: {command[0]}: use requirements.install_extra"
                    )
    assert not mistakes, "\n".join(mistakes)
