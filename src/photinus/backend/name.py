"""What `init_process_group` calls the backend."""

from __future__ import annotations

__all__ = ["NAME"]

NAME = "photinus"
