"""What a bisection found, as a report to paste: Markdown, or plain data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .git import Commit
from .judge_tree import TREE, Judged
from .search import Answer, Found
from .subjects import Subject

__all__ = ["Result", "hunks", "markdown", "trimmed"]

_MOST_LINES = 60
_CONCERNS = {
    "BUF": r"inference_mode|empty|zeros|buffer|mask|resource|cache|capture|is_capturing",
    "SPLIT": r"split|touch|mark|mask|stride|scale|indices|page|int64|offset",
    "META": r"topk|width|view|contiguous|decode|prefill|capability|len",
    "ATTN": r"softmax|lse|sink|dot|scale|indices|length|mask|exp",
    "CACHE": r"quant|scale|amax|clamp|cast|round|store",
    "ROUTE": r"supports|route|backend|width|heads|contiguous|raise",
    "GRAPH": r"view|width|capture|stride|empty|buffer",
}
"""Words of changed lines that make a hunk likely to be the one, by family of invariants."""


@dataclass(frozen=True)
class Result:
    """``commits`` from the good end on; ``verdicts`` by their number; ``wanted`` the options given."""

    subject: Subject
    mode: str
    id: str
    commits: tuple[Commit, ...]
    found: Found
    verdicts: Mapping[int, Judged]
    wanted: Mapping[str, Any]
    case: Path | None = None
    shown: Judged = field(default=Judged("unknown"))
    """The verdict whose message is shown."""

    def with_case(self, case: Path, shown: Judged) -> Result:
        """The result with the file of its failing case, and the verdict on that."""
        return replace(self, case=case, shown=shown)

    @property
    def candidates(self) -> tuple[Commit, ...]:
        """The commits one of which is the first bad one."""
        return tuple(self.commits[i] for i in self.found.candidates)

    @property
    def last_good(self) -> Commit:
        """The good commit before them."""
        return self.commits[self.found.good]

    def diff(self) -> str:
        """What the candidates changed in the files concerned."""
        repository, files = self.subject.repository, self.subject.files
        return repository.diff(
            None if self.found.exact else self.last_good, self.candidates[-1], files.written
        )

    def beside(self) -> list[Commit]:
        """Commits between the good one and the candidates that changed files which are not followed."""
        if not self.subject.files.support or not self.found.exact:
            return []
        between = self.subject.repository.line(
            self.last_good, self.candidates[-1], self.subject.files.support
        )
        return [commit for commit in between if commit != self.candidates[-1]]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema_version": 1,
            "target": self.subject.name,
            "repository": self.subject.place,
            "mode": self.mode,
            "invariant": self.id,
            "exact": self.found.exact,
            "candidates": [vars(commit) for commit in self.candidates],
            "last_good": vars(self.last_good),
            "judged": [
                {
                    **vars(self.commits[i]),
                    "answer": str(answer),
                    "flaky": i in self.found.flaky,
                    "verdict": self.verdicts[i].to_json(),
                }
                for i, answer in self.found.answers.items()
            ],
            "case": str(self.case) if self.case else None,
            "text": self.shown.text or self.verdicts[self.found.bad].text,
            "diff": self.diff(),
            "reproduce": list(reproduce(self)),
        }


def markdown(result: Result) -> str:
    """The report."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Result) -> Iterator[str]:
    first = result.candidates[-1]
    if result.found.exact:
        yield f"# {result.id}: first violated by {first.short}"
    else:
        yield f"# {result.id}: first violated by one of {len(result.candidates)} commits"
    yield ""
    yield f"| | commit | date | subject |\n|---|---|---|---|\n| last good | {_cells(result.last_good)} |"
    for commit in result.candidates[:-1]:
        yield f"| cannot be judged | {_cells(commit)} |"
    yield f"| first bad | {_cells(first)} |" if result.found.exact else f"| bad | {_cells(first)} |"
    yield ""
    yield f"Target `{_full_target(result.subject)}`, mode {result.mode}; {_count(result)}."
    yield from _unknown(result)
    text = (result.shown.text or result.verdicts[result.found.bad].text).strip()
    if text:
        yield f"\n## What is violated\n\n```\n{_named(text, result)}\n```"
    yield f"\n## What changed\n\n```diff\n{trimmed(result.diff(), result.id, _headline(result))}\n```"
    beside = result.beside()
    if beside:
        names = ", ".join(commit.short for commit in beside[:5])
        yield f"\nFiles that the code imports changed in between, too: {names}."
    if result.case is not None:
        content = result.case.read_text(encoding="utf-8").strip()
        yield f"\n## The case\n\n`{result.case}`\n\n```json\n{content}\n```"
    yield "\n## Reproduce\n\n```sh"
    yield from reproduce(result)
    yield "```"


def _headline(result: Result) -> str:
    return result.shown.headline or result.verdicts[result.found.bad].headline


def _cells(commit: Commit) -> str:
    subject = commit.subject.replace("|", "\\|")
    return f"{commit.sha} | {commit.date} | {subject}"


def _count(result: Result) -> str:
    answers = list(result.found.answers.values())
    counted = ", ".join(f"{answers.count(a)} {a}" for a in Answer if a in answers)
    text = f"{len(answers)} of {len(result.commits)} commits judged ({counted})"
    again = result.wanted.get("repeat", 1)
    return text + (f", each {again} times" if again > 1 else "")


def _unknown(result: Result) -> Iterator[str]:
    for i, answer in result.found.answers.items():
        if answer is not Answer.unknown:
            continue
        verdict = result.verdicts[i]
        why = "its answers contradict each other (flaky)" if i in result.found.flaky else verdict.headline
        yield f"- {result.commits[i].short} is {verdict.outcome}: {_one_line(why)}"


