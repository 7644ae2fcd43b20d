"""The option table: what is refused, by which name, and that README and table say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_basin.config import (
    ENVIRONMENT_VARIABLE,
    OPTIONS,
    BasinConfig,
    ConfigError,
    options_markdown,
    split_flags,
)


def test_without_a_flag_basin_is_off_and_the_arguments_are_untouched() -> None:
    argv = ["--model-path", "m", "--tp=2", "--some-new-flag"]
    assert split_flags(argv) == (None, argv)


def test_flags_are_taken_out_wherever_they_stand() -> None:
    config, others = split_flags(["--tp", "2", "--basin-admission", "off", "--port", "1", "--basin-budget-tokens=5"])
    assert config == BasinConfig(admission="off", budget_tokens=5)
    assert others == ["--tp", "2", "--port", "1"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--basin-budget-tokens", "-4"], "--basin-budget-tokens: must be at least 1 and finite, got -4"),
        (["--basin-budget-tokens", "many"], "--basin-budget-tokens"),
        (["--basin-admission", "maybe"], "must be one of current, partial, peak, off"),
        (["--basin-budget"], "did you mean '--basin-budget-tokens'"),
        (["--basin-hold-limit=3"], "did you mean '--basin-hold-limit-s'"),
        (["--basin-hold-limit-s", "nan"], "--basin-hold-limit-s"),
        (["--basin-idle-timeout-s", "inf"], "--basin-idle-timeout-s"),
        (["--basin-config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_a_wrong_flag_is_named_with_its_mend(argv: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_flags(argv)
    assert says in str(error.value)


def test_the_file_is_read_and_flags_beat_it(tmp_path: Path) -> None:
    path = tmp_path / "basin.toml"
    path.write_text('admission = "off"\nbudget-tokens = 7\n')
    config, _ = split_flags(["--basin-config", str(path), "--basin-budget-tokens", "9"])
    assert config == BasinConfig(admission="off", budget_tokens=9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("budget = 7", "unknown option 'budget'; did you mean 'budget_tokens'?"),
        ('budget_tokens = "7"', "--basin-budget-tokens: expected int"),
        ("budget_tokens = true", "--basin-budget-tokens: expected int"),
        ("budget_tokens = ", "not TOML"),
        ("[admission]\nrule = 1", "--basin-admission"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "basin.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        split_flags(["--basin-config", str(path)])
    assert says in str(error.value)


@given(
    budget=st.none() | st.integers(1, 10**9),
    idle=st.floats(0.1, 1e5),
    hold=st.floats(0, 3600),
    admission=st.sampled_from(["current", "off"]),
)
def test_the_configuration_survives_the_environment(
    budget: int | None, idle: float, hold: float, admission: str
) -> None:
    config = BasinConfig(admission=admission, budget_tokens=budget, idle_timeout_s=idle, hold_limit_s=hold)
    assert BasinConfig.from_environment({ENVIRONMENT_VARIABLE: config.to_json()}) == config


@pytest.mark.parametrize("text", ["{", "[1]", '{"nope": 1}', '{"budget_tokens": 0}'])
def test_a_broken_environment_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        BasinConfig.from_environment({ENVIRONMENT_VARIABLE: text})


def test_the_table_and_the_record_agree() -> None:
    assert {option.name: option.default for option in OPTIONS} == dataclasses.asdict(BasinConfig())


def test_the_readme_shows_the_table() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert options_markdown() in readme, "regenerate it with: python -m sglang_basin.config"
