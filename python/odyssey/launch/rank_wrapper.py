"""The parent of one rank: starts the rank's program, waits, and writes down how it ended.

    python -I -S rank_wrapper.py PROGRAM ARGUMENT ...

An MPI launcher loses exit codes (MPICH makes 1 into 9, Open MPI's launcher returned 0 after a host
had died), does not say which rank it was, or says nothing. Between it and every rank stands this
process. It writes two files into the run's directory (ODYSSEY_RUN_DIR; without one it only keeps):

    ranks/3.json  when rank 3 is started: rank, host, pid of the program, attempt
    ends/3.json   when it has ended: the same, code or signal, time, peak memory; what the rank
                  itself left about it,
                  here or in ends/3.reason.json ("reason", "step", "following", its "code" as
                  "own"); "oom": the kernel ended it for lack of memory

and ends the way the program did: with its exit code, or by its signal. Everything it inherited
(standard streams, the launcher's sockets) goes to the program untouched and stays open here until
the end, so that the launcher notices the rank's death after it is written down. Signals are handed
on. If the launcher's process on this machine dies, so does the wrapper, and with it the program.

It imports little of the standard library, and of the package what does the same: it is on the way
of every restart.
"""

# what the module signal is made of: without its enums, which take milliseconds
import _signal as signal
import os
import sys
import time

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Last, so that nothing there hides a standard module.
sys.path += [os.path.join(PACKAGE, room) for room in ("base", "comm")]
import cores  # noqa: E402
import die_with_parent  # noqa: E402

# the first that is there counts
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
REASON_LIMIT = 1 << 16  # bytes of ends/N.reason.json
FORWARDED = {
    getattr(signal, name)
    for name in (
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGTERM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGCONT",
        "SIGALRM",
    )
}


def main() -> None:
    """See the top of the file."""
    die_with_parent.tie(os.getppid())
    parent = os.getpid()
    program = sys.argv[1:]
    oom_kills_before = cores.oom_kills()
    rendezvous()
    inherited = block()  # a signal that comes while the program starts is for the program
    child = os.fork()
    if not child:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, inherited)
            os.setpgid(0, 0)  # a signal to the wrapper's group comes once: from the wrapper
            die_with_parent.tie(parent)
            os.execvp(program[0], program)
        except BaseException as problem:
            os.write(
                2, f"odyssey: {program[0]} cannot be started: {problem}\n".encode(errors="replace")
            )
            os._exit(127)
    folder = os.environ.get("ODYSSEY_RUN_DIR")
    record = {
        "rank": rank(),
        "host": os.uname().nodename,
        "pid": child,
        "attempt": number("ODYSSEY_ATTEMPT"),
    }
    if folder:
        step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
        write(
            folder,
            "ranks",
            {**record, "time": time.time(), "slurm": ".".join(step) if all(step) else None},
        )
    status, usage = wait(child)
    ended = time.time()
    code = os.waitstatus_to_exitcode(status)
    record.update(code=code if code >= 0 else None, signal=-code if code < 0 else None, time=ended)
    record["memory"] = usage.ru_maxrss << 10  # bytes
    if code == -9 and cores.oom_kills() > oom_kills_before:
        record["oom"] = cores.memory_limit() or 0
    if folder:
        record.update(reason(folder, record["rank"], record["attempt"]))
        write(folder, "ends", record)
    end(code)


def block() -> set:
    """Keeps the signals that `wait` takes from acting; the mask that was before."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})


def wait(child: int) -> tuple:
    """Waits for the program, handing signals on; its status and resource usage."""
    # by default BSD and macOS drop it although it is blocked
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        caught = signal.sigwait(FORWARDED | {signal.SIGCHLD})
        if caught in FORWARDED:
            try:
                os.kill(child, caught)  # not reaped yet: it is the program and nothing else
            except ProcessLookupError:
                pass


def end(code: int) -> None:
    """Ends this process as the program ended."""
    if code >= 0:
        os._exit(code)
    import resource

    # one core is enough
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def number(name: str) -> int:
    """A number from the environment, -1 if it is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else -1


def rank() -> int:
    """The rank that the launcher gave."""
    return next((number(name) for name in RANK if number(name) >= 0), 0)


def rendezvous() -> None:
    """Completes the variables of env:// where the launcher has set those that all ranks have in
    common.
    """
    if os.environ.get("MASTER_ADDR") and os.environ.get("WORLD_SIZE"):
        local = next((number(name) for name in LOCAL_RANK if number(name) >= 0), rank())
        os.environ.update(RANK=str(rank()), LOCAL_RANK=str(local))


def read(folder: str, kind: str, name: str) -> dict:
    """A record that is there; {} where there is none, or something else."""
    import json

    try:
        with open(os.path.join(folder, kind, name), "rb") as file:
            value = json.loads(file.read(REASON_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write(folder: str, kind: str, record: dict) -> None:
    """Puts a record in place whole, unless one of a later attempt is there: then this wrapper is
    a straggler's. Not flushed to the disk: a machine that lost power writes no record anyway.
    """
    import json

    directory = os.path.join(folder, kind)
    name = f"{record['rank']}.json"
    aside = os.path.join(directory, f".{name}.{os.getpid()}")
    try:
        with open(
            os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664), "w", encoding="ascii"
        ) as file:
            json.dump(record, file)
        present_attempt = read(folder, kind, name).get("attempt")
        if type(present_attempt) is int and present_attempt > record["attempt"]:
            os.unlink(aside)
        else:
            os.rename(aside, os.path.join(directory, name))
    except OSError as problem:  # no shared directory, a full disk: the rank goes on without
        subject = f"rank {record['rank']} on {record['host']}"
        os.write(
            2, f"odyssey: {subject}: {kind}/{name} cannot be written: {problem.strerror}\n".encode()
        )


def reason(folder: str, rank: int, attempt: int) -> dict:
    """Returns what the rank said about its end, as far as it is of this attempt and has the
    right form.
    """
    fields = {}
    for name in (f"{rank}.json", f"{rank}.reason.json"):
        record = read(folder, "ends", name)
        if record.get("attempt", attempt) == attempt:
            kinds = {"reason": str, "step": int, "following": bool}
            fields.update(
                (key, record[key]) for key, kind in kinds.items() if type(record.get(key)) is kind
            )
            if type(record.get("code")) is int:
                fields["own"] = record["code"]
    return fields


if __name__ == "__main__":
    main()
