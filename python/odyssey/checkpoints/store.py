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
from ..base.hooks import has_ended
from ..base.runs import Run
from ..errors import CheckpointError, ConfigError, DataError, OdysseyError, OutputError, printable
from . import reader
from .lock import DirectoryLock
from .manifest import File, Manifest, encode_checked
from .snapshot import (
    Snapshot,
    TensorSlice,
    check_finite,
    check_step,
    plain_values,
    step_name,
    step_of,
)
from .writer import (
    Aside,
    finish_replacement,
    host_name,
    make_temporary_directory,
    name_checkpoint_in_errors,
    place_checkpoint,
    remove_checkpoint,
    write_file,
)

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
        """Opens a directory.

        keep: the number of valid checkpoints that stay.
        attempt: the number of the run's attempt; 0 outside a run.
        owner: True makes the directory, locks it and removes what dead writers left in it. False
            opens it for reading only.
        key: signs manifests, and requires that those that are read are signed.
        tell: receives a line for a person, also from another thread.

        Raises:
            ConfigError: `keep` is less than 2.
            OutputError: the directory cannot be made, another job holds it, or it belongs to
                another user and everybody may write to it.
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
                self._remove_leftovers()
            except OSError as problem:
                raise OutputError(
                    f"[checkpoint] {self._place} cannot be used: {problem.strerror}"
                ) from problem

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save in the background, then releases the directory.

        Raises:
            OutputError: as `wait`. The directory is released all the same.
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
        """Returns the path of the checkpoint of a step, whether it exists or not."""
        return self.folder / step_name(step)

    def names(self) -> list[str]:
        """Returns the names of the checkpoints in the directory, oldest first, valid or not.

        Raises:
            CheckpointError: the directory cannot be read, or belongs to another user and
                everybody may write to it.
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
        """Returns the newest valid checkpoint, and the newer ones that were refused.

        The checkpoint is None if there is no valid one. The owner may remove or replace
        checkpoints meanwhile. A checkpoint that fails because of that is not refused: the
        directory is listed again, up to MAX_LOOKS times.

        whole: its arrays are in memory; otherwise they are read when they are asked for.

        Raises:
            CheckpointError: the directory itself cannot be read.
        """
        for look in range(MAX_LOOKS):
            refused: list[Refused] = []
            for name in reversed(self.names()):
                path = self.folder / name
                identity_before = _identify_directory(path)
                try:
                    snapshot, _ = reader.load(path, self.key, follow=False, whole=whole)
                except CheckpointError as problem:
                    if identity_before is not None and _identify_directory(path) == identity_before:
                        refused.append(Refused(path, str(problem)))
                    elif look + 1 < MAX_LOOKS:
                        break  # the owner has replaced or removed it: list the directory again
                else:
                    self._valid.add(name)
                    return snapshot, refused
            else:
                break
        return None, refused

    def verified(self) -> list[Manifest | Refused]:
        """Checks every checkpoint in constant memory, oldest first.

        Returns the manifest of each valid one, and a Refused for each other. A checkpoint that its
        owner removes meanwhile is omitted.

        Raises:
            CheckpointError: as `names`.
        """
        results: list[Manifest | Refused] = []
        for path in [self.folder / name for name in self.names()]:
            for _ in range(MAX_LOOKS):
                identity_before = _identify_directory(path)
                try:
                    results.append(reader.verify(path, self.key))
                    break
                except CheckpointError as problem:
                    if identity_before is not None and _identify_directory(path) == identity_before:
                        results.append(Refused(path, str(problem)))
                        break
        return results

    def load(self, path: Path | str, whole: bool = True) -> Snapshot:
        """Returns one checkpoint, which may be in any directory and may be reached by a link.

        whole: its arrays are in memory; otherwise they are read when they are asked for.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = Path(path)
        try:
            snapshot, _ = reader.load(path, self.key, follow=True, whole=whole)
        except CheckpointError as problem:
            raise CheckpointError(
                f"[checkpoint] {printable(str(path))} is refused: {problem}"
            ) from problem.__cause__
        return snapshot

    def put_aside(self) -> Path | None:
        """Moves all checkpoints into a new directory next to this one, and returns its path.

        A new training run can then start here. Returns None if there are no checkpoints.

        Raises:
            OutputError: they cannot be moved.
        """
        names = self.names()
        if not names:
            return None
        places = (
            self.folder.with_name(f"{self.folder.name}-before-{n}") for n in itertools.count(1)
        )
        aside = next(
            place_checkpoint for place_checkpoint in places if not place_checkpoint.exists()
        )
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
        """Writes a checkpoint, removes those that are too old, and returns its directory.

        A checkpoint is written completely or not at all. A valid one of the same step with the
        same content stays. A different one is replaced, unless a later attempt wrote it.

        marks: further names, as in `mark`.

        Raises:
            NumericsError: parameters or optimizer hold NaN or infinity.
            OutputError: it cannot be written; the checkpoints before it are as they were.
        """
        self.wait()
        arrays = {
            stem: {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
            for stem, tensors in snapshot.arrays.items()
        }
        self._check_can_save(snapshot.step)
        values = plain_values(snapshot.step, snapshot.values)
        return self._write_checkpoint(Snapshot(snapshot.step, arrays, values), marks)

    def save_later(self, snapshot: Snapshot, marks: Sequence[str] = ()) -> None:
        """Copies a snapshot, which may change after the call, and writes it on a thread.

        It waits for the save before it first. If that one failed, its error is raised here, and
        this snapshot is not saved.

        Raises:
            NumericsError, OutputError: as `save`.
        """
        self.wait()
        self._check_can_save(snapshot.step)
        # Memory of the copies before is used again; it is free, because that save is complete.
        former = self._staged
        self._staged = {}
        for stem, tensors in snapshot.arrays.items():
            self._staged[stem] = {}
            for name, tensor in tensors.items():
                array = np.asarray(tensor)
                copy = former.get(stem, {}).get(name)
                if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
                    copy = snapshot.make(array.shape, array.dtype)  # C order
                np.copyto(copy, array)
                check_finite(snapshot.step, stem, name, copy)
                self._staged[stem][name] = copy
        staged_snapshot = Snapshot(
            snapshot.step, self._staged, plain_values(snapshot.step, snapshot.values)
        )
        self._writing = self._thread.submit(self._write_checkpoint, staged_snapshot, marks)

    def mark(self, step: int, names: Sequence[str]) -> None:
        """Gives the checkpoint of a step further names in this directory, such as "best", as links.

        A link is made under a temporary name and renamed, so a name never points to nothing.

        Raises:
            OutputError: a link cannot be made.
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

        Raises:
            NumericsError, OutputError: that save failed, as in `save`. It is raised only once.
        """
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _check_can_save(self, step: int) -> None:
        """Raises OutputError if this process may not write, or `step` cannot be a step."""
        if self._lock is None:
            raise OutputError(f"[checkpoint] {self._place} is open for reading only, or closed")
        check_step(step)

    def begin(self, step: int) -> Path:
        """Starts a checkpoint whose files other processes write, and returns its directory.

        They write into it with `write_file`. `finish` or `abandon` ends it.

        Raises:
            OutputError: as `save`.
        """
        self.wait()
        self._check_can_save(step)
        return self._begin_checkpoint(step)

    def _begin_checkpoint(self, step: int) -> Path:
        """Makes the temporary directory of a step and returns it, on any thread of this process."""
        with name_checkpoint_in_errors(step_name(step), self._place):
            self._restore_lock()
            return make_temporary_directory(self.folder, self._name_aside(step, "tmp"))

    def finish(
        self, step: int, values: dict[str, Any], files: Sequence[File], marks: Sequence[str] = ()
    ) -> Path:
        """Completes a checkpoint that `begin` started, once its files are on the disk.

        Returns its directory. Otherwise it does what `save` does: marks, and the removal of old
        checkpoints.

        Raises:
            OutputError: as `save`.
        """
        name = step_name(step)
        is_placed = False
        aside = self._name_aside(step, "tmp")
        manifest = Manifest(step, self.attempt, values, tuple(files), signed=self.key is not None)
        try:
            with name_checkpoint_in_errors(name, self._place):
                encoded = encode_checked(manifest, self.key)
                for file in files:
                    if os.stat(self.folder / aside.name / file.name).st_size != file.size:
                        raise OutputError(
                            f"{file.name} is not whole; do all hosts see {self._place}?"
                        )
                if not self._is_saved(name, manifest):
                    self._valid.discard(name)
                    place_checkpoint(self.folder, aside, encoded, self._check_may_write)
                    is_placed = True
        finally:
            if not is_placed:
                self.abandon(step)
        self._valid.add(name)
        if is_placed:
            try:
                finish_replacement(self.folder, aside)
            except OSError as problem:
                raise OutputError(
                    f"[checkpoint] {name} is in place, but {self._place} cannot be flushed to the "
                    f"disk: {problem.strerror}; a power failure may lose it"
                ) from problem
        self.mark(step, marks)
        self._remove_old(name)
        return self.path_of(step)

    def abandon(self, step: int) -> None:
        """Removes the files of a checkpoint that `begin` started."""
        shutil.rmtree(self.folder / self._name_aside(step, "tmp").name, ignore_errors=True)

    def _write_checkpoint(self, snapshot: Snapshot, marks: Sequence[str]) -> Path:
        """Writes a checkpoint of arrays that do not change; the rest of `save` and `save_later`."""
        with slot.span("write checkpoint"):
            folder = self._begin_checkpoint(snapshot.step)

            def write(stem: str) -> File:
                pieces = [
                    TensorSlice.of(stem, name, array)
                    for name, array in snapshot.arrays[stem].items()
                ]
                return write_file(folder, stem, snapshot.step, pieces, parts=False)

            try:
                nbytes = sum(
                    array.nbytes
                    for tensors in snapshot.arrays.values()
                    for array in tensors.values()
                )
                files = reader.map_in_threads(write, list(snapshot.arrays), nbytes)
            except BaseException:
                self.abandon(snapshot.step)
                raise
            return self.finish(snapshot.step, snapshot.values, files, marks)

    def _restore_lock(self) -> None:
        """Makes the directory and its lock again if somebody has removed them.

        Saving continues because the training run is worth more than the lock. A lock file without
        a name protects nothing, so a new one is needed.
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

    def _is_saved(self, name: str, manifest: Manifest) -> bool:
        """Returns True if a valid checkpoint of this name has the same content.

        Raises:
            OutputError: a valid one has other content, and a later attempt wrote it.
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

    def _check_may_write(self) -> None:
        """Raises OutputError if another process or a later attempt of the run has taken over."""
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
        """Removes the checkpoints that are older than the newest `keep` valid ones.

        saved: the name of one of these, which was written just now.
        """
        valid_count = 1
        try:
            for name in reversed(self.names()):
                if name == saved or step_of(name) in self.kept:
                    continue
                if valid_count >= self.keep:
                    remove_checkpoint(
                        self.folder / name, self._name_aside(step_of(name) or 0, "old")
                    )
                    self._valid.discard(name)
                elif self._is_valid(name):
                    valid_count += 1
        except (OSError, OdysseyError) as problem:
            reason = (
                f"an older one cannot be removed: {getattr(problem, 'strerror', None) or problem}"
            )
            raise OutputError(f"[checkpoint] {saved} is saved, but {reason}") from problem

    def _is_valid(self, name: str) -> bool:
        """Returns True for a valid checkpoint. Each is verified once."""
        if name not in self._valid:
            try:
                reader.verify(self.folder / name, self.key)
            except CheckpointError:
                return False
            self._valid.add(name)
        return True

    def _name_aside(self, step: int, kind: str) -> Aside:
        """Returns the Aside of this process for a step."""
        return Aside(step, kind, self.attempt, host_name(), os.getpid())

    def _remove_leftovers(self) -> None:
        """Removes the Asides of writers that are gone.

        These are writers of earlier attempts, and processes of this machine that have ended.
        """
        for name in os.listdir(self.folder):
            aside = Aside.parse(name)
            if aside is None:
                continue
            on_this_host = aside.host == host_name()
            if aside.attempt < self.attempt or (
                on_this_host and (aside.pid == os.getpid() or has_ended(aside.pid))
            ):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    @property
    def _place(self) -> str:
        return printable(str(self.folder))


def _identify_directory(path: Path) -> tuple[int, int] | None:
    """Returns (device, inode) of the directory at a path; None if it was removed.

    The pair changes when the checkpoint is replaced.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def newest_bytes(folder: Path) -> int | None:
    """Returns the size of the newest checkpoint in a directory, valid or not; None without one."""
    try:
        steps = {step_of(path.name): path for path in folder.iterdir() if path.is_dir()}
        steps.pop(None, None)
        if not steps:
            return None
        return sum(file.lstat().st_size for file in steps[max(steps)].iterdir())
    except OSError:
        return None
