"""The results of gpu-check: a file that is whole after every part, and the rules for skipping
what passed before.

A record says for what it holds: the sources that its part runs, the kernels and the GPU. With
--resume a part is skipped if it passed for the same ones. The commit is a label for the reader and
decides nothing, so a commit that changes only pages of the documentation repeats nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FILE = "gpu-check.json"
SAME = ("sources", "kernels", "gpu")  # what must be the same for a result to be used again


class Visit(NamedTuple):
    """The facts of this run that are written into every record.

    Attributes:
        commit: a label. kernels: a hash of the compiled kernels, or of what they are compiled from.
            gpu: the name.
    """

    commit: str
    kernels: str
    gpu: str


def hash_of(paths: Iterable[Path], without: Iterable[Path] = ()) -> str:
    """A hash over the names and bytes of files, and of all files in folders, except for those in
    `without`.
    """
    skipped = tuple(without)
    files: set[Path] = set()
    for path in paths:
        files.update(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else files.add(
            path
        )
    whole = hashlib.sha256()
    for file in sorted(files):
        if "__pycache__" in file.parts or any(file.is_relative_to(place) for place in skipped):
            continue
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
        content = file.read_bytes() if file.exists() else b""
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]


def commit(otherwise: str = "an unknown commit") -> str:
    """The commit of this checkout; `otherwise` if git does not know it, as in a copy of the
    working tree.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return otherwise
        name = git("rev-parse", "--short=12", "HEAD")
        return (
            f"{name} with changes" if git("status", "--porcelain", "--untracked-files=no") else name
        )
    except (OSError, subprocess.CalledProcessError):
        return otherwise


class Results:
    """The records of all parts by name, in `folder`/gpu-check.json.

    Args:
        folder: the folder of the file. resume: use the records that are there; otherwise they are
            moved aside.

    Attributes:
        notes: what the user should know about the file that was there.
    """

    def __init__(self, folder: Path, resume: bool) -> None:
        self._file = folder / FILE
        self.notes: list[str] = []
        self.records: dict[str, Any] = {}
        if self._file.exists():
            if resume:
                self._read()
            else:
                self._move_aside("before")

    def _read(self) -> None:
        try:
            records = json.loads(self._file.read_bytes())
            if not isinstance(records, dict):
                raise ValueError("it is not a JSON object")
        except (OSError, ValueError, RecursionError) as problem:
            aside = self._move_aside("damaged")
            self.notes.append(
                f"{self._file} is damaged ({problem}); kept as {aside.name}; all parts run again"
            )
            return
        for name, record in records.items():
            why = damage(record)
            if why:
                self.notes.append(
                    f"the record of {name} in {self._file} is damaged ({why}); the part runs again"
                )
            else:
                self.records[name] = record
        if len(self.records) < len(records):
            self._copy_aside("damaged")

    def _aside(self, word: str) -> Path:
        number = 1
        while True:
            path = self._file.with_name(f"gpu-check-{word}-{number}.json")
            if not path.exists():
                return path
            number += 1

    def _move_aside(self, word: str) -> Path:
        path = self._aside(word)
        os.replace(self._file, path)
        return path

    def _copy_aside(self, word: str) -> None:
        self._aside(word).write_bytes(self._file.read_bytes())

    def passed(self, name: str, key: dict[str, str]) -> dict[str, Any] | None:
        """The record of a part that passed for the same sources, kernels and GPU, or None.

        A part that passed at one commit and was not run at the next one counts again for the first
        one.
        """
        record = self.records.get(name, {})
        for one in (record, record.get("before", {})):
            if one.get("passed") is True and same(one, key):
                return one
        return None

    def items(self, name: str, key: dict[str, str]) -> dict[str, Any]:
        """The results within a part that did not come to its end, for the same sources, kernels
        and GPU.
        """
        record = self.records.get(name, {})
        for one in (record, record.get("before", {})):
            if "so far" in one and same(one, key):
                return dict(one["so far"])
        return {}

    def keep(self, name: str, key: dict[str, str], record: dict[str, Any]) -> None:
        """Writes the record of a part.

        The outcome before stays in it as "before" until there is a new one.
        """
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        earlier = self.records.get(name)
        if earlier is not None and "passed" not in record:
            before = earlier if "passed" in earlier else earlier.get("before")
            if before is not None:
                record = {
                    **record,
                    "before": {name: value for name, value in before.items() if name != "before"},
                }
        self.records[name] = {**record, "for": {**key, "date": f"{now} UTC"}}
        self.write()

    def write(self) -> None:
        """Writes the file so that it is whole, old or new, whenever this process is killed."""
        text = json.dumps(self.records, indent=1, default=str) + "\n"
        beside = self._file.with_suffix(".json.new")
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._file)


def same(record: dict[str, Any], key: dict[str, str]) -> bool:
    """Returns whether a record holds for these sources, kernels and GPU."""
    return all(record["for"][word] == key[word] for word in SAME)


def damage(record: Any) -> str | None:
    """Returns why a record cannot be one that `Results.keep` wrote, or None."""
    if not isinstance(record, dict):
        return "it is not an object"
    if "passed" in record and not isinstance(record["passed"], bool):
        return "'passed' is neither true nor false"
    if "passed" not in record and "not run" not in record and "so far" not in record:
        return "it has no outcome"
    if record.get("passed") is False and not isinstance(record.get("error"), str):
        return "it failed without an error"
    if not isinstance(record.get("so far", {}), dict):
        return "'so far' is not an object"
    key = record.get("for")
    if not isinstance(key, dict) or not all(
        isinstance(key.get(word), str) and key[word] for word in (*SAME, "commit")
    ):
        return "it does not say for which commit, sources, kernels and GPU it holds"
    seconds = record.get("seconds", 0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e6:
        return "'seconds' is not a time"
    return damage(record["before"]) if "before" in record else None
