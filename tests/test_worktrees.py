"""Reading repositories and writing their trees aside, without touching them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from history_repos import commit, git, make_repo

from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.tools.git import Commit, Repository, RepositoryError
from sm120_mla.tools.worktrees import Trees, terminable

EVERYTHING = ("**",)


def state(folder: Path) -> dict[str, bytes]:
    """Every file of a repository, its own data included."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- trees


def test_a_tree_is_what_was_committed(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    make_repo(repo, "g")
    (repo / "run.sh").write_text("#!/bin/sh\n")
    (repo / "run.sh").chmod(0o755)
    (repo / "link").symlink_to("engine.py")
    sha = commit(repo, {"deep/er/a b.py": "x = 1\r\n", "deep/__pycache__/a.pyc": "stale", "ü.py": ""})
    commit(repo, {"engine.py": "later\n"})

    with Trees(Repository(repo), EVERYTHING) as trees, trees.written(trees.repository.commit(sha)) as tree:
        found = files(tree)
        assert (tree / "deep" / "er" / "a b.py").read_bytes() == b"x = 1\r\n"
        assert os.access(tree / "run.sh", os.X_OK)
        assert (tree / "link").readlink() == Path("engine.py")

    assert found["engine.py"] == "# 0\ng\n"
    assert set(found) == {"engine.py", "link", "run.sh", "deep/er/a b.py", "ü.py"}, "and no bytecode"
    assert not tree.exists()


def test_nothing_of_the_repository_changes(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    hashes = make_repo(repo, "gb")
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    git(repo, "config", "filter.evil.smudge", f"touch {tmp_path}/smudged; cat")
    commit(repo, {".gitattributes": "*.py filter=evil\n"})
    git(repo, "config", "filter.evil.clean", f"touch {tmp_path}/cleaned; cat")
    git(repo, "config", "filter.evil.required", "true")
    git(repo, "config", "core.fsmonitor", f"touch {tmp_path}/monitored")
    (repo / "engine.py").write_text("# 9\ng\n")  # as long as it was: only its content tells
    os.utime(repo / ".gitattributes", (1, 1))  # a status would like to refresh the index
    before = state(repo)

    repository = Repository(repo)
    with Trees(repository, EVERYTHING) as trees:
        for sha in hashes:
            with trees.written(repository.commit(sha)):
                pass
    repository.line(repository.commit(hashes[0]), repository.commit("HEAD"), EVERYTHING)
    dirty = repository.uncommitted(["**/*.py"])

    assert state(repo) == before
    assert dirty == ["engine.py"]
    assert not list(tmp_path.glob("*ed")), "no hook, no filter, no monitor ran"


def test_a_bare_repository_serves_as_well(tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "gb")
    git(tmp_path, "clone", "-q", "--bare", "repo", "bare.git")
    repository = Repository(tmp_path / "bare.git")

    with Trees(repository, EVERYTHING) as trees, trees.written(repository.commit("main~1")) as tree:
        assert files(tree) == {"engine.py": "# 0\ng\n"}
    assert repository.uncommitted(EVERYTHING) == []


def test_the_environment_of_the_caller_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = make_repo(tmp_path / "repo", "g")
    make_repo(tmp_path / "other", "b")
    for name, value in {
        "GIT_DIR": ".git",
        "GIT_WORK_TREE": ".",
        "GIT_INDEX_FILE": "no",
        "GIT_PAGER": "x",
    }.items():
        monkeypatch.setenv(name, str(tmp_path / "other" / value))

    assert Repository(tmp_path / "repo").commit("HEAD").sha == hashes[0]


def test_only_what_matches_is_written_and_counts(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    make_repo(repo, "g.b")
    commit(repo, {"deep/engine.py": "x"})
    repository = Repository(repo)
    head, older = repository.commit("HEAD"), repository.commit("HEAD~1")

    assert [e.path for e in repository.files(head, ["*.py"])] == ["engine.py"]
    assert [e.path for e in repository.files(head, ["**/*.py"])] == ["deep/engine.py", "engine.py"]
    top, every = Trees(repository, ["*.py"]), Trees(repository, ["**/*.py"])
    assert top.content(head) == top.content(older)
    assert every.content(head) != every.content(older)
    assert [c.subject for c in repository.all_until(head, ["engine.py"])] == ["commit 0: g", "commit 2: b"]


def test_a_partial_clone_lacks_content_and_says_so(tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "g")
    git(tmp_path / "repo", "config", "uploadpack.allowFilter", "true")
    url = f"file://{tmp_path}/repo"
    git(tmp_path, "clone", "-q", "--bare", "--filter=blob:none", url, "partial")
    repository = Repository(tmp_path / "partial")

    with (
        Trees(repository, EVERYTHING) as trees,
        pytest.raises(UnavailableError, match=r"engine\.py is not available: .* lacks its content"),
        trees.written(repository.commit("HEAD")),
    ):
        pass


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/outside"])
def test_a_path_that_leaves_the_tree_is_refused(tmp_path: Path, path: str) -> None:
    from sm120_mla.tools import git as module

    with pytest.raises(UnavailableError, match="leaves the tree"):
        module._place(tmp_path / "tree", module.Entry("100644", "0" * 40, path), b"x")

    assert list(tmp_path.iterdir()) == []


def test_trees_are_gone_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repo(tmp_path / "repo", "g")
    aside = tmp_path / "aside"
    aside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    repository = Repository(tmp_path / "repo")

    with (
        pytest.raises(KeyboardInterrupt),
        terminable(),
        Trees(repository, EVERYTHING) as trees,
        trees.written(repository.commit("HEAD")) as tree,
    ):
        _terminated(aside, tree)

    assert list(aside.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _terminated(aside: Path, tree: Path) -> None:
    assert aside in tree.parents
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


# ---- commits


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_line_is_of_first_parents(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    make_repo(repo, "gg")
    git(repo, "checkout", "-q", "-b", "side", "HEAD~1")
    side = commit(repo, {"side.py": "x\n"}, "on the side")
    git(repo, "checkout", "-q", "main")
    git(repo, "merge", "-q", "--no-ff", "-m", "merge", "side")
    repository = Repository(repo)
    head = repository.commit("HEAD")

    line = repository.line(repository.commit("HEAD~2"), head, EVERYTHING)

    assert [c.subject for c in line] == ["commit 1: g", "merge"]
    assert [c.subject for c in repository.line(repository.commit("HEAD~2"), head, ["side.py"])] == ["merge"]
    with pytest.raises(
        RepositoryError, match=f"The nearest commit on it is {git(repo, 'rev-parse', 'HEAD~2')[:10]}"
    ):
        repository.line(repository.commit(side), head)


def test_ends_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    hashes = make_repo(tmp_path / "repo", "gg")
    repository = Repository(tmp_path / "repo")

    with pytest.raises(RepositoryError, match="the older one first"):
        repository.line(repository.commit(hashes[1]), repository.commit(hashes[0]))


def test_histories_without_a_common_commit_are_refused(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    hashes = make_repo(repo, "g")
    git(repo, "checkout", "-q", "--orphan", "new")
    commit(repo, {"engine.py": "again"})
    repository = Repository(repo)

    with pytest.raises(RepositoryError, match="no commit in common"):
        repository.line(repository.commit(hashes[0]), repository.commit("HEAD"))


@pytest.mark.parametrize("revision", ["", "nope", "--all", "HEAD..HEAD", "HEAD:engine.py", "0" * 40])
def test_an_unknown_revision_is_refused_by_name(tmp_path: Path, revision: str) -> None:
    make_repo(tmp_path / "repo", "g")

    with pytest.raises(RepositoryError) as caught:
        Repository(tmp_path / "repo").commit(revision, "--good")

    assert caught.value.argument == "--good"
    assert caught.value.value == repr(revision)


def test_a_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "g")
    (tmp_path / "repo" / "deep").mkdir()
    (tmp_path / "plain").mkdir()

    with pytest.raises(RepositoryError, match="expected a git repository"):
        Repository(tmp_path / "plain")
    with pytest.raises(RepositoryError, match="expected a folder"):
        Repository(tmp_path / "nowhere")
    with pytest.raises(RepositoryError, match=f"Name {tmp_path}/repo"):
        Repository(tmp_path / "repo" / "deep")
    assert issubclass(RepositoryError, ArgumentError)


def test_a_subject_with_odd_characters_is_kept(tmp_path: Path) -> None:
    make_repo(tmp_path / "repo", "g")
    commit(tmp_path / "repo", {"a.py": ""}, "tab\there | pipe [bold]")

    found = Repository(tmp_path / "repo").commit("HEAD")

    assert found.subject == "tab\there | pipe [bold]"
    assert isinstance(found, Commit)


def test_without_git_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)

    with pytest.raises(UnavailableError, match="Install git"):
        Repository(tmp_path)
