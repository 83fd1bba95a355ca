"""`photinus completion`: what real shells complete with its script."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from photinus.cli.main import main


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(text: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in words)
    line = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    asked = f"{text}\n{line}; _shtab_photinus; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    ended = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=20)
    assert ended.stderr == ""
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["photinus", "d"], ["doctor"]),
        (["photinus", "run", "--max"], ["--max-restarts"]),
        (["photinus", "run", "--nproc-per-node", ""], ["auto", "gpu", "cpu"]),
        (["photinus", "doctor", "--j"], ["--json"]),
        (["photinus", "bench", "--dtype", "b"], ["bfloat16"]),
        (["photinus", "bench", "--ops", "all_"], ["all_reduce", "all_gather", "all_to_all"]),
        (["photinus", "completion", ""], ["bash", "zsh", "fish"]),
        (["photinus", "run", "trai"], []),  # left to the shell: a file's name
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], words: list[str], offered: list[str]) -> None:
    assert completed(script(capsys, "bash"), *words) == offered


def test_every_command_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    from photinus.cli import main as cli

    offered = completed(script(capsys, "bash"), "photinus", "")
    assert [word for word in offered if not word.startswith("-")] == list(cli.COMMANDS)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_is_valid_in_its_shell(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    text = script(capsys, shell)
    assert "photinus" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=text, text=True, check=True, timeout=20)
