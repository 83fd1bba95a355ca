"""Workers' output in files: what goes where, byte for byte, and what happens when a file cannot be written."""

from __future__ import annotations

import itertools
import os
import select
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from photinus.cli.flags import parse_run
from photinus.errors import UsageError
from photinus.job.spec import LogSpec
from photinus.run.local.logs import BOTH, Logs
from photinus.run.local.output import Output

OUT, ERR, NONE = frozenset({"out"}), frozenset({"err"}), frozenset[str]()


def plan(*words: str) -> Logs:
    return Logs(parse_run([*words, "train.py"]).spec.logs)


def opened(*words: str) -> Logs:
    logs = plan(*words)
    logs.open()
    return logs


@pytest.mark.parametrize(
    ("words", "filed", "shown"),
    [
        ((), NONE, BOTH),
        (("--log-dir", "logs"), BOTH, BOTH),  # torchrun writes nothing here
        (("--log-dir", "logs", "--tee", "0"), NONE, BOTH),
        (("--redirects", "3"), BOTH, NONE),
        (("--log_dir=logs", "--redirects", "1"), OUT, ERR),
        (("-r", "2"), ERR, OUT),
        (("--tee", "3"), BOTH, BOTH),
        (("-t", "1"), OUT, BOTH),
        (("-r", "3", "-t", "2"), BOTH, ERR),  # as in torchrun: what is teed is shown, redirected or not
        (("--local-ranks-filter", "0,2"), NONE, NONE),
        (("--local_ranks_filter", "1", "-r", "2"), ERR, OUT),
        (("--tee", "3", "--local-ranks-filter", "0"), BOTH, NONE),
        (("--tee", "1:3"), BOTH, BOTH),
        (("--redirects", "0:3"), NONE, BOTH),  # others than those that are named: as without the flag
        (("--redirects", "0:3,1:1", "--tee", "1:2"), BOTH, ERR),
    ],
)
def test_the_flags_say_what_of_local_rank_1_goes_where(
    words: tuple[str, ...], filed: frozenset[str], shown: frozenset[str]
) -> None:
    found = plan(*words)
    assert (found.file_streams(1), found.terminal_streams(1)) == (filed, shown)


