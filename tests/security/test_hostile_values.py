"""Values that would be commands where they met a shell (S6, S7): each is refused or stays a text.

Nothing is run and no file is made, through the configuration file, the command line, names of hosts
and layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from odyssey.errors import ConfigError, OdysseyError
from odyssey.launch.hosts import parse_hostfile, parse_hosts

HOSTILE = {
    "substitution": "$(touch x)",
    "backticks": "`touch x`",
    "semicolon": ";touch x",
    "pipe": "|touch x",
    "and": "&& touch x",
    "option": "-oProxyCommand=touch x",
    "newline": "a\ntouch x",
    "quote": "';touch x;'",
    "redirection": "a > x",
    "variable": "${IFS}touch${IFS}x",
    "format": "%s%n{0}",
    "escape": "\x1b]0;x\x07",
    "unicode": "\u202ex\u2028",
}
LONG = "A" * 10**6
TEXT_OPTIONS = (
    "model",
    "dataset",
    "optimizer",
    "schedule",
    "device",
    "reduction",
    "execution",
    "precision",
)
PATH_OPTIONS = ("data-dir", "json", "save-weights")


@pytest.fixture
def nothing_is_made(tmp_path, monkeypatch):
    """The current directory, which must be as it was."""
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    yield tmp_path
    assert sorted(os.listdir(tmp_path)) == before


@pytest.fixture
def no_process(monkeypatch):
    """Nothing may be started."""

    def started(*arguments, **_):
        raise AssertionError(f"started {arguments}")

    for where, name in (
        (subprocess, "Popen"),
        (os, "system"),
        (os, "popen"),
        (os, "execve"),
        (os, "posix_spawn"),
    ):
        monkeypatch.setattr(where, name, started)


def train(monkeypatch, capsys, *arguments):
    """The exit code of `odyssey train` in this process, and what it said; a defect would be 70."""
    from odyssey import cli
    from odyssey.cli.commands import train as command

    monkeypatch.setattr(
        command,
        "run",
        lambda made, **_: (_ for _ in ()).throw(ConfigError(f"[train] accepted {made.data_dir}")),
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *arguments])
    return end.value.code, capsys.readouterr().err


def check(code, said):
    assert code in (64, 65), said
    assert said.count("\n") == 1 and said.endswith("\n")
    assert said[:-1].isprintable() and len(said) < 5000


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("option", TEXT_OPTIONS)
def test_texts_of_the_configuration(
    value, option, nothing_is_made, no_process, monkeypatch, capsys
):
    (nothing_is_made.parent / "run.toml").write_text(f"{option} = {json.dumps(value)}\n")
    code, said = train(monkeypatch, capsys, "--config", str(nothing_is_made.parent / "run.toml"))
    check(code, said)
    assert "accepted" not in said


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("option", TEXT_OPTIONS)
def test_texts_of_the_command_line(value, option, nothing_is_made, no_process, monkeypatch, capsys):
    code, said = train(monkeypatch, capsys, f"--{option}={value}")
    check(code, said)
    assert "accepted" not in said


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_path_is_a_path(value, nothing_is_made, no_process, monkeypatch, capsys):
    """It is the name of a file, shown without what acts on a terminal.

    Only variables are expanded. Their values are text, and no shell sees them.
    """
    monkeypatch.delenv("IFS", raising=False)
    code, said = train(monkeypatch, capsys, f"--data-dir={value}")
    check(code, said)
    if "${IFS}" in value:
        assert "the variable IFS isn't set" in said
        monkeypatch.setenv("IFS", "$(touch x)")
        code, said = train(monkeypatch, capsys, f"--data-dir={value}")
        check(code, said)
        assert "accepted $(touch x)touch$(touch x)x" in said
    else:
        assert "accepted" in said


@pytest.mark.parametrize("option", TEXT_OPTIONS + PATH_OPTIONS)
def test_nul_and_a_million_characters(option, nothing_is_made, no_process, monkeypatch, capsys):
    config = nothing_is_made.parent / "run.toml"
    for text in (
        f'{option} = "a\\u0000b"\n',
        f'{option} = "{LONG}"\n',
        f'{option} = "{LONG[:5000]}"\n',
        f"{LONG} = 1\n",
    ):
        config.write_text(text)
        check(*train(monkeypatch, capsys, "--config", str(config)))
    if option in TEXT_OPTIONS:
        check(*train(monkeypatch, capsys, f"--{option}={LONG}"))


@pytest.mark.parametrize("option", PATH_OPTIONS)
def test_a_path_of_the_configuration_that_cannot_be(option, nothing_is_made, tmp_path, monkeypatch):
    """Through the whole command: a name of 4000 characters is an error of its own, no traceback."""
    config = tmp_path.parent / "run.toml"
    config.write_text(f'{option} = "{LONG[:4000]}"\nsteps = 1\nno-progress = true\n')
    done = subprocess.run(
        [sys.executable, "-m", "odyssey.train", "--config", config],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (64, 65, 73), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["epochs = 99999999999999999999", "lr = 1e999", "seed = -1", "lr = nan", "lr = -1"]
)
def test_numbers_out_of_range(text, nothing_is_made, monkeypatch, capsys):
    (nothing_is_made.parent / "run.toml").write_text(text)
    code, said = train(monkeypatch, capsys, "--config", str(nothing_is_made.parent / "run.toml"))
    check(code, said)
    assert "accepted" not in said


@pytest.mark.parametrize(
    "value",
    [*HOSTILE.values(), "a\0b", LONG, "", "-", "a b", "a..b", "é"],
    ids=lambda v: ascii(v)[:20],
)
def test_names_of_hosts(value, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"good\n{value}x y\n")
    for parse, given in (
        (parse_hosts, value),
        (parse_hosts, f"good,{value}"),
        (parse_hostfile, file),
    ):
        with pytest.raises(OdysseyError) as refused:
            parse(given)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 1000


@pytest.mark.parametrize("value", [*HOSTILE.values(), LONG[:100_000]], ids=[*HOSTILE, "long"])
def test_layouts(value, nothing_is_made, no_process, capsys):
    from odyssey import cli

    with pytest.raises(SystemExit) as end:
        cli.main(["verify", f"--layouts={value}", "--steps", "1"])
    check(end.value.code, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "NAME"],
        ["top", "NAME"],
        ["replay", "NAME", "--step", "1"],
        ["diff", "NAME", "other"],
        ["scale", "NAME", "2"],
        ["doctor", "--hosts", "NAME"],
        ["launch", "-n", "1", "--hostfile", "NAME", "train"],
        ["train", "--config", "NAME"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    "name",
    [
        "a\udcff\x1b[2J\nodyssey: done",
        "x" * 300,
        "x/" * 3000,
        *(HOSTILE[k] for k in ("substitution", "option", "quote")),
    ],
    ids=lambda name: ascii(name)[:20],
)
def test_names_that_commands_are_given(words, name, nothing_is_made, no_process, capsys):
    """Bytes that are no text, lines that look like another message: one line, and nothing that a
    terminal would do.
    """
    from odyssey import cli

    if name.startswith("-") and words[0] != "doctor":
        name = f"./{name}"  # else it is an option, which click refuses
    with pytest.raises(SystemExit) as end:
        cli.main([name if word == "NAME" else word for word in words])
    said = capsys.readouterr()
    assert end.value.code in (1, 64, 65, 69), said
    for line in (said.out + said.err).splitlines():
        assert (
            line.isprintable() and not line.startswith("odyssey: done") and "Traceback" not in line
        )
