"""Who is to blame and how it is told: the first cause first, consequences in one line each."""

from __future__ import annotations

import json
import signal

import pytest

from photinus.errors import HAD_NO_ERROR
from photinus.job.deaths import Death, Raised, exit_code_of, exit_message, failure_text, root_cause, signature

KILLED = -signal.SIGKILL
GLOO_LOSS = (
    "[/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32900. This is typically "
    "caused by a remote worker crashing. Check the logs."
)


def death(rank, status, *, seen=10.0, raised=None, **fields):
    return Death(
        rank=rank, local_rank=rank, pid=4000 + rank, host="vm", status=status, seen_at_s=seen, lived_s=3.25,
        raised=raised, **fields,
    )  # fmt: skip


def raised(name, text="", *, at=None, behind=(), code=1, traceback=""):
    return Raised(((name, text), *behind), traceback, code, at)


def tell(deaths, *, finished=(), attempt=0, next_step="restarting", **more):
    return failure_text(deaths, finished=finished, attempt=attempt, next_step=next_step, **more)


class TestFirstCause:
    def test_a_killed_rank_beats_ranks_that_missed_it_even_when_seen_later(self):
        killed = death(1, KILLED, seen=10.2)
        missed = [death(r, 1, seen=10.1, raised=raised("PeerLostError", "rank 1", at=10.0)) for r in (0, 2)]
        assert root_cause([missed[0], killed, missed[1]]) is killed

    def test_a_killed_rank_beats_an_exception_of_unknown_kind_raised_just_before_the_kill_was_seen(self):
        killed = death(1, KILLED, seen=10.2)
        wrapped = death(0, 1, seen=10.3, raised=raised("TrainingFailed", "step 3", at=10.1))
        assert root_cause([wrapped, killed]) is killed

    def test_an_exception_long_before_a_kill_is_the_cause(self):
        early = death(0, 1, seen=8.2, raised=raised("ValueError", "bad batch", at=8.0))
        assert root_cause([death(1, KILLED, seen=10.0), early]) is early

    def test_among_exceptions_the_earliest_raised_counts_not_the_earliest_exit(self):
        first = death(1, 1, seen=11.0, raised=raised("ValueError", "x", at=9.0))
        second = death(0, 1, seen=10.0, raised=raised("KeyError", "y", at=9.5))
        assert root_cause([second, first]) is first

    def test_an_error_raised_from_a_lost_peer_is_a_consequence(self):
        wrapped = death(
            0, 1, seen=9.0, raised=raised("MyError", "step failed", behind=[("PeerLostError", "rank 1")], at=9.0)
        )
        culprit = death(1, 1, seen=10.0, raised=raised("ValueError", "bad", at=9.9))
        assert root_cause([wrapped, culprit]) is culprit

    def test_an_error_that_was_handed_on_from_another_rank_is_a_consequence(self):
        told = f"choosing failed on rank 0 (host a): CheckpointError: x. This rank (1) {HAD_NO_ERROR} of its own."
        handed_on = death(1, 1, seen=9.0, raised=raised("CheckpointError", told, at=9.0))
        assert root_cause([handed_on, death(0, 1, seen=9.1, raised=raised("CheckpointError", "x", at=9.1))]).rank == 0

    def test_leaving_with_a_code_after_catching_a_lost_peer_is_a_consequence(self):
        leaves = death(0, 7, raised=raised("SystemExit", "7", behind=[("PeerLostError", "rank 1")], code=7, at=9.0))
        assert root_cause([leaves, death(1, -signal.SIGSEGV, seen=10.0)]).rank == 1

    def test_an_abort_at_the_same_moment_is_gloos_last_word_not_the_cause(self):
        assert root_cause([death(0, -signal.SIGABRT), death(1, -signal.SIGSEGV)]).rank == 1
        alone = death(0, -signal.SIGABRT)
        missed = death(1, 1, seen=9.0, raised=raised("RuntimeError", GLOO_LOSS, at=9.0))
        assert root_cause([missed, alone]) is alone

    def test_workers_that_the_launcher_ended_are_never_the_cause(self):
        ended = death(0, -signal.SIGTERM, seen=1.0, ended_by_us=True)
        missed = death(1, 1, seen=10.0, raised=raised("PeerLostError", "?", at=10.0))
        assert root_cause([ended, missed]) is missed

    @pytest.mark.parametrize(
        "text",
        [
            GLOO_LOSS,
            "Read error [127.0.0.1]:4252: Connection reset by peer",
            "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete",
            "Gloo connectFullMesh failed with [pair.cc:144] no error",
            "Broken pipe",
        ],
    )
    def test_glooss_words_for_a_lost_peer_are_known(self, text):
        assert raised("RuntimeError", text).lost_a_peer
        assert not raised("RuntimeError", "shape mismatch").lost_a_peer

    def test_a_socket_or_pipe_of_the_scripts_own_is_none(self):
        assert not raised("ConnectionRefusedError", "[Errno 111] Connection refused").lost_a_peer
        assert not raised("BrokenPipeError", "[Errno 32] Broken pipe").lost_a_peer
        refused = (("URLError", "<urlopen error [Errno 111] Connection refused>"), ("OSError", "Connection refused"))
        assert not Raised(refused, "", by=("other", "other")).lost_a_peer
        assert Raised((*refused, ("PeerLostError", "rank 1")), "", by=("other", "other", "photinus")).lost_a_peer


