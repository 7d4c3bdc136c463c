"""What is in the environment of a run stays there: no file and no line has it.

RELIABILITY's test 43.
"""

from __future__ import annotations

import sys

import pytest

from odyssey.cli import commands
from odyssey.cli.commands.train import command as train

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "planted-8c1f07aa",
    "HF_TOKEN": "planted-31d9b2e6",
    "MY_PASSWORD": "planted-55e0c9d4",
    "ODYSSEY_NOTE": "planted-9a77f310",  # nor one of a name that ranks are given
}
OPTIONS = {name for option in train.params for name in option.opts}
RUN = ["--steps", "8", "--global-batch-size", "64", "--model", "mlp", "--no-eval"]


def nothing_is_told(folder, *texts):
    seen = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            seen += 1
            data = path.read_bytes()
            assert b"planted-" not in data, path
            assert "planted-" not in path.name
    assert not any("planted-" in text for text in texts)
    return seen


@pytest.fixture
def planted(launch):
    launch.environment |= SECRETS
    return launch


def asked(folder):
    """Every file that a run can be asked for."""
    words = ["--json", folder / "result.json", "--save-weights", folder / "weights.safetensors"]
    if "--run-dir" in OPTIONS:
        words += ["--run-dir", folder / "run"]
    if "--checkpoint-every" in OPTIONS:
        words += ["--checkpoint-every", "4"]
        words += [] if "--run-dir" in OPTIONS else ["--checkpoint-dir", folder / "checkpoints"]
    return words


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_that_ends_well(planted, ranks):
    done = planted.train(*RUN, *asked(planted.folder), ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert nothing_is_told(planted.folder, done.stdout, done.stderr) >= 2


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_that_fails(planted, ranks):
    """A defect prints a traceback of every rank."""
    script = (
        "import sys\nfrom odyssey import cli, trainer\n"
        "def fails(*_, **__):\n    raise RuntimeError('planned')\n"
        "trainer.DistributedTrainer.weights_sha256 = fails\n"
        "cli.main(sys.argv[1:])\n"
    )
    done = planted.python("-c", script, "train", *RUN, *asked(planted.folder), ranks=ranks)
    assert done.returncode != 0 and "planned" in done.stderr
    nothing_is_told(planted.folder, done.stdout, done.stderr)


@pytest.mark.skipif(
    "launch" not in commands.COMMANDS, reason="odyssey launch is not part of this version"
)
def test_a_supervised_run(planted):
    words = ["launch", "-n", "2", "--run-dir", planted.folder / "run", "--", "train", *RUN]
    done = planted(sys.executable, "-m", "odyssey", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    assert nothing_is_told(planted.folder, done.stdout, done.stderr) >= 2


def test_the_doctor(planted):
    done = planted.python("-m", "odyssey", "doctor", "--json", timeout=120)
    nothing_is_told(planted.folder, done.stdout, done.stderr)


def test_the_scan_would_see_it(tmp_path):
    (tmp_path / "a").write_text(f"x {SECRETS['HF_TOKEN']}")
    with pytest.raises(AssertionError):
        nothing_is_told(tmp_path)
    with pytest.raises(AssertionError):
        nothing_is_told(tmp_path / "none", SECRETS["MY_PASSWORD"])
