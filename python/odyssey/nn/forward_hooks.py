"""Functions that a module calls before and after its forward()."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .module import Module


class Hook:
    """A function that a module calls, and whether it also gets the keywords."""

    __slots__ = ("function", "with_kwargs")

    def __init__(self, function: Callable[..., Any], with_kwargs: bool) -> None:
        self.function = function
        self.with_kwargs = with_kwargs


class HookHandle:
    """Removes a hook from its module: with `remove()`, or at the end of a `with` block."""

    def __init__(self, module: Module, kind: str, hook: Hook) -> None:
        self._module = module
        self._kind = kind
        self._hook = hook

    def remove(self) -> None:
        """Removes the hook. A second call does nothing."""
        kept = tuple(h for h in getattr(self._module, self._kind) if h is not self._hook)
        if kept:
            setattr(self._module, self._kind, kept)
        elif self._kind in vars(self._module):
            delattr(self._module, self._kind)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class _Skipping(threading.local):
    skips = False


_skipping = _Skipping()


def are_skipped() -> bool:
    """Tells whether this thread runs modules without their hooks."""
    return _skipping.skips


@contextlib.contextmanager
def skipped() -> Iterator[None]:
    """Runs modules without their hooks in the block, in this thread."""
    before = _skipping.skips
    _skipping.skips = True
    try:
        yield
    finally:
        _skipping.skips = before


def are_there(model: Module) -> bool:
    """Tells whether a module or one below it has hooks."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    return any(getattr(m, kind, ()) for m in model.modules() for kind in kinds)


def run_check(model: Module, run: Callable[[], Any]) -> Any:
    """Returns what `run` returns, which runs a model for a check, not for the user.

    Hooks look at tensors, as a rule, so they are not called. If the model fails without them, it
    needs their outputs, and runs again with them.
    """
    try:
        with skipped():
            return run()
    except Exception:
        if not are_there(model):
            raise
    return run()


def call(module: Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Returns the output of a module's forward() between its hooks, which may replace inputs and
    output.
    """
    for hook in module._forward_pre_hooks:
        if hook.with_kwargs:
            replaced = hook.function(module, arguments, keywords)
            if replaced is not None:
                arguments, keywords = replaced
        else:
            replaced = hook.function(module, arguments)
            if replaced is not None:
                arguments = replaced if isinstance(replaced, tuple) else (replaced,)
    output = module.forward(*arguments, **keywords)
    for hook in module._forward_hooks:
        values = (arguments, keywords, output) if hook.with_kwargs else (arguments, output)
        replaced = hook.function(module, *values)
        output = output if replaced is None else replaced
    return output
