from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import photinus
from photinus import env
from photinus.trainer import dataset_folder
from photinus.trainer.record.config import describe_start, read_config, save_config, user_options
from photinus.words import mask_words


def test_a_missing_data_folder_is_refused_with_its_full_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"'absent' \({Path.cwd()}/absent\) does not exist"):
        dataset_folder("absent")


def test_a_file_or_an_empty_folder_is_no_data_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        dataset_folder(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is empty"):
        dataset_folder(tmp_path / "empty")


def test_a_good_data_folder_is_returned(tmp_path: Path) -> None:
    (tmp_path / "image").touch()
    assert dataset_folder(str(tmp_path)) == tmp_path


def test_options_come_from_argparse_a_dict_or_nothing() -> None:
    assert user_options(argparse.Namespace(lr=0.1)) == {"lr": 0.1}
    assert user_options({"lr": 0.1}) == {"lr": 0.1}
    assert user_options(None) == {}


def test_values_that_json_has_not_are_written_as_text(tmp_path: Path) -> None:
    save_config(tmp_path, {"path": tmp_path, "pair": (1, 2.5), "inner": {3: None}}, {}, {}, go_on=False)
    assert read_config(tmp_path)["options"] == {"path": str(tmp_path), "pair": [1, 2.5], "inner": {"3": None}}


def test_going_on_keeps_the_earlier_starts_and_beginning_anew_does_not(tmp_path: Path) -> None:
    with photinus.init("gloo", "cpu") as session:
        start = describe_start(session, resumed_from=None, resumed_step=0, launch={})
    save_config(tmp_path, {}, {}, start, go_on=False)
    save_config(tmp_path, {}, {}, start, go_on=True)
    assert len(read_config(tmp_path)["starts"]) == 2
    save_config(tmp_path, {}, {}, start, go_on=False)
    assert len(read_config(tmp_path)["starts"]) == 1


def test_a_start_says_how_to_start_it_again_and_keeps_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = "photinus run --cpu train.py --lr 1"
    environ = {"PHOTINUS_JOB_SECRET": "x", "PHOTINUS_WORLD_SIZE": "1", "PHOTINUS_LAUNCH": launch, "NCCL_DEBUG": "INFO"}
    for name, value in {**environ, "TORCH_API_TOKEN": "y", "PHOTINUS_LEVELS": ""}.items():
        monkeypatch.setenv(name, value)
    with photinus.init("gloo", "cpu") as session:
        start = describe_start(session, resumed_from=None, resumed_step=0, launch={})
    assert start["started_with"] == launch
    assert start["environ"]["NCCL_DEBUG"] == "INFO"
    assert not {"PHOTINUS_WORLD_SIZE", "PHOTINUS_LAUNCH"} & set(start["environ"])
    assert {start["environ"][name] for name in ("PHOTINUS_JOB_SECRET", "TORCH_API_TOKEN")} == {"***"}


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        ("--hf_token x --lr 1", "--hf_token *** --lr 1"),
        ("--wandb-api-key=x train.py", "--wandb-api-key=*** train.py"),
        ("db.password=x HF_TOKEN=x", "db.password=*** HF_TOKEN=***"),
        ("--env HF_TOKEN=x +token=x", "--env HF_TOKEN=*** +token=***"),
        ("--push-token --lr 1", "--push-token --lr 1"),
        ("--pad_token <pad> --model.eos-token=</s>", "--pad_token <pad> --model.eos-token=</s>"),
        ("--max_tokens 5 --tokenizer gpt2 --key-size 8", "--max_tokens 5 --tokenizer gpt2 --key-size 8"),
    ],
)
def test_what_is_named_like_a_secret_is_masked_in_a_command_line(words: str, masked: str) -> None:
    assert mask_words(words.split()) == masked.split()


def test_secrets_of_the_scripts_options_and_command_are_masked_and_the_file_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf_token", "x"])
    monkeypatch.delenv(env.LAUNCH.name, raising=False)
    with photinus.init("gloo", "cpu") as session:
        start = describe_start(session, resumed_from=None, resumed_step=0, launch={})
    assert start["command"][-2:] == ["--hf_token", "***"]
    assert start["started_with"].endswith("--hf_token '***'")
    save_config(tmp_path, {}, {"hf_token": "x", "wandb": [{"api_key": "x"}], "lr": 1, "eos_token": 2}, {}, go_on=False)
    assert read_config(tmp_path)["user"] == {"hf_token": "***", "wandb": [{"api_key": "***"}], "lr": 1, "eos_token": 2}
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "config.json").chmod(0o640)  # to share it with a group, once
    save_config(tmp_path, {}, {}, {}, go_on=True)
    assert (tmp_path / "config.json").stat().st_mode & 0o777 == 0o640


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        read_config(tmp_path)


def test_the_commit_of_the_scripts_repository_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=20)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with photinus.init("gloo", "cpu") as session:
        clean = describe_start(session, resumed_from=None, resumed_step=0, launch={})["git"]
        script.write_text("print()\n")
        changed = describe_start(session, resumed_from=None, resumed_step=0, launch={})["git"]
    assert clean is not None
    assert changed is not None
    assert len(clean["commit"]) == 40
    assert (clean["changed"], changed["changed"]) == (False, True)
