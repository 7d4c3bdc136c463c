"""Files at the level of the system's calls: what must be on the disk in order, and is read without trusting it.

Descriptors close themselves. Errors are the system's words; who calls says which file. What it is not: a format.
"""

from std.ffi import c_int, external_call, get_errno
from std.os import listdir, lstat
from std.sys import CompilationTarget

from kernels.lanes import BytePtr

from .bytes import Bytes, untracked

comptime HERE = -2 if CompilationTarget.is_macos() else -100
"""The current directory, where a descriptor of one is expected."""

comptime _MAC = CompilationTarget.is_macos()
comptime _X86 = CompilationTarget.is_x86()
comptime _CREATE = 0x200 if _MAC else 0x40
comptime _EXCLUSIVE = 0x800 if _MAC else 0x80
comptime _NO_FOLLOW = 0x100 if _MAC else (0x20000 if _X86 else 0x8000)
comptime _DIRECTORY = 0x100000 if _MAC else (0x10000 if _X86 else 0x4000)
comptime _CLOSE_ON_EXEC = 0x1000000 if _MAC else 0x80000
comptime _NO_WAITING = 0x4 if _MAC else 0x800
comptime _KIND = 0o170000
comptime _IS_DIRECTORY = 0o040000
comptime _AT_ONCE = 1 << 30  # bytes of one call


struct File(Movable):
    """An open file or directory."""

    var fd: Int
    """Its descriptor."""

    def __init__(out self, fd: Int):
        """Owns a descriptor.

        Args:
            fd: The descriptor.
        """
        self.fd = fd

    def __deinit__(deinit self):
        """Closes it."""
        _ = external_call["close", c_int](c_int(self.fd))

    @staticmethod
    def reading(
        path: String, folder: Int = HERE, follow: Bool = False
    ) raises -> Self:
        """Opens a file; a pipe without a writer does not make it wait.

        Args:
            path: Its name.
            folder: The directory that the name is relative to.
            follow: Whether it may be a symbolic link.

        Returns:
            The file.

        Raises:
            Error: the system's words.
        """
        return _opened(
            path, folder, _NO_WAITING | (0 if follow else _NO_FOLLOW)
        )

    @staticmethod
    def directory(path: String, follow: Bool = False) raises -> Self:
        """Opens a directory.

        Args:
            path: Its name.
            follow: Whether it may be a symbolic link.

        Returns:
            The directory.

        Raises:
            Error: the system's words.
        """
        return _opened(path, HERE, _DIRECTORY | (0 if follow else _NO_FOLLOW))

    @staticmethod
    def new(path: String) raises -> Self:
        """Makes a file that is not there yet, for its owner alone, and opens it for writing.

        Args:
            path: Its name.

        Returns:
            The file.

        Raises:
            Error: the system's words.
        """
        return _opened(path, HERE, 1 | _CREATE | _EXCLUSIVE | _NO_FOLLOW)

    @staticmethod
    def shared(path: String) raises -> Self:
        """Opens a file for reading and writing, and makes it where it is not there.

        Args:
            path: Its name.

        Returns:
            The file.

        Raises:
            Error: the system's words.
        """
        return _opened(path, HERE, 2 | _CREATE | _NO_FOLLOW)

    def size(self) -> Int:
        """How long it is.

        Returns:
            Bytes.
        """
        return external_call["lseek", Int](c_int(self.fd), Int(0), c_int(2))

    def read(self, into: BytePtr, bytes: Int, at: Int) raises:
        """Reads so many bytes from a place.

        Args:
            into: Where they go.
            bytes: How many.
            at: Where they begin.

        Raises:
            Error: the system's words, or that it ends early.
        """
        var done = 0
        while done < bytes:
            var n = external_call["pread", Int](
                c_int(self.fd),
                into.unsafe_offset(done),
                min(bytes - done, _AT_ONCE),
                at + done,
            )
            if n < 0:
                raise Error("it cannot be read: ", get_errno())
            if n == 0:
                raise Error("it ends ", bytes - done, " bytes early")
            done += n

    def read(self, bytes: Int, at: Int = 0) raises -> List[UInt8]:
        """Reads so many bytes from a place.

        Args:
            bytes: How many.
            at: Where they begin.

        Returns:
            The bytes.

        Raises:
            Error: the system's words, or that it ends early.
        """
        var data = List[UInt8](unsafe_uninit_length=bytes)
        self.read(address(data), bytes, at)
        return data^

    def write(self, data: Span[UInt8, _]) raises:
        """Writes bytes behind those that were written last.

        Args:
            data: The bytes.

        Raises:
            Error: the system's words.
        """
        self._write(untracked(data))

    def _write(self, data: Bytes) raises:
        var done = 0
        while done < len(data):
            var n = external_call["write", Int](
                c_int(self.fd),
                data.unsafe_ptr().unsafe_offset(done),
                min(len(data) - done, _AT_ONCE),
            )
            if n <= 0:
                raise Error(get_errno())
            done += n

    def sync(self) raises:
        """Flushes it to the disk.

        Raises:
            Error: the system's words.
        """
        if external_call["fsync", c_int](c_int(self.fd)) != 0:
            raise Error(get_errno())

    def empty(self) raises:
        """Takes everything out of it.

        Raises:
            Error: the system's words.
        """
        if (
            external_call["ftruncate", c_int](c_int(self.fd), Int(0)) != 0
            or external_call["lseek", Int](c_int(self.fd), Int(0), c_int(0))
            != 0
        ):
            raise Error(get_errno())


