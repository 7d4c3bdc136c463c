"""What README, docs/ and examples/ say: links lead somewhere, and what is shown in blocks or
tables of commands works.

How a block is to be marked: pages.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import pages  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


def anchors(page: Path) -> set[str]:
    """Those that headings give, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"`[^`]*`", "code", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), target
        if anchor:
            assert anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_is_left(page):
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(), re.M)


def commands(page: str, section: str) -> list[tuple[int, list[str]]]:
    """(ranks, arguments of `odyssey train`) of the commands in backticks of a section's table."""
    text = (ROOT / page).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(
        r"`(?:mpirun -n (\d+) )?(?:odyssey|python -m odyssey\.)\s?train\s?([^`]*)`", text
    )
    return [(int(ranks or 0), shlex.split(arguments)) for ranks, arguments in found]


KINDS = commands("README.md", "Kinds of parallelism")


def same_training(arguments: list[str]) -> bool:
    """Returns False for options that change the results on purpose."""
    return not {"--reduction", "--compression", "--precision"} & set(arguments)


@pytest.fixture(scope="module")
def weights_of_one_process(launch_once) -> str:
    return launch_once.result("--steps", 2, "--no-eval", "--no-progress")["weights_sha256"]


@pytest.mark.parametrize(
    ("ranks", "arguments"), KINDS, ids=lambda value: "-".join(map(str, [value]))
)
def test_the_readme_s_commands_run(launch, ranks, arguments, weights_of_one_process):
    """Those that the section calls the same training end with the weights of one process."""
    result = launch.result(*arguments, "--steps", 2, "--no-eval", "--no-progress", ranks=ranks)
    assert result["steps"] == 2
    if same_training(arguments):
        assert result["weights_sha256"] == weights_of_one_process


def test_the_readme_has_commands():
    assert len(KINDS) >= 7
    # the table's first rows
    assert sum(ranks > 1 and same_training(arguments) for ranks, arguments in KINDS) == 5


def test_the_readme_s_model_placed_by_hand_has_the_same_weights_on_any_ranks(launch):
    program = ROOT / "examples" / "large_model.py"
    hashes = set()
    for ranks in (0, 2, 3):
        done = launch.python(program, "--steps", 2, ranks=ranks)
        hashes.add(re.search(r"weights ([0-9a-f]{16})", done.stdout)[1])
    assert len(hashes) == 1


def test_the_readme_s_loop_trains_a_larger_batch_on_more_ranks(launch):
    """The section says that this row, and no other, gives other weights on more ranks."""
    program = ROOT / "examples" / "ddp_loop.py"
    assert (
        'parser.add_argument("--batch-size", type=int, default=32, help="samples per rank'
        in program.read_text()
    )
    losses = []
    for ranks in (0, 2):
        done = launch.python(program, "--quick", ranks=ranks)
        losses.append(re.search(r"epoch 1: loss ([\d.]+) on", done.stdout)[1])
    assert losses[0] != losses[1]


# -- every block -----------------------------------------------------------------------------------

LOGS = {"log.md", "CHANGELOG.md"}  # what was once measured, or done, stays as it was written
SHOWN = [page for page in PAGES if page.name not in LOGS]


@pytest.fixture(scope="module")
def results(request, launch_once, tmp_path_factory):
    """What came of each page that is asked for: a process for each, some at a time, for they
    wait a lot.
    """
    mine = (
        item
        for item in request.session.items
        if item.path == request.path and "results" in item.fixturenames
    )
    asked = {item.callspec.params["page"] for item in mine}

    def run(page: Path) -> tuple[str, str]:
        command = [sys.executable, pages.__file__, page, tmp_path_factory.mktemp(page.stem)]
        done = subprocess.run(command, capture_output=True, text=True, env=launch_once.environment)
        return done.stdout, done.stderr

    with ThreadPoolExecutor(3) as pool:
        yield {
            page: pool.submit(run, page)
            for page in sorted(asked, key=lambda page: -len(page.read_text()))
        }


