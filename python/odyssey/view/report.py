"""`odyssey report`: runs as one HTML page that loads nothing: curves, time line, layout, how to
do it again.

What it knows of a run: its journal (journal.py), its step log (steplog.py), its description and its
checkpoints. picture.py draws, in colours that are variables of the page's style, so that it follows
the reader's light or dark.
"""

from __future__ import annotations

import html
import json
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoints as saved
from ..audit import steplog
from ..base import Run, read_json
from ..checkpoints import Refused
from ..errors import ConfigError, DataError, OdysseyError
from ..parallel import schedule as schedules
from . import journal
from .picture import Picture, key, span, ticks

POINTS = 1500  # of a curve; what is between is averaged
RUNS = 6  # colours that one can tell apart
#: Of a configuration: the curve of the rate, and the model, say them better.
LEFT_OUT = ("schedule", "layers", "settings of layers", "settings of the loss")
#: Events of the time line: their mark, and what it is called.
MARKS = {
    "epoch": ("bar", "end of epoch"),
    "checkpoint": ("dot", "checkpoint"),
    "failed": ("cross", "failure"),
    "stopped": ("square", "stop"),
}

STYLE = """
:root{color-scheme:light dark;--back:#fcfcfb;--card:#fff;--text:#1d2126;--muted:#5d6670;--grid:#d9dde2;--line:#e6e8eb;
--s0:#d9480f;--s1:#1864ab;--s2:#2b8a3e;--s3:#862e9c;--s4:#b08800;--s5:#0b7285;--bad:#c92a2a}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--card:#1c2024;--text:#e8eaed;--muted:#9aa4ae;--grid:#3a4149;
--line:#2d3339;--s0:#ff922b;--s1:#74c0fc;--s2:#69db7c;--s3:#da77f2;--s4:#ffd43b;--s5:#66d9e8;--bad:#ff8787}}
*{box-sizing:border-box}body{margin:0;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}h1{font-size:24px;margin:0 0 4px}
h2{font-size:18px;margin:34px 0 10px}
h3{font-size:14px;margin:0 0 6px;font-weight:600}p{margin:4px 0}.muted{color:var(--muted)}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.wide{grid-column:1/-1}.text{columns:340px;column-gap:14px}.text .card{break-inside:avoid;margin:0 0 14px}
svg{display:block;width:100%;height:auto}.wide svg{min-width:900px}svg text{font-family:inherit;font-size:11px;
fill:var(--muted)}.grid-line{stroke:var(--grid);stroke-width:.7;fill:none}
svg.mark,.wide svg.mark{display:inline-block;width:15px;min-width:0;margin:0 5px -2px 12px}
.legend span{margin-right:14px}.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:14px}
td,th{padding:4px 10px 4px 0;text-align:left;vertical-align:top;
border-top:1px solid var(--line);overflow-wrap:anywhere}tr:first-child>*{border-top:0}th{font-weight:600}
td:first-child{color:var(--muted);min-width:7.5em}.scroll th{position:sticky;top:0;background:var(--card)}
.scroll{overflow:auto;max-height:70vh;background:
linear-gradient(90deg,var(--card),transparent) left/30px 100% local no-repeat,
linear-gradient(270deg,var(--card),transparent) right/30px 100% local no-repeat,
linear-gradient(90deg,var(--grid),transparent) left/9px 100% scroll no-repeat,
linear-gradient(270deg,var(--grid),transparent) right/9px 100% scroll no-repeat}
td.n,th.n{text-align:right;white-space:nowrap}
pre{background:var(--back);border:1px solid var(--line);border-radius:6px;padding:10px;margin:6px 0 0;
white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,"Liberation Mono",monospace}
.hosts{display:flex;flex-wrap:wrap;gap:10px}.host{border:1px solid var(--line);border-radius:6px;padding:8px}
.ranks{display:flex;flex-wrap:wrap;gap:6px}
.rank{border:1px solid var(--grid);border-radius:5px;padding:3px 8px;font-size:13px}
.figures{display:flex;flex-wrap:wrap;gap:6px 28px;margin-top:8px}
.figures b{display:block;font-size:20px;font-weight:600}.bad{color:var(--bad)}
"""  # noqa: E501 - a style sheet


