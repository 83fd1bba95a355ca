"""What `init_process_group` calls the backend."""

from __future__ import annotations

NAME = "photinus"
