"""The workers' lines on the launcher's terminal: whole, marked, in order."""

from __future__ import annotations

import fcntl
import os
import select
import threading

import pytest

from photinus.run.local.output import Output


class Pipes:
    """A stdout and a stderr that can be read back."""

    def __init__(self, *, same: bool) -> None:
        self.read_out, self.out = os.pipe()
        self.read_err, self.err = (self.read_out, os.dup(self.out)) if same else os.pipe()
        self.gives_up = False
        self.output = Output(gives_up=lambda: self.gives_up, stdout=self.out, stderr=self.err)

    def finish(self) -> tuple[str, str]:
        self.output.close()
        os.close(self.out)
        os.close(self.err)
        texts = []
        for end in {self.read_out: None, self.read_err: None}:
            with os.fdopen(end, "rb") as file:
                texts.append(file.read().decode())
        return texts[0], texts[-1]


@pytest.fixture
def apart():
    return Pipes(same=False)


@pytest.fixture
def together():
    return Pipes(same=True)


def write_and_close(end: int, *pieces: str) -> None:
    for piece in pieces:
        os.write(end, piece.encode())
    os.close(end)


def test_lines_are_marked_with_the_rank_and_keep_their_stream(apart):
    out, err = apart.output.ends_for(3, 3)
    write_and_close(out, "one\ntwo\n")
    write_and_close(err, "oops\n")
    apart.output.drain(10)
    assert apart.finish() == ("[3] one\n[3] two\n", "[3] oops\n")


def test_a_line_written_in_pieces_comes_out_whole_and_the_last_without_its_end_too(apart):
    out, err = apart.output.ends_for(1, 1)
    os.close(err)
    write_and_close(out, "be", "gin", "ning\n", "\n", "end")
    apart.output.drain(10)
    assert apart.finish()[0] == "[1] beginning\n[1] \n[1] end\n"


def test_both_streams_keep_their_order_when_they_go_to_the_same_place(together):
    out, err = together.output.ends_for(1, 1)
    for number in range(50):
        os.write(out if number % 2 else err, f"line {number}\n".encode())
    os.close(out)
    os.close(err)
    together.output.drain(10)
    assert together.finish()[0] == "".join(f"[1] line {number}\n" for number in range(50))


def test_a_reader_that_does_not_go_on_holds_up_neither_messages_nor_who_wants_to_leave(apart):
    out, err = apart.output.ends_for(1, 1)
    os.close(err)
    writer = threading.Thread(target=lambda: write_and_close(out, *["a line of some length\n"] * 20_000), daemon=True)
    writer.start()
    writer.join(1)
    assert writer.is_alive()  # nobody reads
    apart.output.say("photinus: still here\n")
    assert os.read(apart.read_err, 100) == b"photinus: still here\n"
    apart.gives_up = True
    closing = threading.Thread(target=apart.output.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    os.close(apart.read_out)  # now the thread that writes does not wait, and ends before other pipes get these numbers
    os.close(apart.read_err)
    apart.output._thread.join(10)
    os.close(apart.out)
    os.close(apart.err)


def test_a_progress_bar_is_shown_in_its_last_state_only(apart):
    out, err = apart.output.ends_for(1, 1)
    os.close(out)
    write_and_close(err, "\r 10%", "\r 50%", "\r100%\nnext\r\n", "\rbar that was cut")
    apart.output.drain(10)
    assert apart.finish()[1] == "[1] 100%\n[1] next\n[1] bar that was cut\n"


@pytest.mark.parametrize("states", [1, 2, 3, 4])
def test_a_bar_that_ends_each_state_with_a_return_keeps_its_last_one(apart, states):
    out, err = apart.output.ends_for(1, 1)
    os.close(out)
    bar = "".join(f"{state}%\r" for state in range(states))
    write_and_close(err, bar, bar)
    apart.output.drain(10)
    assert apart.finish()[1] == f"[1] {states - 1}%\n"


def test_an_endless_line_is_given_out_in_parts(apart):
    received = []
    reader = threading.Thread(target=lambda: received.append(os.fdopen(apart.read_out, "rb").read()))
    reader.start()
    out, err = apart.output.ends_for(1, 1)
    os.close(err)
    for _ in range(40):
        os.write(out, b"x" * 4096)
    os.close(out)
    apart.output.drain(10)
    apart.output.close()
    os.close(apart.out)
    os.close(apart.err)
    reader.join(10)
    os.close(apart.read_err)
    assert received[0].count(b"x") == 40 * 4096
    assert received[0].count(b"\n") >= 2


def test_lines_of_many_ranks_are_never_mixed(apart):
    received = []
    reader = threading.Thread(target=lambda: received.append(os.fdopen(apart.read_out, "rb").read().decode()))
    reader.start()

    def chatter(rank: int, end: int) -> None:
        write_and_close(end, *(f"{rank}:{'abc' * 30}\n" for _ in range(300)))

    threads = []
    for rank in range(1, 5):
        out, err = apart.output.ends_for(rank, rank)
        os.close(err)
        threads.append(threading.Thread(target=chatter, args=(rank, out)))
        threads[-1].start()
    for thread in threads:
        thread.join(10)
    apart.output.drain(10)
    apart.output.close()
    os.close(apart.out)
    os.close(apart.err)
    reader.join(10)
    os.close(apart.read_err)
    lines = received[0].splitlines()
    assert len(lines) == 4 * 300
    assert all(line == f"[{line[1]}] {line[1]}:{'abc' * 30}" for line in lines)


def test_a_reader_that_has_gone_does_not_stop_the_workers():
    reading, writing = os.pipe()
    os.close(reading)
    output = Output(stdout=writing, stderr=writing)
    out, err = output.ends_for(1, 1)
    os.close(err)
    for _ in range(100):
        os.write(out, b"y" * 4000 + b"\n")  # would block for ever if nobody emptied the pipe
    os.close(out)
    output.drain(10)
    output.say("and the launcher's words do no harm either\n")
    output.close()
    os.close(writing)


def test_of_a_pipe_that_somebody_keeps_open_all_is_shown_that_was_written_before_the_end(tmp_path):
    with open(tmp_path / "shown", "ab") as target:
        output = Output(stdout=target.fileno(), stderr=target.fileno())
        out, err = output.ends_for(1, 1)
        fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 1 << 20)
        lock = output._locks[target.fileno()]
        lock.acquire()  # so the thread that carries lines comes to them when the end was announced
        os.write(out, b"line\n" * 60_000 + b"end")
        threading.Timer(0.1, lock.release).start()
        output.close()
        os.close(out)
        os.close(err)
    assert (tmp_path / "shown").read_text() == "[1] line\n" * 60_000 + "[1] end\n"


