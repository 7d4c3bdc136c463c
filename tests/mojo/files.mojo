"""What test_mojo_files.py asks of the readers and writers of files: a program with a word for each.

Not a test by itself: what it prints, and what it leaves on the disk, is compared there.
"""

from std.sys import argv
from std.time import perf_counter_ns, sleep

from shared.training.checkpoint import Store, load
from shared.training.snapshot import Snapshot
from shared.training.files import read_file, remove, write_new
from shared.training.idx import read_idx, read_unpacked
from shared.training.json import Json, json, parse_json
from shared.training.manifest import parse_manifest
from shared.training.safetensors import (
    load_tensors,
    parse_header,
    save_tensors,
)
from shared.training.sha256 import Sha256, hmac_sha256, sha256
from shared.training.world import stop


def main():
    try:
        run(String(argv()[1]), String(argv()[2]))
    except e:
        stop(e)


def run(word: String, path: String) raises:
    if word == "sha":
        sha(path)
    elif word == "json":
        texts(path)
    elif word == "floats":
        floats(path)
    elif word == "tensors":  # read and written again
        save_tensors(String(argv()[3]), load_tensors(path))
    elif word == "load":
        show(load(path))
    elif word == "newest":
        var store = Store(path, owner=False)
        var found = store.newest()
        for line in found.refused:
            print(line)
        if found.snapshot:
            show(found.snapshot.value())
    elif word == "copy":  # the newest checkpoint of one directory into another
        var store = Store(path, owner=False)
        var found = store.newest()
        var other = Store(String(argv()[3]))
        other.save(found.snapshot.value())
    elif word == "steps":  # four of them, of which two stay
        var store = Store(path)
        for step in range(4):
            var made = Snapshot(step, json_object(step))
            var value = [Float32(step) + 0.5, -1]
            var p = Pointer(to=value).unsafe_bitcast[Float32]()
            made.add(
                "parameters",
                "x",
                [2],
                p.unsafe_origin_cast[MutUntrackedOrigin](),
            )
            _ = value^
            store.save(made)
            store.save(made)
        print(store.names())
    elif word == "nan":
        var store = Store(path)
        var made = Snapshot(9, json_object(0))
        var value: Float32 = 1
        value /= 0
        var p = Pointer(to=value).unsafe_origin_cast[MutUntrackedOrigin]()
        made.add("parameters", "x", [1], p)
        _ = value
        store.save(made)
    elif word == "on and on":
        save_on_and_on(path)
    elif word == "parse":
        parse(path)
    elif word == "hold":  # the lock, until somebody ends this
        var store = Store(path)
        print("held", flush=True)
        sleep(60.0)
        print(store.names())
    elif word == "flips":
        flips(path, Int(String(argv()[3])))
    elif word == "idx":
        var found = read_idx(path, ndim=Int(String(argv()[3])))
        print(found.shape, sha256(Span(found.data)))
    elif word == "unpacked":
        var found = read_unpacked(path, String(argv()[3]), 3, String(argv()[4]))
        print(found.shape, sha256(Span(found.data)))
    else:
        raise Error("[test] what is ", word)


