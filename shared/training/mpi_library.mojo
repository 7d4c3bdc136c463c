"""Which MPI library a Mojo program uses, how it is loaded, and what MPI's names are in it.

MPICH (and what has its ABI: Intel MPI, MVAPICH), Open MPI, and libraries with the standard ABI of MPI 5 differ in their
handles: small integers here, addresses of objects there. Calls are made in mpi.mojo.
"""

from std.ffi import OwnedDLHandle, RTLD, c_int
from std.os import getenv
from std.os.path import exists
from std.sys import CompilationTarget

from .launcher import Launched

comptime LIBRARY = "ODYSSEY_MPI_LIBRARY"
"""Names libmpi by its path, where it is not found."""


@fieldwise_init
struct _Handles(Copyable, Movable):
    """What MPI's names are in one library: small integers, or addresses of its objects.
    """

    var kind: String
    var world: Int
    var byte: Int
    var float32: Int
    var int64: Int
    var sum: Int
    var max: Int
    var min: Int
    var errors_return: Int
    var in_place: Int
    var status_ignore: Int
    var serialized: Int  # the thread level


struct _Connection(Movable):
    """The library and its handles; lives until the process ends, as the library's own threads may.
    """

    var lib: OwnedDLHandle
    var path: String
    var at: _Handles
    var comm: Int  # a duplicate of the world, which calls of other code do not meet
    var finished: Bool

    def __init__(
        out self, var lib: OwnedDLHandle, path: String, var at: _Handles
    ):
        self.lib = lib^
        self.path = path
        self.comm = at.world
        self.at = at^
        self.finished = False


def find_library() -> List[String]:
    """The names under which MPI may be found, best first.

    The path in ODYSSEY_MPI_LIBRARY, and nothing else if that is set. Otherwise what mpi4py looks for (libmpi.so,
    libmpi.so.12 of MPICH, libmpi.so.40 of Open MPI) in the directory `lib` of the active environment (VIRTUAL_ENV,
    CONDA_PREFIX), beside the mpirun, mpiexec and python of PATH, of ~/.local, and where the loader looks by default.

    Returns:
        Paths, and names for the loader.
    """
    var given = getenv(LIBRARY)
    if given != "":
        return [given]
    var folders = List[String]()
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"]:
        var prefix = getenv(String(name))
        if prefix != "":
            _once(folders, prefix + "/lib")
    for program in ["mpirun", "mpiexec", "python3", "python"]:
        for folder in getenv("PATH").split(":"):
            if folder.startswith("/") and exists(String(folder, "/", program)):
                for lib in ["lib", "lib64", "lib/release"]:
                    _once(folders, String(folder, "/../", lib))
                break
    if getenv("HOME") != "":
        _once(folders, getenv("HOME") + "/.local/lib")
    var found = List[String]()
    for folder in folders:
        for name in _names():
            if exists(String(folder, "/", name)):
                found.append(String(folder, "/", name))
    for name in _names():
        found.append(name)
    return found^


def _names() -> List[String]:
    comptime if CompilationTarget.is_macos():
        return ["libmpi.dylib", "libmpi.12.dylib", "libmpi.40.dylib"]
    else:
        return [
            "libmpi.so",
            "libmpi.so.12",
            "libmpi.so.40",
            "libmpi_abi.so",
            "libmpi_abi.so.1",
        ]


def _once(mut names: List[String], name: String):
    if name not in names:
        names.append(name)


def _load_library(found: Optional[Launched]) raises -> _Connection:
    """The first library of `find_library` that can be loaded and understands the launcher.
    """
    var other = String()
    for path in find_library():
        try:
            var lib = OwnedDLHandle(path, RTLD.LAZY | RTLD.GLOBAL)
            if not lib.check_symbol("MPI_Init_thread"):
                raise Error("it has no MPI_Init_thread")
            var at = _handles_of(lib)
            if _understands(at.kind, found):
                return _Connection(lib^, path, at^)
            other = String(path, " is ", at.kind)
        except e:
            if getenv(LIBRARY) != "":
                raise Error(
                    "[mpi] ", LIBRARY, " names ", path, ", but: ", String(e)
                )
    var who = String("no launcher started this process")
    if found:
        who = String(found.value().launcher, " started this process")
    raise Error(
        "[mpi] ",
        who,
        ", but no MPI library for it is found beside the mpirun and python of",
        " PATH, in the active environment, or by the loader",
        "" if other == "" else String(" (", other, ")"),
        "; name one in ",
        LIBRARY,
    )


def _understands(kind: String, found: Optional[Launched]) -> Bool:
    """Whether ranks can find each other: mpirun of one library says nothing to the other. PMIx and srun may do both.
    """
    if not found or found.value().size == 1 or getenv(LIBRARY) != "":
        return True
    if found.value().launcher == "Open MPI":
        return kind == "Open MPI"
    return found.value().launcher != "PMI" or kind != "Open MPI"


def _handles_of(lib: OwnedDLHandle) raises -> _Handles:
    if lib.check_symbol("ompi_mpi_comm_world"):
        return _Handles(
            "Open MPI",
            _address_of(lib, "ompi_mpi_comm_world"),
            _address_of(lib, "ompi_mpi_byte"),
            _address_of(lib, "ompi_mpi_float"),
            _address_of(lib, "ompi_mpi_int64_t"),
            _address_of(lib, "ompi_mpi_op_sum"),
            _address_of(lib, "ompi_mpi_op_max"),
            _address_of(lib, "ompi_mpi_op_min"),
            _address_of(lib, "ompi_mpi_errors_return"),
            1,
            0,
            2,
        )
    # MPICH has this call in both of its libraries; in the one with its own handles it says -1
    if lib.check_symbol("MPI_Abi_get_version"):
        var major: c_int = -1
        var minor: c_int = -1
        _ = lib.call["MPI_Abi_get_version", c_int](
            Pointer(to=major), Pointer(to=minor)
        )
        if major >= 1:
            return _Handles(
                "of the standard ABI",
                0x101,
                0x247,
                0x210,
                0x258,
                0x21,
                0x23,
                0x22,
                0x143,
                1,
                0,
                2048,
            )
    return _Handles(
        "MPICH",
        0x44000000,
        0x4C00010D,
        0x4C00040A,
        0x4C00083A,
        0x58000003,
        0x58000001,
        0x58000002,
        0x54000001,
        -1,
        1,
        2,
    )


def _address_of(lib: OwnedDLHandle, name: String) raises -> Int:
    var found = lib.get_symbol[UInt8](name)
    if not found:
        raise Error("it has no ", name)
    return Int(found.value())
