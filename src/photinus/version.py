"""The version of Photinus: pyproject.toml has the same, and a test compares them."""

from __future__ import annotations

__version__ = "0.1.0"
