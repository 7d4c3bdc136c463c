"""Breaks the capture at many places, and shows that the tests of this folder find each.

    python tests/capture/mutations.py            all mutations
    python tests/capture/mutations.py globals    those whose name has this word

It works on a copy of the package in a temporary folder, so the checkout stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = ("test_values.py", "test_walk.py", "test_unusual_kinds.py", "test_capture.py")
TESTS += ("test_sharing.py",)


class Mutation(NamedTuple):
    """One change of the source.

    Attributes:
        name: says what is broken.
        file: below python/odyssey/capture/.
        before: text that the file has once.
        after: text that replaces it.
    """

    name: str
    file: str
    before: str
    after: str


MUTATIONS = (
    Mutation(
        "private names are dropped",
        "edges.py",
        "        if name in skipped:\n",
        "        if name in skipped or name.startswith('_'):\n",
    ),
    Mutation(
        "slots are ignored",
        "edges.py",
        "    for name in slots_of(kind):\n",
        "    for name in ():\n",
    ),
    Mutation(
        "closures are ignored",
        "edges.py",
        '        yield Edge(f"{path}.<closure>.{name}", value, Place("cell", cell, name))\n',
        "",
    ),
    Mutation(
        "attributes of classes are ignored",
        "edges.py",
        '            yield Edge(f"{path}.{name}", value, Place("attribute", kind, name))\n',
        "            pass\n",
    ),
    Mutation(
        "globals are ignored",
        "edges.py",
        "    names, attributes, imports = names_in(function.__code__)\n",
        "    names, attributes, imports = (), (), ()\n",
    ),
    Mutation(
        "contents of subclasses are ignored",
        "edges.py",
        "            return [edge, *edges_of_object(value, path)]\n",
        "            return edges_of_object(value, path)\n",
    ),
    Mutation(
        "attributes are set by the code of their class",
        "edges.py",
        "            attributes[name] = value\n            return\n",
        "            setattr(holder, name, value)\n            return\n",
    ),
    Mutation(
        "properties are read",
        "edges.py",
        "    edges = []\n    for name in sorted(",
        "    attributes.update({n: getattr(value, n) for n in vars(kind) if n == 'size'})\n"
        "    edges = []\n    for name in sorted(",
    ),
    Mutation(
        "numbers of NumPy are dropped",
        "values.py",
        '        kind = _by_name["number"]\n',
        "        kind = None\n",
    ),
    Mutation(
        "keys of dicts become strings",
        "values.py",
        "    if kind is dict and all(map(_is_json_key, value)):\n",
        "    if kind is dict:\n",
    ),
    Mutation(
        "the dtype's byte order is dropped",
        "values.py",
        "        return dtype.str\n",
        '        return dtype.newbyteorder("=").str\n',
    ),
    Mutation(
        "sets have the order of the process",
        "values.py",
        "    return items if all(map(_has_fixed_hash, items)) else sorted(items, key=_mark)\n",
        "    return items\n",
    ),
    Mutation(
        "values are never written in place",
        "values.py",
        "    if type(target) is not type(value):\n        return False\n",
        "    if type(target) is not None:\n        return False\n",
    ),
    Mutation(
        "any string is a dtype",
        "values.py",
        "    elif not _DTYPE.fullmatch(form):",
        "    elif False:",
    ),
    Mutation(
        "state_dict() is ignored",
        "walk.py",
        "        if not has_state_dict(value):\n",
        "        if True:\n",
    ),
    Mutation(
        "shared objects are not noted",
        "walk.py",
        "            self.picture.alias_places.setdefault(edge.path, (edge.place, parent))\n",
        "            pass\n",
    ),
    Mutation(
        "errors of the user's code end the walk",
        "walk.py",
        "        except Exception:  # for example a weak proxy of an object that is gone\n",
        "        except MemoryError:\n",
    ),
    Mutation(
        "removed values are ignored",
        "capture.py",
        '            for path in saved["removed"]:\n',
        "            for path in ():\n",
    ),
    Mutation(
        "what forward() sets is kept",
        "capture.py",
        "        if path in known:\n            return True\n",
        "        if path in known:\n            return False\n",
    ),
    Mutation(
        "opaque objects are not refused",
        "capture.py",
        "            if entry.sort == OPAQUE and _has_become_opaque(entry, before):",
        "            if False:",
    ),
    Mutation(
        "new items are not looked at",
        "capture.py",
        "        for edge in edges_of_items(entry.value, path):\n",
        "        for edge in ():\n",
    ),
    Mutation(
        "objects lose the path at which the program has built them",
        "walk.py",
        "                    path = self.known[identity] + MOVED\n",
        "                    path = edge.path\n",
    ),
    Mutation(
        "other keys are not refused",
        "capture.py",
        "        self._check_keys(picture)\n",
        "",
    ),
    Mutation(
        "new objects are not refused",
        "capture.py",
        "                and not self._is_expected(entry)\n",
        "                and False\n",
    ),
    Mutation(
        "ranks are compared",
        "capture.py",
        'RANK_NAMES = frozenset({"rank", ',
        'RANK_NAMES = frozenset({"rank of no name", ',
    ),
    Mutation(
        "classes are not checked",
        "capture.py",
        "            if _without_length(name) != _without_length(saved_name):\n",
        "            if False:\n",
    ),
    Mutation(
        "hooks that are set in a step are not refused",
        "capture.py",
        "            if patches.get(path) == start_patches.get(path) or self.changed_in_forward(path):\n",
        "            if True:\n",
    ),
    Mutation(
        "newer attributes stay after going back",
        "capture.py",
        "                self._remove_new(restorer, saved)\n",
        "                pass\n",
    ),
    Mutation(
        "what was built is not put back",
        "capture.py",
        "        self._restore_built(restorer, saved)\n        try:\n",
        "        try:\n",
    ),
    Mutation(
        "other settings are not refused",
        "capture.py",
        "            if path in current and current[path] != digest:\n",
        "            if False:\n",
    ),
    Mutation(
        "values at two places become copies",
        "sharing.py",
        "    groups = [places for places in spots.values() if len(places) > 1]\n",
        "    groups = []\n",
    ),
    Mutation(
        "windows on arrays become copies",
        "sharing.py",
        "    for spot, (owner_spot, form) in saved.windows.items():\n",
        "    for spot, (owner_spot, form) in ():\n",
    ),
    Mutation(
        "what was shared at the start stays shared",
        "sharing.py",
        "    for group in sharing.groups:\n",
        "    for group in ():\n",
    ),
    Mutation(
        "dicts keep the order of the start",
        "containers.py",
        "    if list(dict.keys(container)) == decoded or ",
        "    if True or ",
    ),
    Mutation(
        "tuples of other objects are taken for the same",
        "containers.py",
        '        parts.append(f"{place} {item.mark}" if item is not None and is_fixed else place)\n',
        '        parts.append("")\n',
    ),
    Mutation(
        "sets are sorted",
        "values.py",
        "    return items if all(map(_has_fixed_hash, items)) else sorted(items, key=_mark)\n",
        "    return sorted(items, key=_mark)\n",
    ),
    Mutation(
        "methods of classes may be replaced",
        "walk.py",
        "            is_function(value) and (edge.place.overrides() or _is_put_into_class(edge))\n",
        "            is_function(value) and edge.place.overrides()\n",
    ),
    Mutation(
        "modules in functions are ignored",
        "edges.py",
        "                modules[full_name] = sys.modules[full_name]\n",
        "                pass\n",
    ),
    Mutation(
        "opaque objects of steps are not named",
        "capture.py",
        "                **self._late_opaque(picture),\n",
        "",
    ),
    Mutation(
        "arguments of exceptions are ignored",
        "edges.py",
        '        extra = [Edge(f"{path}.args", host.args, Place("attribute", host, "args"))]\n',
        "        pass\n",
    ),
)


def main() -> int:
    """Runs the mutations, and returns the number of those that no test has found."""
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if all(word in m.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "python" / "odyssey"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "python", Path(folder) / "python", ignore=ignored)
        shutil.copytree(ROOT / "tests" / "capture", Path(folder) / "tests" / "capture")
        if (ROOT / "mojo").exists():
            (Path(folder) / "mojo").symlink_to(ROOT / "mojo")
        results = [("nothing is broken", run_tests(folder))]
        for mutation in chosen:
            source = package / "capture" / mutation.file
            text = source.read_text()
            if text.count(mutation.before) != 1:
                print(f"{mutation.name:45} IS NOT IN THE SOURCE ONCE", flush=True)
                missed += 1
                continue
            source.write_text(text.replace(mutation.before, mutation.after))
            first = run_tests(folder)
            source.write_text(text)
            missed += not first
            results.append((mutation.name, first or "NOT FOUND"))
            print(f"{mutation.name:45} {first or 'NOT FOUND'}", flush=True)
    if results[0][1]:
        print(f"without a mutation a test fails: {results[0][1]}")
        return 1
    print(f"{len(chosen) - missed} of {len(chosen)} mutations were found")
    return missed


def run_tests(folder: str) -> str:
    """Returns the first test that fails with the copied package; "" if none does."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}/python:{folder}/tests"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    tests = [f"{folder}/tests/capture/{name}" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-c", os.devnull, "--rootdir", folder, "-o", "import_mode=importlib"]
    command += ["-k", "not hundred_thousand and not chain"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split("::")[-1].split(" - ")[0]
    return "" if done.returncode == 0 else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