@pytest.mark.parametrize("shown_ranks", ["", "1", "0,2"])
def test_the_flags_mean_what_they_mean_to_torchrun(shown_ranks: str, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std

    filtered = set(map(int, shown_ranks.split(","))) if shown_ranks else None
    choices = ("0", "1", "2", "3", "0:3,1:1", "2:2")
    for redirects, tee in itertools.product(choices, choices):
        words = ["--log-dir", str(tmp_path), "--redirects", redirects, "--tee", tee]
        ours = plan(*words, *(["--local-ranks-filter", shown_ranks] if shown_ranks else []))
        specs = DefaultLogsSpecs(str(tmp_path), Std.from_str(redirects), Std.from_str(tee), filtered)
        theirs = specs.reify({rank: {} for rank in range(3)})
        for rank in range(3):
            streams = {"out": (theirs.stdouts, theirs.tee_stdouts), "err": (theirs.stderrs, theirs.tee_stderrs)}
            filed = {name for name, (to, _) in streams.items() if to[rank] not in ("", os.devnull)}
            shown = {name for name, (to, teed) in streams.items() if to[rank] == "" or rank in teed}
            assert (ours.file_streams(rank), ours.terminal_streams(rank)) == (filed, shown), (words, rank)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tee", "0:3,4:1"), r"--tee names local rank 4, but this host runs local ranks 0 to 1\."),
        (("-r", "2:1"), r"--redirects names local rank 2"),
        (("--local-ranks-filter", "7"), r"--local-ranks-filter names local rank 7"),
    ],
)
def test_a_worker_that_this_host_does_not_have_is_named(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        plan(*words).check(2)
    plan(*words).check(8)


def test_files_lie_where_torchrun_puts_them_by_rank_of_the_job(tmp_path: Path) -> None:
    logs = opened("--log-dir", str(tmp_path / "new" / "logs"), "--tee", "0:3,1:2")
    folder = tmp_path / "new" / "logs" / "my_job_1"
    assert logs.folder("my/job 1") == folder
    assert logs.files("my/job 1", 2, rank=4, local_rank=0) == {
        "out": folder / "attempt_2" / "4" / "stdout.log",
        "err": folder / "attempt_2" / "4" / "stderr.log",
    }
    assert sorted(logs.files("job", 0, rank=5, local_rank=1)) == ["err"]
    assert logs.files("job", 0, rank=6, local_rank=2) == {}
    assert list((tmp_path / "new" / "logs").iterdir()) == []  # the probe is gone


def test_without_a_folder_redirected_output_has_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = opened("--redirects", "3").base
    assert base is not None
    assert base.parent == tmp_path
    assert opened("--local-ranks-filter", "0").base is None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--log-dir .*file: cannot write there: (Not a directory|File exists)"):
        opened("--log-dir", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot write there: .* Give another folder, or remove the flag"):
        opened("--log-dir", "/proc/nothing")


class Launcher:
    """An `Output` over pipes, or over one terminal, whose shown bytes are collected while it runs."""

    def __init__(self, folder: Path, *words: str, terminal: bool = False) -> None:
        self.folder = folder
        if terminal:
            self._reads, out = os.openpty()
            tty.setraw(out)
            self.ends = [out, out]
        else:
            self._reads, out = os.pipe()
            self.ends = [out, os.dup(out)]
        logs = plan("--log-dir", str(folder), *words)
        logs.base = folder.parent
        self.output = Output(logs, stdout=self.ends[0], stderr=self.ends[1])
        self.output._log_folder = folder
        self.output.begin_attempt(0, folder.name)
        self.shown = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while select.select([self._reads], [], [], 20)[0]:
            try:
                piece = os.read(self._reads, 65536)
            except OSError:  # EIO: the terminal's last writer has gone
                return
            if not piece:
                return
            self.shown += piece

    def close(self) -> None:
        self.output.close()
        for end in set(self.ends):
            os.close(end)
        self._reader.join(20)
        os.close(self._reads)

    def file(self, rank: int, name: str, attempt: int = 0) -> bytes:
        return (self.folder / f"attempt_{attempt}" / str(rank) / f"{name}.log").read_bytes()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[list[Launcher]]:
    made: list[Launcher] = []
    yield made
    for each in made:
        each.close()


def write_and_close(end: int | None, *pieces: bytes) -> None:
    assert end is not None
    for piece in pieces:
        os.write(end, piece)
    os.close(end)


BAR = b"\r 10%|#   |\r 50%|##  |\x1b[32mgreen\x1b[0m\r100%|####|\nafter\n"


def test_a_file_has_every_byte_and_the_terminal_what_it_would_have_had(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    for rank in (0, 1):
        out, err = launcher.output.ends_for(rank, rank)
        write_and_close(out, BAR, b"no end")
        write_and_close(err, b"oops \xff\n")
        launcher.output.drain(20)
    launcher.close()
    for rank in (0, 1):
        assert (launcher.file(rank, "stdout"), launcher.file(rank, "stderr")) == (BAR + b"no end", b"oops \xff\n")
    rank_0, _, rank_1 = launcher.shown.partition(b"[1] ")
    assert rank_0.replace(b"oops \xff\n", b"") == BAR + b"no end"  # as it came, the two streams in either order
    assert rank_0.count(b"oops \xff\n") == 1
    shown = [line.removeprefix(b"[1] ") for line in rank_1.splitlines()]
    assert sorted(shown) == sorted([b"100%|####|", b"after", b"no end", b"oops \xff"])


def test_redirected_output_is_in_the_file_only_and_a_filtered_rank_is_not_shown(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "--redirects", "1", "--local-ranks-filter", "1")
    for rank in (0, 1):
        out, err = launcher.output.ends_for(rank, rank)
        write_and_close(out, b"out\n")
        write_and_close(err, b"err\n")
    launcher.output.drain(20)
    launcher.close()
    assert launcher.shown == b"[1] err\n"
    assert (launcher.file(0, "stdout"), launcher.file(1, "stdout")) == (b"out\n", b"out\n")
    assert not (tmp_path / "attempt_0" / "1" / "stderr.log").exists()
    assert launcher.output.last_lines(0) != ()  # kept for the report all the same


def test_rank_0_writes_into_a_pipe_while_it_is_logged(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, terminal=True)
    out, err = launcher.output.ends_for(0, 0)
    assert out is not None
    assert err is not None
    assert not os.isatty(out)
    os.write(out, BAR)
    os.close(out)
    os.close(err)
    launcher.output.drain(20)
    launcher.close()
    assert launcher.shown == BAR  # passed on as it is
    assert launcher.file(0, "stdout") == BAR


def test_a_pipe_full_of_words_of_a_killed_worker_is_emptied_into_the_file(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "--redirects", "3")
    out, err = launcher.output.ends_for(2, 2)
    assert out is not None
    assert err is not None
    os.write(out, b"x" * 60_000)
    launcher.close()  # somebody still holds the ends open: what is in them counts
    os.close(out)
    os.close(err)
    assert launcher.file(2, "stdout") == b"x" * 60_000


def test_a_full_disk_is_told_once_and_what_does_not_fit_is_shown(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "--redirects", "3")
    for rank in (1, 2):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").symlink_to("/dev/full")
        out, err = launcher.output.ends_for(rank, rank)
        write_and_close(out, b"first\n")
        write_and_close(err, b"fits\n")
        launcher.output.drain(20)
    launcher.close()
    shown = launcher.shown.decode()
    assert shown.count(": No space left on device. Training continues") == 1
    assert "[1] first\n" in shown
    assert "[2] first\n" in shown
    assert launcher.file(1, "stderr") == b"fits\n"
    assert "fits" not in shown


def test_the_last_lines_are_kept_without_colours_and_earlier_states_of_bars(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    out, err = launcher.output.ends_for(3, 3)
    write_and_close(out, b"".join(b"line %d\n" % number for number in range(30)), b"\n", BAR, b"end " + b"x" * 1000)
    os.close(err or 0)
    launcher.output.drain(20)
    kept = launcher.output.last_lines(3)
    assert kept[:-3] == tuple(f"line {number}" for number in range(23, 30))
    assert kept[-3:-1] == ("100%|####|", "after")
    assert kept[-1].startswith("end xxx")
    assert len(kept[-1]) == 200
    launcher.output.begin_attempt(1, tmp_path.name)
    assert launcher.output.last_lines(3) == ()
    launcher.close()


def test_words_of_the_launcher_end_the_file_that_one_looks_into_first(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path)
    launcher.output.begin_attempt(2, tmp_path.name)
    out, err = launcher.output.ends_for(1, 1)
    write_and_close(out)
    write_and_close(err, b"warning\n")
    launcher.output.drain(20)
    assert launcher.output.log_of(1) == tmp_path / "attempt_2" / "1" / "stderr.log"
    launcher.output.add_to_log(1, "Traceback\n")
    launcher.output.add_to_log(9, "not here\n")
    launcher.close()
    assert launcher.file(1, "stderr", attempt=2) == b"warning\nTraceback\n"


def test_flags_that_say_nothing_change_nothing() -> None:
    logs = Logs(LogSpec())
    logs.open()
    assert not logs.writes
    assert logs.base is None
    assert (logs.file_streams(0), logs.terminal_streams(0)) == (NONE, BOTH)
