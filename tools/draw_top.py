"""Draws what `photinus top` shows of a run into an SVG file: `python tools/draw_top.py RUN docs/images/top.svg`.

The picture in the documentation is of `photinus run --nproc-per-node 2 train.py runs/circle`, while it trains, with the
script of the tutorial's first page, epochs=300, and one worker killed.
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from photinus.runlog.run import Run
from photinus.tools.view.view import view

WIDTH = 92


def main(folder: str, picture: str) -> None:
    """Draw the run in a folder."""
    run = Run(Path(folder))
    run.refresh()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(view(run, width=WIDTH, height=None, now_s=time.time(), colour=True))
    # Rich's own format fetches a font from the network. A letter of a reader's font is 0.6 times as wide as it is high.
    own_font = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")
    console.save_svg(picture, title=f"photinus top {folder}", code_format=own_font, font_aspect_ratio=0.6)


if __name__ == "__main__":
    main(*sys.argv[1:])
