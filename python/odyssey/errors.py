"""The errors a user can meet, and the exit code each one ends a command with.

An error says who, what was given, what is allowed and what to do next, in one line. The command line prints that line
and exits with the code; the library raises it. Anything that is not an `OdysseyError` is a defect with a traceback.
"""

from __future__ import annotations


class OdysseyError(Exception):
    """Base of every error that is about the user's input or machine, not about a defect.

    `exit_code` is what a command ends with (sysexits-like: 64 usage, 65 data, 69 unavailable, 70 internal, 73 output,
    76 protocol).
    """

    exit_code = 64


class ConfigError(OdysseyError):
    """A setting has a value that is not allowed, alone or together with another."""

    exit_code = 64


class ShapeError(OdysseyError):
    """Tensors whose shapes, dtypes or layouts do not fit the operation."""

    exit_code = 64


class DataError(OdysseyError):
    """A data file is missing, truncated, altered or not what its name says."""

    exit_code = 65


class NumericsError(OdysseyError):
    """The training left the numbers (NaN or infinity); the step that did it was not applied."""

    exit_code = 65


class BuildError(OdysseyError):
    """The kernels could not be compiled or loaded."""

    exit_code = 69


class DeviceError(OdysseyError):
    """A device was asked for that this machine does not have."""

    exit_code = 69


class OutputError(OdysseyError):
    """A file that was asked for cannot be written."""

    exit_code = 73


class CollectiveError(OdysseyError):
    """The ranks did not do the same: a collective call, or a message, that differs between them, or a rank that did
    not come. No wrong number was used."""

    exit_code = 76
