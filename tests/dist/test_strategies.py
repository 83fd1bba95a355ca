"""All strategies train the same model, over real processes, and their checkpoints are one and the same."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.dist.strategy_cases import SHARDED, SHARING, Net, Training, numbers, plain_losses
from tests.rank_pool import RankPool

ZERO = ("zero1", "zero2", "zero3")
NEED_WHOLE = {"Adafactor", "LBFGS", "Muon", "Rprop", "SparseAdam"}


def _pool(world_size: int, backend: str, folder: Path) -> RankPool:
    return RankPool(
        "tests.dist.strategy_cases:Cases",
        world_size=world_size,
        timeout_s=120.0,
        environ={"STORE_OF_TEST": str(folder / "store"), "BACKEND_OF_TEST": backend},
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with _pool(2, "photinus", tmp_path_factory.mktemp("two")) as pool:
        yield pool


def _distance(state: Any, other: Any) -> float:
    """‖a - b‖ / ‖b‖ over all numbers of two states."""
    a, b = _flat(state), _flat(other)
    assert len(a) == len(b)
    assert a
    return math.dist(a, b) / math.hypot(*b)


def _flat(state: Any) -> list[float]:
    if isinstance(state, dict):
        return [number for key in sorted(state) for number in _flat(state[key])]
    if isinstance(state, list):
        return [number for value in state for number in _flat(value)]
    return [float(state)] if isinstance(state, (int, float)) and not isinstance(state, bool) else []


def _alone(optimizer: str = "adamw", steps: int = 5, **options: Any) -> dict[str, Any]:
    """The same training in this process, on the whole batches, with plain torch."""
    training = Training(None, optimizer, seed=7)
    told = training.run(range(steps), **options)
    return {
        "steps": told,
        "model": numbers(training.model.state_dict()),
        "optimizer": numbers(training.optimizer.state_dict()),
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_strategy_trains_the_very_bits_of_ddp_and_the_model_of_one_process(two: RankPool, optimizer: str) -> None:
    command = {"do": "train", "optimizer": optimizer}
    ddp = two.ask({**command, "strategy": "ddp"})[0]
    assert _distance(ddp["model"], _alone(optimizer)["model"]) < 1e-6
    assert ddp["steps"][0] != ddp["steps"][-1]
    for strategy in ZERO:
        assert two.ask({**command, "strategy": strategy})[0] == ddp, strategy


def test_a_moving_average_of_the_weights_is_that_of_ddp(two: RankPool) -> None:
    ddp = two.ask({"do": "average", "strategy": "ddp"})[0]
    assert ddp["state"]["n_averaged"] == [4.0]
    for strategy in ZERO:
        assert two.ask({"do": "average", "strategy": strategy})[0] == ddp, strategy


def test_gradients_add_up_inside_no_sync_and_are_averaged_once(two: RankPool) -> None:
    command = {"do": "train", "optimizer": "sgd", "parts": 3}
    ddp = two.ask({**command, "strategy": "ddp"})[0]
    for strategy in ZERO:
        assert two.ask({**command, "strategy": strategy})[0] == ddp, strategy


def test_under_autocast_the_bits_are_those_of_ddp(two: RankPool) -> None:
    command = {"do": "train", "autocast": True}
    ddp = two.ask({**command, "strategy": "ddp"})[0]
    assert ddp["model"] != two.ask({"do": "train", "strategy": "ddp"})[0]["model"]  # bfloat16 was used
    for strategy in ZERO:
        assert two.ask({**command, "strategy": strategy})[0] == ddp, strategy


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="torch 2.13 is the first whose FSDP2 can",
)
@pytest.mark.parametrize("units", [False, True])
def test_ranks_that_use_different_parameters_train_what_ddp_trains(two: RankPool, units: bool) -> None:
    command = {"do": "different_parameters", "units": units}
    ddp = two.ask({**command, "strategy": "ddp"})[0]
    for strategy in ZERO:
        assert two.ask({**command, "strategy": strategy})[0] == ddp, strategy


@pytest.mark.parametrize("strategy", SHARDED)
def test_leaving_an_inner_no_sync_leaves_the_outer_one_in_force(two: RankPool, strategy: str) -> None:
    assert [told["averaged"] for told in two.ask({"do": "nested_no_sync", "strategy": strategy})] == [False, False]


def test_the_norm_that_is_clipped_is_that_of_the_whole_model(two: RankPool) -> None:
    alone = _alone("sgd", clip=0.2)
    wanted = [step["norm"] for step in alone["steps"]]
    assert min(wanted) > 0.2  # it always clips
    for strategy in SHARING:
        ranks = two.ask({"do": "train", "strategy": strategy, "optimizer": "sgd", "clip": 0.2})
        norms = [[step["norm"] for step in told["steps"]] for told in ranks]
        assert norms[0] == norms[1]
        assert norms[0] == pytest.approx(wanted, rel=2e-6)
        assert _distance(ranks[0]["model"], alone["model"]) < 1e-6


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_an_overflow_in_one_ranks_part_makes_all_ranks_skip_the_step(
    two: RankPool, strategy: str, optimizer: str
) -> None:
    ranks = two.ask({"do": "overflow", "strategy": strategy, "optimizer": optimizer})
    for told in ranks:
        assert [step["scale"] for step in told["steps"]] == [16.0, 8.0]  # grown once, then halved
    assert ranks[0]["same"]
    assert ranks[0]["finite"]


@pytest.mark.parametrize("strategy", ZERO)
def test_all_ranks_start_with_rank_0s_model_and_another_model_is_refused(two: RankPool, strategy: str) -> None:
    for told in two.ask({"do": "start", "strategy": strategy, "differing": "shape"}):
        assert "0.weight" in told
        assert "[2, 2]" in told
        assert "[3, 2]" in told
    assert two.ask({"do": "start", "strategy": strategy, "differing": "buffers"}) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("strategy", ZERO)
def test_weights_changed_after_a_forward_without_gradients_are_the_models(two: RankPool, strategy: str) -> None:
    told = two.ask({"do": "change_after_evaluation", "strategy": strategy})
    assert [output for output, _ in told] == [10.0, 10.0]
    assert told[0][1] == {"weight": [5.0, 5.0]}


def test_each_rank_holds_its_part_only(two: RankPool) -> None:
    net = Net()
    parameters = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    held = {strategy: two.ask({"do": "held", "strategy": strategy}) for strategy in SHARING}
    for told in held["ddp"]:
        assert told == {"parameters": parameters, "optimizer": 2 * trained}
    for strategy in ZERO:
        parts = [told["optimizer"] for told in held[strategy]]
        assert sum(parts) == 2 * trained
        assert max(parts) < 0.6 * 2 * trained
    for strategy in SHARDED:
        parts = [told["parameters"] for told in held[strategy]]
        assert sum(parts) == parameters
        assert max(parts) < 0.6 * parameters


@pytest.mark.parametrize("strategy", SHARDED)
def test_exchanges_of_a_split_model_use_memory_whose_pages_stay(two: RankPool, strategy: str) -> None:
    """The group's own gives them back after each exchange, and the next one would touch them again."""
    assert two.ask({"do": "comm_buffers", "strategy": strategy}) == [0, 0]


