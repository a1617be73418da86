"""What happens in the process in which one tree is judged, a fork of ``nursery_server``.

One tree a process: a tree's modules cannot meet another's. What is found goes to a file, line by line, so
that what a tree does to this process (it exits, it crashes, it hangs) costs no verdict that was already
reached; whatever it prints goes elsewhere. The parent is ``judge_tree``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from .. import case as cases
from ..errors import ArgumentError, UnavailableError
from . import shrink

__all__ = ["main", "stored_cases"]

NOT_OF_THE_TARGET = ("COMPILE-SM120", "INTERP-FACT")
"""Invariants not asked unless named: one takes a minute, one is of Triton and not of the target."""


def stored_cases(id: str) -> list[cases.CaseFile]:
    """The stored cases that decide an invariant, the smallest first: those on which it catches a fault."""
    from ..testing import faults, verdict

    inv = verdict.by_id(id)
    names = {name for fault in faults.FAULTS if id in fault.violates for name in fault.cases}
    stored = sorted(names & set(faults.case_names()))
    found = [cases.CaseFile(invariant=id, note=name, case=faults.load_case(name)) for name in stored]
    return sorted((f for f in found if inv.applies(f.case)), key=_size)


def _size(file: cases.CaseFile) -> int:
    return len(file.case.model_dump_json(exclude_defaults=True))


def preload() -> None:
    """Import what every judging process needs, before there is one."""
    from .. import targets  # noqa: F401
    from ..testing import faults, text, verdict  # noqa: F401

    verdict.all_invariants()


def main(path: str) -> int:
    """Do what the request file at ``path`` says; returns 0, whatever was found."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    with Path(request["out"]).open("a", encoding="utf-8", buffering=1) as out:
        _Child(request, out).run()
    return 0


class _Child:
    def __init__(self, request: dict[str, Any], out: IO[str]) -> None:
        self.request, self.out = request, out

    def say(self, **record: Any) -> None:
        """One record, on disk before anything else happens."""
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()

    def run(self) -> None:
        from ..kernels.runtime import triton
        from ..testing import text, verdict

        tempfile.tempdir = self.request["scratch"]  # the parent clears it away, however this process ends
        triton.knobs.cache.dir = f"{self.request['scratch']}/triton"  # no kernel compiled from another tree

        ids: list[str] = self.request["invariants"]
        given = [cases.load(path) for path in self.request.get("cases", ())]
        every = {id: [f for f in given if f.invariant == id] or stored_cases(id) for id in ids}
        self.say(doing="loading")
        target = self._target(ids)
        if target is None:
            return
        if self.request.get("shrink"):
            self.say(shrunk=self._shrunk(target, given[0]))
            return
        for id in ids:
            self.say(doing=id)
            start = time.perf_counter()
            inv = verdict.by_id(id)
            found = None
            for file in every[id]:
                new = _judged(lambda: verdict.judge(inv, target, file.case))  # noqa: B023  called at once
                if found is None or _RANK[new["outcome"]] > _RANK[found["outcome"]]:
                    found = new
                if new["outcome"] == "violated":
                    rendered = verdict.violated(new["headline"], new["details"], raised=new["raised"])
                    found["text"] = text.render(inv, rendered, target, file.case, "CASE")
                    found["case"] = file.model_dump(mode="json")
                    break
            found = found or _unknown("no stored case decides it")
            self.say(id=id, seconds=round(time.perf_counter() - start, 3), **found)

    def _target(self, ids: list[str]) -> Any:
        """The target, or None where it does not load, which is then every invariant's verdict."""
        from ..targets import base

        sys.path[:0] = self.request["sys_path"]
        sys.pycache_prefix = (
            f"{self.request['scratch']}/bytecode"  # none of the tree's is read, if it has any
        )
        try:
            return base.resolve(self.request["target"])
        except base.AbsentError as error:
            found = _unknown(str(error)) | {"outcome": "absent"}
        except (ArgumentError, UnavailableError) as error:
            found = _unknown(str(error))
        except Exception as error:
            found = _unknown(f"loading it raised {type(error).__name__}: {error}")
        for id in ids:
            self.say(id=id, seconds=0.0, **found)
        return None

    def _shrunk(self, target: Any, file: cases.CaseFile) -> dict[str, Any]:
        from ..testing import verdict

        inv = verdict.by_id(file.invariant)
        until = time.monotonic() + self.request["shrink"]

        def fails(case: Any) -> bool:
            if not inv.applies(case):
                return False
            found = _judged(lambda: verdict.judge(inv, target, case))
            return found["outcome"] == "violated" and not found["raised"]

        if not fails(file.case):  # by an exception: a smaller case may well raise another
            return file.model_dump(mode="json")
        small = shrink.shrink(file.case, fails, lambda: time.monotonic() < until)
        return file.model_copy(update={"case": small}).model_dump(mode="json")


_RANK = {"absent": 0, "unknown": 1, "holds": 2, "violated": 3}


def _judged(ask: Callable[[], Any]) -> dict[str, Any]:
    try:
        found = ask()
    except Exception as error:
        where = traceback.format_exc(limit=-3)
        return _unknown(f"asking raised {type(error).__name__}: {error}") | {"details": where}
    return {name: getattr(found, name) for name in ("outcome", "headline", "details", "raised")}


def _unknown(reason: str) -> dict[str, Any]:
    return {"outcome": "unknown", "headline": reason, "details": "", "raised": False}


def default_invariants() -> Iterator[str]:
    """The invariants asked where none is named."""
    from ..testing import verdict

    return (inv.id for inv in verdict.all_invariants() if inv.id not in NOT_OF_THE_TARGET)
