"""`photinus report`: the page is whole, small, readable by everyone, and says the truth about odd runs."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import photinus.tools.view.page
from photinus.cli.main import main
from photinus.runlog import figures
from photinus.runlog.figures import PHASE_COLOURS, RUN_COLOURS, Chart, charts, mean_windows
from photinus.runlog.run import Run
from photinus.runlog.tables import PHASES, RANKS, RunFiles, StepLoss
from photinus.tools.view.page import labels_of, page
from photinus.tools.view.view import view
from tests.made_run import BEGAN_S, window, write_run

VOID = {"meta", "source", "br", "hr", "img", "input", "link"}


class Read(HTMLParser):
    """What a strict reader finds: text, elements, ids, addresses. Fails at the first tag that does not fit."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + " "

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def made(*folders: Path) -> str:
    runs = [Run(folder, points=300) for folder in folders]
    for run in runs:
        run.refresh()
    return page(runs)


def groups(text: str, name: str) -> list[str]:
    """What stands in each group of a picture that has this id, until the next group with an id."""
    return re.findall(rf'<g id="{name}">(.*?)(?=<g id=|</svg>|$)', text, re.DOTALL)


def svgs(text: str) -> list[str]:
    """The pictures of a page."""
    return [base64.b64decode(found).decode() for found in re.findall(r'data:image/svg\+xml;base64,([^"]*)"', text)]


def words(read: Read) -> str:
    return " ".join(read.text.split())


# -- whole, and by itself ---------------------------------------------------------------------------------------------


def check_alone(text: str) -> Read:
    """The page is well-formed, refers to nothing outside, and each picture has words."""
    read = Read(text)
    assert text.startswith("<!DOCTYPE html>")
    assert re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<iframe|(srcset|\bsrc)=\"(?!data:)", text) is None
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in read.all("img"):
        assert picture["alt"]
    for picture in svgs(text):
        assert "nan" not in "".join(re.findall(r' (?:d|x|y)="([^"]*)"', picture))
    assert [attributes["lang"] for attributes in read.all("html")] == ["en"]
    return read


def test_a_page_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    read = check_alone(made(write_run(tmp_path / "digits", restart_at=25)))
    found = words(read)
    for wanted in ("digits", "finished", "3 of 3 epochs", "samples per second", "where the time of a step goes"):
        assert wanted in found
    for wanted in ("resumed from step 25", "checkpoint of step 60", "0123456789abcdef, with changes", "8.0 GiB"):
        assert wanted in found
    for wanted in ("photinus run -n 2 train.py --out ", "OMP_NUM_THREADS 1"):
        assert wanted in found
    pictures = read.all("img")
    assert "training loss (epoch)" in found
    assert "training loss (step)" in found
    assert len(pictures) == 7
    assert "training loss: 1.9 at first, 0.5 at last" in pictures[0]["alt"]


def test_whatever_a_run_is_called_stays_text(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&amp;\'"'
    folder = write_run(tmp_path / "a&b<i>", user={evil: evil}, hosts=[evil, "b"])
    (folder / "metrics.csv").write_text(f"epoch,step,loss,<b>{'x' * 3},samples_per_s\n1,20,1,2,3\n")
    text = made(folder)
    check_alone(text)
    assert "<script" not in text
    assert "<b>xxx" not in text
    assert "a&amp;b&lt;i&gt;" in text


@pytest.mark.seconds
def test_a_folder_whose_name_is_no_utf_8_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / os.fsdecode(b"f\xfcr"))
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    assert Run(run).name == r"f\udcfcr"  # of which matplotlib draws a title
    assert r"f\udcfcr" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_100_000_steps_and_many_ranks_make_a_small_page_that_keeps_the_extremes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", epochs=1, steps=10, ranks=16)
    losses = [StepLoss(i, 1, 99.0 if i == 54_321 else 1.0 + i % 7 / 10, 64) for i in range(1, 100_001)]
    (folder / "losses.csv").unlink()
    RunFiles(folder).add_losses(losses, 1)
    with open(folder / RANKS, "a") as file:
        file.writelines(window(step, ranks=16).to_line() for step in range(100, 100_001, 100))
    text = made(folder)
    read = check_alone(text)
    assert len(text.encode()) < 500 * 1024
    assert "and 99" in read.all("img")[0]["alt"]


