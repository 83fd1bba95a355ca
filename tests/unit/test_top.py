"""`photinus top`: the picture, exactly, in wide and narrow terminals; and the terminal that it leaves as it was."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen

from photinus.cli.main import main
from photinus.runlog.run import Run
from photinus.tools.view.view import parts, sparkline, view
from tests.fork_server import REPOSITORY
from tests.made_run import BEGAN_S, write_run

SLOW = {1: {"forward": 0.003, "waiting": 0.0}, 0: {"waiting": 0.0024}}


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def seen(folder: Path, *, width: int, height: int | None = None, colour: bool = False) -> list[str]:
    run = Run(folder)
    run.refresh()
    for path in folder.iterdir():  # of a run on another host the files' times say whether it goes on
        os.utime(path, (BEGAN_S + 90, BEGAN_S + 90))
    console = Console(width=width, height=height, force_terminal=colour, highlight=False, file=io.StringIO())
    with console.capture() as printed:
        picture = view(run, width=width, height=height, now_s=BEGAN_S + 100, colour=colour)
        console.print(picture if height is None else Screen(picture))  # as rich.live puts it on the terminal
    return [text.rstrip() for text in printed.get().splitlines()]


# -- marks ------------------------------------------------------------------------------------------------------------


def test_a_sparkline_goes_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, math.nan, 6, math.inf]) == "▁×█×"
    assert sparkline([3, 3, 3]) == "▄▄▄"
    assert sparkline([math.nan]) == "×"
    assert sparkline([]) == ""


def test_a_sparkline_over_orders_of_magnitude_is_logarithmic() -> None:
    assert sparkline([1000, 100, 10, 1]) == "█▆▃▁"


def test_parts_fill_the_bar_and_nothing_of_weight_vanishes() -> None:
    assert parts([1, 1, 2], 8) == [2, 2, 4]
    assert parts([0.985, 0.005, 0.01, 0], 20) == [18, 1, 1, 0]
    assert parts([0, 0], 10) == [0, 0]
    assert sum(parts([0.3, 0.3, 0.4], 7)) == 7


def test_control_characters_of_a_run_do_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "evil\x1b[2Jname", hosts=["a\x1b]0;owned\x07", "b"])
    shown = "\n".join(seen(folder, width=80))
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


# -- the picture ------------------------------------------------------------------------------------------------------


def test_a_run_at_80_columns(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "digits", epochs=2, epochs_wanted=4, slow=SLOW, restart_at=25, ended=False, window_every=5
    )
    assert "\n".join(seen(folder, width=80)) == WIDE


def test_a_run_at_40_columns(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "digits", epochs=2, epochs_wanted=4, slow=SLOW, restart_at=25, ended=False, window_every=5
    )
    assert "\n".join(seen(folder, width=40)) == NARROW


WIDE = """\
digits  running  2 ranks on a                                           14:15:00
epoch 2 of 4  step 40 of 80  █████████████▌               50 %  about 0.4 s left
10 667 samples/s  6.00 ms a step  trained 3.0 s  1 restart

loss (step)  0.6667  lowest 0.6667     ██▇▇▆▆▆▅▅▅▅▄▄▄▄▄▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▁▁▁▁▁▁▁▁
valid loss   0.7333  0.7333 to 1.1000  █▁
accuracy     0.7500  0.5000 to 0.7500  ▁█

a step of 5.80 ms, mean of 15 steps and 2 ranks
dfffffffffffffffffffffffffffbbbbbbbbbbbbbbbbbbbbbbbbbbbbwwwwwwwwwwwwwwwwwoooo···
d data 2 %   f forward 34 %   b backward 34 %   w waiting 21 %   o optimizer 5 %
· other 3 %

rank   pid  own time   waiting                    memory (peak)
   0  4711   3.60 ms   2.40 ms  ██████████▎       300 MiB (340 MiB)
   1  4712   5.60 ms      0 us  ████████████████  300 MiB (340 MiB)
rank 1 holds the others up: 2.00 ms a step, in forward

