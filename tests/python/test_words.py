"""How docstrings begin: with a verb or the field's noun."""

from __future__ import annotations

import ast
from pathlib import Path

import odyssey

#: A sentence that begins so says what its subject is only when it has been read twice.
NOT_FIRST = {"Of", "Those", "What", "Whether", "As"}
PACKAGE = Path(odyssey.__file__).parent


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or "-"
                if text.split()[0].strip(",.:;") in NOT_FIRST:
                    found.append(
                        f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}: {text.splitlines()[0]}"
                    )
    assert not found, "begin with a verb (Returns, Opens) or the field's noun:\n" + "\n".join(found)
