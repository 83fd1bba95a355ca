"""Which workers have ended well while others still run, as their launcher tells it through the attempt's store.

A worker that ends badly ends the attempt. One that ends well before the others have met it would be waited for in vain,
and only its launcher can know: it has no connection to any of them yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "photinus/ended"


def tell_ended(store: Store, ranks: Iterable[int]) -> None:
    """Adds ranks whose processes have exited with code 0."""
    store.append(_KEY, "".join(f"{rank} " for rank in ranks))  # type: ignore[attr-defined]


def ended(store: Store) -> set[int]:
    """The ranks that were told of; the store is that of the job, without prefixes."""
    return {int(rank) for rank in store.get(_KEY).split()} if store.check([_KEY]) else set()
