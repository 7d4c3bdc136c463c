"""JSON from files that nobody has vouched for: what passes can be used and written again."""

from __future__ import annotations

import json

import pytest

from odyssey.base.files import DIGITS, parse_json, read_json
from odyssey.errors import DataError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1" * (DIGITS + 1), "an integer of 21 digits"),
        ("1" * 5000, "an integer of 5000 digits"),
        ("[1e999]", "the number 1e999, which is out of range"),
        ("[-1e999]", "out of range"),
        ("NaN", "the number NaN"),
        ('{"a": -Infinity}', "the number -Infinity"),
        (r'["\ud800"]', "is not JSON"),
        (r'{"\uDfff": 1}', "is not JSON"),
        ('{"a": 1, "a": 2}', "names a key twice"),
        ("[" * 33 + "]" * 33, "nested deeper than 32"),
        ("[" * 100_000, "nested deeper than 32"),
        ("\ufeff1", "is not JSON"),
        ("", "is not JSON"),
        ("1 2", "is not JSON"),
    ],
)
def test_what_is_refused(text, says):
    with pytest.raises(DataError) as refused:
        parse_json(text.encode(), "x.json")
    assert str(refused.value).startswith("x.json ") and says in str(refused.value)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        2**64 - 1,
        -(2**63),
        1e308,
        -0.0,
        "\U0001f600 \\ud800 é\n",
        {"a": [None, True, {"b": []}]},
        5e-324,
    ],
)
def test_what_passes(value):
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode(), "x.json") == value


def test_files(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1]")
    assert read_json(path) == [1]
    with pytest.raises(DataError, match="longer than 2 bytes"):
        read_json(path, 2)
    (tmp_path / "link.json").symlink_to(path)
    for name in ("link.json", "none.json", "."):
        with pytest.raises(DataError):
            read_json(tmp_path / name)
