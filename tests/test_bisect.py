"""The command that finds the first bad commit, and its report; over wheels, too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from history_repos import CASE, FakeJudge, git, judged, make_repo

from sm120_mla.tools import bisect_report, cli, driver, exits, wheels
from sm120_mla.tools.bisect_report import hunks, trimmed

__all__ = ["judged"]

pytestmark = pytest.mark.usefixtures("judged")


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command on a repository of the word; returns (exit code, stdout, stderr)."""

    def run(word: str, *more: str, ends: tuple[str, str] | None = None) -> tuple[int, str, str]:
        repo = tmp_path / "repo"
        hashes = make_repo(repo, word)
        monkeypatch.chdir(repo)
        good, bad = ends or (hashes[0], hashes[-1])
        options = ["--target", "engine:Target", "--invariant", "BUF-GUARD", "--save", str(tmp_path / "cases")]
        code = cli.run(["bisect", *options, "--good", good, "--bad", bad, *more])
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ---- what is found


def test_the_first_bad_commit_is_found(bisect) -> None:
    code, out, err = bisect("g.gg.bb.b", "--json")

    found = json.loads(out)
    assert code == exits.HELD
    assert [c["subject"] for c in found["candidates"]] == ["commit 5: b"]
    assert found["last_good"]["subject"] == "commit 3: g"
    assert found["exact"]
    assert "5 commits to choose from" in err


def test_commits_that_cannot_be_judged_are_skipped(bisect) -> None:
    code, out, _ = bisect("gugubub", "--json")

    found = json.loads(out)
    assert code == exits.NOTHING_JUDGED
    assert [c["subject"] for c in found["candidates"]] == ["commit 3: u", "commit 4: b"]
    assert {j["answer"] for j in found["judged"]} == {"good", "bad", "unknown"}


def test_the_last_commit_need_not_change_anything(bisect) -> None:
    code, out, _ = bisect("gb...", "--json")

    assert code == exits.HELD
    assert json.loads(out)["candidates"][0]["subject"] == "commit 1: b"


def test_no_commit_is_judged_twice(bisect, judged: FakeJudge) -> None:
    bisect("g" * 8 + "b" * 8)

    assert set(judged.asked.values()) == {1}
    assert len(judged.asked) <= 2 + 4


def test_flaky_commits_are_named(bisect, judged: FakeJudge) -> None:
    judged.flaky = "f"

    code, out, _ = bisect("gfb", "--repeat", "2", "--json")

    found = json.loads(out)
    assert code == exits.NOTHING_JUDGED
    assert [(j["subject"], j["flaky"]) for j in found["judged"]] == [
        ("commit 0: g", False),
        ("commit 2: b", False),
        ("commit 1: f", True),
    ]
    assert set(judged.asked.values()) == {2}, "a repetition is a new run"


def test_what_is_absent_is_unknown_or_good_as_asked(bisect) -> None:
    code, _, err = bisect("aab")

    assert code == exits.WRONG_USE
    assert "With --absent-is-good" in err


def test_absent_may_count_as_good(bisect) -> None:
    code, out, _ = bisect("aab", "--absent-is-good", "--json")

    assert code == exits.HELD
    assert json.loads(out)["candidates"][0]["subject"] == "commit 2: b"


def test_the_report_is_ready_to_paste(bisect, tmp_path: Path) -> None:
    code, out, _ = bisect("ggubb", "--timeout", "30")

    first = git(tmp_path / "repo", "rev-parse", "HEAD~1")
    assert code == exits.NOTHING_JUDGED
    assert out.startswith("# BUF-GUARD: first violated by one of 2 commits\n")
    assert f"| bad | {first} |" in out
    assert "is unknown: it does not import" in out
    assert "BUF-GUARD violated: a guard\n  target module (interpreter)\n```" in out, (
        "no replay of a lost path"
    )
    assert "-g\n" in out
    assert "+b\n" in out
    assert str(tmp_path / "cases") in out
    saved = list((tmp_path / "cases").glob("BUF-GUARD-*.json"))
    assert json.loads(saved[0].read_text())["case"]["page_size"] == 64
    again = [line for line in out.splitlines() if line.startswith("sm120-mla bisect")]
    assert len(again) == 1
    assert again[0].endswith("--timeout 30")


def test_a_case_file_takes_the_place_of_the_stored_cases(bisect, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE))

    code, out, _ = bisect("gb", "--case", str(path))

    assert code == exits.HELD
    assert f"--case {path}" in out