# -- odd runs ---------------------------------------------------------------------------------------------------------


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "new", epochs=0, epochs_wanted=5, ended=False)
    found = words(check_alone(made(folder)))
    assert "There are no numbers to draw yet." in found
    assert "No epoch is done yet." in found
    assert "0 of 5 epochs" in found


def test_a_run_without_validation_times_or_events_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", valid=False)
    (folder / "ranks.jsonl").unlink()
    (folder / "events.jsonl").unlink()
    found = words(check_alone(made(folder)))
    assert "No events were recorded." in found
    assert "samples per second" in found
    assert "valid loss" not in found


def test_losses_that_are_no_numbers_are_gaps_with_a_mark(tmp_path: Path) -> None:
    read = check_alone(made(write_run(tmp_path / "run", nan_steps=range(30, 41))))
    assert "11 steps have a loss that is no number" in words(read)
    loss = svgs(made(tmp_path / "run"))[0]
    (marks,) = groups(loss, "missing")
    assert marks.count("<use") == 11
    training, validation = groups(loss, "line")
    assert training.count("M ") == 2  # before the gap, and after it
    assert validation.count('d="M ') == 2  # the line, and a dot for each epoch
    assert validation.count("<use") == 3


def test_only_losses_that_are_no_numbers(tmp_path: Path) -> None:
    read = check_alone(made(write_run(tmp_path / "run", valid=False, nan_steps=range(1, 61))))
    assert "60 steps have a loss that is no number" in words(read)


def test_a_world_that_shrank_has_gaps_where_ranks_are_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, ranks=3)
    with open(folder / RANKS, "a") as file:
        file.writelines(window(step, ranks=1, start=2).to_line() for step in (30, 40))
    found = words(check_alone(made(folder)))
    assert "rank 2" in found


def test_a_straggler_is_named(tmp_path: Path) -> None:
    found = words(check_alone(made(write_run(tmp_path / "run", slow={1: {"optimizer": 0.01}}))))
    assert "Rank 1 holds the others up" in found
    assert "most of it in optimizer" in found


def test_several_runs_are_drawn_over_each_other_with_what_differs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one" / "run", user={"lr": 0.1, "model": "cnn"})
    two = write_run(tmp_path / "two" / "run", user={"lr": 0.2, "model": "cnn"}, epochs=1, valid=False)
    read = check_alone(made(one, two))
    found = words(read)
    assert "Options that differ one/run two/run lr 0.1 0.2" in found
    assert "model cnn cnn" not in found
    assert len(read.all("img")) == 6
    assert [run.name for run in (Run(one), Run(two))] == ["run", "run"]
    assert labels_of([Run(one), Run(two)]) == ["one/run", "two/run"]


def test_curves_that_lie_on_each_other_are_told(tmp_path: Path) -> None:
    one, two, shorter = write_run(tmp_path / "1"), write_run(tmp_path / "2"), write_run(tmp_path / "3", epochs=2)
    nan = write_run(tmp_path / "4", nan_steps=range(1, 61))
    lie = "the runs' curves of the loss lie on each other."
    assert f"The losses of the steps are equal: {lie}" in words(check_alone(made(one, two)))
    assert "photinus verify: the same bits: " in words(check_alone(made(one, two)))
    losses = (two / "losses.csv").read_text()
    (two / "losses.csv").write_text(losses.replace(",0.5,", ",0.501,"))
    assert f"The losses of the steps differ by at most 0.0010: {lie}" in words(check_alone(made(one, two)))
    assert "photinus verify: different at step " in words(check_alone(made(one, two)))
    assert "photinus verify" not in words(check_alone(made(one, two, shorter)))
    (two / "losses.csv").write_text(losses.replace(",0.5,", ",0.6,"))
    for other in (two, shorter, nan):
        assert lie not in words(check_alone(made(one, other)))


def test_what_a_sentence_has_between_backticks_is_code(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    warning = {"time": 1.0, "event": "warning", "step": 3, "text": "write `a < b` & `c`"}
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(warning) + "\n")
    assert "warning: write <code>a &lt; b</code> &amp; <code>c</code> (step 3)" in made(folder)


