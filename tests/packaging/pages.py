"""Runs what a page shows, in the page's order: `python pages.py PAGE FOLDER` prints what came of
each block, as JSON.

A block is what its first line says:

    ```python     is executed, with the names that the page's earlier ones have made
    ```sh         every line is a command; one that ends in a backslash continues in the next
    ```console    lines that begin with `$ ` are commands; what stands below each is what it prints (see `differs`)
    ```output     exactly what the block before it prints
    ```toml       and any other, after a comment `<!-- file: NAME -->`: is written to that file
    ```text       is not run: what a command printed once, a drawing, a formula

A comment `<!-- not run: REASON -->` before a block says that it is not run, `<!-- varies: REASON
-->` that what is printed is not always that, but for hashes. Hashes are those of processors with
AVX-512, and compared there. Any other block is an error. Commands run in FOLDER, where the folders
of the checkout are; one that would take long is shortened (SHORTER), so that what a reader sees
stays as it would be typed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600  # for one command, of a machine that has other things to do as well
SCRIPT = """
from odyssey import DistributedTrainer, data, nn, optim

nn.manual_seed(0)
trainer = DistributedTrainer(nn.models.MLP(), optim.SGD(lr=0.1))
trainer.fit(data.DataLoader(data.load("mnist", train=True).take(512), batch_size=128))
"""
OWN = ("my_training.py", "train.py")  # what pages call a script of one's own

# (page, kind) of blocks that other tests look after.
ELSEWHERE = {
    (
        "mojo.md",
        "mojo",
    ): "minutes to compile; tests/mojo runs the examples and looks for them on the page"
}

# Part of a command, what stands in its place, and why. The first that fits is taken; what a
# shortened command prints is not compared. None: the command is not run.
SHORTER: list[tuple[str, str | None, str]] = [
    (
        r"^pip (un)?install|^python3 -m venv|^odyssey --version$",
        None,
        "test_distributions.py installs",
    ),
    (r"^pytest\b", None, "these tests"),
    (r"^odyssey build( |$)(?!--output)", None, "tests/building compiles"),
    (
        r"--dataset (fashion-mnist|cifar10)",
        None,
        "their files are not there; tests/data makes some",
    ),
    (r"^scripts/fuzz --count", None, "all parsers; tests/fuzz has them, with fewer inputs"),
    (r"--count 1000000", "--count 20", "an hour"),
    (r"^mpirun .* --device gpu", None, "needs GPUs; docs/gpu.md goes on with an emulated one"),
    (r"^python benchmarks/faults/compare.py", None, "needs another environment, and an hour"),
    (
        r"--oversubscribe -n 4 odyssey train ",
        "-n 4 odyssey train --steps 2 --no-eval",
        "an option of Open MPI's",
    ),
    (
        r"\btrain(?= |$)(?!.*--(steps|epochs|config))",
        "train --steps 2 --no-eval",
        "the default is 8 epochs",
    ),
    (r"--epochs 8", "--epochs 1", "as above"),
]


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its fence. comment: the text of an HTML comment right before it,
    "" without one.
    """

    line: int
    kind: str
    text: str
    comment: str


def blocks(page: str) -> Iterator[Block]:
    """Those of a page's text."""
    form = (
        r"(?:<!-- (?P<comment>[^\n]*?) -->\n\s*)?^(?P<indent> "
        r"*)```(?P<kind>[^\n]*)\n(?P<text>.*?)^ *```$"
    )
    for found in re.finditer(form, page, re.M | re.S):
        line = page[: found.start("kind")].count("\n") + 1
        yield Block(
            line, found["kind"].strip(), textwrap.dedent(found["text"]), found["comment"] or ""
        )


