"""`odyssey report`: writes runs as one HTML page: curves, time line, layout, and the command.

The page loads nothing. Its sources are the journal of a run (journal.py), the step log
(steplog.py), the description and the checkpoints. picture.py draws. The colours are variables of
the page's style, so they follow the light or dark mode of the reader.
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

POINTS = 1500  # of a curve; the values between them are averaged
MIN_RATE_S = 0.05  # a rate over a shorter time is not meaningful
RUNS = 6  # the number of colours that a reader can tell apart
#: Keys of a configuration that the page shows elsewhere, as a curve or in the model.
LEFT_OUT = ("schedule", "layers", "settings of layers", "settings of the loss")
#: Events of the time line: the shape of their mark, and its label.
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
    """The content of a run's directory.

    Raises DataError if it isn't the directory of a run, or nothing was trained in it.
    """

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
        # The number of the best epoch and the metric that it is the best by, if a callback asks.
        self.best: dict[str, Any] = {}
        for row in self.rows:
            if row["event"] == "epoch" and isinstance(row.get("record"), dict):
                # If an epoch was repeated after a restart, the newest record counts.
                rate = {"learning_rate": row["rate"]} if "rate" in row else {}
                self.epochs[int(row["record"]["epoch"])] = {**row["record"], **rate}
                self.best = row["best"] if isinstance(row.get("best"), dict) else {}

    def loss(self) -> tuple[Any, Any]:
        """Returns the numbers of the steps, and the mean loss of each."""
        return self.steps["step"], self.steps["loss"] / np.maximum(self.steps["samples"], 1)

    def figure(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the numbers of the epochs, and a metric of each, NaN if it is missing."""
        numbers = sorted(self.epochs)
        values = [self.epochs[number].get(name) for number in numbers]
        return numbers, [np.nan if value is None else value for value in values]

    def throughput(self) -> tuple[list[float], list[float]]:
        """Returns seconds since the start, and samples per second of the whole run at these times.

        The rates are those between two rows of the journal. If there are none, they are the rates
        in the records of the epochs.
        """
        times = []
        rates = []
        for part in self.parts:
            start, *rows = part
            batch_size = start.get("batch_size") or 0
            previous = None
            # NaN interrupts the curve between two starts.
            times.append(np.nan)
            rates.append(np.nan)
            for row in rows:
                if "step" not in row:
                    continue
                if previous is None:
                    previous = row
                    continue
                steps = row["step"] - previous["step"]
                seconds = row["time"] - previous["time"]
                if steps > 0 and seconds > MIN_RATE_S:
                    times.append((row["time"] + previous["time"]) / 2 - self.start)
                    rates.append(batch_size * steps / seconds)
                if steps != 0:
                    previous = row
        if not np.nansum(rates):
            ends = {
                int(row["record"]["epoch"]): row["time"]
                for row in self.rows
                if row["event"] == "epoch"
            }
            times = [ends[epoch] - self.start for epoch in self.epochs]
            rates = [record.get("samples_per_second") or 0.0 for record in self.epochs.values()]
        return times, rates


