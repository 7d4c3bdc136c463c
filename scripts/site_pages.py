"""Pages of the site that are not written by hand: a hook of mkdocs (mkdocs.yml).

The reference of Python modules, of the Mojo face (by `mojo doc`), the tutorials' notebooks as
pages, and the documents that lie outside docs/. A page of docs/ that mkdocs.yml does not name is an
error.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
OUTSIDE["examples.md"] = "examples/README.md"
MODULES = {  # page -> what mkdocstrings documents on it
    "odyssey": ["DistributedTrainer", "DistributedDataParallel", "DistributedConfig", "load", "load_ops", "Tensor"],
    "odyssey.nn": [],
    "odyssey.functional": [],
    "odyssey.optim": [],
    "odyssey.data": [],
    "odyssey.callbacks": [],
    "odyssey.loggers": [],
    "odyssey.tune": [],
    "odyssey.torch": [
        "DistributedTrainer", "DistributedDataParallel", "DataLoader", "load_torch", "to_torch", "PyTorchDDPTrainer",
        "HorovodTrainer",
    ],
    "odyssey.distributed": [],
    "odyssey.comm": [],
    "odyssey.errors": [],
}  # fmt: skip
HOME = {
    "odyssey.functional": "odyssey.core.functional",
    "odyssey.loggers": "odyssey.callbacks.loggers",
}
TRAINER = (
    "fit", "train_step", "evaluate", "predict", "save_checkpoint", "load_checkpoint", "weights_sha256", "state_dict",
    "memory", "check_replicas",
)  # fmt: skip
#: Methods of classes whose base classes are not public names: these are documented, inherited or
#: not, and no others.
METHODS = {
    "odyssey.DistributedTrainer": [
        *TRAINER, "save_weights", "optimizer_state", "load_optimizer_state", "writing", "last_gradients", "clip_norm",
    ],
    "odyssey.torch.DistributedTrainer": [*TRAINER, "gathered", "last_gradients", "clip_norm", "rate"],
    "odyssey.torch.HorovodTrainer": ["fit", "metric_average"],
}  # fmt: skip


def on_config(config: Any) -> Any:
    """The reference's pages in the menu."""
    # names that are made when the module is imported: docs/api.md has them
    computed = "__all__: ACTIVATIONS"
    logging.getLogger("mkdocs.plugins.griffe").addFilter(
        lambda record: computed not in record.getMessage()
    )
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    reference += [{name: f"reference/{name}.md"} for name in MODULES] + [
        {"Mojo": "reference/mojo.md"}
    ]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    pages = {page: (ROOT / source).read_text() for page, source in OUTSIDE.items()}
    pages |= {f"reference/{name}.md": _module(name, members) for name, members in MODULES.items()}
    pages["reference/mojo.md"] = "\n".join(_mojo())
    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        pages[f"tutorials/{notebook.stem}.md"] = "\n".join(_notebook(notebook))
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to documents outside docs/ lead to their pages; those to sources become plain text."""

    def link(found: re.Match) -> str:
        text, target, anchor = found["text"], found["target"], found["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        folder = Path(OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
        path = _normal(folder / target)
        for name, source in OUTSIDE.items():
            if path == source:
                return f"[{text}]({_up(page)}{name}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({_up(page)}{path.removeprefix('docs/')}{anchor})"
        if not (ROOT / path).exists():
            return found[0]  # mkdocs says that it leads nowhere
        if path == "README.md":
            return f"[{text}]({_up(page)}index.md)"
        return text if text.startswith("`") else f"{text} (`{path}`)"

    parts = re.split(r"(^ *```.*?^ *```[^\n]*$|`[^`\n]*`(?!\]))", markdown, flags=re.M | re.S)
    form = re.compile(
        r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]+)?\)"
    )
    return "".join(part if i % 2 else form.sub(link, part) for i, part in enumerate(parts))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings that odyssey fills in when it is imported."""
    return html.replace("{settings}", f'see <a href="{_up(page)}../settings/">settings</a>')


def _normal(path: Path) -> str:
    """A path without ".." in it, from the root of the repository."""
    return (
        str((ROOT / path).resolve().relative_to(ROOT))
        if (ROOT / path).resolve().is_relative_to(ROOT)
        else str(path)
    )


def _up(page: Any) -> str:
    return "../" * page.file.src_uri.count("/")


def _module(name: str, members: list[str]) -> str:
    home = HOME.get(name, name)
    if members:
        return f"# {name}\n\n" + "\n\n".join(_documented(f"{home}.{member}") for member in members)
    return f"# {name}\n\n::: {home}\n    options:\n      show_root_heading: false\n"


def _documented(name: str) -> str:
    """The line that has mkdocstrings document a name; for some classes with the methods that
    users call.
    """
    if name not in METHODS:
        return f"::: {name}"
    methods = "".join(f"        - {method}\n" for method in METHODS[name])
    return f"::: {name}\n    options:\n      inherited_members: true\n      members:\n{methods}"


# --- notebooks ------------------------------------------------------------------------------------


def _notebook(path: Path) -> Iterator[str]:
    """A notebook's cells, with what they printed, as Markdown."""
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text + "\n"
            continue
        yield f"```python\n{text}\n```\n"
        for output in cell["outputs"]:
            shown = "".join(output.get("text") or output.get("data", {}).get("text/plain") or [])
            if shown:
                yield f"```text\n{shown.rstrip()}\n```\n"
    yield f"This page is the notebook `docs/tutorials/{path.name}`."


# --- Mojo -----------------------------------------------------------------------------------------


def _mojo() -> Iterator[str]:
    """What `from shared.training import ...` gives, by the compiler's own account."""
    yield "# Mojo: shared.training\n"
    yield "What a Mojo program imports by `from shared.training import ...`; [Mojo programs](../mojo.md) shows how.\n"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    compiler = shutil.which("mojo", path=path)
    if compiler is None:
        problem = (
            "this page is empty because the compiler, `mojo`, is not on PATH; install it "
            "with `pip install -e .`"
        )
        logging.getLogger("mkdocs.plugins.site_pages").warning(problem)
        yield f"In this build of the site {problem}."
        return
    words = [compiler, "doc", "-I", "mojo", "-I", ".", "shared/training"]
    made = json.loads(
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    for module in made["decl"]["modules"]:
        shown = [
            one
            for kind in ("structs", "traits", "functions", "aliases")
            for one in module.get(kind, [])
        ]
        shown = [one for one in shown if not one["name"].startswith("_") and _said(one)]
        if not shown:
            continue
        yield f"## {module['name']}\n\n{module['summary']}\n"
        for one in shown:
            yield f"### {one['name']}\n"
            for signature in [
                one.get("signature"),
                *(o["signature"] for o in one.get("overloads", [])),
            ]:
                if signature:
                    yield f"```mojo\n{signature}\n```\n"
            yield _said(one) + "\n"
            for function in one.get("functions", []):
                if not function["name"].startswith("_") and _said(function):
                    first = function["overloads"][0]
                    yield f"- `{first['signature']}`: {_said(function).splitlines()[0]}"
            yield ""


def _said(one: dict[str, Any]) -> str:
    """An entry's documentation, or that of its first overload. `pool[size](x)` in it is no link."""
    first = (one.get("overloads") or [one])[0]
    text = "\n\n".join(filter(None, [first.get("summary", ""), first.get("description", "")]))
    return text.replace("](", "]\\(")
