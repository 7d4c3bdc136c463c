"""What a wheel, an editable install and an sdist carry.

They are built by the installed hatchling: no network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import odyssey

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for top in ("mojo", "shared")
    for path in (ROOT / top).rglob("*.mojo")
)
MNIST = [
    f"{part}-ubyte.gz"
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    def run(target):
        directory = tmp_path_factory.mktemp("dist")
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (made,) = directory.iterdir()
        return made

    return run


@pytest.fixture(scope="module")
def wheel(build):
    return build("wheel")


def names(wheel):
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_has_the_kernels_and_mnist(wheel):
    inside = names(wheel)
    assert {f"odyssey/_mojo/{name}" for name in SOURCES} <= set(inside)
    assert {f"odyssey/data/mnist/{name}" for name in MNIST} <= set(inside)
    assert {
        f"odyssey/data/shakespeare/{name}" for name in ("shakespeare.txt.gz", "LICENSE.txt")
    } <= set(inside)
    assert {
        "odyssey/cli/__init__.py",
        "odyssey/compile/library.py",
        "odyssey/data/__init__.py",
    } <= set(inside)


def test_wheel_has_nothing_else(wheel):
    for name in names(wheel):
        assert name.startswith(("odyssey/", "ml_odyssey-")) or name == "odyssey_c10d.py", name
        assert not name.endswith((".so", ".pyc", ".mojoc")), name
        if name.startswith("odyssey/_mojo/"):
            assert name.removeprefix("odyssey/_mojo/") in SOURCES


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in names(wheel) if name.endswith(".dist-info/METADATA")).rpartition(
        "/"
    )[0]
    assert "odyssey = odyssey.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in names(wheel)
    metadata = archive.read(f"{info}/METADATA").decode()
    assert metadata.splitlines()[1:3] == ["Name: ml-odyssey", f"Version: {odyssey.__version__}"]
    assert info == f"ml_odyssey-{odyssey.__version__}.dist-info"
    assert "Requires-Dist: max==" in metadata
    assert "Requires-Python: >=3.10" in metadata


def test_unpacked_wheel_finds_its_sources(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "from odyssey.build import library, source_root\n"
    script += "print(source_root()); print(library.source_hash(source_root()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    root, digest = done.stdout.split()
    assert Path(root) == tmp_path / "odyssey" / "_mojo"
    from odyssey.compile import library as installed

    assert digest == installed.source_hash(ROOT)  # the same cache entry as the checkout's


def test_editable_install_points_at_the_checkout(build):
    inside = names(build("wheel:editable"))
    assert any(name.endswith(".pth") for name in inside)
    assert not [name for name in inside if name.startswith("odyssey/")]


VERSIONS = """
import odyssey
from odyssey.cli import doctor
from odyssey.train import preflight

print(odyssey.__version__, preflight.versions()["odyssey"], doctor.packages().found.split(",")[0])
"""


@pytest.mark.parametrize("installed", ["nothing", "ml-odyssey", "odyssey"])
def test_the_version_is_that_of_the_code_that_runs(installed, tmp_path):
    """Also in a source tree without an installation, or next to the metadata of another version."""
    shutil.copytree(
        ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__", "mnist")
    )
    init = tmp_path / "python" / "odyssey" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{odyssey.__version__}"', '"9.8.7"'))
    if installed != "nothing":
        info = tmp_path / "site" / f"{installed.replace('-', '_')}-5.5.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {installed}\nVersion: 5.5.5\n"
        )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'python'}{os.pathsep}{tmp_path / 'site'}",
    }
    done = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["9.8.7", "9.8.7", "odyssey", "9.8.7"], done.stderr


def test_sdist_can_make_the_wheel(build):
    inside = {name.partition("/")[2] for name in tarfile.open(build("sdist")).getnames()}
    assert set(SOURCES) <= inside
    assert {f"python/odyssey/data/mnist/{name}" for name in MNIST} <= inside
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "pixi.toml"} <= inside
    assert "tests/packaging/test_distributions.py" in inside