def address(data: List[UInt8]) -> BytePtr:
    """Where bytes are; they are kept by who asks.

    Args:
        data: The bytes.

    Returns:
        The first of them.
    """
    return BytePtr(unsafe_from_address=Int(data.unsafe_ptr()))


def read_file(path: String, limit: Int) raises -> List[UInt8]:
    """All bytes of a file.

    Args:
        path: Its name; a symbolic link is followed.
        limit: How many it may have.

    Returns:
        The bytes.

    Raises:
        Error: the system's words, or that it is longer.
    """
    var file = File.reading(path, follow=True)
    var size = file.size()
    if size > limit:
        raise Error("it has ", size, " bytes, more than ", limit)
    return file.read(max(size, 0))


def write_new(path: String, data: Span[UInt8, _]) raises:
    """Makes a file of these bytes and flushes it to the disk.

    Args:
        path: Its name.
        data: Its bytes.

    Raises:
        Error: the system's words.
    """
    var file = File.new(path)
    file.write(data)
    file.sync()


def sync_directory(path: String) raises:
    """Flushes the entries of a directory to the disk.

    Args:
        path: Its name.

    Raises:
        Error: the system's words.
    """
    File.directory(path, follow=True).sync()


def private_directory(path: String) raises:
    """Makes a directory for its owner alone (mode 0700), and those above it, where it is not there yet.

    Args:
        path: Its name.

    Raises:
        Error: the system's words.
    """
    if is_there(path):
        return
    var end = path.rfind("/")
    if end > 0:
        private_directory(String(path[byte=0:end]))
    var name = path
    if external_call["mkdir", c_int](
        name.as_c_string_span().ptr(), c_int(0o700)
    ) != 0 and not is_directory(path):
        raise Error(get_errno())


def is_there(path: String) -> Bool:
    """Whether something has this name, be it a link that leads nowhere.

    Args:
        path: The name.

    Returns:
        True if so.
    """
    try:
        _ = lstat(path)
        return True
    except:
        return False


def is_directory(path: String) -> Bool:
    """Whether a name is that of a directory; a link to one is none.

    Args:
        path: The name.

    Returns:
        True if it is.
    """
    try:
        return lstat(path).st_mode & _KIND == _IS_DIRECTORY
    except:
        return False


def rename(old: String, new: String) raises:
    """Gives something another name; what had that name before is gone if it can be.

    Args:
        old: Its name.
        new: Its new name.

    Raises:
        Error: the system's words.
    """
    var a = old
    var b = new
    if (
        external_call["rename", c_int](
            a.as_c_string_span().ptr(), b.as_c_string_span().ptr()
        )
        != 0
    ):
        raise Error(get_errno())


def exchange(new: String, old: String, aside: String) raises:
    """Lets two things change names: at one moment where the system can (Linux), else in three steps.

    Args:
        new: One.
        old: The other.
        aside: A name for `old` in between, of the three steps.

    Raises:
        Error: the system's words.
    """
    comptime if not _MAC:
        var a = new
        var b = old
        if (
            external_call["renameat2", c_int](
                c_int(HERE),
                a.as_c_string_span().ptr(),
                c_int(HERE),
                b.as_c_string_span().ptr(),
                UInt32(2),
            )
            == 0
        ):
            return
        var number = Int(get_errno().value)
        if number != 22 and number != 38 and number != 95:
            raise Error(get_errno())  # EINVAL, ENOSYS, ENOTSUP: not here
    rename(old, aside)
    rename(new, old)
    rename(aside, new)


def remove(path: String):
    """Removes a file, or a directory and what is in it, as far as that can be done.

    Args:
        path: Its name.
    """
    var name = path
    if is_directory(path):
        try:
            for one in listdir(path):
                remove(String(path, "/", one))
        except:
            pass
        _ = external_call["rmdir", c_int](name.as_c_string_span().ptr())
    else:
        _ = external_call["unlink", c_int](name.as_c_string_span().ptr())


def host_name() -> String:
    """This machine's name as it stands in the names of files.

    Returns:
        At most 64 characters: A-Z, a-z, 0-9 and three signs.
    """
    var data = List[UInt8](length=257, fill=0)
    _ = external_call["gethostname", c_int](data.unsafe_ptr(), 256)
    var out = List[UInt8]()
    for one in data:
        var c = Int(one)
        if c == 0 or len(out) == 64:
            break
        var plain = (
            48 <= c <= 57
            or 65 <= c <= 90
            or 97 <= c <= 122
            or c == 45
            or c == 46
            or c == 95
        )
        out.append(one if plain else 95)
    if len(out) == 0:
        return "unknown"
    return String(StringSpan(unsafe_from_utf8=Span(out)))


def process_id() -> Int:
    """This process.

    Returns:
        Its number.
    """
    return Int(external_call["getpid", c_int]())


def is_alive(pid: Int) -> Bool:
    """Whether a process of this machine has this number.

    Args:
        pid: The number.

    Returns:
        False only if certainly none has.
    """
    comptime NO_SUCH_PROCESS = 3
    return (
        external_call["kill", c_int](c_int(pid), c_int(0)) == 0
        or Int(get_errno().value) != NO_SUCH_PROCESS
    )


def _opened(path: String, folder: Int, flags: Int) raises -> File:
    var name = path
    var fd = external_call["openat", c_int, num_fixed_args=3](
        c_int(folder),
        name.as_c_string_span().ptr(),
        c_int(flags | _CLOSE_ON_EXEC),
        c_int(0o600),
    )
    if fd < 0:
        raise Error(get_errno())
    return File(Int(fd))
