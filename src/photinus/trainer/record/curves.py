"""`curves.png`: a run at a glance, drawn from its two CSV files. matplotlib is imported only when it is needed."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...runlog.tables import OWN_COLUMNS, Row, RunFiles, read_rows
from .config import RunConfig

__all__ = ["draw_curves"]

_PANEL_INCHES = 4.6
_INK = "#1f2933"
_FAINT = "#9aa5b1"
_COLOURS = ("#2563a8", "#d1622b", "#2f8f5b", "#8757a6", "#b8860b", "#c0436b")


def draw_curves(folder: Path, picture: Path | None = None) -> Path | None:
    """Draws a run: training loss (each step faint, each epoch's mean bold), what was logged, and the speed.

    Losses that were logged (names with "loss" in them) share the first panel. A dotted line marks each restart. The
    axis is of epochs, or of steps, whichever the run was told to count or to validate after.

    Args:
        folder: the run's folder, with losses.csv and metrics.csv.
        picture: where to write; default `curves.png` in the folder. Written atomically.

    Returns:
        The picture's path; None, with a warning, when matplotlib is not installed or there is nothing to draw.
    """
    files = RunFiles(folder)
    steps, epochs = read_rows(files.losses), read_rows(files.metrics)
    if not epochs:
        warnings.warn(f"no curves were drawn: {files.metrics} holds no finished epoch", stacklevel=2)
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        warnings.warn(
            f"curves.png was not drawn, since matplotlib cannot be imported ({error}); `pip install matplotlib`, and "
            f"start the script again: it draws what is missing. The numbers are in {files.metrics}",
            stacklevel=2,
        )
        return None
    logged = [name for name in dict.fromkeys(name for row in epochs for name in row) if name not in OWN_COLUMNS]
    in_loss_panel = [name for name in logged if "loss" in name]
    others = [name for name in logged if name not in in_loss_panel]
    panels = _panels(epochs, others)
    # No pyplot: it would pick a window system and keep global state in the user's process.
    # Fixed margins, in inches: a layout engine would draw everything twice to find them.
    width, height = _PANEL_INCHES * (1 + len(panels)) + 0.2, 4.1
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(panels), squeeze=False)[0]
    gap = 0.7 / (_PANEL_INCHES - 0.7)
    figure.subplots_adjust(0.62 / width, 0.55 / height, 1 - 0.15 / width, 1 - 0.72 / height, gap)
    unit = "step" if _counts_steps(folder) else "epoch"
    places = [row["step"] for row in steps] if unit == "step" else _epochs_of(steps, epochs)
    ends = [row[unit] for row in epochs]
    _loss_panel(axes[0], steps, epochs, in_loss_panel, places, ends)
    for panel, (title, names) in zip(axes[1:], panels, strict=True):
        _metric_panel(panel, title, names, epochs, ends)
    restarts = _restarts(steps, places) if steps else _restarts(epochs, ends)
    for panel in axes:
        _finish_panel(panel, unit, ends[-1], restarts)
    if restarts:
        axes[0].plot([], [], ":", color=_FAINT, linewidth=1.4, label="restart")
    if axes[0].get_legend_handles_labels()[1]:
        axes[0].legend(frameon=False, fontsize=9, labelcolor=_INK)
    figure.suptitle(_title(folder, epochs, others or in_loss_panel), fontsize=11, color=_INK, x=0.15 / width, ha="left")
    picture = folder / "curves.png" if picture is None else picture
    new = picture.with_name(f".{picture.name}.{os.getpid()}.new")
    try:
        figure.savefig(new, dpi=144, format="png")
        os.replace(new, picture)
    finally:
        new.unlink(missing_ok=True)
    return picture


def _panels(epochs: Sequence[Row], others: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Metrics of like size share a panel; at most two panels of them, then the speed."""
    panels: list[tuple[str, list[str]]] = []
    shares = [name for name in others if all(0 <= row.get(name, 0) <= 1 for row in epochs)]
    rest = [name for name in others if name not in shares]
    for names in (shares, rest):
        if names:
            panels.append((names[0].replace("_", " ") if len(names) == 1 else "validation", list(names)))
    return [*panels, ("samples per second", ["samples_per_s"])]


def _counts_steps(folder: Path) -> bool:
    options = RunConfig.read(folder).get("options")
    counted = ("steps", "validate_every_steps")
    return isinstance(options, dict) and any(options.get(name) is not None for name in counted)


def _epochs_of(steps: Sequence[Row], epochs: Sequence[Row]) -> list[float]:
    """Each step's place on the axis of epochs: step 11 of 22 of the third epoch lies at 2.5."""
    ends = {0: 0.0, **{int(row["epoch"]): row["step"] for row in epochs}}
    usual = max((ends[e] - ends[e - 1] for e in ends if e - 1 in ends), default=1.0) or 1.0
    places = []
    for row in steps:
        epoch = int(row["epoch"])
        begin = ends.get(epoch - 1, 0.0)
        length = (ends[epoch] - begin if epoch in ends else usual) or usual
        places.append(epoch - 1 + (row["step"] - begin) / length)
    return places


def _loss_panel(
    panel: Any,
    steps: Sequence[Row],
    epochs: Sequence[Row],
    names: Sequence[str],
    places: Sequence[float],
    ends: Sequence[float],
) -> None:
    panel.set_title("loss", loc="left", fontsize=10, color=_INK)
    if steps:
        values = [row["loss"] for row in steps]
        panel.plot(places, values, color=_COLOURS[0], alpha=0.28, linewidth=0.8, label="each step")
    # An epoch's mean belongs to its middle, what was measured at its end to its end.
    middles = [(begin + end) / 2 for begin, end in itertools.pairwise([0.0, *ends])]
    panel.plot(middles, [row.get("loss", math.nan) for row in epochs], **_bold(0, epochs), label="epoch mean")
    for i, name in enumerate(names, 1):
        values = [row.get(name, math.nan) for row in epochs]
        panel.plot(ends, values, **_bold(i, epochs), label=name.replace("_", " "))
    values = [row["loss"] for row in steps if math.isfinite(row["loss"])] or [row["loss"] for row in epochs]
    values += [row[name] for row in epochs for name in names if name in row]
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    # A loss that falls by orders of magnitude shows nothing of its end on a linear axis.
    if positive and len(positive) == len(values) and max(positive) > 20 * min(positive):
        panel.set_yscale("log")


def _metric_panel(panel: Any, title: str, names: Sequence[str], epochs: Sequence[Row], x: Sequence[float]) -> None:
    panel.set_title(title, loc="left", fontsize=10, color=_INK)
    for i, name in enumerate(names):
        values = [row.get(name, math.nan) for row in epochs]
        is_speed = name == "samples_per_s"
        panel.plot(x, values, **_bold(2 if is_speed else 1 + i % 5, epochs), label=name.replace("_", " "))
        finite = [value for value in values if math.isfinite(value)]
        if is_speed and finite:
            panel.set_ylim(0, 1.15 * max(finite))
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", "\u2009"))
        elif finite and math.isfinite(values[-1]):
            panel.annotate(
                f"{values[-1]:.4g}",
                (x[-1], values[-1]),
                textcoords="offset points",
                xytext=(-2, -13),
                ha="right",
                fontsize=9,
                color=_COLOURS[1 + i % 5],
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
    if len(names) > 1:
        panel.legend(frameon=False, fontsize=9, labelcolor=_INK)


def _restarts(rows: Sequence[Row], places: Sequence[float]) -> list[float]:
    """Where on the axis the run was started again."""
    pairs = zip(itertools.pairwise(rows), places, strict=False)
    return [place for (before, after), place in pairs if before["start"] != after["start"]]


def _finish_panel(panel: Any, unit: str, last: float, restarts: Sequence[float]) -> None:
    for place in restarts:
        panel.axvline(place, color=_FAINT, linestyle=":", linewidth=1.4, zorder=0)
    panel.set_xlim(0, last * 1.02)
    panel.set_xlabel(unit, fontsize=9, color=_INK)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.tick_params(labelsize=9, colors=_INK, length=3)
    panel.grid(True, color="#e4e7eb", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(_FAINT)


def _bold(colour: int, epochs: Sequence[Row]) -> dict[str, Any]:
    marker = "o" if len(epochs) <= 40 else ""
    return {"color": _COLOURS[colour % len(_COLOURS)], "linewidth": 1.8, "marker": marker, "markersize": 3.5}


def _title(folder: Path, epochs: Sequence[Row], names: Sequence[str]) -> str:
    last = epochs[-1]
    how_long = f"{int(last['epoch'])} epochs, {int(last['step'])} steps, {last['elapsed_s']:.1f} s"
    parts = [f"{folder.resolve().name}: {how_long}"]
    parts += [f"{name.replace('_', ' ')} {last[name]:.4g}" for name in names[:2] if name in last]
    return " · ".join(parts)