@pytest.mark.parametrize("strategy", ZERO)
def test_parameters_that_come_after_wrapping_are_refused_by_name(two: RankPool, strategy: str) -> None:
    names = {"layer put in": "blocks.0.up.1.weight", "layer appended": "blocks.2.up.weight", "assigned": "head.weight"}
    for change, name in names.items():
        for steps in (0, 2):
            for told in two.ask({"do": "changed_after_wrap", "strategy": strategy, "change": change, "steps": steps}):
                assert "changed after it was wrapped: " in told, (change, steps, told)
                assert name in told or "embedding.weight" in told, (change, steps, told)
                assert "Wrap after you changed the model" in told
    for told in two.ask({"do": "changed_after_wrap", "strategy": strategy, "change": "", "steps": 2}):
        assert told == "no error"


@pytest.mark.parametrize("samples", [3, 9, 17])
def test_validation_is_the_same_where_ranks_have_different_numbers_of_batches(two: RankPool, samples: int) -> None:
    values = {s: two.ask({"do": "evaluate", "strategy": s, "samples": samples}) for s in ("ddp", *SHARDED)}
    assert values["ddp"][0] == values["ddp"][1]
    assert values["zero2"] == values["zero3"] == values["ddp"]


def test_a_metric_that_fails_on_one_rank_is_told_there_and_holds_nobody_up(two: RankPool) -> None:
    for strategy in ("ddp", "zero3"):
        told = two.ask({"do": "failing_evaluation", "strategy": strategy})
        assert told[1] == "ZeroDivisionError: no such metric"
        assert told[0].startswith(("PhotinusError", "MismatchError"))
        assert two.ask({"do": "evaluate", "strategy": strategy, "samples": 5})[0] > 0  # the group goes on


