"""Checkpoints that were altered, cut, mixed up or put together by somebody: each is refused by
name, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors

from odyssey.checkpoints import CheckpointError, Snapshot, Store, read_key, reader
from odyssey.checkpoints.header import encode_header, make_header
from odyssey.checkpoints.manifest import parse_manifest
from odyssey.errors import ConfigError

FILES = (
    "manifest.json",
    "optimizer.safetensors",
    "parameters.safetensors",
    "residuals.safetensors",
)


def snapshot(step: int) -> Snapshot:
    """Files of 2 to 20 KiB; everything depends on the step, and nothing else does."""
    numbers = np.random.default_rng(step)

    def array(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape, dtype=np.float32)

    return Snapshot(
        step,
        {
            "parameters": {
                "conv1.weight": array(6, 1, 5, 5),
                "fc1.weight": array(40, 100),
                "fc1.bias": array(40),
            },
            "optimizer": {
                "momentum/fc1.weight": array(40, 100),
                "t": np.array(step, dtype=np.int64),
            },
            "residuals": {"rank0/fc1.weight": array(500)},
        },
        {"cursor": 128 * step},
    )


@pytest.fixture
def store(tmp_path):
    """Two valid checkpoints, of steps 100 and 120; for reading."""
    with Store(tmp_path / "c") as store:
        store.save(snapshot(100))
        store.save(snapshot(120))
    return Store(tmp_path / "c", owner=False)


def refused(store: Store) -> str:
    """Why step 120 is refused; checks that step 100 is used then, and that both ways of reading
    agree.
    """
    found, [refusal] = store.newest()
    assert found is not None and found.step == 100
    assert refusal.path == store.path_of(120)
    expected = f"[checkpoint] step_00000120 is refused: {refusal.reason}; step_00000100 is used"
    assert refusal.message(found) == expected and "\n" not in expected
    with pytest.raises(CheckpointError) as raised:
        store.load(store.path_of(120))
    assert str(raised.value) == f"[checkpoint] {store.path_of(120)} is refused: {refusal.reason}"
    return refusal.reason


def tensor_at(path: Path, at: int) -> str | None:
    """Which tensor the byte `at` of a file belongs to; None for the header.

    Found without the code under test.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        begin, end = entry["data_offsets"]
        if start + begin <= at < start + end:
            return name
    assert at < start
    return None


def test_600_flipped_bits_are_found_and_named(store):
    dice = random.Random(31)
    named: dict[str | None, int] = {}
    for number in range(600):
        path = store.path_of(120) / FILES[number % len(FILES)]
        good = path.read_bytes()
        header = (
            8 + int.from_bytes(good[:8], "little") if path.suffix == ".safetensors" else len(good)
        )
        at = dice.randrange(header if number % 8 >= 4 else len(good))  # half of them in headers
        tensor = None if path.name == "manifest.json" else tensor_at(path, at)
        bad = bytearray(good)
        bad[at] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        reason = refused(store)
        assert reason.startswith(path.name), reason
        if tensor is not None:
            assert reason == f"{path.name}: {tensor} does not match its SHA-256"
        named[tensor] = named.get(tensor, 0) + 1
        path.write_bytes(good)
    assert store.newest()[1] == []
    assert named.pop(None) > 300 and set(named) > {
        "conv1.weight",
        "fc1.weight",
        "momentum/fc1.weight",
    }


def test_every_bit_of_a_manifest_counts(tmp_path):
    with Store(tmp_path) as store:
        values = {
            "exponent": 1e-05,
            "escape": "é",
            "big": 1e300,
            "zero": -0.0,
            "list": [[], {}, None, True],
        }
        path = store.save(Snapshot(1, {"parameters": {"w": np.ones(1, "f4")}}, values))
    good = (path / "manifest.json").read_bytes()
    assert parse_manifest(good).values == values
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match=r"^manifest\.json"):
            parse_manifest(bytes(bad))
    for more in (b"\n", b" ", b"\0", b"{}"):
        with pytest.raises(CheckpointError, match=r"^manifest\.json"):
            parse_manifest(good + more)