# ---- wrong use


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("gg", "Both are good"),
        ("bb", "Both are bad"),
        ("bg", "swapped"),
        ("ub", "the first end"),
        ("gu", "the last end"),
    ],
)
def test_ends_are_verified_first(bisect, word: str, says: str) -> None:
    code, out, err = bisect(word)

    assert (code, out) == (exits.WRONG_USE, "")
    assert says in err
    assert "--good" in err
    assert "commit 0" in err


@pytest.mark.parametrize(
    ("ends", "more", "says"),
    [
        (("HEAD", "HEAD~1"), (), "expected the older one first"),
        (("HEAD", "main"), (), "expected two commits"),
        (("nope", "HEAD"), (), "--good = 'nope': expected a commit"),
        (("HEAD~1", "v9"), (), "--bad = 'v9': expected a commit"),
        (("HEAD~1", "HEAD"), ("--path", "*.rs"), "The files concerned are the same"),
        (("HEAD~1", "HEAD"), ("--invariant", "BUF-GRAUD"), "one of BUF-GUARD"),
        (("HEAD~1", "HEAD"), ("--target", "sglang"), "expected sglang:PATH"),
        (("HEAD~1", "HEAD"), ("--target", "engine"), "expected one of own, own:PATH"),
        (("HEAD~1", "HEAD"), ("--target", "vllm:/nowhere"), "repository = /nowhere: expected a folder"),
        (("HEAD~1", "HEAD"), ("--case", "nowhere.json"), "case = nowhere.json"),
    ],
)
def test_wrong_use_is_told_before_anything_is_judged(
    bisect, judged: FakeJudge, ends: tuple[str, str], more: tuple[str, ...], says: str
) -> None:
    code, out, err = bisect("gb", *more, ends=ends)

    assert (code, out) == (exits.WRONG_USE, "")
    assert says in err
    assert not judged.asked


def test_a_folder_that_is_no_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    code = cli.run(
        ["bisect", "--target", "engine:T", "--invariant", "BUF-GUARD", "--good", "a", "--bad", "b"]
    )

    assert code == exits.WRONG_USE
    assert "expected a git repository" in capsys.readouterr().err


def test_something_to_look_for_is_needed(bisect, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bisect", "--target", "engine:T", "--good", "a"]) == exits.WRONG_USE
    assert "--invariant" in capsys.readouterr().err
    assert cli.run(["bisect", "--invariant", "BUF-GUARD"]) == exits.WRONG_USE
    assert "Say --good A" in capsys.readouterr().err


def test_an_interruption_is_one(bisect, judged: FakeJudge) -> None:
    judged.interrupt_at = "# 2\ng\n"

    code, out, _ = bisect("ggggb")

    assert (code, out) == (exits.INTERRUPTED, "")


# ---- the diff


DIFF = """diff --git a/x.py b/x.py
index 1..2 100644
--- a/x.py
+++ b/x.py
@@ -1,2 +1,2 @@
 import os
-LONG = 1
+LONG = 2
@@ -90,3 +90,3 @@ def f():
     a
-    with torch.inference_mode(False):
+    if True:
diff --git a/old.py b/new.py
similarity index 100%
rename from old.py
rename to new.py
"""


def test_a_diff_is_cut_into_hunks() -> None:
    found = hunks(DIFF)

    assert [header.splitlines()[0] for header, _ in found] == [
        "diff --git a/x.py b/x.py",
        "diff --git a/x.py b/x.py",
        "diff --git a/old.py b/new.py",
    ]
    assert [len(body) for _, body in found] == [4, 4, 0]


def test_a_short_diff_is_shown_whole() -> None:
    wanted = [line for line in DIFF.splitlines() if not line.startswith("index ")]

    assert trimmed(DIFF, "BUF-GUARD").splitlines() == wanted


def test_of_a_long_diff_the_hunk_concerned_is_shown() -> None:
    text = trimmed(DIFF, "BUF-GUARD", most=4)

    assert "inference_mode" in text
    assert "LONG" not in text
    assert text.endswith("[... 2 more of 3 hunks]")


def test_of_a_long_hunk_the_place_that_the_message_names_is_shown() -> None:
    body = [f"+    line_{n} = empty" for n in range(200)]
    body[150] = "+    split_buf[dev] = torch.empty(1)"
    diff = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -0,0 +1,200 @@\n" + "\n".join(body)

    text = trimmed(diff, "BUF-GUARD", "buffer x.split_buf[cpu] is an inference tensor")

    assert "split_buf[dev]" in text
    assert len(text.splitlines()) < 30
    assert "[... 144 lines]" in text


def test_a_hunk_without_a_likely_place_is_cut_short() -> None:
    diff = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -0,0 +1,500 @@\n" + "+nothing\n" * 500

    assert len(trimmed(diff, "BUF-GUARD").splitlines()) < bisect_report._MOST_LINES + 8


# ---- the driver


def test_arguments_of_the_driver_count_from_where_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "case.json").write_text("{}")

    def made(*given: str) -> list[str]:
        return driver.arguments(given, tmp_path)

    assert made("replay", "case.json", "--target", "sglang:tree") == [
        *("replay", str(tmp_path / "case.json"), "--target", f"sglang:{tmp_path}/tree")
    ]
    assert made("replay", "case.json", "--target=own:.")[-1] == f"--target=own:{tmp_path}"
    assert made("verify", "--invariant", "BUF-GUARD")[-2:] == ["--target", f"own:{tmp_path}"]
    assert made("verify", "--target", "package.module:Target")[-1] == "package.module:Target"
    assert made("doctor") == ["doctor"]
    assert made() == []


