"""Directories of runs are nobody else's, and no message brings control characters to a terminal
(S11, S12).
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from odyssey.base.files import LockFile, private_directory, write_whole
from odyssey.errors import DataError, OutputError, printable

root_only = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to give a directory to another user"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï 訓練 text", "plain ünï 訓練 text"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("a\nb\tc\r\0", r"a\nb\tc\r\x00"),
        ("\u202e\u2066\u200b\u2028\x85\xa0", r"\u202e\u2066\u200b\u2028\x85\xa0"),
        ("\udc80", r"\udc80"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_acts_or_hides_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown
    printable(text).encode()


def test_lines_stay_where_they_are_wanted_and_length_is_capped():
    assert printable("a\n\x1b[1m", keep="\n") == "a\n\\x1b[1m"
    assert printable("x" * 10**6, limit=20) == "x" * 20 + "... (999980 more characters)"
    assert printable("x" * 20, limit=20) == "x" * 20


def test_the_command_line_escapes_what_a_user_or_a_file_named(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "odyssey.train",
            "--config",
            tmp_path / "a\x1b[31m\nodyssey: done.toml",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == DataError.exit_code
    assert r"a\x1b[31m\nodyssey: done.toml" in done.stderr
    assert done.stderr.count("\n") == 1 and "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("mask", "folder_mode", "file_mode"),
    [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o002, 0o775, 0o664), (0o077, 0o700, 0o600)],
)
def test_directories_and_files_follow_the_umask(tmp_path, mask, folder_mode, file_mode):
    before = os.umask(mask)
    try:
        assert private_directory(tmp_path / "runs" / "a b\n7") == tmp_path / "runs" / "a b\n7"
        write_whole(tmp_path / "runs" / "x.json", lambda file: file.write(b"{}"))
    finally:
        os.umask(before)
    for path in (tmp_path / "runs", tmp_path / "runs" / "a b\n7"):
        assert stat.S_IMODE(path.stat().st_mode) == folder_mode
    private_directory(tmp_path / "runs")  # that is there already
    assert stat.S_IMODE((tmp_path / "runs" / "x.json").stat().st_mode) == file_mode


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    def half(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "w", lambda file: file.write(b"old"), mode=0o666, durable=False)
    finally:
        os.umask(before)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "w", half)
    assert (
        stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o640
        and (tmp_path / "w").read_bytes() == b"old"
    )
    assert os.listdir(tmp_path) == ["w"]


def test_a_forked_child_does_not_give_back_its_parents_lock(tmp_path):
    lock = LockFile(tmp_path / "lock")
    assert lock.take() and not lock.write({"pid": os.getpid()})
    if not (child := os.fork()):
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    other = LockFile(tmp_path / "lock")
    assert other.take() is False and other.read() == {"pid": os.getpid()}
    lock.release()
    assert other.take() is True and other.read() == {}
    other.release()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with pytest.raises(OSError, match="symbolic link"):
        LockFile(tmp_path / "link")


def test_a_directory_with_permissions_of_ones_own_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o750)
    private_directory(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750


def test_what_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "dangling", "nul\0", "x" * 300):
        with pytest.raises(OutputError, match="cannot be used as a directory"):
            private_directory(tmp_path / name)


@root_only
def test_a_directory_of_another_user_that_all_may_write_to_is_refused(tmp_path):
    os.chown(tmp_path, 12345, -1)
    private_directory(tmp_path)
    tmp_path.chmod(0o1777)
    with pytest.raises(OutputError, match="belongs to user 12345 and everybody may write to it"):
        private_directory(tmp_path)
    private_directory(tmp_path / "below")


def test_a_message_that_has_lines_keeps_them(capsys):
    import click

    from odyssey import cli
    from odyssey.errors import BuildError

    @click.command()
    def fails():
        raise BuildError("[build] the kernels did not compile:\nx.mojo:1: \x1b[31merror")

    with pytest.raises(SystemExit):
        cli.main([], command=fails)
    assert (
        capsys.readouterr().err
        == "odyssey: error: [build] the kernels did not compile:\nx.mojo:1: \\x1b[31merror\n"
    )


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("mask", ["0", "027"])
def test_what_a_run_leaves_follows_the_umask(launch, supervised, mask):
    """Checkpoints, logs, steps: the group may share them, and never everybody writes to them."""
    run = launch.folder / "runs" / "one"
    train = [
        "--steps",
        "6",
        "--global-batch-size",
        "64",
        "--model",
        "mlp",
        "--no-eval",
        "--checkpoint-every",
        "2",
    ]
    words = [sys.executable, "-m", "odyssey", "train", "--run-dir", run, *train]
    if supervised:
        words = [
            sys.executable,
            "-m",
            "odyssey",
            "launch",
            "-n",
            "2",
            "--run-dir",
            run,
            "train",
            *train,
        ]
    done = launch("sh", "-c", f'umask {mask}; exec "$@"', "sh", *words, timeout=120)
    assert done.returncode == 0, done.stderr
    left = [run.parent, run, *run.rglob("*")]
    assert any(path.name.startswith("step_") for path in left) and (run / "DONE.json").exists()
    modes = {str(path): stat.S_IMODE(path.lstat().st_mode) for path in left}
    shared = 0o060 if mask == "0" else 0o040
    assert {path for path, mode in modes.items() if mode & 0o070 & shared != shared} == set()
    assert {path for path, mode in modes.items() if mode & (0o002 | int(mask, 8))} == set()


def test_a_child_that_lives_on_does_not_hold_its_parents_lock(tmp_path):
    """Workers of a data loader may live longer than the training run that forked them."""
    lock = LockFile(tmp_path / "lock")
    assert lock.take()
    asks, answers = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        os.read(asks, 1)  # until the parent closes its end
        os._exit(0)
    lock.release()
    other = LockFile(tmp_path / "lock")
    taken = other.take()
    os.close(answers)
    os.waitpid(child, 0)
    other.release()
    os.close(asks)
    assert taken
