"""How short a program is: the promise that a loop of one's own costs at most 12 lines, the Trainer at most 8."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).resolve().parent.parent.parent / "examples" / "digits"
_MODEL_DATA_AND_OPTIONS = ("DigitsNet()", "digits(", "options(")


def _lines_of_code(script: Path) -> list[str]:
    """The lines beside docstring, imports, comments, and those that make the model, the data and the options."""
    text = script.read_text()
    lines = text.splitlines()
    left_out: set[int] = set()
    for node in ast.parse(text).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in left_out]
    code = [line for line in kept if line.strip() and not line.strip().startswith("#")]
    return [line for line in code if not any(word in line for word in _MODEL_DATA_AND_OPTIONS)]


@pytest.mark.parametrize(("script", "most"), [("train_loop.py", 13), ("train.py", 8)])
def test_a_program_is_as_short_as_promised(script: str, most: int) -> None:
    lines = _lines_of_code(DIGITS / script)
    assert 3 < len(lines) <= most, "\n".join(lines)


def test_a_loop_of_ones_own_fits_on_a_screen() -> None:
    assert len((DIGITS / "train_loop.py").read_text().splitlines()) <= 40


def test_the_loop_has_what_was_promised_of_it() -> None:
    text = (DIGITS / "train_loop.py").read_text()
    for word in ("photinus.wrap(", "photinus.evaluate(", "resume=", "out=", "save="):
        assert word in text


@pytest.mark.parametrize("script", ["train.py", "train_loop.py"])
def test_old_spellings_are_understood(script: str, tmp_path: Path) -> None:
    words = [
        "--batch_size",
        "64",
        "--log_path",
        str(tmp_path),
        "--epoch",
        "1",
        "--learning_rate",
        "0.1",
        "--local-rank=0",
    ]
    probe = (
        f"import sys; sys.argv = ['x', *{words!r}]; sys.path.insert(0, {str(DIGITS)!r}); from options import options; "
        "a = options(None); print(a.batch_size, a.out, a.epochs, a.lr, a.resume, a.backend)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["64", str(tmp_path), "1", "0.1", "auto", "auto"]


def test_a_missing_data_folder_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DIGITS))
    from data import digits

    with pytest.raises(ValueError, match=r"the data set's folder '/nowhere' \(/nowhere\) does not exist"):
        digits("/nowhere")


def test_the_digits_are_cut_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DIGITS))
    import torch
    from data import digits
    from sklearn.datasets import load_digits

    train_set, valid_set = digits()
    assert (len(train_set), len(valid_set)) == (1437, 360)
    assert train_set[0][0].shape == (1, 8, 8)
    pixels, numbers = load_digits(return_X_y=True)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    for i, place in ((0, order[0]), (1436, order[1436])):
        image, target = train_set[i]
        assert (image.flatten() * 16).tolist() == pixels[place].tolist()
        assert target == numbers[place]
