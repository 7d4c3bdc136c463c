"""A release: made here, installed from its files, and run, on the Pythons of this machine and on
an emulated ARM.
"""

from __future__ import annotations

import base64
import csv
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

import odyssey
from beds import outside
from odyssey.compile import compiler, folder

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import wheel_kernels  # noqa: E402

NAME = f"ml_odyssey-{odyssey.__version__}"
TRAIN = ["train", "--steps", "20", "--no-eval"]
MINORS = range(10, 15)  # of Python 3, those that scripts/release locks packages for
OWN = sys.version_info.minor
pytestmark = pytest.mark.skipif(
    folder.system() != "linux-x86_64", reason="wheels are tried on Linux, x86-64"
)


def run(*words: object, limit: int = 900, **how: object) -> str:
    """What a command prints on both streams.

    It fails the test with that, also when it takes longer than `limit` seconds: it is ended then,
    with its children.
    """
    words = (shutil.which("timeout"), "-k", "10", limit, *words)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **how}
    done = subprocess.run(list(map(str, words)), stdin=subprocess.DEVNULL, **how)
    why = (
        f"took longer than {limit} s" if done.returncode == 124 else f"ended with {done.returncode}"
    )
    if done.returncode:
        pytest.fail(
            f"{' '.join(map(str, words[4:]))}\n{why}:\n{done.stdout[-6000:]}", pytrace=False
        )
    return done.stdout


def weights(said: str) -> str:
    found = re.search(r"weights ([0-9a-f]{16})$", said, re.MULTILINE)
    assert found, said
    return found[1]


def wheel(dist: Path, machine: str) -> Path:
    (found,) = dist.glob(f"{NAME}-py3-none-manylinux_*_{machine}.whl")
    return found


def here(*words: str, **environment: str) -> str:
    """odyssey's command in the checkout, with kernels that are compiled on this machine."""
    where = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return run(sys.executable, "-m", "odyssey", *words, env=where, limit=1800)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The files, made once; ODYSSEY_DIST names a folder with those of these sources, made
    before.
    """
    if made := os.environ.get("ODYSSEY_DIST"):
        return Path(made)
    home = tmp_path_factory.mktemp("release") / "dist"
    run(sys.executable, ROOT / "scripts" / "release", home, limit=3000)
    return home


# -- the files -------------------------------------------------------------------------------------


def test_the_files(dist):
    lines = [line.split("  ") for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for _, name in lines} == {
        name: digest for digest, name in lines
    }
    assert len(lines) == 3 and f"{NAME}.tar.gz" in dict(map(reversed, lines))
    for system, cpus in wheel_kernels.SHIPPED.items():
        path = wheel(dist, system.partition("-")[2])
        archive = zipfile.ZipFile(path)
        names = set(archive.namelist())
        kernels = {
            f"odyssey/_kernels/{cpu}/{name}"
            for cpu in cpus
            for name in (folder.MANIFEST, "libodyssey.so")
        }
        assert {
            name for name in names if name.startswith("odyssey/_kernels") or name.endswith(".so")
        } == kernels
        assert {
            f"{NAME}.dist-info/sboms/ml-odyssey.cdx.json",
            f"{NAME}.dist-info/licenses/LICENSE",
        } <= names
        said = archive.read(f"{NAME}.dist-info/WHEEL").decode()
        assert (
            f"Tag: {path.stem.removeprefix(f'{NAME}-')}\n" in said
            and "Root-Is-Purelib: false" in said
        )
        for name, digest, _ in csv.reader(
            archive.read(f"{NAME}.dist-info/RECORD").decode().splitlines()
        ):
            own = (
                base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
                .rstrip(b"=")
                .decode()
            )
            assert digest == f"sha256={own}" or (digest == "" and name.endswith("RECORD"))


def test_the_list_of_components_is_what_is_locked(dist):
    lock = (ROOT / "requirements.lock").read_text()
    archive = zipfile.ZipFile(wheel(dist, "aarch64"))
    bom = json.loads(archive.read(f"{NAME}.dist-info/sboms/ml-odyssey.cdx.json"))
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    component = bom["metadata"]["component"]
    assert (component["name"], component["version"]) == ("ml-odyssey", odyssey.__version__)
    assert component["purl"] == f"pkg:pypi/ml-odyssey@{odyssey.__version__}"
    listed = {
        (c["name"], c["version"]): [h["content"] for h in c["hashes"]] for c in bom["components"]
    }
    assert {f"{name}=={version}" for name, version in listed} == set(
        re.findall(r"^[\w.-]+==[\w.]+", lock, re.M)
    )
    assert sorted(sum(listed.values(), [])) == sorted(re.findall(r"sha256:(\w+)", lock))
    names = {name for name, _ in listed}
    metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.M))
    assert {"max", "numpy", "mpi4py", "mpich"} <= required <= names and {
        "mojo-compiler",
        "tomli",
    } <= names
    assert "://" not in lock and "://" not in json.dumps(bom["components"])


def test_the_sdist_makes_the_same_wheel_elsewhere(dist, tmp_path):
    """Compiled anew, with no compiler's cache: another home."""
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    options = ["--system", "linux-aarch64", "--no-sdist"]
    where = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / NAME / "python")}
    where.pop("XDG_CACHE_HOME", None)
    release = tmp_path / NAME / "scripts" / "release"
    run(sys.executable, release, tmp_path / "dist", *options, env=where, cwd=tmp_path, limit=1800)
    made, again = (zipfile.ZipFile(wheel(home, "aarch64")) for home in (dist, tmp_path / "dist"))
    assert made.namelist() == again.namelist()
    differ = [name for name in made.namelist() if made.read(name) != again.read(name)]
    assert (
        differ == []
        and wheel(dist, "aarch64").read_bytes() == wheel(tmp_path / "dist", "aarch64").read_bytes()
    )


