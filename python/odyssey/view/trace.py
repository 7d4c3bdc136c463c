"""A timeline of all ranks as Chrome and Perfetto read it (Trace Event Format, JSON): of a
training, or of a run.

`TimelineRecorder` is the callback: on each rank it keeps what view/timeline.py writes, in a
directory of this recording, and rank 0 makes the picture at the end of fit(). `merged` makes it of
all recordings of a directory: one process per rank, one track per thread. Clocks are set against
rank 0's by messages there and back, as NTP does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..base import Run, outputs, parse_json
from ..callbacks import Callback, Context
from ..comm import Communicator
from ..errors import DataError, OutputError, counted
from . import journal
from .timeline import BITS, MAX_RECORDS, SUM, Timeline

ROUNDS = 8  # messages there and back
RUN_TRACK = 1_000_000  # the process that stands for the whole run


class TimelineRecorder(Callback):
    """Records a fit() on all ranks.

    Args:
        file: where rank 0 writes the picture; None: none is written. run: that keeps the recording;
            without one it is beside the file, until that is written. table: whether the most
            expensive ops are to be shown at the end.
    """

    exact = False

    def __init__(self, file: Path | None, run: Run | None, table: bool = False) -> None:
        self._file = file
        self._run = run
        self._table = table
        self._beside = None if file is None else file.with_name(f"{file.name}.parts")
        self._timeline: Timeline | None = None
        self._step = 0

    @property
    def _folder(self) -> Path | None:
        return self._beside if self._run is None or self._file is None else self._run.timeline

    def on_fit_start(self, context: Context) -> None:
        trainer = context.trainer
        comm = context.trainer.comm
        number = 0
        if comm.rank == 0 and self._folder is not None:
            outputs.check(self._file, "--trace")
            if self._run is None:
                shutil.rmtree(self._folder, ignore_errors=True)
            number = 1 + max((int(p.name) for p in _recordings(self._folder)), default=0)
        numbers = [number, time.time_ns() - time.monotonic_ns()]
        number, wall = comm.broadcast(np.array(numbers, np.int64)).tolist()
        offset, error = clock(comm)
        about = {
            "rank": comm.rank,
            "ranks": comm.size,
            "attempt": self._run.attempt if self._run else 0,
            "wall": wall,
        }
        about |= {"host": os.uname().nodename, "pid": os.getpid(), "offset": offset, "error": error}
        arena = getattr(trainer, "arena", None)
        names = getattr(arena, "offsets", {})
        layers = (
            {start: name.rpartition(".")[0] or name for name, start in names.items()}
            if isinstance(names, dict)
            else {}
        )
        path = None if self._folder is None else self._folder / str(number) / f"rank-{comm.rank}"
        try:
            self._timeline = Timeline(path, about, layers, self._table)
        except OSError as problem:
            raise OutputError(f"[trace] {path} cannot be written: {problem.strerror}") from problem
        self._timeline.open()
        self._step = time.monotonic_ns()

    def on_step_end(self, context: Context) -> None:
        if self._timeline is not None:
            end = time.monotonic_ns()
            loss = context.loss if math.isfinite(context.loss) else None
            self._timeline.span("steps", f"step {context.steps}", self._step, end, loss=loss)
            self._step = end
            self._timeline.due()

    def on_fit_end(self, context: Context) -> None:
        timeline = self._timeline
        self._timeline = None
        if timeline is None:
            return
        timeline.close()
        comm = context.trainer.comm
        if context.error is None or getattr(context.error, "raised_on_all_ranks", False):
            comm.barrier()  # all have written
        if comm.rank:
            return
        if self._table:
            context.trainer.say("the most expensive ops of rank 0:\n" + timeline.table())
        if self._file is not None and self._folder is not None:
            try:
                write(self._file, self._folder, self._run and self._run.path)
            except (OSError, OutputError) as problem:
                context.trainer.say(f"[trace] {self._file} is not written: {problem}")
                return
            if self._run is None:
                shutil.rmtree(self._folder, ignore_errors=True)
            context.trainer.say(
                f"timeline in {self._file}: open it at ui.perfetto.dev or chrome://tracing"
            )


def clock(comm: Communicator) -> tuple[int, int]:
    """(ns that this process's monotonic clock is ahead of rank 0's, by how much that may be
    wrong); collective.

    What rank 0 sent before I received it, and what it received after I had sent: two bounds per
    round. Where they allow that both clocks are the same, as on one machine, they are.
    """
    times = np.zeros((ROUNDS, 2), np.int64)
    first = np.zeros_like(times)
    for i in range(ROUNDS):
        times[i, 0] = time.monotonic_ns()
        first[i, 0] = comm.all_gather(times[i, :1].copy())[0, 0]
        times[i, 1] = time.monotonic_ns()
    first = comm.all_gather(times)[0]
    low = int((times[:, 0] - first[:, 1]).max())
    high = int((times[:, 1] - first[:, 0]).min())
    if low <= 0 <= high:
        return 0, 0 if comm.rank == 0 else max(-low, high)
    return (low + high) // 2, abs(high - low + 1) // 2


def write(file: Path, folder: Path | None, run: Path | None) -> int:
    """Writes the timeline of a directory of recordings, and of a run; returns the number of its
    events. Raises DataError: there is nothing to be shown, or a recording is damaged.
    OutputError.
    """
    count = 0

    def make(out: BinaryIO) -> None:
        nonlocal count
        notes: dict[str, Any] = {}
        out.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        for event in merged(folder, run, notes):
            out.write(
                (b",\n" if count else b"") + json.dumps(event, separators=(",", ":")).encode()
            )
            count += 1
        out.write(b'\n],"otherData":' + json.dumps(notes).encode() + b"}\n")
        if not count:
            raise DataError(
                f"[trace] {run or folder} has no journal and no recording; train with --trace FILE"
            )

    outputs.write(file, "--trace", make)
    return count


def _recordings(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        (p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit()),
        key=lambda p: int(p.name),
    )


def merged(
    folder: Path | None, run: Path | None, notes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The events of a timeline; `notes` gets what is to be said about it. ts and dur are
    microseconds.
    """
    parts = (
        [p for one in _recordings(folder) for p in sorted(one.glob("rank-*.jsonl"))]
        if folder is not None
        else []
    )
    loaded = [part for part in map(_part, parts) if part is not None]
    story = [] if run is None else journal.read(run)
    begins = [
        _wall(part[0], min((r[2] for r in part[1] if r[2]), default=0))
        for part in loaded
        if part[1]
    ]
    begins += [int(1e9 * row["time"]) for row in story]
    zero = min(begins, default=0)
    notes["zero"] = zero / 1e9  # seconds since 1970
    notes["clock_error_us"] = max((part[0]["error"] / 1e3 for part in loaded), default=0.0)
    yield from _story(story, zero)
    names: dict[tuple[int, str], dict[str, Any]] = {}
    for about, rows, path in loaded:
        pid = about["rank"]
        shift = _wall(about, 0) - zero
        tracks: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {}
        programs: dict[int, list[Any]] = {}
        for track, name, start, end, args in rows:
            if track == "program":
                programs[int(name)] = args["ops"]
            else:
                tracks.setdefault(track, []).append((start, end, name, args))
        left_out = _ops(path.with_suffix(".ops"), programs, tracks)
        if left_out:
            notes["ops"] = f"of the first {MAX_RECORDS:,} records of each rank"
        for lane, spans in enumerate(_lanes(tracks.pop("wire", []))):
            tracks[f"wire {lane}" if lane else "wire"] = spans
        names[pid, "name"] = _meta("process_name", pid, 0, name=f"rank {pid} ({about['host']})")
        names[pid, "place"] = _meta("process_sort_index", pid, 0, sort_index=pid)
        for track in sorted(tracks, key=_number):
            tid = _number(track)
            names[pid, track] = _meta("thread_name", pid, tid, name=track)
            for start, end, name, args in _nested(tracks[track]):
                event = {
                    "ph": "X",
                    "name": name,
                    "cat": track.split(" ")[0],
                    "pid": pid,
                    "tid": tid,
                }
                event |= {"ts": (start + shift) / 1e3, "dur": (end - start) / 1e3}
                yield event | {"args": args} if args else event
    yield from names.values()


