"""The rules of a job on several hosts, event by event, with times that the tests make up."""

from __future__ import annotations

import pytest

from photinus.job.deaths import Death, Raised
from photinus.job.membership import (
    Decide,
    Drop,
    End,
    Membership,
    PeerHost,
    RefusedHostError,
    Regroup,
    Say,
    StartAttempt,
    Stop,
)
from photinus.job.restart_policy import Report


def meeting(
    least: int = 2, most: int | None = None, *, join_timeout_s: float = 600.0, restarts: tuple[str, ...] = ()
) -> Membership:
    left = iter(restarts)
    return Membership(least, most or least, join_timeout_s, 5.0, spend_restart=lambda: next(left, ""))


def peer(key: int, *, workers: int = 2, node_rank: int | None = None, leads: bool = False) -> PeerHost:
    return PeerHost(key, "abcdef"[key], f"10.0.0.{key + 1}", workers, node_rank, leads)


def come(rules: Membership, *keys: int, at_s: float = 0.0) -> list[object]:
    acts: list[object] = []
    for key in keys:
        rules.add(peer(key, leads=key == 0), at_s)
        acts += rules.ready(key, at_s)
    return acts


def report(*texts: str) -> Report:
    deaths = tuple(
        Death(rank, rank, 100 + rank, "h", 1, 1.0, 1.0, raised=Raised((("RuntimeError", text),), ""))
        for rank, text in enumerate(texts)
    )
    return Report(deaths, ())


def test_a_fixed_number_of_hosts_starts_when_all_are_ready():
    rules = meeting(3)
    assert come(rules, 0, 1) == []
    rules.add(peer(2), 1.0)
    (form,) = rules.ready(2, 2.0)
    assert form == StartAttempt((peer(0, leads=True), peer(1), peer(2)), attempt=0)


def test_the_leader_is_first_and_the_others_are_numbered_as_they_came():
    rules = meeting(3)
    for key in (2, 1):
        rules.add(peer(key), 0.0)
        rules.ready(key, 0.0)
    rules.add(peer(0, leads=True), 0.0)
    (form,) = rules.ready(0, 0.0)
    assert [each.key for each in form.peers] == [0, 2, 1]


def test_node_ranks_are_kept_and_the_rest_fills_the_gaps():
    rules = meeting(3)
    rules.add(peer(0, node_rank=2, leads=True), 0.0)
    rules.add(peer(1), 0.0)
    rules.add(peer(2, node_rank=0), 0.0)
    rules.ready(0, 0.0)
    rules.ready(1, 0.0)
    (form,) = rules.ready(2, 0.0)
    assert [each.key for each in form.peers] == [2, 1, 0]


def test_a_node_rank_beyond_the_hosts_that_came_takes_the_next_place():
    rules = meeting(1, 3)
    rules.add(peer(0, leads=True), 0.0)
    rules.add(peer(1, node_rank=2), 0.0)
    rules.ready(0, 0.0)
    rules.ready(1, 0.0)
    (form,) = rules.tick(5.0)
    assert [each.key for each in form.peers] == [0, 1]


def test_a_node_rank_that_is_taken_is_refused_with_its_holder_named():
    rules = meeting(2)
    rules.add(peer(0, node_rank=0), 0.0)
    with pytest.raises(RefusedHostError, match=r"--node-rank 0 is taken by a \(10\.0\.0\.1\)"):
        rules.add(peer(1, node_rank=0), 0.0)


def test_one_host_too_many_is_refused_with_those_that_are_there():
    rules = meeting(2)
    come(rules, 0, 1)
    gathering = meeting(1, 2)
    come(gathering, 0)
    gathering.add(peer(1), 1.0)
    for each in (rules, gathering):
        wanted = r"already has its 2 hosts: a \(10\.0\.0\.1\), b \(10\.0\.0\.2\)"
        with pytest.raises(RefusedHostError, match=wanted):
            each.add(peer(2), 2.0)


def test_the_waiting_is_told_once_and_ends_in_time_with_the_number_that_came():
    rules = meeting(2, join_timeout_s=30.0)
    come(rules, 0)
    assert rules.tick(2.9) == []
    (said,) = rules.tick(3.0)
    assert said == Say("waiting for 2 hosts, 27 s more at most; here: a (10.0.0.1)")
    assert rules.tick(20.0) == []
    (end,) = rules.tick(30.1)
    assert end == End("only 1 of 2 hosts ready within 30 s; here: a (10.0.0.1)", 1)
    with pytest.raises(RefusedHostError, match="has ended"):
        rules.add(peer(1), 31.0)


