"""Suspension in one process: which signals are taken, whose handlers stay in force, and what a loop leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest

import photinus
from photinus.job.deaths import Death, Raised
from photinus.job.restart_policy import Report, RestartPolicy
from photinus.run.local.interrupts import handle_signals
from photinus.trainer.session import preemption
from tests.small_run import train

RUN = {"epochs": 2, "batch_size": 12, "samples": 60}


@pytest.fixture(autouse=True)
def nothing_asked():
    yield
    preemption.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def signal_at(step, number):
    return lambda at: signal.raise_signal(number) if at == step else None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_that_is_asked_saves_after_its_step_and_goes_on_with_the_same_bits(tmp_path, capfd, number):
    with pytest.raises(preemption.Suspended) as left:
        train(tmp_path, kill=signal_at(3, number), **RUN)
    assert left.value.code == preemption.EXIT_CODE == 75
    path = tmp_path / "checkpoints" / "step-00000003"
    assert str(left.value) == f"step 3, saved in {path}"
    assert path.is_dir()
    assert f"suspended at step 3, saved in {path}" in capfd.readouterr().out
    resumed = train(tmp_path, **RUN)
    assert resumed["began_at"] == 3
    assert resumed["fingerprint"] == train(None, **RUN)["fingerprint"]


def test_a_loop_asked_in_its_last_step_finishes_instead(tmp_path):
    assert train(tmp_path, kill=signal_at(10, signal.SIGUSR1), **RUN)["step"] == 10


@pytest.mark.parametrize("saves", [True, False])
def test_a_loop_that_does_not_save_leaves_the_signals_alone(tmp_path, saves, monkeypatch):
    seen = []
    monkeypatch.setattr(photinus, "init", partial(photinus.init, suspend=not saves))
    train(tmp_path if saves else None, kill=lambda _: seen.append(signal.getsignal(signal.SIGTERM)), **RUN)
    assert set(seen) == {signal.SIG_DFL}


def test_handlers_of_the_script_are_called_too_and_are_back_afterwards(tmp_path):
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(preemption.Suspended):
            train(tmp_path, kill=signal_at(2, signal.SIGTERM), **RUN)
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_ignored_signal_stays_ignored(tmp_path):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert train(tmp_path, kill=signal_at(2, signal.SIGUSR1), **RUN)["step"] == 10
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_child_of_the_rank_still_dies_of_sigterm(tmp_path):
    def sleep(writing):
        os.write(writing, b".")
        time.sleep(60)

    def fork_and_end(step):
        if step == 1:
            reading, writing = os.pipe()
            child = multiprocessing.get_context("fork").Process(target=sleep, args=(writing,), daemon=True)
            child.start()
            os.read(reading, 1)
            os.close(reading)
            os.close(writing)
            child.terminate()
            child.join(20)
            codes.append(child.exitcode)

    codes = []
    assert train(tmp_path, kill=fork_and_end, **RUN)["step"] == 10
    assert codes == [-signal.SIGTERM]


def test_requested_is_false_until_asked_and_leave_says_what_was_saved():
    try:
        assert not preemption.suspend_requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.suspend_requested()
        assert photinus.suspend_requested()
        with pytest.raises(SystemExit, match="step 7, on the tape"):
            preemption.suspend("step 7, on the tape")
    finally:
        preemption.close()
    assert not preemption.suspend_requested()


def test_a_simulated_preemption_comes_at_its_step_and_not_in_a_later_attempt(tmp_path, monkeypatch):
    monkeypatch.setenv("PHOTINUS_PREEMPT_AT_STEP", "4")
    with pytest.raises(preemption.Suspended, match="step 4, "):
        train(tmp_path, **RUN)
    assert train(tmp_path, **RUN)["step"] == 10
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path / "other", **RUN)["step"] == 10


def death(rank, **changes):
    raised = Raised((("Suspended", f"step 7, saved in runs/x of {rank}"),), "", 75, 1.0)
    fields = {"local_rank": rank, "pid": 10 + rank, "host": "a", "status": 75, "seen_at_s": 2.0, "lived_s": 60.0}
    return Death(**{"rank": rank, "raised": raised, **fields, **changes})


def judged(judge, *deaths):
    return judge.decide([Report(deaths, (), steps=7)], world_size=2, attempt=0)


def test_the_launcher_starts_suspended_workers_again_and_counts_no_failure():
    judge = RestartPolicy(max_restarts=0)
    for _ in range(5):
        verdict = judged(judge, death(0), death(1, raised=None, ended_by_us=True, status=-15))
        assert (verdict.restart, verdict.suspended, verdict.delay_s) == (True, True, 0.0)
        assert verdict.text == (
            "photinus: suspended at step 7, saved in runs/x of 0\n"
            "photinus: starting all 2 workers again (no failure, and not counted as one)\n"
        )
    assert judge.restarts == 0
    assert [judged(judge, death(0, lived_s=2.0)).delay_s for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]


def test_a_rank_that_dies_while_the_others_save_is_a_failure():
    verdict = judged(RestartPolicy(max_restarts=0), death(0), death(1, raised=None, status=-signal.SIGKILL))
    assert (verdict.restart, verdict.suspended) == (False, False)


def test_a_request_that_comes_twice_at_once_is_one_and_ctrl_c_twice_is_impatience():
    with handle_signals() as interrupts:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupts.suspension_wanted
        assert interrupts.first is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.first == signal.SIGTERM
        assert not interrupts.forced
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.forced
    with handle_signals() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.forced