class Told:
    """Contents of a run's directory. Raises DataError: it is none, or nothing was trained in it."""

    def __init__(self, path: Path, number: int) -> None:
        self.run = Run(path)
        self.number = number
        self.name = path.resolve().name
        self.rows = journal.read(path)
        self.parts = journal.parts(self.rows)
        if not self.rows or any(part[0]["event"] != "start" for part in self.parts):
            raise DataError(
                f"[report] {path} has no journal of a training; name the --run-dir of one"
            )
        self.start = self.rows[0]["time"]
        self.latest = self.parts[-1][0]
        self.description = read_json(self.run.description) if self.run.description.is_file() else {}
        self.done = read_json(self.run.done) if self.run.done.is_file() else None
        log = self.run.steps / steplog.NAME
        self.all_steps = steplog.load(log) if log.is_file() else np.zeros(0, steplog.LAYOUT)
        self.steps = steplog.history(self.all_steps)
        self.epochs: dict[int, dict[str, Any]] = {}
        for row in self.rows:
            if row["event"] == "epoch" and isinstance(row.get("record"), dict):
                # of one that was taken again, the newest
                self.epochs[int(row["record"]["epoch"])] = row["record"]

    def loss(self) -> tuple[Any, Any]:
        """Steps, and the mean loss of each."""
        return self.steps["step"], self.steps["loss"] / np.maximum(self.steps["samples"], 1)

    def figure(self, name: str) -> tuple[list[int], list[float]]:
        """Epochs, and a figure of each."""
        numbers = sorted(self.epochs)
        values = [self.epochs[number].get(name) for number in numbers]
        return numbers, [np.nan if value is None else value for value in values]

    def throughput(self) -> tuple[list[float], list[float]]:
        """Seconds since the start, and samples per second of the whole run then."""
        times = []
        rate = []
        for part in self.parts:
            size = part[0].get("batch_size") or 0
            previous = None
            # nothing was done before
            times = [*times, np.nan]
            rate = [*rate, np.nan]
            for row in part[1:]:
                if "step" not in row:
                    continue
                if (
                    previous
                    and row["step"] > previous["step"]
                    and row["time"] - previous["time"] > 0.05
                ):
                    times.append((row["time"] + previous["time"]) / 2 - self.start)
                    rate.append(
                        size * (row["step"] - previous["step"]) / (row["time"] - previous["time"])
                    )
                previous = row if not previous or row["step"] != previous["step"] else previous
        if not np.nansum(rate):
            ends = {
                int(r["record"]["epoch"]): r["time"] for r in self.rows if r["event"] == "epoch"
            }
            times = [ends[e] - self.start for e in self.epochs]
            rate = [r.get("samples_per_second") or 0.0 for r in self.epochs.values()]
        return times, rate


def _thin(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """At most POINTS points, each the mean of those around it."""
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    if len(x) <= POINTS:
        return x, y
    keep = np.isfinite(y)
    x = x[keep]
    y = y[keep]
    edges = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(x)))
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def _curves(
    runs: Sequence[Told], of: Callable[[Told], tuple[Any, Any]], label: str, dots: bool = False
) -> str | None:
    """A curve per run; None if no run has one."""
    curves = [(run, *_thin(*of(run))) for run in runs]
    curves = [(run, x, y) for run, x, y in curves if np.isfinite(y).any()]
    if not curves:
        return None
    x, y = (
        span(np.concatenate([curve[i] for curve in curves]), margin)
        for i, margin in ((1, 0.02), (2, 0.05))
    )
    drawn = Picture(x, y, x_ticks=ticks(*x, whole=label in ("step", "epoch")), label=label)
    for run, positions, values in curves:
        drawn.line(positions, values, _colour(run), dots or len(positions) < 4)
    return f"{drawn}{_legend([run for run, *_ in curves], runs)}"


def _colour(run: Told) -> str:
    return f"s{run.number}"


def _legend(drawn: Sequence[Told], runs: Sequence[Told]) -> str:
    """Which colour is which run, where there are several."""
    names = " ".join(f"<span>{_key(run.number)}{_e(run.name)}</span>" for run in drawn)
    return f'<p class="muted legend">{names}</p>' if len(runs) > 1 else ""