@pytest.mark.parametrize("strategy", ZERO)
def test_one_rank_alone_does_not_save_what_is_split(two: RankPool, tmp_path: Path, strategy: str) -> None:
    told, _ = two.ask({"do": "save_alone", "strategy": strategy, "folder": str(tmp_path)})
    assert "optimizer (" in told
    assert "is split over the ranks" in told
    assert "photinus.save" in told


def test_a_validation_between_backward_and_step_does_not_train_stale_parameters(two: RankPool) -> None:
    ddp = two.ask({"do": "evaluate_inside_step", "strategy": "ddp"})[0]
    for strategy in SHARDED:
        assert two.ask({"do": "evaluate_inside_step", "strategy": strategy})[0] == ddp


def test_a_forward_before_the_step_of_a_late_optimizer_does_not_train_stale_parameters(two: RankPool) -> None:
    for when in ("after", "closure"):
        ddp = two.ask({"do": "late_optimizer", "strategy": "ddp", "when": when})[0]
        for strategy in ZERO:
            assert two.ask({"do": "late_optimizer", "strategy": strategy, "when": when})[0] == ddp, (when, strategy)


def test_a_norm_of_any_order_is_clipped_where_a_rank_holds_no_part(two: RankPool) -> None:
    for norm_type in (math.inf, -math.inf, -1.0, 0.0, 1.0):
        command = {"do": "clip", "norm_type": norm_type}
        ddp = two.ask({**command, "strategy": "ddp"})[0]
        for strategy in ZERO:
            assert two.ask({**command, "strategy": strategy})[0] == ddp, (norm_type, strategy)


def test_stacks_that_share_a_block_and_transposed_parameters_train_as_under_ddp(two: RankPool) -> None:
    ddp = two.ask({"do": "odd_layout", "strategy": "ddp"})[0]
    for strategy in ZERO:
        assert _distance(two.ask({"do": "odd_layout", "strategy": strategy})[0], ddp) < 1e-6, strategy


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_layer_that_was_not_gathered_is_an_error_with_advice(two: RankPool, strategy: str) -> None:
    for told in two.ask({"do": "layer_by_layer", "strategy": strategy}):
        assert "Only the forwards of the model and of its units gather parameters" in told
        assert "wrap(shard=...)" in told


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_a_model_of_a_session_that_has_ended_says_so(two: RankPool, strategy: str) -> None:
    for told in two.ask({"do": "ended_group", "strategy": strategy}):
        assert "has ended: wrap a new one, and load the saved state" in told


@pytest.mark.parametrize("how", ["state", "groups", "split"])
def test_what_the_user_puts_into_an_optimizer_after_wrap_counts_as_under_ddp(two: RankPool, how: str) -> None:
    ddp = two.ask({"do": "changed_by_hand", "strategy": "ddp", "how": how})[0]
    for strategy in ZERO:
        for told in two.ask({"do": "changed_by_hand", "strategy": strategy, "how": how})[:1]:
            if (strategy, how) == ("zero1", "split"):
                assert "the parameter groups of ShardedSGD had [4] parameters in wrap, and [2, 2] or others" in told
                assert "optimizer.add_param_group" in told
            else:
                assert told == ddp, strategy


def test_the_state_dict_of_a_split_optimizer_is_an_error_and_not_a_part(two: RankPool) -> None:
    for told in two.ask({"do": "changed_by_hand", "strategy": "zero1", "how": "state_dict"}):
        assert "SGD.state_dict() would be a part" in told
        assert "photinus.save(path, optimizer=optimizer)" in told


@pytest.mark.parametrize("strategy", SHARDED)
def test_an_optimizer_that_would_train_nothing_of_a_split_model_is_refused_at_its_step(
    two: RankPool, strategy: str
) -> None:
    told = two.ask({"do": "late_optimizer", "strategy": strategy, "when": "before"})
    for error in told:
        assert "SGD.step() would train nothing of 0.weight of Sequential: made before photinus.wrap" in error
    for error in two.ask({"do": "late_optimizer", "strategy": "zero2", "when": "gathered"}):
        assert "SGD.step() would train nothing of 0.weight: " in error


