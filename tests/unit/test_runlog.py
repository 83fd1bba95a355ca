"""The files of a run's folder: read while they are written, damaged, replaced; and what is made of their numbers."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from photinus.cli.main import main
from photinus.runlog.curve import Curve
from photinus.runlog.events import EVENTS, append_event, is_alive, read_event, read_events, this_process
from photinus.runlog.files import Tail
from photinus.runlog.run import FILES, Run, find_runs, newest_run
from photinus.runlog.stragglers import limit, shares, slow_links, stragglers
from photinus.runlog.tables import LOSSES, METRICS, PHASES, RANKS, RunFiles, Window, drop_windows_after, read_window
from photinus.runlog.units import step_time
from photinus.tools.view.event_text import describe_event
from tests.made_run import BEGAN_S, put_in_the_way, window, write_run


def read(folder: Path) -> Run:
    run = Run(folder)
    run.refresh()
    return run


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["folder", "FIFO", "device", "bytes"])
def test_a_file_that_is_not_plain_is_named_and_neither_waited_for_nor_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    folder = write_run(tmp_path / "run")
    put_in_the_way(folder / name, kind)
    for words in (["top", "--once", str(folder)], ["report", str(folder)]):
        assert main(words) == 2
        assert re.search(rf"PhotinusError: {folder / name} (is|has) .*{kind}.*\. Move it away", capfd.readouterr().err)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e-320", "9" * 400, "inf", "nan"])
def test_numbers_that_no_axis_can_have_are_shown_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], value: str
) -> None:
    folder = write_run(tmp_path / "run", epochs=2, steps=4)
    for name in (LOSSES, METRICS):
        head, *rows = (folder / name).read_text().splitlines()
        changed = [",".join(value if i == k % 4 else c for i, c in enumerate(r.split(","))) for k, r in enumerate(rows)]
        (folder / name).write_text("\n".join([head, *changed, *rows]) + "\n")
    assert main(["report", str(folder)]) == main(["top", "--once", str(folder)]) == 0
    assert "Traceback" not in capfd.readouterr().err


# -- files that grow --------------------------------------------------------------------------------------------------


def test_lines_come_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.read() == (False, [])
    path.write_text("one\ntw")
    assert tail.read() == (False, ["one"])
    assert tail.read() == (False, [])
    with open(path, "a") as file:
        file.write("o\nthree\n")
    assert tail.read() == (False, ["two", "three"])


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path, in_place: bool) -> None:
    path = tmp_path / "file"
    path.write_text("1\n2\n3\n")
    tail = Tail(path)
    tail.read()
    if in_place:
        path.write_text("1\n2\n4\n5\n")  # longer than before, so its length tells nothing
    else:
        (tmp_path / "new").write_text("1\n2\n4\n5\n")
        os.replace(tmp_path / "new", path)
    assert tail.read() == (True, ["1", "2", "4", "5"])
    path.unlink()
    assert tail.read() == (True, [])


# -- curves -----------------------------------------------------------------------------------------------------------


@given(some.lists(some.floats(width=32), max_size=200), some.integers(2, 20))
def test_a_curve_of_few_bins_loses_no_extreme_and_no_point(values: list[float], most: int) -> None:
    curve = Curve(most, enumerate(values))
    finite = [value for value in values if math.isfinite(value)]
    assert len(curve.bins) <= most
    assert curve.count == len(values)
    assert curve.missing == len(values) - len(finite)
    if finite:
        assert (curve.low, curve.high) == (min(finite), max(finite))
        total = sum(each.total for each in curve.bins)
        assert total == pytest.approx(math.fsum(finite), rel=1e-6, abs=1e-6 * sum(map(abs, finite)))
    else:
        assert math.isnan(curve.low)
    places = [place for each in curve.bins for place in (each.first, each.last)]
    assert places == sorted(places)
    if len(values) > most:
        assert len(curve.bins) >= most // 2


def test_a_bin_has_its_place_and_counts_what_was_missing() -> None:
    curve = Curve(2, [(1, 4.0), (2, math.nan), (3, 1.0), (4, math.inf), (5, math.nan)])
    first, second = curve.bins
    assert (first.first, first.last, first.count, first.missing, first.mean) == (1, 4, 4, 2, 2.5)
    assert (second.count, second.missing, math.isnan(second.mean)) == (1, 1, True)


def test_means_are_of_neighbours() -> None:
    assert Curve(100, enumerate([1.0, 3.0, 5.0, 7.0])).means(2) == [2.0, 6.0]
    assert Curve(100).means(5) == []


# -- windows and events -----------------------------------------------------------------------------------------------


def test_a_window_comes_back_from_its_line_to_the_microsecond() -> None:
    written = window(20, slow={1: {"forward": 0.0123456}})
    back = read_window(written.to_line())
    assert back is not None
    assert (back.step, back.steps, back.samples, back.world_size) == (20, 10, 640, 2)
    assert back.phases["forward"] == [0.001, 0.012346]
    assert back.memory == written.memory
    assert back.samples_per_s == pytest.approx(640 / (0.004 * 10))


@pytest.mark.parametrize("line", ["", "{", "[]", "7", '{"time": 1}', window(10).to_line()[:-20], "null"])
def test_a_damaged_line_is_no_window(line: str) -> None:
    assert read_window(line) is None


def test_a_window_whose_ranks_do_not_fit_each_other_is_none() -> None:
    content = json.loads(window(10).to_line())
    content["data_us"] = [1, 2, 3]
    assert read_window(json.dumps(content)) is None


def test_a_run_that_goes_on_drops_the_windows_after_its_step(tmp_path: Path) -> None:
    lines = [window(step).to_line() for step in (10, 20, 30)]
    (tmp_path / RANKS).write_text("".join(lines) + lines[0][:30])
    drop_windows_after(tmp_path, 20)
    assert (tmp_path / RANKS).read_text() == "".join(lines[:2])


def test_events_are_added_one_line_each_after_what_a_killed_process_wrote_half_of(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0, hosts=["a"])
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"time": 1, "event": "check')
    append_event(tmp_path, "error", 5, text="x" * 5000)
    start, error = read_events(tmp_path)
    assert (start.kind, start.facts["hosts"]) == ("start", ["a"])
    assert (error.kind, error.step, len(error.facts["text"])) == ("error", 5, 2000)
    assert abs(error.time_s - time.time()) < 60


@pytest.mark.parametrize("line", ["", "{}", '{"time": "x", "event": "a", "step": 1}', "[1]"])
def test_a_damaged_line_is_no_event(line: str) -> None:
    assert read_event(line) is None


# -- stragglers -------------------------------------------------------------------------------------------------------


def test_the_slow_one_of_two_ranks_is_named_with_its_phase() -> None:
    windows = [window(10, slow={1: {"forward": 0.004, "waiting": 0.0}, 0: {"waiting": 0.003}})]
    (slow,) = stragglers(windows)
    assert (slow.rank, slow.phase) == (1, "forward")
    assert slow.excess_s == pytest.approx(0.003)
    assert slow.ratio == pytest.approx(0.0066 / 0.0036)


def test_ranks_that_wait_for_a_slow_one_are_no_stragglers() -> None:
    slow = {rank: {"waiting": 0.05} for rank in (0, 1, 3)} | {2: {"data": 0.05}}
    (found,) = stragglers([window(10, ranks=4, slow=slow)])
    assert (found.rank, found.phase) == (2, "data")


def test_equal_ranks_and_one_rank_alone_hold_nobody_up() -> None:
    assert stragglers([window(10, ranks=4)]) == []
    assert stragglers([window(10, ranks=1, slow={0: {"data": 1.0}})]) == []
    assert stragglers([]) == []


def test_a_difference_of_microseconds_is_noise() -> None:
    tiny = dict.fromkeys(PHASES, 1e-06)
    assert stragglers([window(10, slow={0: tiny, 1: {**tiny, "forward": 2e-4}})]) == []


def test_one_long_hiccup_makes_no_straggler_and_a_lasting_one_does() -> None:
    hiccup = [window(step, slow={1: {"data": 0.5}} if step == 30 else None) for step in range(10, 101, 10)]
    assert shares(hiccup)[1].ratio > 10
    assert stragglers(hiccup) == []
    lasting = [window(step, slow={1: {"data": 0.5}} if step > 30 else None) for step in range(10, 101, 10)]
    assert [slow.rank for slow in stragglers(lasting)] == [1]


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (
            {"waiting": 0.01},
            r"The exchange limits the speed: ranks wait for each other for \d+ % of a step.*larger batch",
        ),
        ({"data": 0.01}, "Data limits the speed"),
        ({"forward": 0.1}, r"Computing limits the speed: it takes \d+ % of a step\."),
    ],
)
def test_what_limits_a_run_is_named_with_what_would_help(times: dict[str, float], sentence: str) -> None:
    assert re.match(sentence, limit([window(10, slow={0: times, 1: times})]))


def test_where_one_rank_is_slow_it_is_the_limit_and_is_named_elsewhere() -> None:
    assert limit([window(10, slow={1: {"forward": 0.1, "waiting": 0.0}, 0: {"waiting": 0.1}})]) == ""
    assert limit([]) == ""


def _noisy(seed: int, base_s: float, noise: float, extra_s: float, windows: int) -> list[Window]:
    """Windows of two ranks on busy cores: what takes their time lasts for some windows (lag 1 correlation 0.7), and
    rank 1 is `extra_s` a step slower."""
    draw = random.Random(seed)
    load, found = [0.0, 0.0], []
    for number in range(1, windows + 1):
        load = [0.7 * each + noise * 0.71 * draw.gauss(0, 1) for each in load]
        slow = {rank: {"forward": base_s * math.exp(load[rank]) + (extra_s if rank == 1 else 0.0)} for rank in (0, 1)}
        found.append(window(4 * number, steps=4, slow=slow))
    return found


def test_on_noisy_cores_a_rank_that_is_somewhat_slower_is_not_named() -> None:
    named = sum(bool(stragglers(_noisy(seed, 0.1, 0.2, 0.018, windows=60))) for seed in range(100))
    equal = sum(bool(stragglers(_noisy(seed, 0.1, 0.2, 0.0, windows=n))) for seed in range(100) for n in (1, 2, 5, 60))
    assert (named, equal) <= (2, 2)


@pytest.mark.parametrize("base_s", [0.003, 0.03, 0.1])
def test_a_tenth_of_a_second_a_step_is_named_within_ten_steps_on_noisy_cores(base_s: float) -> None:
    found = [stragglers(_noisy(seed, base_s, 0.2, 0.1, windows=n)) for seed in range(50) for n in (2, 3, 10)]
    assert sum([slow.rank for slow in each] == [1] for each in found) >= 0.9 * len(found)


def test_on_quiet_cores_a_fifth_more_is_named() -> None:
    assert all(stragglers(_noisy(seed, 0.1, 0.02, 0.02, windows=20)) for seed in range(50))


def test_long_windows_count_for_their_steps() -> None:
    windows = [window(10, steps=10), window(100, steps=90, slow={0: {"data": 0.0101}})]
    assert shares(windows)[0].phases[0] == pytest.approx(0.0001 * 0.1 + 0.0101 * 0.9)


# -- slow links -------------------------------------------------------------------------------------------------------

HOSTS = ["a", "b", "c", "d"]


def _linked(step: int, links: dict[frozenset[int], float], waiting_s: float, steps: int = 10) -> Window:
    """A window of four hosts, each with links to all others, on which bytes are so long under way."""
    told = []
    for rank in range(4):
        own = {peer: links[frozenset((rank, peer))] for peer in range(4) if peer != rank}
        slowest = max(own, key=lambda peer: own[peer])
        told.append((slowest, own[slowest], sorted(own.values())[1]))
    slow = {rank: {"waiting": waiting_s} for rank in range(4)}
    return window(step, ranks=4, steps=steps, slow=slow, links=told)


def _network(seed: int, windows: int, *, slow_s: float = 0.0, steps: int = 10) -> list[Window]:
    """Noise of half as much again on each link, and one step in a thousand in which one hangs for 0.2 s; from the third
    window on, that between ranks 1 and 2 is slow."""
    draw, found = random.Random(seed), []
    pairs = [frozenset((a, b)) for a in range(4) for b in range(a)]
    for number in range(windows):
        links = {pair: 0.01 * math.exp(0.4 * draw.gauss(0, 1)) for pair in pairs}
        for _ in range(steps):
            if draw.random() < 1e-3:
                links[draw.choice(pairs)] += 0.2 / steps
        if number >= 2:
            links[frozenset((1, 2))] += slow_s
        found.append(_linked((number + 1) * steps, links, max(links.values()), steps))
    return found


def test_a_slow_link_is_named_by_its_hosts_and_no_rank_is() -> None:
    windows = _network(0, 4, slow_s=0.103)
    (link,) = slow_links(windows, HOSTS)
    assert link.ranks == (1, 2)
    assert re.fullmatch(
        r"host b ↔ c: 1\d\d ms a step, network, not compute", link.text(HOSTS, step_time(link.excess_s))
    )
    assert stragglers(windows) == []


def test_a_slow_link_is_named_in_its_second_window() -> None:
    for seed in range(50):  # of five steps each: within ten
        assert len(slow_links(_network(seed, 4, slow_s=0.1, steps=5), HOSTS)) == 1
        assert slow_links(_network(seed, 2, slow_s=0.1, steps=5), HOSTS) == []


def test_links_that_hang_now_and_then_raise_one_false_alarm_in_ten_thousand_steps_at_most() -> None:
    windows = _network(1, 10_000, steps=10)
    alarms = sum(bool(slow_links(windows[max(0, end - 10) : end], HOSTS)) for end in range(1, len(windows)))
    assert alarms <= 10  # of a hundred thousand steps


def test_what_computation_hides_and_the_only_link_of_two_hosts_are_not_slow() -> None:
    pairs = {frozenset((a, b)): 0.001 for a in range(4) for b in range(a)}
    slow = pairs | {frozenset((1, 2)): 0.1}
    assert slow_links([_linked(step, slow, waiting_s=0.01) for step in (10, 20, 30)], HOSTS) == []
    assert len(slow_links([_linked(step, slow, waiting_s=0.09) for step in (10, 20, 30)], HOSTS)) == 1
    alone = [(1, 0.5, 0.5), (0, 0.5, 0.5)]
    assert slow_links([window(step, links=alone) for step in (10, 20, 30)], ["a", "b"]) == []


def test_links_of_a_window_survive_the_file_and_damage_does_not() -> None:
    made = _network(2, 1)[0]
    again = read_window(made.to_line())
    assert again is not None
    assert [peer for peer, _, _ in again.links] == [peer for peer, _, _ in made.links]
    assert again.links[0][1] == pytest.approx(made.links[0][1], abs=1e-6)
    for damaged in ([[0, 1, 1]], [[-2, 1, 1]] * 4, [[0, -1, 1]] * 4, [[0, 1]] * 4, "x"):
        assert read_window(json.dumps({**json.loads(made.to_line()), "links": damaged})) is None


# -- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_says_how_far_it_is(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run", epochs=2, epochs_wanted=5, restart_at=10))
    assert (run.step, run.steps_wanted, run.epoch, run.epochs_wanted) == (40, 100, 2, 5)
    assert (run.world_size, run.hosts, run.restarts) == (2, ["a", "a"], 1)
    assert run.last_loss == pytest.approx(2 / 3)
    assert run.logged == ["valid_loss", "accuracy"]
    assert (run.damaged, run.losses.count, len(run.windows)) == (0, 40, 4)


def test_metrics_may_have_any_name(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1)
    row = {"epoch": 1, "step": 20, "loss": 0.5, "top1,5": 0.75, 'say "a"': 2.0, "two\nlines": 3.0}
    RunFiles(folder).add_row([row])
    (epoch,) = read(folder).epochs
    assert epoch == row


def test_what_comes_later_is_added_and_what_was_taken_back_is_forgotten(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=1, nan_steps=[20])
    run = read(folder)
    with open(folder / "losses.csv", "a") as file:
        file.write("21,2,0.5,1\n22,2,0.")
    run.refresh()
    assert (run.last_step, run.last_loss, list(run.not_finite)) == (21, 0.5, [20])
    (folder / "losses.csv").write_text("step,epoch,loss,start\n1,1,3.5,1\n2,1,2.5,2\n")
    run.refresh()
    assert (run.last_step, run.losses.count, run.losses.high, list(run.not_finite)) == (2, 2, 3.5, [])
    (folder / RANKS).write_text(window(5).to_line())
    run.refresh()
    assert [each.step for each in run.windows] == [5]


def test_every_file_may_be_cut_anywhere(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", epochs=2)
    for name in ("losses.csv", "metrics.csv", "ranks.jsonl", "events.jsonl", "config.json"):
        data = (whole / name).read_bytes()
        for length in range(0, len(data), max(1, len(data) // 40)):
            (whole / name).write_bytes(data[:length])
            run = read(whole)
            run.state()
            assert run.damaged == 0, (name, length)
        (whole / name).write_bytes(data)


def test_garbage_is_counted_and_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("losses.csv", "ranks.jsonl", "events.jsonl"):
        with open(folder / name, "ab") as file:
            file.write(b"\xff\x00 garbage\n")
    assert read(folder).damaged == 3


def test_an_empty_folder_is_an_empty_run(tmp_path: Path) -> None:
    run = read(tmp_path)
    assert (run.state().word, run.step, run.restarts, run.world_size) == ("empty", 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "facts", "word"),
    [
        ("end", {"how": "finished"}, "finished"),
        ("end", {"how": "stopped"}, "stopped"),
        ("end", {"how": "left"}, "left"),
        ("error", {"text": "ValueError: no"}, "failed"),
        ("checkpoint", {}, "running"),
    ],
)
def test_the_last_event_says_how_a_run_ended(tmp_path: Path, kind: str, facts: dict[str, str], word: str) -> None:
    append_event(tmp_path, "start", 0, **this_process())
    append_event(tmp_path, kind, 5, **facts)
    run = read(tmp_path)
    assert run.state().word == word
    append_event(tmp_path, "start", 5, **this_process())  # it goes on
    run.refresh()
    assert run.state().word == "running"


def test_the_rank_that_failed_by_itself_is_the_reason(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0, **this_process())
    append_event(tmp_path, "error", 5, rank=1, text="ValueError: mine", consequence=False)
    append_event(tmp_path, "error", 5, rank=0, text="PeerLostError: rank 1 raised", consequence=True)
    assert read(tmp_path).state().why == "rank 1: ValueError: mine"


def test_a_rank_that_could_say_nothing_is_named_by_the_others(tmp_path: Path) -> None:
    text = "PeerLostError: rank 1 (pid 4711 on a) was killed by SIGKILL. Rank 0 of 2 waited 0.02 s for rank 1 in ..."
    append_event(tmp_path, "start", 0, **this_process())
    append_event(tmp_path, "error", 9, rank=0, text=text, consequence=True)
    assert read(tmp_path).state().why == "rank 1 (pid 4711 on a) was killed by SIGKILL"
    assert describe_event(read_events(tmp_path)[1]) == (
        "failed at step 9: rank 1 (pid 4711 on a) was killed by SIGKILL"
    )


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from photinus.runlog.events import append_event; "
        "from photinus.runlog.events import this_process; "
        "append_event(Path(sys.argv[1]), 'start', 0, **this_process())"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert read(tmp_path).state().word == "died"


def test_a_process_is_told_from_another_of_the_same_pid() -> None:
    mine = this_process()
    assert is_alive(mine) is True
    assert is_alive({**mine, "began": mine["began"] - 1}) is False
    assert is_alive({**mine, "boot": "another"}) is None
    name = Path("/proc/self/comm")
    before = name.read_bytes().strip()  # the kernel would make the line's end a part of the name
    name.write_bytes(b"gr\xc3")  # a name is cut to 15 bytes, wherever that is
    try:
        assert is_alive(mine) is True
    finally:
        name.write_bytes(before)


def test_a_run_of_another_host_is_silent_when_nothing_comes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ended=False)
    changed_s = (folder / "losses.csv").stat().st_mtime
    run = read(folder)
    assert run.state(changed_s + 5).word == "running"
    assert run.state(changed_s + 3600).word == "silent"
    assert run.silent_s(changed_s + 3600) == pytest.approx(3600, abs=5)
    assert changed_s > BEGAN_S


# -- finding a run ----------------------------------------------------------------------------------------------------


def test_the_newest_run_is_found_and_what_lies_in_runs_is_not_looked_at(tmp_path: Path) -> None:
    older = write_run(tmp_path / "runs" / "older")
    newer = write_run(tmp_path / "runs" / "deep" / "newer")
    write_run(older / "earlier-1")
    write_run(tmp_path / ".hidden" / "run")
    write_run(tmp_path / "1" / "2" / "3" / "4" / "5")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for path in older.iterdir():
        if path.is_file():
            os.utime(path, (1, 1))
    assert sorted(find_runs(tmp_path)) == sorted([older, newer])
    os.utime(older / "events.jsonl", (time.time() + 9, time.time() + 9))
    assert newest_run(tmp_path) == older
    assert newest_run(tmp_path / "1" / "2" / "3" / "4" / "5" / "checkpoints") is None


def test_a_folder_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "mine")
    (tmp_path / "theirs").mkdir(mode=0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # root's folders around it are not for everybody
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        assert list(find_runs(Path())) == [Path("mine")]
    finally:
        os.seteuid(user)
