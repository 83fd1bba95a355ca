"""The backend's name in `init_process_group`."""

from __future__ import annotations

NAME = "photinus"
