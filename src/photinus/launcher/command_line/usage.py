"""Wrong use of the command line."""

from __future__ import annotations


class UsageError(ValueError):
    """The command line cannot be carried out as typed; the message says why and what to type instead."""
