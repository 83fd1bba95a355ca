"""`photinus doctor --model`: whether a second device pays for a model, and what would help where it does not.

Rows of this machine are measured: ranks train for a moment, alone and with the exchange. Rows of more GPUs, and of
several hosts, are predicted: computing as one rank does it with its share of the batch, and the part of the exchange
that does not fit beside backward. DDP exchanges a bucket when its gradients are there, so at least the last one is not
hidden (Li et al. 2020, arXiv:2006.15704).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import LaunchError
from ...run.local.devices import usable_cores
from ...runlog.units import size, step_time
from .model_rank import Times, Trial, measure_model
from .plan import JobOutput, Plan
from .rounds import measure
from .software import ask_engine, ask_torch

COUNTS = (2, 4, 8)
RATES_GBIT = (1, 10, 100)
_LATENCY_S = 50e-6
_BUCKET_BYTES, _LEAST_BUCKET_BYTES, _BUCKET_S = 25 << 20, 1 << 20, 0.03  # DDP's; between hosts what crosses meanwhile
_PAYS = 1.5
_BUSY = 0.5  # of the cores, in the last minute
_ITEM_BYTES = 4


@dataclass(frozen=True)
class StepRow:
    """A step with N ranks: its time, and computing and exchange in it. `how`: "measured" or "predicted"."""

    ranks: int
    samples: int
    step_s: float
    compute_s: float
    how: str

    @property
    def exchange_s(self) -> float:
        """The part of the step that computing does not fill."""
        return max(0.0, self.step_s - self.compute_s)


def batch_value(text: str) -> tuple[tuple[int, ...] | str, int]:
    """Read --batch: a shape (64,3,32,32), or a function and a number of samples (make_batch,64)."""
    name, *numbers = text.split(",")
    with contextlib.suppress(ValueError):
        sizes = tuple(int(number) for number in (numbers if name.isidentifier() else [name, *numbers]))
        if sizes and min(sizes) > 0 and (len(sizes) == 1 or not name.isidentifier()):
            return (name if name.isidentifier() else sizes), sizes[0]
    raise ArgumentTypeError(
        "a shape with the samples first (64,3,32,32), or a function of the same file and a number of samples "
        "(make_batch,64)"
    )


def exposed_s(exchange_s: float, backward_s: float, gradient_bytes: int, bucket_bytes: float = _BUCKET_BYTES) -> float:
    """Return the part of an exchange that backward does not hide: its last bucket, and what takes longer than it."""
    last = min(1.0, bucket_bytes / max(1, gradient_bytes))
    return exchange_s * last + max(0.0, (exchange_s - backward_s) * (1 - last))


def examine_model(trial: Trial, *, as_json: bool) -> int:
    """Measure, predict, and print both. Return 0. LaunchError: the model cannot be trained here; the text says why."""
    torch, error = ask_torch(trial.timeout_s)
    if torch is None:
        raise LaunchError(f"photinus doctor --model needs PyTorch: {error}")
    gpus, load, cores = len(torch["gpus"]), os.getloadavg()[0], usable_cores()
    here = [n for n in COUNTS if n <= (gpus or max(4, cores)) and n <= trial.samples]
    alone = _train(trial, 1, gpus, COUNTS)
    rows = [StepRow(1, trial.samples, alone.step_s, alone.compute_s, "measured")]
    for ranks in here:
        times = _train(trial, ranks, gpus)
        rows.append(StepRow(ranks, trial.samples // ranks, times.step_s, times.compute_s, "measured"))
    for ranks in (n for n in COUNTS if gpus and n > gpus and n <= trial.samples):
        found, _ = measure(Plan((trial.backend,), (("all_reduce", alone.gradient_bytes),)), ranks)
        rows.append(_predict(alone, ranks, trial.samples, found[0][trial.backend] if found else 0.0))
    counts = [n for n in COUNTS if n <= trial.samples]
    hosts: dict[int, list[StepRow]] = {}
    for rate in RATES_GBIT:
        exchanges_s = [_between_hosts(alone.gradient_bytes, n, rate, trial.timeout_s) for n in counts]
        bucket_bytes = min(_BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, _BUCKET_S * rate / 8e-9))
        hosts[rate] = [
            _predict(alone, n, trial.samples, exchange_s, bucket_bytes)
            for n, exchange_s in zip(counts, exchanges_s, strict=True)
        ]
    lines = verdict(alone, rows, trial.samples, cores, gpus)
    if load > _BUSY * cores:
        lines.append(f"Other programs were running (load {load:.1f} on {cores} cores): end them, and measure again.")
    if as_json:
        print(json.dumps(_as_json(trial, alone, rows, hosts, lines), indent=1))
    else:
        _show(trial, alone, rows, hosts, lines)
    return 0


def _train(trial: Trial, ranks: int, gpus: int, divisors: tuple[int, ...] = ()) -> Times:
    from ...run.from_python import launch

    output = JobOutput(lambda facts: None)
    try:
        with contextlib.redirect_stdout(output):
            args = (trial, tuple(divisors))
            return launch(measure_model, nprocs=ranks, args=args, cpu=not gpus, oversubscribe=True)[0]
    except LaunchError as error:
        raise LaunchError(f"{error}\n{output.rest.rstrip()}".rstrip(), exit_code=error.exit_code) from None


def _predict(alone: Times, ranks: int, samples: int, exchange_s: float, bucket_bytes: float = _BUCKET_BYTES) -> StepRow:
    share = max(1, samples // ranks)
    compute_s, backward_s = alone.shares[share]
    step_s = compute_s + exposed_s(exchange_s, backward_s, alone.gradient_bytes, bucket_bytes)
    return StepRow(ranks, share, step_s, compute_s, "predicted")


def _between_hosts(gradient_bytes: int, hosts: int, rate_gbit: float, timeout_s: float) -> float:
    """Return the seconds of an all_reduce by the engine's model; where the engine is missing, by the bytes alone."""
    question = {"counts": [1] * hosts, "operation": "all_reduce", "sizes_elems": [-(-gradient_bytes // _ITEM_BYTES)]}
    speeds = (_LATENCY_S, rate_gbit / 8e-9)
    answer, _ = ask_engine(timeout_s, json.dumps({**question, "speeds": speeds}))
    if answer is None:
        return 2 * (hosts - 1) / hosts * gradient_bytes / speeds[1] + 2 * _LATENCY_S
    return float(answer["explained"][1][0]["seconds"])


def verdict(alone: Times, rows: Sequence[StepRow], samples: int, cores: int, gpus: int) -> list[str]:
    """Return sentences: whether two ranks pay, what binds, and what would help."""
    if len(rows) < 2:
        return [f"A batch of {samples} cannot be split. Give a larger one: --batch."]
    one, two = rows[0], rows[1]
    speed = one.step_s / two.step_s
    lines = []
    if alone.data_s > 0.1 * one.step_s:
        text = f"Data: a batch takes {step_time(alone.data_s)} to make, beside a step of {step_time(one.step_s)}."
        lines.append(f"{text} Load it in workers (photinus.loader(..., num_workers=4)).")
    if speed >= _PAYS:
        return [f"Two ranks pay here: a step of the same batch is {speed:.2f} times as fast.", *lines]
    begin = (
        "Two ranks are slower than one here" if speed < 1 else f"Two ranks pay little here ({speed:.2f} times as fast)"
    )
    half_s = alone.shares[two.samples][0]
    if two.compute_s - one.step_s / 2 >= two.exchange_s:
        if half_s > 0.7 * one.step_s:
            why = f"a step of half the batch takes {step_time(half_s)} even without a second rank, and a whole one "
            why += f"{step_time(one.step_s)}. The batch is too small to split: give each rank a larger one"
        else:
            where = f"this machine's {cores} cores" if not gpus else "the processor that queues work for the GPUs"
            why = f"computing, not the exchange: both ranks share {where}, and one rank alone already uses them. "
            why += "A second machine helps (see the hosts), more ranks on this one do not"
    else:
        why = f"the exchange of {size(alone.gradient_bytes)} of gradients, which takes {step_time(two.exchange_s)} of "
        why += f"{step_time(two.step_s)}"
        saved_s = one.step_s - _PAYS * two.compute_s
        if saved_s > 0:
            factor = _PAYS * two.exchange_s / saved_s
            why += f". A batch about {factor:.1f} times as large, or accumulating gradients over "
            why += f"{max(2, round(factor + 0.49))} batches a step, makes two ranks {_PAYS} times as fast"
        else:
            why += ". A larger batch or accumulating gradients over several batches a step makes its share smaller"
    return [f"{begin}. The cause is {why}.", *lines]


def _show(trial: Trial, alone: Times, rows: list[StepRow], hosts: dict[int, list[StepRow]], lines: list[str]) -> None:
    width = min(100, shutil.get_terminal_size().columns)
    head = f"{trial.model}: {alone.parameters:,} parameters, {size(alone.gradient_bytes)} of gradients; "
    head += f"batch {trial.samples}, {alone.optimizer}, backend {trial.backend}, on {alone.device}"
    print(textwrap.fill(head, width))
    print(f"\n{'ranks':>5}  {'samples each':>12}  {'step':>8}  {'computing':>9}  {'exchange':>8}  {'speed-up':>8}")
    for row in rows:
        times = f"{step_time(row.step_s):>8}  {step_time(row.compute_s):>9}  {step_time(row.exchange_s):>8}"
        speed = f"{rows[0].step_s / row.step_s:>8.2f}"
        print(f"{row.ranks:>5}  {row.samples:>12}  {times}  {speed}" + "  (predicted)" * (row.how == "predicted"))
    print("\nHosts like this one, with one rank each (predicted): speed-up by the network between them")
    print(f"{'hosts':>5}" + "".join(f"  {f'{rate} Gbit/s':>12}" for rate in hosts))
    for i, row in enumerate(next(iter(hosts.values()))):
        print(f"{row.ranks:>5}" + "".join(f"  {rows[0].step_s / of[i].step_s:>12.2f}" for of in hosts.values()))
    print()
    for line in lines:
        print(textwrap.fill(line, width))


def _as_json(
    trial: Trial, alone: Times, rows: list[StepRow], hosts: dict[int, list[StepRow]], lines: list[str]
) -> dict[str, Any]:
    def figures(row: StepRow) -> dict[str, Any]:
        return {**vars(row), "exchange_s": row.exchange_s, "speed_up": rows[0].step_s / row.step_s}

    of_model = {
        name: getattr(alone, name) for name in ("parameters", "gradient_bytes", "optimizer", "device", "data_s")
    }
    of_hosts = [{"gbit_per_s": rate, **figures(row)} for rate, of in hosts.items() for row in of]
    options = {"model": trial.model, "samples": trial.samples, "backend": trial.backend}
    return {**options, **of_model, "ranks": [figures(row) for row in rows], "hosts": of_hosts, "verdict": lines}
