"""The process from which judging processes are forked: it has imported what they all need, and nothing else.

A fork of it is as fresh as a new interpreter, without the seconds that torch takes to import: no module of
any tree was ever imported here. Requests come as lines of JSON, and so do answers go; see ``nursery``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import sys
import traceback
from typing import Any, BinaryIO

from .. import settings
from . import judge_child, suite

__all__ = ["main"]

_LAZILY_IMPORTED = ("torch._dynamo",)
"""What torch imports at some first call; a second that every fork would spend again."""


def main() -> int:
    """Serve until the input ends."""
    requests, answers = _pipes()
    suite.prepare(None)
    judge_child.preload()
    for name in _LAZILY_IMPORTED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    running: dict[int, tuple[int, int]] = {}  # file descriptor -> (process, number of the request)
    buffer = b""
    _say(answers, ready=True)
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for descriptor in set(ready) & set(running):
            pid, number = running.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            _say(answers, number=number, code=os.waitstatus_to_exitcode(status))
        if requests in ready:
            data = os.read(requests, 1 << 16)
            if not data:
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
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
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


if __name__ == "__main__":
    sys.exit(main())
