"""The programs that keep state are random, and every state takes part."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stateful


@pytest.mark.parametrize("kind", sorted(stateful.kinds_of_states()))
def test_a_state_changes_and_starts_afresh(kind):
    runs = []
    for _ in "ab":
        state = stateful.load("stateful_values").KINDS[kind](5)
        runs.append([state.next() for _ in range(12)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    assert all(0 <= number < 1 for number in runs[0])


def test_a_case_is_a_function_of_seed_and_number():
    assert str(stateful.case(5, 7)) == str(stateful.case(5, 7)) != str(stateful.case(5, 8))