14:13:20  started: 2 ranks on a
14:13:20  checkpoint of step 20, 0.1 s
14:13:20  resumed from step 25: 2 ranks on a, restart 1 of the launcher
14:13:20  checkpoint of step 40, 0.1 s"""

NARROW = """\
digits  running  2 ranks on a   14:15:00
epoch 2 of 4  step 40 of 80
████████          50 %  about 0.4 s left
10 667 samples/s  6.00 ms a step
trained 3.0 s  1 restart

loss (step)  0.6667  █▇▆▆▅▅▄▄▃▃▃▂▂▂▂▁▁▁▁
valid loss   0.7333  █▁
accuracy     0.7500  ▁█

a step of 5.80 ms, mean of 15 steps
dffffffffffffffbbbbbbbbbbbbbbwwwwwwwwoo·
d data 2 %   f forward 34 %
b backward 34 %   w waiting 21 %
o optimizer 5 %   · other 3 %

rank  own time   waiting  memory
   0   3.60 ms   2.40 ms  300 MiB
   1   5.60 ms      0 us  300 MiB
rank 1 holds the others up: 2.00 ms a
step, in forward

14:13:20  started: 2 ranks on a
14:13:20  checkpoint of step 20, 0.1 s
14:13:20  resumed from step 25: 2 ranks…
14:13:20  checkpoint of step 40, 0.1 s"""


@pytest.mark.parametrize("width", [10, 20, 33, 40, 59, 60, 69, 70, 80, 132, 250])
@pytest.mark.parametrize("ranks", [1, 2, 40])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, ranks: int) -> None:
    hosts = [f"a-host-with-a-long-name-{rank // 8}" for rank in range(ranks)]
    folder = write_run(tmp_path / ("n" * 60), ranks=ranks, slow=SLOW, nan_steps=[3], hosts=hosts)
    for colour in (False, True):
        for text in seen(folder, width=width, colour=colour):
            assert cell_len(re.sub(r"\x1b\[[0-9;]*m", "", text)) <= width


@pytest.mark.parametrize("height", [1, 5, 12, 24, 50])
def test_the_picture_fits_the_terminals_height_and_keeps_the_slowest_ranks(tmp_path: Path, height: int) -> None:
    folder = write_run(tmp_path / "run", ranks=64, slow={37: {"data": 0.1}})
    lines = seen(folder, width=80, height=height)
    assert len(lines) <= height
    if height >= 24:
        assert any(re.match(r" +37 ", text) for text in lines)
        assert any("rank 37 holds the others up" in text and "in data" in text for text in lines)
        assert any("ranks more, none of them slower" in text for text in lines)


def test_a_run_that_has_not_begun_and_one_without_times_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, valid=False)
    for name in ("ranks.jsonl", "events.jsonl"):
        (folder / name).unlink()
    assert any("12 345 samples/s" in text for text in seen(folder, width=80))
    (folder / "losses.csv").unlink()
    (folder / "metrics.csv").unlink()
    assert any("no step done yet" in text for text in seen(folder, width=80))


def test_pids_are_those_of_the_newest_start_by_host_and_only_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", hosts=["a", "b"], ended=False)
    rows = [line.split() for line in seen(folder, width=80)]
    assert [row[:3] for row in rows if row[:1] in (["rank"], ["0"], ["1"])] == [
        ["rank", "host", "pid"],
        ["0", "a", "4711"],
        ["1", "b", "4712"],
    ]
    with open(folder / "events.jsonl", "a") as file:
        facts = '"world_size": 2, "hosts": ["a", "b"], "pids": [51, "5\\u001b2"], "boot": "another boot"'
        file.write(f'{{"time": {BEGAN_S + 80}, "event": "start", "step": 60, {facts}}}\n')
    (folder / "ranks.jsonl").unlink()  # of the first steps there are no times yet
    rows = [line.split() for line in seen(folder, width=80)]
    assert [row for row in rows if row[:1] in (["rank"], ["0"], ["1"])] == [
        ["rank", "host", "pid"],
        ["0", "a", "51"],
        ["1", "b", "5", "2"],
    ]
    with open(folder / "events.jsonl", "a") as file:
        file.write(f'{{"time": {BEGAN_S + 81}, "event": "end", "step": 60, "how": "left"}}\n')
    assert not any("51" in line.split() for line in seen(folder, width=80))  # the number may be another process's


def test_losses_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    shown = "\n".join(seen(write_run(tmp_path / "run", nan_steps=[7, 9]), width=80))
    assert "2 steps' losses were no number (×), the last at step 9" in shown


# -- the command ------------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_is_printed_once_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2
    assert "there is no run here" in capsys.readouterr().err
    write_run(tmp_path / "runs" / "one")
    for words in ([], ["runs"], ["runs/one/losses.csv"], ["--once", "runs/one"]):
        assert main(["top", *words]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("one  finished  2 ranks on a")
        assert shown.out.endswith(f"\nstarted with: photinus run -n 2 train.py --out {tmp_path / 'runs' / 'one'}\n")
        assert "\x1b" not in shown.out


class Watched:
    """`photinus top` on a terminal of its own."""

    def __init__(self, folder: Path, *, columns: int = 80, lines: int = 24, **own: str) -> None:
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self._slave)
        environ = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", **own}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "photinus", "top", str(folder), "--interval", "0.05"],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environ,
            start_new_session=True,
        )
        self.shown = ""

    def read_until(self, wanted: str, timeout_s: float = 20.0) -> str:
        deadline = time.monotonic() + timeout_s
        while wanted not in self.shown:
            assert time.monotonic() < deadline, f"{wanted!r} did not come:\n{self.shown}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536).decode()
        return self.shown

    def end(self) -> int:
        deadline = time.monotonic() + 10
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.05)[0]:
                self.shown += os.read(self.master, 65536).decode()
        assert self.process.poll() is not None, "it did not end"
        while select.select([self.master], [], [], 0.05)[0]:
            self.shown += os.read(self.master, 65536).decode()
        assert termios.tcgetattr(self._slave) == self.before
        assert self.shown.rindex("\x1b[?25h") > self.shown.rindex("\x1b[?25l")  # the cursor is back
        assert self.shown.rindex("\x1b[?1049l") > self.shown.rindex("\x1b[?1049h")  # and what stood there before
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self._slave)


def test_where_there_is_only_ascii_it_draws_with_question_marks(tmp_path: Path) -> None:
    top = Watched(write_run(tmp_path / "run"), PYTHONIOENCODING="ascii")
    try:
        assert "??????" in top.read_until("finished at step")
        os.write(top.master, b"q")
        assert top.end() == 0
        assert "\\u" not in top.shown
    finally:
        top.close()


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (lambda top: os.write(top.master, b"q"), 0),
        (lambda top: os.kill(top.process.pid, signal.SIGINT), 0),
        (lambda top: os.kill(top.process.pid, signal.SIGTERM), 143),
    ],
    ids=["q", "Ctrl-C", "SIGTERM"],
)
def test_it_follows_the_run_and_gives_the_terminal_back(
    tmp_path: Path, leave: Callable[[Watched], object], code: int
) -> None:
    folder = write_run(tmp_path / "run", epochs=1, ended=False)
    top = Watched(folder)
    try:
        top.read_until("step 20 of 60")
        with open(folder / "losses.csv", "a") as file:
            file.write("21,2,0.5,1\n22,2,0.25,1\n23,2,0.1")  # the last one is not whole yet
        shown = top.read_until("step 22 of 60")
        # A line that is as wide as the terminal ends with the clock, whose last digit stays.
        assert re.search(r"run  running .* \d\d:\d\d:\d\d\r+\nepoch", re.sub(r"\x1b\[\d*m", "", shown))
        leave(top)
        assert top.end() == code
    finally:
        top.close()


def test_the_picture_of_the_documentation_has_the_labels_of_the_program(tmp_path: Path) -> None:
    """If it does not, draw it again with tools/draw_top.py."""
    words = re.sub(r"<[^>]*>", " ", (REPOSITORY / "docs/images/top.svg").read_text()).replace("&#160;", " ").split()
    shown = " ".join(" ".join(seen(write_run(tmp_path / "run", ended=False), width=92)).split())
    for label in ("running 2 ranks on", "loss (step)", "a step of", "rank pid own time waiting memory (peak)"):
        assert label in shown
        assert label in " ".join(words)
