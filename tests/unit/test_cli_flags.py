"""The flags of `photinus run`: every spelling people type, and a helpful word for what is not there."""

from __future__ import annotations

import re

import pytest

from photinus.launcher.flags import RunFlags, parse_run
from photinus.launcher.program import Program
from photinus.launcher.usage import UsageError


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "3", "x.py"],
        ["--nproc-per-node=3", "x.py"],
        ["--nproc_per_node", "3", "x.py"],
        ["--nproc_per_node=3", "x.py"],
        ["--nproc-per-node", "3", "--", "x.py"],
        ["--nproc-per-node", "3", "--nproc_per_node=3", "x.py"],
        ["--standalone", "--nnodes", "1", "--nproc-per-node", "3", "x.py"],
        ["--nnodes=1:1", "--nproc-per-node", "3", "x.py"],
    ],
)
def test_dash_underscore_space_and_equals_are_the_same(words):
    assert parse_run(words) == RunFlags(Program("script", "x.py"), nproc_per_node=3)


def test_defaults():
    flags = parse_run(["x.py"])
    assert (flags.nproc_per_node, flags.max_restarts, flags.cpu, flags.stop_grace_s) == ("auto", 3, False, 5.0)


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_words_in_place_of_a_number(word):
    assert parse_run(["--nproc-per-node", word, "x.py"]).nproc_per_node == word


def test_all_after_the_script_is_the_scripts():
    flags = parse_run(["--max-restarts=0", "x.py", "--nproc-per-node", "9", "--", "-m", "y", "--max-restarts"])
    expected = ("--nproc-per-node", "9", "--", "-m", "y", "--max-restarts")
    assert flags == RunFlags(Program("script", "x.py", expected), max_restarts=0)


@pytest.mark.parametrize(
    "words", [["-m", "a.b", "-x", "1"], ["--module=a.b", "-x", "1"], ["--module", "a.b", "-x", "1"]]
)
def test_a_module_ends_the_flags(words):
    assert parse_run(words).program == Program("module", "a.b", ("-x", "1"))


def test_other_flags_take_their_values():
    flags = parse_run(["--cpu", "--stop_grace", "0.5", "--max_restarts", "7", "x.py"])
    assert (flags.cpu, flags.stop_grace_s, flags.max_restarts) == (True, 0.5, 7)


def test_help_wins_over_a_missing_script():
    assert parse_run(["--nproc-per-node", "2", "--help"]).program is None
    assert parse_run(["-h"]).program is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc_node", "2", "x.py"], "unknown flag --nproc_node. Did you mean --nproc-per-node?"),
        (["--nproc-per-nodes=2", "x.py"], "Did you mean --nproc-per-node?"),
        (["--max-restart", "2", "x.py"], "Did you mean --max-restarts?"),
        (["--num_processes", "2", "x.py"], "The number of workers is --nproc-per-node N"),
        (["-np", "2", "x.py"], "The number of workers is --nproc-per-node N"),
        (["--master_address", "h", "x.py"], "torchrun spells it --master-addr. --master-addr comes with several hosts"),
        (["--master-port", "1", "x.py"], "--master-port comes with several hosts"),
        (["--rdzv_endpoint=h:1", "x.py"], "comes with several hosts"),
        (["--nnodes", "2", "x.py"], "--nnodes 2 comes with several hosts"),
        (["--tee", "3", "x.py"], "--tee is another launcher's flag"),
        (["--frobnicate", "x.py"], "unknown flag --frobnicate. `photinus run --help` lists the flags"),
        (
            ["--nproc-per-node", "two", "x.py"],
            "--nproc-per-node two: needs a whole number above 0, or auto, gpu or cpu",
        ),
        (["--nproc_per_node=0", "x.py"], "--nproc_per_node 0: needs at least 1 worker"),
        (["--nproc-per-node", "-2", "x.py"], "--nproc-per-node -2: needs at least 1 worker"),
        (["--nproc-per-node"], "--nproc-per-node needs a value: N|auto|gpu|cpu"),
        (["--nproc-per-node", "--cpu", "x.py"], "--nproc-per-node needs a value"),
        (["--nproc-per-node", "2", "--nproc_per_node=4", "x.py"], "--nproc-per-node is given twice: 2 and 4"),
        (["--max-restarts", "-1", "x.py"], "--max-restarts -1: needs a whole number, 0 or more"),
        (["--max-restarts", "some", "x.py"], "--max-restarts some: needs a whole number, 0 or more"),
        (["--stop-grace", "inf", "x.py"], "--stop-grace inf: needs a number of seconds, 0 or more"),
        (["--stop-grace", "long", "x.py"], "--stop-grace long: needs a number of seconds"),
        (["--cpu=2", "x.py"], "--cpu takes no value, but got '2'"),
        (["--cpu", "--nproc-per-node", "gpu", "x.py"], "--cpu and --nproc-per-node gpu contradict each other"),
        (["--nproc-per-node", "2"], "which script?"),
        ([], "which script?"),
        (["-m"], "-m needs a value: MODULE"),
    ],
)
def test_wrong_use_is_told_with_the_way_out(words, told):
    with pytest.raises(UsageError) as refused:
        parse_run(words)
    assert told in str(refused.value)


@pytest.mark.parametrize("words", [["--device", "0,3"], ["--device=0,3"], ["--device", "0, 3"]])
def test_devices_are_numbers(words):
    assert parse_run([*words, "x.py"]).devices == (0, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cpu"], "--device cpu: needs the numbers of GPUs"),
        (["--device", "1,1"], "GPU 1 is named twice"),
        (["--device", "0", "--cpu"], "--device 0 and --cpu contradict each other"),
        (["--device", "0", "--nproc-per-node", "cpu"], "--device 0 and --nproc-per-node cpu contradict each other"),
        (["--device", "0,3", "--nproc_per_node=3"], "--device 0,3 names 2 GPUs, but --nproc_per_node 3 asks for 3"),
    ],
)
def test_devices_that_contradict_are_refused_with_both_named(words, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        parse_run([*words, "x.py"])


def test_devices_and_as_many_workers_agree():
    assert parse_run(["--device", "0,3", "--nproc-per-node", "2", "x.py"]).devices == (0, 3)


def test_dry_run_is_a_flag():
    assert parse_run(["--dry-run", "x.py"]).dry_run


def test_a_program_need_not_be_python():
    assert parse_run(["--no-python", "bash", "-c", "true"]).program == Program("program", "bash", ("-c", "true"))


def test_a_module_that_is_not_python_is_refused():
    with pytest.raises(UsageError, match="--no-python and -m contradict each other"):
        parse_run(["--no-python", "-m", "x"])


def test_flags_of_older_launchers_that_change_nothing_are_taken():
    assert parse_run(["--use_env", "--monitor-interval", "5", "x.py"]) == RunFlags(Program("script", "x.py"))
    with pytest.raises(UsageError, match="--monitor-interval soon: needs a number of seconds"):
        parse_run(["--monitor-interval", "soon", "x.py"])
