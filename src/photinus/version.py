"""The version of Photinus: pyproject.toml has the same, and a test compares them."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
