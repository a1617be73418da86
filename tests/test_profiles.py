"""profiles: which one a run gets, and what each promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import Phase
from hypothesis.database import DirectoryBasedExampleDatabase, MultiplexedDatabase

from sm120_mla import settings
from sm120_mla.testing import profiles

NAMES = next(s.choices for s in settings.TABLE if s.name == "SM120_MLA_PROFILE")


@pytest.fixture
def registered(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Profiles registered below a folder of their own; put back afterwards."""
    before = hypothesis.settings.get_current_profile_name()
    for name in ("CI", "SM120_MLA_PROFILE", "SM120_MLA_SHARED_EXAMPLES"):
        monkeypatch.setenv(name, "")
    profiles.register(tmp_path)
    yield tmp_path
    monkeypatch.undo()
    profiles.register(pytestconfig.rootpath)
    profiles.load(before)


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_of_the_setting_exists_without_a_deadline(name: str, registered: Path) -> None:
    profile = hypothesis.settings.get_profile(name)

    assert profile.deadline is None
    assert profile.print_blob


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "dev"),
        ({"CI": "true"}, "ci"),
        ({"CI": "false"}, "dev"),
        ({"CI": "1", "SM120_MLA_PROFILE": "nightly"}, "nightly"),
        ({"SM120_MLA_PROFILE": "replay"}, "replay"),
    ],
)
def test_the_profile_chosen(
    variables: dict[str, str], name: str, registered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)

    assert profiles.chosen() == name


def test_what_each_profile_promises(registered: Path) -> None:
    get = hypothesis.settings.get_profile

    assert get("ci").derandomize
    assert get("ci").database is None
    assert not get("dev").derandomize
    assert get("nightly").max_examples == 5_000
    assert set(get("replay").phases) == {Phase.explicit, Phase.reuse}
    assert get("text").derandomize
    dev = get("dev").database
    assert isinstance(dev, DirectoryBasedExampleDatabase)
    assert dev.path == registered / ".sm120" / "hypothesis"


def test_the_shared_database_is_read_only(registered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_MLA_SHARED_EXAMPLES", str(registered / "shared"))
    shared = DirectoryBasedExampleDatabase(registered / "shared")
    shared.save(b"key", b"from elsewhere")
    profiles.register(registered)

    both = hypothesis.settings.get_profile("dev").database
    assert isinstance(both, MultiplexedDatabase)
    both.save(b"key", b"mine")

    assert set(both.fetch(b"key")) == {b"from elsewhere", b"mine"}
    assert set(shared.fetch(b"key")) == {b"from elsewhere"}


@pytest.mark.parametrize(("factor", "examples"), [(1, 50), (0.1, 5), (0.0001, 1), (2, 100)])
def test_scaled(factor: float, examples: int, registered: Path) -> None:
    profiles.load("dev")

    assert profiles.scaled(factor).max_examples == examples
    assert profiles.scaled(factor, stateful_step_count=7).stateful_step_count == 7


def test_a_number_of_examples_keeps_the_rest_of_the_profile(registered: Path) -> None:
    profiles.load("text", 7)

    current = hypothesis.settings()
    assert (current.max_examples, current.derandomize, current.database) == (7, True, None)