def test_two_streams_to_one_file_are_written_in_turn(tmp_path):
    for same in (True, False):
        with open(tmp_path / "out", "ab") as out, open(tmp_path / ("out" if same else "err"), "ab") as err:
            output = Output(stdout=out.fileno(), stderr=err.fileno())
            assert (output._locks[out.fileno()] is output._locks[err.fileno()]) == same
            output.close()


@pytest.mark.parametrize("why", ["the disk is full", "the terminal was closed"])
def test_workers_go_on_when_their_lines_cannot_be_shown_because(why, capfd, monkeypatch):
    monkeypatch.setattr("photinus.run.local.output._full", set())
    if why == "the disk is full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        controller, target = os.openpty()
        os.close(controller)
    output = Output(stdout=target, stderr=target)
    out, err = output.ends_for(1, 1)
    os.close(err)
    os.set_blocking(out, False)
    line = b"x" * 1023 + b"\n"
    for _ in range(1000):  # far more than a pipe holds
        assert select.select([], [out], [], 10)[1], "nobody reads what the worker prints"
        os.write(out, line)
    os.close(out)
    output.drain(10)
    assert output.last_lines(1) == ("x" * 200,) * 10
    output.close()
    os.close(target)
    warning = "photinus: warning: cannot write the output of workers: No space left on device. Training continues; "
    assert capfd.readouterr().err == f"{warning}that output is lost.\n" * (why == "the disk is full")


def read_until(terminal: int, end: bytes) -> bytes:
    """What a terminal shows up to `end`: it may hand out one write in several parts."""
    shown = b""
    while not shown.endswith(end):
        assert select.select([terminal], [], [], 10)[0], shown
        shown += os.read(terminal, 1000)
    return shown


def test_on_a_terminal_a_progress_bar_makes_room_and_an_alarm_is_red(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = os.openpty()
    output = Output(stdout=terminal, stderr=terminal)
    output.say("\nhead\ntail\n", alarm=True)
    assert read_until(controller, b"tail\r\n") == b"\r\x1b[K\r\n\x1b[1;31mhead\x1b[0m\r\ntail\r\n"
    monkeypatch.setenv("NO_COLOR", "1")
    output.say("head\n", alarm=True)
    assert read_until(controller, b"head\r\n") == b"\r\x1b[Khead\r\n"
    output.close()
    os.close(controller)
    os.close(terminal)
