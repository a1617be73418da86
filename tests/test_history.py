"""The timeline over commits; judging trees in processes; and the demonstration, end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from history_repos import FakeJudge, git, judged, make_repo, verdict

from sm120_mla import settings
from sm120_mla.case import OrderCase, SplitCase, Step
from sm120_mla.targets.own import PRODUCT_FILES
from sm120_mla.tools import cli, commits, exits, judge_tree, subjects
from sm120_mla.tools.git import Commit
from sm120_mla.tools.history import Row, transitions
from sm120_mla.tools.nursery import Nursery
from sm120_mla.tools.shrink import shrink

ROOT = Path(__file__).parents[1]

__all__ = ["judged"]


@pytest.fixture
def history(
    judged: FakeJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Run the command on a repository of the word; returns (exit code, stdout, stderr)."""

    def run(word: str, *more: str) -> tuple[int, str, str]:
        repo = tmp_path / "repo"
        if not repo.exists():
            make_repo(repo, word)
        monkeypatch.chdir(repo)
        code = cli.run(["history", "--target", "engine:Target", "--invariant", "BUF-GUARD", *more])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def marks(out: str) -> str:
    """The last column of the table."""
    lines = out.splitlines()
    start = next(n for n, line in enumerate(lines) if "───" in line) + 1
    end = next(n for n in range(start, len(lines)) if not lines[n].strip())
    return "".join(line.rstrip()[-1] for line in lines[start:end])


# ---- the table


def test_every_commit_that_changes_a_file_concerned_has_a_line(history) -> None:
    code, out, _ = history("a.gu.bg")

    assert code == exits.VIOLATED
    assert marks(out) == "-.?X."
    assert "commit 1" not in out
    assert "5 commits, 5 judged now" in out
    assert "violated by the first commit judged" not in out


def test_what_is_violated_from_the_start_is_explained_too(history, tmp_path: Path) -> None:
    _, out, _ = history("ubg")

    first = git(tmp_path / "repo", "rev-parse", "HEAD~1")[:10]
    assert f"violated by the first commit judged:\n  BUF-GUARD at {first}: a buffer_name is unguarded" in out


def test_transitions_name_the_commit_and_what_hides_it(history, tmp_path: Path) -> None:
    _, out, _ = history("gub")

    short = git(tmp_path / "repo", "rev-parse", "HEAD")[:10]
    hidden = git(tmp_path / "repo", "rev-parse", "HEAD~1")[:10]
    text = out[out.index(f"\n\n{short} ") :]
    assert "  held -> violated:\n    BUF-GUARD: a buffer_name is unguarded\n" in text
    assert f"by one of {hidden}, {short}: those before could not be judged" in text
    assert f"  it does not import\n    BUF-GUARD at {hidden}" in text


@pytest.mark.parametrize(
    ("word", "code"),
    [("gg", exits.HELD), ("gb", exits.VIOLATED), ("bg", exits.VIOLATED), ("ua", 125), ("ug", 0)],
)
def test_the_exit_code_is_of_all_commits(history, word: str, code: int) -> None:
    assert history(word)[0] == code


def test_json_holds_everything(history, tmp_path: Path) -> None:
    _, out, _ = history("gb", "--json")

    found = json.loads(out)
    assert [c["verdicts"]["BUF-GUARD"]["outcome"] for c in found["commits"]] == ["holds", "violated"]
    assert found["commits"][1]["sha"] == git(tmp_path / "repo", "rev-parse", "HEAD")
    assert found["transitions"][0]["after"] == "violated"
    assert found["repository"] == str(tmp_path / "repo")


def test_a_part_of_the_history_can_be_asked_for(history) -> None:
    assert marks(history("gbgbg", "--from", "HEAD~3", "--to", "HEAD~1")[1]) == "X.X"
    assert marks(history("gbgbg", "--limit", "2")[1]) == "X."


def test_lazily_kept_tensors_of_the_last_commit_are_hinted_at(history, tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "g")
    source = (
        "import torch\nkept = {}\ndef f(k):\n    if k not in kept:\n        kept[k] = torch.empty(1)\n# g\n"
    )
    (tmp_path / "repo" / "engine.py").write_text(source)
    git(tmp_path / "repo", "commit", "-qam", "lazy")

    _, out, _ = history("")

    assert "hints, which are no verdicts" in out
    assert "engine.py:5: kept[k] = torch.empty" in out


