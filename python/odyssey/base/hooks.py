"""Hooks between upper and lower layers; names of this machine and its process numbers."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

from ..errors import OdysseyError, Stopped
from . import proc

# odyssey/__init__.py fills these lists: who calls need not know who is called.
# with each communicator of all processes, when comm has made it
on_world: list[Callable[[Any], None]] = []
connect: list[Callable[[], Any]] = []  # one function, which makes the communicator of all processes

worlds: list[Any] = []  # the communicators of all processes that there are, as comm has made them


def end_with_exit_codes() -> None:
    """Lets a program that no launcher started end with the exit code of an OdysseyError that it
    does not catch; one that was stopped on request, or interrupted in a training, says so in
    a line. Somebody else's hook is left alone.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_alone


def show_errors() -> None:
    """Puts standard error back if an outer hook collects what hooks print.

    The hook of torch.distributed does, in a buffer that is lost when a hook ends the process.
    """
    if type(sys.stderr) is io.StringIO and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__


def end_alone(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Replaces `sys.excepthook` in a process that is alone: it ends with an error's exit code."""
    # elsewhere it is the program's own affair
    training = isinstance(error, KeyboardInterrupt) and any(
        str(frame.f_globals.get("__name__")).startswith("odyssey.")
        for frame, _ in traceback.walk_tb(trace)
    )
    if not (training or isinstance(error, OdysseyError)) or hasattr(sys, "ps1"):
        return sys.__excepthook__(kind, error, trace)
    show_errors()
    if training or isinstance(error, Stopped):
        print(f"odyssey: {'interrupted' if training else error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
    raise SystemExit(130 if training else error.exit_code)  # the interpreter ends in order


def machine() -> int:
    """Names this machine, as two may have one host name."""
    name = os.uname().nodename
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        name += file.read()
    return zlib.crc32(name.encode())


def has_ended(process: int) -> bool:
    """Returns whether a process of this machine has ended, for certain. Its parent may not have
    noticed that yet.
    """
    with contextlib.suppress(PermissionError, OverflowError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    with contextlib.suppress(OSError, IndexError):
        return proc.stat(process)[0] in (b"Z", b"X")
    return False


def process_space() -> int:
    """Names the space in which process numbers mean something; 0 where that is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