#: What a new user reads first; the blocks of the other pages, minutes of them, are for who changes
#: pages or commands.
FIRST = {"README.md", "tour.md"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.name in FIRST else pytest.mark.long) for page in SHOWN],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_s_blocks_do_what_they_show(page, results):
    said, errors = results[page].result()
    assert said, errors
    wrong = [f"{page.relative_to(ROOT)}:{line}: {what}" for line, what in json.loads(said)]
    assert not wrong, "\n\n".join(wrong)


def test_no_rule_for_shorter_commands_is_without_a_command():
    shown = [
        command
        for page in SHOWN
        for block in pages.blocks(page.read_text())
        for command in of_shell(block)
    ]
    first = {
        next((part for part, *_ in pages.SHORTER if re.search(part, command)), None)
        for command in shown
    }
    assert first >= {part for part, *_ in pages.SHORTER}
    assert None in first  # most are run as they are


def of_shell(block: pages.Block) -> list[str]:
    return (
        [command for command, _ in pages.commands(block)] if block.kind in ("sh", "console") else []
    )


PAGE = """
Text with ``` in it.

```python
a = 1
print(a)
```

```output
1
```

<!-- file: b.txt -->
```
b
```

1. indented

   ```console
   $ cat \\
       b.txt  # shown
   b
   $ false
   error: none
   ```
"""


def test_a_page_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "at_home", lambda: True)
    page = tmp_path / "page.md"

    def wrong(text: str) -> list[tuple[int, str]]:
        for place in tmp_path.iterdir():
            place.unlink()
        page.write_text(text)
        return list(pages.run(page))

    assert [block.kind for block in pages.blocks(PAGE)] == ["python", "output", "", "console"]
    ((line, said),) = wrong(PAGE)  # what a refused command says must be what is shown
    assert line == 20 and "does not print 'error: none'" in said
    right = PAGE.replace("error: none\n   ", "")
    assert "exit code 1" in wrong(right)[0][1]
    right = right.replace("   $ false\n", "")
    assert wrong(right) == []
    for old, new, said in (
        ("```output\n1", "```output\n2", "the block before it prints\n1"),
        ("```output", "```", "neither run nor marked"),
        ("print(a)", "print(c)", "NameError: name 'c' is not defined"),
        ("<!-- file: b.txt -->\n", "", "neither run nor marked"),
        ("\n   b\n", "\n   c\n", "does not print 'c'"),
    ):
        assert old in right
        assert said in wrong(right.replace(old, new, 1))[0][1]
    assert wrong("<!-- not run: a fragment -->\n```mojo\nfoo\n```\n") == []
    # other bits: other figures, and the same words
    monkeypatch.setattr(pages, "at_home", lambda: False)
    assert wrong(right.replace("```output\n1", "```output\n2", 1)) == []
    assert (
        "the block before it prints\n1"
        in wrong(right.replace("```output\n1", "```output\none", 1))[0][1]
    )


@pytest.mark.parametrize(
    ("shown", "printed", "line"),
    [
        ("step 2  1,000 samples/s", "so\nstep 9  3.5 samples/s\n", None),
        ("weights f3acb2254559e712  0.4 s", "weights f3acb2254559e712  9 s", None),
        ("weights f3acb2254559e712", "weights f3acb2254559e713", "weights f3acb2254559e712"),
        ("...\nepoch 1", "epoch\n", "epoch 1"),
        ("error: a long\n    line\nend", "error: a long line\nend", None),
        (
            "error: a long\n    line of a page\n    ...",
            "error: a long line of a page and more",
            None,
        ),
        ("error: a long\nline", "error: a long line", "error: a long"),
        ("error: a long\n    word\nend", "error: a long line\nend", "error: a long"),
        ("a\n    b", "a\nb", None),
    ],
)
def test_what_differs(shown, printed, line, monkeypatch):
    monkeypatch.setattr(pages, "at_home", lambda: True)
    assert pages.differs(shown, printed) == line