def test_truncation_at_every_4_kib_and_near_each_end_is_found_and_named(store):
    count = 0
    for name in FILES:
        path = store.path_of(120) / name
        good = path.read_bytes()
        for size in sorted({*range(0, len(good), 4096), 1, 7, 8, 9, 100, len(good) - 1}):
            path.write_bytes(good[:size])
            assert refused(store).startswith(name)
            count += 1
        path.write_bytes(good + b"\0")
        assert refused(store).startswith(name)
        path.write_bytes(good)
    assert count > 30 and store.newest()[1] == []


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_named(store, name):
    (store.path_of(120) / name).unlink()
    assert refused(store) == f"{name} is missing"


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_is_found_and_named(store, name):
    shutil.copy(store.path_of(100) / name, store.path_of(120) / name)
    reason = refused(store)
    if name == "manifest.json":
        assert reason == "manifest.json is that of step_00000100"
    else:
        assert reason.startswith(f"{name}: ") and reason.endswith(" does not match its SHA-256")


def test_files_that_changed_places_are_found(store):
    one, other = (
        store.path_of(120) / "optimizer.safetensors",
        store.path_of(120) / "residuals.safetensors",
    )
    one.rename(one.parent / "aside")
    other.rename(one)
    (one.parent / "aside").rename(other)
    assert (
        refused(store)
        == f"optimizer.safetensors: it has {one.stat().st_size} bytes, not {other.stat().st_size}"
    )


def test_files_of_the_same_size_that_changed_places_are_found(tmp_path):
    arrays = {
        stem: {"w": np.full(4, number, np.float32)}
        for number, stem in enumerate(("parameters", "optimizer"))
    }
    with Store(tmp_path) as store:
        path = store.save(Snapshot(1, arrays))
        (path / "parameters.safetensors").rename(path / "aside")
        (path / "optimizer.safetensors").rename(path / "parameters.safetensors")
        (path / "aside").rename(path / "optimizer.safetensors")
        with pytest.raises(
            CheckpointError, match=r"parameters\.safetensors: w does not match its SHA-256"
        ):
            store.load(path)


def test_a_whole_checkpoint_under_another_name_is_refused(store):
    shutil.rmtree(store.path_of(120))
    store.path_of(100).rename(store.path_of(120))
    assert store.newest() == (
        None,
        [(store.path_of(120), "manifest.json is that of step_00000100")],
    )
    kept = store.path_of(120).rename(store.folder / "best")
    assert store.load(kept).step == 100, "a name that says no step is no contradiction"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["directory", "fifo", "link"])
def test_what_is_no_file_is_refused_at_once(store, name, what):
    path = store.path_of(120) / name
    path.rename(store.folder / "aside")
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(store.folder / "aside")
    assert refused(store).startswith(name)


def test_a_file_that_is_not_listed_is_left_alone(store):
    (store.path_of(120) / "notes.txt").write_text("mine")
    assert store.newest()[1] == []


def test_two_damaged_ones_are_both_named(store):
    for step in (100, 120):
        (store.path_of(step) / "manifest.json").unlink()
    found, refusals = store.newest()
    assert found is None
    assert [refusal.message(None) for refusal in refusals] == [
        f"[checkpoint] step_00000{step} is refused: manifest.json is missing; no other is there"
        for step in (120, 100)
    ]


def test_one_that_goes_away_while_it_is_read_is_no_damage(store, monkeypatch):
    load = reader.load

    def removed(path, *given, **more):
        if path.name == "step_00000120":
            shutil.rmtree(path)
        return load(path, *given, **more)

    monkeypatch.setattr(reader, "load", removed)
    found, refusals = store.newest()
    assert found is not None and found.step == 100 and refusals == []


def test_one_that_is_replaced_while_it_is_read_is_no_damage(store, monkeypatch):
    load, replaced = reader.load, []

    def replace(path, *given, **more):
        if not replaced:
            replaced.append(path)
            path.rename(store.folder / "before")
            with Store(store.folder / "other") as other:
                other.save(snapshot(120))
            (store.folder / "other" / path.name).rename(path)
            raise CheckpointError("optimizer.safetensors is missing")
        return load(path, *given, **more)

    monkeypatch.setattr(reader, "load", replace)
    found, refusals = store.newest()
    assert found is not None and found.step == 120 and refusals == []


