"""Host names: what is read, what is refused, and who gets how many ranks."""

from __future__ import annotations

import pytest

from odyssey.errors import ConfigError
from odyssey.launch.hosts import (
    FILE_LIMIT,
    Host,
    parse_hostfile,
    parse_hostfile_text,
    parse_hosts,
    place,
)


def test_a_list():
    assert parse_hosts("h1,h2:4") == (Host("h1"), Host("h2", 4))
    assert parse_hosts("10.77.0.1, node-3.cluster_a") == (
        Host("10.77.0.1"),
        Host("node-3.cluster_a"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h1,",
        "-oProxyCommand=touch x",
        "$(touch x)",
        "`touch x`",
        "h1;touch x",
        "h1 h2",
        "h1\nh2",
        "h1\0",
        "h1:0",
        "h1:1025",
        "h1:-1",
        "h1:1:2",
        "h1:\u0664",
        "h1,H1",
        "999.1.1.1",
        "1.2.3",
        "fe80::1",
        "a..b",
        "h-",
        "h\u00e4",
        "a" * 256,
        "a" * 10**6,
        ",".join(f"h{i}" for i in range(4097)),
    ],
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ConfigError) as error:
        parse_hosts(text)
    assert len(str(error.value)) < 400 and str(error.value).isprintable()


def test_a_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# mine\nh1\n\nh2:4  # big\nh3 slots=2\r\n")
    assert parse_hostfile(file) == (Host("h1"), Host("h2", 4), Host("h3", 2))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"# none\n",
        b"h1 max_slots=2\n",
        b"h1:2 slots=2\n",
        b"h1 slots=2 x\n",
        b"h\xff1\n",
        b"h1\0\n",
        b"h1\nh1\n",
    ],
)
def test_a_file_that_says_something_else_is_refused(data):
    with pytest.raises(ConfigError, match="hosts.txt"):
        parse_hostfile_text(data, "hosts.txt")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="longer than"):
        parse_hostfile_text(b"#" * (FILE_LIMIT + 1), "f")


@pytest.mark.parametrize(
    ("hosts", "ranks", "expected"),
    [
        ("a,b", 4, (("a", 2), ("b", 2))),
        ("a,b,c", 4, (("a", 2), ("b", 1), ("c", 1))),
        ("a,b,c", 2, (("a", 1), ("b", 1))),
        ("a:4,b:4", 5, (("a", 4), ("b", 1))),
        ("a:2,b", 3, (("a", 2), ("b", 1))),
    ],
)
def test_places(hosts, ranks, expected):
    assert place(parse_hosts(hosts), ranks) == expected


def test_too_few_slots():
    with pytest.raises(ConfigError, match="5 ranks, but the hosts have 4 slots"):
        place(parse_hosts("a:2,b:2"), 5)