def test_hosts_that_may_come_and_go_are_waited_for_until_the_last_call():
    rules = meeting(1, 3)
    assert come(rules, 0) == []
    assert rules.tick(4.9) == []
    (form,) = rules.tick(5.0)
    assert len(form.peers) == 1


def test_the_last_call_ends_when_all_that_may_come_are_there():
    rules = meeting(1, 2)
    (form,) = come(rules, 0, 1, at_s=1.0)
    assert len(form.peers) == 2


def test_the_last_call_begins_again_when_fewer_than_the_least_were_there():
    rules = meeting(2, 3)
    come(rules, 0, 1)
    rules.remove_host(1, "was lost", 4.0, lost=True)
    assert come(rules, 2, at_s=6.0) == []
    assert rules.tick(10.9) == []
    (form,) = rules.tick(11.0)
    assert [each.key for each in form.peers] == [0, 2]


def test_a_host_that_is_importing_is_waited_for_before_the_start():
    rules = meeting(1, 3)
    come(rules, 0)
    rules.add(peer(1), 1.0)  # has proved itself, is not ready
    (said,) = rules.tick(6.0)
    assert said.text.startswith("waiting for b (10.0.0.2) to be ready, 594 s more at most")
    (form,) = rules.ready(1, 7.0)
    assert len(form.peers) == 2


def test_a_host_that_is_never_ready_is_left_out_after_the_join_timeout_and_may_come_later():
    rules = meeting(1, 2, join_timeout_s=60.0)
    come(rules, 0)
    rules.add(peer(1), 1.0)
    assert not any(isinstance(act, StartAttempt) for act in rules.tick(59.0))
    (form,) = rules.tick(61.0)
    assert [each.key for each in form.peers] == [0]
    (regroup,) = rules.ready(1, 62.0)
    assert (regroup.keys, regroup.unharmed) == ((0,), True)


def test_a_host_that_never_reports_is_lost_after_the_join_timeout():
    rules = meeting(2, join_timeout_s=60.0, restarts=("restart 1 of 1",))
    come(rules, 0, 1)
    assert rules.fail(0, report("the disk is full"), 10.0) == [Stop((1,))]
    (said,) = rules.tick(20.0)
    assert said.text.startswith("waiting for the reports of b (10.0.0.2), 50 s more at most")
    drop, regroup = rules.tick(71.0)
    assert drop == Drop(1)
    assert regroup.reason == "host b (10.0.0.2) was lost: no report within 60 s (restart 1 of 1)"


def test_hosts_have_the_stop_grace_to_end_their_workers_on_top_of_the_join_timeout():
    rules = meeting(2, join_timeout_s=60.0)
    rules.stop_grace_s = 300.0
    come(rules, 0, 1)
    rules.fail(0, report("the disk is full"), 10.0)
    assert all(isinstance(act, Say) for act in rules.tick(369.0))
    assert any(isinstance(act, Drop) for act in rules.tick(371.0))


def test_a_host_that_comes_while_others_run_makes_them_gather_anew():
    rules = meeting(1, 2)
    come(rules, 0)
    rules.tick(5.0)
    rules.add(peer(1), 60.0)
    (regroup,) = rules.ready(1, 61.0)
    assert regroup == Regroup((0,), "host b (10.0.0.2) has joined", unharmed=True)
    (form,) = rules.ready(0, 63.0)
    assert form == StartAttempt((peer(0, leads=True), peer(1)), attempt=1)


@pytest.mark.parametrize("whole_host", [True, False])
def test_a_host_that_comes_when_a_rank_has_ended_well_restarts_nobody(whole_host):
    rules = meeting(1, 3)
    come(rules, 0, 1)
    rules.tick(9.0)
    _ = rules.finish(1, 20.0) if whole_host else rules.note_ended_rank()
    rules.add(peer(2), 21.0)
    (said,) = rules.ready(2, 22.0)
    assert said == Say("host c (10.0.0.3) has joined and waits: ranks that finished would start again")
    rules.remove_host(0, "was lost", 30.0, lost=True)
    (form,) = rules.ready(1, 31.0)  # it takes part in the next attempt
    assert [each.key for each in form.peers] == [1, 2]


def test_a_host_that_comes_in_the_attempt_after_one_in_which_a_rank_ended_is_let_in():
    rules = meeting(1, 2)
    come(rules, 0)
    rules.tick(5.0)
    rules.note_ended_rank()
    (stop,) = [act for act in rules.fail(0, report("lost"), 10.0) if isinstance(act, Decide)]
    assert stop.keys == (0,)
    rules.go_on(True, 10.0)
    rules.ready(0, 11.0)
    assert [type(act) for act in rules.tick(13.0)] == [StartAttempt]
    (regroup,) = come(rules, 1, at_s=20.0)
    assert regroup == Regroup((0,), "host b (10.0.0.2) has joined", unharmed=True)


