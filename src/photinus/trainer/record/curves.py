"""`curves.png`: the picture of a run, drawn at its end from the files in its folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from ...runlog.run import Run
from ...runlog.tables import METRICS

PICTURE = "curves.png"


def draw_curves(folder: Path) -> Path | None:
    """Draws a run: training loss, what was logged, and the speed, over the steps; a dotted line marks each restart.

    Losses that were logged (names with "loss" in them) share the first panel. Of very many steps the line is a mean,
    with a band from the lowest to the highest.

    Args:
        folder: the run's, with losses.csv and metrics.csv; there the picture is written, atomically.

    Returns:
        The picture's path; None, with a warning, when matplotlib is not installed or there is nothing to draw.
    """
    run = Run(folder)
    run.refresh()
    if not run.epochs:
        warnings.warn(f"no curves were drawn: {folder / METRICS} holds no finished epoch", stacklevel=2)
        return None
    try:
        import matplotlib  # noqa: F401 - asked for by name, for the next line is silent when it has run before

        from ...runlog.figures import picture
    except ImportError as error:
        warnings.warn(
            f"curves.png was not drawn, since matplotlib cannot be imported ({error}); `pip install matplotlib`, and "
            f"start the script again: it draws what is missing. The numbers are in {folder / METRICS}",
            stacklevel=2,
        )
        return None
    path = folder / PICTURE
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        picture(run, _title(run)).savefig(new, dpi=144, format="png")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path


def _title(run: Run) -> str:
    last = run.epochs[-1]
    parts = [f"{run.name}: {int(last['epoch'])} epochs, {int(last['step'])} steps, {last.get('elapsed_s', 0.0):.1f} s"]
    names = [name for name in run.logged if "loss" not in name] or run.logged
    parts += [f"{name.replace('_', ' ')} {last[name]:.4g}" for name in names[:2] if name in last]
    return " · ".join(parts)