# -- installed -------------------------------------------------------------------------------------

NOBODY = (
    ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
)


def _says(*words: str) -> str:
    """What a command prints, nothing if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def _python(minor: int) -> tuple[list[str], str] | None:
    """(how to become who runs it, Python 3.minor): another user than root where there is one
    that any user may run.
    """
    names = [f"/usr/bin/python3.{minor}", shutil.which(f"python3.{minor}"), sys.executable]
    names += glob.glob(f"{Path.home()}/.pyenv/versions/3.{minor}.*/bin/python")
    ask = "import sys, venv; print(sys._base_executable if sys.version_info[1] == {} else '')"
    found = [base for name in names if name and (base := _says(name, "-c", ask.format(minor)))]
    for user in (NOBODY, []):
        for base in found:
            if _says(*user, base, "-c", "print(1)"):
                return user, base
    return None


class Installed:
    """An environment with the wheel; commands have a PATH without a C compiler and write to a
    folder of their own.
    """

    def __init__(self, home: Path, user: list[str], python: str, file: Path) -> None:
        self.bin, self.home, self.user = home / "venv" / "bin", home / "user", user
        run(python, "-m", "venv", "--without-pip", home / "venv")
        run(
            sys.executable,
            "-m",
            "pip",
            "-q",
            "--python",
            self.bin / "python",
            "install",
            file,
            limit=1800,
        )
        self.home.mkdir()
        if user:
            os.chown(self.home, 65534, 65534)
        assert not any(shutil.which(name, path=str(self.bin)) for name in ("cc", "gcc", "clang"))

    def __call__(self, *words: object, **environment: str) -> str:
        where = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            **environment,
        }
        user = [shutil.which(self.user[0]), *self.user[1:]] if self.user else []
        return run(*user, self.bin / str(words[0]), *words[1:], env=where, cwd=self.home)


@pytest.fixture(scope="module")
def installed(dist, request):
    """In Python 3.request.param. One after the other: an installation takes 0.8 GB."""
    found = _python(request.param)
    if found is None:
        pytest.skip(f"no Python 3.{request.param} here")
    # pytest's own are for one user
    with tempfile.TemporaryDirectory(prefix="odyssey-release-test-") as home:
        os.chmod(home, 0o755)
        yield Installed(Path(home), *found, wheel(dist, platform.machine()))


@pytest.mark.parametrize(
    "installed", [pytest.param(minor, id=f"3.{minor}") for minor in MINORS], indirect=True
)
def test_installed_it_trains_at_once(installed):
    first = installed("odyssey", *TRAIN)
    assert "compil" not in first and {path.name for path in installed.home.iterdir()} <= {".cache"}
    assert weights(installed("mpiexec", "-n", "2", installed.bin / "odyssey", *TRAIN)) == weights(
        first
    )
    assert weights(first) == weights(here(*TRAIN))
    assert "/odyssey/_kernels/" in installed("odyssey", "doctor", "--json")
    assert not list(installed.home.rglob("libodyssey*"))


@pytest.mark.parametrize("installed", [pytest.param(OWN, id=f"3.{OWN}")], indirect=True)
@pytest.mark.parametrize("cpu", wheel_kernels.SHIPPED["linux-x86_64"])
def test_its_kernels_have_the_bits_of_kernels_compiled_here(installed, cpu):
    if lacking := compiler.lacking(cpu):
        pytest.skip(f"this CPU has no {', '.join(lacking)}")
    if (
        cpu not in (wheel_kernels.SHIPPED["linux-x86_64"][0], compiler.host_cpu())
        and not outside.SLOW
    ):
        pytest.skip(f"compiles the kernels once more: {outside.WHY_SLOW}")
    text = [
        "--model",
        "gpt-mini",
        "--steps",
        "2",
        "--global-batch-size",
        "4",
        "--precision",
        "bf16",
    ]
    for more in ([], text):
        assert weights(installed("odyssey", *TRAIN, *more, ODYSSEY_TARGET_CPU=cpu)) == weights(
            here(*TRAIN, *more, ODYSSEY_TARGET_CPU=cpu)
        ), more
    assert not list(installed.home.rglob("libodyssey*"))


# -- in an unpacked root: a Python that is not here, and ARM ---------------------------------------


def _unpacked(
    home: Path, dist: Path, machine: str, suite: str, minor: str = ""
) -> tuple[Path, Path, Path]:
    """(root, site, Python): Debian's Python in an unpacked root, and beside it the wheel and
    what it needs.
    """
    wanted = ["mmdebstrap", "qemu-aarch64-static"][: 1 + (machine != platform.machine())]
    if missing := [name for name in wanted if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)} (packages qemu-user-static and mmdebstrap)")
    if os.geteuid():
        pytest.skip("mmdebstrap unpacks a root as root")
    root, site, debian = (
        home / "root",
        home / "site",
        {"x86_64": "amd64", "aarch64": "arm64"}[machine],
    )
    names = f"python3{minor},libpython3{minor}-stdlib,libstdc++6,libgcc-s1"
    parts = ["--variant=extract", f"--architectures={debian}", f"--include={names}"]
    parts += ['--aptopt=Acquire::Check-Valid-Until "false"']  # mirrors may be some weeks old
    run("mmdebstrap", "--mode=root", "--quiet", *parts, suite, home / "root.tar")
    root.mkdir()
    run("tar", "-xf", home / "root.tar", "-C", root, "--exclude=./dev")
    python = next(
        path
        for path in sorted((root / "usr" / "bin").glob("python3.*"))
        if path.name[8:].isdecimal()
    )
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed (extra [release])")
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
    uv += [
        f"--python-platform={machine}-manylinux_2_34",
        f"--python-version={python.name[6:]}",
        f"--target={site}",
    ]
    run(*uv, "--require-hashes", "-r", ROOT / "requirements.lock")
    run(
        *uv,
        wheel(dist, machine),
        "pytest",
        "pytest-xdist",
        "execnet",
        "pluggy",
        "iniconfig",
        "packaging",
    )
    # where mpi4py looks
    shutil.copytree(site / "lib", root / "usr" / "lib", dirs_exist_ok=True, symlinks=True)
    return root, site, python


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its loader is run as it is")
def test_a_python_of_a_later_debian_trains_with_the_same_bits(dist):
    """Python 3.14, which neither this Debian nor the package index has: run by the loader of its
    own C library.
    """
    with tempfile.TemporaryDirectory(prefix="odyssey-release-test-") as home:
        root, site, python = _unpacked(Path(home), dist, "x86_64", "testing", ".14")
        own = ["env", "-u", "ODYSSEY_KERNELS", f"PYTHONPATH={site}", f"HOME={site}"]
        own += [
            root / "usr/lib64/ld-linux-x86-64.so.2",
            "--library-path",
            root / "usr/lib/x86_64-linux-gnu",
            python,
        ]
        ask = (
            "import sys; from odyssey.core import native; print(sys.version_info[:2], "
            "native.library().path)"
        )
        assert re.fullmatch(
            r"\(3, 14\) \S+/site/odyssey/_kernels/\S+/libodyssey.so\n", run(*own, "-c", ask)
        )
        one = run(*own, "-m", "odyssey", *TRAIN)
        two = run(
            Path(sys.executable).with_name("mpiexec"),
            "-n",
            "2",
            *own,
            "-m",
            "odyssey",
            *TRAIN,
            "-v",
        )
    assert "compil" not in one and "2 ranks as dp(2)" in two
    assert weights(one) == weights(two) == weights(here(*TRAIN))


@pytest.fixture(scope="module")
def arm(dist):
    """Debian's Python for ARM, with the wheel and what it needs: the command that runs it."""
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
    with tempfile.TemporaryDirectory(prefix="odyssey-release-test-") as home:  # 1 GB
        root, site, python = _unpacked(Path(home), dist, "aarch64", suite)
        environment = [word for name in ("PYTHONPATH", "HOME") for word in ("-E", f"{name}={site}")]
        yield ["qemu-aarch64-static", "-L", root, *environment, "-U", "ODYSSEY_KERNELS", python]


def test_arm_is_what_runs(arm):
    ask = (
        "import platform; from odyssey.core import native; print(native.library().path, "
        "platform.machine())"
    )
    assert re.fullmatch(
        r"\S+/site/odyssey/_kernels/generic/libodyssey.so aarch64\n", run(*arm, "-c", ask)
    )


def test_arm_has_the_same_bits_on_one_rank_and_on_two(arm):
    one = run(*arm, "-m", "odyssey", *TRAIN)
    two = run(
        Path(sys.executable).with_name("mpiexec"), "-n", "2", *arm, "-m", "odyssey", *TRAIN, "-v"
    )
    assert "2 ranks as dp(2)" in two and weights(two) == weights(one)


@pytest.mark.parametrize("file", ["ops", "optimizers", "random"])
def test_kernels_on_arm(arm, file):
    said = run(
        *arm,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-pno:cacheprovider",
        f"tests/kernels/test_{file}.py",
        cwd=ROOT,
    )
    assert re.search(r"^[1-9]\d* passed", said.splitlines()[-1]), said
