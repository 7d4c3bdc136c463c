"""How large the parts of the product may be: lines of code of the core and of each satellite, lines of all, of a file.

Who raises one of these numbers lowers another, or says in the commit's message what a user gets for it.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader

from odyssey.build import library as build

from .test_layers import SATELLITES, room_of

ROOT = build.source_root()
#: Lines of code (no blanks, comments, docstrings): what there was when the borders were drawn, and 3 %. "mojo" is
#: all of the Mojo face.
CEILINGS = {
    "core": 30_999,
    "kernels": 12_570,
    "torch": 3_785,
    "mojo": 1_100,
    "view": 1_219,
    "tune": 410,
    "jobs": 241,
    "onnx": 213,
}
ALL_LINES, FILE_LINES = 70_600, 600

loader = SourceFileLoader("lines", str(ROOT / "scripts" / "lines"))
counting = importlib.util.module_from_spec(importlib.util.spec_from_loader("lines", loader))
loader.exec_module(counting)


def test_every_part_has_a_ceiling():
    assert set(CEILINGS) == {"core", "kernels", *SATELLITES}


def part_of(name: str) -> str:
    """The part of the product that a file is of, by its path in the repository."""
    if name.startswith("python/odyssey/"):
        room = room_of(name.removeprefix("python/odyssey/"))
        return room if room in SATELLITES else "core"
    return "kernels" if name.startswith("mojo/") else "mojo"


def test_parts_files_and_all_of_it_stay_below_their_ceilings():
    code, lines = dict.fromkeys(CEILINGS, 0), 0
    for folder in counting.FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".py", ".mojo"):
                continue
            name, text = path.relative_to(ROOT).as_posix(), path.read_text()
            code[part_of(name)] += counting.code_lines(name, text)
            lines += text.count("\n")
            assert text.count("\n") <= FILE_LINES, f"{name} has more than {FILE_LINES} lines"
    above = {part: (n, CEILINGS[part]) for part, n in code.items() if n > CEILINGS[part]}
    assert not above, f"(lines of code, ceiling): {above}"
    assert lines <= ALL_LINES


def test_what_counts_as_code():
    text = '"""Doc\nmore."""\n\nx = 1  # why\n# only\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    assert counting.code_lines("a.py", text) == 4
    assert counting.code_lines("a.mojo", '"""Doc\nmore.\n"""\n\nvar x = 1\n# why\n') == 1
