"""`odyssey completion`: the scripts are a shell's own, and what they ask for is answered."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(launch, shell):
    done = launch("odyssey", "completion", shell)
    assert done.returncode == 0 and f"_ODYSSEY_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=done.stdout, capture_output=True, text=True)
        assert check.returncode == 0, check.stderr


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("odyssey tr", "plain,train\nplain,trace\n"),
        ("odyssey train --glob", "plain,--global-batch-size\n"),
        ("odyssey train --model res", "plain,resnet18\n"),
        ("odyssey train --optimizer ad", "plain,adam\nplain,adamw\nplain,adagrad\n"),
        ("odyssey export --for", "plain,--format\n"),
    ],
)
def test_what_is_answered(launch, words, answer):
    count = len(words.split()) - 1
    launch.environment |= {
        "_ODYSSEY_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(count),
    }
    assert launch("odyssey").stdout == answer


def test_another_shell_is_refused(launch):
    done = launch("odyssey", "completion", "csh")
    assert done.returncode == 64 and "'csh' is not one of 'bash', 'zsh', 'fish'" in done.stderr
