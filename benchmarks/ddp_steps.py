"""Whole training steps: our DistributedDataParallel over photinus against torch's over gloo, taking turns in one run.

    python benchmarks/ddp_steps.py --quick
    python benchmarks/ddp_steps.py --out benchmarks/results/ddp_steps.json --check
    python benchmarks/ddp_steps.py --quick --before ../older   # a checkout where `make setup` has run
    python benchmarks/ddp_steps.py --split --models gpt-20m:4x64 --out benchmarks/results/split_steps.json

With --split the strategies "zero2" and "zero3" take turns with FSDP2's fully_shard, called by hand over the same
backend, in steps of AdamW.

A step is forward, backward with the exchange, SGD without momentum, and gradients set to None, all in float32. "no
exchange" is torch's wrapper in no_sync: no way of exchanging gradients can be faster, so (gloo - ours) / (gloo - no
exchange) says how much of what there was to gain is gained. "one number" is the same with one number exchanged in each
step: what a step takes whose ranks wait for each other, however little they exchange. Ours has the huge pages that
`photinus run` gives to its workers, unless THP_MEM_ALLOC_ENABLE is set to 0; set to 1, all contestants have them.
Processor time and page faults of rank 0 (getrusage) stand beside the times. README.md beside this file says what is
measured and which traps are avoided.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import harness
import report
from harness import MIB
from turns import Contestant, Effort, take_turns

from photinus.process_memory import HUGE_HEAP

RANKS = Path(__file__).resolve().parent / "ranks"
OURS, GLOO, LEAST, IN_STEP, BARE = "photinus", "torch DDP, gloo", "no exchange", "one number", "bare model"
THEIRS = "torch DDP, photinus"
BEFORE = "photinus, before"
MODELS = [
    "gpt-10m:1x64",
    "gpt-10m:4x64",
    "gpt-20m:1x16",
    "gpt-20m:4x64",
    "gpt-20m:16x64",
    "resnet-18:16",
    "resnet-50:2",
    "resnet-50:16",
    "gpt-2-small:1x16",
    "gpt-2-small:4x64",
    "vgg-16:1",
    "vgg-16:8",
    "vgg-16:16",
    "many-small:1",
]
# Four sets of four ranks with such a model each do not fit into 24 GiB; "no exchange" bounds what can be gained.
TOO_LARGE_FOR_BARE = ("gpt-2-small", "vgg-16")
SMALL = [name for name in MODELS if not name.startswith(TOO_LARGE_FOR_BARE)]
QUICK = ["gpt-20m:1x16", "many-small:1"]
GAINED = {"gpt-20m:1x16": 0.85, "gpt-20m:4x64": 0.85, "gpt-20m:16x64": 0.85}
HEADLINE = "vgg-16"
SPLIT = {
    "zero2": 'strategy "zero2"',
    "hand2": "fully_shard by hand, kept for backward",
    "zero3": 'strategy "zero3"',
    "hand3": "fully_shard by hand, dropped",
}
HEAP_KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def contestant(
    name: str,
    wrapper: str,
    backend: str,
    ranks: int,
    columns: dict[str, str],
    models: list[str] = MODELS,
    python: str = sys.executable,
) -> Contestant:
    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        script = [python, str(RANKS / "step_rank.py"), wrapper, backend]
        environ = {"GLOO_SOCKET_IFNAME": "lo"}
        by_default = "1" if wrapper == "photinus" and python == sys.executable else "0"
        if os.environ.get("THP_MEM_ALLOC_ENABLE", by_default) == "1":
            environ |= {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": HUGE_HEAP}  # as `photinus run` starts a worker
        return [([*script, str(rank), str(ranks), folder], environ) for rank in range(ranks)]

    return Contestant(name, columns, commands, ranks, dtypes=tuple(models))


def verdicts(rows: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """The bars, each with a line about it."""
    found: list[tuple[bool, str]] = []
    headline: list[tuple[float, str]] = []
    for row in rows:
        seconds, where = row["seconds"], f"{row['ranks']} ranks, {row['dtype']}"
        overhead = row["dtype"].startswith("many-small")
        if not {OURS, GLOO, LEAST, *([BARE] if overhead else [])} <= set(seconds):
            found.append((False, f"{where}: not everybody was measured"))
            continue
        ours, gloo, least = (seconds[name] for name in (OURS, GLOO, LEAST))
        if overhead:
            bare = seconds[BARE]
            text = f"{where}: {(ours - bare) * 1e3:.2f} ms over the bare model, torch DDP {(gloo - bare) * 1e3:.2f} ms"
            found.append((ours - bare <= gloo - bare, text))
            continue
        found.append((ours <= gloo, f"{where}: {gloo / ours:.2f} x as fast as torch DDP over gloo, at least 1 wanted"))
        wanted = GAINED.get(row["dtype"])
        if wanted and row["ranks"] == 2:
            gained = (gloo - ours) / (gloo - least)
            found.append((gained >= wanted, f"{where}: {gained:.0%} of the gain possible, {wanted:.0%} wanted"))
        if row["dtype"].startswith(HEADLINE) and row["ranks"] == 2 and gloo >= 2 * least * 0.9:
            headline.append((gloo / ours, where))
    if any(row["dtype"].startswith(HEADLINE) and row["ranks"] == 2 for row in rows):
        best = max(headline, default=(0.0, "no batch at which gloo spends half the step"))
        found.append((best[0] >= 1.5, f"{best[1]}: {best[0]:.2f} x where gloo spends half the step, 1.5 wanted"))
    return found


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = ["# Training steps", report.facts(kept)]
    for ranks in sorted({row["ranks"] for row in kept["rows"]}):
        lines = []
        for row in (row for row in kept["rows"] if row["ranks"] == ranks):
            seconds = row["seconds"]
            cells = [
                row["dtype"],
                *(milliseconds(seconds.get(name)) for name in (OURS, THEIRS, GLOO, LEAST, IN_STEP, BARE)),
            ]
            known = {OURS, GLOO, LEAST} <= set(seconds)
            gain = seconds[GLOO] - seconds[LEAST] if known else 0.0
            cells += [
                f"{seconds[GLOO] / seconds[OURS]:.2f}" if known else "–",
                f"{seconds[GLOO] / seconds[THEIRS]:.2f}" if known and THEIRS in seconds else "–",
                f"{seconds[GLOO] / seconds[LEAST]:.2f}" if known else "–",
                f"{seconds[BEFORE] / seconds[OURS]:.2f}" if known and BEFORE in seconds else "–",
                f"{(seconds[GLOO] - seconds[OURS]) / gain:.0%}" if gain > 0 else "–",
            ]
            lines.append(cells)
        head = ["model:batch per rank", OURS, THEIRS, GLOO, LEAST, IN_STEP, BARE]
        head += ["gloo / ours", "gloo / torch DDP, photinus", "gloo / no exchange", "before / ours", "gained"]
        parts += [f"## {ranks} ranks", report.table(head, lines)]
        lines = [
            [
                f"{row['dtype']}, {name}",
                *(milliseconds(used[key]) for key in ("cpu_s", "kernel_s")),
                f"{used['faults']:,.0f}",
                f"{used['peak_kib'] / 1024:,.0f} MiB",
            ]
            for row in kept["rows"]
            if row["ranks"] == ranks
            for name, used in row.get("used", {}).items()
        ]
        head = ["rank 0, per step", "processor", "of it in the kernel", "page faults", "peak of the process so far"]
        parts += [report.table(head, lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def split_steps(
    names: list[str], all_ranks: list[int], effort: Effort, older: str | None
) -> tuple[list[dict[str, Any]], list[Any], str]:
    """Rows, contestants and the report of --split."""
    rows, everybody, parts = [], [], []
    for ranks in all_ranks:
        for name in names:
            contestants = [contestant(kind, kind, "photinus", ranks, {kind: "sync"}) for kind in SPLIT]
            for kind in ("zero2", "zero3") if older else ():
                column = {f"{kind}, before": "sync"}
                contestants.append(contestant(f"{kind}, before", kind, "photinus", ranks, column, python=older))
            (row,) = take_turns(contestants, ranks, [(name, 0)], effort)
            rows.append(row)
            everybody += contestants
            lines = []
            for kind, seconds in row["seconds"].items():
                used = row["used"][kind]
                by_hand = row["seconds"].get(kind.replace("zero", "hand").removesuffix(", before"))
                ratio = f"{seconds / by_hand:.2f}" if by_hand and kind.startswith("zero") else ""
                cells = [milliseconds(seconds), milliseconds(row["least"][kind]), milliseconds(used["cpu_s"])]
                lines.append(
                    [
                        SPLIT.get(kind, kind),
                        *cells,
                        f"{used['faults']:,.0f}",
                        f"{used['peak_kib'] / 1024:,.0f} MiB",
                        ratio,
                    ]
                )
            head = [
                "",
                "step, median",
                "least",
                "processor, rank 0",
                "page faults",
                "peak of the process",
                "by hand = 1",
            ]
            parts.append(f"## {name}, {ranks} ranks\n\n{report.table(head, lines)}")
            print(parts[-1], flush=True)
    return rows, everybody, "\n\n".join(parts)


def milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = harness.options(__doc__, [MIB])
    parser.add_argument(
        "--heap-kept", action="store_true", help="let malloc keep freed memory for everybody: the exchange alone"
    )
    parser.add_argument("--split", action="store_true", help="strategies zero2 and zero3 beside fully_shard by hand")
    parser.add_argument(
        "--before", metavar="CHECKOUT", type=Path, help="an older checkout, set up, takes turns with this one"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="model:batch")
    parser.set_defaults(rounds=7, turn_s=1.0)
    arguments = parser.parse_args()
    if arguments.heap_kept:
        os.environ.update(HEAP_KEPT)  # the contestants inherit it
    harness.enter_namespace()
    facts = harness.machine()
    harness.warn(facts)
    names = QUICK if arguments.quick and arguments.models == MODELS else arguments.models
    rounds = 3 if arguments.quick else arguments.rounds
    older = str(arguments.before.absolute() / ".venv/bin/python") if arguments.before else None
    effort = Effort(rounds, arguments.turn_s, wait_quiet_s=arguments.wait_quiet_s, prepare_each_round=False)
    if arguments.split:
        rows, found_contestants, text = split_steps(names, arguments.ranks, effort, older)
        kept = harness.record(facts, found_contestants, rows)
        if arguments.out:
            harness.write(arguments.out, kept, f"# Steps of split models\n\n{report.facts(kept)}\n\n{text}\n")
        return
    rows = []
    everybody: dict[str, Contestant] = {}
    for ranks in arguments.ranks:
        contestants = [
            contestant("our DDP", "photinus", "photinus", ranks, {OURS: "sync"}),
            contestant("torch's DDP over ours", "torch", "photinus", ranks, {THEIRS: "sync"}, SMALL),
            contestant("torch's DDP", "torch", "gloo", ranks, {GLOO: "sync", LEAST: "no_sync", IN_STEP: "in_step"}),
        ]
        if older:
            contestants.append(
                contestant("our DDP, before", "photinus", "photinus", ranks, {BEFORE: "sync"}, python=older)
            )
        if not set(names).isdisjoint(SMALL):
            contestants.append(contestant("bare", "none", "gloo", ranks, {BARE: "sync"}, SMALL))
        for row in take_turns(contestants, ranks, [(name, 0) for name in names], effort):
            rows.append(row)
            cells = [f"{name} {seconds * 1e3:.1f}" for name, seconds in row["seconds"].items()]
            print(f"{ranks} ranks {row['dtype']} (ms): {', '.join(cells)}", flush=True)
        everybody.update({each.name: each for each in contestants if each.name not in everybody or each.absent})
    kept = harness.record(facts, everybody.values(), rows)
    found = verdicts(rows)
    missed = [text for passed, text in found if not passed]
    verdict = "\n".join(
        [f"Bars: {len(found) - len(missed)} of {len(found)} cleared" + (":" if found else ".")]
        + [f"- {'' if passed else '**missed** '}{text}" for passed, text in found]
    )
    text = f"{tables(kept)}\n{verdict}\n"
    print("\n" + text)
    if arguments.out:
        harness.write(arguments.out, kept, text)
    if arguments.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