class TestExitCode:
    def test_is_the_causes_own(self):
        assert exit_code_of(death(0, KILLED)) == 137
        assert exit_code_of(death(0, -signal.SIGSEGV)) == 139
        assert exit_code_of(death(0, 5)) == 5
        assert exit_code_of(death(0, 1, raised=raised("ValueError"))) == 1
        assert exit_code_of(death(0, 3, raised=raised("SystemExit", "3", code=3))) == 3

    def test_of_a_worker_that_raised_and_then_died_in_another_way_is_that_of_its_error(self):
        assert exit_code_of(death(0, KILLED, raised=raised("ValueError"), overdue_s=5.0)) == 1
        assert exit_code_of(death(0, -signal.SIGABRT, raised=raised("ValueError"))) == 1


class TestWords:
    def test_a_kill_names_rank_pid_and_signal_in_one_line_then_consequences_then_what_comes(self):
        deaths = [
            death(0, 1, raised=raised("PeerLostError", "rank 1 (pid 4001) was lost", at=10.0, traceback="long")),
            death(1, KILLED),
            death(2, -signal.SIGTERM, ended_by_us=True),
            death(3, KILLED, ended_by_us=True),
            death(4, 1, raised=raised("ValueError", f"reading failed on rank 1 (host vm). Rank 4 {HAD_NO_ERROR}.")),
            death(5, 1, raised=raised("PeerLostError", "rank 0 (pid 4000) was lost", at=10.0)),
        ]
        assert tell(deaths, next_step="restarting all 4 workers") == (
            "\n"
            "photinus: rank 1 (pid 4001) was killed by SIGKILL\n"
            "photinus:   local rank 1 of host vm, attempt 0, 3.2 s after its start\n"
            "photinus: ranks 0, 4 failed as a consequence\n"
            "photinus: rank 5 (pid 4005) failed as a consequence: PeerLostError: rank 0 (pid 4000) was lost\n"
            "photinus: rank 2 ended by the launcher\n"
            "photinus: rank 3 did not exit in time: killed by the launcher\n"
            "photinus: restarting all 4 workers\n"
        )

    def test_an_exception_is_told_with_its_traceback(self):
        trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\nValueError: bad\n\nbatch\n'
        told = tell([death(1, 1, raised=raised("ValueError", "bad\n\nbatch", traceback=trace))], attempt=2)
        assert "photinus: rank 1 (pid 4001) raised ValueError: bad batch\n" in told
        assert "attempt 2" in told
        assert '\n\n    Traceback (most recent call last):\n      File "x.py", line 3, in <module>\n' in told
        assert "    ValueError: bad\n\n    batch\n\nphotinus: restarting" in told

    def test_a_failure_shown_before_is_told_without_its_traceback(self):
        told = tell([death(1, 1, raised=raised("ValueError", "bad", traceback="Traceback ...\n"))], seen_before=True)
        assert "raised ValueError: bad" in told
        assert "(traceback as above)" in told
        assert "Traceback ..." not in told

    def test_a_long_traceback_keeps_its_beginning_and_more_of_its_end(self):
        trace = "\n".join(f"line {n}" for n in range(500))
        told = tell([death(1, 1, raised=raised("RecursionError", "deep", traceback=trace))])
        assert "    line 0\n" in told
        assert "    line 499\n" in told
        assert "380 lines left out" in told
        assert told.count("    line ") == 120

    def test_the_same_error_on_other_ranks_is_one_line(self):
        deaths = [death(r, 1, raised=raised("OSError", "storage is away", at=10.0 + r)) for r in range(3)]
        told = tell(deaths)
        assert "rank 0 (pid 4000) raised OSError: storage is away" in told
        assert "photinus: the same on ranks 1, 2\n" in told
        assert told.count("storage is away") == 1

    def test_another_failure_that_is_no_consequence_is_told_too(self):
        told = tell([death(0, KILLED, seen=9.0), death(1, 4)])
        assert "photinus: also, rank 1 (pid 4001) exited with code 4\n" in told

    def test_memory_is_mentioned_only_when_the_kernel_counted_a_kill(self):
        killed, struck = [death(1, KILLED)], "it struck once in this control group"
        assert f"possibly the kernel's out-of-memory killer: {struck}\n" in tell(killed, oom=struck)
        assert "memory" not in tell(killed)
        assert "memory" not in tell([death(1, 1, raised=raised("ValueError"))], oom=struck)

    def test_a_killed_data_loader_is_a_case_of_memory_too(self):
        loader = raised("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed.")
        struck = "it struck 2 times in this machine"
        assert struck in tell([death(1, 1, raised=loader)], oom=struck)

    def test_a_code_from_sys_exit_with_and_without_words(self):
        assert "rank 0 (pid 4000) exited with code 3\n" in tell([death(0, 3, raised=raised("SystemExit", "3", code=3))])
        words = death(0, 1, raised=raised("SystemExit", "no data in /x", code=1))
        assert "exited with code 1: no data in /x" in tell([words])
        assert "rank 0 (pid 4000) exited with code 9\n" in tell([death(0, 9)])

    def test_sigterm_from_elsewhere_is_told_as_such(self):
        assert "was killed by SIGTERM" in tell([death(0, -signal.SIGTERM)])
        assert "the launcher did not send it" in tell([death(0, -signal.SIGTERM)])

    def test_a_fatal_signal_shows_the_stack_that_it_left(self):
        told = tell([death(0, -signal.SIGSEGV, fault_stack='Fatal Python error: Segmentation fault\n  File "x.py"\n')])
        assert "was killed by SIGSEGV" in told
        assert '      File "x.py"\n' in told

    def test_a_rank_that_raised_and_hung_is_told_with_its_error(self):
        told = tell([death(0, KILLED, raised=raised("ValueError", "bad"), overdue_s=5.2)])
        assert "rank 0 (pid 4000) raised ValueError: bad\n" in told
        assert "it did not exit within 5 s and was killed" in told

    def test_a_peer_lost_because_it_finished_early_is_told(self):
        told = tell([death(0, 1, raised=raised("PeerLostError", "rank 1 left"))], finished=[1])
        assert "photinus: rank 1 finished with exit code 0 before\n" in told

    def test_many_ranks_are_not_all_listed(self):
        deaths = [death(0, KILLED), *(death(r, -signal.SIGTERM, ended_by_us=True) for r in range(1, 40))]
        assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... (39 ranks) ended by the launcher" in tell(deaths)

    def test_a_consequence_is_cut_to_what_matters(self):
        lost = death(0, 1, raised=raised("RuntimeError", GLOO_LOSS, at=10.0))
        told = tell([lost, death(1, KILLED)])
        assert "as a consequence: RuntimeError: Connection closed by peer [127.0.0.1]:32900\n" in told