def save_on_and_on(path: String) raises:
    """A checkpoint after the other, each twice with other values, until somebody ends this.
    """
    var store = Store(path)
    var floats = List[Float32](length=5000, fill=0)
    var p = Pointer[Float32, MutUntrackedOrigin](
        unsafe_from_address=Int(floats.unsafe_ptr())
    )
    for i in range(1_000_000):
        var made = Snapshot(i // 2, json_object(i))
        for j in range(len(floats)):
            floats[j] = Float32(i)
        made.add("parameters", "x", [5000], p)
        store.save(made)
        print(i // 2, flush=True)
    _ = floats^


def parse(path: String) raises:
    """Texts one after the other, each behind a letter and 4 bytes of length: a manifest (m) or a header (h). Which of
    them are accepted.
    """
    var data = read_file(path, 1 << 30)
    var at = 0
    while at < len(data):
        var n = 0
        for i in range(4):
            n |= Int(data[at + 1 + i]) << (8 * i)
        var text = List[UInt8](Span(data)[at + 5 : at + 5 + n])
        try:
            if data[at] == 109:
                _ = parse_manifest(text, None)
            else:
                _ = parse_header(text, len(text) + 64)
            print("accepted")
        except e:
            print("refused:", e)
        at += 5 + n


def json_object(n: Int) raises -> Json:
    var text = String('{"step":', n, ',"half":', 0.5, "}")
    return parse_json(text.as_bytes(), "the test's")


def sha(path: String) raises:
    """In one piece, without the processor's instructions, in pieces of all kinds, and with a key.
    """
    var data = read_file(path, 1 << 30)
    var made = Sha256()
    var at = 0
    var n = 0
    while at < len(data):
        var end = min(len(data), at + n)
        made.update(Span(data)[at:end])
        at = end
        n = (n * 7 + 3) % 301
    print(sha256(Span(data)))
    var portable = Sha256()
    portable._fast = False
    portable.update(Span(data))
    print(portable.hex())
    print(made.hex())
    for bytes in [0, 16, 64, 65, 200]:
        var key = List[UInt8](length=bytes, fill=UInt8(bytes))
        print(hmac_sha256(Span(key), Span(data)))


def texts(path: String) raises:
    """One JSON text in each line; what it is, or that it is refused."""
    for line in String(
        StringSpan(unsafe_from_utf8=Span(read_file(path, 1 << 30)))
    ).split("\n"):
        try:
            var found = parse_json(line.as_bytes(), "it")
            if found.is_string():
                print("string", json(found.string()))
            elif found.is_object():
                print("object", len(found.keys()), found)
            elif found.is_list():
                print("list", len(found.items()), found)
            else:
                print("other", found)
        except e:
            print("refused:", e)


def floats(path: String) raises:
    """Of the bits of float64 numbers: how they are written, and whether they are read again as they were.
    """
    var data = read_file(path, 1 << 30)
    var numbers = data.unsafe_ptr().unsafe_bitcast[Float64]()
    for i in range(len(data) // 8):
        var x = numbers[unsafe_offset=i]
        var text = json(x)
        print(text, text.number().to_bits() == x.to_bits())
    _ = data^


def show(snapshot: Snapshot):
    print("step", snapshot.step, snapshot.values)
    for i in range(len(snapshot.stems)):
        for one in snapshot.files[i].tensors:
            print(snapshot.stems[i], one.name, sha256(Span(one.data)))


def flips(path: String, count: Int) raises:
    """Flips a bit at so many places of each file of the newest checkpoint in turn: each must be refused by the name of
    its file, and the one before be used. Then cuts each file at as many places.
    """
    var store = Store(path, owner=False)
    var names = store.names()
    var newest = names[len(names) - 1]
    var refused = 0
    for file in [
        "manifest.json",
        "parameters.safetensors",
        "optimizer.safetensors",
    ]:
        var name = String(path, "/", newest, "/", file)
        var data = read_file(name, 1 << 30)
        for i in range(2 * count):
            var at = len(data) * (i // 2) // count
            if i % 4 == 0:  # headers, and the manifest, from the beginning
                at = (i // 4) * 7 % min(len(data), 2000)
            var other = data.copy()
            if i % 2 == 0 or i % 8 == 1:
                other[at] ^= UInt8(1) << UInt8(i % 8)
            else:
                other = List[UInt8](Span(data)[0:at])
            remove(name)
            write_new(name, Span(other))
            var found = store.newest()
            if len(found.refused) != 1 or not found.snapshot:
                raise Error("[test] byte ", at, " of ", name, " is not missed")
            ref line = found.refused[0]
            if file not in line or found.snapshot.value().step == 6:
                raise Error("[test] byte ", at, " of ", name, ": ", line)
            if i < 2:
                print(line)
            refused += 1
        remove(name)
        write_new(name, Span(data))
    if len(store.newest().refused):
        raise Error("[test] it is not as it was")
    print(refused, "refused")
