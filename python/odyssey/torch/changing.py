"""What forward() and the loss change while a torch module is trained.

A callback may change attributes of a module; checkpoints keep them (capture/). What forward() and
the loss change is another matter: how often they run on a rank depends on the number of ranks. So

    what they set and do not read     is neither kept nor compared, such as a map of attention that
                                      is kept to be looked at
    what they set and read            is refused by name
    running statistics                are merged (norms.py)

`ForwardWatch` looks at attributes of modules around each shard. `ForwardCheck` walks module and
loss before and after the first shard of each epoch, so that it also finds what is in closures,
globals, tensors and objects. Whether a change is read is tried: the shard is computed with what was
there before, and with what is there now.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from ..capture import REFERENCE, Capture, Picture, decode, encode, mark, put_into
from ..comm import Communicator
from ..core import random_scopes
from ..errors import ConfigError
from ..nn import settings
from ..train import NOT_REPEATABLE, agreement, repeats_itself

# times that a number rises by as much as the time before, which a length or a loss does not
COUNTS = 3
SMALL = 64  # values of a list or dict that is looked into
LONGEST = 1 << 20  # bytes of the names of attributes that forward() sets
COPIED_BYTES = 1 << 20  # a value of at most this size is copied before the shards
ROOTS = ("model", "loss")
_CANNOT_BE_SET = (AttributeError, KeyError, TypeError, ValueError, RuntimeError)
ADVICE = "count steps in a callback (on_step_end) instead, or use deterministic='warn'"


class ForwardWatch:
    """Notes the attributes of a module, and of the loss if that is a module, that forward() sets.

    Args:
        module, loss: as the trainer was given them.
        strict: refuse a forward() that counts its calls.

    Attributes:
        set_by_forward: (id of a module, name) of the attributes that forward() of shards of this
            rank has set.
    """

    def __init__(self, module: nn.Module, loss: Any, strict: bool) -> None:
        self.roots = {"model": module}
        if isinstance(loss, nn.Module):
            self.roots["loss"] = loss
        self.strict = strict
        self.set_by_forward: set[tuple[int, str]] = set()
        self._structures = self._structure()
        self._owned = [
            (f"{root}.{path}." if path else f"{root}.", vars(module), id(module))
            for root, top in self.roots.items()
            for path, module in top.named_modules()
        ]
        holders = [own for _, own, _ in self._owned if "_modules" in own]
        self._held = [
            (own[kind], dict(own[kind])) for own in holders for kind in ("_modules", "_parameters")
        ]
        # numbers that forward() sets: last, rise, how often so
        self._last: dict[str, tuple[float, float, int]] = {}
        self.remember()

    def remember(self) -> None:
        """Notes the lists and dicts that are attributes now; fit() begins."""
        self._containers = [
            (owner, name, value)
            for _, attributes, owner in self._owned
            for name, value in attributes.items()
            if name[0] != "_"
            and type(value) in (list, dict)
            and len(value) <= SMALL
            and settings.is_value(value)
        ]

    def _structure(self) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
        top = self.roots["model"]
        return dict(top.named_modules(remove_duplicate=False)), dict(
            top.named_parameters(remove_duplicate=False)
        )

    def check_structure(self) -> None:
        """Raises ConfigError: the module has other parameters or submodules than when the
        trainer was made.
        """
        if all(_same(now, before) for now, before in self._held):
            return
        for what, before, now in zip(
            ("submodule", "parameter"), self._structures, self._structure(), strict=True
        ):
            for name in {**before, **now}:
                if now.get(name) is not before.get(name):
                    does = (
                        "is new"
                        if name not in before
                        else "is gone"
                        if name not in now
                        else "is another one"
                    )
                    raise ConfigError(
                        f"[torch] the {what} {name} {does} since the trainer was made, so it is "
                        "not what is trained; change values in place (load_state_dict, p.copy_), "
                        "or make a new trainer of the module"
                    )

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Finds which attributes the block, forward() of a shard, sets.

        Raises ConfigError: it counts in one.
        """
        before = [dict(attributes) for _, attributes, _ in self._owned]
        inside = [(owner, name, value, repr(value)) for owner, name, value in self._containers]
        yield
        for (at, now, owner), then in zip(self._owned, before, strict=True):
            if _same(now, then):
                continue
            for name, value in now.items():
                if name[0] != "_" and then.get(name, self) is not value:
                    self.set_by_forward.add((owner, name))
                    self._check_count(at + name, then.get(name), value)
        for owner, name, value, text in inside:
            if repr(value) != text:
                self.set_by_forward.add((owner, name))

    def _check_count(self, key: str, old: Any, value: Any) -> None:
        """Raises ConfigError: a number rises by as much with each call of forward()."""
        if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (old, value)):
            return
        by = value - old
        (last, rose, times) = self._last.get(key, (math.nan, math.nan, 0))
        times = times + 1 if by and last == old and math.isclose(by, rose) else 0
        self._last[key] = value, by, times
        if self.strict and times >= COUNTS:
            raise ConfigError(
                f"[torch] forward() counts in {key} ({old}, then {value}): how often it runs on a "
                f"rank depends on the layout; {ADVICE}"
            )


