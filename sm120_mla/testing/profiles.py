"""Hypothesis profiles. How many examples a run makes is chosen here, never in a test.

| profile | examples | database | for |
|---|---|---|---|
| dev | 50 | local, and the shared one if set | a laptop |
| ci | 50, derandomised | none: Hypothesis allows none then | every change |
| nightly | 5,000 | local, and the shared one if set | a time-boxed search |
| replay | stored failures and explicit examples only | local and shared | after a fix |
| text | 50, derandomised | none | tests of failure messages |
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

from .. import settings as environment

__all__ = ["DATABASE", "chosen", "load", "register", "scaled"]

DATABASE = Path(".sm120") / "hypothesis"
"""Where examples that failed are kept, below the checkout's root."""


def register(root: Path) -> None:
    """Register every profile, with its database below ``root``. Replaces Hypothesis's own ``ci``."""
    local: ExampleDatabase = DirectoryBasedExampleDatabase(root / DATABASE)
    shared = environment.get("SM120_MLA_SHARED_EXAMPLES")
    both = local
    if shared:
        both = MultiplexedDatabase(local, ReadOnlyDatabase(DirectoryBasedExampleDatabase(shared)))
    # A kernel's first launch compiles it, and the interpreter's speed is nobody's bug: no deadline.
    # Filtered draws are the strategies' business, and tests/ looks at their reach.
    # derandomize is given as Hypothesis's own default has it on where CI is set.
    base = settings(
        deadline=None,
        print_blob=True,
        derandomize=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    generate = [Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink]
    settings.register_profile("dev", base, max_examples=50, database=both, phases=generate)
    settings.register_profile("ci", base, max_examples=50, database=None, phases=generate, derandomize=True)
    settings.register_profile("nightly", base, max_examples=5_000, database=both, phases=generate)
    settings.register_profile("replay", base, database=both, phases=[Phase.explicit, Phase.reuse])
    settings.register_profile(
        "text",
        base,
        max_examples=50,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        derandomize=True,
    )


def chosen() -> str:
    """The profile of this run: as set, else ``ci`` on a CI system, else ``dev``."""
    if environment.raw("SM120_MLA_PROFILE"):
        return environment.get("SM120_MLA_PROFILE")
    on_ci = environment.get("CI").lower() not in ("", "0", "false")
    return "ci" if on_ci else environment.get("SM120_MLA_PROFILE")


def load(name: str, examples: int | None = None) -> None:
    """Make a registered profile the current one, with another number of examples if given."""
    settings.load_profile(name)
    if examples is not None:
        settings.register_profile(f"{name}, {examples} examples", settings(), max_examples=examples)
        settings.load_profile(f"{name}, {examples} examples")


def scaled(factor: float, **more: object) -> settings:
    """The profile with its number of examples times ``factor``, at least 1: for tests dear or cheap.

    A decorator: ``@scaled(0.2)`` beside ``@given``. Further settings as keywords.
    """
    current = settings()
    return settings(max_examples=max(1, round(current.max_examples * factor)), **more)  # type: ignore[arg-type]
