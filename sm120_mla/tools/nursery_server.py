"""The process from which judging processes are forked: it has imported what they all need, and nothing else.

A fork of it is as fresh as a new interpreter, without the seconds that torch takes to import: no module of
any tree was ever imported here. Requests come as lines of JSON, and so do answers go; see ``nursery``.

Between this process and one that judges stands a warden, the parent that a tree's code sees. Whatever the
code starts, in whatever session, falls to the warden when its own parent is gone, and ends with it; and with
a warden that is killed ends the judging process. So nothing outlives a judgement, or this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from .. import settings
from . import judge_child, suite

__all__ = ["main"]

_LAZILY_IMPORTED = ("torch._dynamo",)
"""What torch imports at some first call; a second that every fork would spend again."""
_LARGEST_FILE = 1 << 30
"""Bytes that a judging process may write into one file: what a tree prints, above all."""
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36  # of prctl(2)


def main() -> int:
    """Serve until the input ends."""
    requests, answers = _pipes()
    _prctl(_CHILD_SUBREAPER, 1)
    suite.prepare(None)
    judge_child.preload()
    for name in _LAZILY_IMPORTED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    running: dict[int, tuple[int, int]] = {}  # file descriptor -> (warden, number of the request)
    buffer = b""
    _say(answers, ready=True)
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for descriptor in set(ready) & set(running):
            pid, number = running.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            _end_adopted({pid for pid, _ in running.values()})
            _say(answers, number=number, code=os.waitstatus_to_exitcode(status))
        if requests in ready:
            data = os.read(requests, 1 << 16)
            if not data:
                _end_adopted(set())
                return 0
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = _fork(request)
                _say(answers, number=request["number"], pid=pid)
                running[os.pidfd_open(pid)] = (pid, request["number"])


def _pipes() -> tuple[int, BinaryIO]:
    """Where requests and answers go; the usual names of both lead nowhere, whoever prints."""
    requests, answers = os.dup(0), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def _say(answers: BinaryIO, **record: Any) -> None:
    answers.write(json.dumps(record).encode() + b"\n")


def _fork(request: dict[str, Any]) -> int:
    """The process id of a new warden, which leads a process group."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _tie_to(server)
        os.setsid()
        os.closerange(3, 256)
        code = _warden(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _warden(request: dict[str, Any]) -> int:
    """Wait for the judging process and end what it leaves; its exit code, or its signal for itself."""
    _prctl(_CHILD_SUBREAPER, 1)
    _limit(resource.RLIMIT_CORE, 0)
    warden = os.getpid()
    pid = os.fork()
    if not pid:
        _judge(request, warden)
    _, status = os.waitpid(pid, 0)
    _end_adopted(set())
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(warden, -code)
    return 1


def _judge(request: dict[str, Any], warden: int) -> None:
    code = 1
    try:
        _tie_to(warden)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _limit(resource.RLIMIT_FSIZE, _LARGEST_FILE)
        os.chdir(request["folder"])
        for name, value in request["environment"].items():
            settings.assign(name, value)
        code = judge_child.main(request["request"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _tie_to(parent: int) -> None:
    """End this process with its parent, however that ends."""
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_adopted(kept: set[int]) -> None:
    """Kill every child of this process but those, and what falls to it by that."""
    while found := _children() - kept:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    me = str(os.getpid())
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
                if stat.rpartition(")")[2].split()[1] == me:
                    found.add(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
