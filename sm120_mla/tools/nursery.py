"""Fresh processes to judge trees in, made quickly, and ended all together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .. import settings

__all__ = ["TIMED_OUT", "Nursery"]

_ROOT = Path(__file__).resolve().parents[2]
_MODULE = f"{__package__}.nursery_server"
_PATIENCE = 120.0
"""Seconds for the server to import torch, on a busy machine."""
_FAREWELL = 10.0
"""Seconds for the server to end what it has."""
TIMED_OUT = "timed out"


class Nursery:
    """A server, started when it is first needed, and the processes it forks. Use it in a ``with`` block;
    afterwards all are gone, with whatever they started. ``environment``: variables of all of them."""

    def __init__(self, **environment: str) -> None:
        self.closed = False
        self._environment = environment
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="sm120-mla-nursery-", ignore_cleanup_errors=True)
        self._ready = threading.Event()
        self._number = 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, int]]] = {}
        self._groups: set[int] = set()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, request: Path, log: Path, until: float, environment: dict[str, str]) -> str:
        """Do what a request file says, until the monotonic clock says ``until``; returns how it ended.

        Raises ``KeyboardInterrupt`` once the nursery has ended, ``RuntimeError`` where no process comes up.
        """
        late = time.monotonic()
        answers = self._ask(request, log, environment)
        until += time.monotonic() - late  # the first one waits for the server, which is not its fault
        pid = self._next(answers, _PATIENCE)["pid"]
        with self._lock:
            self._groups.add(pid)
        try:
            code = self._next(answers, max(until - time.monotonic(), 0.01))["code"]
        except queue.Empty:
            _kill(pid)
            self._next(answers, _PATIENCE)
            return TIMED_OUT
        finally:
            with self._lock:
                self._groups.discard(pid)
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    def end(self) -> None:
        """Kill everything; nothing starts any more."""
        with self._lock:
            self.closed = True
            groups, server = list(self._groups), self._server
            self._groups.clear()
        for pid in groups:
            _kill(pid)
        if server is not None:
            self._dismiss(server)
        self._hang_up()
        self._scratch.cleanup()

    def _dismiss(self, server: subprocess.Popen[bytes]) -> None:
        """End the server: by closing its input, so that it ends what was left to it, or else by force."""
        if self._ready.is_set():  # else it imports, and has nothing to end
            with contextlib.suppress(OSError):
                assert server.stdin is not None
                server.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_FAREWELL)
        if server.poll() is None:
            _kill(server.pid)
            server.wait()

    def _ask(
        self, request: Path, log: Path, environment: dict[str, str]
    ) -> queue.SimpleQueue[dict[str, int]]:
        with self._lock:
            if self.closed:
                raise KeyboardInterrupt
            server = self._server or self._start()
        if not self._ready.wait(_PATIENCE) or (server.poll() is not None and not self.closed):
            raise RuntimeError(f"the judging process did not come up:\n{self._said()}")
        with self._lock:
            if self.closed:
                raise KeyboardInterrupt
            self._number += 1
            answers = self._answers[self._number] = queue.SimpleQueue()
            line = {
                "number": self._number,
                "request": str(request),
                "folder": str(request.parent),
                "log": str(log),
                "environment": environment,
            }
            assert server.stdin is not None
            server.stdin.write(json.dumps(line).encode() + b"\n")
            server.stdin.flush()
        return answers

    def _next(self, answers: queue.SimpleQueue[dict[str, int]], seconds: float) -> dict[str, int]:
        answer = answers.get(timeout=seconds)
        if not answer:
            if self.closed:
                raise KeyboardInterrupt
            raise RuntimeError(f"the judging process is gone:\n{self._said()}")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(_ROOT), *filter(None, [settings.environment().get("PYTHONPATH", "")])]
        environment = settings.environment(
            "PYTHONSTARTUP",
            PYTHONPATH=os.pathsep.join(path),
            PYTHONDONTWRITEBYTECODE="1",
            PYTHONFAULTHANDLER="1",
            PYTHONSAFEPATH="1",
            PYTORCH_NVML_BASED_CUDA_CHECK="1",  # looking for a GPU leaves no driver that a fork cannot use
            TORCHINDUCTOR_CACHE_DIR=f"{self._scratch.name}/inductor",  # made by an import
            **self._environment,
        )
        with self._log.open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                cwd=self._scratch.name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches it through us
                env=environment,
            )
        self._server = server
        threading.Thread(target=self._listen, args=(server,), daemon=True).start()
        return server

    def _listen(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdout is not None
        for line in server.stdout:
            record: dict[str, Any] = json.loads(line)
            if "number" in record:
                self._answers[record["number"]].put(record)
            else:
                self._ready.set()
        server.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        """Tell everybody who waits that no answer comes."""
        self._ready.set()
        for answers in list(self._answers.values()):
            answers.put({})

    @property
    def _log(self) -> Path:
        return Path(self._scratch.name) / "log"

    def _said(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return ""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
