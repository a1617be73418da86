"""What the README and the packaging files say is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sm120_mla import settings
from sm120_mla.tools import exits

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def table(heading: str) -> list[list[str]]:
    """Rows of the table whose header line begins with ``heading``, without the header."""
    lines = README.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_the_settings_table_is_the_table_of_settings() -> None:
    said = {row[0].strip("`"): row[1].strip("`") for row in table("variable")}

    assert said == {s.name: s.default or "none" for s in settings.TABLE}


def test_the_choices_of_a_setting_are_named() -> None:
    rows = {row[0].strip("`"): row[2] for row in table("variable")}

    for setting in settings.TABLE:
        for choice in setting.choices:
            assert f"`{choice}`" in rows[setting.name]


def test_the_exit_codes_are_those_of_the_commands() -> None:
    assert [int(row[0]) for row in table("exit code")] == sorted(exits.MEANING)


def test_every_command_is_described() -> None:
    from sm120_mla.tools import cli

    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}

    assert {row[0].split()[1].strip("`") for row in table("command")} == names


def test_ci_runs_the_test_command_word_for_word() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]

    assert len(commands) == 2
    assert commands[0].endswith("sm120-mla verify")
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == commands[1]


def test_the_profiles_are_described_and_have_an_environment() -> None:
    profiles = next(s.choices for s in settings.TABLE if s.name == "SM120_MLA_PROFILE")
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")

    for name in profiles:
        assert f"{name}: SM120_MLA_PROFILE = {name}" in tox
        assert f"`{name}`" in README


@pytest.mark.parametrize("extra", [None, "test", "lint", "report"])
def test_constraints_pin_everything_within_the_ranges(extra: str | None) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, version = re.split(r"==|<=", line)
            pins[name.lower()] = version
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] if extra is None else optional[extra]

    for text in wanted:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_the_plugin_is_named_as_its_module_so_that_conftest_can_name_it_too() -> None:
    points = PROJECT["project"]["entry-points"]["pytest11"]

    assert points == {"sm120_mla_pytest": "sm120_mla_pytest"}
    assert '"sm120_mla_pytest"' in (ROOT / "conftest.py").read_text(encoding="utf-8")


def test_policy_stays_short() -> None:
    assert len((ROOT / "conftest.py").read_text(encoding="utf-8").splitlines()) < 50
