"""The page of a run: what it says, that it loads nothing, and that what a run's files say is
text on it.
"""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.errors import ConfigError, DataError, Stopped
from odyssey.view import picture, report


def trained(monkeypatch, path, steps: int, **more) -> None:
    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(path))
    monkeypatch.setattr("odyssey.train.session._fits", 0)
    path.mkdir(mode=0o700, exist_ok=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 3, 40)
    nn.manual_seed(0)
    trainer = DistributedTrainer(nn.Linear(6, 3), optim.SGD(lr=0.1), threads=1)
    loader = data.DataLoader(data.arrays(x, y, classes=3), 8)
    trainer.fit(loader, loader.dataset, epochs=4, steps=steps, verbose=False, **more)


def test_two_runs_one_of_which_went_on(monkeypatch, tmp_path):
    trained(monkeypatch, tmp_path / "a", 10)
    trained(monkeypatch, tmp_path / "a", 20)
    early = callbacks.EarlyStopping("train_loss", patience=1, min_delta=9.0)  # after two epochs
    trained(monkeypatch, tmp_path / "b<script>", 20, callbacks=[early])
    about = {
        "command": ["train", "--lr", "<b>"],
        "ranks": 2,
        "directory": "/d",
        "versions": {"odyssey": "1"},
    }
    (tmp_path / "a" / "run.json").write_text(json.dumps(about))
    page = report.page([tmp_path / "a", tmp_path / "b<script>"])
    assert not re.search(r"https?:|<script|<link|<img|@import|url\((?!#)", page), "it loads nothing"
    assert ">fp32<" in page  # and no loss scale behind it
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    for said in (
        "20 steps",
        "2 starts",
        "b<script>",
        "odyssey launch -n 2 train --lr '<b>'",
        "20 in the log",
        "numpy",
        "by EarlyStopping",
    ):
        assert said in re.sub(r"\s+", " ", text), said
    assert page.count("<svg") == page.count("</svg>") >= 8
    places = set(re.findall(r"var\(--(\w+)\)", page))
    assert {"text", "muted", "grid", "s0", "s1"} <= places <= set(re.findall(r"--(\w+):", page))
    assert "<pre>Linear(6, 3)</pre>" in page  # the model, as it prints itself


def marks(picture: str) -> list[tuple[float, float, str]]:
    """The marks of a picture: place, and what they say."""
    found = re.findall(r'translate\(([-\d.]+) ([-\d.]+)\)"><title>([^<]*)<', picture)
    return [(float(x), float(y), said) for x, y, said in found]


def test_pictures_hold_what_they_show(monkeypatch, tmp_path):
    trained(monkeypatch, tmp_path / "a", 20)
    page = report.page([tmp_path / "a"])
    for drawn in re.findall(r'<svg viewBox="0 0 (?!20 20).*?</svg>', page):
        width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
        texts = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)">([^<]+)<', drawn)
        assert texts
        # DejaVu, a wide font, takes 0.64 of its height for a digit
        for x, y, anchor, text in texts:
            wide = 0.64 * picture.TEXT_HEIGHT * len(text)
            left = float(x) - (wide if anchor == "end" else wide / 2)
            assert (
                left >= 0 and left + wide <= width and picture.TEXT_HEIGHT <= float(y) <= height
            ), text
        for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", re.sub(r"<g .*?</g>", "", drawn)):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
    line = next(
        svg for svg in re.findall(r"<svg.*?</svg>", page) if "end of epoch 1, step 5" in svg
    )
    said = sorted(marks(line))
    assert [text for *_, text in said if "epoch" in text] == [
        f"end of epoch {e}, step {5 * e}" for e in (1, 2, 3, 4)
    ]
    assert any(text == "checkpoint, step 20" for *_, text in said)
    legend = re.findall(r'<svg class="mark".*?</svg>([\w ]+?) ?(?=<)', page)
    assert legend == ["end of epoch", "checkpoint"]  # what is not drawn is not in it


def test_every_name_is_escaped(monkeypatch, tmp_path):
    path = tmp_path / "<script>run"
    trained(monkeypatch, path, 5)
    journal = path / "journal.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    for row in rows:
        row["attempt"], row["why"] = "<script>attempt", "<script>why"
        row["model"], row["hosts"] = "<script>Net()", ["<script>host"]
        row.get("configuration", {}).update(
            {"<script>key": ["<script>class", {"<script>": "<script>"}]}
        )
        row.get("environment", {}).update({"<script>package": "<script>1.0"})
        row.get("record", {}).update({"test_<script>column": 0.5})
    rows.insert(-1, {**rows[-1], "event": "failed"})
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "run.json").write_text(
        json.dumps({"command": ["<script>c"], "versions": {"<script>": "<script>v"}})
    )
    page = report.page([path])
    assert "<script" not in page
    for name in "run attempt why Net() host key class package 1.0 column c v".split():
        assert f"&lt;script&gt;{name}" in page, name


@pytest.mark.parametrize(
    ("low", "high", "whole", "wanted"),
    [
        (0, 1, False, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (-0.5, 1.5, True, "0 1"),
        (1, 20, True, "5 10 15 20"),
        (2_300, 2_301, False, "2,300.0 2,300.2 2,300.4 2,300.6 2,300.8 2,301.0"),
        (0, 3e-8, False, "0 5e-09 1e-08 1.5e-08 2e-08 2.5e-08 3e-08"),
        (0, 4e12, False, "0 1e+12 2e+12 3e+12 4e+12"),
    ],
)
def test_ticks_are_round(low, high, whole, wanted):
    assert [text for _, text in picture.ticks(low, high, whole)] == wanted.split()


@pytest.mark.parametrize(
    "values", [[], [np.nan, np.inf], [3.0], [0.0, 0.0], [1e-300, 1e300], [-5, 7]]
)
def test_a_span_has_room(values):
    low, high = picture.span(values, 0.05)
    finite = [v for v in values if np.isfinite(v)]
    assert (
        low < high
        and all(low <= v <= high for v in finite)
        and 1 < len(picture.ticks(low, high)) <= 7
    )


def test_a_run_that_was_stopped_and_damaged_ones(monkeypatch, tmp_path):
    class Stop(callbacks.Callback):
        def on_step_end(self, context):
            if context.steps == 3:
                context.stop = "a test"

    with pytest.raises(Stopped):
        trained(monkeypatch, tmp_path / "a", 10, callbacks=[Stop()])
    page = report.page([tmp_path / "a"])
    assert "stopped by a test after step 3" in page and "ended, not complete" in page
    with pytest.raises(DataError, match="no journal"):
        report.page([tmp_path])
    with pytest.raises(ConfigError, match="at most 6"):
        report.page([tmp_path / "a"] * 7)
    journal = tmp_path / "a" / "journal.jsonl"
    journal.write_text(
        '{"time": 1, "event": "start", "hosts": 5, "attempt": []}\n{"time": 2, "event": "epoch", '
        '"record": {}}\n'
    )
    with pytest.raises(DataError, match="damaged"):
        report.page([tmp_path / "a"])
