"""Environment variables: parsed where they are declared, with errors that name them."""

from __future__ import annotations

import pytest

from photinus import env


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for variable in env.ALL:
        monkeypatch.delenv(variable.name, raising=False)


def test_an_unset_or_empty_variable_gives_the_default(monkeypatch):
    assert env.TIMEOUT_S.get() == 300.0
    assert env.EXPECTED_WORLD_SIZE.get() is None
    assert env.BACKEND.get() == "auto"
    assert env.ATTEMPT.get() == 0
    monkeypatch.setenv("PHOTINUS_TIMEOUT_S", "")
    assert env.TIMEOUT_S.get() == 300.0


def test_a_set_variable_is_parsed_anew_at_each_reading(monkeypatch):
    monkeypatch.setenv("PHOTINUS_TIMEOUT_S", "2.5")
    assert env.TIMEOUT_S.get() == 2.5
    monkeypatch.setenv("PHOTINUS_TIMEOUT_S", "7")
    assert env.TIMEOUT_S.get() == 7.0
    monkeypatch.setenv("PHOTINUS_WORLD_SIZE", "4")
    assert env.EXPECTED_WORLD_SIZE.get() == 4
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert env.ATTEMPT.get() == 3
    monkeypatch.setenv("PHOTINUS_ATTEMPT", "5")
    assert env.ATTEMPT.get() == 5


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (env.TIMEOUT_S, "soon"),
        (env.TIMEOUT_S, "0"),
        (env.TIMEOUT_S, "-3"),
        (env.TIMEOUT_S, "nan"),
        (env.EXPECTED_WORLD_SIZE, "0"),
        (env.EXPECTED_WORLD_SIZE, "2.5"),
        (env.ATTEMPT, "first"),
        (env.INSTRUCTION_SET, "avx3"),
        (env.LEVELS, "2,two"),
    ],
)
def test_a_wrong_value_is_refused_with_name_value_and_meaning(monkeypatch, variable, text):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match="environment variable") as refused:
        variable.get()
    assert f"{variable.name}={text!r}" in str(refused.value)
    assert variable.meaning in str(refused.value)


def test_every_declared_variable_is_listed_once_with_a_meaning():
    declared = [value for value in vars(env).values() if isinstance(value, env.Variable)]
    assert sorted(v.name for v in declared) == sorted(v.name for v in env.ALL)
    assert len({v.name for v in env.ALL}) == len(env.ALL)
    assert all(v.meaning for v in env.ALL)


def test_a_name_that_comes_near_one_of_ours_is_taken_for_it_and_others_are_left_alone():
    typed = ("PHOTINUS_TIMEOUT", "PHOTINUS_BACKND", "PHOTINUS_SECRET", "PHOTINUS_GRACE_S", "PHOTINUS_MY_DATA", "PATH")
    assert env.misspelt(dict.fromkeys(typed, "1")) == {
        "PHOTINUS_TIMEOUT": "PHOTINUS_TIMEOUT_S",
        "PHOTINUS_BACKND": "PHOTINUS_BACKEND",
        "PHOTINUS_SECRET": "PHOTINUS_JOB_SECRET",
    }