def unmarked(block: Block, page: str = "") -> str | None:
    """What is wrong with a block before it is run, or None."""
    if block.kind in ("python", "sh", "console", "output", "text") or block.comment.startswith(
        ("not run: ", "file: ")
    ):
        return None
    if (page, block.kind) in ELSEWHERE:
        return None
    return (
        f"```{block.kind} is neither run nor marked as not to be: python, sh, console, output, "
        "text, or a comment before it, <!-- not run: REASON --> or <!-- file: NAME -->"
    )


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, what it should print) of a block for a shell."""
    text = re.sub(r" *\\\n *", " ", block.text)
    if block.kind == "sh":
        return [(line, "") for line in text.splitlines() if line.split("#")[0].strip()]
    parts = re.split(r"^\$ (.*)\n", text + "\n", flags=re.M)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def shortened(command: str) -> str | None:
    """The command that is run instead; None: none."""
    for part, instead, _ in SHORTER:
        if re.search(part, command):
            return instead if instead is None else re.sub(part, instead, command, count=1)
    return command


def differs(shown: str, printed: str) -> str | None:
    """The first line that is shown and was not printed, but for figures, of which only hashes
    must be the same. Of a line that ends in ` ...` the beginning is enough. A long line may
    be shown as several; the others are indented.
    """

    def form(line: str) -> str:
        kept = re.sub(
            r"\b[0-9a-f]{16}\b|\d[\d,.]*",
            lambda found: found[0] if len(found[0]) == 16 else "#",
            line,
        )
        return " ".join((kept if at_home() else re.sub(r"\b[0-9a-f]{16}\b", "#", kept)).split())

    def there(line: str) -> bool:
        return (
            line in lines
            or line.endswith("...")
            and any(each.startswith(line[:-3]) for each in lines)
        )

    lines = {form(line) for line in printed.splitlines()} | {""}
    rest = shown.splitlines()
    while rest:
        count = 1
        while not there(form(" ".join(rest[:count]))):
            if not rest[count:] or not rest[count].startswith("    "):
                return rest[0]
            count += 1
        rest = rest[count:]
    return None


@functools.cache
def at_home() -> bool:
    """True on processors with the instructions of those that the pages' hashes are of: on others
    bits are others, and tests/golden has those.
    """
    from odyssey.compile.library import plan, source_root

    return plan(source_root()).cpu.startswith("x86-64-v4")


def alike(shown: str, printed: str) -> bool:
    """True if a block prints what is shown; where bits are others, in other figures."""
    if at_home():
        return shown.split() == printed.split()
    figures = re.compile(r"\b[0-9a-f]{16}\b|\d[\d,.]*(e-?\d+)?")
    return figures.sub("#", shown).split() == figures.sub("#", printed).split()


def run_commands(block: Block) -> tuple[str, str | None]:
    """(all that was printed, what is wrong or None)."""
    printed = ""
    for command, shown in commands(block):
        short = shortened(command)
        if short is None:
            continue
        done = subprocess.run(
            ["bash", "-c", short],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        printed += done.stdout
        if block.comment.startswith("varies: "):
            shown = "\n".join(re.findall(r"^.*\b[0-9a-f]{16}\b.*$", shown, re.M))
        line = differs(shown, done.stdout)
        if line is not None and short == command:
            return printed, f"{short}: does not print {line!r} but\n{done.stdout[-2000:]}"
        # a code other than 0 is right for a refusal, or a "no", that the page shows
        if (
            done.returncode
            and (line is not None or not shown.strip())
            or not done.returncode
            and "error:" in shown
        ):
            return printed, f"{short}: exit code {done.returncode}\n{done.stdout[-2000:]}"
    return printed, None


def run_python(block: Block, names: dict, name: str) -> tuple[str, str | None]:
    """The same for a block of Python."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.text, name, "exec"), names)
    except BaseException:
        return printed.getvalue(), traceback.format_exc(limit=-4)
    return printed.getvalue(), None


def run(page: Path) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each block of a page that does not do what it shows; in the
    current directory.
    """
    for name in ("examples", "scripts", "tests", "benchmarks"):
        Path(name).symlink_to(ROOT / name)
    Path("idx").symlink_to(ROOT / "python" / "odyssey" / "data" / "mnist")
    for name in OWN:
        Path(name).write_text(SCRIPT)
    names: dict = {"__name__": page.name}
    printed = ""
    for block in blocks(page.read_text()):
        wrong = unmarked(block, page.name)
        if wrong is None and block.comment.startswith("file: "):
            Path(block.comment.removeprefix("file: ")).write_text(block.text)
        elif wrong is None and not block.comment.startswith("not run: "):
            if block.kind == "python":
                printed, wrong = run_python(block, names, page.name)
            elif block.kind in ("sh", "console"):
                printed, wrong = run_commands(block)
            elif block.kind == "output" and not alike(block.text, printed):
                wrong = f"the block before it prints\n{printed}"
        if wrong is not None:
            yield block.line, wrong


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    with contextlib.redirect_stdout(sys.stderr):
        result = list(run(Path(sys.argv[1])))
    print(json.dumps(result))
