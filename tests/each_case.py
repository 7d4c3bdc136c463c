"""Many small cases as one test: an item of pytest is collected by every worker, which costs more
than such a case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


def each(names: str, cases: Iterable[tuple]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """A test of `names` becomes one of nothing that runs all `cases`, and names the one that
    fails.
    """
    rows = list(cases)
    assert rows, names

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            for row in rows:
                try:
                    test(*row)
                except Exception as error:
                    raise AssertionError(f"case {names} = {row}") from error

        run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
        return run  # without __wrapped__, whose arguments pytest would take for fixtures

    return decorate