def test_uncommitted_changes_are_told_and_not_judged(history, tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "g")
    (tmp_path / "repo" / "engine.py").write_text("b\n")

    code, out, err = history("")

    assert (code, marks(out)) == (exits.HELD, ".")
    assert "uncommitted changes are not (engine.py)" in err
    assert (tmp_path / "repo" / "engine.py").read_text() == "b\n"


# ---- what is remembered


def test_equal_trees_are_judged_once(history, judged: FakeJudge, tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "gb")
    git(tmp_path / "repo", "revert", "--no-edit", "HEAD")

    code, out, _ = history("")

    assert marks(out) == ".X."
    assert judged.asked.total() == 2
    assert code == exits.VIOLATED


def test_an_interrupted_run_goes_on_where_it_was(history, judged: FakeJudge) -> None:
    judged.interrupt_at = "# 3\nb\n"
    code, out, _ = history("ggub", "-n", "1")
    assert (code, out) == (exits.INTERRUPTED, "")
    before = judged.asked.total()

    judged.interrupt_at = ""
    code, out, _ = history("ggub")

    assert before == 4
    assert judged.asked.total() == 5
    assert marks(out) == "..?X"
    assert "1 judged now" in out


def test_what_was_judged_is_asked_again_where_it_must(
    history, judged: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*more: str) -> int:
        before = judged.asked.total()
        history("g", *more)
        return judged.asked.total() - before

    assert [asked(), asked(), asked("--invariant", "BUF-KEY"), asked("--fresh"), asked()] == [1, 0, 1, 1, 0]
    monkeypatch.setattr(commits, "suite_content", lambda: "another suite")
    assert asked() == 1
    monkeypatch.setenv("SM120_MLA_BACKEND", "reference")
    assert asked() == 1


def test_a_longer_time_asks_again_what_timed_out(history, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def late(*_: object, timeout: float, **__: object) -> dict[str, judge_tree.Judged]:
        asked.append(timeout)
        return {"BUF-GUARD": judge_tree.Judged("unknown", "timed out", ended=True)}

    monkeypatch.setattr(judge_tree, "judge", late)

    for timeout in ("10", "10", "5", "60"):
        history("g", "--timeout", timeout)

    assert asked == [10, 60]


def test_a_spoilt_memory_is_no_memory(history, judged: FakeJudge) -> None:
    history("g")
    (file,) = commits.CACHE.glob("*.json")
    file.write_text('{"verdicts": {"BUF-GUARD": 3}}')

    assert marks(history("g")[1]) == "."
    assert judged.asked.total() == 2


def test_a_folder_that_cannot_be_written_costs_the_memory_only(
    history, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(commits, "CACHE", tmp_path / "file")

    code, out, err = history("gb")

    assert (code, marks(out)) == (exits.VIOLATED, ".X")
    assert f"note: what was judged is not remembered ({tmp_path / 'file'}: File exists)" in err


def test_a_partial_clone_is_judged_anew_once_it_is_whole(history, tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "gb")
    blob = git(tmp_path / "repo", "rev-parse", "HEAD:engine.py")
    lost = tmp_path / "repo" / ".git" / "objects" / blob[:2] / blob[2:]
    kept = lost.read_bytes()
    lost.unlink()

    code, out, _ = history("")
    assert (code, marks(out)) == (exits.HELD, ".?")
    assert "the repository lacks its content" in out

    lost.write_bytes(kept)
    assert marks(history("")[1]) == ".X"


def test_a_tree_that_takes_itself_away_is_not_absent(history, monkeypatch: pytest.MonkeyPatch) -> None:
    def removing(*_: object, tree: Path, **__: object) -> dict[str, judge_tree.Judged]:
        (tree / "engine.py").unlink()
        return {"BUF-GUARD": judge_tree.Judged("absent", "nothing of the kind")}

    monkeypatch.setattr(judge_tree, "judge", removing)

    _, out, _ = history("g")

    assert marks(out) == "?"
    assert "its code removed engine.py from the tree" in out


# ---- transitions


def test_transitions_pass_over_what_is_unknown() -> None:
    rows = [Row(Commit(str(n), "", ""), {"X": verdict(letter)}) for n, letter in enumerate("uaguugubbg")]

    found = [(t.commit.sha, t.before, t.after, [c.sha for c in t.candidates]) for t in transitions(rows)]

    assert found == [
        ("2", "absent", "holds", ["2"]),
        ("7", "holds", "violated", ["6", "7"]),
        ("9", "violated", "holds", ["9"]),
    ]


# ---- wrong use


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--from", "nope"), "--from = 'nope': expected a commit"),
        (("--to", "v9"), "--to = 'v9': expected a commit"),
        (("--from", "HEAD", "--to", "HEAD~1"), "expected the older one first"),
        (("--path", "*.rs"), "commits that hold a file like *.rs"),
        (("--invariant", "BUF"), "invariant = 'BUF'"),
        (("--target", "own:."), "commits that hold a file like sm120_mla/*.py"),
        (("--target", "sglang:nowhere"), "expected a folder"),
    ],
)
def test_wrong_use_is_told(history, judged: FakeJudge, more: tuple[str, ...], says: str) -> None:
    code, out, err = history("gb", *more)

    assert (code, out) == (exits.WRONG_USE, "")
    assert says in err
    assert not judged.asked