def _time_line(run: Told) -> str:
    length = run.rows[-1]["time"] - run.start
    unit, name = next(
        (u for u in ((3600, "hours"), (60, "minutes")) if length > 3 * u[0]), (1, "seconds")
    )
    count = len(run.parts)
    events = set()
    names = [(i, _part_name(part[0])) for i, part in enumerate(run.parts)]
    times = [(row["time"] - run.start) / unit for row in run.rows]
    drawn = Picture(
        span(times, 0.01),
        (count - 0.5, -0.5),
        size=(1100, 50 + 34 * count),
        y_ticks=names,
        label=name,
    )
    for i, part in enumerate(run.parts):
        start, end = ((part[k]["time"] - run.start) / unit for k in (0, -1))
        drawn.box((start, end), (i - 0.25, i + 0.25), _colour(run), 0.3)
        for event, (kind, label) in MARKS.items():  # those of a later line of the table are on top
            for row in (row for row in part if row["event"] == event):
                events.add(event)
                number = f" {row['record']['epoch']}" if event == "epoch" else ""
                tooltip = f"{label}{number}, step {row.get('step')}"
                drawn.mark(
                    kind, (row["time"] - run.start) / unit, i, _mark_colour(event, run), tooltip
                )
    marks = ((event, *MARKS[event]) for event in MARKS if event in events)
    legend = "".join(f"{key(kind, _mark_colour(event, run))}{text} " for event, kind, text in marks)
    return f'<div class="scroll" tabindex="0">{drawn}</div><p class="muted legend">{legend}</p>'


def _mark_colour(event: str, run: Told) -> str:
    return "bad" if event == "failed" else _colour(run) if event == "checkpoint" else "text"


def _part_name(row: dict[str, Any]) -> str:
    ranks = f"{row.get('ranks', '?')} rank{'s' * (row.get('ranks') != 1)}"
    return f"attempt {row['attempt']}, {ranks}" if row.get("attempt") else ranks


def _pipeline(run: Told) -> str | None:
    """The schedule of a step on paper: forward costs 1, backward 2."""
    about = next((row["pipeline"] for row in reversed(run.parts[-1]) if row.get("pipeline")), None)
    places = run.latest.get("mesh", {}).get("pp", 1)
    if not about:
        return None
    kind = about["schedule"]
    micro = min(int(about["micro_batches"]), 24)
    schedule = schedules.make(kind, places * (2 if kind == "interleaved" else 1), micro, places)

    actions = list(schedules.simulate(schedule))
    names = [(p, f"stage {p + 1}") for p in range(places)]
    x = (0.0, max(s.end for s in actions))
    drawn = Picture(
        x, (places - 0.5, -0.5), size=(1100, 20 + 32 * places), x_ticks=(), y_ticks=names
    )
    for s in actions:
        colour = f"s{int(isinstance(s.action, schedules.Backward))}"
        drawn.box(
            (s.start, s.end - 0.06),
            (s.device - 0.42, s.device + 0.42),
            colour,
            0.45,
            str(s.action.micro + 1),
        )
    caption = f"{kind}, {about['micro_batches']} micro-batches"
    if micro < about["micro_batches"]:
        caption += f" (the first {micro} are shown)"
    waits = (
        f"{schedules.bubble(schedule):.0%} of the places' time is waiting if a backward pass "
        "costs two forward ones"
    )
    picture = f'<div class="scroll" tabindex="0">{drawn}</div>'
    return (
        f'{picture}<p class="muted">{_e(caption)}; {waits}. {_key(0)}forward {_key(1)}backward</p>'
    )


def _memory(runs: Sequence[Told]) -> str | None:
    memories = [
        (run, next((r["memory"] for r in reversed(run.rows) if r.get("memory")), None))
        for run in runs
    ]
    memories = [(run, np.array(memory) / 2**20) for run, memory in memories if memory]
    if not memories:
        return None
    max_ranks = max(len(memory) for _, memory in memories)
    wide = 0.8 / len(memories)
    x = (-0.5, max_ranks - 0.5)
    y = (0.0, 1.05 * max(float(memory.max()) for _, memory in memories))
    drawn = Picture(x, y, x_ticks=ticks(*x, whole=True, most=16), label="rank")
    for i, (run, memory) in enumerate(memories):
        for rank, size in enumerate(memory):
            left_edge = rank - 0.4 + i * wide
            drawn.box((left_edge, left_edge + 0.9 * wide), (0, size), _colour(run))
    return f"{drawn}{_legend([run for run, _ in memories], runs)}"


def _e(value: Any) -> str:
    return html.escape(str(value))


def _card(title: str, content: str | None, wide: bool = False) -> str:
    return (
        f'<div class="card{" wide" * wide}"><h3>{_e(title)}</h3>{content}</div>' if content else ""
    )


def _key(number: int) -> str:
    return f'<span class="key" style="background:var(--s{number})"></span>'


