"""``sm120-mla bisect``: the first commit that violates an invariant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from .. import case as cases
from ..errors import ArgumentError
from . import bisect_report, exits, judge_tree
from .bisect_report import Result
from .commits import Judge, judging
from .git import Commit, RepositoryError
from .history import count
from .judge_tree import Judged
from .search import Answer, EndsError, first_bad, most_questions
from .subjects import Subject, subject
from .suite import prepare, require

__all__ = ["Wanted", "bisect"]

_SHRINK_SECONDS = 20.0
_SAVED = Path(".sm120") / "cases"


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line; None is the default. ``good`` and ``bad`` are revisions."""

    target: str
    good: str
    bad: str
    invariant: str | None = None
    case: Path | None = None
    repeat: int = 1
    timeout: float = 120
    absent_is_good: bool = False
    paths: tuple[str, ...] = ()
    mode: str | None = None
    save: Path = field(default=_SAVED)
    fresh: bool = False
    json: bool = False


def bisect(wanted: Wanted) -> int:
    """Search, and print the report (Markdown, or JSON); returns an exit code: 0 where one commit was found,
    125 where commits that cannot be judged hide which of a few it is.

    Raises ``ArgumentError`` for a target, an invariant, a case or revisions that lead nowhere, ``EndsError``
    for ends that are not good and bad, ``UnavailableError`` where the mode or a package is not to be had.
    """
    require("hypothesis")
    mode = prepare(wanted.mode)
    id = _invariant(wanted)
    what = subject(wanted.target, wanted.paths)
    commits = _commits(what, wanted)
    console = Console(stderr=True)
    given = [wanted.case] if wanted.case is not None else []
    with judging(what, timeout=wanted.timeout, cases=given, fresh=wanted.fresh) as judge:
        search = _Search(judge, id, commits, wanted, console)
        result = search.run(mode)
        result = _with_case(result, judge, wanted)
    if wanted.json:
        print(json.dumps(result.document(), indent=2))
    else:
        print(bisect_report.markdown(result))
    return exits.HELD if result.found.exact else exits.NOTHING_JUDGED


def _invariant(wanted: Wanted) -> str:
    from ..testing import verdict

    if wanted.case is None:
        if wanted.invariant is None:
            raise ArgumentError("--invariant", None, "an invariant, or a case file", "Say --invariant ID.")
        return verdict.by_id(wanted.invariant).id
    id = cases.load(wanted.case).invariant
    if wanted.invariant not in (None, id):
        raise ArgumentError("--case", str(wanted.case), f"a case of {wanted.invariant}", f"It is of {id}.")
    return verdict.by_id(id).id


def _commits(what: Subject, wanted: Wanted) -> list[Commit]:
    """The good end, and every commit after it that changes a file concerned. The last one is as bad as
    ``--bad`` is: nothing concerned changes between them."""
    repository = what.repository
    good, bad = repository.commit(wanted.good, "--good"), repository.commit(wanted.bad, "--bad")
    if good == bad:
        raise RepositoryError("--good and --bad", good.short, "two commits", "They are one: name another.")
    commits = [good, *repository.line(good, bad, what.files.followed)]
    if len(commits) < 2:
        raise RepositoryError(
            "--good and --bad",
            f"{good.short} and {bad.short}",
            f"a commit between them that changes {', '.join(what.files.followed[:3])}",
            "The files concerned are the same at both: choose other ends, or name files with --path.",
        )
    return commits