# --- manifests and headers that somebody made -----------------------------------------------------


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), name: object = "a"
) -> dict:
    return {
        "name": name,
        "dtype": dtype,
        "shape": shape,
        "data_offsets": offsets,
        "sha256": "0" * 64,
    }


BAD = {
    "field more": (
        [{**entry(), "x": 1}],
        8,
        "a tensor has the entries name dtype shape data_offsets sha256",
    ),
    "field less": ([{"name": "a", "dtype": "F32"}], 8, "a tensor has the entries"),
    "no object": ([[]], 0, "a tensor has the entries"),
    "dtype": ([entry("F33")], 8, "dtype 'F33' is none of"),
    "dtype no text": ([entry(["F32"])], 8, "is none of"),
    "negative": ([entry(shape=[-2])], 8, "a shape is"),
    "float": ([entry(shape=[2.0])], 8, "a shape is"),
    "bool": ([entry(shape=[True, 2])], 8, "a shape is"),
    "9 dimensions": ([entry(shape=[1] * 8 + [2])], 8, "a shape is"),
    "2^63": ([entry(shape=[2**63, 0], offsets=[0, 0])], 0, "a shape is"),
    "overflow": ([entry(shape=[2**62, 2**62, 16], offsets=[0, 0])], 0, "is not 0 bytes"),
    "overflow of 64 bits": ([entry(shape=[2**62 + 2])], 8, "is not 8 bytes"),
    "1 TB": ([entry(shape=[2**38], offsets=[0, 2**40])], 8, "are not within the 8 bytes"),
    "offsets backwards": ([entry(offsets=[8, 0])], 8, "are not within"),
    "one offset": ([entry(offsets=[8])], 8, "are not within"),
    "past the end": ([entry(offsets=[8, 16])], 8, "are not within"),
    "gap before": ([entry(offsets=[4, 12])], 12, "a gap or an overlap"),
    "overlap": ([entry(), entry(offsets=[4, 12], name="b")], 12, "a gap or an overlap"),
    "same place": ([entry(), entry(name="b")], 8, "a gap or an overlap"),
    "name twice": ([entry(), entry(offsets=[8, 16])], 16, "names a tensor twice"),
    "absolute": ([entry(name="/a")], 8, "neither absolute"),
    "parent": ([entry(name="a/../b")], 8, "neither absolute nor has .."),
    "empty name": ([entry(name="")], 8, "a tensor's name is"),
    "escape": ([entry(name="\x1b[2J")], 8, "a tensor's name is"),
    "letter": ([entry(name="ä")], 8, "a tensor's name is"),
    "long": ([entry(name="a" * 513)], 8, "a tensor's name is"),
    "percent alone": ([entry(name="a%")], 8, "a tensor's name is"),
    "small hexadecimal": ([entry(name="a%c3%a4")], 8, "a tensor's name is"),
    "percent of a letter": ([entry(name="%41")], 8, "UTF-8 of other characters"),
    "percent of a slash": ([entry(name="a%2Fb")], 8, "UTF-8 of other characters"),
    "percent of dots": ([entry(name="a/%2E%2E/b")], 8, "UTF-8 of other characters"),
    "no UTF-8": ([entry(name="a%FF")], 8, "UTF-8 of other characters"),
    "too many": ([{}] * 100_001, 8, "100001 tensors are more than 100000"),
}


@pytest.mark.parametrize(("tensors", "size", "reason"), BAD.values(), ids=BAD.keys())
def test_tensors_that_cannot_be_are_refused(tensors, size, reason):
    file = {"name": "a.safetensors", "size": size, "header_sha256": "0" * 64, "tensors": tensors}
    text = {
        "format": "odyssey checkpoint",
        "version": 1,
        "step": 1,
        "attempt": 0,
        "values": {},
        "files": [file],
    }
    with pytest.raises(CheckpointError, match=reason) as raised:
        parse_manifest(json.dumps({**text, "sha256": "0" * 64}).encode())
    assert len(str(raised.value)) < 400 and str(raised.value).isprintable()