def _table(rows: Iterable[tuple[Any, Any]]) -> str:
    return (
        "<table>"
        + "".join(f"<tr><td>{_e(k)}</td><td>{_e(v)}</td></tr>" for k, v in rows)
        + "</table>"
    )


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _summary(run: Told) -> str:
    last = run.epochs[max(run.epochs)] if run.epochs else {}
    step = max((row["step"] for row in run.rows if isinstance(row.get("step"), int)), default=0)
    figures = {
        k.replace("_", " "): v
        for k, v in last.items()
        if k.startswith(("train_", "test_")) and v is not None
    }
    figures = {"steps": step, **figures}
    if last.get("samples_per_second"):
        figures["samples/s, last epoch"] = float(f"{last['samples_per_second']:.3g}")
    end = run.rows[-1]
    state = (
        "complete"
        if run.done
        else "under way, or killed"
        if end["event"] != "end"
        else "ended, not complete"
    )
    state += f", finished by {end['finished']}" if end.get("finished") else ""
    reason = next(
        (row["why"] for row in reversed(run.parts[-1]) if row["event"] in ("failed", "stopped")),
        None,
    )
    start_time = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(run.start))
    text = (
        f"{start_time} UTC, {_part_name(run.latest)}, {len(run.parts)} "
        f"start{'s' * (len(run.parts) > 1)}: {state}"
    )
    spans = "".join(f"<span><b>{_e(_number(v))}</b>{_e(k)}</span>" for k, v in figures.items())
    problem = f'<p class="bad">{_e(reason)}</p>' if reason else ""
    head = f'<h3>{_key(run.number)}{_e(run.name)}</h3><p class="muted">{_e(text)}</p>{problem}'
    return f'<div class="card">{head}<div class="figures">{spans}</div></div>'


def _epochs(run: Told) -> str | None:
    figures = (k for r in run.epochs.values() for k, v in r.items() if isinstance(v, (int, float)))
    kinds = "train_", "test_", "seconds", "samples_per_second"
    names = [n for n in dict.fromkeys(figures) if n.startswith(kinds)]
    if not names:
        return None
    head = (
        "<tr><th>epoch</th>"
        + "".join(f'<th class="n">{_e(n.replace("_", " "))}</th>' for n in names)
        + "</tr>"
    )
    rows = ""
    for number, record in sorted(run.epochs.items()):
        cells = (f'<td class="n">{_e(_number(record.get(n)))}</td>' for n in names)
        rows += f"<tr><td>{number}</td>{''.join(cells)}</tr>"
    return f'<div class="scroll" tabindex="0"><table>{head}{rows}</table></div>'


def _layout(run: Told) -> str:
    """Ranks as boxes in their hosts, with what part of the model and of the batch each has."""
    mesh = run.latest.get("mesh", {})
    hosts = run.latest.get("hosts") or ["?"]
    pp = int(mesh.get("pp", 1))
    tp = int(mesh.get("tp", 1))
    of: dict[str, list[str]] = {}
    for rank, host in enumerate(hosts):
        parts = [f"replica {rank // (pp * tp) + 1}"]
        parts += [f"stage {rank // tp % pp + 1}"] * (pp > 1) + [f"share {rank % tp + 1}"] * (tp > 1)
        of.setdefault(host, []).append(
            f'<span class="rank"><b>{rank}</b> {_e(", ".join(parts))}</span>'
        )
    boxes = "".join(
        f'<div class="host"><p class="muted">{_e(host)}</p><div '
        f'class="ranks">{"".join(r)}</div></div>'
        for host, r in of.items()
    )
    text = " x ".join(f"{axis}({mesh[axis]})" for axis in mesh)
    return (
        f'<p class="muted">{_e(text)}, over {_e(run.latest.get("backend", "?"))}</p><div '
        f'class="hosts">{boxes}</div>'
    )


def _verified(run: Told) -> str:
    """Returns what stands behind the figures: fingerprints, steps that were taken twice,
    checksums of checkpoints.
    """
    rows: list[tuple[str, str]] = []
    log = run.all_steps
    if len(log):
        marked = int(((run.steps["flags"] & steplog.WEIGHTS) > 0).sum())
        rows.append(
            (
                "steps",
                f"{len(run.steps):,} in the log, {marked:,} with fingerprints of weights and "
                "gradients",
            )
        )
        newest: dict[int, Any] = {}
        matches: list[bool] = []  # of each step that was taken again
        for record in steplog.decoded(log) if len(log) > len(run.steps) else ():
            if record.step in newest:
                matches.append(steplog.difference(newest[record.step], record) is None)
            newest[record.step] = record
        if matches:
            text = f"{sum(matches):,} after a restart, with the same bits"
            text += f"; {matches.count(False):,} OTHERWISE" * (not all(matches))
            rows.append(("taken again", text))
    if run.run.checkpoints.is_dir():
        for one in saved.Store(run.run.checkpoints, owner=False).verified():
            refused = isinstance(one, Refused)
            name = one.path.name if refused else f"checkpoint of step {one.step:,}"
            rows.append(
                (name, f"refused: {one.reason}" if refused else "every checksum compared just now")
            )
    if run.done:
        rows.append(("weights", f"SHA-256 {run.done.get('weights_sha256')}"))
    return _table(rows) if rows else '<p class="muted">nothing is there to verify</p>'


