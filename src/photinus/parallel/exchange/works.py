"""Waiting for several exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .collectives import Pending

__all__ = ["wait_all"]


def wait_all(works: Sequence[Pending | None], after: Callable[[int], None] | None = None) -> None:
    """Waits for the exchanges in the order of their launch; raises the first error after it has let go of the rest.

    Args:
        works: None where nothing was launched.
        after: called with the index of each one that ended well, before the next is waited for.
    """
    first: BaseException | None = None
    for index, work in enumerate(works):
        if work is None:
            continue
        try:
            if first is None or work.is_completed():
                work.wait()
                if after is not None and first is None:
                    after(index)
        except Exception as error:  # noqa: BLE001 - raised below, when the others have been looked at
            first = first or error
    if first is not None:
        raise first
