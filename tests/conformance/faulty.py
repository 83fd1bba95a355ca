"""A DDP class with faults that PyTorch's suite has to see."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from torch import nn

PIDS = "PHOTINUS_TEST_PIDS"


class DistributedDataParallel(nn.Module):
    """Averages nothing; entering `no_sync` starts a process, notes both pids in the file of PIDS and never returns."""

    def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(os.environ[PIDS], "a") as pids:
            pids.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)