def test_without_a_checkout_there_is_nothing_to_judge_by(
    history, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commits, "_STORED", tmp_path / "site-packages")

    code, _, err = history("g")

    assert code == exits.WRONG_USE
    assert "Install a checkout" in err


# ---- subjects


def test_own_is_the_repository_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repo(tmp_path / "repo", "g")
    (tmp_path / "repo" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "repo" / "deep")

    found = subjects.subject("own")

    assert found.place == str(tmp_path / "repo")
    assert found.target("/tree") == "own:/tree"


def test_files_of_our_own_checkouts_are_those_a_copy_takes() -> None:
    product = {
        f"sm120_mla/{name}" if name.endswith(".py") else f"sm120_mla/{name}/**" for name in PRODUCT_FILES
    }

    assert set(subjects.FILES["own"].written) == product


def test_an_entry_point_says_which_files_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from sm120_mla.targets import base

    module = ModuleType("an_engine")
    module.make = lambda path: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_engine", module)
    points = [EntryPoint("engine", "an_engine:make", base.ENTRY_POINTS)]
    monkeypatch.setattr(base, "entry_points", lambda group: points)
    make_repo(tmp_path / "repo", "g")

    assert subjects.subject(f"engine:{tmp_path}/repo").files.written == ("**/*.py",)
    module.make.CODE = ("a.py",)  # type: ignore[attr-defined]
    module.make.SUPPORT = ("b.py",)  # type: ignore[attr-defined]
    found = subjects.subject(f"engine:{tmp_path}/repo").files
    assert (found.followed, found.written) == (("a.py",), ("a.py", "b.py"))


# ---- shrinking


def test_a_case_shrinks_to_what_matters() -> None:
    steps = tuple(
        Step(do=do, inference=inference, arg=arg)
        for do, inference, arg in [
            ("load", False, 7),
            ("warm_up", True, 3),
            ("capture", False, 4),
            ("replay", True, 9),
        ]
    )
    case = OrderCase(name="a boot", page_size=256, rows=9, width=77, steps=steps, seed=5)

    small = shrink(case, lambda c: any(s.inference and s.do == "warm_up" for s in c.steps) and c.rows >= 3)

    assert small == OrderCase(rows=3, steps=(Step(do="warm_up", inference=True),))


def test_only_valid_cases_are_asked_about_and_only_while_there_is_time() -> None:
    asked = []

    def fails(case: SplitCase) -> bool:
        asked.append(case)
        return True

    case = SplitCase(page_size=512, pages=9, seed=7)

    assert shrink(case, fails, lambda: False) == case
    assert asked == []
    small = shrink(case, fails)
    assert small.page_size % 64 == 0
    assert len(asked) < 40


# ---- processes

TREES = {
    "raises": "raise RuntimeError('no such GPU')",
    "aborts": "import os\nos.abort()",
    "exits": "import sys\nprint('bye')\nsys.exit(0)",
    "leaves": "import os\nos._exit(0)",
    "holds": "from sm120_mla.testing.field_model import FieldTarget as Target",
    "prints": "print('x' * 100_000)\nfrom sm120_mla.testing.field_model import FieldTarget as Target",
}
IDS = ["SPLIT-BYTES", "CACHE-BYTES"]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(OMP_NUM_THREADS="1", SM120_MLA_MODE="reference") as made:
        yield made