@pytest.mark.parametrize("odd", [None, -1, math.nan, 10**30, "x", [None], {}])
@pytest.mark.parametrize("name", ["events.jsonl", "ranks.jsonl", "config.json"])
def test_whatever_stands_in_the_files_something_is_shown(
    tmp_path: Path, name: str, odd: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}  # most of what is odd changes no chart, and drawing takes longest

    def draw_once(runs: Sequence[Run], labels: Sequence[str]) -> Sequence[Chart]:
        (run,) = runs
        windows = [replace(window, time_s=0.0, samples=0, epoch=0) for window in run.windows]
        known = repr((run.losses.bins, run.epochs, windows, run.step, [event.step for event in run.starts]))
        if known not in drawn:
            drawn[known] = charts(runs, labels)
        return drawn[known]

    monkeypatch.setattr("photinus.tools.view.page.charts", draw_once)
    folder = write_run(tmp_path / "run", epochs=1)
    text = (folder / name).read_text()
    whole = [json.loads(line) for line in ([text] if name == "config.json" else text.splitlines())]
    for content in whole[: 3 if name == "events.jsonl" else 1]:  # lines of other kinds
        start = content["starts"][0] if name == "config.json" else {}
        for part in (content, start):
            for key in list(part):
                kept, part[key] = part[key], odd
                (folder / name).write_text("".join(json.dumps(each) + "\n" for each in whole))
                part[key] = kept
                run = Run(folder)
                run.refresh()
                assert page([run]).endswith("</html>\n")
                assert view(run, width=80, height=24, now_s=BEGAN_S, colour=True)


# -- drawing ----------------------------------------------------------------------------------------------------------


def drawn(folder: Path, losses: Sequence[float]) -> str:
    """The picture of the losses of a run."""
    files = RunFiles(folder)
    files.add_losses([StepLoss(step, 1, loss, 8) for step, loss in enumerate(losses, 1)], 1)
    run = Run(folder)
    run.refresh()
    return charts([run], ["run"])[0].svg


