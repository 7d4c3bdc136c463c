"""Every parser of the package that reads what others may have written: how to call it, and good
inputs to damage.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from mutate import JSON_LITERALS, NUMBERS, WORDS, Spans, Statistics, fuzz, json_spans, line_parts  # noqa: E402

from odyssey import steplog  # noqa: E402
from odyssey.audit import verify  # noqa: E402
from odyssey.base import slot
from odyssey.base.files import parse_json  # noqa: E402
from odyssey.checkpoints import header, manifest  # noqa: E402
from odyssey.cli.commands.train import command as train  # noqa: E402
from odyssey.cli.configfile import parse_config  # noqa: E402
from odyssey.data.datasets import _read_cifar_records  # noqa: E402
from odyssey.data.idx import read_idx  # noqa: E402
from odyssey.errors import DataError, OdysseyError  # noqa: E402
from odyssey.launch.hosts import parse_hostfile_text, parse_hosts  # noqa: E402
from odyssey.settings.declarations import settings  # noqa: E402
from odyssey.watch import diagnosis, messages


@dataclass(frozen=True)
class Target:
    """A parser of bytes, and what is known of its format. A slow one gets one input in `one_in`."""

    parse: Callable[[bytes], Any]
    seeds: Sequence[bytes]
    structure: Callable[[], Spans] | None = None
    tokens: Sequence[bytes] = WORDS + NUMBERS
    allowed: tuple[type[BaseException], ...] = (OdysseyError,)
    one_in: int = 1

    def fuzz(self, count: int, seed: int = 0, **more: Any) -> Statistics:
        structure = None if self.structure is None else self.structure()
        known = {"structure": structure, "tokens": self.tokens}
        return fuzz(self.parse, self.seeds, count, seed, self.allowed, **known, **more)


def _idx(*shape: int, body: int | None = None) -> bytes:
    size = 1
    for n in shape:
        size *= n
    values = bytes(i % 251 for i in range(size if body is None else body))
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + values


def _idx_spans() -> Spans:
    """The type, the number of dimensions, the sizes, the values."""

    def find(data: bytes) -> list[tuple[int, int]]:
        end = 4 + 4 * data[3]
        return [
            (2, 3),
            (3, 4),
            (0, 4),
            *((at, at + 4) for at in range(4, end, 4)),
            (end, len(data)),
            (4, end),
        ]

    sizes = [n.to_bytes(4, "big") for n in (0, 1, 2, 3, 5, 60, 65536, 2**31, 2**32 - 1)]
    return Spans(
        find, [*sizes, b"\x00", b"\x01", b"\x03", b"\x08", b"\x09", b"\x0d", b"\xff"], joiner=b""
    )


_GZIP_SEEDS = [gzip.compress(data, mtime=0) for data in (_idx(2, 3, 4), _idx(5), _idx(1, 1000))]


def _gzip_spans() -> Spans:
    """The flags, the header, the stream, the checksum, the length; members in a row."""

    def find(data: bytes) -> list[tuple[int, int]]:
        n = len(data)
        return [(2, 3), (3, 4), (0, 10), (4, 10), (10, n - 8), (n - 8, n - 4), (n - 4, n), (0, n)]

    flags = [bytes([flag]) for flag in (0, 1, 2, 4, 8, 16, 31, 255)]
    numbers = [n.to_bytes(4, "little") for n in (0, 1, 2**31, 2**32 - 1)]
    bomb = gzip.compress(bytes(1 << 20), mtime=0)
    return Spans(find, [*flags, *numbers, bomb, bomb[10:-8]], joiner=b"")


_CONFIGS = [
    b'model = "mlp"\nglobal-batch-size = 256\nshard_size = 16\neval = false\nno-progress = '
    b"true\nlr = 1\n",
    b'# a run\nepochs = 2\noptimizer = "adamw"\nweight-decay = 1e-2\nseed = 7\ndata-dir = '
    b'"/data/mnist"\n'
    b"overlap = true\nclip-norm = 1.5\n",
    b'schedule = """cosine"""\njson = \'out.json\'\nwarmup-steps = 0x10\nbucket-size-mb = '
    b"0.5\nsteps = 1_000\n",
]


def _toml_spans() -> Spans:
    arrays = ((b"[", b"]"), (b"{a=", b"}"), (b"a.", b""))
    words = (
        *JSON_LITERALS,
        b"1979-05-27T07:32:00Z",
        b"07:61:00",
        b"2026-02-30",
        b'"""',
        b"'''",
        b"[a.b]",
        b"[[a]]",
        b"a.b.c",
    )
    return Spans(
        line_parts(r"^([\w-]+) *= *(.*)$"),
        (*words, b"epochs", b"no-eval"),
        joiner=b"\n",
        nest=arrays,
    )