HEADERS = {
    "metadata": lambda text: text.replace(b"{", b'{"__metadata__":{"a":"b"},', 1),
    "key twice": lambda text: text.replace(b"{", b'{"w":{},', 1),
    "another name": lambda text: text.replace(b'"w"', b'"v"'),
    "another shape": lambda text: text.replace(b"[2,2]", b"[1,4]"),
    "space inside": lambda text: text.replace(b":", b": ", 1),
    "none": lambda text: b"",
    "data behind the tensors": lambda text: text,
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_is_not_that_of_the_manifests_tensors_is_refused(tmp_path, what):
    """Also where somebody has made all digests anew."""
    with Store(tmp_path) as store:
        path = store.save(Snapshot(1, {"parameters": {"w": np.ones((2, 2), "f4")}}))
    manifest, file = (
        parse_manifest((path / "manifest.json").read_bytes()),
        path / "parameters.safetensors",
    )
    data, length = file.read_bytes(), int.from_bytes(file.read_bytes()[:8], "little")
    text = HEADERS[what](data[8 : 8 + length])
    header = len(text).to_bytes(8, "little") + text
    file.write_bytes(header + data[8 + length :] + bytes(4 if what.startswith("data") else 0))
    made = manifest.files[0]
    made = made._replace(size=file.stat().st_size, header_sha256=hashlib.sha256(header).hexdigest())
    (path / "manifest.json").write_bytes(manifest._replace(files=(made,)).encoded())
    with pytest.raises(
        CheckpointError,
        match=r"parameters\.safetensors: (header and tensors fill|its header does not)",
    ):
        store.load(path)


def test_the_library_reads_what_is_written():
    arrays = {"a/b.c-d_1": np.zeros((2, 3), "f8"), "e": np.zeros(0, "u1"), "x": np.array(True)}
    made, tensors = make_header(
        {name: (array.dtype, array.shape) for name, array in arrays.items()}
    )
    assert len(made) % 8 == 0 and made == encode_header(tensors)
    found = dict(safetensors.deserialize(made + bytes(49)))
    assert {name: (one["dtype"], tuple(one["shape"])) for name, one in found.items()} == {
        one.name: (one.dtype, one.shape) for one in tensors
    }


# --- signatures -----------------------------------------------------------------------------------


KEY, OTHER = b"k" * 32, b"o" * 32


def test_with_a_key_only_what_was_signed_with_it_is_used(tmp_path):
    with Store(tmp_path / "signed", key=KEY) as signed, Store(tmp_path / "plain") as plain:
        for store in (signed, plain):
            store.save(snapshot(1))
        assert signed.newest()[0].step == 1
    reasons = {
        (folder, key): [
            one.reason for one in Store(tmp_path / folder, owner=False, key=key).newest()[1]
        ]
        for folder in ("signed", "plain")
        for key in (None, KEY, OTHER)
    }
    assert reasons == {
        ("signed", None): [],
        ("signed", KEY): [],
        ("signed", OTHER): ["manifest.json is not signed with the key that is given"],
        ("plain", None): [],
        ("plain", KEY): ["manifest.json is not signed, and a key is given"],
        ("plain", OTHER): ["manifest.json is not signed, and a key is given"],
    }


def test_a_checksum_can_be_made_anew_and_a_signature_cannot(tmp_path):
    """What somebody without the key can do: change the weights and all digests that need none."""
    with Store(tmp_path, key=KEY) as store:
        path = store.save(snapshot(1))
    mac = json.loads((path / "manifest.json").read_text())["hmac_sha256"]
    with Store(tmp_path / "forger") as forger:
        forged = forger.save(Snapshot(1, snapshot(2).arrays, snapshot(1).values))
    shutil.rmtree(path)
    shutil.copytree(forged, path)
    assert Store(tmp_path, owner=False).newest()[1] == []
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"\n}\n', f'",\n"hmac_sha256":"{mac}"\n}}\n'))
    assert Store(tmp_path, owner=False).newest()[1] == []
    [refusal] = Store(tmp_path, owner=False, key=KEY).newest()[1]
    assert refusal.reason == "manifest.json is not signed with the key that is given"


def test_a_key_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    assert read_key(path) == KEY
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600 it"):
        read_key(path)
    path.chmod(0o600)
    for data in (b"", b"short", b"x" * 5000):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="16 to 4096 bytes"):
            read_key(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError):
            read_key(missing)