def _one_line(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _named(text: str, result: Result) -> str:
    """The message with the tree and the case named as they can be found again."""
    first, subject = result.candidates[-1], result.subject
    target = subject.target(TREE)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("replay:")]
    shown = "\n".join(lines).replace(target, f"{subject.kind}@{first.short}")
    return shown.replace(TREE, f"{subject.place}@{first.short}")


def reproduce(result: Result) -> Iterator[str]:
    """Commands: the commit's tree written aside, the case judged on it, and the whole search again."""
    first, subject, wanted = result.candidates[-1], result.subject, result.wanted
    tree = f"tree-{first.short}"
    place = shlex.quote(subject.place)
    held = [p for p in subject.files.written if subject.repository.files(first, [p])]
    only = " ".join(shlex.quote(f":(top,glob){p}") for p in held)
    yield f"mkdir {tree} && git -C {place} archive {first.sha} {only} | tar -x -C {tree}"
    if result.case is not None:
        case = shlex.quote(str(result.case.absolute()))
        target = shlex.quote(subject.target(tree))
        if subject.sys_path(tree):
            yield f"(cd {tree} && PYTHONPATH=. sm120-mla replay {case} --target {target})"
        else:
            yield f"sm120-mla replay {case} --target {target}"
    again = ["sm120-mla", "bisect", "--target", _full_target(subject), "--invariant", result.id]
    again += ["--good", result.commits[0].short, "--bad", result.commits[-1].short]
    for option, value in (("--case", wanted.get("case")), ("--timeout", wanted.get("timeout"))):
        if value is not None and (option, value) != ("--timeout", 120):
            again += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    for path in wanted.get("paths", ()):
        again += ["--path", path]
    if wanted.get("repeat", 1) > 1:
        again += ["--repeat", str(wanted["repeat"])]
    if wanted.get("absent_is_good"):
        again += ["--absent-is-good"]
    yield shlex.join(again)


def _full_target(subject: Subject) -> str:
    return subject.name if subject.sys_path("") else f"{subject.kind}:{subject.place}"


def hunks(diff: str) -> list[tuple[str, list[str]]]:
    """(header of its file, lines) of each hunk of a unified diff; a file without hunks is one empty hunk."""
    found: list[tuple[str, list[str]]] = []
    header: list[str] = []
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            if header and not (found and found[-1][0] == "\n".join(header)):
                found.append(("\n".join(header), []))
            header = [line]
        elif line.startswith("@@"):
            found.append(("\n".join(header), [line]))
        elif found and found[-1][1] and found[-1][0] == "\n".join(header):
            found[-1][1].append(line)
        elif header and not line.startswith("index "):
            header.append(line)
    if header and not (found and found[-1][0] == "\n".join(header)):
        found.append(("\n".join(header), []))
    return found


def trimmed(diff: str, id: str, headline: str = "", most: int = _MOST_LINES) -> str:
    """A diff of about ``most`` lines: the hunks, and of large hunks the places, whose changed lines hold a
    name of ``headline`` or else what the invariant's family is about; in their order, and how much was left
    out."""
    every = hunks(diff)
    concerned = _concerned(diff, id, headline)

    def weight(n: int) -> tuple[float, int]:
        changed = [line for line in every[n][1] if _CHANGED.match(line)]
        hits = sum(map(concerned, changed))
        return -hits / (len(changed) + 10), n  # a small hunk about it before a large one about it as well

    kept: set[int] = set()
    room = most
    for n in sorted(range(len(every)), key=weight):
        if room <= 0:
            break
        kept.add(n)
        room -= len(every[n][1]) + 3
    lines: list[str] = []
    shown = ""
    for n in sorted(kept):
        header, body = every[n]
        if header != shown:
            lines += header.splitlines()
            shown = header
        lines += _places(body, concerned, max(2 * _AROUND, most - len(lines)))
    if len(kept) < len(every):
        lines.append(f"[... {len(every) - len(kept)} more of {len(every)} hunks]")
    return "\n".join(lines)


_CHANGED = re.compile(r"[-+](?![-+])")
_AROUND = 6
"""Lines shown on either side of one that is concerned."""


def _concerned(diff: str, id: str, headline: str) -> Callable[[str], bool]:
    names = {name for name in re.findall(r"[A-Za-z_]\w{4,}", headline) if "_" in name}
    used = [name for name in names if re.search(rf"^[-+].*\b{name}\b", diff, re.MULTILINE)]
    family = _CONCERNS.get(id.split("-", 1)[0], ".")
    words = re.compile("|".join(rf"\b{name}\b" for name in used) or family, re.IGNORECASE)
    return lambda line: bool(_CHANGED.match(line) and words.search(line))


def _places(body: Sequence[str], concerned: Callable[[str], bool], most: int) -> list[str]:
    """The body of a hunk, cut to ``most`` lines around those that are concerned (or its first ones)."""
    if len(body) <= most:
        return list(body)
    kept: set[int] = {0}
    for n in [n for n, line in enumerate(body) if concerned(line)] or range(most):
        around = set(range(max(n - _AROUND, 0), min(n + _AROUND + 1, len(body))))
        if len(kept | around) > most:
            break
        kept |= around
    lines: list[str] = []
    last = -1
    for n in [*sorted(kept), len(body)]:
        if n > last + 1:
            lines.append(f"[... {n - last - 1} lines]")
        lines += body[n : n + 1]
        last = n
    return lines
