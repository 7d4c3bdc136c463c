"""The one way from Mojo to the Python package: which Python, its errors, and how a program ends.

Everything goes through python/odyssey/mojo/__init__.py, which remembers an error by more than its text, so that `stop`
ends with the exit code of docs/fault-tolerance.md.
"""

from std.ffi import OwnedDLHandle
from std.os import getenv
from std.os.path import isfile
from std.python import Python, PythonObject
from std.sys import exit, stderr

comptime Value = PythonObject
"""A tensor of the Python package: what a typed `Tensor` covers."""


@no_inline
def odyssey() raises -> PythonObject:
    """The Python side, python/odyssey/mojo/__init__.py; one line says so where there is none."""
    if not _is_python(""):
        _check_python()
    try:
        return Python.import_module("odyssey.mojo")
    except e:
        var what = "); activate the environment that odyssey is installed in, or name its interpreter in MOJO_PYTHON"
        raise Error("[python] ", Python.import_module("sys").executable, " cannot import odyssey (", e, what)


@no_inline
def part(name: StaticString) raises -> PythonObject:
    """A public module or function of the Python package, such as "nn"."""
    return odyssey().package.__getattr__(String(name))


@no_inline
def call(
    target: PythonObject, name: StaticString, /, *arguments: PythonObject, var **settings: PythonObject
) raises -> PythonObject:
    """Calls a function or method of a Python object; Python checks the arguments and says what is wrong."""
    var words = Python.list()
    for a in arguments:
        words.append(a)
    var keywords = Python.dict()
    for s in settings.items():
        keywords[s.key] = s.value
    return odyssey().call(target, PythonObject(name), words, keywords)


@no_inline
def stop(error: Error):
    """Says what is wrong, in one line on stderr, and ends all ranks with an exit code that means something.

    Give it what `main` catches. It does not return.
    """
    var message = String(error)
    try:
        exit(Int(py=odyssey().stop(PythonObject(message))))
    except:  # there is no Python, or no odyssey, which as a rule is what is wrong
        print("odyssey: error: ", message, sep="", file=stderr, flush=True)
        exit(69 if message.startswith("[python]") else 64)


def _is_python(library: String) -> Bool:
    """Returns whether a library is Python's; "": whether this process has it."""
    try:
        var opened = OwnedDLHandle(library) if library else OwnedDLHandle()
        return opened.check_symbol("Py_IsInitialized")
    except:
        return False


def _check_python() raises:
    """Mojo would end the program where it finds no Python."""
    var library = getenv("MOJO_PYTHON_LIBRARY")
    var named = getenv("MOJO_PYTHON")
    if library:
        if not _is_python(library):
            var what = ", which is no library of Python that can be loaded; leave it out, or name a libpython3"
            raise Error("[python] MOJO_PYTHON_LIBRARY is ", library, what)
    elif "/" in named:
        if not isfile(named):
            var what = ", which is not there; name the interpreter of the environment that odyssey is installed in"
            raise Error("[python] MOJO_PYTHON is ", named, what)
    else:
        var command = named if named else "python3"
        for folder in getenv("PATH").split(":"):
            if isfile(String(folder, "/", command)):
                return
        var what = (
            " in PATH; activate the environment that odyssey is installed in, or name its interpreter in MOJO_PYTHON"
        )
        raise Error("[python] there is no ", command, what)