@dataclass
class _Search:
    judge: Judge
    id: str
    commits: Sequence[Commit]
    wanted: Wanted
    console: Console
    met: dict[int, Judged] = field(default_factory=dict)
    asked: int = 0

    def run(self, mode: str) -> Result:
        size = len(self.commits)
        most = most_questions(size)
        self.console.print(
            f"{count(size - 1, 'commit')} to choose from; about {most} are judged", markup=False
        )
        if self.wanted.repeat == 1:
            self.judge.many((self.commits[0], self.commits[-1]), [self.id])  # the ends, at once
        try:
            found = first_bad(size, self._ask, repeat=self.wanted.repeat)
        except EndsError as error:
            raise self._explained(error) from error
        return Result(
            subject=self.judge.subject,
            mode=mode,
            id=self.id,
            commits=tuple(self.commits),
            found=found,
            verdicts=self.met,
            wanted=vars(self.wanted),
        )

    def _ask(self, i: int) -> Answer:
        commit = self.commits[i]
        again = i in self.met  # a repetition is a new run, not a memory of the last one
        verdict = self.judge.verdicts(commit, [self.id], again=again)[self.id]
        self.asked += 1
        answer = self._answer(verdict)
        if i not in self.met or answer is not Answer.unknown:
            self.met[i] = verdict
        reason = f" ({verdict.headline})" if answer is Answer.unknown else ""
        line = f"{self.asked}. {commit}: {answer}{reason}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return answer

    def _answer(self, verdict: Judged) -> Answer:
        if verdict.outcome == "absent" and self.wanted.absent_is_good:
            return Answer.good
        known = {"holds": Answer.good, "violated": Answer.bad}
        return known.get(verdict.outcome, Answer.unknown)

    def _explained(self, error: EndsError) -> EndsError:
        """The error with the commits' names, and what was found at them."""
        lines = [str(error)]
        for option, i in (("--good", 0), ("--bad", len(self.commits) - 1)):
            verdict = self.met[i]
            text = f"  {option} {self.commits[i]}: {self.id} {verdict.outcome}"
            text += " (contradicts itself)" if i in error.flaky else ""
            lines.append(f"{text}: {verdict.headline}" if verdict.headline else text)
        if error.first is Answer.unknown and self.met[0].outcome == "absent":
            lines.append("  With --absent-is-good, a commit that lacks what is judged counts as good.")
        error.args = ("\n".join(lines),)
        return error


def _with_case(result: Result, judge: Judge, wanted: Wanted) -> Result:
    """The result with the failing case, shrunk, in a file."""
    first = result.commits[result.found.bad]
    content = result.verdicts[result.found.bad].case
    if content is None:
        return result
    file = cases.CaseFile.model_validate(content)
    small = file if wanted.case is not None else _shrunk(file, result, judge)
    note = f"{result.id} first violated by {first.short} of {judge.subject.kind}"
    small = small.model_copy(update={"note": note})
    path = cases.save(small, wanted.save)
    verdict = result.verdicts[result.found.bad]
    if small.case != file.case:  # the message is that of the case that is shown
        with judge.trees.written(first) as tree:
            verdict = _judged_by(path, judge, tree, result.id)
    return result.with_case(path, verdict)


def _shrunk(file: cases.CaseFile, result: Result, judge: Judge) -> cases.CaseFile:
    """A smaller case that fails at the first bad commit, and holds at the last good one as this one does."""
    first, last_good = result.commits[result.found.bad], result.commits[result.found.good]
    with judge.trees.written(first) as bad, judge.trees.written(last_good) as good:
        path = cases.save(file, bad.parent / f"{bad.name}-case")
        content = judge_tree.shrink(
            judge.nursery,
            judge.subject.target(bad),
            path,
            seconds=_SHRINK_SECONDS,
            timeout=max(judge.timeout, 2 * _SHRINK_SECONDS),
            sys_path=judge.subject.sys_path(bad),
        )
        if content is None:
            return file
        small = cases.CaseFile.model_validate(content)
        if small.case == file.case or result.verdicts[result.found.good].outcome != "holds":
            return small
        path = cases.save(small, bad.parent / f"{bad.name}-case")
        return small if _judged_by(path, judge, good, result.id).outcome == "holds" else file


def _judged_by(case: Path, judge: Judge, tree: Path, id: str) -> Judged:
    return judge_tree.judge(
        judge.nursery,
        judge.subject.target(tree),
        [id],
        timeout=judge.timeout,
        tree=tree,
        sys_path=judge.subject.sys_path(tree),
        cases=[case],
    )[id]
