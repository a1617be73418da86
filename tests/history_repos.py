"""Small repositories for tests over commits, and a judge of them that needs no process."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sm120_mla.tools import commits, judge_tree
from sm120_mla.tools.judge_tree import Judged

ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{
        f"GIT_{who}_{what}": f"{what.lower()}@x"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    },
}
CASE = {"schema_version": 1, "invariant": "BUF-GUARD", "note": "", "case": {"kind": "order", "page_size": 64}}


def git(folder: Path, *arguments: str, **more: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=environment | ENVIRONMENT | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(folder: Path, files: Mapping[str, str], message: str = "x") -> str:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make_repo(folder: Path, word: str) -> list[str]:
    """A commit for each letter, whose tree ``FakeJudge`` judges so: g good, b bad, u unknown, a absent; a dot
    changes another file only. Returns the hashes."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    hashes = []
    for n, letter in enumerate(word):
        name, content = ("notes.txt", f"{n}\n") if letter == "." else ("engine.py", f"# {n}\n{letter}\n")
        hashes.append(commit(folder, {name: content}, f"commit {n}: {letter}"))
    return hashes


class FakeJudge:
    """Stands for ``judge_tree.judge``: reads the last line of the tree's ``engine.py``."""

    def __init__(self, flaky: Sequence[str] = ()) -> None:
        self.asked: Counter[str] = Counter()
        self.flaky = flaky
        self.interrupt_at = ""

    def __call__(
        self, nursery: Any, target: str, ids: Sequence[str], *, tree: Path, **_: Any
    ) -> dict[str, Judged]:
        text = (tree / "engine.py").read_text() if (tree / "engine.py").exists() else "\na\n"
        self.asked[text] += 1
        if text == self.interrupt_at:
            raise KeyboardInterrupt
        letter = text.split()[-1]
        if letter in self.flaky:
            letter = "gb"[self.asked[text] % 2]
        return {id: verdict(letter) for id in ids}


def verdict(letter: str) -> Judged:
    if letter == "b":
        text = "BUF-GUARD violated: a guard\n  target module (interpreter)\n  replay: nothing"
        return Judged("violated", "a buffer_name is unguarded", text=text, case=CASE)
    return {
        "g": Judged("holds"),
        "u": Judged("unknown", "it does not import"),
        "a": Judged("absent", "nothing of the kind"),
    }[letter]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeJudge:
    """No process judges, and nothing is remembered from elsewhere."""
    fake = FakeJudge()
    monkeypatch.setattr(judge_tree, "judge", fake)
    monkeypatch.setattr(judge_tree, "shrink", lambda *_, **__: None)
    monkeypatch.setattr(commits, "CACHE", tmp_path / "cache")
    return fake


Run = Callable[..., int]
