"""How a run ended, told in its events by whoever learns it: the loop when all is done, else the session's end."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...errors import CollectiveError, PhotinusError
from ...runlog.events import EVENTS, append_event
from ..checkpoint.position import Position
from ..session.preemption import Suspended


class Ending:
    """Tells once. Called with the error that ended the session, or None. Holds no model, so the session may keep it.

    Rank 0 tells every end. Another rank tells an error of its own, where the run's folder is on a disk that it sees:
    rank 0 may be killed before it has learned of it.
    """

    def __init__(self, folder: Path, rank: int, position: Position) -> None:
        self._folder, self._rank, self._position = folder, rank, position
        self.told = False

    def __call__(self, error: BaseException | None) -> None:
        """The session ends, by this error or well. A disk that takes no more is no reason to hide the error."""
        if self.told:
            return
        with contextlib.suppress(OSError, PhotinusError):
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self.end("left")
            elif isinstance(error, Suspended):
                self.end("suspended", str(error))
            elif isinstance(error, KeyboardInterrupt):
                self.end("left", "Ctrl-C")
            else:
                self._fail(error)

    def end(self, how: str, why: str = "") -> None:
        """The run is over: "finished", "stopped" early on request, "suspended", or "left" by its script before its end.

        Raises:
            OSError: it could not be written.
        """
        self.told = True
        if self._rank == 0:
            facts = {"how": how, "epochs": self._position.epochs_done, **({"text": why} if why else {})}
            append_event(self._folder, "end", self._position.step, **facts)

    def _fail(self, error: BaseException) -> None:
        self.told = True
        consequence = isinstance(error, CollectiveError)  # of what another rank did
        if self._rank != 0 and (consequence or not (self._folder / EVENTS).exists()):
            return
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        append_event(self._folder, "error", self._position.step, rank=self._rank, text=text, consequence=consequence)
