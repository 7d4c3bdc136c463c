"""What README, docs/ and examples/ say: links lead somewhere, and the commands that are shown work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


def anchors(page: Path) -> set[str]:
    """Those that headings give, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`]*`", "code", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), target
        if anchor:
            assert anchor in anchors(to), target


def commands(page: str, section: str) -> list[tuple[int, list[str]]]:
    """(ranks, arguments of `odyssey train`) of the commands in backticks of a section's table."""
    text = (ROOT / page).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"`(?:mpirun -n (\d+) )?(?:odyssey|python -m odyssey\.)\s?train\s?([^`]*)`", text)
    return [(int(ranks or 0), shlex.split(arguments)) for ranks, arguments in found]


KINDS = commands("README.md", "Kinds of parallelism")


@pytest.mark.parametrize(("ranks", "arguments"), KINDS, ids=lambda value: "-".join(map(str, [value])))
def test_the_readme_s_commands_run(launch, ranks, arguments):
    done = launch.train(*arguments, "--steps", 2, "--no-eval", "--no-progress", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert " 2 steps " in done.stdout


def test_the_readme_has_commands():
    assert len(KINDS) >= 7


def refused() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "parallelism.md").read_text()
    return re.findall(r"^\$ mpirun -n (.+)\n(odyssey: error: .+)$", text, re.M)


@pytest.mark.parametrize(("command", "line"), refused(), ids=lambda value: value[:40])
def test_refused_combinations(launch, command, line):
    ranks, _, _, *arguments = shlex.split(command)
    done = launch.train(*arguments, "--no-progress", ranks=int(ranks))
    assert done.returncode == 64
    assert [said for said in done.stderr.splitlines() if said.startswith("odyssey")] == [line]
    if not launch.open_mpi:  # which adds words of its own
        assert done.stderr == line + "\n"


def test_refusals_are_there():
    assert len(refused()) >= 6


def test_every_python_file_has_its_line():
    page = (ROOT / "docs" / "data-flow.md").read_text()
    files = ROOT.glob("python/odyssey/**/*.py")
    named = set(re.findall(r"`([\w/]+\.py)`", page)) | {
        f"{first.rsplit('/', 1)[0]}/{other}"  # `parallel/ring.py`, `server.py`
        for first, rest in re.findall(r"^\| `(\w+/\w+\.py)`((?:, `\w+\.py`)+)", page, re.M)
        for other in re.findall(r"\w+\.py", rest)
    }
    here = {path.relative_to(ROOT / "python" / "odyssey").as_posix() for path in files}
    assert {path for path in here if not path.endswith("__init__.py")} - named == set()


def test_every_public_name_is_described():
    import odyssey

    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in odyssey.__all__ if not re.search(rf"\b{name}\b", page)] == []