def _command(run: Told) -> str:
    words = [str(w) for w in run.description.get("command", [])]
    if not words:
        return '<p class="muted">the run does not say what its command was</p>'
    ranks = run.description.get("ranks")
    line = shlex.join([*(["odyssey", "launch", "-n", str(ranks)] if ranks else []), *words])
    versions = ", ".join(f"{k} {v}" for k, v in (run.description.get("versions") or {}).items())
    note = f"in {run.description.get('directory')}" + f"; {versions}" * bool(versions)
    return f'<pre>{_e(line)}</pre><p class="muted">{_e(note)}</p>'


def _configuration(run: Told) -> str:
    about = {k: v for k, v in (run.latest.get("configuration") or {}).items() if k not in LEFT_OUT}
    model = about.pop("model", None)
    if isinstance(model, list):
        count = sum(int(np.prod(shape)) for _, shape, *_ in model)
        about["parameters"] = f"{count:,} in {len(model)} tensors"
    if isinstance(about.get("data set"), list):
        del about["data set"][2:]  # what older checkpoints have for a fingerprint
    if isinstance(about.get("precision"), list) and about["precision"][1:] == [0]:
        del about["precision"][1:]  # no loss scale that grows
    rows = [(k, _plain(v)) for k, v in about.items() if v not in (None, ["none", None])]
    drawn = run.latest.get("model")
    model = f"<pre>{_e(drawn)}</pre>" if drawn else ""
    return _table([("epochs", run.latest.get("epochs")), *rows]) + model


def _plain(value: Any) -> str:
    """A value of a configuration in words: lists without brackets, names beside what they are."""
    if isinstance(value, list):
        pair = len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], list)
        return (" " if pair else ", ").join(_plain(v) for v in value if v is not None)
    return value if isinstance(value, str) else json.dumps(value)


def page(paths: Sequence[Path]) -> str:
    """The page of some runs.

    Raises DataError: one of them is no run; ConfigError: they are too many.
    """
    if len(paths) > RUNS:
        raise ConfigError(
            f"[report] {len(paths)} runs are given; at most {RUNS} can be told apart in one picture"
        )
    try:
        return _page([Told(path, i) for i, path in enumerate(paths)])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        if isinstance(problem, OdysseyError):
            raise
        raise DataError(
            f"[report] a file of {', '.join(map(str, paths))} is damaged: {problem!r}"
        ) from problem


def _page(runs: Sequence[Told]) -> str:
    names = sorted(
        {k for run in runs for r in run.epochs.values() for k in r if k.startswith("test_")}
    )
    curves = [
        _card("Training loss, by step", _curves(runs, Told.loss, "step")),
        _card("Learning rate", _curves(runs, lambda r: (r.steps["step"], r.steps["rate"]), "step")),
        *(
            _card(
                name.replace("test_", "Validation: "),
                _curves(runs, lambda r, n=name: r.figure(n), "epoch", True),
            )
            for name in names
        ),
        _card("Samples per second", _curves(runs, Told.throughput, "seconds since the start")),
        _card("Most memory of each rank, MiB", _memory(runs)),
    ]
    sections = [("", "".join(map(_summary, runs))), ("Curves", "".join(curves))]
    for run in runs:
        cards = [
            _card("Starts, checkpoints, stops", _time_line(run), wide=True),
            _card("A step of the pipeline", _pipeline(run), wide=True),
            _card("Epochs", _epochs(run), wide=True),
        ]
        text = [
            _card("Ranks", _layout(run)),
            _card("Verified", _verified(run)),
            _card("Environment", _table((run.latest.get("environment") or {}).items())),
            _card("Configuration", _configuration(run)),
        ]
        cards += [
            f'<div class="wide text">{"".join(text)}</div>',
            _card("The same again", _command(run), wide=True),
        ]
        sections.append((run.name, "".join(cards)))
    body = "".join(
        f'<section>{f"<h2>{_e(t)}</h2>" if t else ""}<div class="grid">{c}</div></section>'
        for t, c in sections
    )
    title = ", ".join(run.name for run in runs)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{_e(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{_e(title)}</h1>{body}</main></body></html>\n"
    )
