"""Whether a failed attempt is followed by another: the rule, and what is said of it."""

from __future__ import annotations

import signal

import pytest

from photinus.job.deaths import Death, Raised
from photinus.job.restart_policy import Report, RestartPolicy, reason_to_stop
from photinus.job.status import Status, read

KILLED = -signal.SIGKILL


def raised(name="NameError", place="train.py:7", *, text="", code=1):
    return Raised(((name, text),), "", code, 9.0, place)


def death(error=None, *, rank=0, status=1, **fields):
    return Death(rank, rank, 4000 + rank, "vm", status, 10.0, 60.0, raised=error, **fields)


def attempt(steps, error=None, *, run="1:runs/a", finished=(), **fields):
    return Report((death(error, **fields),), finished, steps, run=run)


class TestRule:
    def test_an_exception_before_the_first_step_of_a_run_is_not_tried_again(self):
        said = reason_to_stop(attempt(0, raised()), [])
        assert said == "NameError before the first training step would happen again"
        wrong_use = attempt(0, raised("SystemExit", "argparse.py:1", code=2))
        assert reason_to_stop(wrong_use, []).startswith("exit code 2 before the first training step")

    def test_of_one_rank_alone_as_of_all(self):
        assert reason_to_stop(attempt(0, raised(), rank=3), []) is not None

    def test_once_a_run_has_begun_the_first_of_its_kind_is_tried_again(self):
        assert reason_to_stop(attempt(5, raised()), []) is None
        assert reason_to_stop(attempt(0, raised()), [attempt(5, status=KILLED)]) is None
        assert reason_to_stop(attempt(0, raised()), [], unknown=True) is None

    def test_the_same_type_at_the_same_place_is_not_tried_a_third_time_whatever_its_words(self):
        before = [attempt(5, raised(text="rank 0 of 2"))]
        said = reason_to_stop(attempt(5, raised(text="rank 1 of 2"), rank=1), before)
        assert said == "NameError happened again at train.py:7, and training got no further than before"
        assert reason_to_stop(attempt(3, raised()), [*before, attempt(5, status=KILLED)]) is not None

    @pytest.mark.parametrize("other", [raised("OSError"), raised(place="train.py:8")])
    def test_another_type_or_place_is_tried_again(self, other):
        assert reason_to_stop(attempt(5, raised()), [attempt(5, other)]) is None

    def test_the_same_is_tried_again_when_the_run_got_further(self):
        assert reason_to_stop(attempt(6, raised()), [attempt(5, raised())]) is None
        assert reason_to_stop(attempt(6, raised()), [attempt(5, raised()), attempt(6, raised())]) is not None

    def test_steps_that_each_process_counts_do_not_prove_that_a_run_got_no_further(self):
        assert reason_to_stop(attempt(5, raised(), run=""), [attempt(10, raised(), run="")]) is None
        assert reason_to_stop(attempt(0, raised(), run=""), [attempt(10, raised(), run="")]) is not None

    def test_the_steps_of_two_runs_of_a_script_are_not_compared(self):
        assert reason_to_stop(attempt(5, raised(), run="2:runs/b"), [attempt(10, raised())]) is None
        assert reason_to_stop(attempt(5, raised()), [attempt(10, raised()), attempt(1, run="2:b")]) is not None

    @pytest.mark.parametrize(
        "cause",
        [
            {"status": KILLED},
            {"status": 7},
            {"error": raised("PeerLostError")},
            {"error": raised("RuntimeError", text="Connection closed by peer [127.0.0.1]:4000")},
            {"error": raised("RuntimeError", text="DataLoader worker (pid 7) is killed by signal: Killed.")},
        ],
    )
    def test_signals_lost_ranks_and_memory_kills_are_always_tried_again(self, cause):
        assert reason_to_stop(attempt(0, **cause), [attempt(0, **cause)]) is None

    @pytest.mark.parametrize("after", [(), (("RuntimeError", "training failed"),), (("PeerLostError", "rank 0 left"),)])
    def test_hardware_that_an_audit_found_faulty_is_not_tried_again_whatever_followed(self, after):
        faulty = Raised((*after, ("FaultyHardwareError", "audit of step 50")), "", 1, 9.0, "train.py:7")
        others = death(raised("PeerLostError"), rank=1)
        assert "audit" in (reason_to_stop(Report((others, death(faulty)), (), 50), []) or "")

    def test_a_rank_that_ended_well_while_others_needed_it_would_do_so_again(self):
        missed = raised(
            "PeerLostError", text="rank 1 (pid 7 on vm) has left the group (it closed it, or its script ended)"
        )
        said = reason_to_stop(attempt(5, missed, finished=(1,)), [])
        assert said == "rank 1 exited with code 0 while others had more to do. This would happen again"
        assert reason_to_stop(attempt(5, missed), []) is None
        assert reason_to_stop(attempt(5, raised("PeerLostError", text="rank 2 was killed"), finished=(1,)), []) is None
        by_gloo = raised("RuntimeError", text="[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:30642")
        assert reason_to_stop(attempt(5, by_gloo, finished=(1,)), []) == said
        assert reason_to_stop(attempt(5, by_gloo), []) is None
        own = raised("ConnectionResetError", text="[Errno 104] Connection reset by peer")  # of a server of the script's
        assert reason_to_stop(attempt(5, own, finished=(1,)), []) is None
        reports = [Report((death(missed),), (), 5, host="vm"), Report((), (1,), 5, host="other")]
        verdict = RestartPolicy(3).decide(reports, world_size=2, attempt=0)
        assert (verdict.restart, verdict.rank, verdict.host) == (False, 1, "other")


class TestVerdict:
    def decide(self, judge, *reports, attempt=0, world_size=2):
        return judge.decide(reports, world_size=world_size, attempt=attempt)

    def test_the_furthest_rank_of_all_hosts_counts(self):
        verdict = self.decide(RestartPolicy(3), Report((death(raised()),), (), 0), Report((), (), 4))
        assert verdict.restart
        assert verdict.text.endswith("photinus: restarting all 2 workers (restart 1 of 3)\n")
        again = RestartPolicy(3)
        assert not self.decide(again, Report((death(raised()),), ()), Report((), ())).restart

    def test_the_step_of_the_restart_is_left_to_the_ranks_which_know_it_when_they_have_loaded(self):
        verdict = self.decide(RestartPolicy(3), Report((death(status=KILLED),), (), 4), Report((), (), 4))
        assert "photinus: restarting all 2 workers (restart 1 of 3)\n" in verdict.text
        alone = self.decide(RestartPolicy(3), Report((death(status=KILLED),), ()), world_size=1)
        assert "photinus: restarting the worker (restart 1 of 3)\n" in alone.text

    def test_only_failures_that_follow_one_another_quickly_are_slowed_down(self):
        judge = RestartPolicy(9)
        lived = [2.0, 2.0, 60.0, 2.0, 2.0]
        reports = [Report((Death(0, 0, 4000, "vm", KILLED, 10.0, lived_s),), ()) for lived_s in lived]
        assert [self.decide(judge, each).delay_s for each in reports] == [0.0, 1.0, 0.0, 0.0, 1.0]

    def test_what_went_before_hosts_came_or_went_is_not_known(self):
        assert self.decide(RestartPolicy(3), Report((death(raised()),), ()), attempt=2).restart


def test_the_file_of_a_worker_that_has_told_nothing_is_that_of_one_that_has_not_begun():
    assert read("") == Status("-", 0, -1)