def test_the_driver_is_not_put_where_it_would_be_bisected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    inside = Path(driver.__file__).parents[2] / "driver"

    assert cli.run(["bisect", "--export-driver", str(inside)]) == exits.WRONG_USE
    assert "outside the checkout" in capsys.readouterr().err
    assert cli.run(["bisect", "--export-driver", str(tmp_path / "full")]) == exits.WRONG_USE
    assert "a new or empty folder" in capsys.readouterr().err
    assert not inside.exists()


# ---- the page about it


def test_the_page_names_options_and_files_that_exist() -> None:
    root = Path(driver.__file__).parents[2]
    page = (root / "docs" / "bisect.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    known = {option for command in commands.values() for p in command.params for option in p.opts}
    script = page.split("```python\n")[1].split("```")[0]

    assert set(re.findall(r"--[a-z-]{3,}", page)) <= known
    assert (root / "fixtures" / "demo_history.py").is_file()
    assert (root / "fixtures" / "faults" / "boot-a.json").is_file()
    compile(script, "small_shared.py", "exec")


# ---- versions of a wheel


def install(requirement: str, folder: Path) -> bool:
    """A package index that lacks 1.3: a package that knows its version, bad from 1.5 on, unknown at 1.4."""
    name, _, number = requirement.partition("==")
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"minor = {number.split('.')[1]}\n")
    return number != "1.3"


COMMAND = (sys.executable, "-c", "import fake, sys; sys.exit({4: 7}.get(fake.minor, int(fake.minor >= 5)))")
VERSIONS = tuple(f"1.{n}" for n in range(9))


def test_versions_of_a_wheel_are_searched_alike() -> None:
    said: list[str] = []

    found = wheels.first_bad_version("fake", VERSIONS, COMMAND, install=install, say=said.append)

    assert [VERSIONS[i] for i in found.candidates] == ["1.3", "1.4", "1.5"]
    assert "fake 1.3: unknown (cannot be installed)" in said
    assert "fake 1.4: unknown (exit code 7)" in said
    assert len(said) == len(set(said)) <= 7


def test_a_command_that_hangs_is_unknown() -> None:
    def hang(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        raise subprocess.TimeoutExpired("command", 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", hang)
        answer, why = wheels._asked("fake==1.1", Path(), COMMAND, lambda *_: True, 1)

    assert (str(answer), why) == ("unknown", "timed out after 1 s")


def test_the_script_over_versions_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    versions = ["1.2", "1.5", "1.6"]

    assert wheels.main(["fake", *versions, "--", *COMMAND], install) == exits.HELD
    assert capsys.readouterr().out.splitlines()[-1] == "first bad: fake 1.5; last good: 1.2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fake", "1.0", "--", "true"), "PACKAGE VERSION VERSION"),
        (("fake", "1.0", "1.1"), "PACKAGE VERSION VERSION"),
        (("fake", "1.0", "1.1", "--", "no-such-program-anywhere"), "expected a program"),
        (("fake", "1.0", "1.1", "--", *COMMAND), "Both are good"),
    ],
)
def test_wrong_use_of_the_script_is_told(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wheels.main(arguments, install) == exits.WRONG_USE
    assert says in capsys.readouterr().err