def _thin_points(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most POINTS points of a curve, each the mean of a group of points.

    A curve that is longer loses the points that are not finite.
    """
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    if len(x) <= POINTS:
        return x, y
    keep = np.isfinite(y)
    x = x[keep]
    y = y[keep]
    group_starts = np.linspace(0, len(x), POINTS + 1).astype(int)[:-1]
    counts = np.diff(np.append(group_starts, len(x)))
    mean_x = np.add.reduceat(x, group_starts) / counts
    mean_y = np.add.reduceat(y, group_starts) / counts
    return mean_x, mean_y


def _draw_curves(
    runs: Sequence[Told],
    points_of: Callable[[Told], tuple[Any, Any]],
    label: str,
    dots: bool = False,
) -> str | None:
    """Draws a curve for each run in one picture.

    Args:
        runs: all runs of the page.
        points_of: returns the positions and values of the curve of a run.
        label: the label of the horizontal axis.
        dots: draw a dot at each point.

    Returns:
        The picture and its legend as HTML, or None if no run has a curve.
    """
    curves = [(run, *_thin_points(*points_of(run))) for run in runs]
    curves = [(run, x, y) for run, x, y in curves if np.isfinite(y).any()]
    if not curves:
        return None
    x_range = span(np.concatenate([x for _, x, _ in curves]), 0.02)
    y_range = span(np.concatenate([y for _, _, y in curves]), 0.05)
    x_ticks = ticks(*x_range, integers=label in ("step", "epoch"))
    picture = Picture(x_range, y_range, x_ticks=x_ticks, label=label)
    for run, x, y in curves:
        # A line of few points is hard to see.
        picture.line(x, y, _choose_colour(run), dots or len(x) < 4)
    return f"{picture}{_format_legend([run for run, *_ in curves], runs)}"


def _choose_colour(run: Told) -> str:
    """Returns the name of the colour of a run in the style sheet."""
    return f"s{run.number}"


def _format_legend(drawn: Sequence[Told], runs: Sequence[Told]) -> str:
    """Returns the legend, which has the colour of each run. It is empty for a single run."""
    names = " ".join(f"<span>{_format_key(run.number)}{_escape(run.name)}</span>" for run in drawn)
    return f'<p class="muted legend">{names}</p>' if len(runs) > 1 else ""


def _draw_time_line(run: Told) -> str:
    """Draws each start of a run as a bar, with marks for its events. Returns HTML."""
    length = run.rows[-1]["time"] - run.start
    units = ((3600, "hours"), (60, "minutes"))
    unit_s, unit_name = next((unit for unit in units if length > 3 * unit[0]), (1, "seconds"))

    def position(row: dict[str, Any]) -> float:
        return (row["time"] - run.start) / unit_s

    count = len(run.parts)
    events = set()
    part_names = [(i, _name_part(part[0])) for i, part in enumerate(run.parts)]
    picture = Picture(
        span([position(row) for row in run.rows], 0.01),
        (count - 0.5, -0.5),
        size=(1100, 50 + 34 * count),
        y_ticks=part_names,
        label=unit_name,
    )
    for i, part in enumerate(run.parts):
        bar = (position(part[0]), position(part[-1]))
        picture.box(bar, (i - 0.25, i + 0.25), _choose_colour(run), 0.3)
        # Marks of a later line of the table are drawn over those of an earlier one.
        for event, (shape, label) in MARKS.items():
            for row in part:
                if row["event"] != event:
                    continue
                events.add(event)
                number = f" {row['record']['epoch']}" if event == "epoch" else ""
                tooltip = f"{label}{number}, step {row.get('step')}"
                colour = _choose_mark_colour(event, run)
                picture.mark(shape, position(row), i, colour, tooltip)
    legend = "".join(
        f"{key(shape, _choose_mark_colour(event, run))}{label} "
        for event, (shape, label) in MARKS.items()
        if event in events
    )
    return f'<div class="scroll" tabindex="0">{picture}</div><p class="muted legend">{legend}</p>'


def _choose_mark_colour(event: str, run: Told) -> str:
    """Returns the name of the colour of an event's mark in the style sheet."""
    if event == "failed":
        return "bad"
    return _choose_colour(run) if event == "checkpoint" else "text"


def _name_part(row: dict[str, Any]) -> str:
    """Returns the name of a start of the run, from its first row: the attempt and the ranks."""
    ranks = f"{row.get('ranks', '?')} rank{'s' * (row.get('ranks') != 1)}"
    return f"attempt {row['attempt']}, {ranks}" if row.get("attempt") else ranks


def _draw_pipeline(run: Told) -> str | None:
    """Draws the schedule of a step of the pipeline, as HTML. None without a pipeline.

    It is computed, not measured: a forward pass takes 1, a backward pass 2.
    """
    pipeline = next(
        (row["pipeline"] for row in reversed(run.parts[-1]) if row.get("pipeline")), None
    )
    places = run.latest.get("mesh", {}).get("pp", 1)
    if not pipeline:
        return None
    kind = pipeline["schedule"]
    shown_count = min(int(pipeline["micro_batches"]), 24)
    stages = places * (2 if kind == "interleaved" else 1)
    schedule = schedules.make(kind, stages, shown_count, places)

    actions = list(schedules.simulate(schedule))
    drawn = Picture(
        (0.0, max(timed.end for timed in actions)),
        (places - 0.5, -0.5),
        size=(1100, 20 + 32 * places),
        x_ticks=(),
        y_ticks=[(place, f"stage {place + 1}") for place in range(places)],
    )
    for timed in actions:
        is_backward = isinstance(timed.action, schedules.Backward)
        drawn.box(
            (timed.start, timed.end - 0.06),
            (timed.device - 0.42, timed.device + 0.42),
            f"s{int(is_backward)}",
            0.45,
            str(timed.action.micro + 1),
        )
    caption = f"{kind}, {pipeline['micro_batches']} micro-batches"
    if shown_count < pipeline["micro_batches"]:
        caption += f" (the first {shown_count} are shown)"
    waits = (
        f"{schedules.bubble(schedule):.0%} of the places' time is waiting if a backward pass "
        "costs two forward ones"
    )
    picture = f'<div class="scroll" tabindex="0">{drawn}</div>'
    keys = f"{_format_key(0)}forward {_format_key(1)}backward"
    return f'{picture}<p class="muted">{_escape(caption)}; {waits}. {keys}</p>'


def _draw_memory(runs: Sequence[Told]) -> str | None:
    """Draws a bar for the memory of each rank and run, as HTML. None if no run has recorded it."""
    memories = []
    for run in runs:
        memory = next((row["memory"] for row in reversed(run.rows) if row.get("memory")), None)
        if memory:
            memories.append((run, np.array(memory) / 2**20))
    if not memories:
        return None
    max_ranks = max(len(memory) for _, memory in memories)
    max_memory = max(float(memory.max()) for _, memory in memories)
    bar_width = 0.8 / len(memories)
    x_range = (-0.5, max_ranks - 0.5)
    x_ticks = ticks(*x_range, integers=True, limit=16)
    drawn = Picture(x_range, (0.0, 1.05 * max_memory), x_ticks=x_ticks, label="rank")
    for i, (run, memory) in enumerate(memories):
        for rank, size in enumerate(memory):
            left_edge = rank - 0.4 + i * bar_width
            drawn.box((left_edge, left_edge + 0.9 * bar_width), (0, size), _choose_colour(run))
    return f"{drawn}{_format_legend([run for run, _ in memories], runs)}"


def _escape(value: Any) -> str:
    """Returns a value as text for HTML."""
    return html.escape(str(value))


def _format_card(title: str, content: str | None, wide: bool = False) -> str:
    """Returns a card of the page, or "" if it has no content."""
    if not content:
        return ""
    return f'<div class="card{" wide" * wide}"><h3>{_escape(title)}</h3>{content}</div>'


def _format_key(number: int) -> str:
    """Returns a square in colour number `number`, for legends."""
    return f'<span class="key" style="background:var(--s{number})"></span>'


def _format_table(rows: Iterable[tuple[Any, Any]]) -> str:
    """Returns a table of names and values."""
    lines = (f"<tr><td>{_escape(name)}</td><td>{_escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(lines)}</table>"


def _format_number(value: Any) -> str:
    """Returns a number with few digits, "" for None, and anything else as text."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_summary(run: Told) -> str:
    """Returns the card at the top of the page: state, last metrics, and the reason of a failure."""
    last = run.epochs[max(run.epochs)] if run.epochs else {}
    step = max((row["step"] for row in run.rows if isinstance(row.get("step"), int)), default=0)
    figures = {
        k.replace("_", " "): v
        for k, v in last.items()
        if k.startswith(("train_", "test_")) and v is not None
    }
    figures = {"steps": step, **figures}
    if isinstance(run.latest.get("parameters"), int):
        figures["parameters"] = run.latest["parameters"]
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
    best = run.epochs.get(run.best.get("epoch", 0), {})
    if best:
        name = str(run.best.get("figure"))
        value = _format_number(best.get(name))
        state += f"; best epoch {best['epoch']}, {name.replace('_', ' ')} {value}"
    reason = next(
        (row["why"] for row in reversed(run.parts[-1]) if row["event"] in ("failed", "stopped")),
        None,
    )
    start_time = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(run.start))
    text = (
        f"{start_time} UTC, {_name_part(run.latest)}, {len(run.parts)} "
        f"start{'s' * (len(run.parts) > 1)}: {state}"
    )
    spans = "".join(
        f"<span><b>{_escape(_format_number(v))}</b>{_escape(k)}</span>" for k, v in figures.items()
    )
    problem = f'<p class="bad">{_escape(reason)}</p>' if reason else ""
    heading = f"<h3>{_format_key(run.number)}{_escape(run.name)}</h3>"
    head = f'{heading}<p class="muted">{_escape(text)}</p>{problem}'
    return f'<div class="card">{head}<div class="figures">{spans}</div></div>'


def _format_epochs(run: Told) -> str | None:
    """Returns a table with the metrics of each epoch, or None if there are none."""
    figures = (k for r in run.epochs.values() for k, v in r.items() if isinstance(v, (int, float)))
    kinds = "train_", "test_", "learning_rate", "seconds", "samples_per_second"
    names = [n for n in dict.fromkeys(figures) if n.startswith(kinds)]
    if not names:
        return None
    head = (
        "<tr><th>epoch</th>"
        + "".join(f'<th class="n">{_escape(n.replace("_", " "))}</th>' for n in names)
        + "</tr>"
    )
    rows = ""
    for number, record in sorted(run.epochs.items()):
        cells = (f'<td class="n">{_escape(_format_number(record.get(n)))}</td>' for n in names)
        mark = " <b>best</b>" if number == run.best.get("epoch") else ""
        rows += f"<tr><td>{number}{mark}</td>{''.join(cells)}</tr>"
    return f'<div class="scroll" tabindex="0"><table>{head}{rows}</table></div>'


def _draw_layout(run: Told) -> str:
    """Draws ranks as boxes in their hosts, with their replica, stage and share of the model."""
    mesh = run.latest.get("mesh", {})
    hosts = run.latest.get("hosts") or ["?"]
    pp = int(mesh.get("pp", 1))
    tp = int(mesh.get("tp", 1))
    boxes_by_host: dict[str, list[str]] = {}
    for rank, host in enumerate(hosts):
        # Ranks are in the order replica, stage, share: the share changes fastest.
        parts = [f"replica {rank // (pp * tp) + 1}"]
        if pp > 1:
            parts.append(f"stage {rank // tp % pp + 1}")
        if tp > 1:
            parts.append(f"share {rank % tp + 1}")
        boxes_by_host.setdefault(host, []).append(
            f'<span class="rank"><b>{rank}</b> {_escape(", ".join(parts))}</span>'
        )
    boxes = "".join(
        f'<div class="host"><p class="muted">{_escape(host)}</p><div '
        f'class="ranks">{"".join(rank_boxes)}</div></div>'
        for host, rank_boxes in boxes_by_host.items()
    )
    text = " x ".join(f"{axis}({mesh[axis]})" for axis in mesh)
    return (
        f'<p class="muted">{_escape(text)}, over {_escape(run.latest.get("backend", "?"))}</p><div '
        f'class="hosts">{boxes}</div>'
    )


def _format_checks(run: Told) -> str:
    """Returns a table of checks: fingerprints, repeated steps, and checksums of checkpoints.

    It reads all checkpoints now and compares their checksums.
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
        matches: list[bool] = []  # of each step that was repeated after a restart
        has_repeated_steps = len(log) > len(run.steps)
        for record in steplog.decoded(log) if has_repeated_steps else ():
            if record.step in newest:
                matches.append(steplog.difference(newest[record.step], record) is None)
            newest[record.step] = record
        if matches:
            text = f"{sum(matches):,} after a restart, with the same bits"
            text += f"; {matches.count(False):,} OTHERWISE" * (not all(matches))
            rows.append(("taken again", text))
    if run.run.checkpoints.is_dir():
        for checkpoint in saved.Store(run.run.checkpoints, owner=False).verified():
            if isinstance(checkpoint, Refused):
                rows.append((checkpoint.path.name, f"refused: {checkpoint.reason}"))
            else:
                name = f"checkpoint of step {checkpoint.step:,}"
                rows.append((name, "every checksum compared just now"))
    if run.done:
        rows.append(("weights", f"SHA-256 {run.done.get('weights_sha256')}"))
    return _format_table(rows) if rows else '<p class="muted">nothing is there to verify</p>'


def _format_command(run: Told) -> str:
    """Returns the command line of the run, its directory, and the versions of packages."""
    words = [str(word) for word in run.description.get("command", [])]
    if not words:
        return '<p class="muted">the run does not say what its command was</p>'
    ranks = run.description.get("ranks")
    line = shlex.join([*(["odyssey", "launch", "-n", str(ranks)] if ranks else []), *words])
    versions = ", ".join(f"{k} {v}" for k, v in (run.description.get("versions") or {}).items())
    note = f"in {run.description.get('directory')}" + f"; {versions}" * bool(versions)
    return f'<pre>{_escape(line)}</pre><p class="muted">{_escape(note)}</p>'


def _format_configuration(run: Told) -> str:
    """Returns a table of the configuration, and the layers of the model."""
    configuration = {
        name: value
        for name, value in (run.latest.get("configuration") or {}).items()
        if name not in LEFT_OUT
    }
    tensors = configuration.pop("model", None)
    if isinstance(tensors, list):
        count = sum(int(np.prod(shape)) for _, shape, *_ in tensors)
        configuration["parameters"] = f"{count:,} in {len(tensors)} tensors"
    if isinstance(configuration.get("data set"), list):
        del configuration["data set"][2:]  # the fingerprint of older checkpoints
    if isinstance(configuration.get("precision"), list) and configuration["precision"][1:] == [0]:
        del configuration["precision"][1:]  # the loss scale doesn't grow
    rows = [
        (name, _format_value(value))
        for name, value in configuration.items()
        if value not in (None, ["none", None])
    ]
    layers = run.latest.get("model")
    layers_html = f"<pre>{_escape(layers)}</pre>" if layers else ""
    return _format_table([("epochs", run.latest.get("epochs")), *rows]) + layers_html


def _format_value(value: Any) -> str:
    """Returns a value of a configuration as text.

    Lists are written without brackets. A name and its value are separated by a space.
    """
    if isinstance(value, list):
        is_name_and_value = (
            len(value) == 2 and isinstance(value[0], str) and not isinstance(value[1], list)
        )
        separator = " " if is_name_and_value else ", "
        return separator.join(_format_value(item) for item in value if item is not None)
    return value if isinstance(value, str) else json.dumps(value)


def page(paths: Sequence[Path]) -> str:
    """Returns the HTML page of some runs.

    Raises:
        DataError: one of them isn't a run, or a file of it is damaged.
        ConfigError: there are too many runs.
    """
    if len(paths) > RUNS:
        raise ConfigError(
            f"[report] {len(paths)} runs are given; at most {RUNS} can be told apart in one picture"
        )
    try:
        return _build_page([Told(path, i) for i, path in enumerate(paths)])
    # These errors come from files whose content isn't as odyssey writes it.
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        if isinstance(problem, OdysseyError):
            raise
        raise DataError(
            f"[report] a file of {', '.join(map(str, paths))} is damaged: {problem!r}"
        ) from problem


def _build_page(runs: Sequence[Told]) -> str:
    """Returns the HTML page: summaries and curves of all runs, then a section for each run."""
    test_metrics = sorted(
        {
            name
            for run in runs
            for record in run.epochs.values()
            for name in record
            if name.startswith("test_")
        }
    )
    curves = [
        _format_card("Training loss, by step", _draw_curves(runs, Told.loss, "step")),
        _format_card(
            "Learning rate",
            _draw_curves(runs, lambda run: (run.steps["step"], run.steps["rate"]), "step"),
        ),
        *(
            _format_card(
                name.replace("test_", "Validation: "),
                _draw_curves(runs, lambda run, name=name: run.figure(name), "epoch", dots=True),
            )
            for name in test_metrics
        ),
        _format_card(
            "Samples per second", _draw_curves(runs, Told.throughput, "seconds since the start")
        ),
        _format_card("Most memory of each rank, MiB", _draw_memory(runs)),
    ]
    sections = [("", "".join(map(_format_summary, runs))), ("Curves", "".join(curves))]
    for run in runs:
        cards = [
            _format_card("Starts, checkpoints, stops", _draw_time_line(run), wide=True),
            _format_card("A step of the pipeline", _draw_pipeline(run), wide=True),
            _format_card("Epochs", _format_epochs(run), wide=True),
        ]
        text = [
            _format_card("Ranks", _draw_layout(run)),
            _format_card("Verified", _format_checks(run)),
            _format_card(
                "Environment", _format_table((run.latest.get("environment") or {}).items())
            ),
            _format_card("Configuration", _format_configuration(run)),
        ]
        cards += [
            f'<div class="wide text">{"".join(text)}</div>',
            _format_card("The same again", _format_command(run), wide=True),
        ]
        sections.append((run.name, "".join(cards)))
    body = "".join(
        f"<section>{f'<h2>{_escape(heading)}</h2>' if heading else ''}"
        f'<div class="grid">{content}</div></section>'
        for heading, content in sections
    )
    title = ", ".join(run.name for run in runs)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{_escape(title)}</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" '
        f'content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{_escape(title)}</h1>{body}</main></body></html>\n"
    )