def test_a_lost_host_ends_a_job_of_a_fixed_number():
    rules = meeting(2)
    come(rules, 0, 1)
    assert rules.remove_host(1, "was lost: cut off", 9.0) == [End("host b (10.0.0.2) was lost: cut off", 1)]


def test_a_lost_host_costs_a_job_of_a_fixed_number_a_restart_and_is_waited_for():
    rules = meeting(2, restarts=("restart 1 of 1",))
    come(rules, 0, 1)
    assert rules.remove_host(1, "was lost: cut off", 40.0, lost=True) == [
        Regroup((0,), "host b (10.0.0.2) was lost: cut off (restart 1 of 1)")
    ]
    assert rules.ready(0, 41.0) == []
    assert rules.tick(44.0) == [Say("waiting for 2 hosts, 596 s more at most; here: a (10.0.0.1)")]
    (form,) = come(rules, 2, at_s=100.0)
    assert form == StartAttempt((peer(0, leads=True), peer(2)), attempt=1)
    assert rules.remove_host(2, "was lost: cut off", 200.0, lost=True) == [
        End("host c (10.0.0.3) was lost: cut off", 1)
    ]


@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize("settling", [False, True])
def test_a_lost_store_costs_a_restart_on_all_hosts_whether_they_may_go_or_not(most, settling):
    rules = meeting(2, most, restarts=("restart 1 of 1",))
    come(rules, 0, 1)
    rules.tick(9.0)
    if settling:  # the workers of another host noticed it first
        rules.fail(1, report("connection closed by peer"), 10.0)
    assert rules.lose_store("the store was killed", 10.0) == [Regroup((0, 1), "the store was killed (restart 1 of 1)")]
    assert rules.lose_store("the store was killed", 10.1) == []
    assert rules.fail(0, report(), 10.2) == []  # said before it heard of that
    rules.ready(0, 11.0)
    assert rules.ready(1, 11.0) or rules.tick(20.0)
    assert rules.lose_store("the store was killed", 21.0) == [End("the store was killed", 1)]


def test_a_lost_host_that_does_not_come_back_ends_the_job_when_the_time_is_over():
    rules = meeting(2, restarts=("restart 1 of 3",), join_timeout_s=30.0)
    come(rules, 0, 1)
    rules.remove_host(1, "was lost", 40.0, lost=True)
    rules.ready(0, 41.0)
    assert rules.tick(71.0) == [End("only 1 of 2 hosts ready within 30 s; here: a (10.0.0.1)", 1)]


def test_a_host_that_leaves_ends_a_job_of_a_fixed_number_whatever_restarts_are_left():
    rules = meeting(2, restarts=("restart 1 of 3",))
    come(rules, 0, 1)
    assert rules.remove_host(1, "exited because of SIGINT", 9.0) == [
        End("host b (10.0.0.2) exited because of SIGINT", 1)
    ]


def test_a_host_that_leaves_while_the_others_settle_ends_the_job_too():
    rules = meeting(2, restarts=("restart 1 of 3",))
    come(rules, 0, 1)
    rules.fail(0, report("peer lost"), 8.0)
    assert rules.remove_host(1, "exited because of SIGINT", 9.0) == [
        End("host b (10.0.0.2) exited because of SIGINT", 1)
    ]


def test_a_host_lost_while_the_others_settle_may_come_back_before_they_have():
    rules = meeting(3, restarts=("restart 1 of 3",))
    come(rules, 0, 1, 2)
    rules.fail(0, report("peer lost"), 35.0)
    assert rules.remove_host(2, "was lost", 36.0, lost=True) == []
    assert come(rules, 3, at_s=36.5) == []
    (regroup,) = rules.fail(1, report("peer lost"), 37.0)
    assert regroup == Regroup((0, 1), "host c (10.0.0.3) was lost (restart 1 of 3)")
    rules.ready(0, 38.0)
    (form,) = rules.ready(1, 38.0)
    assert [each.key for each in form.peers] == [0, 1, 3]


def test_what_a_host_says_late_of_an_attempt_without_it_has_no_effect():
    rules = meeting(1, 2)
    come(rules, 0, 1)
    rules.remove_host(1, "was lost", 40.0, lost=True)
    rules.ready(0, 41.0)
    rules.tick(42.0)
    rules.add(peer(2), 50.0)
    assert rules.fail(2, report("peer lost"), 50.0) == []
    assert rules.state == "running"
    assert rules.ready(0, 50.0) == []  # said twice
    (regroup,) = rules.ready(2, 51.0)
    assert isinstance(regroup, Regroup)
    (said,) = rules.tick(90.0)  # its workers have not ended yet
    assert "a (10.0.0.1) to be ready" in said.text
    (form,) = rules.ready(0, 91.0)
    assert form.attempt == 2


