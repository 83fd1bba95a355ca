"""Intel MPI without Python between: its own benchmark IMB-MPI1, as a contestant."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import bars
from turns import Contestant


class Imb(Contestant):
    """Starts its ranks for each turn, since they spin while they wait, and reads the slowest one's time from its table.

    It reduces from one buffer into another, always the same two.

    Args:
        words, environ: what starts it, up to its own arguments.
        ranks: their number.
        absent: why it can not take part.
    """

    def __init__(self, words: Sequence[str], environ: dict[str, str], ranks: int, absent: str | None) -> None:
        super().__init__(bars.IMB, {bars.IMB: ""}, lambda _: [], ranks, dtypes=["float32"], absent=absent)
        cores = sorted(os.sched_getaffinity(0))
        pinned = ",".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        self._words = words
        self._environ = {**os.environ, **environ, "I_MPI_PIN": "1", "I_MPI_PIN_PROCESSOR_LIST": pinned}
        self._bytes = 0

    def start(self) -> None:
        """Nothing runs between turns."""
        self.version = "IMB-MPI1 of the same"

    def prepare(self, dtype: str, size_bytes: int) -> bool:
        """Takes the size; it must be a power of two."""
        self._bytes = size_bytes
        return self.absent is None and dtype in self.dtypes

    def run(self, path: str, calls: int) -> float | None:
        """Seconds per call, those of the slowest rank; None when it fails."""
        power = self._bytes.bit_length() - 1
        asked = ["Allreduce", "-npmin", str(self._ranks), "-msglog", f"{power}:{power}"]
        asked += ["-iter", str(calls), "-iter_policy", "off", "-time", "20"]
        try:
            done = subprocess.run([*self._words, *asked], env=self._environ, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            self.absent = f"no answer within 60 s at {self._bytes} bytes"
            return None
        for line in done.stdout.splitlines():
            fields = line.split()
            if len(fields) == 5 and fields[0] == str(self._bytes):
                return float(fields[3]) * 1e-6
        said = (done.stderr or done.stdout).strip().splitlines()
        self.absent = f"ended with code {done.returncode}: {said[-1] if said else 'it said nothing'}"
        return None

    def stop(self) -> None:
        """Nothing runs between turns."""
