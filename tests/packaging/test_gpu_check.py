"""scripts/gpu-check without a GPU: parts that fail or hang, and visits that resume earlier ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import main as program  # noqa: E402
from gpu_check import parts, prepare, results  # noqa: E402
from gpu_check.check import Check, Skip  # noqa: E402
from gpu_check.parts import machine, products, times  # noqa: E402


def wait_until_gone(pid: str) -> None:
    """Returns when a process has ended. It may be listed for a moment longer."""
    process = Path("/proc") / pid / "stat"
    for _ in range(100):
        if not process.exists() or process.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("a process that a command started is still there")


# --- parts that fail ------------------------------------------------------------------------------


@pytest.fixture
def visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs gpu-check with these parts on a GPU that is not there; returns its exit code and the
    records.
    """
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "libodyssey.so").write_bytes(b"kernels")
    monkeypatch.setattr(machine, "driver", lambda c: {})
    monkeypatch.setattr(machine, "gpus", lambda c: [("9.0", "Some GPU")])
    monkeypatch.setattr(program, "commit", lambda otherwise: "abc")

    def run(chosen: Sequence[parts.Part], *options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(parts, "PARTS", tuple(chosen))
        code = program.main(
            ["--kernels", str(kernels), "--output", str(tmp_path / "out"), *options]
        )
        return code, json.loads((tmp_path / "out" / "gpu-check.json").read_text())

    return run


class Counted:
    """A part that counts its runs and passes, or fails as often as it should."""

    def __init__(self, failures: int = 0) -> None:
        self.runs = 0
        self._failures = failures

    def part(self, name: str, **settings: Any) -> parts.Part:
        def do(c: Check) -> dict[str, Any]:
            self.runs += 1
            if self.runs <= self._failures:
                raise RuntimeError("it went wrong")
            return {"run": self.runs}

        return parts.Part(name, do, 20, **{"reads": (), **settings})


def test_other_parts_run_after_one_that_fails(visit: Any, tmp_path: Path) -> None:
    """A command that hangs is killed with all that it started, and one that dies says how."""
    child = tmp_path / "child"

    def hangs(c: Check) -> dict[str, Any]:
        return {
            "output": c.run(
                "sh", "-c", f"echo before; sleep 600 & echo $! > {child}; wait", limit=2
            )
        }

    def dies(c: Check) -> dict[str, Any]:
        return {
            "output": c.python(
                "-c", "import os; print('CUDA_ERROR_ILLEGAL_ADDRESS', flush=True); os.abort()"
            )
        }

    def works(c: Check) -> dict[str, Any]:
        return {"output": c.run("echo", "here")}

    chosen = [parts.Part(f.__name__, f, 20) for f in (hangs, dies, works)]
    code, records = visit(chosen)
    assert code == 1
    assert records["hangs"]["error"].startswith("took more than 2 s: before")
    assert "exit code -6" in records["dies"]["error"] and "memcheck" in records["dies"]["hint"]
    assert records["works"]["output"] == "here\n"
    log = (tmp_path / "out" / "gpu-check.log").read_text()
    assert "\nbefore\n" in log and "\nhere\n" in log and "CUDA_ERROR_ILLEGAL_ADDRESS" in log
    wait_until_gone(child.read_text().strip())


# --- visits that resume ---------------------------------------------------------------------------


def test_resume_skips_what_passed_and_runs_the_rest_again(
    visit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Counted()
    bad = Counted(failures=1)
    later = Counted()

    def absent(c: Check) -> dict[str, Any]:
        raise Skip("no tool")

    chosen = [good.part("good"), bad.part("bad"), parts.Part("absent", absent, 20, ())]
    assert visit(chosen)[0] == 1
    capsys.readouterr()
    code, records = visit([*chosen, later.part("later")], "--resume")
    assert code == 0 and (good.runs, bad.runs, later.runs) == (1, 2, 1)
    assert records["good"]["run"] == 1 and records["bad"]["passed"] is True
    summary = capsys.readouterr().out.split("summary:\n")[1].splitlines()
    assert [line.split(" s  ")[1] for line in summary[:4]] == [
        f"skipped (passed at abc, in {records['good']['seconds']} s)",
        "passed",
        "not run (no tool)",
        "passed",
    ]
    assert summary[4].startswith("passed; not run: absent in ")


def test_other_kernels_sources_or_gpu_run_again_what_they_touch(
    visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("a")
    counted = {name: Counted() for name in ("kernels", "program", "both", "neither")}
    settings: dict[str, dict[str, Any]] = {
        "kernels": {},
        "program": {"reads": (str(source),), "kernels": False},
        "both": {"reads": (str(source),), "without": (str(source / "unused"),)},
        "neither": {"kernels": False},
    }
    chosen = [counted[name].part(name, **settings[name]) for name in counted]

    def runs() -> list[int]:
        assert visit(chosen, "--resume")[0] == 0
        return [one.runs for one in counted.values()]

    assert runs() == runs() == [1, 1, 1, 1]
    monkeypatch.setattr(program, "commit", lambda otherwise: "another commit")
    assert runs() == [1, 1, 1, 1]
    (tmp_path / "kernels" / "libodyssey.so").write_bytes(b"others")
    assert runs() == [2, 1, 2, 1]
    (source / "a.py").write_text("b")
    assert runs() == [2, 2, 3, 1]
    (source / "new.py").write_text("")
    assert runs() == [2, 3, 4, 1]
    (source / "unused").mkdir()
    (source / "unused" / "b.py").write_text("b")
    assert runs() == [2, 4, 4, 1]
    monkeypatch.setattr(machine, "gpus", lambda c: [("9.0", "Another GPU")])
    assert runs() == [3, 5, 5, 2]


def test_a_visit_that_is_killed_keeps_what_it_has(visit: Any) -> None:
    seen: list[str] = []

    def long(c: Check) -> dict[str, Any]:
        def item(name: str) -> str:
            if name == "third" and seen.count("third") == 0:
                seen.append(name)
                raise KeyboardInterrupt
            seen.append(name)
            return name.upper()

        return {
            name: c.once(name, lambda name=name: item(name))
            for name in ("first", "second", "third")
        }

    chosen = [parts.Part("long", long, 20, ())]
    with pytest.raises(KeyboardInterrupt):
        visit(chosen)
    code, records = visit(chosen, "--resume")
    assert code == 0 and seen == ["first", "second", "third", "third"]
    assert records["long"]["second"] == "SECOND" and records["long"]["passed"] is True
    assert "so far" not in records["long"]


def test_items_of_other_kernels_are_not_used(visit: Any, tmp_path: Path) -> None:
    seen: list[str] = []

    def part(c: Check) -> dict[str, Any]:
        c.once("first", lambda: seen.append("first"))
        raise RuntimeError("afterwards")

    chosen = [parts.Part("part", part, 20, ())]
    _, records = visit(chosen)
    assert records["part"]["so far"] == {"first": None} and records["part"]["passed"] is False
    visit(chosen, "--resume")
    assert seen == ["first"]
    (tmp_path / "kernels" / "libodyssey.so").write_bytes(b"others")
    visit(chosen, "--resume")
    assert seen == ["first", "first"]


def test_a_part_for_which_no_time_is_left_keeps_what_it_had(
    visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the first commit counts again when its kernels come back."""
    one = Counted()
    chosen = [one.part("one")]
    visit(chosen)

    def late(c: Check) -> dict[str, Any]:
        raise Skip("no time is left")

    library = tmp_path / "kernels" / "libodyssey.so"
    library.write_bytes(b"others")
    for _ in range(2):
        _, records = visit([parts.Part("one", late, 20, ())], "--resume")
        assert (
            records["one"]["not run"] == "no time is left" and records["one"]["before"]["run"] == 1
        )
        assert "before" not in records["one"]["before"]
    library.write_bytes(b"kernels")
    _, records = visit(chosen, "--resume")
    assert one.runs == 1 and records["one"]["passed"] is True and records["one"]["run"] == 1


def test_a_part_keeps_its_result_when_another_one_is_asked_for(visit: Any) -> None:
    counted = [Counted(), Counted()]
    chosen = [one.part(name) for one, name in zip(counted, ("a", "b"), strict=True)]
    visit(chosen)
    _, records = visit(chosen, "--resume", "--only", "b")
    assert set(records) == {"a", "b"} and records["a"]["run"] == 1


def test_without_resume_the_earlier_file_is_moved_aside(visit: Any, tmp_path: Path) -> None:
    one = Counted()
    chosen = [one.part("one")]
    for _ in range(3):
        visit(chosen)
    assert one.runs == 3
    kept = sorted(p.name for p in (tmp_path / "out").glob("*.json"))
    assert kept == ["gpu-check-before-1.json", "gpu-check-before-2.json", "gpu-check.json"]
    assert json.loads((tmp_path / "out" / "gpu-check-before-1.json").read_text())["one"]["run"] == 1


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"one": {"passed": true}']
)
def test_a_damaged_file_is_reported_and_not_trusted(
    visit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    one = Counted()
    visit([one.part("one")])
    (tmp_path / "out" / "gpu-check.json").write_bytes(text)
    code, records = visit([one.part("one")], "--resume")
    assert code == 0 and one.runs == 2 and records["one"]["run"] == 2
    assert "gpu-check.json is damaged" in capsys.readouterr().out
    assert (tmp_path / "out" / "gpu-check-damaged-1.json").read_bytes() == text


def test_a_file_that_was_cut_off_anywhere_is_not_trusted(visit: Any, tmp_path: Path) -> None:
    one = Counted()
    visit([one.part("one")])
    file = tmp_path / "out" / "gpu-check.json"
    whole = file.read_bytes()
    for end in random.Random(0).sample(range(len(whole) - 2), 40):
        file.write_bytes(whole[:end])
        before = one.runs
        assert visit([one.part("one")], "--resume")[0] == 0
        assert one.runs == before + 1, whole[:end]


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda r: "passed",
    "passed is a word": lambda r: {**r, "passed": "true"},
    "passed is a number": lambda r: {**r, "passed": 1},
    "no outcome": lambda r: {name: value for name, value in r.items() if name != "passed"},
    "no identity": lambda r: {name: value for name, value in r.items() if name != "for"},
    "empty identity": lambda r: {**r, "for": {}},
    "no kernels": lambda r: {**r, "for": {**r["for"], "kernels": None}},
    "no commit": lambda r: {**r, "for": {**r["for"], "commit": ""}},
    "seconds are text": lambda r: {**r, "seconds": "1"},
    "seconds are not a number": lambda r: {**r, "seconds": float("nan")},
    "items are a list": lambda r: {**r, "so far": []},
    "damaged before": lambda r: {**r, "before": {"passed": True}},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_damaged_record_is_reported_and_its_part_runs_again(
    visit: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], Any],
) -> None:
    one = Counted()
    other = Counted()
    chosen = [one.part("one"), other.part("other")]
    _, records = visit(chosen)
    records["one"] = change(records["one"])
    (tmp_path / "out" / "gpu-check.json").write_text(json.dumps(records))
    _, records = visit(chosen, "--resume")
    assert (one.runs, other.runs) == (2, 1) and records["one"]["run"] == 2
    assert "the record of one" in capsys.readouterr().out
    assert (tmp_path / "out" / "gpu-check-damaged-1.json").exists()


def test_a_visit_that_is_terminated_ends_its_commands(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from gpu_check import main, parts
from gpu_check.parts import machine
machine.driver, machine.gpus = lambda c: {{}}, lambda c: []
def first(c):
    return {{"run": 1}}
def second(c):
    c.keep("item", 7)
    c.run("sh", "-c", "sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait")
parts.PARTS = (parts.Part("first", first, 20, ()), parts.Part("second", second, 500, ()))
sys.exit(main.main(["--output", {str(tmp_path / "out")!r}, "--seconds", "600"]))
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    process = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True)
    for _ in range(300):
        if child.exists():
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "summary:" in output
    wait_until_gone(child.read_text().strip())
    records = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert records["first"]["passed"] is True and records["second"]["so far"] == {"item": 7}


def test_each_part_has_sources_that_exist() -> None:
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names) and names[0] == "machine"
    for part in parts.PARTS:
        for name in (*part.reads, *part.without):
            assert (ROOT / name).exists() or name == products.FOLDER, name
        assert part.sources() == part.sources() != ""


def test_a_change_of_the_torch_adapter_repeats_only_its_part() -> None:
    """Other parts must not import what they leave out of their sources."""
    modules = "odyssey.train, odyssey.core.gpu_native, odyssey.comm.nccl"
    left_out = ("odyssey.torch", "odyssey.horovod")
    code = (
        f"import sys, {modules}; print([name for name in sys.modules if "
        f"name.startswith({left_out})])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


# --- what parts read ------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 7
profiled: linear_forward bf16 G=16 I=384 O=384 relu=0
"ID","Process ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread","dram__bytes.sum"
"","","","us","register/thread","Mbyte"
"0","7","linear, of some (size)","41.22","128","3.5"
"1","7","tail","2.00","32","0.1"
==PROF== Disconnected
"""


def test_the_rows_of_ncu() -> None:
    first, second = times.counters(NCU)
    assert first == {
        "kernel": "linear, of some (size)",
        "gpu__time_duration.sum": "41.22 us",
        "launch__registers_per_thread": "128 register/thread",
        "dram__bytes.sum": "3.5 Mbyte",
    }
    assert second["kernel"] == "tail"
    assert times.counters("==ERROR== ERR_NVGPUCTRPERM\n") == []


def test_programs_of_other_sources_are_not_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        program.parse(["--prepared", str(tmp_path)])
    (tmp_path / "kernels").mkdir()
    options = program.parse(["--prepared", str(tmp_path), "--output", str(tmp_path / "out")])
    assert options.kernels == tmp_path / "kernels" and options.programs == tmp_path / "programs"
    (tmp_path / "prepared.json").write_text(
        json.dumps({"commit": "abc", "programs": "of another commit"})
    )
    assert prepare.commit_of(tmp_path) == "abc"
    c = Check(options)
    try:
        with pytest.raises(
            RuntimeError, match="from other sources than tests/gpu/hopper; run --prepare again"
        ):
            products.run_program(c, "check")
    finally:
        c.close()
    (tmp_path / "prepared.json").write_text("{")
    assert prepare.commit_of(tmp_path) == "an unknown commit"


def test_the_commit_of_a_copy_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit("the prepared one") == "the prepared one"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert results.commit("the prepared one") == "the prepared one"  # no commit yet
    (tmp_path / "below").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path / "below")
    assert results.commit("the prepared one") == "the prepared one"  # the repository is another one


def test_a_signal_while_a_command_starts_ends_the_command_as_well(
    visit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid: list[int] = []
    real = subprocess.Popen

    def starts(*arguments: Any, **settings: Any) -> Any:
        process = real(*arguments, **settings)
        if "600" in arguments[0]:
            pid.append(process.pid)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # the handler runs here
        return process

    monkeypatch.setattr(subprocess, "Popen", starts)
    with pytest.raises(SystemExit, match="143"):
        visit(
            [parts.Part("long", lambda c: {"output": c.run("sleep", "600")}, 20, ())],
            "--seconds",
            "20",
        )
    wait_until_gone(str(pid[0]))
