"""A directory of checkpoints: saves them, finds the newest valid one, keeps some, and lets one
job at a time write.

One process of a job owns the store and writes; any process may read, without a lock.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base import slot
from ..base.files import private_directory, read_json
from ..base.hooks import gone
from ..base.runs import Run
from ..errors import CheckpointError, ConfigError, DataError, OdysseyError, OutputError, printable
from . import reader
from .lock import DirectoryLock
from .manifest import File, Manifest, sealed
from .snapshot import (
    Snapshot,
    TensorSlice,
    check_finite,
    check_step,
    plain_values,
    step_name,
    step_of,
)
from .writer import Aside, begin, host_name, place, remove, saying, settle, write_file

MAX_LOOKS = 5  # at checkpoints that are removed or replaced while they are read


class Refused(NamedTuple):
    """A checkpoint that was not used, and why."""

    path: Path
    reason: str

    def message(self, used: Snapshot | None) -> str:
        """One line for a person; `used` is what was loaded instead."""
        instead = f"{step_name(used.step)} is used" if used else "no other is there"
        return f"[checkpoint] {printable(self.path.name)} is refused: {self.reason}; {instead}"


class Store:
    """Checkpoints of one training in `folder`, as `step_00000120/` and so on.

    Not for several threads at once.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        attempt: int = 0,
        owner: bool = True,
        key: bytes | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`owner` makes the directory, locks it and removes what dead writers left aside;
        without it nothing is written. `attempt` is that of the run, 0 outside one. With a
        `key`, manifests are signed and must be. `tell` gets a line for a person, also from
        another thread. Raises ConfigError: `keep` is less than 2. OutputError: the directory
        cannot be made, is another job's now, or can be written by anybody and is somebody
        else's.
        """
        if keep < 2:
            raise ConfigError(
                f"[checkpoint] keep {keep} leaves nothing if the newest is damaged; keep 2 or more"
            )
        self.folder = Path(os.path.abspath(folder))
        self.keep = keep
        self.attempt = attempt
        self.owner = owner
        self.key = key
        self.tell = tell
        self.kept: frozenset[int] = frozenset()  # steps whose checkpoints stay beside the newest
        self._valid: set[str] = set()  # names that this process has written or verified
        # copies of the arrays that are being written
        self._staged: dict[str, dict[str, np.ndarray]] = {}
        from concurrent.futures import Future, ThreadPoolExecutor

        # Its own thread, and not one per save: starting one lets this thread wait while the other
        # begins its work.
        self._thread = ThreadPoolExecutor(1, "odyssey-checkpoint")
        self._writing: Future[Path] | None = None
        self._lock: DirectoryLock | None = None
        if owner:
            private_directory(self.folder)
            try:
                self._lock = DirectoryLock(self.folder, attempt)
                self._sweep()
            except OSError as problem:
                raise OutputError(
                    f"[checkpoint] {self._place} cannot be used: {problem.strerror}"
                ) from problem

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in the background, then gives the directory back.

        Raises what `wait` raises.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._staged = {}

    # --- reading ----------------------------------------------------------------------------------

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.folder / step_name(step)

    def names(self) -> list[str]:
        """The checkpoints that are there, oldest first, valid or not.

        Raises CheckpointError: the directory cannot be read, or can be written by anybody and is
        somebody else's.
        """
        try:
            reader.check_owner(os.stat(self.folder))
            checkpoint_names = [
                name for name in os.listdir(self.folder) if step_of(name) is not None
            ]
        except FileNotFoundError:
            return []
        except CheckpointError as problem:
            raise CheckpointError(
                f"[checkpoint] {self._place}: {problem}; nothing is read from there"
            ) from None
        except OSError as problem:
            raise CheckpointError(
                f"[checkpoint] {self._place} cannot be read: {problem.strerror}"
            ) from problem
        return sorted(checkpoint_names, key=lambda name: step_of(name) or 0)

    def newest(self, whole: bool = True) -> tuple[Snapshot | None, list[Refused]]:
        """The newest checkpoint whose every byte is as it was written, and those that were
        refused on the way to it; its arrays in memory if `whole`. Raises CheckpointError: the
        directory itself cannot be read.
        """
        for look in range(MAX_LOOKS):
            refused: list[Refused] = []
            for name in reversed(self.names()):
                path = self.folder / name
                identity_before = _identity(path)
                try:
                    snapshot, _manifest = reader.load(path, self.key, False, whole)
                except CheckpointError as problem:
                    if identity_before is not None and _identity(path) == identity_before:
                        refused.append(Refused(path, str(problem)))
                    elif look + 1 < MAX_LOOKS:
                        break  # its owner is at work: there is another by now
                else:
                    self._valid.add(name)
                    return snapshot, refused
            else:
                break
        return None, refused

    def verified(self) -> list[Manifest | Refused]:
        """Every checkpoint, oldest first: its manifest if every byte is right, or why it is
        refused; in constant memory. One that its owner removes meanwhile is left out. Raises
        CheckpointError: as `names`.
        """
        results: list[Manifest | Refused] = []
        for path in [self.folder / name for name in self.names()]:
            for _ in range(MAX_LOOKS):
                identity_before = _identity(path)
                try:
                    results.append(reader.verify(path, self.key))
                    break
                except CheckpointError as problem:
                    if identity_before is not None and _identity(path) == identity_before:
                        results.append(Refused(path, str(problem)))
                        break
        return results

    def load(self, path: Path | str, whole: bool = True) -> Snapshot:
        """One checkpoint, wherever it is; its arrays in memory if `whole`.

        Raises CheckpointError: none, or changed.
        """
        path = Path(path)
        try:
            return reader.load(path, self.key, True, whole)[0]
        except CheckpointError as problem:
            raise CheckpointError(
                f"[checkpoint] {printable(str(path))} is refused: {problem}"
            ) from problem.__cause__

    def put_aside(self) -> Path | None:
        """Moves all checkpoints into a directory beside this one, so that a new training can
        begin here; None: there are none. Raises OutputError: they cannot be moved.
        """
        names = self.names()
        if not names:
            return None
        places = (
            self.folder.with_name(f"{self.folder.name}-before-{n}") for n in itertools.count(1)
        )
        aside = next(place for place in places if not place.exists())
        try:
            private_directory(aside)
            for name in os.listdir(self.folder):
                path = self.folder / name
                if name in names or path.is_symlink():  # such as best
                    os.rename(path, aside / name)
        except OSError as problem:
            raise OutputError(
                f"[checkpoint] {self._place} cannot be moved to {aside}: {problem.strerror}"
            ) from problem
        return aside

    # --- writing ----------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, marks: Sequence[str] = ()) -> Path:
        """Writes a checkpoint, whole or not at all, removes those too old, returns its directory.

        `marks`: see `mark`. One of the same step stays if it is valid and says the same; else it is
        replaced, unless a later attempt wrote it. Raises NumericsError: parameters or optimizer
        hold NaN or infinity. OutputError: it cannot be written; the checkpoints before it are as
        they were.
        """
        self.wait()
        arrays = {
            stem: {name: np.asarray(one, order="C") for name, one in tensors.items()}
            for stem, tensors in snapshot.arrays.items()
        }
        self._check(snapshot.step)
        return self._save(
            Snapshot(snapshot.step, arrays, plain_values(snapshot.step, snapshot.values)), marks
        )

    def save_later(self, snapshot: Snapshot, marks: Sequence[str] = ()) -> None:
        """Copies a snapshot, which may change after the call, and writes it on a thread.

        Waits for the save before it: what that one raised is raised here, and this snapshot is not
        taken. Raises NumericsError, OutputError: as `save`.
        """
        self.wait()
        self._check(snapshot.step)
        former = self._staged
        self._staged = {}
        for stem, tensors in snapshot.arrays.items():
            self._staged[stem] = {}
            for name, one in tensors.items():
                one = np.asarray(one)
                copy = former.get(stem, {}).get(name)
                if copy is None or (copy.shape, copy.dtype) != (one.shape, one.dtype):
                    copy = snapshot.make(one.shape, one.dtype)  # C order
                np.copyto(copy, one)
                check_finite(snapshot.step, stem, name, copy)
                self._staged[stem][name] = copy
        staged_snapshot = Snapshot(
            snapshot.step, self._staged, plain_values(snapshot.step, snapshot.values)
        )
        self._writing = self._thread.submit(self._save, staged_snapshot, marks)

    def mark(self, step: int, names: Sequence[str]) -> None:
        """Gives the checkpoint of a step further names in this directory, as links.

        Raises OutputError.
        """
        for name in names:
            aside = self.folder / f".{name}.{host_name()}.{os.getpid()}"
            try:
                aside.unlink(missing_ok=True)
                aside.symlink_to(step_name(step))
                os.replace(aside, self.folder / name)
            except OSError as problem:
                raise OutputError(
                    f"[checkpoint] {self._place}/{name} cannot be made a link to "
                    f"{step_name(step)}: {problem.strerror}"
                ) from problem

    def wait(self) -> None:
        """Waits for the save in the background, if there is one.

        Raises OutputError, once: it failed, as in `save`.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _check(self, step: int) -> None:
        if self._lock is None:
            raise OutputError(f"[checkpoint] {self._place} is open for reading only, or closed")
        check_step(step)

    def begin(self, step: int) -> Path:
        """Begins a checkpoint whose files others write into the directory that this gives
        (write_file).
        """
        self.wait()
        self._check(step)
        return self._begin(step)

    def _begin(self, step: int) -> Path:
        with saying(step_name(step), self._place):
            self._hold()
            return begin(self.folder, self._aside(step, "tmp"))

    def finish(
        self, step: int, values: dict[str, Any], files: Sequence[File], marks: Sequence[str] = ()
    ) -> Path:
        """Ends what `begin` began, once these files are on the disk; as `save`.

        Raises OutputError, as `save`.
        """
        name = step_name(step)
        is_placed = False
        aside = self._aside(step, "tmp")
        manifest = Manifest(step, self.attempt, values, tuple(files), signed=self.key is not None)
        try:
            with saying(name, self._place):
                encoded = sealed(manifest, self.key)
                for file in files:
                    if os.stat(self.folder / aside.name / file.name).st_size != file.size:
                        raise OutputError(
                            f"{file.name} is not whole; do all hosts see {self._place}?"
                        )
                if not self._is_there(name, manifest):
                    self._valid.discard(name)
                    place(self.folder, aside, encoded, self._check_fence)
                    is_placed = True
        finally:
            if not is_placed:
                self.abandon(step)
        self._valid.add(name)
        if is_placed:
            try:
                settle(self.folder, aside)
            except OSError as problem:
                raise OutputError(
                    f"[checkpoint] {name} is in place, but {self._place} cannot be flushed to "
                    "the disk: "
                    f"{problem.strerror}; a power failure may lose it"
                ) from problem
        self.mark(step, marks)
        self._remove_old(name)
        return self.path_of(step)

    def abandon(self, step: int) -> None:
        """Removes what `begin` began."""
        shutil.rmtree(self.folder / self._aside(step, "tmp").name, ignore_errors=True)

    @slot.span("write checkpoint")
    def _save(self, snapshot: Snapshot, marks: Sequence[str]) -> Path:
        folder = self._begin(snapshot.step)

        def write(stem: str) -> File:
            pieces = [
                TensorSlice.of(stem, name, array) for name, array in snapshot.arrays[stem].items()
            ]
            return write_file(folder, stem, snapshot.step, pieces, False)

        try:
            nbytes = sum(
                one.nbytes for tensors in snapshot.arrays.values() for one in tensors.values()
            )
            files = reader.in_threads(write, list(snapshot.arrays), nbytes)
        except BaseException:
            self.abandon(snapshot.step)
            raise
        return self.finish(snapshot.step, snapshot.values, files, marks)

    def _hold(self) -> None:
        """Makes the directory and its lock anew where somebody has removed them: the training is
        worth more than that, and who has no lock there holds nothing.
        """
        assert self._lock is not None
        if os.path.lexists(self._lock.path):
            return
        removed_part = (
            f"the lock of {self._place}"
            if self.folder.is_dir()
            else f"{self._place}, with its checkpoints,"
        )
        private_directory(self.folder)
        former = self._lock
        self._lock = DirectoryLock(self.folder, self.attempt)
        former.release()
        self._valid.clear()
        self.tell(f"[checkpoint] {removed_part} was removed by somebody else, and is made anew")

    def _is_there(self, name: str, manifest: Manifest) -> bool:
        """Returns whether a valid checkpoint of this name says the same; refuses to replace a
        later attempt's.
        """
        path = self.folder / name
        if not os.path.lexists(path):
            return False
        try:
            existing_manifest = reader.verify(path, self.key)
        except CheckpointError:
            return False
        if existing_manifest.same_content(manifest):
            return True
        if existing_manifest.attempt > self.attempt:
            raise OutputError(
                f"attempt {existing_manifest.attempt} has written it, and this is attempt "
                f"{self.attempt}"
            )
        return False

    def _check_fence(self) -> None:
        """Refuses to write when another process or a later attempt has taken over."""
        assert self._lock is not None
        self._lock.check()
        run = Run.current()
        if run is None or not run.attempt_file.exists():
            return
        try:
            number = read_json(run.attempt_file)["attempt"]
        except (DataError, TypeError, KeyError):
            number = None
        if type(number) is not int:
            raise OutputError(
                f"{printable(str(run.attempt_file))} does not say which attempt may write"
            )
        if number > self.attempt:
            raise OutputError(f"attempt {self.attempt} is over, attempt {number} writes now")

    def _remove_old(self, saved: str) -> None:
        """Removes what is older than the newest `keep` valid ones; `saved` is one of them."""
        valid_count = 1
        try:
            for name in reversed(self.names()):
                if name == saved or step_of(name) in self.kept:
                    continue
                if valid_count >= self.keep:
                    remove(self.folder / name, self._aside(step_of(name) or 0, "old"))
                    self._valid.discard(name)
                elif self._is_valid(name):
                    valid_count += 1
        except (OSError, OdysseyError) as problem:
            reason = (
                f"an older one cannot be removed: {getattr(problem, 'strerror', None) or problem}"
            )
            raise OutputError(f"[checkpoint] {saved} is saved, but {reason}") from problem

    def _is_valid(self, name: str) -> bool:
        if name not in self._valid:
            try:
                reader.verify(self.folder / name, self.key)
            except CheckpointError:
                return False
            self._valid.add(name)
        return True

    def _aside(self, step: int, kind: str) -> Aside:
        return Aside(step, kind, self.attempt, host_name(), os.getpid())

    def _sweep(self) -> None:
        """Removes what writers left aside that are gone: of an earlier attempt, or dead
        processes of this machine.
        """
        for name in os.listdir(self.folder):
            aside = Aside.parse(name)
            if aside is None:
                continue
            on_this_host = aside.host == host_name()
            if aside.attempt < self.attempt or (
                on_this_host and (aside.pid == os.getpid() or gone(aside.pid))
            ):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    @property
    def _place(self) -> str:
        return printable(str(self.folder))


def _identity(path: Path) -> tuple[int, int] | None:
    """Which directory has this name now: another one if the checkpoint was replaced, none if it
    was removed.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
