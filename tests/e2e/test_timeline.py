"""Timelines: files that keep the rules of Chrome's and Perfetto's format, on every layout, and
bits as without.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.base import slot
from odyssey.comm import mock
from odyssey.core import native
from odyssey.view import journal, trace
from odyssey.view.timeline import Timeline

PHASES = {"X", "i", "C", "M"}


def opened(path: Path) -> dict[tuple[str, str], list[dict]]:
    """The spans by (process, track), after a look at whether Perfetto would take the file:
    fields, and nesting.
    """
    made = json.loads(path.read_text())
    assert set(made) == {"displayTimeUnit", "traceEvents", "otherData"}
    names: dict[tuple, str] = {}
    tracks = defaultdict(list)
    for e in made["traceEvents"]:
        assert e["ph"] in PHASES and isinstance(e["name"], str) and e["name"], e
        assert type(e["pid"]) is int and type(e["tid"]) is int and e["ts"] >= 0, e
        if e["ph"] == "M":
            names[e["name"], e["pid"], e["tid"]] = next(iter(e["args"].values()))
        elif e["ph"] == "X":
            assert e["dur"] >= 0
            tracks[e["pid"], e["tid"]].append(e)
        elif e["ph"] == "i":
            assert e["s"] in ("g", "p", "t")
        else:
            assert all(isinstance(v, (int, float)) for v in e["args"].values())
    for spans in tracks.values():
        open_ = []
        for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            while open_ and open_[-1] <= e["ts"] + 1e-6:
                open_.pop()
            # within what is around it
            assert not open_ or e["ts"] + e["dur"] <= open_[-1] + 1e-3, (e, open_)
            open_.append(e["ts"] + e["dur"])
    return {
        (names["process_name", pid, 0], names["thread_name", pid, tid]): spans
        for (pid, tid), spans in tracks.items()
    }


def shown(spans: list[dict]) -> set[str]:
    return {e["name"] for e in spans}


def test_a_run_that_goes_on_on_other_ranks_in_other_layouts_is_one_timeline(launch):
    same = [
        "-q",
        "--global-batch-size",
        64,
        "--no-eval",
        "--schedule",
        "constant",
        "--warmup-steps",
        0,
    ]
    base = [*same, "--run-dir", "run", "--checkpoint-every", 2, "--trace", "t.json"]
    done = launch.train("--bucket-size-mb", 0.1, "--threads", 2, "--steps", 4, *base, ranks=2)
    assert done.returncode == 0, done.stderr
    first = opened(launch.folder / "t.json")
    done = launch.train("--pp", 3, "--steps", 8, *base, ranks=3)
    assert done.returncode == 0, done.stderr
    tracks = opened(launch.folder / "t.json")
    host = next(name for name, _ in tracks if name.startswith("rank 0"))[7:]
    assert {f"rank {r} {host}" for r in range(3)} | {"run"} == {process for process, _ in tracks}
    main = shown(tracks[f"rank 0 {host}", "main"])
    assert {
        "data",
        "compute",
        "wait",
        "forward",
        "backward",
        "optimizer",
        "checkpoint",
        "conv2d_forward",
    } <= main
    assert [e["name"] for e in tracks[f"rank 1 {host}", "steps"]] == [
        f"step {i}" for i in range(1, 9)
    ]
    assert len(tracks["run", "attempts"]) == 2
    assert len([t for _, t in first if t.startswith("wire")]) >= 2 and any(
        "write checkpoint" in shown(s) for s in first.values()
    )
    # clocks: no rank ends a step before all have begun it
    last = [
        e for r in range(3) for e in tracks[f"rank {r} {host}", "steps"] if e["name"] == "step 8"
    ]
    assert len(last) == 3 and max(e["ts"] for e in last) < min(e["ts"] + e["dur"] for e in last)
    again = launch("odyssey", "trace", "run", "-o", "again.json")
    assert again.returncode == 0, again.stderr
    assert opened(launch.folder / "again.json").keys() == tracks.keys()
    weights = json.loads((launch.folder / "run" / "DONE.json").read_text())["weights_sha256"]
    plain = launch.result("--steps", 8, *same)
    assert plain["weights_sha256"] == weights


def test_what_is_torn_or_damaged(launch, tmp_path):
    folder = tmp_path / "timeline"
    (folder / "1").mkdir(parents=True)
    head = {
        "rank": 0,
        "ranks": 1,
        "attempt": 0,
        "wall": 5,
        "offset": 0,
        "error": 0,
        "host": "h",
        "pid": 1,
    }
    rows = [
        json.dumps(head),
        json.dumps([["main", "data", 10, 20, {}]]),
        json.dumps([["main", "compute", 20, 40, {}]]),
    ]
    part = folder / "1" / "rank-0.jsonl"
    part.write_text("\n".join(rows) + '\n["main", "wa')
    trace.write(tmp_path / "t.json", folder, None)
    assert [e["name"] for e in opened(tmp_path / "t.json")["rank 0 (h)", "main"]] == [
        "data",
        "compute",
    ]
    part.write_text("\n".join([rows[0], "{", rows[2]]) + "\n")
    for words, said in [
        (("trace", tmp_path, "-o", "u.json"), "line 2 is damaged"),
        (("trace", tmp_path / "none", "-o", "u.json"), "has no journal and no recording"),
        (("trace", tmp_path, "-o", "no/u.json"), "no/u.json"),
    ]:
        done = launch("odyssey", *words)
        assert (
            done.returncode not in (0, 1) and said in done.stderr and "Traceback" not in done.stderr
        ), done.stderr
    assert not (tmp_path / "u.json").exists()


class Turns:
    """time, but for each thread of a mock world its own clock."""

    def __init__(self) -> None:
        self.ahead = {}

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead.get(threading.get_ident(), 0)


def test_clocks_of_ranks_are_set_against_rank_0(monkeypatch):
    turns = Turns()
    monkeypatch.setattr(trace, "time", turns)

    def rank(comm):
        turns.ahead[threading.get_ident()] = comm.rank * 7_000_000_000
        return trace.clock(comm)

    for r, (offset, error) in enumerate(mock.run(3, rank)):
        assert abs(offset - r * 7_000_000_000) <= error < 1_000_000_000, (r, offset, error)


def fitted(tmp_path, **more):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 1, 12, 12)).astype(np.float32), rng.integers(0, 3, 96)
    nn.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3))
    trainer = DistributedTrainer(model, optim.SGD(lr=0.1), shard_size=16, threads=2)
    loader = data.DataLoader(data.arrays(x, y, classes=3), 48)
    trainer.fit(loader, loader.dataset, epochs=2, verbose=False, **more)
    return trainer


def test_nothing_is_left_on_and_the_bits_stay(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="odyssey"):
        traced = fitted(tmp_path, trace=tmp_path / "t.json", profile=True)
    assert slot.listener is None and native.library().timeline is None
    assert fitted(tmp_path).weights_sha256() == traced.weights_sha256()
    tracks = opened(tmp_path / "t.json")
    (process,) = {p for p, _ in tracks}
    spans = [e for (_, t), found in tracks.items() if t in ("main", "thread 1") for e in found]
    # each of the 3 shards of 4 steps once, whoever computed it
    assert sum(e["name"] == "conv2d_backward_weight" for e in spans) == 12
    assert {"evaluate", "sum of gradients", "optimizer"} <= shown(spans)
    assert next(e for e in spans if e["name"] == "linear_forward")["args"]["layer"] == "3"
    assert not list(tmp_path.glob("*.parts"))
    table = next(
        r.getMessage() for r in caplog.records if "expensive" in r.getMessage()
    ).splitlines()
    row = next(line for line in table if line.startswith("conv2d_forward")).split()
    assert row[1] == "0" and float(row[5]) > 0 and len(row) == 8


@pytest.mark.parametrize(("layout", "rows"), [("lanes", 16), ("rows", 1)])
def test_figures_of_ops(layout, rows):
    """What the table says of a product is what a person would count."""
    lib = native.library()
    row = np.zeros(lib.record, np.int64)
    row[:13] = [
        native.header(lib.codes["linear_backward_weight"], layout),
        1,
        1,
        1,
        1,
        0,
        3,
        20,
        30,
        0,
        0,
        0,
        0,
    ]
    op = Timeline(None, {})._op(lib, row.tolist())
    assert op.flops == 2 * 3 * rows * 20 * 30


def test_no_argument_stands_where_timelines_are_told_the_bytes():
    lib = native.library()
    most = max(lib.ops.values(), key=lambda op: len(op.outputs) + len(op.inputs) + len(op.sizes))
    assert 1 + len(most.outputs) + len(most.inputs) + len(most.sizes) < lib.record, most.name


def test_a_torch_module(launch):
    pytest.importorskip("torch", reason="not installed (extra torch)")
    (launch.folder / "program.py").write_text(
        "import numpy as np, torch, odyssey.torch as ot\n"
        "from odyssey import data\n"
        "torch.manual_seed(0); rng = np.random.default_rng(0)\n"
        "m = torch.nn.Linear(4, 1)\n"
        "x = rng.normal(size=(64, 4)).astype(np.float32)\n"
        "t = ot.DistributedTrainer(m, torch.optim.SGD(m.parameters(), lr=0.1), "
        "loss=torch.nn.MSELoss(), shard_size=16)\n"
        "t.fit(data.DataLoader(data.arrays(x, x[:, :1]), 32), epochs=2, trace='t.json', "
        "verbose=False)\n"
    )
    done = launch("odyssey", "launch", "-n", 2, "program.py")
    assert done.returncode == 0, done.stderr
    tracks = opened(launch.folder / "t.json")
    mains = [spans for (_, track), spans in tracks.items() if track == "main"]
    assert len(mains) == 2
    for spans in mains:
        assert {"forward", "backward", "optimizer", "wait"} <= shown(spans)


def test_a_journal_says_how_a_training_ended(tmp_path, monkeypatch):
    class Fail(callbacks.Callback):
        def on_step_end(self, context):
            if context.steps == 3:
                raise ZeroDivisionError("three")

    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, callbacks=[Fail()])
    rows = journal.read(tmp_path / "run")
    assert [row["event"] for row in rows if row["event"] != "progress"] == [
        "start",
        "epoch",
        "checkpoint",
        "failed",
        "end",
    ]
    assert (
        rows[0]["ranks"] == 1
        and rows[0]["mesh"] == {"dp": 1, "pp": 1, "tp": 1}
        and rows[-2]["step"] == 3
    )
    with open(tmp_path / "run" / "journal.jsonl", "a") as file:
        file.write('{"time": 1, "ev')
    assert journal.read(tmp_path / "run") == rows
    assert SimpleNamespace(**rows[-1]).complete is False
