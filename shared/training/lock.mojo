"""One writer per directory of checkpoints, be it a Python or a Mojo program (python/odyssey/checkpoints/lock.py).

The file `.lock` is locked with flock, which ends with the process whatever happens to it, and says who holds it: host,
pid, attempt. A later attempt of the same run takes a directory from an earlier one that hangs; the earlier one finds
out before it puts the next checkpoint in place. Where there is no flock, what the file says decides.
"""

from std.ffi import c_int, external_call, get_errno
from std.time import sleep

from .files import (
    File,
    host_name,
    is_alive,
    process_id,
    read_file,
    remove,
    rename,
)
from .json import json, parse_json

comptime LOCK = ".lock"
"""The name of the file."""

comptime _PATIENCE = 40  # tries, 50 ms from one to the next: a killed process may still be ending
comptime _NOW = 2 | 4  # LOCK_EX | LOCK_NB


@fieldwise_init
struct Holder(Copyable, Equatable, Movable, Writable):
    """Who holds a directory."""

    var host: String
    """The machine."""
    var pid: Int
    """The process."""
    var attempt: Int
    """The attempt of the run that it belongs to, 0 outside one."""

    def __eq__(self, other: Self) -> Bool:
        """Whether both are the same.

        Args:
            other: The other.

        Returns:
            True if they are.
        """
        return (
            self.host == other.host
            and self.pid == other.pid
            and self.attempt == other.attempt
        )

    def write_to(self, mut writer: Some[Writer]):
        """Writes who it is, for a message.

        Args:
            writer: Where it goes.
        """
        writer.write("pid ", self.pid, " on ", self.host)
        if self.attempt:
            writer.write(" (attempt ", self.attempt, ")")


struct Lock(Movable):
    """Holds a directory from when it is made until it is gone."""

    var _path: String
    var _mine: Holder
    var _file: File

    def __init__(out self, folder: String, attempt: Int) raises:
        """Takes a directory; waits for two seconds where another process holds it.

        Args:
            folder: The directory.
            attempt: Of the run, 0 outside one.

        Raises:
            Error: somebody else holds it, or the system's words.
        """
        self._path = String(folder, "/", LOCK)
        self._mine = Holder(host_name(), process_id(), attempt)
        self._file = File(-1)
        var holder: Optional[Holder] = None
        for i in range(_PATIENCE):
            if i:
                sleep(0.05)
            self._file = File.shared(self._path)
            if self._try():
                self._sign()
                return
            holder = _read(self._path)
            if holder and holder.value().attempt < attempt:
                self._take_over()
                return
        var who = String("another process")
        if holder:
            who = String(holder.value())
        raise Error(
            "[checkpoint] ",
            folder,
            " is in use by ",
            who,
            "; wait for its end, or give another directory",
        )

    def __deinit__(deinit self):
        """Gives the directory back; the file stays, empty."""
        if self._is_mine():
            try:
                self._file.empty()
            except:
                pass

    def check(self) raises:
        """Looks whether it is still held.

        Raises:
            Error: another process has taken the directory meanwhile.
        """
        if not self._is_mine():
            var holder = _read(self._path)
            var who = String("another process")
            if holder:
                who = String(holder.value())
            raise Error(
                "it is held by ",
                who,
                " now, not by ",
                self._mine,
                ": nothing is written",
            )

    def _is_mine(self) -> Bool:
        var holder = _read(self._path)
        return holder and holder.value() == self._mine

    def _try(self) -> Bool:
        """Takes the file if it is free."""
        if (
            external_call["flock", c_int](c_int(self._file.fd), c_int(_NOW))
            == 0
        ):
            return True
        var number = Int(get_errno().value)
        if number == 11 or number == 35 or number == 13:  # held by another
            return False
        var holder = _read(self._path)
        if not holder:
            return True
        ref other = holder.value()
        var gone = other.host == self._mine.host and not is_alive(other.pid)
        return gone or other == self._mine

    def _take_over(mut self) raises:
        """Puts a new file in the place of one that an earlier attempt still holds.
        """
        var aside = String(
            self._path,
            ".",
            self._mine.attempt,
            ".",
            self._mine.host,
            ".",
            self._mine.pid,
        )
        self._file = File.shared(aside)
        _ = external_call["flock", c_int](c_int(self._file.fd), c_int(_NOW))
        try:
            self._sign()
            rename(aside, self._path)
        except e:
            remove(aside)
            raise e^

    def _sign(self) raises:
        var text = String(
            '{"host": ',
            json(self._mine.host),
            ', "pid": ',
            self._mine.pid,
            ', "attempt": ',
            self._mine.attempt,
            "}\n",
        )
        self._file.empty()
        self._file.write(text.as_bytes())
        self._file.sync()


def _read(path: String) -> Optional[Holder]:
    """Who a lock file names; nothing where it names nobody, or is torn."""
    try:
        var data = read_file(path, 4096)
        var found = parse_json(Span(data), LOCK)
        return Holder(
            found.get("host").string(),
            found.get("pid").integer(),
            found.get("attempt").integer(),
        )
    except:
        return None
