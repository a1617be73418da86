"""Judge a tree in a fresh process: verdicts by invariant, whatever the tree does to that process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .nursery import TIMED_OUT, Nursery

__all__ = ["TREE", "Judged", "judge", "shrink"]

_MOST_RESTARTS = 3
TREE = "TREE"
"""What stands for the tree's folder in texts, which must not tell where it lay for the time of judging."""


@dataclass(frozen=True)
class Judged:
    """One invariant's verdict on a tree.

    ``outcome``: violated if any case is, holds if one holds and none is violated, else absent or unknown.
    ``headline`` is the violation, or the reason; ``text`` the whole message of a violation, ``case`` the
    case file's content. ``ended``: the process was killed or died, so that another try may say more.
    """

    outcome: str
    headline: str = ""
    details: str = ""
    raised: bool = False
    text: str = ""
    case: dict[str, Any] | None = None
    seconds: float = 0.0
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def judge(
    nursery: Nursery,
    target: str,
    invariants: Sequence[str],
    *,
    timeout: float,
    tree: Path | None = None,
    sys_path: Sequence[str] = (),
    cases: Sequence[Path] = (),
    **environment: str,
) -> dict[str, Judged]:
    """Verdicts of the invariants on a target, in the order given.

    ``timeout``: seconds for all of it; what was not reached by then is unknown, as is what was being judged
    when the process died, after which the rest is judged in another one. ``cases``: files to judge by
    instead of the stored cases. ``sys_path``: folders the target is imported from. ``environment``:
    variables of the child's.
    """
    job = _Job(nursery, target, tree, sys_path, cases, environment)
    found: dict[str, Judged] = {}
    until = time.monotonic() + timeout
    for _ in range(_MOST_RESTARTS):
        wanted = [id for id in invariants if id not in found]
        if not wanted:
            break
        records, end = job.run(wanted, until)
        found |= {r["id"]: _judged(r) for r in records if "id" in r}
        missing = [id for id in wanted if id not in found]
        if not missing:
            break
        doing = [r["doing"] for r in records if "doing" in r][-1:]
        if not doing and end != TIMED_OUT:
            raise RuntimeError(f"the judging process did not come up: {end}\n{job.log}")
        doing = doing or ["starting"]
        lost = [doing[0]] if doing[0] in missing else missing
        if end == TIMED_OUT:
            end, lost = f"timed out after {timeout:g} s", missing
        end = f"{end} while {_doing(doing[0])}"
        found |= {id: Judged("unknown", end, details=job.log, ended=True) for id in lost}
    left = Judged("unknown", f"given up after {_MOST_RESTARTS} processes died", ended=True)
    return {id: found.get(id, left) for id in invariants}


def shrink(
    nursery: Nursery,
    target: str,
    case: Path,
    *,
    seconds: float,
    timeout: float,
    sys_path: Sequence[str] = (),
    **environment: str,
) -> dict[str, Any] | None:
    """The content of the smallest case file found in ``seconds`` that still fails; None if that failed."""
    job = _Job(nursery, target, None, sys_path, [case], environment)
    id = json.loads(case.read_text(encoding="utf-8"))["invariant"]
    records, _ = job.run([id], time.monotonic() + timeout, shrink=seconds)
    found = [r["shrunk"] for r in records if "shrunk" in r]
    return found[0] if found else None


@dataclass
class _Job:
    nursery: Nursery
    target: str
    tree: Path | None
    sys_path: Sequence[str]
    cases: Sequence[Path]
    environment: dict[str, str]
    log: str = ""

    def run(self, ids: list[str], until: float, **more: Any) -> tuple[list[dict[str, Any]], str]:
        """What one process said, and how it ended."""
        with tempfile.TemporaryDirectory(prefix="sm120-mla-judge-", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch)
            out, log, request = folder / "out", folder / "log", folder / "request.json"
            content = {
                "target": self.target,
                "invariants": ids,
                "cases": [str(path.absolute()) for path in self.cases],
                "sys_path": list(self.sys_path),
                "scratch": str(folder),
                "out": str(out),
                **more,
            }
            request.write_text(json.dumps(content), encoding="utf-8")
            end = self.nursery.run(request, log, until, self.environment)
            self.log = self._hidden(_last(log))
            text = out.read_text(encoding="utf-8") if out.exists() else ""
            lines = [line for line in text.split("\n")[:-1] if line]  # the last one may be cut short
            return [self._told(json.loads(line)) for line in lines], end

    def _told(self, value: Any) -> Any:
        """What the process said, without where the tree lay."""
        if isinstance(value, dict):
            return {key: self._told(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._told(item) for item in value]
        return self._hidden(value) if isinstance(value, str) else value

    def _hidden(self, text: str) -> str:
        return text if self.tree is None else text.replace(str(self.tree), TREE)


def _last(log: Path, most: int = 2000) -> str:
    """The end of what the process printed, which may be much."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - most, 0))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _doing(what: str) -> str:
    return what if what in ("starting", "loading") else f"judging {what}"


def _judged(record: dict[str, Any]) -> Judged:
    return Judged(**{k: v for k, v in record.items() if k != "id"})
