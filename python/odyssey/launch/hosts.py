"""Names of hosts and how many ranks each takes: strict readers of `--hosts` and of host files,
and who gets how many.

Nothing is resolved or connected to here; a name that passes is safe as one word of an argument list
of mpirun, srun or ssh (it cannot begin with "-", and has no space, quote, colon or control
character).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..base.paths import expand_path
from ..errors import ConfigError, counted

# at most
HOSTS = 4096
SLOTS = 1024
FILE_LIMIT = 1 << 20  # bytes of a host file, characters of --hosts

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?", re.ASCII)


class Host(NamedTuple):
    """A machine; `slots`: ranks that it takes at most, None where nothing was said."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of a list such as "h1,h2:4", a number after a colon being slots.

    Raises ConfigError: no host, a host named twice, a name that is neither a host name nor an IPv4
    address, slots outside 1 to SLOTS, or more than HOSTS hosts.
    """
    if len(text) > FILE_LIMIT:
        raise ConfigError(
            f"[launch] --hosts has {len(text)} characters; at most {FILE_LIMIT} are allowed"
        )
    return _checked([_host(item, "--hosts") for item in text.split(",")], "--hosts")


def parse_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file: one a line as "h1", "h1:4" (MPICH) or "h1 slots=4" (Open MPI); "#"
    begins a comment. Raises ConfigError: it cannot be read, is too long or not ASCII; else as
    `parse_hosts`, naming the line.
    """
    expanded_path = expand_path(path)
    try:
        with open(expanded_path, "rb") as file:
            return parse_hostfile_text(file.read(FILE_LIMIT + 1), f"host file {path}")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"[launch] host file {str(path)!r} cannot be read: {reason}") from problem


def parse_hostfile_text(data: bytes, name: str) -> tuple[Host, ...]:
    """Returns what a host file says; `name` is for messages. Errors as `parse_hostfile`."""
    if len(data) > FILE_LIMIT:
        raise ConfigError(f"[launch] {name} is longer than {FILE_LIMIT} bytes")
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(
            f"[launch] {name} is not ASCII; a host name has letters, digits, '.', '_' and '-'"
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        source = f"{name}, line {number}"
        host, *slots = words
        if slots and (len(slots) > 1 or not slots[0].startswith("slots=")):
            raise ConfigError(
                f"[launch] {source}: {_short(line)}; write a host, then nothing, ':N' or ' slots=N'"
            )
        if slots and ":" in host:
            raise ConfigError(f"[launch] {source}: {_short(line)} gives slots twice")
        hosts.append(
            _host(":".join([host, *(word.removeprefix("slots=") for word in slots)]), source)
        )
    return _checked(hosts, name)


def _host(text: str, source: str) -> Host:
    name, colon, slots = text.strip(" ").partition(":")
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"[launch] {source}: {_short(text)} is no host name or IPv4 address; letters, digits, "
            "'.', '_' and '-' are "
            "allowed, the first and the last a letter or digit; ':N' gives slots"
        )
    if re.fullmatch(r"[0-9.]+", name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            raise ConfigError(f"[launch] {source}: {_short(name)} is no IPv4 address") from None
    if not colon:
        return Host(name)
    if not (slots.isascii() and slots.isdigit() and len(slots) <= 4 and 1 <= int(slots) <= SLOTS):
        raise ConfigError(
            f"[launch] {source}: {_short(text)}: slots must be a number from 1 to {SLOTS}"
        )
    return Host(name, int(slots))


def _checked(hosts: Sequence[Host], source: str) -> tuple[Host, ...]:
    if not hosts:
        raise ConfigError(f"[launch] {source} names no host")
    if len(hosts) > HOSTS:
        raise ConfigError(
            f"[launch] {source} names {len(hosts)} hosts; at most {HOSTS} are allowed"
        )
    names: set[str] = set()
    for host in hosts:
        if host.name.lower() in names:
            raise ConfigError(
                f"[launch] {source} names {host.name} twice; write {host.name}:2 for two ranks"
            )
        names.add(host.name.lower())
    return tuple(hosts)


def _short(text: str) -> str:
    """For a message: quoted, without control characters, not long."""
    return ascii(text if len(text) <= 60 else text[:60] + "...")


def capacity(hosts: Sequence[Host]) -> int | None:
    """How many ranks the hosts take together; None where nothing limits it, or where there are
    none.
    """
    return (
        None
        if all(host.slots is None for host in hosts)
        else sum(host.slots or 1 for host in hosts)
    )


def check_room(hosts: Sequence[Host], ranks: int) -> None:
    """Raises ConfigError if the hosts have fewer slots than there are ranks."""
    room = capacity(hosts)
    if room is not None and room < ranks:
        raise ConfigError(
            f"[launch] {counted(ranks)}, but the hosts have {counted(room, 'slot')}; lower -n or "
            "add hosts"
        )


def place(hosts: Sequence[Host], ranks: int) -> tuple[tuple[str, int], ...]:
    """Which host gets how many ranks, in blocks: the first ranks go to the first host.

    Hosts with slots are filled in order, one without among them has one slot. Where no host has
    slots, each gets as many as the others, the first ones one more. Hosts that get none are left
    out. Raises ConfigError: the hosts have fewer slots than there are ranks.
    """
    check_room(hosts, ranks)
    if capacity(hosts) is None:
        share, remainder = divmod(ranks, len(hosts))
        counts = [share + (i < remainder) for i in range(len(hosts))]
    else:
        counts = []
        for host in hosts:
            counts.append(min(host.slots or 1, ranks - sum(counts)))
    return tuple((host.name, count) for host, count in zip(hosts, counts, strict=True) if count)
