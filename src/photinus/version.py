"""The version of Photinus, in its one place: builds read it from here."""

from __future__ import annotations

__version__ = "0.2.0"