def _wall(about: dict[str, Any], monotonic_ns: int) -> int:
    return monotonic_ns - about["offset"] + about["wall"]


def _number(track: str) -> int:
    """The thread id of a track: steps, then the main thread, threads of steps, transfers,
    others.
    """
    kind, _, n = track.rpartition(" ")
    if track in ("steps", "main"):
        return int(track == "main")
    if track.startswith("wire"):
        return 110 + (int(n) if kind else 0)
    if kind == "thread" and n.isdigit():
        return 10 + int(n)
    return 210 + sum(track.encode()) % 10_000


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _part(path: Path) -> tuple[dict[str, Any], list[Any], Path] | None:
    """The header and rows of a rank's recording; a torn last line is left out. Raises DataError."""
    lines = path.read_bytes().split(b"\n")
    rows: list[Any] = []
    for i, line in enumerate(lines):
        if line:
            try:
                value = parse_json(line, path.name)
                rows += value if isinstance(value, list) else [value]
            except DataError:
                if i < len(lines) - 1:
                    place = path.parent.parent
                    raise DataError(
                        f"[trace] {path}: line {i + 1} is damaged; to show the other recordings, "
                        f"move {path.parent} out of {place}"
                    ) from None
    return (rows[0], rows[1:], path) if rows else None


def _ops(path: Path, programs: dict[int, list[Any]], tracks: dict[str, Any]) -> bool:
    """Puts the records of a rank on its tracks, under the passes that they are of; whether some
    were left out.
    """
    data = np.fromfile(path, np.int64) if path.exists() else np.zeros(0, np.int64)
    offset = 0
    count = 0
    while offset + 3 <= len(data):
        program, thread, n = data[offset : offset + 3].tolist()
        entries = (
            data[offset + 3 : offset + 3 + 3 * n].reshape(-1, 3)
            if len(data) >= offset + 3 + 3 * n
            else None
        )
        offset += 3 + 3 * n
        if entries is None or program not in programs:
            break
        count += n
        ops = programs[program]
        track = tracks.setdefault("main" if thread == 0 else f"thread {thread}", [])
        calls = []
        for tag, start, end in entries.tolist():
            pass_name = (
                "sum of gradients"
                if tag & SUM == SUM
                else "backward"
                if ops[tag & SUM][4]
                else "forward"
            )
            calls.append((tag >> BITS, pass_name, tag & SUM, start, end))
        for (first, pass_name), group in itertools.groupby(calls, lambda entry: entry[:2]):
            of = list(group)
            track.append((of[0][3], of[-1][4], pass_name, {"first sample": first}))
            for _, _, record, start, end in of if of[0][2] != SUM else ():
                name, layer, flops, moved, _ = ops[record]
                args: dict[str, Any] = {"layer": layer} if layer else {}
                if flops and end > start:
                    args["GFLOP/s"] = round(flops / (end - start), 1)
                if moved:
                    args["bytes"] = moved
                track.append((start, end, name, args))
    return count >= MAX_RECORDS


