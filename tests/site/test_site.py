"""The site is built without a warning and loads nothing from outside; its notebooks print what
they show.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # for who changes pages
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra site)")
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_nothing_is_loaded_from_outside(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        loads = re.findall(
            r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=[\"']?(https?://[^\s\"'>]+)", text
        )
        assert not [target for target in loads if "rel=canonical" not in target], (page, loads)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?https?://", sheet.read_text()), sheet


def test_the_reference_has_python_and_mojo(site):
    assert "min_delta" in (site / "reference/odyssey.callbacks/index.html").read_text()
    trainer = (site / "reference/odyssey/index.html").read_text()
    assert "DistributedTrainer" in trainer and "{settings}" not in trainer
    mojo = (site / "reference/mojo/index.html").read_text()
    assert "LeNet5" in mojo and 'id="rmsprop"' in mojo
    assert any(
        "EarlyStopping" in entry["text"]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    )


def test_without_the_compiler_the_site_has_a_page_that_says_so(monkeypatch, caplog):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    pages = importlib.import_module("site_pages")
    monkeypatch.setattr(pages.shutil, "which", lambda name, path: None)
    text = "\n".join(pages._mojo())
    assert (
        text.startswith("# Mojo: shared.training\n")
        and "`mojo`, is not on PATH; install it" in text
    )
    # an error of `mkdocs build --strict`
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("module", ["odyssey", "odyssey.torch"])
def test_the_reference_has_the_trainer_s_methods_that_users_call(site, module):
    page = (site / f"reference/{module}/index.html").read_text()
    trainer = f"{module}.DistributedTrainer"
    entries = set(re.findall(rf'id="{re.escape(trainer)}\.(\w+)"', page))
    called = (
        "fit train_step evaluate predict save_checkpoint load_checkpoint weights_sha256 "
        "state_dict memory"
    )
    assert entries >= set(called.split())
    internal = (
        "rehearse compare scale_rate measured count_bytes gradients take_step say stays "
        "state expect put_back"
    )
    assert not entries & set(internal.split())
    assert "checkpoint_every" in page and "steps from one to the next" in page  # fit's arguments


def test_the_reference_of_torch_has_all_public_names(site):
    torch_names = pytest.importorskip("odyssey.torch").__all__
    page = (site / "reference/odyssey.torch/index.html").read_text()
    missing = {name for name in torch_names if f'id="odyssey.torch.{name}"' not in page}
    assert missing == {"c10d"}  # a module that is imported for what it registers


@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_the_front_page(site, tmp_path, width):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium")
    picture = tmp_path / "page.png"
    words = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={picture}",
    ]
    subprocess.run(
        [*words, f"--window-size={width},1600", f"file://{site}/index.html"],
        timeout=120,
        capture_output=True,
    )
    assert picture.stat().st_size > 50_000  # an empty page has 10,000


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(notebook, tmp_path):
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert cells and any(cell["outputs"] for cell in cells)
    if "torch" in notebook.stem:
        pytest.importorskip("torch")
    program = ["mark = chr(0)"]
    for cell in cells:
        program += ["".join(cell["source"]), "print(end=mark, flush=True)"]
    (tmp_path / "program.py").write_text("\n".join(program))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PATH": path}
    done = subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shown = [
        "".join(line for output in cell["outputs"] for line in output.get("text", []))
        for cell in cells
    ]
    assert done.stdout.split("\0")[:-1] == shown


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3