def _settings(data: bytes) -> Any:
    """The whole way of a configuration file: TOML, types, choices, recipe, ranges."""
    with train.make_context(
        "train", [], default_map=parse_config(data, "run.toml", train.params)
    ) as context:
        return settings(context.params)


def _json(data: bytes) -> Any:
    """What is accepted can be written again, and is then the same."""
    found = parse_json(data, "x.json")
    text = json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    assert json.dumps(parse_json(text, "again"), sort_keys=True) == json.dumps(
        found, sort_keys=True
    )
    return found


_JSONS = [
    b'{"steps": 120, "weights_sha256": "87f10a6fc1ccb8f7", "ranks": [0, 1], "loss": 0.25, '
    b'"done": true, "host": null}',
    b'{"attempt": {"number": 3, "host": "node-7", "pid": 4242}, "ranks": [{"rank": 0, "code": '
    b'-9}, {"rank": 1}]}',
    b'[1, -2.5e-3, "\\u00e9\\n\\"", [], {}, [[[[1]]]]]',
]


def _hosts(data: bytes) -> Any:
    return parse_hosts(data.decode("utf-8", "surrogateescape"))  # as an argument arrives


def _layout(data: bytes) -> Any:
    options = verify.parse(data.decode("utf-8", "surrogateescape"))
    return verify.ranks(options)


_STEPS = [
    steplog.header()
    + b"".join(
        steplog.StepRecord(n, 0, n - 1, 128, 2.3, n * 7, None, 0.1, n != 3, 1).encoded() for n in ns
    )
    for ns in (range(1, 5), (1, 2, 2, 3), ())
]


def _steps(data: bytes) -> Any:
    return steplog.decoded(steplog.history(steplog.parse(data)))


def _sealed(data: bytes) -> bytes:
    """With checksums that are right again: what is behind them must not trust them."""
    records = [data[at : at + steplog.SIZE] for at in range(steplog.SIZE, len(data), steplog.SIZE)]
    return data[: steplog.SIZE] + b"".join(
        r[:60] + zlib.crc32(r[:60]).to_bytes(4, "little") for r in records
    )


def _steps_spans() -> Spans:
    """Records, and the fields of each."""

    def find(data: bytes) -> list[tuple[int, int]]:
        fields = [offset for _, offset in steplog.LAYOUT.fields.values()] + [steplog.SIZE]
        parts = [(0, 8), (8, 12), (12, 16), (16, 20), (0, 64)]
        for at in range(steplog.SIZE, len(data), steplog.SIZE):
            parts += [(at + a, at + b) for a, b in zip(fields, fields[1:], strict=False)] + [
                (at, at + steplog.SIZE)
            ]
        return parts

    numbers = [
        n.to_bytes(width, "little") for width in (4, 8) for n in (0, 1, 7, 8, 2**31, 2**32 - 1)
    ]
    return Spans(
        find,
        [*numbers, struct.pack("<d", float("nan")), struct.pack("<d", float("inf"))],
        joiner=b"",
    )


_ARRAYS = {
    "conv1.weight": np.zeros((2, 3), "<f4"),
    "step": np.zeros((), "<i8"),
    "none": np.zeros((0, 4), "|i1"),
}
_TENSORS = header.make_header({name: (array.dtype, array.shape) for name, array in _ARRAYS.items()})
_SPACE = sum(tensor.nbytes for tensor in _TENSORS[1])


_CHECKPOINT_WORDS = (
    *WORDS,
    *NUMBERS,
    *(f'"{name}"'.encode() for name in header.DTYPES),
    b'"a/../b"',
    b'"/a"',
)


def _manifests() -> list[bytes]:
    digest = hashlib.sha256(b"").hexdigest()
    tensors = tuple(_TENSORS[1])
    size = len(_TENSORS[0]) + _SPACE
    file = manifest.File("weights.safetensors", size, digest, tensors, (digest,) * len(tensors))
    whole = manifest.Manifest(120, 1, {"epoch": 1, "rates": [0.1, None], "seed": 7}, (file,))
    least = manifest.Manifest(0, 0, {}, (manifest.File("a.safetensors", 8, digest, (), ()),))
    files = []
    for rank, run in enumerate([(0, 2, 4, 3), (2, 2, 4, 3)]):
        part = header.Entry(f"p/w/{run[0]}", "F32", (6,), 0, 24, (3, 4), header.ElementRun(*run))
        files.append(manifest.File(f"rank-{rank}.safetensors", 100, digest, (part,), (digest,)))
    parts = manifest.Manifest(3, 1, {}, tuple(files))
    return [
        whole.encoded(),
        whole.encoded(b"k" * 16),
        least.encoded(),
        parts.encoded(b"k" * 16),
        parts.encoded(),
    ]


def _sealed_manifest(data: bytes) -> Any:
    """With a digest that is right again, so that what it protects is looked at."""
    body = data.rpartition(b',\n"sha256":')[0]
    return manifest.parse_manifest(
        body + b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
    )


