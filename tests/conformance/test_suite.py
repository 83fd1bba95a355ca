"""What passes in PyTorch's own distributed suite with gloo and torch's DDP passes with photinus's backend and DDP.

docs/conformance.md says what is run and why some tests are apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.conformance import baseline
from tests.conformance.apart import Outcomes, measure
from tests.conformance.plan import Plan

if (unknown := baseline.unknown_because()) is not None:
    pytest.skip(unknown, allow_module_level=True)

OF_GLOO_ALONE = {"test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup"}
"""torch.distributed.monitored_barrier refuses every backend whose name is not "gloo"."""

OF_GLOO_ALONE_ON_CPU = OF_GLOO_ALONE | {
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_wait_all_ranks",
}
"""The same among the tests that want CUDA devices."""

LATE = {
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_invalid_static_graph",
}
"""These let a backward with missing gradients pass and expect the error in the forward after it. photinus's class
raises in that backward, unless it is told to be late."""

PHOTINUS_DDP = "photinus"
LATE_DDP = "tests.conformance.late:DistributedDataParallel"

ALL_TO_ALL = [
    f"test_all_to_all{kind}"
    for kind in (
        "",
        "_complex",
        "_full_group",
        "_group",
        "_single_equal_split",
        "_single_equal_split_complex",
        "_single_equal_split_full_group",
        "_single_equal_split_group",
        "_single_unequal_split",
        "_single_unequal_split_complex",
        "_single_unequal_split_full_group",
        "_single_unequal_split_group",
    )
]

SAMPLE = [
    "test_Backend_enum_class",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_batch_isend_irecv_gloo_tags",
    "test_get_future",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_max",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_ddp_broadcast_buffer",
    "test_ddp_create_graph",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
    "test_ddp_logging_data_cpu",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_post_localSGD_optimizer_parity",
]
"""One test of each family."""


def assert_all_pass(plan: Plan, names: Iterable[str], deadline_s: float) -> Outcomes:
    """Runs the tests; the error names those that do not pass and shows every rank's output."""
    wanted = sorted(names)
    assert wanted
    outcomes = measure(plan, wanted, deadline_s=deadline_s)
    assert sorted(outcomes) == wanted, f"not in this suite: {sorted(set(wanted) - set(outcomes))}"
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome["status"] != "pass"}
    shown = "\n".join(f"===== {name}: {o['status']} after {o['seconds']} s\n{o['why']}" for name, o in wrong.items())
    assert not wrong, f"{plan}: {len(wrong)} of {len(wanted)} do not pass: {', '.join(wrong)}\n{shown}"
    if plan.backend == "photinus":
        strangers = [name for name, outcome in outcomes.items() if not outcome["group"]]
        assert not strangers, f"{plan}: passed without making a group of the backend: {', '.join(strangers)}"
    return outcomes


@pytest.mark.timeout(120)
def test_a_test_of_each_family_passes_over_photinus_with_its_ddp() -> None:
    plan = Plan("photinus", 2, ddp=PHOTINUS_DDP, cuda_on_cpu=True)
    outcomes = assert_all_pass(plan, SAMPLE, 100)
    assert set(SAMPLE) <= set(baseline.passing(plan))
    assert sum(outcome["ddp"] for outcome in outcomes.values()) >= 9


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("hosts", ["aa", "aaa", "aaaa", "ab", "aba", "aabb"])
def test_what_passes_over_gloo_passes_over_photinus_on_any_hosts(hosts: str) -> None:
    plan = Plan("photinus", len(hosts), hosts=hosts)
    assert_all_pass(plan, set(baseline.passing(plan)) - OF_GLOO_ALONE, 900)


@pytest.mark.slow
@pytest.mark.timeout(1860)
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "ab"])
def test_what_passes_over_gloo_with_cuda_tests_on_cpu_passes_over_photinus_on_any_hosts(hosts: str) -> None:
    plan = Plan("photinus", len(hosts), cuda_on_cpu=True, hosts=hosts)
    assert_all_pass(plan, set(baseline.passing(plan)) - OF_GLOO_ALONE_ON_CPU, 1800)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_torch_refuses_by_name_passes_under_gloos_name(world_size: int) -> None:
    plan = Plan("photinus", world_size, answers_as="gloo", cuda_on_cpu=True)
    barriers = {name for name in OF_GLOO_ALONE_ON_CPU if "barrier" in name}
    assert_all_pass(plan, barriers & set(baseline.passing(plan)), 200)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_the_all_to_all_tests_that_the_suite_keeps_for_mpi_pass(hosts: str) -> None:
    assert_all_pass(Plan("photinus", 3, like="mpi", cuda_on_cpu=True, hosts=hosts), ALL_TO_ALL, 200)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("backend", ["gloo", "photinus"])
@pytest.mark.parametrize(("cuda_on_cpu", "world_size"), [(False, 2), (False, 3), (False, 4), (True, 2), (True, 4)])
def test_what_torchs_ddp_passes_over_gloo_passes_with_photinus_ddp(
    backend: str, cuda_on_cpu: bool, world_size: int
) -> None:
    plan = Plan(backend, world_size, ddp=PHOTINUS_DDP, cuda_on_cpu=cuda_on_cpu)
    apart = LATE | (OF_GLOO_ALONE_ON_CPU if backend == "photinus" else set())
    outcomes = assert_all_pass(plan, set(baseline.passing_with_ddp(plan)) - apart, 900)
    strangers = [name for name, outcome in outcomes.items() if not outcome["ddp"]]
    assert not strangers, f"{plan}: passed without making the DDP class: {', '.join(strangers)}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["gloo", "photinus"])
def test_what_expects_a_late_error_passes_with_late_errors_and_gets_an_early_one_without(backend: str) -> None:
    late = Plan(backend, 2, ddp=LATE_DDP, cuda_on_cpu=True)
    assert set(baseline.passing_with_ddp(late)) >= LATE
    assert_all_pass(late, LATE, 120)
    outcomes = measure(Plan(backend, 2, ddp=PHOTINUS_DDP, cuda_on_cpu=True), LATE, deadline_s=120)
    for name, outcome in outcomes.items():
        assert outcome["status"] == "fail", name
        early = ("MissingGradientError", "Your training graph has changed in this iteration, but static_graph=True")
        assert any(error in outcome["why"] for error in early), f"{name}: {outcome['why']}"


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_the_baseline_is_what_gloo_does_here() -> None:
    plan = Plan("gloo", 2)
    now, recorded = baseline.condensed(measure(plan, deadline_s=900)), baseline.recorded(plan)
    assert {key: now[key] for key in ("pass", "ddp", "skip")} == {key: recorded[key] for key in ("pass", "ddp", "skip")}