def places(text: str, name: str) -> list[tuple[float, float]]:
    """(x, y) of all corners of the first line of a class."""
    path = re.search(r' d="([^"]*)"', groups(text, name)[0])
    assert path is not None
    numbers = [float(number) for number in re.findall(r"-?[0-9.]+", path.group(1))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_all_points_lie_inside_the_picture(tmp_path: Path) -> None:
    losses = [(-1.0) ** i * 10.0**i for i in range(8)]
    for x, y in places(drawn(tmp_path, [*losses, math.nan, 3.0]), "line"):
        assert 0 <= x <= 480
        assert 0 <= y <= 270


def test_a_loss_over_orders_of_magnitude_is_drawn_over_its_logarithm(tmp_path: Path) -> None:
    def heights(name: str, values: list[float]) -> list[float]:
        (tmp_path / name).mkdir()
        return [y for _, y in places(drawn(tmp_path / name, values), "line")]

    log, linear = heights("log", [1000, 300, 10]), heights("linear", [12, 11.5, 10])
    assert log[1] - log[0] == pytest.approx((log[2] - log[0]) * math.log(1000 / 300) / math.log(100), abs=0.3)
    assert linear[1] - linear[0] == pytest.approx((linear[2] - linear[0]) / 4, abs=0.3)


def test_labels_of_an_axis_keep_their_digits(tmp_path: Path) -> None:
    assert {"0.04", "0.05", "0.06", "step 0"} <= set(re.findall(">([^<]+)</text>", drawn(tmp_path, [0.04, 0.06])))


def test_a_value_alone_between_gaps_is_a_dot(tmp_path: Path) -> None:
    (line,) = groups(drawn(tmp_path, [1.0, math.nan, 2.0, math.nan, 1.0, 3.0]), "line")
    assert line.count("<use") == 2


def test_the_band_of_a_long_curve_reaches_the_extremes(tmp_path: Path) -> None:
    losses = [2.0 + i % 2 for i in range(2000)]
    losses[777], losses[778] = 15.0, 1.0
    svg = drawn(tmp_path, losses)
    heights = [[y for _, y in places(svg, name)] for name in ("band", "line")]
    band, mean = (max(each) - min(each) for each in heights)
    assert band > 4 * mean > 0


def test_each_phase_of_a_step_is_a_layer_as_high_as_its_mean_over_ranks(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", epochs=1, slow={1: {"forward": 0.003}}))
    run.refresh()
    (chart,) = (each for each in charts([run], ["run"]) if each.title.startswith("where the time"))
    assert [label for label, _ in chart.key] == list(PHASES)
    assert dict(chart.key) == PHASE_COLOURS
    assert "forward: 2 ms in the mean." in chart.summary
    assert "All values are between 0 ms and 5 ms." in chart.summary


def test_of_many_ranks_the_slowest_have_a_line(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", ranks=8, slow={7: {"forward": 0.003}}))
    run.refresh()
    (chart,) = (
        each for each in charts([run], ["run"]) if each.title.startswith("own time of the 6 slowest of 8 ranks")
    )
    assert [label for label, _ in chart.key] == [*(f"rank {rank}" for rank in range(5)), "rank 7"]


def test_a_restart_is_a_dotted_line_with_a_name_in_the_key(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path / "run", restart_at=25))
    run.refresh()
    (loss, *_) = charts([run], ["run"])
    assert loss.key[-1] == ("restart", figures.SOFT)
    (line,) = groups(loss.svg, "restart")
    assert "stroke-dasharray" in line
    both = charts([run, run], ["a", "b"])  # of several runs nobody could tell the lines apart
    assert not any(groups(chart.svg, "restart") for chart in both)


def test_windows_put_together_keep_the_mean_of_their_steps_and_the_most_memory() -> None:
    windows = [window(10, steps=10), window(40, steps=30, slow={1: {"data": 0.0041}}), window(50, ranks=1)]
    first, second = mean_windows(windows, 1)
    assert (first.step, first.steps, first.samples) == (40, 40, 640 + 64 * 30)
    assert first.phases["data"][1] == pytest.approx(0.0001 * 0.25 + 0.0041 * 0.75)
    assert first.memory["peak"] == [340 << 20] * 2
    assert second.world_size == 1
    assert sum(second.step_s(0) for _ in PHASES) > 0


# -- for everyone -----------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrasts_are_those_of_wcag() -> None:
    style = (Path(photinus.tools.view.page.__file__).parent / "style.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w+);", style))
    for ink in ("ink", "soft", "good", "bad", "warn"):
        for ground in ("page", "card"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for colour in (*PHASE_COLOURS.values(), *RUN_COLOURS):
        assert contrast(colour, colours["card"]) >= 3.0, colour
    assert set(re.findall(r"var\(--(\w+)\)", style)) <= colours.keys()
    assert (colours["soft"], colours["rule"], colours["bad"]) == (figures.SOFT, figures.RULE, figures.BAD)


def test_pictures_use_no_other_colours(tmp_path: Path) -> None:
    text = made(write_run(tmp_path / "run", nan_steps=[7], restart_at=25))
    own = {*PHASE_COLOURS.values(), *RUN_COLOURS, figures.SOFT, figures.RULE, figures.BAD}
    assert set(re.findall(r"#[0-9a-f]{6}\b", "".join(svgs(text)))) <= {*own, "#000000"}


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_page_lies_in_the_runs_folder_or_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write_run(tmp_path / "runs" / "one"), write_run(tmp_path / "runs" / "two")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs/one"]) == 0
    assert capsys.readouterr().out.startswith("runs/one/report.html (")
    assert (one / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", "runs/one", "runs/two", "--out=both.html"]) == 0
    assert "2 training runs" in Path("both.html").read_text()
    assert main(["report", "runs/one", str(two)]) == 0
    assert Path("report.html").exists()
    capsys.readouterr()
    assert main(["report", "runs/one", "-o", "-"]) == 0
    assert capsys.readouterr().out.endswith("</html>\n")
    assert main(["report", "runs/one", "-o", "/proc/x.html"]) == 2
    error = capsys.readouterr().err
    assert error == "photinus: photinus report: /proc/x.html could not be written: No such file or directory.\n"
