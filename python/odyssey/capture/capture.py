"""The state of a training run beyond weights: pictured, kept in checkpoints, and put back.

A checkpoint holds the values that are not what they were when fit() began, by path. So what a
program was built with stays the program's, and what has changed since is state. `Capture.restore`
writes values into the objects that the resumed program has built. It creates values and
containers, and never an object, function or class, and nothing is unpickled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..base import registry
from ..core.fingerprint import hash_of
from ..errors import CheckpointError, ConfigError
from . import containers, values
from .edges import (
    CACHED,
    Place,
    class_path,
    edges_of_items,
    is_bound,
    is_function,
    is_own_file,
)
from .sharing import Sharing, find_shared, separate, share
from .walk import (
    LOADER_ROOTS,
    MOVED,
    OPAQUE,
    REDUCED,
    REFERENCE,
    RESOURCE,
    SAMPLED,
    SAMPLED_ROOTS,
    STATE,
    VALUE,
    Entry,
    Picture,
    built_path,
    changed_in_place,
    describe,
    is_code,
    may_fill_up,
    own_path_of,
    reduced,
    walk,
)

# The roots that all ranks have alike, and that a resumed program builds as before.
COMPARED_ROOTS = (
    "model",
    "loss",
    "optimizer",
    "scheduler",
    "schedule",
    "sampler",
    "transform",
    "collate",
)
# Names of numbers that are another one on each rank, as they say.
RANK_NAMES = frozenset({"rank", "local_rank", "global_rank", "world_rank", "node_rank", "device"})
ATTEMPTS = 20  # walks while other threads change what is walked
COPIED_BYTES = 1 << 20  # a value of at most this size is copied when fit() begins
ADVICE = "list it in the class attribute _not_state if the training does not depend on it"

KEPT_SORTS = (VALUE, STATE, REDUCED)
GENERATORS = frozenset({"random", "generator", "random state", "seed sequence", "torch generator"})
_READ_AHEAD_ROOTS = frozenset({"transform", "collate"})  # which loaders call ahead of the steps
# Modules whose functions a checkpoint may name: they compute, and open no files.
_ARITHMETIC = ("math.", "odyssey.core.", "torch.nn.functional.", "torch._C._nn.")
_WEAK = "weak"  # the last item of the key of a place that holds a weak reference
_AT_EPOCH_START = "epoch start "  # starts the names of arrays


class Capture:
    """What a training run depends on, beyond what its trainer keeps by itself.

    Args:
        roots: returns the objects to walk from, by name, as they are now.
        kept: returns the ids of objects that the trainer keeps in another way, such as parameters.
        say: reports a line to the user.
        set_by_forward: returns (id of a module, name) of the attributes that forward() is known to
            set.
        compares_built: ranks compare what the program was built with. False: only what has changed
            since, because the trainer compares what a step computes.

    Attributes:
        by_forward: paths of what forward() or the loss sets and does not read. How often they run
            depends on the number of ranks, so it is neither kept nor compared.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]],
        kept: Callable[[], set[int]],
        say: Callable[[str], None],
        set_by_forward: Callable[[], Container[tuple[int, str]]] = frozenset,
        compares_built: bool = True,
    ) -> None:
        self._compares_built = compares_built
        self._roots = roots
        self._kept = kept
        self._say = say
        self._set_by_forward = set_by_forward
        self.by_forward: set[str] = set()
        self._built = Picture()
        self._marks: dict[str, str] = {}
        # encoded values and arrays of the beginning, by path
        self._copies: dict[str, tuple[Any, dict[str, np.ndarray]]] = {}
        # what exists when the first epoch starts, so that a resumed run has it too
        self._expected = Picture()
        self._known: dict[int, str] = {}  # paths of its objects by id
        # these objects by id: without them, a new object could get the id of one that is gone
        self._known_objects: dict[int, Any] = {}
        # paths at which the program has built objects that were elsewhere at the latest checkpoint
        self._moved_paths: set[str] = set()
        # classes of hosts (walk.py) that exist when fit() begins, or the first epoch starts
        self._expected_hosts: dict[str, type] = {}
        # items of tuples, and keys of dicts of objects, by path
        self._expected_tuples: dict[str, list[str]] = {}
        self._expected_orders: dict[str, list[Any]] = {}
        # objects that are keys of dicts, by the path of the dict: when the first epoch starts, and
        # when the latest one started
        self._expected_keys: dict[str, dict[int, Any]] = {}
        self._start_keys: dict[str, dict[int, Any]] = {}
        # objects and the classes that they had when they were first looked at, by path
        self._first_classes: dict[str, tuple[Any, type]] = {}
        self._announced: set[str] = set()
        self._expected_modules: set[str] = set()  # those that are imported before the first step
        # functions and classes that a resumed run must have when its epoch has started
        self._unchecked_classes: tuple[str, dict[str, str]] | None = None
        self._unchecked_patches: dict[str, str] = {}
        # names of functions and classes that the latest on_epoch_start has set, by path
        self._start_code: dict[str, str] = {}
        # hooks and replaced methods before the first step, and when the latest epoch started; None
        # for loops of the user's own, which may set them at any time
        self._expected_patches: dict[str, str] = {}
        self._start_patches: dict[str, str] | None = None
        # classes of objects that the latest on_epoch_start has created
        self._start_types: dict[str, type] = {}
        # paths to which it has moved objects of an earlier epoch
        self._start_moved: set[str] = set()
        # objects and functions by path, from on_epoch_end until the next epoch has started
        self._objects_at_epoch_end: dict[str, Any] | None = None
        self._code_at_epoch_end: dict[str, Any] | None = None
        self._in_epoch = False  # False from on_epoch_end to the end of the next on_epoch_start
        self._start_transforms: dict[str, str] = {}
        # what the loader's roots held when the latest epoch began: its number, values and arrays
        self._epoch_start: tuple[int, dict[str, Any], dict[str, np.ndarray]] | None = None
        # values of a checkpoint in the middle of an epoch, until its first batches are skipped
        self._after_skip: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None

    # --- the beginning ---

    def begin(self) -> None:
        """Takes what there is now as what the program has built."""
        for package in registry.provided("captured"):
            if package in sys.modules:  # the program may hold tensors of PyTorch
                with contextlib.suppress(ConfigError):  # its version is not supported
                    registry.load("captured", package)
        self._known = {}
        self._known_objects = {}
        self._expected_hosts = {}
        self._expected_tuples = {}
        self._expected_orders = {}
        self._first_classes = {}
        self._built = self.look()
        self._marks = self._built.marks()
        self._expect(self._built)
        self._copies = {}
        self._epoch_start = None
        self._after_skip = None
        self._start_patches = None
        self._start_types = {}
        self._objects_at_epoch_end = None
        self._code_at_epoch_end = None
        self._start_code = {}
        self._in_epoch = False
        for path, entry in self._built.entries.items():
            if entry.sort in KEPT_SORTS and size_of(entry.value) <= COPIED_BYTES:
                arrays: dict[str, np.ndarray] = {}
                node = values.encode(parts_of(entry), arrays, path)
                copies = {name: np.array(array) for name, array in arrays.items()}
                self._copies[path] = node, copies

    def announce_opaque(self, strict: bool) -> None:
        """Tells the user which objects checkpoints can't keep, once.

        strict: raise ConfigError instead.
        """
        opaque = {
            path: name
            for path, name in self._built.opaque().items()
            if self._built.entries[path].root not in LOADER_ROOTS
        }
        self._announce({**opaque, **self._built.holders}, strict)

    def opaque_below(self, roots: Collection[str]) -> dict[str, str]:
        """Returns the class names of what checkpoints can't keep below some roots, by path."""
        return {
            path: name
            for path, name in self._built.opaque().items()
            if self._built.entries[path].root in roots
        }

    def _announce(self, objects: Mapping[str, str], strict: bool = False) -> None:
        """Tells the user once about objects that checkpoints can't keep: class names by path."""
        opaque = {path: name for path, name in objects.items() if path not in self._announced}
        if not opaque:
            return
        shown = ", ".join(f"{path} ({name})" for path, name in list(opaque.items())[:5])
        more = f" and {len(opaque) - 5} more" if len(opaque) > 5 else ""
        if strict:
            raise ConfigError(
                f"[capture] checkpoints can't keep {shown}{more}, and state is 'strict'; {ADVICE}"
            )
        self._announced.update(opaque)
        self._say(
            f"[capture] checkpoints can't keep {shown}{more}: a resumed run has them as the "
            "program builds them. Hold what training depends on in numbers, arrays, lists or dicts"
        )

    def expect(self) -> None:
        """Takes the objects that exist now as those that a resumed run has too, because its
        callbacks have created them before its first step.
        """
        self._expect(self.look())

    def ignore_changes_by(self, root: str, call: Callable[[], Any]) -> None:
        """Calls a function, and neither keeps nor compares what it changes below a root.

        For example, how often a schedule is called depends on the number of ranks.
        """
        before = self.look((root,)).marks()
        call()
        after = self.look((root,)).marks()
        self.by_forward.update(
            path for path in {**before, **after} if before.get(path) != after.get(path)
        )

    def _expect(self, picture: Picture) -> None:
        # without values, which may be large and which the program may let go of
        entries = {
            path: entry
            if entry.sort == REDUCED or _is_object(entry)
            else dataclasses.replace(entry, value=None)
            for path, entry in picture.entries.items()
        }
        self._expected = Picture(entries, picture.aliases, picture.alias_places)
        # a resumed run has put values back when its first epoch starts, so the first look counts
        signatures = {
            path: containers.signature(picture, entry)
            for path, entry in picture.entries.items()
            if containers.is_tuple(entry)
        }
        self._expected_tuples = {**signatures, **self._expected_tuples}
        self._expected_orders = {**_orders_in(picture), **self._expected_orders}
        self._expected_hosts.update({path: type(one) for path, one in picture.hosts.items()})
        kept_ids = self._kept()
        # not the other hosts: a file must close when the program drops it
        self._expected.hosts = {p: one for p, one in picture.hosts.items() if id(one) in kept_ids}
        picture.hosts = {}
        self._expected_modules = {*sys.modules}
        self._expected_patches = picture.patches
        self._expected_keys = self._start_keys = _object_keys_in(picture)
        known = {
            id(entry.value): built_path(path)
            for path, entry in picture.entries.items()
            if _is_object(entry)
        }
        # an object keeps the path at which the program has built it, wherever a restore puts it
        self._known = {**known, **self._known}
        self._first_classes = {
            **{
                path: (entry.value, type(entry.value))
                for path, entry in picture.entries.items()
                if entry.sort == REFERENCE and not is_code(entry.value)
            },
            **self._first_classes,
        }
        for entry in picture.entries.values():
            if entry.sort == REFERENCE:
                self._known_objects.setdefault(id(entry.value), entry.value)

    # --- now ---

    def look(self, roots: Iterable[str] | None = None) -> Picture:
        """Returns a picture of what there is now. roots: names of some roots; None: all."""
        everything = self._roots()
        names = everything.keys() if roots is None else {*roots}
        chosen = {name: root for name, root in everything.items() if name in names}
        picture = walk_patiently(chosen, self._kept(), self._known)
        if known := self._set_by_forward():
            for path, entry in picture.entries.items():
                if entry.place.kind == "attribute":
                    if (id(entry.place.holder), entry.place.key) in known:
                        self.by_forward.add(path)
        return picture

    def changed_in_forward(self, path: str, by_forward: Collection[str] | None = None) -> bool:
        """Tells whether forward() or the loss sets the value at a path, or an object around it.

        by_forward: paths of what they set; None: the known ones.
        """
        known = self.by_forward if by_forward is None else by_forward
        if path in known:
            return True
        return _is_below(path, known)

    def compared(self) -> dict[str, str]:
        """Returns what all ranks must have alike, as strings by path.

        Globals and closures count only if they have changed since fit() began: many programs hold
        numbers in them that are another one on each rank, and that training does not read.
        """
        # what the data set holds, such as the time at which it was opened, is not compared
        picture = self.look({*COMPARED_ROOTS, *SAMPLED_ROOTS})
        return {
            path: _code_mark(picture, path, entry.value) if is_bound(entry.value) else entry.mark
            for path, entry in picture.entries.items()
            if entry.root in COMPARED_ROOTS
            and entry.sort not in (OPAQUE, RESOURCE)
            and not self.changed_in_forward(path)
            and last_name(path).lower() not in RANK_NAMES
            and CACHED not in path  # a rank may not have computed it yet
            and (self._is_own_setting(path) or self._has_changed(entry))
        }

    def _has_changed(self, entry: Entry) -> bool:
        """Tells whether something is not what it was when fit() began."""
        built = self._built.entries.get(built_path(entry.path))
        return built is None or built.mark != entry.mark

    def _is_own_setting(self, path: str) -> bool:
        """Tells whether a value is an attribute or item, and ranks are to have it alike."""
        return self._compares_built and ":" not in path and "<" not in path

    # --- checkpoints ---

    def state(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON has it, and puts its arrays into `arrays`.

        Raises ConfigError: something has changed that a checkpoint can't keep.
        """
        whole_picture = self.look()
        self._moved_paths = {built_path(p) for p in whole_picture.entries if p.endswith(MOVED)}
        picture = self._without_objects_of_epoch(whole_picture)
        tuples = self._changed_tuples(picture, arrays)
        self._check_kept(picture, tuples)
        late_hosts = {
            entry.parent: values.qualified_name(type(picture.hosts[entry.parent]))
            for entry in picture.entries.values()
            if entry.root not in LOADER_ROOTS and self._is_of_late_host(entry, picture)
        }
        created = self._new_containers(picture)
        saved = self._changed_values(picture, arrays, created=created)
        self._announce(
            {
                **picture.holders,
                **late_hosts,
                **self._lost_functions(picture),
                **self._late_opaque(picture),
                **self._late_modules(picture, saved),
            }
        )
        self._announce_sets(picture, saved)
        in_tuples = {
            part for _, parts, *_ in tuples.values() for sort, part in parts if sort == "path"
        }
        saved = {
            path: item for path, item in saved.items() if item[3] not in tuples or path in in_tuples
        }
        holders: dict[str, list[str]] = {}
        for _, _, _, parent, *_ in saved.values():
            holder = picture.entries.get(parent)
            if holder is not None and holder.sort == REFERENCE:
                holders[holder.path] = [holder.root, holder.mark]
        replaced = {
            path: [entry.root, entry.mark]
            for path, entry in picture.entries.items()
            if entry.sort == REFERENCE
            and entry.root not in LOADER_ROOTS
            and not self.changed_in_forward(path)
            and path in self._built.entries
            and self._built.entries[path].mark != entry.mark
        }
        epoch_start = None
        if self._epoch_start is not None:
            epoch, epoch_values, epoch_arrays = self._epoch_start
            arrays.update(epoch_arrays)
            epoch_start = {"epoch": epoch, "values": epoch_values}
        return {
            "values": saved,
            "removed": self._removed(whole_picture),
            "aliases": self._changed_aliases(picture, created),
            "epoch start": epoch_start,
            "functions": self._functions(picture),
            "changed classes": self._changed_classes(picture),
            "containers": created,
            "tuples": tuples,
            "orders": {
                path: keys
                for path, keys in _orders_in(picture).items()
                if self._expected_orders.get(path) != keys
            },
            "shared": find_shared(picture, self._sharing_entries(picture)).to_json(),
            "classes": {**holders, **replaced},
            "patches": self._changed_patches(picture),
            "created": {
                path: [entry.parent, values.encode(entry.place.key, {}, path)]
                for path, entry in picture.entries.items()
                if self._is_new_item(entry) and not self.changed_in_forward(path)
            },
            "built": self.describe_built(self.by_forward),
            "opaque": picture.opaque(),
            "by forward": sorted(self.by_forward),
        }

    def _without_objects_of_epoch(self, picture: Picture) -> Picture:
        """Returns a picture between two epochs without the objects that on_epoch_start has created,
        and creates anew in the next epoch. It tells the user about them once.
        """
        if self._in_epoch:
            return picture
        left_out: list[str] = []
        for path, entry in picture.entries.items():
            kind = type(entry.value)
            is_of_epoch = entry.sort == REFERENCE and self._start_types.get(path) is kind
            if is_of_epoch and not self._is_expected(entry) and self._has_values(picture, path):
                left_out.append(path)
        left_out = [path for path in left_out if not _is_below(path, left_out)]
        if not left_out:
            return picture
        new = [path for path in left_out if path not in self._announced]
        if new:
            self._announced.update(new)
            self._say(
                f"[capture] {', '.join(new)}: created in on_epoch_start, so a run that is resumed "
                "between two epochs has it as that creates it, and not as the last epoch left it"
            )
        return dataclasses.replace(
            picture,
            entries={
                path: entry
                for path, entry in picture.entries.items()
                if path not in left_out and not _is_below(path, left_out)
            },
            alias_places={
                path: place
                for path, place in picture.alias_places.items()
                if not _is_below(path, left_out)
            },
        )

    def _changed_patches(self, picture: Picture) -> dict[str, str]:
        """Returns the hooks and replaced methods that are not those of when fit() began, by path;
        "" stands for none.
        """
        if self._start_patches is None:
            return {}
        built = self._built.patches
        return {
            path: picture.patches.get(path, "")
            for path in sorted({**built, **picture.patches})
            if built.get(path) != picture.patches.get(path)
        }

    def _removed(self, picture: Picture) -> list[str]:
        """Returns the paths of what the program has built and no object holds any longer."""
        gone = []
        for path, entry in {**self._built.entries, **self._expected.entries}.items():
            is_object = entry.sort == REFERENCE and entry.root not in LOADER_ROOTS
            if path in picture.entries or path in picture.aliases or not entry.parent:
                continue
            is_kept = entry.sort in (VALUE, REDUCED)
            if not (is_kept or is_object) or entry.place.kind in ("fixed", "hook", "contents"):
                continue
            # what is gone with the object that held it is not removed from that
            if self._has_same_parent(entry.parent, picture) and not self.changed_in_forward(path):
                gone.append(path)
        return gone + self._removed_aliases(picture)

    def _removed_aliases(self, picture: Picture) -> list[str]:
        """Returns the further places of objects that hold nothing any longer, such as the last
        place of a list of layers that has become shorter.
        """
        gone = []
        aliases = {**self._built.aliases, **self._expected.aliases}
        entries = {**self._built.entries, **self._expected.entries}
        places = {**self._built.alias_places, **self._expected.alias_places}
        for path, (place, parent) in places.items():
            if path in picture.entries or path in picture.aliases:
                continue
            first_path = aliases[path]
            first = entries.get(first_path)
            if not place.can_be_set() or (first is not None and first.root in LOADER_ROOTS):
                continue
            if first is None:
                is_kept = first_path in self._expected_hosts
            else:
                is_kept = first.sort in (*KEPT_SORTS, REFERENCE)
            has_holder = self._has_same_parent(parent, picture)
            if is_kept and has_holder and not self.changed_in_forward(path):
                gone.append(path)
        return gone

    def _has_same_parent(self, parent: str, picture: Picture) -> bool:
        """Tells whether an object of the same class as the one that was built is at a path."""
        if parent in picture.hosts:
            return self._is_expected_host(parent, picture)
        before = self._expected.entries.get(parent) or self._built.entries.get(parent)
        now = picture.entries.get(parent)
        if before is None or now is None:
            return False
        return now.sort == before.sort and type(now.value) is type(before.value)

    def _is_expected_host(self, path: str, picture: Picture) -> bool:
        """Tells whether a resumed run has such a host (walk.py) too."""
        return self._expected_hosts.get(path) is type(picture.hosts[path])

    def _is_of_late_host(self, entry: Entry, picture: Picture) -> bool:
        """Tells whether something is an attribute of a host that a resumed run does not have when
        it starts, such as a thread of a later step. Tensors are put back with their attributes.
        """
        path = entry.parent
        if path not in picture.hosts or self._is_expected_host(path, picture):
            return False
        holder = picture.entries.get(path)
        return holder is None or holder.sort != VALUE

    def _changed_aliases(self, picture: Picture, created: Container[str]) -> dict[str, list[Any]]:
        """Returns places that hold an object that is also elsewhere, and held another one when
        fit() began: the object's path, and where it is held, by path.

        created: paths of the lists and dicts that a resumed run creates.
        """
        changed: dict[str, list[Any]] = {}
        for path, (place, parent) in picture.alias_places.items():
            first_path = picture.aliases[path]
            first = picture.entries.get(first_path)
            if self.changed_in_forward(path):
                continue
            is_built = self._built.aliases.get(built_path(path)) == first_path
            if is_built and parent not in created:
                continue
            if first is None:
                can_be_put = first_path in picture.hosts
            else:
                is_kept = first.sort in (*KEPT_SORTS, REFERENCE)
                can_be_put = is_kept and first.root not in LOADER_ROOTS
            if can_be_put:
                changed[path] = [first_path, parent, *_key_of(place)]
        return changed

    def _changed_values(
        self,
        picture: Picture,
        arrays: dict[str, np.ndarray],
        prefix: str = "",
        created: Container[str] = (),
    ) -> dict[str, Any]:
        """Returns the values that are not what they were when fit() began, as JSON by path.

        arrays: receives their arrays, under names that start with `prefix`.
        created: paths of the lists and dicts that a resumed run creates.
        """
        changed: dict[str, Any] = {}
        built_late = self._built_late(picture)
        for path, entry in picture.entries.items():
            if entry.sort not in KEPT_SORTS or self.changed_in_forward(path):
                continue
            if self._is_of_late_host(entry, picture):
                continue
            # of a new tensor all attributes count
            is_new = not {path, entry.parent}.isdisjoint(self._moved_paths)
            is_new = is_new or entry.parent in created or entry.parent in changed
            if self._marks.get(path) == entry.mark and not is_new:
                continue
            if self._is_cache(entry, built_late):
                continue
            node = values.encode(parts_of(entry), arrays, prefix + path)
            changed[path] = [entry.sort, node, entry.root, entry.parent, *_key_of(entry.place)]
        return changed

    def _built_late(self, picture: Picture) -> set[str]:
        """Returns the paths of objects below the loader's roots that have opened a file, created an
        object or filled a large array since fit() began.

        A resumed run builds them again when it reads samples, so it must not find a part of them.
        """
        holders: set[str] = set()
        for path, entry in picture.entries.items():
            if entry.root not in LOADER_ROOTS or entry.sort in KEPT_SORTS:
                continue
            before = self._built.entries.get(path)
            if before is not None and before.sort == entry.sort:
                if entry.sort == SAMPLED:
                    is_late = before.mark != entry.mark or may_fill_up(before.mark)
                else:
                    is_late = entry.sort == OPAQUE and before.value is not entry.value
            else:
                is_late = True
            holder = entry.parent
            while is_late and holder not in holders:
                holders.add(holder)
                around = picture.entries.get(holder)
                if around is None or not isinstance(around.value, (list, tuple, dict)):
                    break
                holder = around.parent
        return holders

    def _is_cache(self, entry: Entry, built_late: Container[str]) -> bool:
        """Tells whether a value is a part of what a loader builds when it reads samples.

        Numbers and generators are no caches.
        """
        if entry.root not in LOADER_ROOTS or not entry.parent:
            return False
        if entry.parent not in self._built.entries and entry.parent not in self._expected_hosts:
            return True
        if entry.parent not in built_late or type(entry.value) in (int, float):
            return False
        kind = values.kind_of(entry.value)
        return kind is None or kind.name not in GENERATORS

    # --- epochs ---

    def loader_marks(self) -> dict[str, str]:
        """Returns what the loader's roots hold now, as marks by path."""
        return self.look(LOADER_ROOTS).marks()

    def begin_epoch(self, epoch: int, roots: Collection[str] = LOADER_ROOTS) -> None:
        """Notes what the loader's roots hold when an epoch begins. If the same epoch begins again,
        because a resumed run skips batches of it, they get what they held then.

        roots: those of the loader for which this is done.
        """
        if self._epoch_start is not None and self._epoch_start[0] == epoch:
            _, changed, arrays = self._epoch_start
            self._put_loader(changed, arrays, roots)
            return
        epoch_arrays: dict[str, np.ndarray] = {}
        changed = self._changed_values(self.look(), epoch_arrays, _AT_EPOCH_START)
        epoch_values = {p: item for p, item in changed.items() if item[2] in roots}
        names = _array_names(epoch_values)
        copies = {name: np.array(epoch_arrays[name]) for name in names}
        self._epoch_start = epoch, epoch_values, copies
        self._after_skip = None

    def end_skip(self, roots: Collection[str] = LOADER_ROOTS) -> None:
        """Puts back what callbacks have changed of the loader before the checkpoint; a resumed run
        has skipped the batches of its epoch that were used. roots: see `begin_epoch`.
        """
        if self._after_skip is not None:
            self._put_loader(*self._after_skip, roots)
            self._after_skip = None

    @contextlib.contextmanager
    def as_at_start(self, epoch: int, roots: Collection[str]) -> Iterator[None]:
        """Gives the loader's roots what they held when an epoch began, in the block.

        It does nothing if that epoch is not the latest one that has begun.
        """
        if self._epoch_start is None or self._epoch_start[0] != epoch:
            yield
            return
        with self.restored(roots):
            self._put_loader(*self._epoch_start[1:], roots)
            yield

    @contextlib.contextmanager
    def restored(self, roots: Collection[str] = LOADER_ROOTS) -> Iterator[None]:
        """Gives the loader's roots, after the block, what they hold before it."""
        arrays: dict[str, np.ndarray] = {}
        current_values = self._changed_values(self.look(), arrays)
        copies = {name: np.array(arrays[name]) for name in _array_names(current_values)}
        try:
            yield
        finally:
            self._put_loader(current_values, copies, roots)

    def _put_loader(
        self,
        changed: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
        roots: Collection[str] = LOADER_ROOTS,
    ) -> None:
        """Puts values back below the loader's roots, and what was built elsewhere there."""
        restorer = _Restorer(self.look(), "the start of the epoch", False)
        self._restore_built(restorer, {"values": changed, "removed": []}, roots)
        for path, (sort, node, root, parent, *key) in changed.items():
            if root in roots:
                restorer.put(path, sort, node, arrays, parent, key)

    def _keep_for_loader(self, saved: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Keeps the parts of a checkpoint that are put back while an epoch is read again."""
        of_loader = {p: item for p, item in saved["values"].items() if item[2] in LOADER_ROOTS}
        epoch_start = saved.get("epoch start")
        copies = {name: np.array(arrays[name]) for name in _array_names(of_loader)}
        self._after_skip = of_loader, copies
        self._epoch_start = None
        if epoch_start is not None:
            # only its own arrays: the next checkpoint gets them beside its values
            names = _array_names(epoch_start)
            copies = {name: np.array(arrays[name]) for name in names}
            self._epoch_start = int(epoch_start["epoch"]), dict(epoch_start["values"]), copies

    def _check_kept(self, picture: Picture, tuples: Container[str]) -> None:
        """Raises ConfigError: a value has become something that a checkpoint can't keep.

        tuples: paths of those that are kept as a whole.
        """
        self._check_patches(picture)
        self._check_keys(picture)
        kept_ids = self._kept()
        for path, entry in picture.entries.items():
            before = self._built.entries.get(path)
            if self.changed_in_forward(path):
                continue
            self._check_function(picture, entry)
            if entry.root not in LOADER_ROOTS:
                self._check_items(picture, entry, tuples)
            self._check_keys_of_value(entry, kept_ids)
            if entry.sort == SAMPLED and before is not None and before.sort == SAMPLED:
                if changed_in_place(before.mark, entry.mark):
                    raise ConfigError(
                        f"[capture] {path} was changed in place since fit() began, and is too "
                        "large for checkpoints; keep the change in a smaller value, such as an "
                        f"array by sample in a callback, or {ADVICE}"
                    )
            if entry.place.kind == "setting" and self._marks.get(path, entry.mark) != entry.mark:
                raise ConfigError(
                    f"[capture] {path} was {self._marks[path]} when fit() began and is "
                    f"{entry.mark} now. The position in a checkpoint counts batches of the first "
                    "setting; call fit() again with another DataLoader to change it"
                )
            if entry.root in LOADER_ROOTS or entry.parent in tuples or path in tuples:
                continue
            if entry.sort == OPAQUE and _has_become_opaque(entry, before):
                was = _in_words(before)
                if before.sort == VALUE and before.value is None:
                    continue  # a cache or file that is opened late
                raise ConfigError(
                    f"[capture] {path} was {was} when fit() began and is a {entry.mark} now, which "
                    f"a checkpoint can't keep; keep numbers, strings or arrays there, or {ADVICE}"
                )
            if path in self._marks and self._marks[path] != entry.mark and not _can_be_put(entry):
                raise ConfigError(
                    f"[capture] {path} has changed since fit() began, from "
                    f"{self._marks[path][:40]} to {entry.mark[:40]}, where a resumed run can't "
                    f"change it; hold it in an attribute, list or dict, or {ADVICE}"
                )
            if (
                entry.sort == REFERENCE
                and not self._is_expected(entry)
                and not is_function(entry.value)
                and own_path_of(entry.value) is None  # a function that is new here names the class
                and not self._is_new_item(entry)
                and not (containers.is_list_or_dict(entry) and entry.place.can_be_set())
                and (self._has_values(picture, path) or self._is_missed(entry))
            ):
                raise ConfigError(
                    f"[capture] {path} is a {entry.mark} that was created in a step or moved "
                    "there; a resumed run can't do that. Create it before fit() or in "
                    "on_fit_start and leave it in its place, or "
                    f"{ADVICE}"
                )

    def _check_keys_of_value(self, entry: Entry, kept_ids: set[int]) -> None:
        """Raises ConfigError: a value has a name or keys that no other run has."""
        if not values.is_text(entry.path):
            raise ConfigError(
                f"[capture] {entry.path!r} has a name with surrogates, which checkpoints can't "
                f"hold; use another name, or {ADVICE}"
            )
        if entry.sort != VALUE:
            return
        keys = _integer_keys(entry.value)
        has_changed = self._marks.get(entry.path) != entry.mark
        if kept_ids.isdisjoint(keys) and not (has_changed and not keys.isdisjoint(self._known)):
            return
        holder = "keys" if isinstance(entry.value, dict) else "items"
        raise ConfigError(
            f"[capture] {entry.path} has ids of objects as {holder}. A resumed run has other ids; "
            f"use names or positions, or {ADVICE}"
        )

    def _is_missed(self, entry: Entry) -> bool:
        """Tells whether a resume raises an error because the program has something else at a path.
        Other objects without values, such as an attribute that is new, are no state.
        """
        built = self._built.entries.get(entry.path)
        return (
            built is not None
            and built.sort not in (OPAQUE, RESOURCE)
            and self._start_types.get(entry.path) is not type(entry.value)
            and _without_length(built.mark) != _without_length(entry.mark)
        )

    def _check_items(self, picture: Picture, entry: Entry, tuples: Container[str]) -> None:
        """Raises ConfigError: a list or dict has a new item that a resumed run can't put there.

        tuples: paths of those that are kept as a whole.
        """
        path = entry.path
        if not containers.is_list_or_dict(entry) or self._is_new_item(entry):
            return
        if self._start_types.get(path) is type(entry.value):
            return  # on_epoch_start has created it, and is called again
        expected = self._expected
        is_new = not self._is_expected(entry)
        for edge in edges_of_items(entry.value, path):
            if not is_new and (edge.path in expected.entries or edge.path in expected.aliases):
                continue
            if self._can_put_item(picture, edge.path, is_new, tuples):
                continue
            raise ConfigError(
                f"[capture] {edge.path} is a {describe(edge.value)} that was put there in a step; "
                "a resumed run can't do that. Put it there before fit() or in on_fit_start, "
                f"keep a number or string instead, or {ADVICE}"
            )

    def _can_put_item(
        self, picture: Picture, path: str, is_in_new: bool, tuples: Container[str]
    ) -> bool:
        """Tells whether a resumed run can put the same item to a new place in a list or dict.

        is_in_new: a resumed run creates the list or dict, so it does not find objects there.
        """
        first_path = picture.aliases.get(path, path)
        item = picture.entries.get(first_path)
        if item is None:
            return first_path in self._expected_hosts
        if first_path != path and item.root in LOADER_ROOTS:
            return False
        if item.sort == VALUE or first_path in tuples:
            return True
        if item.sort == REDUCED:
            return first_path != path and first_path in self._expected.entries
        if is_bound(item.value):
            return self._can_put_method(picture, item) or first_path in self._expected.entries
        if function_name(item.value) is not None:
            return True
        if containers.is_list_or_dict(item) and item.place.can_be_set():
            return True
        if is_in_new and first_path == path:
            return False
        return self._is_expected(item) or self._is_new_item(item)

    def _check_keys(self, picture: Picture) -> None:
        """Raises ConfigError: a dict has got or lost keys that are objects since the epoch
        started. Values of such keys are in checkpoints by the number of the key.
        """
        for path, keys in _object_keys_in(picture).items():
            entry = picture.entries[path]
            if entry.root in LOADER_ROOTS or self.changed_in_forward(path):
                continue
            allowed = (self._expected_keys.get(path), self._start_keys.get(path))
            if not any(_are_same_objects(keys, earlier) for earlier in allowed):
                key = describe(next(iter(keys.values())))
                raise ConfigError(
                    f"[capture] {path} has keys that are objects ({key}), which have changed since "
                    "fit() began; a resumed run can't do that. Use numbers or strings as keys, "
                    f"create all keys before fit() or in on_fit_start, or {ADVICE}"
                )

    def end_epoch(self) -> None:
        """Lets hooks and methods be as they were before the first step, from on_epoch_end on."""
        self._in_epoch = False
        if self._start_patches is None:
            return
        picture = self.look()
        self._objects_at_epoch_end = _objects_in(picture)
        self._code_at_epoch_end = _code_in(picture)
        patches = picture.patches
        expected = self._expected_patches
        for path in {**self._start_patches, **patches}:
            if patches.get(path) != expected.get(path):
                continue  # the next checkpoint compares it with the start of the epoch
            if path in patches:
                self._start_patches[path] = patches[path]
            else:
                self._start_patches.pop(path, None)

    def _check_patches(self, picture: Picture) -> None:
        """Raises ConfigError: a hook or a replaced method has come or gone in a step."""
        if self._start_patches is None:
            return
        patches = picture.patches
        start_patches = self._start_patches
        for path in {**start_patches, **patches}:
            if patches.get(path) == start_patches.get(path) or self.changed_in_forward(path):
                continue
            holder = picture.entries.get(path.rpartition(".")[0])
            if holder is not None and isinstance(holder.value, type):
                expected = self._expected.entries.get(holder.path)
                if expected is None or expected.mark != holder.mark:
                    continue  # the class was met for the first time
            if path in patches:
                change = f"was set to {patches[path]}"
            else:
                change = f"({start_patches[path]}) was taken out"
            raise ConfigError(
                f"[capture] {path} {change} since the epoch started, which a resumed run can't do "
                "again. Set it before fit(), in on_fit_start or in on_epoch_start, and choose by a "
                "number or string what it does"
            )

    def _check_function(self, picture: Picture, entry: Entry) -> None:
        """Raises ConfigError: a function or class was replaced by one that a resumed run can't
        find.
        """
        path = entry.path
        if entry.sort != REFERENCE or entry.root in LOADER_ROOTS or not is_code(entry.value):
            return
        built = _entry_at(self._built, path)
        if built is None or built.sort != REFERENCE:
            return
        if any(_is_same_code(one, picture, entry) for one in (self._built, self._expected)):
            return
        if self._start_code.get(path) == _code_mark(picture, path, entry.value):
            return
        if self._can_put_code(picture, entry):
            return
        raise ConfigError(
            f"[capture] {path} holds {_code_mark(picture, path, entry.value)} where "
            f"{_code_mark(self._built, path, built.value)} was when fit() began, which a "
            "checkpoint can't keep. Use a function that a module of the program has under its "
            "name, choose it by a number or string, or set it in on_epoch_start"
        )

    def _can_put_code(self, picture: Picture, entry: Entry) -> bool:
        """Tells whether a resumed run can put a function, method or class to its place."""
        if is_bound(entry.value):
            return self._can_put_method(picture, entry)
        return function_name(entry.value) is not None and entry.place.can_be_set()

    def _can_put_method(self, picture: Picture, entry: Entry) -> bool:
        """Tells whether a resumed run has the object of a bound method, and can put the method to
        its place.
        """
        owner = picture.entries.get(picture.owner_of(entry.path))
        if owner is None:
            has_owner = picture.owner_of(entry.path) in self._expected_hosts
        elif owner.sort == REFERENCE:
            is_container = containers.is_list_or_dict(owner) and owner.place.can_be_set()
            has_owner = is_container or is_code(owner.value) or self._is_expected(owner)
        else:
            has_owner = owner.path in self._expected.entries or owner.place.can_be_set()
        return has_owner and entry.place.can_be_set() and method_name(entry.value) is not None

    def _new_containers(self, picture: Picture) -> dict[str, list[Any]]:
        """Returns lists and dicts of objects that a step has created: class, keys, and where they
        are held, by path.
        """
        created: dict[str, list[Any]] = {}
        for path, entry in picture.entries.items():
            if not containers.is_list_or_dict(entry) or self._is_expected(entry):
                continue
            keys = containers.keys_of(entry.value)
            is_excluded = entry.root in LOADER_ROOTS or self.changed_in_forward(path)
            if keys is not None and not is_excluded and entry.place.can_be_set():
                kind = type(entry.value).__name__
                created[path] = [kind, keys, entry.parent, *_key_of(entry.place)]
        return created

    def _changed_tuples(
        self, picture: Picture, arrays: dict[str, np.ndarray]
    ) -> dict[str, list[Any]]:
        """Returns tuples of objects that hold others than when the first epoch started: class,
        items, and where they are held, by path.

        Raises ConfigError: a tuple holds what a resumed run can't put there.
        """
        changed: dict[str, list[Any]] = {}
        for path, entry in picture.entries.items():
            if not containers.is_tuple(entry) or entry.root in LOADER_ROOTS:
                continue
            expected = self._expected_tuples.get(path)
            current = containers.signature(picture, entry)
            if expected == current or self.changed_in_forward(path):
                continue
            parts = containers.parts_of(picture, entry, self._is_expected, arrays)
            if parts is not None and entry.place.can_be_set():
                kind = containers.name_of_tuple(entry.value)
                changed[path] = [kind, parts, entry.parent, *_key_of(entry.place)]
            elif expected is not None:
                raise ConfigError(
                    f"[capture] {path} holds other objects than when fit() began, which a resumed "
                    f"run can't put there; hold them in a list, or {ADVICE}"
                )
        return changed

    def _sharing_entries(self, picture: Picture) -> list[Entry]:
        """Returns the values that checkpoints hold, without those of loaders."""
        return [
            entry
            for path, entry in picture.entries.items()
            if entry.sort == VALUE
            and type(entry.value) not in values.PLAIN
            and entry.root not in LOADER_ROOTS
            and not self.changed_in_forward(path)
        ]

    def _functions(self, picture: Picture) -> dict[str, list[Any]]:
        """Returns functions and methods that are not those of when fit() began: the function's
        name, the path of the method's object, and where it is held, by path.
        """
        functions: dict[str, list[Any]] = {}
        for path, entry in picture.entries.items():
            if (
                entry.sort != REFERENCE
                or entry.root in LOADER_ROOTS
                or not entry.place.can_be_set()
            ):
                continue
            if not is_function(entry.value) or self.changed_in_forward(path):
                continue
            if isinstance(entry.place.holder, type) or entry.place.overrides():
                continue  # the next epoch sets it (_check_patches)
            if _is_same_code(self._built, picture, entry):
                continue
            owner = picture.owner_of(path)
            holder = picture.entries.get(owner)
            if holder is not None and holder.sort in (RESOURCE, OPAQUE):
                continue  # the program has its own
            name = method_name(entry.value) if owner else function_name(entry.value)
            if name is not None:
                functions[path] = [name, owner, entry.parent, *_key_of(entry.place)]
        return functions

    def _lost_functions(self, picture: Picture) -> dict[str, str]:
        """Returns functions that a resumed run will lack: their names, by path.

        A step has set them where None or nothing was, and no module has them under their names.
        For example, they are lambdas.
        """
        lost: dict[str, str] = {}
        earlier_aliases = {**self._built.aliases, **self._expected.aliases}
        for path, entry in picture.entries.items():
            if entry.sort != REFERENCE or entry.root in LOADER_ROOTS or path in earlier_aliases:
                continue
            if not is_function(entry.value) or ":" in path or "<" in path:
                continue
            earlier = (self._built.entries.get(path), self._expected.entries.get(path))
            was_empty = all(one is None or one.mark == "None" for one in earlier)
            was_empty = was_empty and entry.parent not in lost
            is_set_again = self._start_code.get(path) == _code_mark(picture, path, entry.value)
            if was_empty and not is_set_again and not self.changed_in_forward(path):
                if not self._can_put_code(picture, entry):
                    lost[path] = describe(entry.value)
        return lost

    def _late_opaque(self, picture: Picture) -> dict[str, str]:
        """Returns what checkpoints can't keep and fit() didn't start with: class names by path."""
        built = self._built.opaque()
        return {
            path: name
            for path, name in picture.opaque().items()
            if picture.entries[path].root not in LOADER_ROOTS
            and path not in built
            and not self.changed_in_forward(path)
        }

    def _late_modules(self, picture: Picture, saved: dict[str, list[Any]]) -> dict[str, str]:
        """Takes globals out of `saved` whose module a step has imported, because a resumed run
        doesn't have the module yet. Returns what they are by path.
        """
        late: dict[str, str] = {}
        for path in [*saved]:
            place = picture.entries[path].place if path in picture.entries else None
            if place is not None and place.kind == "global":
                if place.holder.get("__name__") not in self._expected_modules:
                    late[path] = "in a module that a step has imported"
                    del saved[path]
        return late

    def _announce_sets(self, picture: Picture, saved: Iterable[str]) -> None:
        """Tells the user once about changed sets whose order a resumed run can't repeat."""
        paths = [
            path
            for path in saved
            if path in picture.entries
            and path not in self._announced
            and not values.keeps_order(picture.entries[path].value)
        ]
        if paths:
            self._announced.update(paths)
            first_paths = ", ".join(paths[:5])
            self._say(
                f"[capture] {first_paths}: a resumed run has the items of this set in another "
                "order. If training depends on the order, use a list or dict, or sorted()"
            )

    def _changed_classes(self, picture: Picture) -> dict[str, str]:
        """Returns the class names of objects that have changed their class, by path.

        Raises ConfigError: A resumed run can't find a class by its name.
        """
        changed: dict[str, str] = {}
        for path, (value, first_class) in self._first_classes.items():
            entry = picture.entries.get(path)
            if entry is None or entry.value is not value or type(value) is first_class:
                continue
            if entry.root in LOADER_ROOTS or self.changed_in_forward(path):
                continue
            if own_path_of(type(value)) is None:
                raise ConfigError(
                    f"[capture] {path} is a {describe(value)} now and was a "
                    f"{values.qualified_name(first_class)} when fit() began; a resumed run can't "
                    "change its class. Do so before fit() or in on_fit_start, or choose by a "
                    f"number or string what it does, or {ADVICE}"
                )
            changed[path] = values.qualified_name(type(value))
        return changed

    def _restore_classes(self, restorer: _Restorer, saved: Mapping[str, Any]) -> None:
        """Gives objects the classes that they had at the checkpoint."""
        changed = saved.get("changed classes", {})
        objects_by_path = {path: entry.value for path, entry in restorer.picture.entries.items()}
        has_changed = False
        for path, (value, first_class) in self._first_classes.items():
            new_class: Any = first_class
            if path in changed:
                named_class = values.class_called(changed[path])
                new_class = (
                    objects_by_path.get(class_path(named_class))
                    if isinstance(named_class, type)
                    else None
                )
            if type(value) is new_class:
                continue
            if not isinstance(new_class, type):
                if restorer.final:
                    raise restorer.refuse(path, f"it was a {changed[path]}, which is missing")
                continue
            value.__class__ = new_class
            has_changed = True
        if has_changed:
            restorer.picture = restorer.start = self.look()

    def _is_expected(self, entry: Entry) -> bool:
        """Tells whether a resumed run has an object of this class at the same path."""
        if self._in_epoch and self._start_types.get(entry.path) is type(entry.value):
            # on_epoch_start has created it and is called again, or an earlier epoch has created it
            return entry.path not in self._start_moved
        if self._known.get(id(entry.value)) == built_path(entry.path):
            return True
        if entry.path in self._moved_paths:
            return False  # that is elsewhere
        expected = self._expected.entries.get(entry.path)
        if expected is None or expected.sort != REFERENCE:
            return False
        return type(expected.value) is type(entry.value)

    def _is_new_item(self, entry: Entry) -> bool:
        """Tells whether a `defaultdict` has created an object since the first step.

        A resumed run creates it by asking the dict for the same key.
        """
        place = entry.place
        return (
            entry.sort == REFERENCE
            and entry.root not in LOADER_ROOTS
            and place.kind == "item"
            and isinstance(place.holder, collections.defaultdict)
            and place.holder.default_factory is not None
            and type(place.key) in (str, int)
            and not self._is_expected(entry)
        )

    def _has_values(self, picture: Picture, path: str) -> bool:
        """Tells whether an object holds values itself."""
        return any(
            entry.parent == path and entry.sort in (VALUE, STATE, REDUCED)
            for entry in picture.entries.values()
        )

    def describe_built(self, by_forward: Collection[str]) -> dict[str, str]:
        """Returns a hash of what each object of the compared roots was built with, by path.

        by_forward: paths of what forward() and the loss set, which does not count.

        Only attributes and items count. A program may name other globals each time it starts, such
        as its arguments.
        """
        held: dict[str, list[tuple[str, str]]] = {}
        for path, entry in self._built.entries.items():
            if entry.root not in COMPARED_ROOTS or entry.sort != VALUE or ":" in path:
                continue
            if "<" in path or self.changed_in_forward(path, by_forward):
                continue
            if last_name(path).lower() not in RANK_NAMES:
                held.setdefault(entry.parent, []).append((path, entry.mark))
        return {path: f"{hash_of(sorted(marks)):016x}"[-8:] for path, marks in held.items()}

    # --- put back ---

    def restore(
        self, saved: Mapping[str, Any], arrays: Mapping[str, Any], name: str, final: bool
    ) -> None:
        """Puts back what `state` returned.

        Args:
            saved, arrays: what `state` returned, and the arrays that it filled.
            name: of the checkpoint, for messages.
            final: False while callbacks may still create objects, so missing ones are skipped.

        Raises:
            CheckpointError: It can't be put back: something is missing, or of another class.
            ConfigError: The program was built otherwise than the one that made the checkpoint.
        """
        path = "it"
        current_roots = self._roots()

        def is_there(root: str) -> bool:
            """Tells whether a root exists: a resumed run may have no such callback or metric."""
            return root in current_roots or not root.startswith(("callbacks.", "metrics."))

        self._check_built(saved, name)
        if not final:
            saved = _without_new_containers(saved)  # on_fit_start may create their objects
        self.by_forward.update(saved["by forward"])
        self._restore_objects()
        shared = Sharing.from_json(saved.get("shared", {"groups": (), "windows": ()}))
        restorer = _Restorer(self._look_apart(shared), name, final)
        self._restore_classes(restorer, saved)
        self._restore_built(restorer, saved)
        try:
            self._restore_containers(restorer, saved)
            # load_state_dict() may replace objects, so it comes after values were put into them
            # what is a part of another array comes after that
            by_sort = sorted(
                saved["values"].items(),
                key=lambda item: (item[1][0] == STATE, restorer.is_view(item[0])),
            )
            tuples = saved.get("tuples", ())
            restorer.moved = moved_in(saved)
            for path, (sort, node, root, parent, *key) in by_sort:
                if parent in saved["values"] and restorer.has_new:
                    restorer.has_new = False
                    restorer.picture = self.look()  # the value that has this attribute may be new
                # the last batch, which is read again, shows whether the data are the same
                restorer.final = final and root not in LOADER_ROOTS
                if is_there(root) and not restorer.is_built_later(parent, tuples):
                    restorer.put(path, sort, node, arrays, parent, key)
            restorer.final = final
            for path in saved["removed"]:
                restorer.remove(path)
            restorer.picture = self.look()
            for path, (first_path, parent, *key) in saved["aliases"].items():
                restorer.put_alias(path, first_path, parent, key)
            self._restore_links(restorer, saved, arrays, shared)
            if final:
                self._remove_new(restorer, saved)
            self._keep_for_loader(saved, arrays)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
            raise CheckpointError(
                f"[resume] {name}: {path} can't be put back: {type(problem).__name__}: {problem}"
            ) from problem
        if final:
            self._check_later(saved, name, is_there)

    def _look_apart(self, shared: Sharing) -> Picture:
        """Returns a picture after values that share what they did not at the checkpoint got their
        own.
        """
        picture = self.look()
        changed = separate(picture, self._sharing_entries(picture), shared)
        return self.look() if changed else picture

    def _check_later(
        self, saved: Mapping[str, Any], name: str, is_there: Callable[[str], bool]
    ) -> None:
        """Notes what `finish_restore` checks. is_there: tells whether a root exists."""
        classes = {
            path: mark
            for path, (root, mark) in saved["classes"].items()
            if is_there(root) and root not in LOADER_ROOTS
        }
        self._unchecked_classes = name, classes
        self._unchecked_patches = {
            path: mark
            for path, mark in saved.get("patches", {}).items()
            if is_there(".".join(path.split(".")[:2]))
        }

    def _restore_functions(self, restorer: _Restorer, saved: Mapping[str, Any]) -> None:
        """Puts back functions and methods, before the values that they hold and after the objects
        of methods.
        """
        functions = saved.get("functions", {})
        for path, (name, owner, parent, *key) in functions.items():
            restorer.put_function(path, name, owner, parent, key)
        if functions:
            restorer.picture = self.look()

    def _restore_containers(self, restorer: _Restorer, saved: Mapping[str, Any]) -> None:
        """Creates what holds values and objects: items of a `defaultdict`, functions, lists and
        dicts.
        """
        for path, (parent, key) in saved.get("created", {}).items():
            restorer.create_item(path, parent, key)
            restorer.picture = self.look()
        self._restore_functions(restorer, saved)
        if not restorer.final:
            return  # on_fit_start may create the others, or add to them
        moved = moved_in(saved)
        for path, (kind, keys, parent, *key) in saved.get("containers", {}).items():
            restorer.put_container(path, kind, keys, parent, key, path not in moved)
            restorer.picture = self.look()

    def _restore_links(
        self,
        restorer: _Restorer,
        saved: Mapping[str, Any],
        arrays: Mapping[str, Any],
        shared: Sharing,
    ) -> None:
        """Puts back what leads to objects and values that are there now: methods, tuples, the same
        value at several places, and the order of dicts.
        """
        self._restore_functions(restorer, saved)
        if restorer.final:
            restorer.picture = self.look()
            self._restore_tuples(restorer, saved, arrays)
            for path, entry in self.look().entries.items():
                if type(entry.value) is containers.Unfilled:
                    raise restorer.refuse(path, "the program has no such object")
        if shared.groups or shared.windows:
            share(self.look(), shared)
        if restorer.final:
            restorer.put_in_order({**self._expected_orders, **saved.get("orders", {})})

    def _restore_tuples(
        self, restorer: _Restorer, saved: Mapping[str, Any], arrays: Mapping[str, Any]
    ) -> None:
        """Puts back tuples of objects, after the objects themselves."""
        tuples = saved.get("tuples", {})
        for path, (kind, parts, parent, *key) in tuples.items():
            restorer.put_tuple(path, kind, parts, arrays, parent, key)
        restorer.picture = self.look()
        for path, (sort, node, _, parent, *key) in saved["values"].items():
            if _is_below(path, tuples) and parent in restorer.picture.hosts:
                restorer.put(path, sort, node, arrays, parent, key)

    def finish_restore(self) -> None:
        """Checks functions and classes of objects after a resume, when callbacks have started the
        epoch and set what they set at its start.

        Raises CheckpointError: one is another than at the checkpoint.
        """
        if self._unchecked_classes is not None:
            name, classes = self._unchecked_classes
            self._unchecked_classes = None
            restorer = _Restorer(self.look(), name, True)
            restorer.check_classes(classes)
            restorer.check_patches(self._unchecked_patches)

    def note_start(self) -> None:
        """Notes which functions and classes there are when an epoch has started, and what the
        transforms are set to.
        """
        picture = self.look()
        earlier_code = self._code_at_epoch_end
        if earlier_code is None:
            earlier_code = _code_in(self._expected)
        self._code_at_epoch_end = None
        self._start_code = {
            path: _code_mark(picture, path, value)
            for path, value in _code_in(picture).items()
            if earlier_code.get(path) is not value
        }
        self._start_patches = dict(picture.patches)
        self._start_keys = _object_keys_in(picture)
        self._in_epoch = True
        earlier_objects = self._objects_at_epoch_end
        if earlier_objects is None:
            earlier_objects = _objects_in(self._expected)
        self._objects_at_epoch_end = None
        started = {
            path: value
            for path, value in _objects_in(picture).items()
            if path not in earlier_objects or earlier_objects[path] is not value
        }
        self._start_types = {path: type(value) for path, value in started.items()}
        earlier_ids = set(map(id, earlier_objects.values())) - {*self._known}
        self._start_moved = {path for path, value in started.items() if id(value) in earlier_ids}
        self._start_transforms = {
            path: mark
            for path, mark in picture.marks().items()
            if picture.entries[path].root in _READ_AHEAD_ROOTS
        }

    def changed_transforms(self) -> list[str]:
        """Returns the paths of what has changed in transforms since the epoch started."""
        if not self._start_transforms:
            return []
        marks = self.look({*COMPARED_ROOTS, *SAMPLED_ROOTS}).marks()
        return [path for path, mark in self._start_transforms.items() if marks.get(path) != mark]

    def _remove_new(self, restorer: _Restorer, saved: Mapping[str, Any]) -> None:
        """Removes values and other places of objects that are newer than the checkpoint, when a
        run goes back to it.
        """
        if not self._built.entries:
            return  # fit() has not begun
        expected = self._expected
        known = {*saved["values"], *saved["aliases"], *saved.get("created", ())}
        built = {*map(built_path, (*expected.entries, *expected.aliases))}
        picture = restorer.picture
        new = [
            (entry.place, entry.parent)
            for path, entry in picture.entries.items()
            if path not in known
            and built_path(path) not in built
            and (entry.sort == VALUE or self._is_new_item(entry))
            and entry.root not in LOADER_ROOTS
        ]
        new += [
            place
            for path, place in picture.alias_places.items()
            if path not in known and built_path(path) not in built
        ]
        for place, parent in reversed(new):
            before = expected.entries.get(parent) or expected.entries.get(built_path(parent))
            now = picture.entries.get(parent)
            if parent in picture.hosts:
                is_same = self._is_expected_host(parent, picture)
            else:
                is_same = before is not None and now is not None and before.value is now.value
            if not is_same:
                continue  # another object has this path now
            if place.kind != "cell":
                place.remove()

    def _check_built(self, saved: Mapping[str, Any], name: str) -> None:
        """Raises ConfigError: objects of the compared roots were built with other values."""
        current = self.describe_built(set(saved["by forward"]))
        for path, digest in saved["built"].items():
            if path in current and current[path] != digest:
                present = [
                    f"{entry.path[len(path) + 1 :]} = {entry.mark[:40]}"
                    for entry in self._built.entries.values()
                    if entry.parent == path and entry.sort == VALUE
                ]
                raise ConfigError(
                    f"[resume] {path} has other settings than when {name} was made; they are "
                    f"{', '.join(present[:8])} now. Build it as before, or {ADVICE}"
                )

    def _restore_objects(self) -> None:
        """Puts objects back to where they were when the first epoch started, if the program has
        put others there since.
        """
        picture = self.look()
        places = self._places_in(self._built)
        built = {id(value) for _, value in places.values()}
        # on_fit_start may have put others there, but an earlier restore moves what was built
        for path, (place, value) in self._places_in(self._expected).items():
            if id(value) not in built or is_code(value):
                places[path] = place, value
        for path, (place, value) in places.items():
            if (is_code(value) and isinstance(place.holder, type)) or self.changed_in_forward(path):
                continue  # a class may hold a wrapper of a function
            first_path = picture.aliases.get(path, path)
            entry = picture.entries.get(first_path)
            current = picture.hosts.get(first_path) if entry is None else entry.value
            if current is not value:
                place.set(value)

    def _places_in(self, picture: Picture) -> dict[str, tuple[Place, Any]]:
        """Returns the places of objects in a picture, and the objects, by path."""
        places = {
            path: (entry.place, entry.value)
            for path, entry in picture.entries.items()
            if (entry.sort == REDUCED or _is_object(entry)) and entry.root not in LOADER_ROOTS
        }
        for path, (place, _) in picture.alias_places.items():
            first_path = picture.aliases[path]
            first = picture.entries.get(first_path)
            if first is not None and _is_object(first) and first.root not in LOADER_ROOTS:
                places[path] = place, first.value
            elif first_path in self._expected.hosts:
                places[path] = place, self._expected.hosts[first_path]
        return places

    def _restore_built(
        self,
        restorer: _Restorer,
        saved: Mapping[str, Any],
        roots: Container[str] | None = None,
    ) -> None:
        """Puts back what the program was built with, where the checkpoint has no other value.

        roots: names of the roots below which it does so; None: all.

        It matters after the first restore: callbacks may have changed values since, and a run may
        go back to its last checkpoint.
        """
        built_late = self._built_late(restorer.picture)
        tuples = saved.get("tuples", ())
        saved_paths = {*saved["values"], *map(built_path, saved["values"])}
        for path, entry in list(restorer.picture.entries.items()):
            if path in saved_paths or path not in self._marks or entry.parent in tuples:
                continue
            if entry.sort not in KEPT_SORTS and not _is_where_value_was(entry, saved):
                continue
            is_excluded = self.changed_in_forward(path) or self._is_cache(entry, built_late)
            if (
                entry.mark == self._marks[path]
                or is_excluded
                or (roots and entry.root not in roots)
            ):
                continue
            if path not in self._copies:
                raise CheckpointError(
                    f"[resume] {restorer.name}: {path} was changed after the checkpoint, and is "
                    "too large to be kept twice; start the program again with --resume auto"
                )
            node, arrays = self._copies[path]
            restorer.put(path, self._built.entries[path].sort, node, arrays, entry.parent, [])
        self._create_built(restorer, saved, roots)

    def _create_built(
        self, restorer: _Restorer, saved: Mapping[str, Any], roots: Container[str] | None
    ) -> None:
        """Creates what the program was built with and is missing now; see `_restore_built`."""
        picture = restorer.picture
        tuples = saved.get("tuples", ())
        for path in self._marks:
            is_missing = path not in picture.entries
            if "aliases" not in saved or not picture.aliases.get(path, "another"):
                is_missing = is_missing and path not in picture.aliases
            elif path in saved["aliases"]:
                is_missing = False
            if is_missing and path in self._copies:
                node, arrays = self._copies[path]
                built = self._built.entries[path]
                if (roots and built.root not in roots) or built.parent in tuples:
                    continue
                if self._has_same_parent(built.parent, picture) and path not in saved["removed"]:
                    restorer.put(path, built.sort, node, arrays, built.parent, _key_of(built.place))


class _Restorer:
    """Writes values into objects that are there.

    Args:
        picture: of what is there.
        name: of the checkpoint, for messages.
        final: False skips what is missing.
    """

    def __init__(self, picture: Picture, name: str, final: bool) -> None:
        self.picture = picture
        self.start = picture  # with what the program has built at its place
        self.name = name
        self.final = final
        self.moved: set[str] = set()  # paths of what is elsewhere at the checkpoint
        self.has_new = False  # a value that is not in the picture was put somewhere

    def is_view(self, path: str) -> bool:
        """Tells whether the array or tensor at a path is a part of another one."""
        entry = self.entry_at(path)
        return entry is not None and _is_view(entry.value)

    def is_built_later(self, path: str, tuples: Iterable[str]) -> bool:
        """Tells whether a tensor is missing because the tuple that holds it is not built yet."""
        is_missing = self.entry_at(path) is None and path not in self.picture.hosts
        return self.final and (is_missing or path in self.moved) and _is_below(path, tuples)

    def entry_at(self, path: str) -> Entry | None:
        """Returns what the program has at a path of the checkpoint."""
        picture = self.start if MOVED in path else self.picture
        return picture.entries.get(built_path(path))

    def object_at(self, path: str) -> Any:
        """Returns the object at a path of the checkpoint; None if it is missing."""
        entry = self.entry_at(path)
        if entry is not None and entry.sort in (*KEPT_SORTS, REFERENCE):
            return entry.value
        return self.picture.hosts.get(path)

    def put(
        self,
        path: str,
        sort: str,
        node: Any,
        arrays: Mapping[str, Any],
        parent: str,
        key: list[Any],
    ) -> None:
        """Puts one value to its path."""
        entry = self.entry_at(path)
        if entry is None:
            self._create(path, sort, node, arrays, parent, key)
            return
        place = _as_saved(entry.place, key)
        if entry.sort not in KEPT_SORTS:
            if entry.sort in (SAMPLED, OPAQUE, RESOURCE) or not self.final:
                return
            # the program has let go of an object
            if sort != VALUE or not place.set(values.decode(node, arrays)):
                raise self.refuse(path, f"it is a {entry.mark} now")
            self.has_new = True
            return
        value = values.decode(node, arrays)
        is_elsewhere = path in self.moved and sort == VALUE  # what the program has built here
        # a part of an array may have got its values with the whole
        mark = values.mark(entry.value) if _is_view(entry.value) else entry.mark
        if values.mark(value) == mark and not is_elsewhere:
            return
        if sort == STATE:
            entry.place.set(value)
        elif sort == REDUCED:
            if not put_reduced(entry, value):
                raise self.refuse(path, f"a {type(entry.value).__qualname__} can't be set")
        elif _is_view(entry.value) and place.set(value):
            return  # its memory is that of another object, such as a sample of the data set
        elif is_elsewhere or not self._put_into(entry, value):
            self._set(place, path, value)

    def _create(
        self,
        path: str,
        sort: str,
        node: Any,
        arrays: Mapping[str, Any],
        parent: str,
        key: list[Any],
    ) -> None:
        """Creates a value that is not there, in an object that is."""
        place = self._place_for(path, parent, key)
        if place is not None and place.kind == "item" and isinstance(place.holder, list):
            # an item before it may be an object, which is put there later
            place.holder.extend([None] * (place.key - len(place.holder)))
        if place is None or sort != VALUE:
            if self.final:
                raise self.refuse(path, "the program has no such object at its first step")
            return
        self._set(place, path, values.decode(node, arrays))

    def _put_into(self, entry: Entry, value: Any) -> bool:
        """Writes a value into the object that is there. Returns False if it can't take it."""
        return entry.place.kind != "contents" and values.put_into(entry.value, value)

    def _set(self, place: Place, path: str, value: Any) -> None:
        """Puts a new value to a place."""
        if not place.set(value):
            raise self.refuse(path, "nothing holds it that can be changed")
        self.has_new = True

    def create_item(self, path: str, parent: str, key: Any) -> None:
        """Has a `defaultdict` create an object, as it did before the checkpoint."""
        holder = self.entry_at(parent)
        items = None if holder is None else holder.value
        if isinstance(items, collections.defaultdict) and items.default_factory is not None:
            items[values.decode(key, {})]  # noqa: B018 (this is what creates it)
        elif self.final:
            raise self.refuse(path, "no defaultdict is there any more that creates it")

    def _place_for(self, path: str, parent: str, key: list[Any]) -> Place | None:
        kind, encoded, *_ = key or ("fixed", None)
        place = None
        host = self.picture.hosts.get(parent)
        holder = self.entry_at(parent)
        if kind == "global":
            module = sys.modules.get(path.partition(":")[0])
            if module is not None and is_own_file(getattr(module, "__file__", None) or "<>"):
                place = Place("global", vars(module), encoded)
        elif host is not None and kind == "attribute":
            place = Place("attribute", host, encoded)
        elif holder is None or holder.sort != REFERENCE:
            return None
        elif kind == "attribute":
            place = Place("attribute", holder.value, encoded)
        elif kind == "item" and isinstance(holder.value, (dict, list)):
            place = Place("item", holder.value, values.decode(encoded, {}))
        return None if place is None else _as_saved(place, key)

    def _place_of(self, path: str, parent: str, key: list[Any]) -> Place | None:
        """Returns where an object is held, or where it can be put; None if that is nowhere."""
        entry = self.entry_at(path)
        if entry is not None:
            return _as_saved(entry.place, key)
        if path in self.picture.alias_places:
            return _as_saved(self.picture.alias_places[path][0], key)
        return self._place_for(path, parent, key)

    def put_function(self, path: str, name: str, owner: str, parent: str, key: list[Any]) -> None:
        """Puts a function of the program, or a method of an object, to a path.

        name: of the function in its module, or of the method. owner: the path of its object.
        """
        function: Any = None
        if not owner:
            function = values.class_called(name)
            if function_name(function) != name:
                function = None
        elif (holder := self.object_at(owner)) is not None:
            function = bound_method(holder, name)
        place = self._place_of(path, parent, key)
        if function is not None and place is not None and place.set(function):
            return
        if self.final:
            raise self.refuse(path, f"it was the function {name}")

    def put_container(
        self, path: str, kind: str, keys: list[Any], parent: str, key: list[Any], is_free: bool
    ) -> None:
        """Creates a list or dict, whose items are put there afterwards.

        is_free: the checkpoint needs nothing else that the program has built there.
        """
        entry = self.picture.entries.get(path)
        is_object = is_free and entry is not None and entry.sort == REFERENCE
        if is_object and type(entry.value).__name__ == kind:
            if containers.keys_of(entry.value) == keys:
                return
        place = self._place_of(path, parent, key)
        if place is None or not place.set(containers.build(kind, keys)):
            raise self.refuse(path, f"it was a {kind} of {len(keys)} objects")

    def put_tuple(
        self,
        path: str,
        kind: str,
        parts: list[Any],
        arrays: Mapping[str, Any],
        parent: str,
        key: list[Any],
    ) -> None:
        """Builds a tuple of objects that are there."""
        items = containers.build_tuple(kind, parts, self.object_at, arrays)
        entry = self.picture.entries.get(path)
        if items is not None and entry is not None and containers.has_items(entry.value, items):
            return
        place = self._place_of(path, parent, key)
        if items is None or place is None or not place.set(items):
            raise self.refuse(path, f"it was a tuple of {len(parts)}")

    def put_in_order(self, orders: Mapping[str, list[Any]]) -> None:
        """Gives dicts of objects the order of their keys."""
        for path, keys in orders.items():
            entry = self.entry_at(path)
            if entry is not None and entry.sort == REFERENCE and isinstance(entry.value, dict):
                containers.put_in_order(entry.value, keys)

    def put_alias(self, path: str, first_path: str, parent: str, key: list[Any]) -> None:
        """Puts the object that is at `first_path` also to another path."""
        if first_path in (built_path(path), self.picture.aliases.get(path)):
            return
        target = self.object_at(first_path)
        entry = self.entry_at(path)
        place = self._place_of(path, parent, key)
        if target is not None and place is not None and place.set(target):
            return
        if self.final and (entry is None or entry.sort not in (SAMPLED, OPAQUE, RESOURCE)):
            raise self.refuse(path, f"it was the object at {first_path}")

    def remove(self, path: str) -> None:
        """Removes a value or object that the program has built, and that had gone at the
        checkpoint.
        """
        entry = self.picture.entries.get(path)
        if entry is not None:
            place = entry.place if entry.sort in (*KEPT_SORTS, REFERENCE) else None
        else:
            place, _ = self.picture.alias_places.get(path, (None, ""))
        if place is not None and not place.remove():
            raise self.refuse(path, "it was gone, and can't be removed")

    def check_classes(self, classes: Mapping[str, str]) -> None:
        """Raises CheckpointError: a function or object is another than at the checkpoint."""
        for path, saved_name in classes.items():
            entry = self.picture.entries.get(path)
            if path in self.picture.aliases:
                continue
            if entry is None:
                raise self.refuse(path, f"it was a {saved_name}, and is missing")
            if entry.sort in (OPAQUE, RESOURCE):
                continue
            # a list may be longer than before it was restored, or than on_epoch_start has made it
            name = describe(entry.value) if entry.sort == REFERENCE else entry.mark
            if _without_length(name) != _without_length(saved_name):
                raise self.refuse(path, f"it was {saved_name}, and is {name}")

    def check_patches(self, patches: Mapping[str, str]) -> None:
        """Raises CheckpointError: a hook or replaced method is another than at the checkpoint."""
        for path, saved_name in patches.items():
            name = self.picture.patches.get(path, "")
            if name != saved_name:
                raise self.refuse(
                    path, f"it was {saved_name or 'not set'}, and is {name or 'not set'}"
                )

    def refuse(self, path: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"[resume] {self.name}: {path} can't be put back: {problem}. Create the same objects "
            f"before fit() or in on_fit_start, or {ADVICE}"
        )


def _orders_in(picture: Picture) -> dict[str, list[Any]]:
    """Returns the keys of dicts of objects as JSON has them, in their order, by path."""
    orders = {
        path: containers.keys_of(entry.value)
        for path, entry in picture.entries.items()
        if isinstance(entry.value, dict)
        and entry.sort == REFERENCE
        and entry.root not in LOADER_ROOTS
    }
    return {path: keys for path, keys in orders.items() if keys is not None}


def _entry_at(picture: Picture, path: str) -> Entry | None:
    """Returns what is at a path, also if the same object is elsewhere."""
    return picture.entries.get(path) or picture.entries.get(picture.aliases.get(path, ""))


def _is_same_code(earlier_picture: Picture, picture: Picture, later: Entry) -> bool:
    """Tells whether a function or class is the one that an earlier picture has at its path.

    Two lambdas have the same name, so their code is compared as well.
    """
    path = later.path
    earlier = _entry_at(earlier_picture, path)
    if earlier is None or type(earlier.value) is not type(later.value):
        return False
    mark = _code_mark(earlier_picture, path, earlier.value)
    if mark != _code_mark(picture, path, later.value):
        return False
    code = getattr(earlier.value, "__code__", None)
    return code == getattr(later.value, "__code__", None)


def _code_mark(picture: Picture, path: str, value: Any) -> str:
    """Returns the name of a function or class, and of a bound method also the path at which the
    program has built its object.
    """
    owner = picture.owner_of(path)
    return f"{describe(value)} of {built_path(owner)}" if owner else describe(value)


def _is_object(entry: Entry) -> bool:
    """Tells whether it counts which object is there: others may hold it too."""
    return entry.sort == REFERENCE or (entry.sort == VALUE and values.is_tracked(entry.value))


def _code_in(picture: Picture) -> dict[str, Any]:
    """Returns the functions and classes of a picture by all of their paths."""
    code = {
        path: entry.value
        for path, entry in picture.entries.items()
        if entry.sort == REFERENCE and is_code(entry.value)
    }
    aliases = {path: code[first] for path, first in picture.aliases.items() if first in code}
    return {**code, **aliases}


def function_name(value: Any) -> str | None:
    """Returns the qualified name under which a resumed run finds a function; None if it can't.

    It finds functions of the user's own files, and mathematical functions of libraries.
    """
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return None
    code = getattr(value, "__code__", None)
    if code is None or not is_own_file(code.co_filename):
        is_of_torch = code is None and value.__module__ == "torch"
        if not (is_of_torch or f"{value.__module__}.".startswith(_ARITHMETIC)):
            return None
    names = values.qualified_name(value), f"{value.__module__}.{value.__name__}"
    return next((name for name in names if values.class_called(name) is value), None)


def bound_method(owner: Any, name: str) -> Any:
    """Returns a method of an object or class, of the code of its class; None if there is none."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    for base in classes:
        method = vars(base).get(name)
        if isinstance(method, (classmethod, types.ClassMethodDescriptorType)):
            return method.__get__(None, owner)
    for base in type(owner).__mro__:
        method = vars(base).get(name)
        if isinstance(method, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return method.__get__(owner, type(owner))
        if isinstance(method, classmethod):
            return method.__get__(None, type(owner))
        if is_function(method):
            return types.MethodType(method, owner)
    return None


def method_name(method: Any) -> str | None:
    """Returns the name under which the class of a bound method's object has the method; None if it
    doesn't.
    """
    owner = method.__self__
    name = getattr(method, "__name__", "")
    kinds = (*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ()))
    private = [f"_{kind.__name__.lstrip('_')}{name}" for kind in kinds]
    return next((one for one in (name, *private) if bound_method(owner, one) == method), None)


def _integer_keys(value: Any) -> set[int]:
    """Returns the integers that are keys of a dict or items of a set, also in nested dicts."""
    if not isinstance(value, (dict, set, frozenset)):
        return set()
    keys = {key for key in value if type(key) is int}
    if isinstance(value, dict):
        for item in value.values():
            keys |= _integer_keys(item)
    return keys


def _is_view(value: Any) -> bool:
    """Tells whether an array or tensor is a part of another one."""
    base = getattr(value, "base" if isinstance(value, np.ndarray) else "_base", None)
    return isinstance(base, type(value))


def walk_patiently(
    roots: Mapping[str, Any], kept: Container[int], known: Mapping[int, str]
) -> Picture:
    """Walks again if a thread, such as one that reads batches ahead, has changed a container."""
    for _ in range(ATTEMPTS):
        try:
            return walk(roots, kept, known)
        except RuntimeError as problem:
            if "during iteration" not in str(problem):
                raise
    return walk(roots, kept, known)


def _array_names(node: Any) -> Iterator[str]:
    """Yields the names of the arrays in what `values.encode` returned."""
    if isinstance(node, list):
        for item in node:
            yield from _array_names(item)
    elif isinstance(node, dict):
        name = values.array_name_in(node)
        if name is not None:
            yield name
            return
        for item in node.values():
            yield from _array_names(item)


def _without_length(name: str) -> str:
    """Returns the class in what `describe` returned: "list" of "list of 3"."""
    return name.partition(" of ")[0]


def _objects_in(picture: Picture) -> dict[str, Any]:
    """Returns the objects of a picture by path, without functions and values."""
    return {
        path: entry.value
        for path, entry in picture.entries.items()
        if entry.sort == REFERENCE and not is_function(entry.value)
    }


def _object_keys_in(picture: Picture) -> dict[str, dict[int, Any]]:
    """Returns the keys of dicts that are objects, by their number, by the path of the dict."""
    keys_by_path: dict[str, dict[int, Any]] = {}
    for path, entry in picture.entries.items():
        if entry.sort == REFERENCE and isinstance(entry.value, dict):
            items = enumerate(dict.keys(entry.value))
            keys = {number: key for number, key in items if not values.is_value(key)}
            if keys:
                keys_by_path[path] = keys
    return keys_by_path


def _are_same_objects(keys: Mapping[int, Any], earlier: Mapping[int, Any] | None) -> bool:
    return earlier is not None and {n: id(key) for n, key in keys.items()} == {
        n: id(key) for n, key in earlier.items()
    }


def _has_become_opaque(entry: Entry, built: Entry | None) -> bool:
    """Tells whether an opaque object is new, or was a value, such as an empty set."""
    return built is not None and (built.sort != OPAQUE or built.value is not entry.value)


def _is_where_value_was(entry: Entry, saved: Mapping[str, Any]) -> bool:
    """Tells whether an object is at a path that held no object at the checkpoint."""
    return entry.sort == REFERENCE and entry.path not in saved.get("classes", ())


def _without_new_containers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a checkpoint without what is in the containers that a step created."""
    created = saved.get("containers", ())
    held = {path: item for path, item in saved["values"].items() if item[3] not in created}
    aliases = {path: item for path, item in saved["aliases"].items() if item[1] not in created}
    return {**saved, "values": held, "aliases": aliases}


def moved_in(saved: Mapping[str, Any]) -> set[str]:
    """Returns the paths of what the program has built and was elsewhere at a checkpoint."""
    elsewhere = (*saved["values"], *(first_path for first_path, *_ in saved["aliases"].values()))
    return {built_path(path) for path in elsewhere if path.endswith(MOVED)}


def _is_below(path: str, owners: Iterable[str]) -> bool:
    """Tells whether one of the objects at some paths holds what is at a path."""
    return any(path.startswith((f"{owner}.", f"{owner}[")) for owner in owners)


def _flat(value: Any) -> list[Any]:
    """Returns the items of a container, and those of containers in it."""
    if not values.is_container(value):
        return [value]
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    return [inner for item in items for inner in _flat(item)]


def parts_of(entry: Entry) -> Any:
    """Returns what of an entry is encoded."""
    return reduced(entry.value) if entry.sort == REDUCED else entry.value


def put_reduced(entry: Entry, parts: list[Any]) -> bool:
    """Gives an object of a class in C the state that was saved, or builds one of its class.

    Returns False if that isn't possible.
    """
    _, arguments, state, items = parts
    target = entry.value
    if state is not None and hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return True
    kind = type(target)
    if items is not None or state is not None or kind.__module__ not in ("itertools",):
        return False
    entry.place.set(kind(*arguments))
    return True


def _can_be_put(entry: Entry) -> bool:
    """Tells whether another value can be put to where an entry is, or into its object."""
    if entry.sort == REDUCED:
        _, _, state, items = reduced(entry.value) or (None, None, None, None)
        if state is not None and hasattr(entry.value, "__setstate__"):
            return True
        is_iterator = type(entry.value).__module__ == "itertools"
        return is_iterator and state is None and items is None and entry.place.can_be_set()
    if entry.sort != VALUE or entry.place.can_be_set():
        return True
    return entry.place.kind == "fixed" and not values.is_immutable(entry.value)


def _key_of(place: Place) -> list[Any]:
    """Returns where its parent holds a value, as JSON has it."""
    weak = [_WEAK] if place.is_weak else []
    if place.kind in ("attribute", "global"):
        return [place.kind, place.key, *weak]
    if place.kind == "item" and values.is_value(place.key):
        arrays: dict[str, np.ndarray] = {}
        key = values.encode(place.key, arrays, "key")
        return [place.kind, key, *weak] if not arrays else []
    return []


def _as_saved(place: Place, key: list[Any]) -> Place:
    """Returns a place that holds a weak reference if there was one at the checkpoint."""
    return place._replace(is_weak=key[-1] == _WEAK) if key else place


def last_name(path: str) -> str:
    """Returns the last name of a path: "rank" of "loss.rank" and of "__main__:rank"."""
    return path.replace(":", ".").rpartition(".")[2]


def _in_words(entry: Entry) -> str:
    if entry.sort == VALUE:
        return entry.mark[:40]
    return f"a {entry.mark}"


def size_of(value: Any) -> int:
    """Returns the bytes of arrays in a value."""
    return sum(map(_nbytes, _flat(value)))


def _nbytes(value: Any) -> int:
    try:
        return int(getattr(value, "nbytes", 0))
    except RuntimeError:  # PyTorch doesn't know the bytes of a sparse tensor
        return int(value.values().nbytes)