@pytest.mark.parametrize(
    ("saved", "loaded"), [("zero3", "ddp"), ("zero1", "zero2"), ("ddp", "zero3"), ("zero2", "zero1")]
)
def test_a_checkpoint_of_one_strategy_goes_on_under_another(
    two: RankPool, tmp_path: Path, saved: str, loaded: str
) -> None:
    _goes_on(two, str(tmp_path / "state.pt"), saved, loaded)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_split_model_may_be_compiled_or_used_in_inference_mode_before_it_trains(two: RankPool, strategy: str) -> None:
    for told in two.ask({"do": "odd_starts", "strategy": strategy}):
        assert told["same"]
        assert math.isfinite(told["loss"])
        before_wrap, after_wrap = told["averages"]
        assert before_wrap == after_wrap


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_split_model_loads_a_plain_state(two: RankPool, strategy: str) -> None:
    for told in two.ask({"do": "load_plain", "strategy": strategy}):
        assert told["loaded"]
    first, *others = (told["gathered"] for told in two.ask({"do": "load_plain", "strategy": strategy}))
    assert first > 0
    assert set(others) == {0}, "a rank that saves nothing keeps no whole tensors"


def _goes_on(pool: RankPool, path: str, saved: str, loaded: str) -> None:
    before = pool.ask({"do": "save", "strategy": saved, "path": path})
    after = pool.ask({"do": "load", "strategy": loaded, "path": path})
    assert after[0]["parameters"] == before[0]["parameters"], (saved, loaded)
    if loaded in ZERO and len(after) > 1:  # each rank keeps its own part of what was loaded
        assert sum(told["held"] for told in after) == 2 * sum(p.numel() for p in Net().parameters() if p.requires_grad)
    assert [told["further"] for told in after] == [told["further"] for told in before], (saved, loaded)
    mean = [sum(ranks) / len(ranks) for ranks in zip(*([s["loss"] for s in t["further"]] for t in before), strict=True)]
    assert plain_losses(path) == pytest.approx(mean, rel=1e-5), saved


@pytest.mark.parametrize("strategy", ZERO)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(two: RankPool, tmp_path: Path, strategy: str) -> None:
    ranks = two.ask({"do": "failed_load", "strategy": strategy, "path": str(tmp_path / "x.pt")})
    untouched = two.ask({"do": "train", "strategy": strategy, "steps": 4, "seed": 99})
    for told, never_loaded in zip(ranks, untouched, strict=True):
        assert "I do not want it" in told["error"]
        assert "Nothing was changed" in told["error"]
        assert told["further"] == never_loaded["steps"][2:]
    assert ranks[0]["before"] == ranks[0]["after"]


def test_what_other_ranks_remember_is_gathered_without_unpickling_anything(two: RankPool, tmp_path: Path) -> None:
    path, marker = str(tmp_path / "x.pt"), tmp_path / "marker"
    for told in two.ask({"do": "remembered", "path": path, "marker": str(marker)}):
        assert re.match(r"rank 1: state\[\d+\]\['odd'\] is a .*Payload, which cannot go to another rank", told)
    assert not marker.exists()
    assert two.ask({"do": "remembered", "path": path, "marker": None})[0] == [True, 11, True, "torch.bfloat16"]


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp", *ZERO])
def test_every_optimizer_that_a_strategy_takes_goes_on_from_its_state(
    two: RankPool, tmp_path: Path, strategy: str
) -> None:
    refused = {"zero1": {"LBFGS"}, "zero2": NEED_WHOLE, "zero3": NEED_WHOLE}.get(strategy, set())
    for told in two.ask({"do": "load_each", "strategy": strategy, "folder": str(tmp_path)}):
        assert {kind: how for kind, how in told.items() if kind not in refused and how != "same"} == {}
        assert [kind for kind in refused if not re.match("(Type|Value)Error: strategy 'zero", told[kind])] == []


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_loop_with_two_optimizers_goes_on_as_if_it_had_not_been_cut(
    two: RankPool, tmp_path: Path, strategy: str
) -> None:
    ranks = two.ask({"do": "two_optimizers", "strategy": strategy, "out": str(tmp_path)})
    for told in ranks:
        assert told["whole"][0] == told["resumed"][0]
    assert ranks[0]["whole"] == ranks[0]["resumed"]
    assert two.ask({"do": "checkpoint_files", "folder": str(tmp_path)})[0] == ranks[0]["whole"][1]