#: Pages of what does not work everywhere: what is not supported stands before the first code, where
#: it is read.
LIMITED = "clusters gpu huggingface migration pipeline precision pytorch tensor-parallel".split()


@pytest.mark.parametrize("name", LIMITED)
def test_limits_come_before_code(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert 0 < text.find('\n!!! warning "') < text.index("```")


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/pytorch.md", "docs/huggingface.md"]
)
def test_who_brings_a_pytorch_module_reads_first_that_no_gpu_has_run_it(page):
    begin = " ".join((ROOT / page).read_text().split("```")[0].split())
    assert re.search(r"[Nn]ever run on (one|a GPU)", begin)


COLUMNS = 84  # of code and output that the site shows; what follows is behind a scroll bar


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_shows_the_end_of_every_line_of_a_block(page):
    text = page.read_text()
    wide = [
        line
        for block in pages.blocks(text)
        for line in block.text.splitlines()
        if len(line) > COLUMNS
    ]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize(
    "notebook", sorted(ROOT.glob("docs/tutorials/*.ipynb")), ids=lambda path: path.stem
)
def test_the_site_shows_the_end_of_every_line_of_a_notebook(notebook):
    cells = [
        cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert cells
    parts = [
        part
        for cell in cells
        for part in (cell["source"], *(o.get("text", "") for o in cell["outputs"]))
    ]
    wide = [line for part in parts for line in "".join(part).splitlines() if len(line) > COLUMNS]
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_have_options_that_are_there(page):
    from odyssey.cli import group

    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)
    for code in re.findall(r"`([^`\n]+)`", text):
        if not (found := re.match(r"(?:mpirun -n \w+ )?odyssey (\w+) (.*)", code)):
            continue
        command = group.get_command(None, found[1])
        assert command is not None, code
        own = re.split(r"\btrain\b|\.py\b", found[2])[0]  # what stands behind these is the script's
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", own):
            assert option == "--help" or any(
                option in (*p.opts, *p.secondary_opts) for p in command.params
            ), option


# -- what is said of the package -------------------------------------------------------------------


def test_every_python_file_has_its_line():
    page = (ROOT / "docs" / "data-flow.md").read_text()
    files = ROOT.glob("python/odyssey/**/*.py")
    named = set(re.findall(r"`([\w/]+\.py)`", page)) | {
        f"{first.rsplit('/', 1)[0]}/{other}"  # `parallel/ring.py`, `server.py`
        for first, rest in re.findall(r"^\| `(\w+/\w+\.py)`((?:, `\w+\.py`)+)", page, re.M)
        for other in re.findall(r"\w+\.py", rest)
    }
    here = {path.relative_to(ROOT / "python" / "odyssey").as_posix() for path in files}
    assert {path for path in here if not path.endswith("__init__.py")} - named == set()


ROOMS = "base settings core comm nn optim data parallel engine checkpoints callbacks audit train watch launch distributed torch".split()


@pytest.mark.parametrize("module", ["", *(f".{room}" for room in ROOMS)])
def test_every_public_name_is_described(module):
    if module == ".torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    names = importlib.import_module(f"odyssey{module}").__all__
    internal = (ROOT / "CONTRIBUTING.md").read_text()
    page = (ROOT / "docs" / "api.md").read_text() + internal.partition("### Internal names")[2]
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


CALL = re.compile(r"(\.?[A-Za-z_][\w.]*)\((.*)\)")
ARGUMENT = re.compile(r"[a-z]\w*=.+")
COLLECTIVE = {"group", "async_op"}  # the page says once that all collectives take them


def find_object(module: str, name: str):
    """Returns what a name of docs/api.md stands for, such as "plan.make" of odyssey.parallel."""
    one = importlib.import_module(module)
    for part in name.split("."):
        one = getattr(one, part, None) or importlib.import_module(f"{one.__name__}.{part}")
    return one


