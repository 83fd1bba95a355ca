"""One rank does something else than the others in the body of a Loop: no strategy trains on in silence.

Each case is a training in which rank 1 misbehaves in step 4. It has to end with an error on every rank, or with the
weights of the same training without misbehaviour.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.dist.ways import STRATEGIES, outcomes
from tests.small_run import QUIET

STEPS, WRONG = 6, 4
CALLS = "some ranks made calls that others left out: "
ARGUMENTS = "the ranks made the same calls with other arguments: "

SAID = {
    "clip left out": CALLS + "loop.clip in step 4=made on rank 0, absent on rank 1",
    "other max_norm": ARGUMENTS + "loop.clip in step 4, max_norm=0.1 on rank 0, 0.2 on rank 1. All need",
    "other norm_type": ARGUMENTS + "loop.clip in step 4, norm_type=2.0 on rank 0, 1.0 on rank 1. All need",
    "other lr": ARGUMENTS + r"optimizer.step\(\) in step 4, group 1, lr=0.01 on rank 0, 0.05 on rank 1. All need",
    "zero_grad left out": ARGUMENTS + r"before optimizer.step\(\) in step 5, gradients of the step before kept=False",
    "step left out": (
        "rank 0 made 1 optimizer step, rank 1 made 0"
        "|rank 0 called broadcast .* rank 1 called (all_(reduce|gather)|photinus.Loop)|"
        + CALLS  # which of them comes first, the clock decides
        + r".*optimizer.step\(\) in step 4=made on rank 0, absent on rank 1"
    ),
    "parameter changed at the end": (
        r"changed after step 6=\[\] on rank 0, \['0.weight'\] on rank 1|the ranks hold different weights"
    ),
}
"""What some rank says, by the way in which rank 1 misbehaves: those that were silent under some strategy."""

OTHERS = [
    "clip more than once",
    "another step",
    "other betas",
    "backward left out",
    "another backward",
    "another share",
    "forward left out",
    "another forward",
    "no_sync",
    "body left out",
    "parameter changed",
    "parameter frozen",
    "another layer frozen",
    "gradient changed",
    "evaluate alone",
    "save alone",
    "stop",
    "log under another name",
    "log left out",
    "break",
    "exception",
    "eval mode",
    "scheduler left out",
    "buffer changed",
]
RIGHT = {"stop", "log under another name", "log left out"}
"""No misbehaviour: the training ends without an error, and where it does not stop early, with the same weights."""

LEFT = {
    **{("another share", s): "a rank may weigh its loss, as by its tokens" for s in STRATEGIES},
    **{("buffer changed", s): "a rank's own buffers count in its own forward, as documented" for s in STRATEGIES},
}
"""Cases that are not looked at, and why."""


def test_ranks_that_step_or_clip_differently_are_stopped(tmp_path: Path) -> None:
    found = outcomes(__name__, tmp_path, list(SAID), ("zero1", "zero3"))
    for (way, strategy), ranks in found.items():
        assert all(text.startswith("error: ") for text in ranks), (way, strategy, ranks)
        split = way.startswith("clip") and strategy != "zero1"  # whose norm is exchanged: the calls no longer match
        words = "called different (functions|collectives)" if split else SAID[way]
        assert all(re.search(words, text) for text in ranks), (way, strategy, ranks)
    for (_, strategy), ranks in outcomes(__name__, tmp_path / "own", ["step left out, own loop"], ("zero2",)).items():
        assert all("rank 0 made 1 optimizer step, rank 1 made 0" in text for text in ranks), (strategy, ranks)


def test_a_group_of_parameters_that_nothing_averages_is_an_error(tmp_path: Path) -> None:
    text = "ValueError: add_param_group gave an optimizer 2 parameters of none of the models given to the loop"
    for ranks in outcomes(__name__, tmp_path, ["group of a plain module"], ("ddp", "zero1")).values():
        assert all(text in said for said in ranks), ranks


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_a_function_that_one_rank_calls_alone_is_named_with_its_line(tmp_path: Path) -> None:
    found = outcomes(__name__, tmp_path, ["evaluate alone", "save alone"], ("ddp",))
    for (way, _), ranks in found.items():
        name = f"photinus.{way.split()[0]}"
        for text in ranks:
            line, call = r"dist/test_misbehaviour.py:\d+", r"\(all_(gather|reduce) of \w+\[\d+\][^;]*\)"
            first = rf"rank 0 called photinus\.Loop(\.backward)? at {line} {call}; "
            assert re.search(rf"functions as #\d+: {first}rank 1 called {name} at {line} {call}; ", text), text
            assert "Every rank must call the same functions, in the same order: move a call" in text


@pytest.mark.slow
def test_no_misbehaviour_of_one_rank_trains_on_in_silence(tmp_path: Path) -> None:
    for world_size in (2, 3):
        folder = tmp_path / str(world_size)
        found = outcomes(__name__, folder, [*SAID, *OTHERS], STRATEGIES, world_size)
        wrong = {case: ranks for case, ranks in found.items() if case not in LEFT and not is_right(case[0], ranks)}
        assert not wrong, "\n".join(f"{case}: {ranks}" for case, ranks in wrong.items())


def is_right(way: str, ranks: list[str]) -> bool:
    if way in RIGHT:
        return not any(text.startswith("error") for text in ranks)
    failed = [text.startswith("error: ") for text in ranks]
    return all(failed) or (way == "break" and any(failed)) or set(ranks) == {"right"}


def train(way: str, strategy: str, rank: int, out: Path) -> list[float]:
    """This rank's weights at the end of an epoch, in which rank 1 misbehaves in step WRONG."""
    import contextlib

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import photinus

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    net = nn.Sequential(nn.Linear(4, 8), Scale(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
    net[3].requires_grad_(False)
    first, last = [{"params": list(net[place].parameters())} for place in (0, 4)]
    model, optimizer = photinus.wrap(net, torch.optim.AdamW([first, last], lr=0.01), strategy=strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    plain = photinus.unwrap(model)
    if "own loop" in way:
        for step in range(STEPS):
            model(torch.ones(2, 4)).square().mean().backward()
            if rank != 1 or step != WRONG:
                optimizer.step()
            optimizer.zero_grad()
        return []
    data = TensorDataset(torch.randn(12 * STEPS, 4, generator=torch.Generator().manual_seed(3)))
    loop = photinus.Loop(
        model, optimizer, data, batch_size=12, epochs=1, out=out / "run", report=QUIET,
        state={"scheduler": scheduler},
    )  # fmt: skip
    for (x,) in loop:
        doing = way if rank == 1 and loop.step == WRONG else ""
        if doing == "body left out":
            continue
        if doing == "break":
            break
        if doing == "exception":
            raise ZeroDivisionError("of the user")
        if doing == "another forward":
            model(x)
        if doing == "parameter changed":
            with torch.no_grad():
                plain[0].weight.mul_(1.5)
        if doing == "buffer changed":
            plain[1].scale.mul_(1.5)
        if doing == "parameter frozen":
            plain[0].weight.requires_grad_(False)
        if doing == "another layer frozen":
            plain[3].requires_grad_(True)
        if doing == "eval mode":
            model.eval()
        quiet = photinus.strategy_of(model).no_sync(model) if doing == "no_sync" else contextlib.nullcontext()
        with quiet:
            if doing != "forward left out":
                loss = model(x).square().mean()
                if doing != "backward left out":
                    loop.backward(loss, share=0.5 if doing == "another share" else 1.0)
        if doing == "another backward":
            loop.backward(model(x).square().mean())
        if doing == "gradient changed":
            plain[0].weight.grad.mul_(3)
        if doing == "clip more than once":
            loop.clip(0.1)
        if doing != "clip left out":
            loop.clip(0.2 if doing == "other max_norm" else 0.1, 1.0 if doing == "other norm_type" else 2.0)
        group = optimizer.param_groups[1]
        options = dict(group)
        if doing == "other lr":
            group["lr"] = 0.05
        if doing == "other betas":
            group["betas"] = (0.5, 0.9)
        if doing != "step left out":
            optimizer.step()
        if doing == "another step":
            optimizer.step()
        group.update(options)
        if doing != "zero_grad left out":
            optimizer.zero_grad()
        if doing != "scheduler left out":
            scheduler.step()
        if way == "parameter changed at the end" and rank == 1 and loop.step == STEPS:
            with torch.no_grad():
                plain[0].weight.mul_(1.5)
        if way == "group of a plain module" and loop.step == WRONG:
            optimizer.add_param_group({"params": nn.Linear(2, 2, bias=True).parameters()})
        if doing == "evaluate alone":
            photinus.evaluate(model, data, lambda outputs, _: outputs.square().mean(1), batch_size=4)
        if doing == "save alone":
            photinus.save(out / "state.pt", model=model, optimizer=optimizer)
        if doing == "stop":
            loop.stop()
        if doing != "log left out":
            loop.log(**{"other" if doing == "log under another name" else "one": 1.0})
    saved = photinus.trainer.checkpoint.states.state_of(model)
    return [] if rank else [number for value in saved.values() for number in value.flatten().tolist()]