def tree_of(folder: Path, source: str) -> Path:
    folder.mkdir()
    (folder / "engine.py").write_text(source + "\n")
    return folder


def test_whatever_a_tree_does_to_its_process_is_told(nursery: Nursery, tmp_path: Path) -> None:
    found = {}
    for name, source in TREES.items():
        tree = tree_of(tmp_path / name, source)
        found[name] = judge_tree.judge(
            nursery, "engine:Target", IDS, timeout=60, tree=tree, sys_path=[str(tree)]
        )

    outcomes = {name: [v.outcome for v in verdicts.values()] for name, verdicts in found.items()}
    assert {name for name, o in outcomes.items() if o == ["unknown", "unknown"]} == {*list(TREES)[:4]}
    assert "RuntimeError: no such GPU" in found["raises"]["SPLIT-BYTES"].headline
    assert found["aborts"]["SPLIT-BYTES"].headline == "the process was ended by SIGABRT while loading"
    assert "exit code 0 while loading" in found["leaves"]["SPLIT-BYTES"].headline
    assert outcomes["holds"] == outcomes["prints"]
    assert outcomes["holds"][0] == "holds"
    assert found["aborts"]["SPLIT-BYTES"].ended
    assert not found["raises"]["SPLIT-BYTES"].ended


def test_a_tree_that_hangs_is_unknown_and_leaves_nothing_behind(nursery: Nursery, tmp_path: Path) -> None:
    source = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    tree = tree_of(tmp_path / "tree", source)

    found = judge_tree.judge(nursery, "engine:Target", IDS, timeout=3, tree=tree, sys_path=[str(tree)])

    assert {v.headline for v in found.values()} == {"timed out after 3 s while loading"}
    assert all(map(ends, (tmp_path / "pids").read_text().split()))


def test_what_a_tree_starts_in_a_session_of_its_own_ends_with_it(nursery: Nursery, tmp_path: Path) -> None:
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True"
    source = (
        f"import subprocess, sys\nchild = subprocess.Popen({sleeper})\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{child.pid}}')\n{TREES['holds']}\n"
    )
    tree = tree_of(tmp_path / "tree", source)

    found = judge_tree.judge(nursery, "engine:Target", IDS[:1], timeout=60, tree=tree, sys_path=[str(tree)])

    assert found["SPLIT-BYTES"].outcome == "holds"
    assert not Path(f"/proc/{(tmp_path / 'pids').read_text()}").exists()


def test_a_tree_that_kills_its_parent_ends_alone(nursery: Nursery, tmp_path: Path) -> None:
    tree = tree_of(tmp_path / "tree", "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)\n")
    good = tree_of(tmp_path / "good", TREES["holds"])

    found = judge_tree.judge(nursery, "engine:Target", IDS[:1], timeout=60, tree=tree, sys_path=[str(tree)])
    after = judge_tree.judge(nursery, "engine:Target", IDS[:1], timeout=60, tree=good, sys_path=[str(good)])

    assert found["SPLIT-BYTES"].headline == "the process was ended by SIGKILL while loading"
    assert after["SPLIT-BYTES"].outcome == "holds"


def test_where_the_tree_lay_is_not_told_whatever_its_name(nursery: Nursery, tmp_path: Path) -> None:
    tree = tree_of(tmp_path / 'an "odd" plac\u00e9', "raise RuntimeError(__file__)")

    found = judge_tree.judge(nursery, "engine:Target", IDS[:1], timeout=60, tree=tree, sys_path=[str(tree)])

    assert f"RuntimeError: {judge_tree.TREE}/engine.py" in found["SPLIT-BYTES"].headline


def test_a_process_that_dies_while_judging_costs_one_verdict(nursery: Nursery, tmp_path: Path) -> None:
    source = (
        "import os\nfrom sm120_mla.testing.field_model import FieldTarget\n\n\n"
        "class Target(FieldTarget):\n"
        "    def supports(self, case, capability):\n"
        "        return os.abort() if case.kind == 'offset64' else super().supports(case, capability)\n"
    )
    tree = tree_of(tmp_path / "tree", source)
    ids = ["SPLIT-BYTES", "SPLIT-OFFSET64", "SPLIT-INDEX"]

    found = judge_tree.judge(nursery, "engine:Target", ids, timeout=60, tree=tree, sys_path=[str(tree)])

    assert [v.outcome for v in found.values()] == ["holds", "unknown", "holds"]
    assert found["SPLIT-OFFSET64"].headline == "the process was ended by SIGABRT while judging SPLIT-OFFSET64"