def read_signatures():
    """Returns [text, function or class, parameters as text] of each signature in docs/api.md.

    A row that starts with ".name" is of the class before it. One that starts with "name=value" adds
    parameters to that class.
    """
    found = []
    module = ""
    owner: list = []
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if line.startswith("## "):
            module = line[3:] if line.startswith("## odyssey") else ""
        needs_torch = module == "odyssey.torch" and not importlib.util.find_spec("torch")
        if not module or needs_torch or not line.startswith("| `"):
            continue
        for text in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            if owner and ARGUMENT.fullmatch(text):
                if f"{text.split('=')[0]}=" not in owner[2]:
                    owner[2] = owner[2].replace("**settings", f"{text}, **settings")
                continue
            match = CALL.fullmatch(text)
            if match is None:
                continue
            name, parameters = match.groups()
            one = getattr(owner[1], name[1:]) if name[0] == "." else find_object(module, name)
            found.append([text, one, parameters])
            if inspect.isclass(one):
                owner = found[-1]
    return found


def read_parameters(text: str):
    """Returns the written parameters, and whether "..." stands for more."""
    parts = re.split(r",\s*(?![^()]*\))", text) if text else []
    kept = [part for part in parts if part != "..."]
    return ast.parse(f"def f({', '.join(kept)}): pass").body[0].args, len(kept) < len(parts)


def compare_parameters(written: ast.arguments, is_cut: bool, real: inspect.Signature) -> list[str]:
    """Returns what is wrong with written parameters."""
    everything = [p for p in real.parameters.values() if p.name != "self"]
    plain = {p.name: p for p in everything if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in everything)
    positional = written.args
    defaults = dict(zip(positional[::-1], written.defaults[::-1], strict=False))
    defaults |= dict(zip(written.kwonlyargs, written.kw_defaults, strict=True))
    wrong = []
    for argument in [*positional, *written.kwonlyargs]:
        name = argument.arg
        if name not in plain and takes_any:
            continue
        if name not in plain:
            wrong.append(f"there is no {name}")
            continue
        given = defaults.get(argument)
        default = plain[name].default
        if given is None:
            is_right = default is inspect.Parameter.empty
        elif isinstance(given, ast.Name):  # such as float32 or SUM
            is_right = given.id in (getattr(default, at, "") for at in ("__name__", "name"))
        else:
            is_right = ast.literal_eval(given) == default
        if not is_right:
            shown = "required" if default is inspect.Parameter.empty else repr(default)
            wrong.append(f"{name} is {shown}")
    if not is_cut:
        known = {argument.arg for argument in [*positional, *written.kwonlyargs]}
        wrong += [f"{name} is missing" for name in plain if name not in known]
    return wrong


def test_signatures_are_those_of_the_code():
    wrong = []
    for text, one, written in read_signatures():
        names, is_cut = read_parameters(written)
        is_collective = getattr(one, "__module__", "").startswith("odyssey.distributed.")
        skipped = COLLECTIVE if is_collective and not inspect.isclass(one) else set()
        signature = inspect.signature(one)
        known = {argument.arg for argument in names.args}
        left = [p for p in signature.parameters.values() if p.name not in skipped - known]
        problems = compare_parameters(names, is_cut, inspect.Signature(left))
        wrong += [f"{text[:40]}: {problem}" for problem in problems]
    assert wrong == []


def test_wrong_signatures_are_found():
    def shown(a, b=1, *, c="x"):
        return a, b, c

    def problems(text):
        return compare_parameters(*read_parameters(text), inspect.signature(shown))

    assert problems('a, b=1, *, c="x"') == problems("a, ...") == []
    assert problems("a, b=2, d=3, ...") == ["b is 1", "there is no d"]
    assert problems("a=1, b=1") == ["a is required", "c is missing"]
