"""Parsers accept or refuse, whatever they are given; and the fuzzer finds the parsers that do
not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mutate  # noqa: E402
import targets  # noqa: E402

from odyssey.errors import DataError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COUNT = 2000  # of each parser here; `.ci/run --all` has 100,000


def test_no_parser_does_more_than_refuse(tmp_path):
    """Each parser in processes of its own: also one that ends its process is found."""
    words = [
        sys.executable,
        ROOT / "scripts" / "fuzz",
        "--count",
        str(COUNT),
        "--json",
        tmp_path / "figures.json",
    ]
    done = subprocess.run(
        [*words, "--findings", tmp_path / "found"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["findings"] == 0 and figures["parsers"].keys() == targets.TARGETS.keys()
    for name, one in figures["parsers"].items():
        count = COUNT // targets.TARGETS[name].one_in
        assert one["inputs"] == one["accepted"] + one["rejected"] == count, name
        assert one["growth_mb"] < 100 and one["slowest"] < 1, name
        # else the seeds are damaged too much, or too little
        assert 0 < one["accepted"] < 0.9 * count, name
        assert one["places"], name


@pytest.mark.parametrize("name", targets.TARGETS)
def test_inputs_are_the_same_every_time_and_in_pieces(name):
    def inputs(count, first=0, seed=3):
        target = targets.TARGETS[name]
        structure = None if target.structure is None else target.structure()
        return list(
            mutate.blocks(
                mutate.Mutator(target.seeds, structure, target.tokens), count, seed, first
            )
        )

    whole = inputs(2 * mutate.BLOCK)
    assert whole == inputs(2 * mutate.BLOCK)
    assert whole[mutate.BLOCK :] == inputs(mutate.BLOCK, first=mutate.BLOCK)
    assert whole != inputs(2 * mutate.BLOCK, seed=4)
    assert len(set(whole)) > len(whole) / 2  # hosts are short
    assert max(map(len, whole)) <= mutate.LONGEST


# -- the fuzzer itself: planted defects ------------------------------------------------------------

SEEDS = [b'{"shape": [2, 3], "name": "conv1.weight"}']


def found(parse, count=20_000, **more):
    with pytest.raises(mutate.Finding) as caught:
        mutate.fuzz(parse, SEEDS, count, structure=mutate.json_spans(), **more)
    return caught.value


def strict(data):
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise DataError("no") from None


def test_an_exception_that_is_no_refusal_is_found():
    finding = found(lambda data: strict(data)["shape"])
    assert "Error" in str(finding)
    with pytest.raises((TypeError, KeyError, IndexError)):
        strict(finding.data)["shape"]  # the input is the one that did it


def test_an_endless_loop_and_a_slow_input_are_found(monkeypatch):
    monkeypatch.setattr(mutate, "ENDLESS", 0.5)

    def endless(data):
        while strict(data) == []:
            pass

    assert "no end" in str(found(endless))

    def slow(data):
        if strict(data) == []:
            until = time.process_time() + 0.1
            while time.process_time() < until:
                pass

    assert "s are allowed" in str(found(slow, each=0.05))


def test_memory_that_grows_is_found():
    kept = []

    def grows(data):
        kept.append(b"x" * 100_000)

    assert "memory grew" in str(found(grows, growth_mb=20))


def test_a_message_as_long_as_the_input_is_found():
    def chatty(data):
        raise DataError(f"{data!r} is wrong")

    with pytest.raises(mutate.Finding, match="seed 0 is refused"):
        mutate.fuzz(chatty, SEEDS, 10)

    def sometimes(data):
        if data not in SEEDS:
            chatty(data)

    assert "a message of" in str(found(sometimes))


def test_parts_of_json_are_its_keys_values_and_members():
    text = b'{"a": [1, {"b": null}], "c": "x"}'
    parts = {text[a:b] for a, b in mutate.json_parts(text)}
    assert parts == {
        *(
            b'"a"',
            b'[1, {"b": null}]',
            b'"a": [1, {"b": null}]',
            b"1",
            b'{"b": null}',
            b'"b"',
            b"null",
            b'"b": null',
        ),
        *(b'"c"', b'"x"', b'"c": "x"', text),
    }
