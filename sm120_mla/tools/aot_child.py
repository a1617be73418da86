"""Compile kernels for a GPU that this machine need not have: the child process of ``testing.compile_check``.

Runs as a script and imports nothing of the package it is part of, so that a patched copy of the package
can be compiled. One JSON request arrives on stdin; JSON lines leave on stdout, one when a job starts and
one when it is done, so that a crash names its job. All other output goes to stderr.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "Usage",
    "main",
    "parse_cuobjdump",
    "parse_ptxas",
    "ptx_target",
    "resource_usage",
    "tool_path",
]

Usage = dict[str, int]
"""``registers`` per thread; ``stack_bytes`` and ``local_bytes`` (stack included) per thread."""

tl: Any = None  # the control kernel below looks this up when it is compiled


def _control(destination):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled, never called
    tl.store(destination, 1)


class NotRunError(Exception):
    """The job says nothing about the kernel: it could not be loaded, or the toolchain is at fault."""


def ptx_target(ptx: str) -> str | None:
    """``sm_120a`` from the ``.target`` line of a PTX text, or None."""
    found = re.search(r"^\s*\.target\s+([A-Za-z0-9_]+)", ptx, re.MULTILINE)
    return found.group(1) if found else None


def parse_cuobjdump(text: str) -> Usage | None:
    """Worst entry of ``cuobjdump -res-usage``, or None where the text has none.

    On sm_90 and later spills lie in the stack frame (STACK), and LOCAL is what is not on the stack.
    """
    entries = [dict(re.findall(r"(\w+):(\d+)", line)) for line in text.splitlines() if "REG:" in line]
    entries = [e for e in entries if {"REG", "STACK", "LOCAL"} <= e.keys()]
    if not entries:
        return None
    return {
        "registers": max(int(e["REG"]) for e in entries),
        "stack_bytes": max(int(e["STACK"]) for e in entries),
        "local_bytes": max(int(e["STACK"]) + int(e["LOCAL"]) for e in entries),
    }


def parse_ptxas(text: str) -> Usage | None:
    """Worst function of ``ptxas -v``, or None where the text has none."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", text)]
    stacks = [int(n) for n in re.findall(r"(\d+) bytes stack frame", text)]
    if not registers or not stacks:
        return None
    return {"registers": max(registers), "stack_bytes": max(stacks), "local_bytes": max(stacks)}


def tool_path(name: str) -> str:
    """Path of a binary that comes with Triton; Triton's own choice (and override) where it has one."""
    import triton

    try:
        return str(getattr(triton.knobs.nvidia, name.replace("-", "_")).path)
    except (AttributeError, RuntimeError):
        return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return done.stdout + done.stderr


def resource_usage(cubin: bytes, ptx: str, tool: Callable[[str], str] = tool_path) -> Usage:
    """Registers and local memory of a cubin: asks ``cuobjdump``, else assembles the PTX once more.

    Raises ``NotRunError`` where neither tool answers.
    """
    with tempfile.TemporaryDirectory() as folder:
        image, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        image.write_bytes(cubin)
        dump = _output([tool("cuobjdump"), "-res-usage", str(image)])
        if usage := parse_cuobjdump(dump):
            return usage
        text.write_text(ptx)
        target = f"--gpu-name={ptx_target(ptx)}"
        log = _output([tool("ptxas-blackwell"), "-v", target, str(text), "-o", str(Path(folder, "out"))])
        if usage := parse_ptxas(log):
            return usage
    raise NotRunError(f"compiled, but its resource usage cannot be read: {dump.strip()} {log.strip()}")


def _decode(value: Any) -> Any:
    """Undo ``compile_check``'s encoding of constexpr values that JSON lacks."""
    if isinstance(value, dict):
        if "dtype" in value:
            return tl.dtype(value["dtype"])
        return tuple(_decode(v) for v in value["tuple"])
    return value


def _load(module: str, function: str) -> Any:
    """The JITFunction of a kernel, beneath any autotuner or heuristics."""
    import triton

    try:
        kernel = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        raise NotRunError(f"cannot load {module}.{function}: {type(error).__name__}: {error}") from error
    while not isinstance(kernel, triton.JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not isinstance(kernel, triton.JITFunction):
        raise NotRunError(
            f"{module}.{function} is no compiled @triton.jit kernel but {type(kernel).__name__}"
        )
    return kernel


def _compile(kernel: Any, job: dict[str, Any]) -> Any:
    """Triton's CompiledKernel. Raises ValueError where the arguments named are not the kernel's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    constexprs = {k: _decode(v) for k, v in job["constexprs"].items()}
    signature = {k: v for k, v in job["signature"].items() if v != "constexpr"}
    for param in kernel.params:  # a launch fills in defaults, ASTSource does not
        if param.is_constexpr and param.has_default:
            constexprs.setdefault(param.name, param.default)
    given = signature.keys() | constexprs.keys()
    if wrong := sorted(given.symmetric_difference(names)) + sorted(signature.keys() & constexprs.keys()):
        raise ValueError(
            f"arguments {wrong} are missing, unknown or both runtime and constexpr; kernel: {names}"
        )
    if unknown := sorted(set(job["aligned"]) - signature.keys()):
        raise ValueError(f"aligned names {unknown}, which are no runtime arguments of the kernel")
    types = {n: "constexpr" if n in constexprs else signature[n] for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in job["aligned"]}
    return triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs=constexprs, attrs=attrs),
        target=GPUTarget("cuda", job["capability"], 32),
        options={"num_warps": job["num_warps"], "num_stages": job["num_stages"]},
    )


@functools.cache
def _toolchain_fault(capability: int) -> str | None:
    """Why even a one-line kernel does not compile for this target, or None: tells a bad kernel from an
    assembler too old for the target."""
    import triton

    job = {"constexprs": {}, "signature": {"destination": "*i32"}, "aligned": (), "num_warps": 1}
    try:
        _compile(triton.jit(_control), job | {"num_stages": 1, "capability": capability})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Fields of a ``CompileResult``; the clock covers ``triton.compile`` alone."""
    try:
        kernel = _load(job["module"], job["function"])
        started = time.perf_counter()
        try:
            compiled = _compile(kernel, job)
        except Exception as error:
            seconds = time.perf_counter() - started
            if fault := _toolchain_fault(job["capability"]):
                raise NotRunError(f"the toolchain compiles nothing for this target: {fault}") from error
            return {"error": f"{type(error).__name__}: {error}", "seconds": seconds}
        seconds = time.perf_counter() - started
        usage = resource_usage(compiled.asm["cubin"], compiled.asm["ptx"])
    except NotRunError as error:
        return {"error": str(error), "unknown": True}
    return {
        "ok": True,
        "ptx_target": ptx_target(compiled.asm["ptx"]),
        "shared_bytes": int(compiled.metadata.shared),
        "registers": usage["registers"],
        "stack_bytes": usage["stack_bytes"],
        "spill_bytes": usage["local_bytes"],
        "seconds": seconds,
    }


def main() -> int:
    """Serve one request; 0 also where kernels do not compile, 3 where Triton cannot be imported."""
    global tl
    request = json.load(sys.stdin)
    # Triton and ptxas print to stdout: keep it for the protocol alone.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    sys.path.insert(0, request["path"])
    try:
        import triton.language
    except Exception as error:
        say(fatal=f"triton cannot be imported: {type(error).__name__}: {error}")
        return 3
    tl = triton.language
    for job in request["jobs"]:
        say(start=job["index"])
        say(done=job["index"], fields=_run(job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