class TestErrorFile:
    def test_torchs_own_format_is_read(self):
        text = json.dumps(
            {"message": {"message": "ValueError: a: b", "extraInfo": {"py_callstack": "Trace", "timestamp": "1"}}}
        )
        assert Raised.from_json(text) == Raised((("ValueError", "a: b"),), "Trace")

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"message": "x"}', '{"message": {"extraInfo": []}}', "null"])
    def test_what_is_neither_ours_nor_torchs_is_nothing(self, text):
        assert Raised.from_json(text) is None

    def test_signatures_are_equal_for_equal_failures_of_different_ranks(self):
        assert signature(death(0, 1, raised=raised("A", "b"))) == signature(
            death(1, 1, raised=raised("A", "b", at=3.0))
        )
        assert signature(death(0, KILLED)) == signature(death(1, KILLED))
        assert signature(death(0, KILLED)) != signature(death(0, -signal.SIGSEGV))


class TestWhatAWorkerSaidLast:
    SAID = ("loading shard 3", "the licence has expired")

    def test_it_is_shown_where_there_is_no_traceback(self):
        told = tell([death(1, 7, last_lines=self.SAID)])
        shown = "its last output:\n\n    loading shard 3\n    the licence has expired\n\nphotinus: restarting"
        assert shown in told
        assert "loading shard 3" in tell([death(1, KILLED, last_lines=self.SAID)])
        left = death(1, 2, raised=raised("SystemExit", "2", code=2, at=9.0), last_lines=("train.py: error: --epohcs",))
        assert "    train.py: error: --epohcs\n" in tell([left])

    def test_a_stack_at_a_fatal_signal_comes_after_it(self):
        told = tell([death(1, -signal.SIGSEGV, last_lines=self.SAID, fault_stack="Current thread 0x1:\n  File x")])
        assert told.index("the licence has expired") < told.index("Current thread 0x1:")

    def test_it_is_left_out_where_the_error_says_as_much(self):
        with_traceback = death(
            1, 1, raised=raised("ValueError", "x", at=9.0, traceback="Traceback"), last_lines=self.SAID
        )
        assert "loading shard" not in tell([with_traceback])
        leaves = death(1, 1, raised=raised("SystemExit", "no data there", at=9.0), last_lines=("no data there",))
        assert "its last output" not in tell([leaves])
        assert "its last output" not in tell([death(1, KILLED)])

    def test_only_the_first_causes_lines_are_shown_with_its_log(self):
        other = death(0, 1, seen=11.0, raised=raised("PeerLostError", "rank 1", at=11.0), last_lines=("innocent",))
        told = tell([other, death(1, KILLED, last_lines=self.SAID, log="logs/a/attempt_0/1/stderr.log")])
        assert "innocent" not in told
        assert "photinus:   its log is logs/a/attempt_0/1/stderr.log\n" in told

    def test_a_log_file_ends_with_the_traceback_or_with_how_the_worker_ended(self):
        failed = death(1, 1, raised=raised("ValueError", "x", at=9.0, traceback="Traceback\nValueError: x\n"))
        assert exit_message(failed) == "Traceback\nValueError: x\n"
        assert exit_message(death(1, KILLED)) == "photinus: rank 1 (pid 4001) was killed by SIGKILL\n"
        fatal = exit_message(death(1, -signal.SIGSEGV, fault_stack="Current thread\n"))
        assert fatal == "Current thread\nphotinus: rank 1 (pid 4001) was killed by SIGSEGV\n"
        ended = exit_message(death(0, -signal.SIGTERM, ended_by_us=True))
        assert ended == "photinus: rank 0 (pid 4000) was ended by the launcher because another rank failed\n"


def test_a_rank_that_was_given_a_gpu_is_named_with_it():
    assert "local rank 1 (GPU 5) of host vm" in tell([death(1, KILLED, gpu="GPU 5")])