def _some(found: Any) -> Any:
    """For parsers that say None to what they do not take."""
    if found is None:
        raise DataError("none")
    return found


def _slot_bytes() -> bytes:
    """A status slot of a rank that waits.

    This process's own is written: a worker of the fuzzer has no other use for it.
    """
    slot.describe(2, 4, 1)
    slot.step(7, 128)
    slot.note_call(3, "all_reduce (61706,) float32")
    slot.begin_wait(3, "all_reduce", (0, "all"))
    slot.note_missing_ranks([0, 3])
    return bytes(slot._memory[:])


def _slot(data: bytes) -> Any:
    found = _some(slot.parse(data))
    slot.parse_ranks(found.missing, found.world)
    assert (found.host + found.note + found.call_text + found.wait_text).isprintable()
    return found


def _lines(data: bytes, sealed: bool) -> list[Any]:
    """What a watcher makes of bytes from a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lines = messages.Sealed(ours, b"k" * 32, caller=False) if sealed else messages.Lines(ours)
        theirs.sendall(data + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        try:
            return lines.receive()
        except messages.Closed as refusal:
            raise DataError(str(refusal)) from None


_SEEN = [
    b'{"rank":1,"host":"node-1","pid":42,"state":"R","step":7,"phase":"data","doing":"wait","idle":0.5,"ended":false}',
    b'{"rank":0,"call":9,"call_text":"all_reduce","times":[0.1,2,3.5],"rate":12.5,"rss":104857600,"missing":"0-3,8"}',
]

_KEYS = tuple(key.encode() for key in verify.KEYS)


def _of_file(read: Callable[[Path], Any], data: bytes) -> Any:
    """What a reader makes of a file with these bytes."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return read(Path(file.name))


TARGETS: dict[str, Target] = {
    "idx": Target(
        lambda data: _of_file(read_idx, data),
        [_idx(2, 3, 4), _idx(5), _idx(1, 1, 1, 1, 1, 1, 1, 2)],
        _idx_spans,
    ),
    "gzip": Target(lambda data: _of_file(read_idx, data), _GZIP_SEEDS, _gzip_spans),
    "idx in gzip": Target(
        lambda data: _of_file(read_idx, gzip.compress(data, 1, mtime=0)),
        [_idx(2, 3, 4), _idx(5)],
        _idx_spans,
    ),
    "cifar10": Target(
        lambda data: _of_file(_read_cifar_records, data),
        [b"\x05" + bytes(3072), (b"\x00" + bytes(3072)) * 2],
    ),
    "config": Target(
        lambda data: parse_config(data, "run.toml", train.params), _CONFIGS, _toml_spans
    ),
    "settings": Target(
        _settings, _CONFIGS, _toml_spans, allowed=(OdysseyError, click.UsageError), one_in=10
    ),
    "json": Target(_json, _JSONS, json_spans),
    "steps": Target(_steps, _STEPS, _steps_spans),
    "steps sealed": Target(lambda data: _steps(_sealed(data)), _STEPS, _steps_spans),
    "manifest": Target(manifest.parse_manifest, _manifests(), json_spans),
    "manifest sealed": Target(_sealed_manifest, _manifests()[::2], json_spans, _CHECKPOINT_WORDS),
    "status slot": Target(_slot, [_slot_bytes()]),
    "watch lines": Target(
        lambda data: [_some(diagnosis.parse_seen(v)) for v in _lines(data, False)],
        _SEEN,
        json_spans,
    ),
    "watch hello": Target(
        lambda data: _lines(data, True), [b"odyssey watch 1 " + b"0123456789abcdef" * 4]
    ),
    "hosts": Target(
        _hosts,
        [b"node1,node2:4,10.0.0.7:2", b"h1,h2", b"a.b-c.example.org:1024"],
        lambda: Spans(
            lambda text: [(m, m + 1) for m in range(len(text))] + line_parts("([^,]+)")(text),
            joiner=b",",
        ),
    ),
    "hostfile": Target(
        lambda data: parse_hostfile_text(data, "hosts"),
        [b"# nodes\nnode1 slots=4\nnode2:2\n\n10.0.0.7 # head\nh_3\n", b"a\nb\r\nc"],
        lambda: Spans(line_parts(r"([^\s:=#]+)(?:[:=](\d+))?"), joiner=b"\n"),
    ),
    "layout": Target(
        _layout,
        [
            b"dp=2,pp=2,schedule=gpipe",
            b"tp=2,zero=3,bucket=0.5,overlap=0",
            b"reduction=ring,servers=1,dp=3",
        ],
        lambda: Spans(line_parts(r"(\w+)=([^,]*)"), (*NUMBERS, *WORDS, *_KEYS), joiner=b","),
    ),
}
