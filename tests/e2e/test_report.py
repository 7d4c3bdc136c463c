"""The page of a run: what it says, that it loads nothing, and that what a run's files say is text on it."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest

from odyssey import DistributedTrainer, callbacks, data, nn, optim
from odyssey.audit import report
from odyssey.errors import ConfigError, DataError, Stopped

pytest.importorskip("matplotlib")


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
    about = {"command": ["train", "--lr", "<b>"], "ranks": 2, "directory": "/d", "versions": {"odyssey": "1"}}
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
    assert not re.search("#12340|#5e51", page)  # no stand-in for a colour is left
    ids = re.findall(r' id="([^"]+)"', page)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used <= set(ids)


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
        '{"time": 1, "event": "start", "hosts": 5, "attempt": []}\n{"time": 2, "event": "epoch", "record": {}}\n'
    )
    with pytest.raises(DataError, match="damaged"):
        report.page([tmp_path / "a"])