def _lanes(spans: list[Any]) -> list[list[Any]]:
    """Spans that overlap, on as few tracks as they need."""
    lanes: list[list[Any]] = []
    for span in sorted(spans, key=lambda s: s[0]):
        lane = next((lane for lane in lanes if lane[-1][1] <= span[0]), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(span)
    return lanes


def _nested(spans: list[Any]) -> Iterator[tuple[int, int, str, dict[str, Any]]]:
    """Spans of a track in order, each within the one around it: one that would stick out ends
    with that.
    """
    ends: list[int] = []
    for start, end, name, args in sorted(spans, key=lambda s: (s[0], -s[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        if ends:
            end = min(end, ends[-1])
        if end > start:
            ends.append(end)
        yield start, end, name, args


def _story(rows: list[dict[str, Any]], zero: int) -> Iterator[dict[str, Any]]:
    """The run as a whole: attempts, what happened in them, the loss."""
    if rows:
        yield _meta("process_name", RUN_TRACK, 0, name="run")
        yield _meta("thread_name", RUN_TRACK, 0, name="attempts")
        yield _meta("thread_name", RUN_TRACK, 1, name="events")
    for part in journal.parts(rows):
        fields = {"pid": RUN_TRACK, "tid": 0, "cat": "run"}
        start, end = ((1e9 * part[i]["time"] - zero) / 1e3 for i in (0, -1))
        ranks = part[0].get("ranks", "?")
        attempt = part[0].get("attempt")
        name = f"{f'attempt {attempt}' if attempt else 'training'} on {counted(ranks)}"
        yield {"ph": "X", "name": name, "ts": start, "dur": end - start, **fields}
        for row in part:
            event = row["event"]
            fields["ts"] = (1e9 * row["time"] - zero) / 1e3
            if event == "progress":
                loss = row.get("loss")
                if loss is not None:
                    yield {"ph": "C", "name": "loss", **fields, "args": {"loss": loss}}
            else:
                args = {k: v for k, v in row.items() if k not in ("time", "event")}
                yield {"ph": "i", "s": "g", "name": event, **fields, "tid": 1, "args": args}
