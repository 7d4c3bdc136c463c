"""The picture of layouts, the first thing on README and site: its commands print its hash."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pages  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def shown() -> list[tuple[str, str]]:
    """(command, hash) of each row of layouts.svg."""
    texts = re.findall(
        r"<text [^>]*>([^<]+)</text>", (ROOT / "docs" / "images" / "layouts.svg").read_text()
    )
    hashes = [i for i, text in enumerate(texts) if re.fullmatch(r"[0-9a-f]{16}", text)]
    return [(texts[i - 1], texts[i]) for i in hashes]


def test_the_picture_shows_the_commands_that_the_program_runs():
    loader = importlib.machinery.SourceFileLoader("pictures", str(ROOT / "scripts" / "pictures"))
    pictures = importlib.util.module_from_spec(importlib.util.spec_from_loader("pictures", loader))
    loader.exec_module(pictures)
    assert [command for command, _ in shown()] == [command for _, command, _ in pictures.LAYOUTS]
    assert len(shown()) == 9
    assert len({weights for _, weights in shown()}) == 1


@pytest.mark.parametrize(
    "command",
    [
        # one process and two ranks, always
        pytest.param(command, marks=[] if i in (0, 2) else pytest.mark.long)
        for i, (command, _) in enumerate(shown())
    ],
)
def test_a_command_of_the_picture_prints_its_hash(launch, command):
    words = command.split()
    done = launch(*words)
    assert done.returncode == 0, done.stderr
    printed = re.search(r"^weights ([0-9a-f]{16})$", done.stdout, re.M)[1]
    if pages.at_home():
        assert (command, printed) in shown()
    else:
        one = launch(*shown()[0][0].split())
        assert f"weights {printed}\n" in one.stdout