class ForwardCheck:
    """Finds what forward() and the loss change, at the first shard of a fit and of each epoch.

    Args:
        capture: knows the state beyond weights; it is told what is neither kept nor compared.
        strict: refuse what is set and read; else it is reported.
        say: reports a line to the user.

    Attributes:
        is_due: True before the first step of an epoch.
        tries_again: True before the first step of a fit() on one rank, where no other rank shows
            whether a shard has the same results when it is computed again.
    """

    def __init__(self, capture: Capture, strict: bool, say: Callable[[str], None]) -> None:
        self.capture = capture
        self.strict = strict
        self.say = say
        self.is_due = True
        self.tries_again = False
        self._before = Picture()
        self._copies: dict[str, Any] = {}
        self._reported: set[str] = set()

    def begin(self) -> None:
        """Notes what there is before the shard."""
        self._before = self.capture.look(ROOTS)
        self._copies = _copies_of(self._before)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Sets what the block, forward() of a shard, has changed back to what it was.

        Objects that forward() builds when it is first called stay.
        """
        before = self.capture.look(ROOTS)
        copies = _copies_of(before)
        try:
            yield
        finally:
            after = self.capture.look(ROOTS)
            paths = _without_built(_changed(before, after), before, after)
            _set_all(paths, after, before, copies)

    def end(self, compute: Callable[[], list[Any]]) -> None:
        """Looks at what the shard has changed, and whether it has the same results again.

        Args:
            compute: returns the results of the shard as values. It is called with what was there
                before the shard, and with what is there now; if its results differ, something that
                has changed is read.

        Raises:
            ConfigError: Something that has changed is read, or counts calls, or results differ.
        """
        self.is_due = False
        self._look(compute)
        if self.tries_again and self.strict:
            self._check_repeats(compute)
        self.tries_again = False

    def _check_repeats(self, compute: Callable[[], list[Any]]) -> None:
        """Raises ConfigError: the shard has other results when it is computed again."""

        def compute_marks() -> list[str]:
            with self.undone(), random_scopes.restored():
                return [mark(value) for value in compute()]

        try:
            repeats = repeats_itself(compute_marks, compute_marks())
        except Exception:  # if it is no accident, the next shard raises it too
            return
        if not repeats:
            raise ConfigError(f"[torch] {NOT_REPEATABLE}, or use deterministic='warn'")

    def _look(self, compute: Callable[[], list[Any]]) -> None:
        """Looks at what the shard has changed; see `end`."""
        after = self.capture.look(ROOTS)
        paths = _changed(self._before, after)
        if not paths and not _built_in(self._before, after):
            return
        tried = _without_built(paths, self._before, after)
        if tried and (read := self._find_read(tried, after, compute)):
            if self.strict:
                self._check_repeats(compute)  # else draws, not the change, may be the cause
            self._refuse(read, after)
        self.capture.by_forward.update(paths, _built_in(self._before, after))

    def _find_read(
        self, paths: list[str], after: Picture, compute: Callable[[], list[Any]]
    ) -> str | None:
        """Returns the first of these paths that is read or counts calls; None if none is."""
        results_differ, counter = self._try(paths, after, compute)
        if counter is not None or not results_differ:
            return counter
        for path in paths:
            differ, _ = self._try([path], after, compute)
            if differ:
                return path
        return paths[0]

    def _try(
        self, paths: list[str], after: Picture, compute: Callable[[], list[Any]]
    ) -> tuple[bool, str | None]:
        """Computes a shard with what was there before at these paths, and with what is there now.

        Returns whether results differ, and the path of a whole number that has risen by as much in
        both, because it counts calls.
        """
        copies_after = _copies_of(after)
        try:
            _set_all(paths, after, self._before, self._copies)
            try:
                with random_scopes.restored():
                    results_before = [mark(value) for value in compute()]
            except Exception:  # it can't be computed with a part of what was there before
                return False, None
            rises_before = self._rises(paths, self._copies)
            _set_all(paths, after, after, copies_after)
            with random_scopes.restored():
                results_after = [mark(value) for value in compute()]
            rises_after = self._rises(paths, copies_after)
        except Exception:  # if it is no accident, the next shard raises it too
            return False, None
        finally:
            _set_all(paths, after, after, copies_after)
        counters = [path for path, by in rises_before.items() if rises_after.get(path) == by]
        return results_before != results_after, counters[0] if counters else None

    def _rises(self, paths: list[str], copies: Mapping[str, Any]) -> dict[str, int]:
        """Returns by how much whole numbers have risen since they were copied, by path."""
        now = self.capture.look(ROOTS)
        rises = {}
        for path in paths:
            node, arrays = copies.get(path, (None, {}))
            old = _only_number(decode(node, arrays))
            new = _only_number(_value_at(now, path))
            if old is not None and new is not None and new > old:
                rises[path] = new - old
        return rises

    def _refuse(self, path: str, after: Picture) -> None:
        old = self._before.entries.get(path)
        new = after.entries.get(path)
        subject = "a hook" if "_hooks[" in path else "forward() or the loss"
        text = (
            f"[torch] {subject} changes {path} "
            f"({'missing' if old is None else old.mark[:40]}, then "
            f"{'missing' if new is None else new.mark[:40]}) and reads it: how often that runs on "
            f"a rank depends on the layout, so results would too; {ADVICE}"
        )
        if self.strict:
            raise ConfigError(text)
        if path not in self._reported:
            self._reported.add(path)
            self.say(text)


def share(comm: Communicator, capture: Capture) -> None:
    """Lets all ranks know what forward() sets; a collective call."""
    if comm.size > 1:
        capture.look(ROOTS)
        for text in agreement.texts(comm, json.dumps(sorted(capture.by_forward)), LONGEST):
            capture.by_forward.update(json.loads(text))


def _copies_of(picture: Picture) -> dict[str, Any]:
    """Returns the values of a picture, encoded, by path; not the large ones."""
    copies: dict[str, Any] = {}
    for path, entry in picture.entries.items():
        if entry.sort == "value" and getattr(entry.value, "nbytes", 0) <= COPIED_BYTES:
            arrays: dict[str, Any] = {}
            node = encode(entry.value, arrays, path)
            copies[path] = node, {name: array.copy() for name, array in arrays.items()}
    return copies


def _changed(before: Picture, after: Picture) -> list[str]:
    """Returns the paths of values that are not what they were.

    A value that has only got another path, because forward() has set another name of its object,
    is not among them.
    """
    old = before.marks()
    new = after.marks()
    old_by_place = {_place_of(before, path): mark for path, mark in old.items()}
    new_by_place = {_place_of(after, path): mark for path, mark in new.items()}
    changed = []
    for path in {**old, **new}:
        place = _place_of(after if path in new else before, path)
        is_moved = old_by_place.get(place) == new_by_place.get(place)
        if old.get(path) != new.get(path) and not is_moved:
            changed.append(path)
    return changed


def _without_built(paths: list[str], before: Picture, after: Picture) -> list[str]:
    """Returns the paths without those of objects that the shard has built, such as a layer that
    creates its parts when it is first called.

    Such an object can't be tried without its parts. If the shard has added hooks, nothing that it
    has set first is undone: without its note that they are there, it would add them twice.
    """
    if any("_hooks[" in path and path not in before.entries for path in after.entries):
        paths = [path for path in paths if path in before.entries]
    holders = {after.entries[path].parent for path in _built_in(before, after)} - {*ROOTS}
    around = tuple(f"{holder}{end}" for holder in holders for end in ".[")
    return [path for path in paths if not path.startswith(around)]


def _built_in(before: Picture, after: Picture) -> list[str]:
    """Returns the paths of objects that are new."""
    return [
        path
        for path, entry in after.entries.items()
        if entry.sort == REFERENCE and path not in before.entries and ":" not in path
    ]


def _place_of(picture: Picture, path: str) -> tuple[str, int, str]:
    """Returns where a value is held, whatever its path."""
    place = picture.entries[path].place
    return place.kind, id(place.holder), repr(place.key)


def _value_at(picture: Picture, path: str) -> Any:
    entry = picture.entries.get(path)
    return None if entry is None else entry.value


def _set_all(paths: list[str], now: Picture, wanted: Picture, copies: Mapping[str, Any]) -> None:
    """Sets the values at some paths to those of a picture, with their copies."""
    for path in paths:
        entry = wanted.entries.get(path)
        current = now.entries.get(path) or entry
        if current is None:  # of a tensor that has no gradient where forward() is only tried
            continue
        place = current.place
        with contextlib.suppress(*_CANNOT_BE_SET):
            if entry is None:
                place.remove()
                continue
            place.set(entry.value)
            if path in copies:
                node, arrays = copies[path]
                value = decode(node, arrays)
                if not put_into(entry.value, value):
                    place.set(value)


def _only_number(value: Any) -> int | None:
    """Returns a whole number, or the only one in a list; None for other values."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value if type(value) is int else None


def _same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """True if both hold the same objects."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
