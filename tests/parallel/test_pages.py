"""The pages about parallelism: every Python block runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page,least", [("model-parallel.md", 4), ("pipeline.md", 4), ("data-parallel.md", 1)])
def test_what_a_page_shows_is_what_happens(page, least, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    names: dict = {"__name__": page}
    ran = 0
    for i, (language, body) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, f"{page}, block {i}", "exec"), names)
        if i + 1 < len(blocks) and not blocks[i + 1][0]:
            assert printed.getvalue().splitlines() == blocks[i + 1][1].splitlines()
            ran += 1
    assert ran >= least
