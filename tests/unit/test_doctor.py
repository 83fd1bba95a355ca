"""`photinus doctor`: what it looks at, how it tells, and that a look which fails or hangs is a finding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from photinus.cli.main import main
from photinus.tools.doctor import examine, finding, host, software
from photinus.tools.doctor.finding import Finding, report
from photinus.tools.doctor.host import look_at_host
from photinus.tools.doctor.plan import Plan
from photinus.tools.doctor.software import ask_child

TORCH: dict[str, Any] = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "built_for_cuda": False,
    "cuda_works": False,
    "distributed": True,
    "available": {"gloo": True, "nccl": False, "mpi": False, "ucc": False},
    "photinus": True,
    "nccl": None,
    "gpus": [],
}
ENGINE = ({"instruction_set": "avx2", "usable_cores": 2}, "")


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


def machine(folder: Path, **files: str) -> Path:
    """A root folder with these files; __ in a name stands for a slash."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# ---- the table


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What a terminal of 80 columns shows."""

    def show(*findings: Finding, colour: bool = False) -> list[str]:
        system = "standard" if colour else None
        console = Console(width=80, force_terminal=colour, color_system=system, highlight=False)
        monkeypatch.setattr(finding, "terminal", lambda: console)
        with console.capture() as printed:
            report(findings)
        return printed.get().splitlines()

    return show


def test_each_finding_is_a_line_with_its_advice_below(shown: Callable[..., list[str]]) -> None:
    assert shown(
        Finding("Host", "memory", "good", "8.0 GiB"),
        Finding("Host", "open files", "bad", "16", "Raise it: ulimit -n 4096."),
        Finding("Backends", "nccl", "absent", "not built"),
    ) == [
        "Host",
        "  ✓ memory           8.0 GiB",
        "  ✗ open files       16",
        "                     → Raise it: ulimit -n 4096.",
        "",
        "Backends",
        "  – nccl             not built",
        "",
        "1 of 3 needs attention: open files.",
    ]


def test_long_findings_stay_inside_the_terminal(shown: Callable[..., list[str]]) -> None:
    long = Finding("Host", "a name that is rather long", "bad", "word " * 60, "do " * 60)
    assert max(map(len, shown(long))) <= 80


def test_colours_only_where_they_are_wanted(shown: Callable[..., list[str]]) -> None:
    memory = Finding("Host", "memory", "good", "8 GiB")
    assert "\x1b[32m  ✓" in "\n".join(shown(memory, colour=True))
    assert "\x1b" not in "\n".join(shown(memory))


def test_exit_code_is_1_only_when_something_is_bad() -> None:
    note = Finding("Host", "a", "note", "works")
    assert report([note, Finding("Host", "b", "absent", "")]) == 0
    assert report([note, Finding("Host", "c", "bad", "x", "do")], as_json=True) == 1


# ---- the host


def test_a_quota_of_the_control_group_is_told_with_what_follows(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        proc__self__cgroup="0::/\n",
        proc__self__mountinfo="30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        **{"sys__fs__cgroup__cpu.max": "50000 100000\n", "sys__fs__cgroup__memory.max": "1073741824\n"},
        proc__meminfo="MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n",
    )
    found = look_at_host(root)
    assert named(found, "processors").state == "note"
    assert "the control group allows 0.5" in named(found, "processors").value
    memory = named(found, "memory")
    assert memory.state == "bad"
    assert "32.0 GiB, 28.6 GiB available; the control group allows 1.0 GiB" in memory.value
    assert "raise the limit" in memory.advice


def test_a_missing_dev_shm_is_a_note_because_the_engine_does_without(tmp_path: Path) -> None:
    finding = named(look_at_host(machine(tmp_path, proc__meminfo="MemTotal: 1 kB\n")), "/dev/shm")
    assert finding.state == "note"
    assert "The engine does without" in finding.advice


@pytest.mark.parametrize(
    ("text", "state", "value"),
    [
        ("[always] madvise never", "good", "for all memory"),
        ("always [madvise] never", "good", "for torch's large CPU tensors"),
        ("always madvise [never]", "note", "off"),
    ],
)
def test_the_kernels_huge_pages_are_shown(text: str, state: str, value: str, tmp_path: Path) -> None:
    root = machine(
        tmp_path, proc__meminfo="MemTotal: 1 kB\n", sys__kernel__mm__transparent_hugepage__enabled=f"{text}\n"
    )
    finding = named(look_at_host(root), "huge pages")
    assert (finding.state, finding.value[: len(value)]) == (state, value)


def test_this_machine_has_what_the_engine_needs() -> None:
    assert named(look_at_host(), "memfd").state == "good"


def test_a_host_name_that_does_not_resolve_is_told_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.socket, "gethostname", lambda: "no-such-host.invalid")
    finding = named(look_at_host(), "host name")
    assert finding.state == "note"
    assert "GLOO_SOCKET_IFNAME" in finding.advice


# ---- software


def software_with(torch: software.Answer, engine: software.Answer = ENGINE) -> list[Finding]:
    return software.look_at_software(torch, engine)


def test_a_torch_that_cannot_be_imported_is_a_finding_with_its_own_error() -> None:
    finding = named(software_with((None, "ModuleNotFoundError: No module named 'torch'")), "torch")
    assert finding.state == "bad"
    assert "No module named 'torch'" in finding.value


@pytest.mark.parametrize(
    ("changes", "state", "told"),
    [
        ({}, "good", "2.13.0 (CPU only)"),
        ({"cuda": "13.0"}, "good", "2.13.0 (CUDA 13.0)"),
        ({"version": "2.1.2+cpu"}, "bad", "2.1.2+cpu"),
        ({"photinus": False}, "note", "not registered"),
        ({"distributed": False}, "bad", "2.13.0"),
    ],
)
def test_torch_is_told_with_version_and_build(changes: dict[str, object], state: str, told: str) -> None:
    finding = named(software_with(({**TORCH, **changes}, "")), "torch")
    assert (finding.state, told in finding.value) == (state, True)


def test_an_engine_that_cannot_be_loaded_is_bad() -> None:
    assert named(software_with((TORCH, ""), (None, "ImportError: no _native")), "engine").state == "bad"


def test_the_engine_says_in_json_what_it_is_here() -> None:
    facts, error = software.ask_engine(60)
    assert error == ""
    assert facts is not None
    assert facts["instruction_set"] in ("baseline", "avx2", "avx512", "neon")


def test_a_child_that_hangs_is_given_up() -> None:
    facts, error = ask_child(["-c", "import time; time.sleep(60)"], 0.5)
    assert facts is None
    assert error.startswith("no answer within 0.5 s (")


@pytest.mark.parametrize(
    ("program", "answer", "error"),
    [
        ("print('{\"a\": 1}'); print('bye')", {"a": 1}, ""),
        ("print('hello')", None, "no answer, but: hello"),
        ("raise SystemExit('no driver')", None, "no driver"),
        ("", None, "no answer, but: nothing"),
    ],
)
def test_a_child_that_prints_something_else_is_understood(program: str, answer: object, error: str) -> None:
    assert ask_child(["-c", program], 60) == (answer, error)


# ---- backends


@pytest.mark.seconds
def test_backends_are_tried_in_two_processes_and_one_that_fails_spoils_no_other() -> None:
    photinus, nonsense, gloo = software.try_backends(["photinus", "nonsense", "gloo"], 120)
    assert [photinus.state, nonsense.state, gloo.state] == ["good", "bad", "good"]
    assert re.search(r"rank [01] \(pid \d+\) raised \w+: .*nonsense", nonsense.value)
    assert photinus.facts is not None
    assert photinus.facts["small_s"] > 0


@pytest.mark.parametrize(
    ("built", "gpus", "tried", "left_out"),
    [
        ({}, 0, [("photinus", "gloo")], {"nccl": "built without", "mpi": "as all released", "ucc": "built without"}),
        ({"nccl": True}, 0, [("photinus", "gloo")], {"nccl": "no GPU", "mpi": "", "ucc": ""}),
        ({"nccl": True}, 4, [("photinus", "gloo"), ("nccl",)], {"mpi": "", "ucc": ""}),
        ({"mpi": True, "ucc": True}, 1, [("photinus", "gloo", "ucc")], {"mpi": "not tried", "nccl": ""}),
    ],
)
def test_backends_that_cannot_be_tried_say_why(
    monkeypatch: pytest.MonkeyPatch,
    built: dict[str, bool],
    gpus: int,
    tried: list[tuple[str, ...]],
    left_out: dict[str, str],
) -> None:
    asked = []

    def measured(plan: Plan, ranks: int) -> tuple[list[dict[str, float]], dict[str, str]]:
        asked.append(plan.contestants)
        return [dict.fromkeys(plan.contestants, 1e-3)] * 2, {}

    monkeypatch.setattr(software, "measure", measured)
    found = software.look_at_backends({**TORCH, "available": {**TORCH["available"], **built}, "gpus": [{}] * gpus}, 1)
    assert asked == tried
    others = {each.name: each.value for each in found if each.state != "good"}
    assert others.keys() == left_out.keys()
    assert all(why in others[name] for name, why in left_out.items())


@pytest.mark.seconds
def test_a_backend_that_hangs_is_ended_at_the_deadline() -> None:
    (finding,) = software.try_backends(["photinus"], 0.2)
    assert (finding.state, finding.value.partition(" (")[0]) == ("bad", "no answer within 0.2 s")
    assert "TORCH_DISTRIBUTED_DEBUG" in finding.advice


def test_without_torch_no_backend_is_tried() -> None:
    assert software.look_at_backends(None, 1) == []


# ---- the command


def stub(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(examine, "ask_torch", lambda timeout_s: (None, "none"))
    monkeypatch.setattr(examine, "ask_engine", lambda timeout_s: (None, "none"))
    monkeypatch.setattr(examine, "look_at_software", lambda torch, engine: list(findings))
    monkeypatch.setattr(examine, "look_at_host", list)
    monkeypatch.setattr(examine, "look_at_gpus", lambda torch, timeout_s: [])


def test_json_is_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, Finding("Software", "torch", "bad", "none", "Install it."))
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["well"] is False
    assert told["findings"][-1]["advice"] == "Install it."


def test_all_well_is_exit_code_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub(monkeypatch, Finding("Software", "torch", "good", "2.13.0"))
    assert main(["doctor", "--timeout", "3"]) == 0
    assert "All well: 1 check, nothing that needs attention." in capsys.readouterr().out
    stub(monkeypatch, Finding("Software", "torch", "note", "2.10.0", "Take a newer one."))
    assert main(["doctor", "--timeout", "3"]) == 0
    assert "All well: 1 check, worth knowing: torch." in capsys.readouterr().out
