"""What Mojo programs read and write, against Python's own: digests, JSON, safetensors, checkpoints, IDX, gzip."""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import os
import random
import shutil
import struct
import subprocess
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from odyssey import build, data, nn, optim
from odyssey.checkpoints import CheckpointError, Snapshot, Store, read_key
from odyssey.checkpoints.header import parse_header
from odyssey.checkpoints.manifest import parse_manifest
from odyssey.errors import DataError
from odyssey.files import parse_json
from odyssey.trainer import DistributedTrainer

HERE = Path(__file__).parent
ROOT = build.source_root()
KEY = "ODYSSEY_CHECKPOINT_KEY_FILE"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mojo") / "files"
    source = ["--Werror", HERE / "files.mojo", "-I", ROOT / "mojo", "-I", ROOT]
    done = build.run_mojo(["build", *map(str, source), *build.target_options(build.host_cpu()), "-o", str(out)])
    assert done.returncode == 0, done.stderr
    return out


class Program:
    """Calls the program with a word and paths."""

    def __init__(self, path: Path) -> None:
        self.path, self.environment = path, {**os.environ}
        for name in (KEY, "ODYSSEY_RUN_DIR", "ODYSSEY_ATTEMPT"):
            self.environment.pop(name, None)

    def result(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.path, *map(str, words)], capture_output=True, text=True, timeout=60, env=self.environment
        )

    def __call__(self, *words: object) -> str:
        done = self.result(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def error(self, *words: object) -> tuple[int, str]:
        done = self.result(*words)
        assert done.returncode and done.stderr.count("\n") == 1, done.stdout + done.stderr
        return done.returncode, done.stderr


@pytest.fixture
def mojo(program: Path) -> Program:
    return Program(program)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a short training in Python, of steps 2, 4 and 6."""
    return train(tmp_path_factory.mktemp("trained"), steps=6)[0]


def train(folder: Path, steps: int) -> tuple[Path, str]:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (96, 1, 28, 28), np.uint8)
    dataset = data.arrays(images, np.arange(96) % 10, classes=10, scale=1 / 255, shift=-0.3)
    trainer = DistributedTrainer(nn.models.build("lenet5", seed=3), optim.SGD(lr=0.05, momentum=0.9), threads=1)
    loader = data.DataLoader(dataset, batch_size=32, shuffle=True, seed=2)
    trainer.fit(loader, epochs=9, steps=steps, checkpoint_dir=folder, checkpoint_every=2, keep=3)
    return folder, trainer.weights_sha256()


# --- digests ---


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 128, 3000])
def test_sha256(mojo, tmp_path, size):
    content = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(content)
    lines = mojo("sha", tmp_path / "x").split()
    assert lines[:3] == [hashlib.sha256(content).hexdigest()] * 3
    keys = [bytes([n]) * n for n in (0, 16, 64, 65, 200)]
    assert lines[3:] == [hmac.new(key, content, hashlib.sha256).hexdigest() for key in keys]


# --- JSON ---

ACCEPTED = [
    "{}", "[]", '{"a":1,"b":[true,false,null]}', ' { "a" : [ 1 , 2.5e3 ] } ', '"\\u00e9\\ud83d\\ude00\\n\\/\\\\"',
    '"é😀"',
    "0", "-0", "-1.5E+10", "1e-400", "12345678901234567890", "[" * 32 + "]" * 32, '"\x7f"', '{"a":{"a":{}}}',
    '"\\b\\f\\t\\r"',
]  # fmt: skip
REFUSED = [
    "", "{", "[1,]", '{"a":1,}', '{"a":1,"a":2}', '{"a":1,"\\u0061":2}', "{'a':1}", "01", "-", "1.", ".5", "1e",
    "+1", "1e999",
    "NaN", "Infinity", "-Infinity", "tru", "nullx", '"a', '"\\x"', '"\\u12"', '"\\ud83d"', '"\\ude00"',
    '"\\ud83d\\u0041"', '"\t"',
    "[1 2]", '{"a" 1}', "{1:2}", "1 2", "[" * 33 + "]" * 33, "123456789012345678901", "\ufeff{}", "[1}", '{"a":1]',
    "--1", "1.e5",
]  # fmt: skip


def test_json_is_read_as_in_python(mojo, tmp_path):
    """What Python accepts and refuses, and what comes out, also for texts of which one character was changed."""
    rng = random.Random(5)
    texts = ACCEPTED + REFUSED
    for text in ACCEPTED:
        for _ in range(12):
            at = rng.randrange(len(text))
            texts.append(
                text[:at] + rng.choice(['"', "\\", "{", "]", ",", "0", "e", ".", "u", " ", ""]) + text[at + 1 :]
            )
    (tmp_path / "x").write_text("\n".join(texts))
    lines = mojo("json", tmp_path / "x").split("\n")[:-1]
    assert len(lines) == len(texts)
    refused = 0
    for text, line in zip(texts, lines, strict=True):
        try:
            value = parse_json(text.encode(), "it")
        except DataError:
            assert line.startswith("refused: it "), (text, line)
            refused += 1
            continue
        assert line.split()[0] == {str: "string", dict: "object", list: "list"}.get(type(value), "other"), (text, line)
        if isinstance(value, str):
            assert line == f"string {json.dumps(value)}"
        elif isinstance(value, (dict, list)):
            assert line == f"{line.split()[0]} {len(value)} {text.strip()}"
    assert len(REFUSED) <= refused < len(texts) - len(ACCEPTED) + 1
    for text, line in zip(ACCEPTED, lines, strict=False):
        assert not line.startswith("refused"), text


def test_floats_are_written_as_in_python(mojo, tmp_path):
    """So that a manifest of a Mojo program is the text that Python would have made."""
    rng = random.Random(7)
    numbers = [
        0.0,
        -0.0,
        0.1,
        1e15,
        1e16,
        1e22,
        123456789012345680.0,
        1e-4,
        1e-5,
        5e-324,
        1.7976931348623157e308,
        0.05,
        2.5e-5,
    ]
    numbers += [2.0**e for e in range(-1074, 1024, 7)]
    numbers += [float(np.float32(rng.random())) for _ in range(500)]
    while len(numbers) < 20_000:
        number = struct.unpack("<d", rng.randbytes(8))[0]
        if np.isfinite(number):
            numbers.append(number)
    (tmp_path / "x").write_bytes(struct.pack(f"<{len(numbers)}d", *numbers))
    lines = mojo("floats", tmp_path / "x").splitlines()
    assert lines == [f"{json.dumps(x)} True" for x in numbers]


# --- safetensors ---


def test_safetensors_are_written_to_the_byte_as_in_python(mojo, tmp_path):
    rng = np.random.default_rng(3)
    arrays = {
        "b": rng.random((3, 4), np.float32), "a": rng.random(5), "c/d.e": np.arange(6, dtype=np.int32).reshape(2, 3),
        "half": rng.random(3).astype(np.float16), "scalar": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 7), np.uint8),
        "flag": np.array([True, False]), "i64": np.arange(3), "u16": np.arange(3, dtype=np.uint16),
    }  # fmt: skip
    with Store(tmp_path / "s") as store:
        folder = store.save(Snapshot(1, {"parameters": arrays}, {}))
    path = folder / "parameters.safetensors"
    mojo("tensors", path, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()


def header(entries: object, size: int) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def tensor(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("content", [
    b"", b"1234567", b"\xff" * 16, (1 << 62).to_bytes(8, "little") + b"{}", header(b"[]", 0),
    header({"a": tensor()}, 7),
    header({"a": tensor()}, 9), header({"a": tensor(dtype="F33")}, 8), header({"a": tensor(shape=[-2])}, 8),
    header({"a": tensor(shape=[1 << 62, 4])}, 8), header({"a": tensor(shape=2)}, 8),
    header({"a": tensor(shape=[1] * 9)}, 4),
    header({"a": tensor(offsets=[8, 0])}, 8), header({"a": tensor(offsets=[0, 8, 8])}, 8),
    header({"../a": tensor()}, 8),
    header({"/a": tensor()}, 8), header({"": tensor()}, 8), header({"a b": tensor()}, 8),
    header({"a": {"dtype": "F32"}}, 8),
    header({"a": tensor(), "b": tensor()}, 8), header({"a": tensor(), "b": tensor(offsets=[12, 20])}, 20),
    header({"a": tensor(), "__metadata__": {"x": 1}}, 8), header({"a": tensor(shape=[True, 2])}, 8),
    header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', 8), header({"a": tensor(shape=[2.0])}, 8),
])  # fmt: skip
def test_a_wrong_safetensors_file_is_refused(mojo, tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    done = mojo.result("tensors", tmp_path / "x", tmp_path / "out")
    assert done.returncode == 70 and done.stderr.startswith("odyssey: ") and not (tmp_path / "out").exists()


# --- checkpoints ---


def test_a_checkpoint_comes_back_to_the_byte(mojo, tmp_path, trained):
    mojo("copy", trained, tmp_path / "copy")
    for name in ("manifest.json", "parameters.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "copy/step_00000006" / name).read_bytes() == (trained / "step_00000006" / name).read_bytes()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(tmp_path / "copy")) == [".lock", "step_00000006"]
    assert (tmp_path / "copy/.lock").read_bytes() == b""


def test_python_goes_on_from_a_checkpoint_that_mojo_wrote(mojo, tmp_path, trained):
    mojo("copy", trained, tmp_path / "copy")
    _, undisturbed = train(tmp_path / "whole", steps=8)
    _, resumed = train(tmp_path / "copy", steps=8)
    assert resumed == undisturbed
    assert (tmp_path / "copy/step_00000008").is_dir()


def test_what_is_read_is_what_python_reads(mojo, trained):
    snapshot, _ = Store(trained, owner=False).newest()
    lines = mojo("newest", trained).splitlines()
    assert lines[0] == f"step 6 {json.dumps(snapshot.values, separators=(',', ':'))}"
    assert set(lines[1:]) == {
        f"{stem} {name} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for stem, arrays in snapshot.arrays.items()
        for name, array in arrays.items()
    }
    assert mojo("load", trained / "step_00000006") == mojo("newest", trained)


def test_the_newest_two_stay(mojo, tmp_path):
    assert mojo("steps", tmp_path / "s") == "[step_00000002, step_00000003]\n"
    with Store(tmp_path / "s") as store:
        snapshot, refused = store.newest()
        assert not refused and snapshot.values == {"step": 3, "half": 0.5}
        assert snapshot.arrays["parameters"]["x"].tolist() == [3.5, -1]


def test_every_flipped_bit_and_every_cut_is_found(mojo, tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "s")
    lines = mojo("flips", folder, 24).splitlines()
    assert lines[-1] == "144 refused"
    assert all(line.startswith("[checkpoint] step_00000006 is refused: ") for line in lines[:-1])
    assert all(line.endswith("; step_00000004 is used") for line in lines[:-1])


def test_what_python_refuses_is_refused(mojo, tmp_path, trained):
    """Manifests and headers with changes of all kinds, the former with a digest that is right again."""
    rng = random.Random(11)
    manifest = (trained / "step_00000006/manifest.json").read_bytes()
    start = (trained / "step_00000006/parameters.safetensors").read_bytes()[:1200]
    header = start[8 : 8 + int.from_bytes(start[:8], "little")]
    texts = []
    for _ in range(1500):
        body = changed(rng, manifest[: manifest.rindex(b',\n"sha256"')])
        texts.append((b"m", body + b',\n"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'))
        text = changed(rng, header)
        texts.append((b"h", len(text).to_bytes(8, "little") + text))
    (tmp_path / "x").write_bytes(b"".join(kind + len(t).to_bytes(4, "little") + t for kind, t in texts))
    lines = mojo("parse", tmp_path / "x").splitlines()
    assert len(lines) == len(texts)
    accepted = 0
    for (kind, text), line in zip(texts, lines, strict=True):
        try:
            parse_manifest(text) if kind == b"m" else parse_header(text, len(text) + 64)
        except CheckpointError as problem:
            # the values of a manifest are not written anew in Mojo: there its digest alone says that nothing changed
            assert line.startswith("refused: ") or "does not match its SHA-256" in str(problem), (problem, text)
        else:
            assert line == "accepted", (line, text)
            accepted += 1
    assert 10 < accepted < len(texts) - 1000


def changed(rng: random.Random, text: bytes) -> bytes:
    """With one to three pieces taken out, doubled, exchanged or overwritten."""
    words = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-",
        b"0",
        b"1",
        b"1.5",
        b"1e9",
        b"null",
        b"true",
        b"\\",
        b"\xff",
        b"\0",
        b" ",
    ]
    for _ in range(rng.randint(1, 3)):
        a = rng.randrange(len(text))
        b = min(len(text), a + rng.choice([1, 1, 1, 2, 5, 40]))
        piece = rng.choice(
            [b"", rng.choice(words), text[a:b] * 2, bytes([text[a] ^ 1 << rng.randrange(8)]), rng.choice(words)]
        )
        text = text[:a] + piece + text[b:]
    return text


def test_killed_while_saving(mojo, tmp_path):
    """At whatever moment: the newest is whole, and no older than the last save that had returned."""
    rng = random.Random(2)
    for i in range(8):
        folder = tmp_path / str(i)
        saving = subprocess.Popen(
            [mojo.path, "on and on", folder], stdout=subprocess.PIPE, text=True, env=mojo.environment
        )
        for _ in range(3):
            last = int(saving.stdout.readline())
        time.sleep(rng.random() * 0.03)
        saving.kill()
        last = max([last, *map(int, saving.communicate()[0].split())])
        with Store(folder) as store:
            snapshot, refused = store.newest()
            assert not refused and snapshot.step >= last
            assert set(snapshot.arrays["parameters"]["x"].tolist()) == {float(snapshot.values["step"])}
            assert not [name for name in os.listdir(folder) if name.startswith(".step")]


def test_what_is_refused_is_named(mojo, tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "s")
    path = folder / "step_00000006/parameters.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (folder / "step_00000004/optimizer.safetensors").unlink()
    shutil.copytree(folder / "step_00000002", folder / "step_00000005")
    assert mojo("newest", folder).splitlines()[:3] == [
        "[checkpoint] step_00000006 is refused: parameters.safetensors: fc3.weight does not match its SHA-256; "
        "step_00000002 is used",
        "[checkpoint] step_00000005 is refused: manifest.json is that of step_00000002; step_00000002 is used",
        "[checkpoint] step_00000004 is refused: optimizer.safetensors: it is missing; step_00000002 is used",
    ]
    code, line = mojo.error("load", folder / "step_00000006")
    assert code == 65 and "step_00000006 is refused: parameters.safetensors: fc3.weight does not match" in line
    assert mojo("newest", tmp_path / "nowhere") == ""


def test_a_link_inside_is_not_followed(mojo, tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "s")
    path = folder / "step_00000006/parameters.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "step_00000006 is refused: parameters.safetensors: it cannot be opened: " in mojo("newest", folder)


def test_signed(mojo, tmp_path, trained):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    key.chmod(0o600)
    mojo.environment[KEY] = str(key)
    assert "is not signed, and a key is given; no other is there" in mojo("newest", trained)
    mojo("steps", tmp_path / "s")
    snapshot, refused = Store(tmp_path / "s", owner=False, key=read_key(key)).newest()
    assert snapshot.step == 3 and not refused
    assert mojo("newest", tmp_path / "s").startswith("step 3 ")
    key.write_text("another key of 32 bytes, or more")
    assert "is not signed with the key that is given" in mojo("newest", tmp_path / "s")
    del mojo.environment[KEY]
    assert mojo("newest", tmp_path / "s").startswith("step 3 ")
    key.chmod(0o644)
    mojo.environment[KEY] = str(key)
    code, line = mojo.error("newest", tmp_path / "s")
    assert code == 64 and "can be read by others; chmod 600 it" in line


def test_one_that_is_not_finite_is_not_written(mojo, tmp_path):
    code, line = mojo.error("nan", tmp_path / "s")
    assert code == 65 and "step_00000009 is not saved: parameters/x holds NaN or infinity" in line
    assert os.listdir(tmp_path / "s") == [".lock"]


def test_one_writer_in_whichever_language(mojo, tmp_path, trained):
    folder = tmp_path / "s"
    with Store(folder):
        code, line = mojo.error("steps", folder)
        assert code == 73 and f"is in use by pid {os.getpid()} on " in line
    held = subprocess.Popen([mojo.path, "hold", folder], stdout=subprocess.PIPE, text=True, env=mojo.environment)
    try:
        assert held.stdout.readline() == "held\n"
        with pytest.raises(Exception, match=f"in use by pid {held.pid} on "):
            Store(folder)
        mojo.environment.update(ODYSSEY_RUN_DIR=str(tmp_path), ODYSSEY_ATTEMPT="2")
        assert "step_00000003" in mojo("steps", folder)  # a later attempt takes it
    finally:
        held.kill()
        held.communicate()
    (tmp_path / "attempt.json").write_text('{"attempt": 3}')
    code, line = mojo.error("copy", trained, folder)
    assert code == 73 and "attempt 2 is over, attempt 3 writes now" in line


def test_what_dead_writers_left_is_removed(mojo, tmp_path):
    folder = tmp_path / "s"
    mojo("steps", folder)
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = os.uname().nodename
    for name in (
        f".step_00000007.tmp.0.{host}.{gone.pid}",
        f".step_00000007.tmp.0.{host}.{os.getppid()}",
        ".step_7.tmp",
    ):
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text("{}")
    mojo("steps", folder)
    left = [name for name in os.listdir(folder) if name.startswith(".step")]
    assert sorted(left) == sorted([f".step_00000007.tmp.0.{host}.{os.getppid()}", ".step_7.tmp"])


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's directory takes root to make")
def test_a_directory_of_anybody_is_refused(mojo, tmp_path, trained):
    folder = shutil.copytree(trained, tmp_path / "s")
    folder.chmod(0o777)
    os.chown(folder, 12345, 12345)
    code, line = mojo.error("newest", folder)
    assert code == 65 and "it belongs to user 12345 and everybody may write to it" in line


def test_a_full_disk_is_an_error_and_leaves_nothing(mojo, tmp_path, trained):
    """Files of a process may have 100,000 bytes here."""
    script = 'ulimit -f 200; trap "" XFSZ; exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", mojo.path, "copy", trained, tmp_path / "s"],
        capture_output=True, text=True, timeout=60, env=mojo.environment,
    )  # fmt: skip
    assert done.returncode == 73, done.stderr
    assert (
        "step_00000006 cannot be saved in " in done.stderr and "parameters.safetensors: File too large" in done.stderr
    )
    assert os.listdir(tmp_path / "s") == [".lock"]


# --- IDX ---


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def stored(content: bytes) -> bytes:
    packer = zlib.compressobj(level=0, wbits=31)
    return packer.compress(content) + packer.flush()


def fixed(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31, strategy=zlib.Z_FIXED)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize("pack", [bytes, stored, fixed, gzip.compress, lambda c: gzip.compress(c, 1)], ids=str)
def test_idx(mojo, tmp_path, pack):
    rng = np.random.default_rng(4)
    for array in (
        rng.integers(0, 256, (50, 28, 28), np.uint8),
        rng.integers(0, 3, (9, 100, 100), np.uint8),
        np.zeros((1, 1, 70000), np.uint8),
    ):
        (tmp_path / "x").write_bytes(pack(idx(array)))
        expected = f"{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}\n"
        assert mojo("idx", tmp_path / "x", 3) == expected


def test_a_wrong_idx_file_is_refused(mojo, tmp_path):
    good = idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    packed = gzip.compress(idx(np.random.default_rng(1).integers(0, 9, (40, 9, 9), np.uint8)))
    wrong = {
        "holds 3 bytes": good[:3], "does not begin with the bytes 0 0 8": b"\0\0\x0d" + good[3:],
        "has 2 dimensions; 3 expected": idx(np.ones((2, 2), np.uint8)),
        "ends inside its header": good[:10], "has the size 3 x 0 x 2": good[:4] + struct.pack(">3I", 3, 0, 2),
        "(3 x 2 x 2): 27 bytes found": good[:-1], "(3 x 2 x 2): 29 bytes found": good + b"\0",
        "4294967295 x 4294967295 x 4294967295): 28 bytes": good[:4] + b"\xff" * 12 + good[16:], "cannot be read": None,
    }  # fmt: skip
    for says, content in wrong.items():
        path = tmp_path / ("x" if content else "none")
        path.write_bytes(content) if content else None
        code, line = mojo.error("idx", path, 3)
        assert code == 65 and says in line, line
    for at in range(0, len(packed), 61):
        for damaged in (packed[:at], packed[:at] + bytes([packed[at] ^ 4]) + packed[at + 1 :]):
            (tmp_path / "x").write_bytes(damaged)
            try:
                intact = gzip.decompress(damaged) == gzip.decompress(packed)  # bytes that say nothing, such as the time
            except (OSError, EOFError, zlib.error):
                intact = False
            done = mojo.result("idx", tmp_path / "x", 3)
            assert (done.returncode == 0) == intact, (at, done.stderr)
    bomb = gzip.compress(bytes(1 << 20)) + b"more"
    (tmp_path / "x").write_bytes(bomb)
    assert "is a damaged gzip file" in mojo.error("idx", tmp_path / "x", 3)[1]


def test_what_was_unpacked_is_kept(mojo, tmp_path):
    content = idx(np.arange(60, dtype=np.uint8).reshape(3, 4, 5))
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    kept = tmp_path / "cache" / f"{digest}.idx"
    first = mojo("unpacked", tmp_path / "x.gz", kept.parent, digest)
    assert kept.read_bytes() == content and os.listdir(kept.parent) == [kept.name]
    (tmp_path / "x.gz").unlink()
    assert mojo("unpacked", tmp_path / "x.gz", kept.parent, digest) == first
    kept.write_bytes(content[:-1])
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    assert mojo("unpacked", tmp_path / "x.gz", kept.parent, digest) == first
    assert kept.read_bytes() == content
    code, line = mojo.error("unpacked", tmp_path / "x.gz", kept.parent, "0" * 64)
    assert code == 65 and "was altered: its SHA-256 starts with " + digest[:12] in line