@pytest.mark.parametrize(
    ("strategy", "what", "words"),
    [
        ("dp", "several", "ValueError: strategy 'dp' is one process .* there are 2 processes"),
        ("zero1", "no optimizer", r"ValueError: strategy 'zero1' .* wrap\(model, optimizer, strategy=\"zero1\"\)"),
        ("zero1", "LBFGS", "TypeError: strategy 'zero1' cannot split LBFGS.*'_params'"),
        ("zero1", "dtypes", "ValueError: .* steps float32 and float64"),
        ("zero3", "LBFGS", "TypeError: strategy 'zero3' cannot split LBFGS"),
        ("zero3", "Adafactor", "TypeError: strategy 'zero3' gives .* Adafactor computes with whole rows"),
        ("zero2", "scalar", r"ValueError: strategy 'zero2' cuts .* 0\.scale has none"),
        ("zero2", "empty", r"ValueError: strategy 'zero2' cannot split 0\.nothing: it is empty .*\[0, 3\]"),
        ("zero3", "dtypes", r"ValueError: .* in one unit \(Sequential\) parameters are float32 and float64"),
        ("zero3", "sparse", "ValueError: strategy 'zero3' cannot split the sparse gradient of 2"),
        ("zero2", "twice", "ValueError: the model is wrapped already"),
        *(
            (strategy, "option", f"TypeError: strategy '{strategy}' has no option 'no_such_option'")
            for strategy in ZERO
        ),
    ],
)
def test_what_a_strategy_does_not_suit_is_refused_by_name_before_anything_changes(
    two: RankPool, strategy: str, what: str, words: str
) -> None:
    for told in two.ask({"do": "refuse", "strategy": strategy, "what": what}):
        assert re.search(words, told["error"]), told["error"]
        assert told["untouched"]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "photinus"), (3, "gloo")])
def test_the_same_at_other_world_sizes_and_over_gloo(tmp_path: Path, world_size: int, backend: str) -> None:
    with _pool(world_size, backend, tmp_path) as pool:
        for options in ({}, {"parts": 2}, {"clip": 0.2}):
            # In parts, batch norm sees other batches in one process than on several ranks.
            alone = (
                pool.ask({"do": "train", "strategy": "ddp", **options})[0] if "parts" in options else _alone(**options)
            )
            for strategy in (*SHARING, "torch-ddp"):
                told = pool.ask({"do": "train", "strategy": strategy, **options})[0]
                assert _distance(told["model"], alone["model"]) < 2e-6, (strategy, options)
        for saved, loaded in zip(SHARING, SHARING[::-1], strict=True):
            _goes_on(pool, str(tmp_path / f"{saved}.pt"), saved, loaded)


@pytest.mark.slow
def test_a_checkpoint_of_every_strategy_goes_on_under_every_other(two: RankPool, tmp_path: Path) -> None:
    for saved in (*SHARING, "torch-ddp"):
        for loaded in (*SHARING, "torch-ddp"):
            _goes_on(two, str(tmp_path / f"{saved}-{loaded}.pt"), saved, loaded)


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_world_size(two: RankPool, tmp_path: Path) -> None:
    with _pool(3, "photinus", tmp_path) as three:
        for saved in SHARING:
            path = str(tmp_path / f"{saved}.pt")
            before = two.ask({"do": "save", "strategy": saved, "path": path})
            for loaded in SHARING:
                after = three.ask({"do": "load", "strategy": loaded, "path": path})
                assert after[0]["parameters"] == before[0]["parameters"], (saved, loaded)
                losses = [sum(t["further"][i]["loss"] for t in after) / 3 for i in (0, 1)]
                assert losses == pytest.approx(plain_losses(path), rel=1e-5), (saved, loaded)


def test_the_reference_of_these_tests_is_plain_torch() -> None:
    training = Training(None)
    assert type(training.model) is Net
    assert type(training.optimizer) is torch.optim.AdamW
