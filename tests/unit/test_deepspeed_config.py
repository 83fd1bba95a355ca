"""DeepSpeed's configuration: read whole, mapped, or refused by name. Samples are like those of its documentation."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import photinus
from photinus.compat.deepspeed_schedules import Schedule, make_schedule

# As DeepSpeed's page on its configuration begins, with bf16 in place of fp16.
DOCUMENTED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": True,
}
# As Hugging Face's page on ZeRO stage 3, without offloading.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
GIVEN = {
    "lr": 3e-5,
    "betas": [0.9, 0.98],
    "eps": 1e-7,
    "weight_decay": 0.1,
    "total_num_steps": 100,
    "warmup_num_steps": 10,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "bf16": True,
}
SMALL = {"train_batch_size": 8, "dataloader_drop_last": True}


def read(content, **options):
    return photinus.deepspeed_config(content, **{"world_size": 2, **options})


def test_the_documentations_own_sample_becomes_keyword_arguments_of_the_trainer(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DOCUMENTED))
    config = read(path)
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation) == (8, 4, 1)
    assert config.trainer_options() == {
        "accumulate": 1,
        "precision": "bfloat16",
        "clip_norm": None,
        "strategy": "zero1",
        "scheduler_every": "step",
    }
    assert config.loader_options() == {"batch_size": 8, "drop_last": None}
    optimizer = config.make_optimizer(nn.Linear(2, 2).parameters())
    assert type(optimizer) is torch.optim.AdamW  # DeepSpeed's "Adam" decays apart from the gradient unless told not to
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.00015, 0.0)
    assert config.make_scheduler(optimizer) is None


def test_hugging_faces_auto_is_filled_from_what_the_caller_gives(capsys):
    config = read(HUGGING_FACE, auto=GIVEN)
    assert (config.train_batch_size, config.batch_size, config.accumulation) == (24, 8, 3)
    assert (config.strategy, config.precision, config.clip_norm) == ("zero3", "bfloat16", 1.0)
    assert config.wrap_options() == {"strategy": "zero3"}
    optimizer = config.make_optimizer(nn.Linear(2, 2).parameters())
    found = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert found == {"lr": 3e-5, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}
    assert config.scheduler == (
        "WarmupDecayLR",
        {"total_num_steps": 100, "warmup_min_lr": 0.0, "warmup_max_lr": 3e-5, "warmup_num_steps": 10},
    )
    told = capsys.readouterr().out
    assert "steps_per_print has no effect here" in told
    assert "wall_clock_breakdown is always on here" in told  # though the file says false


def test_an_auto_that_nobody_gave_is_named_with_what_to_write():
    given = {name: value for name, value in GIVEN.items() if name != "lr"}
    with pytest.raises(ValueError, match=r'optimizer\.params\.lr is "auto": .*auto={"lr": \.\.\.}'):
        read(HUGGING_FACE, auto=given)
    with pytest.raises(ValueError, match=r'if both are "auto", give one in auto={\.\.\.}'):
        read({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"})


def test_an_auto_under_the_older_name_of_bf16_is_filled_too():
    config = read({"train_batch_size": 4, "bfloat16": {"enabled": "auto"}}, auto={"bf16": True})
    assert config.precision == "bfloat16"


def test_an_auto_of_float16_is_filled_as_the_error_says():
    content = {"train_batch_size": 4, "fp16": {"enabled": True, "initial_scale_power": "auto"}}
    with pytest.raises(ValueError, match=r'initial_scale_power is "auto": .*auto={"initial_scale_power": \.\.\.}'):
        read(content)
    assert read(content, auto={"initial_scale_power": 5}).precision.get_scale() == 32.0


@pytest.mark.parametrize(
    ("given", "world_size", "found"),
    [
        ({"train_batch_size": 32}, 4, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 8}, 4, (32, 8, 1)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (32, 4, 2)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 4, (24, 2, 3)),
        ({"train_batch_size": 32}, 3, (32, 11, 1)),  # 11, 11 and 10
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 3, (32, 6, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}, 3, (32, 6, 2)),  # 8 is what memory allows
    ],
)
def test_two_of_the_batch_sizes_make_the_third(given, world_size, found):
    config = read(given, world_size=world_size)
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation) == found
    assert config.batch_size * config.accumulation == config.train_batch_size


def test_batch_sizes_that_do_not_fit_are_refused_with_all_numbers_and_the_world_size():
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match=r"and 3 ranks do not .* 32 must be .* 5 x .* 2 x 3 = 30$"):
        read(sizes, world_size=3)
    with pytest.raises(ValueError, match=r"train_batch_size 2 and 4 ranks do not fit .* 1 x .* 1 x 4 = 4$"):
        read({"train_batch_size": 2}, world_size=4)
    with pytest.raises(ValueError, match="train_batch_size or train_micro_batch_size_per_gpu is needed"):
        read({"gradient_accumulation_steps": 2})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_batchsize": 8}, r"train_batchsize: .* no such key. Did you mean 'train_batch_size'\?"),
        ({"zero_optimization": {"stag": 1}}, r"zero_optimization\.stag: .* Did you mean 'stage'\?"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: 4, but 0, 1, 2 or 3 is needed"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            r"offload_optimizer is not supported: .* stay",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            r"zero_quantized_weights is not supported",
        ),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16 and bf16 are on, but a training has one precision",
        ),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "a number, 0 or more is needed"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp is not supported: .* NVIDIA apex"),
        ({"elasticity": {"enabled": True}}, r"elasticity is not supported: .*--nnodes LEAST:MOST"),
        ({"gradient_clipping": -1}, "gradient_clipping: -1, but a number above 0"),
        ({"optimizer": {"params": {"lr": 1}}}, 'optimizer needs a "type"'),
        ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is not supported: it is 1-bit Adam of DeepSpeed"),
        ({"optimizer": {"type": "AdamV"}}, r"no such optimizer. Did you mean 'Adam"),
        (
            {"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}},
            r"params\.momentun: .* mean 'momentum'\?",
        ),
        ({"scheduler": {"type": "WarmupLr"}}, r"'WarmupLr' is not one of .* Did you mean 'WarmupLR'\?"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "WarmupDecayLR needs total_num_steps in its params"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_first_stair_count": 4}}}, "stair_count is not supported"),
        ({"bf16": {}, "train_batch_size": 0}, "train_batch_size: 0, but a whole number above 0"),
    ],
)
def test_what_is_unknown_or_not_supported_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        read({**SMALL, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bf16": {"enabled": "false"}}, "bf16.enabled: 'false', but true or false is needed, without quotes"),
        ({"bf16": "true"}, "bf16: 'true', but"),
        ({"zero_optimization": 2}, r"zero_optimization: 2, but an object {\.\.\.} is needed"),
        ({"optimizer": "AdamW"}, r"optimizer: 'AdamW', but an object"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, r"optimizer\.params: \[1\], but an object"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}},
            r"params\.lr: '1e-4', but a number is needed, without quotes",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, r"betas: 0\.9, but two numbers"),
        (
            {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
            "lr_range_test_step_size: 0, but a number above 0",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        read({**SMALL, **change})


ADAMW = {"type": "AdamW"}


@pytest.mark.parametrize(
    ("change", "auto", "words"),
    [
        ({"zero_optimization": {"stage": "auto"}}, {}, r'zero_optimization\.stage is "auto": say what'),
        ({"zero_optimization": {"offload_optimizer": "auto"}}, {}, r'offload_optimizer is "auto": say what'),
        (
            {"zero_optimization": {"offload_optimizer": "auto"}},
            {"offload_optimizer": {"device": "cpu"}},
            "not supported",
        ),
        ({"zero_optimization": {"stage": 1.5}}, {}, r"stage: 1\.5, but 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, {}, "stage: True, but 0, 1, 2 or 3"),
        ({"zero_optimization": {"reduce_bucket_size": math.inf}}, {}, "reduce_bucket_size: inf, but a number of elem"),
        ({"train_batch_size": {}}, {}, r"train_batch_size: \{\}, but a whole number above 0"),
        ({"train_batch_size": 8.5}, {}, r"train_batch_size: 8\.5, but a whole number above 0"),
        ({"gradient_clipping": math.nan}, {}, "gradient_clipping: nan, but a number above 0"),
        ({"dataloader_drop_last": "false"}, {}, "dataloader_drop_last: 'false', but true or false is needed, without"),
        ({"tensor_parallel": {"autotp_size": "auto"}}, {}, "tensor_parallel is not supported"),
        ({"optimizer": {**ADAMW, "params": {"adam_w_mode": "false"}}}, {}, "adam_w_mode: 'false', but true or false"),
        ({"optimizer": {**ADAMW, "params": {"lr": {}}}}, {}, r"params\.lr: \{\}, but a number"),
        ({"optimizer": {**ADAMW, "params": {"eps": math.inf}}}, {}, r"params\.eps: inf, but a number"),
        ({"optimizer": {**ADAMW, "params": {"lr": "auto"}}}, {"lr": "3e-5"}, r"params\.lr: '3e-5', but a number"),
        (
            {"optimizer": {**ADAMW, "params": {"lr": -1}}},
            {},
            r"optimizer\.params: AdamW does not take them: Inval",
        ),
        ({"optimizer": {"type": None}}, {}, 'optimizer needs a "type"'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, {}, "'cubic', but \"log\" or"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": [1]}}}, {}, r"\[1\], but a number"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": None}}}, {}, "needs total_num_steps"),
        ({"bf16": {"enabled": "auto"}}, {"bf_16": True}, r"auto=\{'bf_16': \.\.\.\}: .*Did you mean 'bf16'\?"),
        ({"bf16": {"enabled": "auto"}}, {"bf16": "yes"}, r"bf16\.enabled: 'yes', but true or false"),
        ({}, {"learning_rate": 1.0}, "auto={'learning_rate'"),
    ],
)
def test_what_has_another_kind_or_range_is_refused_by_name_before_any_work(change, auto, words):
    with pytest.raises(ValueError, match=words):
        read({**SMALL, **change}, auto=auto)


def test_whole_floats_nulls_and_a_byte_order_mark_are_understood(tmp_path):
    content = {
        "dataloader_drop_last": False,
        "train_batch_size": 8.0, "gradient_clipping": None, "bf16": None, "steps_per_print": "auto",
        "zero_optimization": {"stage": 2.0, "reduce_bucket_size": None, "overlap_comm": "auto", "offload_param": None},
        "optimizer": {"type": "AdamW", "params": {"lr": None, "fused": None}}, "scheduler": None,
    }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + json.dumps(content), encoding="utf-8")
    config = read(path)
    assert (config.train_batch_size, config.strategy, config.notes) == (8, "zero2", ())
    assert config.wrap_options() == {"strategy": "zero2"}
    assert config.make_optimizer(nn.Linear(1, 1).parameters()).defaults["lr"] == 0.001
    off = {"offload_optimizer": "auto"}
    assert read({**SMALL, "zero_optimization": off}, auto={"offload_optimizer": {"device": "none"}}).strategy == "ddp"


def test_a_world_without_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size=0 is too small"):
        read(SMALL, world_size=0)


def test_what_is_switched_off_is_not_refused():
    off = {"amp": {"enabled": False}, "elasticity": {"enabled": False}, "sparse_attention": None}
    zero = {"stage": 2, "offload_param": {"device": "none"}, "zero_hpz_partition_size": 1, "cpu_offload": False}
    config = read({**SMALL, **off, "zero_optimization": zero, "fp16": {"enabled": False}})
    assert (config.strategy, config.notes) == ("zero2", ())


def test_a_flag_that_is_off_without_an_effect_has_a_line_too():
    off = {"wall_clock_breakdown": False, "sparse_gradients": False, "csv_monitor": {"enabled": False}}
    off |= {"tensorboard": {"enabled": False}, "amp": False}  # these are off here, too
    config = read({**SMALL, **off, "zero_optimization": {"stage": 2, "overlap_comm": False}, "fp16": False})
    named = [note.split()[0] for note in config.notes]
    assert named == ["wall_clock_breakdown", "sparse_gradients", "csv_monitor", "zero_optimization.overlap_comm"]


def test_the_last_batch_is_kept_as_with_deepspeed():
    for given in ({}, {"dataloader_drop_last": True}, {"dataloader_drop_last": False}):
        config = read({"train_batch_size": 8, **given})
        assert (config.notes, config.loader_options()["drop_last"]) == ((), given.get("dataloader_drop_last"))


def test_bucket_sizes_are_mapped_where_the_strategy_has_buckets():
    config = read({**SMALL, "zero_optimization": {"stage": 1, "reduce_bucket_size": 2**20}})
    assert config.wrap_options() == {"strategy": "zero1", "bucket_cap_mb": 4.0}
    sharded = read({**SMALL, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}})
    assert sharded.wrap_options() == {"strategy": "zero3"}
    assert "block by block" in sharded.notes[0]


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, torch.optim.Adam),
        ({"type": "adamw"}, torch.optim.AdamW),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}, torch.optim.SGD),
        ({"type": "Adagrad", "params": {"lr": 0.1}}, torch.optim.Adagrad),
        ({"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9}}, torch.optim.RMSprop),
    ],
)
def test_optimizers_become_those_of_torch(section, kind):
    optimizer = read({**SMALL, "optimizer": section}).make_optimizer(nn.Linear(2, 2).parameters())
    assert type(optimizer) is kind
    wanted = {
        name: value for name, value in section.get("params", {}).items() if name not in ("adam_w_mode", "torch_adam")
    }
    assert {name: optimizer.defaults[name] for name in wanted} == wanted


def test_an_adam_of_torch_has_the_defaults_of_torch():
    optimizers = [{"type": "AdamW"}, {"type": "Adam", "params": {"torch_adam": True}}]
    made = [read({**SMALL, "optimizer": each}).make_optimizer(nn.Linear(2, 2).parameters()) for each in optimizers]
    assert [each.defaults["weight_decay"] for each in made] == [0.0, 0.01]


def rates(name, steps, lr=0.5, **params):
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=lr)
    schedule = make_schedule(optimizer, name, params)
    found, momenta = [], []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    return found, momenta


def test_warm_up_is_logarithmic_unless_linear_and_begins_with_two_steps_at_the_minimum():
    found, _ = rates("WarmupLR", 6, warmup_min_lr=0.1, warmup_max_lr=1.1, warmup_num_steps=4)
    ramp = [math.log(i) / math.log(4) for i in (1, 2, 3, 4)]
    assert found == pytest.approx([0.1, *(0.1 + part for part in ramp), 1.1])
    found, _ = rates("WarmupLR", 7, warmup_num_steps=4, warmup_type="linear")
    assert found == pytest.approx([0, 0, 0.125, 0.25, 0.375, 0.5, 0.5])  # up to the optimizer's own rate


def test_decay_after_warm_up_ends_at_the_minimum_and_stays_there():
    params = {"warmup_max_lr": 1.0, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
    found, _ = rates("WarmupDecayLR", 9, **params)
    assert found == pytest.approx([0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_after_warm_up_ends_at_its_ratio_of_the_optimizers_rate():
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "warmup_min_ratio": 0.2}
    found, _ = rates("WarmupCosineLR", 9, **params, cos_min_ratio=0.1)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4)]
    assert found == pytest.approx([0.5 * part for part in (0, 0.2, 0.6, *cosine, 0.1, 0.1)])


def test_one_cycle_goes_up_and_down_and_then_decays_with_the_momentum_the_other_way():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    found, momenta = rates("OneCycle", 9, **params, decay_step_size=1, decay_lr_rate=1.0)
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 2, 0.1 / 3])
    assert momenta == pytest.approx([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9])


def test_the_range_test_rises_without_end():
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}
    assert rates("LRRangeTest", 5, **params)[0] == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    staircase, _ = rates("LRRangeTest", 5, **params, lr_range_test_staircase=True)
    assert staircase == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_a_schedule_goes_on_from_its_state():
    def made() -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        return optimizer, make_schedule(optimizer, "WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 9})

    (first, whole), (second, part) = made(), made()
    for _ in range(4):
        first.step()
        whole.step()
    part.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for optimizer, schedule in ((first, whole), (second, part)):
        optimizer.step()
        schedule.step()
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] > 0


def test_the_text_of_a_configuration_is_read_as_its_file_is():
    assert read(json.dumps(DOCUMENTED)) == read(DOCUMENTED)
    with pytest.raises(ValueError, match="the text given is not JSON: an object has the key 'a' 2 times"):
        read(' {"a": 1, "a": 2}')


@pytest.mark.parametrize("source", ["[1, 2]", "{"])
def test_a_file_that_is_no_object_is_named(tmp_path, source):
    path = tmp_path / "ds.json"
    path.write_text(source)
    with pytest.raises(ValueError, match=str(path)):
        read(path)


@pytest.mark.parametrize(
    "text", ['{"train_batch_size": 8, "train_batch_size": 16}', '{"train_batch_size": 8, "bf16": {"a": 1, "a": 1}}']
)
def test_a_key_that_the_file_has_twice_is_refused(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"ds.json is not JSON: an object has the key '\w+' 2 times. Leave it there once"
    ):
        read(path)