def ends(pid: str) -> bool:
    """Whether a process is gone, or about to be: one that was killed takes a moment."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_ctrl_c_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    repo, aside, pids = tmp_path / "repo", tmp_path / "aside", tmp_path / "pids"
    aside.mkdir()
    make_repo(repo, "")
    (repo / "engine.py").write_text(
        f"import os, time\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    git(repo, "add", "--all")
    git(repo, "commit", "-q", "-m", "hang")
    command = [sys.executable, "-m", "sm120_mla.tools.cli", "history", "--target", "engine:Target", "--fresh"]

    run = subprocess.Popen(
        [*command, "--invariant", "SPLIT-BYTES", "--mode", "reference"],
        cwd=repo,
        env=settings.environment(PYTHONPATH=str(ROOT), TMPDIR=str(aside)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while run.poll() is None and not (pids.exists() and pids.read_text()):
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)

    assert (run.returncode, out) == (exits.INTERRUPTED, ""), err
    assert ends(pids.read_text())
    assert list(aside.iterdir()) == []
    assert "goes on from there" in err


# ---- the demonstration


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_history", ROOT / "fixtures" / "demo_history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commits, "CACHE", tmp_path / "cache")
    made = demo()
    hashes = made.build(tmp_path / "engine")
    target = ("--target", f"sglang:{tmp_path}/engine", "--mode", "reference")

    code = cli.run(["history", *target, "--invariant", "BUF-GUARD", "--json"])
    table = json.loads(capsys.readouterr().out)
    ends = ("--good", "guard-added", "--bad", "unused")
    found_code = cli.run(
        ["bisect", *target, "--invariant", "BUF-GUARD", *ends, "--save", str(tmp_path / "cases"), "--json"]
    )
    found = json.loads(capsys.readouterr().out)

    assert hashes["guard-restored"] == "413eeda2d9a15f0d74bc3efc0646e92d69a7c72b", "the same everywhere"
    outcomes = {c["sha"]: c["verdicts"]["BUF-GUARD"]["outcome"] for c in table["commits"]}
    followed = [m for m in made.COMMITS if made.FILE in m.files]
    assert outcomes == {hashes[m.name]: m.guard for m in followed}
    assert code == exits.VIOLATED
    turns = [(t["after"], t["commit"]) for t in table["transitions"]]
    assert turns == [
        *[("holds", hashes["guard-added"]), ("violated", hashes["guard-lost"])],
        ("holds", hashes["guard-restored"]),
    ]
    assert found_code == exits.HELD
    assert [c["sha"] for c in found["candidates"]] == [hashes["guard-lost"]]
    steps = json.loads(Path(found["case"]).read_text())["case"]["steps"]
    assert [(s["do"], s["inference"]) for s in steps] == [("warm_up", True)], (
        "shrunk to the one step it takes"
    )
    assert "is an inference tensor after step 0 (warm_up)" in found["text"]
    assert "-        with torch.inference_mode(False):" in found["diff"]
    assert git(tmp_path / "engine", "status", "--porcelain") == ""


def test_git_bisect_run_gives_the_same_answer(tmp_path: Path) -> None:
    made = demo()
    hashes = made.build(tmp_path / "engine")
    driver = tmp_path / "driver"
    assert cli.run(["bisect", "--export-driver", str(driver)]) == exits.HELD
    case = tmp_path / "case.json"
    step = {"do": "warm_up", "inference": True}
    content = {"kind": "order", "page_size": 256, "steps": [step]}
    case.write_text(json.dumps({"invariant": "BUF-GUARD", "case": content}))

    git(tmp_path / "engine", "bisect", "start", "guard-lost", "guard-added")
    run = (str(driver / "sm120-mla"), "replay", "../case.json", "--target", "sglang:.", "--mode", "reference")
    git(tmp_path / "engine", "bisect", "run", *run, PYTHONPATH=os.devnull)
    log = git(tmp_path / "engine", "bisect", "log")

    assert f"# first bad commit: [{hashes['guard-lost']}]" in log
    assert f"# skip: [{hashes['broken']}]" in log
    assert git(tmp_path / "engine", "rev-parse", "refs/bisect/bad") == hashes["guard-lost"]