def test_a_lost_host_makes_the_others_go_on_where_hosts_may_go():
    rules = meeting(1, 2)
    come(rules, 0, 1)
    assert rules.remove_host(1, "was lost: cut off", 9.0) == [Regroup((0,), "host b (10.0.0.2) was lost: cut off")]
    assert rules.ready(0, 10.0) == []
    (form,) = rules.tick(11.0)  # a short last call: it might come back
    assert form == StartAttempt((peer(0, leads=True),), attempt=1)


def test_a_job_with_fewer_hosts_than_the_least_waits_for_more():
    rules = meeting(2, 3, join_timeout_s=50.0)
    come(rules, 0, 1, 2)
    rules.remove_host(1, "left", 9.0)
    rules.remove_host(2, "left", 9.1)
    assert [type(act) for act in rules.ready(0, 10.0)] == []
    assert rules.tick(40.0) == [Say("waiting for 2 hosts, 19 s more at most; here: a (10.0.0.1)")]
    (form,) = come(rules, 3, at_s=41.0) or rules.tick(43.0)
    assert [each.key for each in form.peers] == [0, 3]


def test_a_failure_stops_all_and_is_judged_when_all_have_reported():
    rules = meeting(3)
    come(rules, 0, 1, 2)
    first, second, third = report("boom"), report("lost"), report()
    assert rules.fail(1, first, 1.0) == [Stop((0, 2))]
    assert rules.fail(2, third, 1.1) == []
    (judge,) = rules.fail(0, second, 1.2)
    assert judge == Decide((second, first, third), (0, 1, 2), world_size=6, attempt=0)
    rules.go_on(True, 2.0)
    rules.ready(0, 3.0)
    rules.ready(2, 3.0)
    (form,) = rules.ready(1, 3.0)
    assert form.attempt == 1


def test_the_last_verdict_ends_the_job():
    rules = meeting(2)
    come(rules, 0, 1)
    rules.fail(0, report("boom"), 1.0)
    rules.fail(1, report(), 1.0)
    rules.go_on(False, 1.1)
    assert rules.state == "ended"
    assert rules.remove_host(1, "left", 2.0) == []


def test_a_host_lost_while_the_others_settle_is_the_cause_of_what_they_saw():
    fixed = meeting(2)
    come(fixed, 0, 1)
    assert fixed.fail(0, report("peer lost"), 1.0) == [Stop((1,))]
    assert fixed.remove_host(1, "was lost: cut off", 7.0) == [End("host b (10.0.0.2) was lost: cut off", 1)]

    elastic = meeting(1, 2)
    come(elastic, 0, 1)
    elastic.fail(0, report("peer lost"), 1.0)
    assert elastic.remove_host(1, "was lost", 7.0) == [Regroup((0,), "host b (10.0.0.2) was lost")]
    elastic.ready(0, 8.0)
    (form,) = elastic.tick(9.0)
    assert form.attempt == 1


def test_the_job_ends_well_when_all_hosts_have_finished():
    rules = meeting(2)
    come(rules, 0, 1)
    assert rules.finish(1, 5.0) == []
    assert rules.finish(0, 6.0) == [End("", 0)]


def test_a_host_that_goes_after_it_finished_is_not_missed():
    rules = meeting(2)
    come(rules, 0, 1)
    rules.finish(1, 5.0)
    assert rules.remove_host(1, "was lost", 5.5) == []
    assert rules.finish(0, 6.0) == [End("", 0)]


def test_a_host_that_comes_while_others_settle_takes_part_in_the_next_attempt():
    rules = meeting(1, 3)
    come(rules, 0, 1)
    rules.tick(5.0)
    rules.fail(0, report("boom"), 6.0)
    assert come(rules, 2, at_s=6.1) == []
    (judge,) = rules.fail(1, report(), 6.2)
    assert judge.keys == (0, 1)
    rules.go_on(True, 6.3)
    rules.ready(0, 7.0)
    (form,) = rules.ready(1, 7.0)
    assert [each.key for each in form.peers] == [0, 1, 2]


def test_the_leader_may_end_the_job():
    rules = meeting(1, 2)
    come(rules, 0, 1)
    assert rules.end("host a left", 130) == [End("host a left", 130)]
    assert rules.end("host a left", 130) == []
