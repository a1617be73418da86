"""Compile every launch configuration for sm_120 and sm_121, on a machine with no GPU, and judge it.

One child process compiles (an interpreted kernel cannot be compiled, so a process in reference mode
cannot do it itself); ``tools/aot_child.py`` is that child. What the child could not decide is *unknown*,
which is neither a pass nor a violation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import device, settings
from ..errors import ArgumentError, UnavailableError
from ..kernels.spec import CompileSpec

__all__ = ["CompileResult", "clear_cache", "compile_all", "judge"]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = __name__.rpartition(".testing.")[0]
_CHILD = Path(__file__).resolve().parents[1] / "tools" / "aot_child.py"
# What would make the child interpret, or compile for another GPU than asked.
_UNSET = ("TRITON_INTERPRET", "SM120_MLA_MODE", "TRITON_OVERRIDE_ARCH")


@dataclass(frozen=True)
class CompileResult:
    """What became of one ``CompileSpec`` for one target; plain values, ``dataclasses.asdict`` is JSON.

    ``ok``: compiled and measured. Otherwise ``error`` says why, and ``unknown`` tells "could not be
    run" (True: no verdict on the kernel) from "does not compile" (False). ``target`` is as asked
    (``sm_120``), ``ptx_target`` as written by the compiler (``sm_120a``). ``shared_bytes`` is per
    block (Triton's own figure, what a launch asks for); ``registers`` per thread; ``stack_bytes`` the
    stack frame and ``spill_bytes`` all local memory, stack and spills, per thread (``cuobjdump
    -res-usage``). ``seconds`` is the time ``triton.compile`` took with an empty Triton cache.
    """

    name: str
    target: str
    ok: bool = False
    unknown: bool = False
    error: str | None = None
    ptx_target: str | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    spill_bytes: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class _Job:
    """One spec for one target; ``key`` names it in the caches."""

    request: dict[str, Any]
    key: str

    def result(self, **fields: Any) -> CompileResult:
        return CompileResult(self.request["name"], f"sm_{self.request['capability']}", **fields)


_results: dict[str, CompileResult] = {}

_Listener = Callable[[dict[str, Any]], None]
"""Is told every message of a child as it arrives."""


def clear_cache() -> None:
    """Forget the results that this process remembers."""
    _results.clear()


def compile_all(
    specs: Sequence[CompileSpec],
    *,
    package: str = _PACKAGE,
    path: Path | str | None = None,
    timeout_s: float = 300.0,
    cache_dir: Path | str | None = None,
    workers: int = 1,
    on_result: Callable[[CompileResult], None] | None = None,
) -> list[CompileResult]:
    """Compile each spec for each of its capabilities: results in that order, one per pair.

    ``path`` is the directory that holds ``package`` (default: where this package lies); the child
    imports ``<package>.<spec.module>`` from there. ``timeout_s`` bounds the whole call, in seconds;
    what is not decided by then is unknown. A kernel that crashes the compiler is unknown and does not
    take the others with it. ``workers`` children share the work; ``on_result`` is called with each result
    as it comes, remembered ones first, never from two threads at once.

    Decided results are remembered in this process, and as files in ``cache_dir`` where one is given
    (several processes may share it). They are found again by the source text of the package's top
    level and of the module's subpackage, which are all that kernels may import, and by Triton's
    version; a ``cache_dir`` is not to be kept across a change of assembler (``TRITON_PTXAS_*``).

    Raises ``ArgumentError`` on a timeout or a number of workers that is not positive, a path that is no
    directory, a package that is no dotted name, and a constexpr that cannot be handed to another process.
    """
    if not timeout_s > 0:
        raise ArgumentError("timeout_s", timeout_s, "seconds > 0", "Pass a positive number.")
    if workers < 1:
        raise ArgumentError("workers", workers, "a number of processes >= 1", "Pass a positive number.")
    if not all(part.isidentifier() for part in package.split(".")):
        raise ArgumentError("package", repr(package), "a dotted Python name", "Correct it.")
    root = _ROOT if path is None else Path(path).resolve()
    if not root.is_dir():
        raise ArgumentError("path", root, f"the directory that holds {package}", "Correct it.")
    sources: dict[str, bytes] = {}
    jobs = [
        _job(spec, capability, package, root, sources) for spec in specs for capability in spec.capabilities
    ]
    folder = None if cache_dir is None else Path(cache_dir)
    missing: dict[str, _Job] = {}
    tell = on_result or (lambda result: None)
    for job in {job.key: job for job in jobs}.values():
        if job.key in _results or _read(folder, job):
            tell(_results[job.key])
        else:
            missing[job.key] = job
    fresh = _compile(list(missing.values()), root, timeout_s, workers, tell)
    for key, result in fresh.items():
        if not result.unknown:
            _results[key] = result
            _write(folder, key, result)
    return [
        dataclasses.replace(_results.get(job.key) or fresh[job.key], name=job.request["name"]) for job in jobs
    ]


def judge(result: CompileResult, spec: CompileSpec) -> list[str]:
    """How ``result`` breaks the budget of ``spec``, one sentence each; empty where it holds.

    Raises ``UnavailableError`` on an unknown result, which must not be taken for a pass: ask
    ``result.unknown`` first.
    """
    if result.unknown:
        raise UnavailableError(
            f"a verdict on {result.name} for {result.target}",
            str(result.error),
            "Look at result.unknown first.",
        )
    if not result.ok:
        return [f"does not compile for {result.target}: {result.error}"]
    limit = device.SM120_SHARED_MEMORY
    shared, spill = result.shared_bytes or 0, result.spill_bytes or 0
    found = []
    if shared > spec.shared_bytes:
        found.append(f"{shared:,} bytes of shared memory, budget {spec.shared_bytes:,}")
    if shared > limit:
        found.append(f"{shared:,} bytes of shared memory, but a block has {limit:,} on {result.target}")
    if spill > spec.spill_bytes:
        found.append(
            f"{spill:,} bytes of local memory (stack and spills) a thread, budget {spec.spill_bytes:,}"
        )
    if not re.fullmatch(rf"{re.escape(result.target)}[af]?", result.ptx_target or ""):
        found.append(f"compiled for {result.ptx_target}, not for {result.target}")
    return found


def _encode(value: object, where: str) -> object:
    """A constexpr as JSON; Triton dtypes and tuples are wrapped (``aot_child._decode`` undoes it)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {"tuple": [_encode(v, where) for v in value]}
    if type(value).__name__ == "dtype" and type(value).__module__.startswith("triton.language"):
        return {"dtype": value.name}  # type: ignore[attr-defined]
    raise ArgumentError(
        where,
        repr(value),
        "None, bool, int, float, str, a Triton dtype or a tuple of these",
        "Change the spec.",
    )


def _job(spec: CompileSpec, capability: int, package: str, root: Path, sources: dict[str, bytes]) -> _Job:
    request = {
        "name": spec.name,
        "module": f"{package}.{spec.module}",
        "function": spec.function,
        "signature": dict(spec.signature),
        "constexprs": {k: _encode(v, f"{spec.name}.constexprs[{k!r}]") for k, v in spec.constexprs.items()},
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "aligned": list(spec.aligned),
        "capability": capability,
    }
    if spec.module not in sources:
        sources[spec.module] = _source_hash(root.joinpath(*package.split(".")), spec.module)
    about = {k: v for k, v in request.items() if k != "name"}
    digest = hashlib.sha256(sources[spec.module])
    # Whatever compiled it may answer differently next time: version, interpreter, this parser.
    digest.update(f"{_triton_version()} {sys.executable} {root}".encode())
    digest.update(_CHILD.read_bytes())
    digest.update(json.dumps(about, sort_keys=True).encode())
    return _Job(request, digest.hexdigest())


def _source_hash(package: Path, module: str) -> bytes:
    """Hash of all that a kernel module may import: the package's top level, the module's subpackage."""
    folder, dot, _ = module.partition(".")
    files = set(package.glob("*.py"))
    if dot:
        files.update((package / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for file in sorted(files):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(package)}\0{len(text)}\0".encode() + text)
    return digest.digest()


def _triton_version() -> str:
    """Version of the Triton the child will import; read from its text, as importing it costs seconds."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return "none"
    text = Path(found.origin).read_text(encoding="utf-8", errors="replace")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return f"{version.group(1) if version else 'unknown'} {found.origin}"


def _read(folder: Path | None, job: _Job) -> bool:
    """Take a result from the files into the process's memory; False where there is none to be read."""
    if folder is None:
        return False
    try:
        fields = json.loads((folder / f"{job.key}.json").read_text(encoding="utf-8"))
        _results[job.key] = CompileResult(**fields)
    except (OSError, ValueError, TypeError):
        return False
    return True


def _write(folder: Path | None, key: str, result: CompileResult) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: another process sees all of it or nothing.
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(result), file)
    os.replace(name, folder / f"{key}.json")


def _compile(
    jobs: list[_Job], root: Path, timeout_s: float, workers: int, tell: Callable[[CompileResult], None]
) -> dict[str, CompileResult]:
    """A result for each job, by key: the jobs are dealt to ``workers`` children in turn."""
    crew = _Crew(root, timeout_s, tell)
    hands = [hand for i in range(workers) if (hand := jobs[i::workers])]
    if len(hands) < 2:
        return crew.compile(jobs)
    with ThreadPoolExecutor(len(hands)) as pool:
        try:
            parts = list(pool.map(crew.compile, hands))
        except BaseException:
            crew.stop()
            raise
    return {key: result for part in parts for key, result in part.items()}


class _Crew:
    """The children of one call, their deadline, and who is told what they found."""

    def __init__(self, root: Path, timeout_s: float, tell: Callable[[CompileResult], None]) -> None:
        self.root, self.timeout_s, self.tell = root, timeout_s, tell
        self.deadline = time.monotonic() + timeout_s
        self.lock = threading.Lock()
        self.children: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        """Start no further child and end those that run: somebody waits no longer."""
        with self.lock:
            self.deadline = 0.0
            for child in list(self.children):
                _kill(child)

    def compile(self, jobs: list[_Job]) -> dict[str, CompileResult]:
        """One child after another: one that dies is replaced, without the job it died in."""
        done: dict[str, CompileResult] = {}
        pending = jobs
        while pending:
            ended, running = self._child(pending, done)
            # With no job to blame, a further child would end as this one did.
            for job in [running] if running else pending:
                self._settle(done, job, job.result(unknown=True, error=ended))
            pending = [job for job in pending if job.key not in done]
        return done

    def _settle(self, done: dict[str, CompileResult], job: _Job, result: CompileResult) -> None:
        if job.key not in done:
            done[job.key] = result
            with self.lock:
                self.tell(result)

    def _child(self, jobs: list[_Job], done: dict[str, CompileResult]) -> tuple[str, _Job | None]:
        """Let one child compile ``jobs`` as far as it gets: how it ended, and the job it died in."""
        running: _Job | None = None
        fatal: str | None = None

        def listen(message: dict[str, Any]) -> None:
            nonlocal running, fatal
            if "start" in message:
                running = jobs[message["start"]]
            elif "done" in message:
                job, running = jobs[message["done"]], None
                self._settle(done, job, job.result(**message["fields"]))
            else:
                fatal = message["fatal"]

        left = self.deadline - time.monotonic()
        if left <= 0:
            return f"not reached within {self.timeout_s:g} s", None
        requests = [job.request | {"index": i} for i, job in enumerate(jobs)]
        ended = _converse({"path": str(self.root), "jobs": requests}, left, listen, self.children)
        return fatal or ended, running


def _converse(
    request: dict[str, Any], timeout_s: float, listen: _Listener, children: set[subprocess.Popen[bytes]]
) -> str:
    """Hand one child its jobs and pass on its messages; how it ended. It is in ``children`` meanwhile."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as noise:
        # TMPDIR too: Triton leaves its PTX behind where the assembler fails.
        environment = settings.environment(*_UNSET, TRITON_CACHE_DIR=scratch, TMPDIR=scratch)
        child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=noise,
            env=environment,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        timed_out = threading.Event()

        def time_out() -> None:
            timed_out.set()
            _kill(child)

        alarm = threading.Timer(timeout_s, time_out)
        children.add(child)
        alarm.start()
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:  # it may die before it has read all
                child.stdin.write(json.dumps(request).encode())
            with child.stdout:
                for line in child.stdout:
                    with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
                        listen(json.loads(line))
        except BaseException:
            _kill(child)
            raise
        finally:
            alarm.cancel()
            child.wait()
            children.discard(child)
        noise.seek(0)
        tail = noise.read().decode(errors="replace").strip().splitlines()[-12:]
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
    if timed_out.is_set():
        return "time ran out"
    return "\n".join([f"the compiling process ended with {how}", *tail])


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and the assembler it may be waiting for."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
