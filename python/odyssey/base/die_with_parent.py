"""Starts a program that does not outlive its parent: `python -I -S die_with_parent.py PARENT_PID
PROGRAM ARGUMENT ...`.

The kernel kills it when the parent ends, however that ends (Linux: PR_SET_PDEATHSIG). It turns into
the program (exec), so its process id is the program's. It imports nothing of the package: it is on
the way of every restart.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9

# SIGPIPE and SIGXFSZ: Python ignores them, and exec hands that on. SIGCHLD: somebody above may
# ignore it, and then the kernel keeps no exit status for a parent.
_DEFAULTED = (13, 25, 17 if sys.platform == "linux" else 20)


def tie(parent: int) -> None:
    """Ties this process to `parent`, which must be its parent still; signals are as in a fresh
    program.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended in between
        os._exit(128 + SIGKILL)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    for number in _DEFAULTED:
        libc.signal(number, None)  # SIG_DFL is 0


def main() -> None:
    """See the top of the file. Exit code 127: the program is not there, 126: it cannot be run."""
    tie(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as problem:
        print(
            f"odyssey: {sys.argv[2]} cannot be started: {problem.strerror}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(127 if isinstance(problem, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
