"""compile_check: what compiles, what breaks a budget, what does not compile, and what could not be run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.kernels.runtime import tl
from sm120_mla.kernels.spec import CompileSpec
from sm120_mla.testing import compile_check
from sm120_mla.testing.compile_check import CompileResult, compile_all, judge
from sm120_mla.tools import aot_child

PACKAGE = "kernel_zoo"
Listener = Callable[[dict[str, object]], None]

GOOD = """
import triton
import triton.language as tl
from ..layout import STEP

@triton.jit
def copy(src, dst, n, BLOCK: tl.constexpr, TO: tl.constexpr = None):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    got = tl.load(src + at, mask=at < n)
    tl.store(dst + at, got if TO is None else got.to(TO), mask=at < n)

@triton.jit
def spill(src, dst, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(src + at), tl.load(src + n + at)
    s = tl.sum(x, 0)
    t = tl.sum(x * y + s, 0)
    tl.store(dst + at, x * t + y * s)

@triton.jit
def dot(a, b, c, M: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    x, y = tl.load(a + i * K + k), tl.load(b + i * K + k)
    tl.store(c + i * M + tl.arange(0, M)[None, :], tl.dot(x, tl.trans(y)))

@triton.jit
def bad(src, BLOCK: tl.constexpr):
    tl.store(src + tl.arange(0, 3), BLOCK)

not_a_kernel = STEP
"""

FILES = {
    "__init__.py": "",
    "layout.py": "STEP = 64\n",
    "kernels/__init__.py": "",
    "kernels/good.py": GOOD,
    "kernels/broken.py": "from ..layout import NOT_THERE\n",
    "kernels/crash.py": "import os\nos.abort()\n",
    "kernels/chatty.py": 'import os\nos.write(1, b"{not json")\n' + GOOD,
    "kernels/slow.py": "import time\ntime.sleep(600)\n",
}

COPY = CompileSpec(
    name="copy",
    module="kernels.good",
    function="copy",
    signature={"src": "*u8", "dst": "*u8", "n": "i64"},
    constexprs={"BLOCK": 1024},
    num_warps=4,
    aligned=("src", "dst"),
    capabilities=(120,),
)
SPILL = dataclasses.replace(
    COPY,
    name="spill",
    function="spill",
    signature={"src": "*fp32", "dst": "*fp32", "n": "i64"},
    constexprs={"BLOCK": 32768},
)
DOT = dataclasses.replace(
    COPY,
    name="dot",
    function="dot",
    signature={"a": "*bf16", "b": "*bf16", "c": "*fp32"},
    constexprs={"M": 64, "K": 1024},
    aligned=("a", "b", "c"),
    spill_bytes=1 << 20,
    num_warps=8,
    shared_bytes=1 << 20,
)
BAD = dataclasses.replace(
    COPY, name="bad", function="bad", signature={"src": "*i32"}, constexprs={"BLOCK": 1}, aligned=()
)


def write_zoo(root: Path) -> Path:
    for name, text in FILES.items():
        file = root / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def results(zoo: Path) -> dict[str, CompileResult]:
    """One call over everything, in a process that interprets."""
    specs = [
        dataclasses.replace(COPY, capabilities=(120, 121)),
        SPILL,
        DOT,
        BAD,
        dataclasses.replace(COPY, name="no such module", module="kernels.missing"),
        dataclasses.replace(COPY, name="broken", module="kernels.broken"),
        dataclasses.replace(COPY, name="not a kernel", function="not_a_kernel"),
        dataclasses.replace(COPY, name="missing argument", constexprs={}),
        dataclasses.replace(COPY, name="unknown argument", constexprs={"BLOCK": 64, "EXTRA": 1}),
        dataclasses.replace(COPY, name="aligned to nothing", aligned=("BLOCK",)),
        dataclasses.replace(COPY, name="crash", module="kernels.crash"),
        dataclasses.replace(COPY, name="chatty", module="kernels.chatty"),
        dataclasses.replace(COPY, name="no such target", capabilities=(119,)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("SM120_MLA_MODE", "reference")
        patch.setenv("TRITON_OVERRIDE_ARCH", "sm90")
        found = compile_all(specs, package=PACKAGE, path=zoo)
    assert [r.name for r in found] == ["copy"] + [s.name for s in specs]
    return {f"{r.name}/{r.target}" if r.name == "copy" else r.name: r for r in found}


@pytest.mark.parametrize(("target", "written"), [("sm_120", "sm_120a"), ("sm_121", "sm_121a")])
def test_a_good_kernel_compiles_within_its_budget(
    results: dict[str, CompileResult], target: str, written: str
) -> None:
    result = results[f"copy/{target}"]

    assert (result.ok, result.unknown, result.error) == (True, False, None)
    assert result.ptx_target == written
    assert (result.shared_bytes, result.stack_bytes, result.spill_bytes) == (0, 0, 0)
    assert 8 <= (result.registers or 0) <= 128
    assert result.seconds is not None
    assert judge(result, COPY) == []


def test_a_result_is_json(results: dict[str, CompileResult]) -> None:
    result = results["spill"]

    assert CompileResult(**json.loads(json.dumps(dataclasses.asdict(result)))) == result


def test_spills_are_measured_and_judged(results: dict[str, CompileResult]) -> None:
    result = results["spill"]

    assert result.ok
    assert (result.spill_bytes or 0) > 256
    assert ["budget 0" in text and "local memory" in text for text in judge(result, SPILL)] == [True]
    assert judge(result, dataclasses.replace(SPILL, spill_bytes=result.spill_bytes or 0)) == []


def test_shared_memory_is_measured_and_judged(results: dict[str, CompileResult]) -> None:
    result = results["dot"]
    shared = result.shared_bytes or 0
    assert shared >= 64 * 1024 * 2 > 101_376  # at least one operand lies in shared memory

    [hardware] = judge(result, DOT)
    [budget, again] = judge(result, dataclasses.replace(DOT, shared_bytes=101_376))

    assert "a block has 101,376" in hardware
    assert f"{shared:,} bytes of shared memory, budget 101,376" in budget
    assert again == hardware


def test_a_kernel_that_does_not_compile_is_a_violation(results: dict[str, CompileResult]) -> None:
    result = results["bad"]

    assert (result.ok, result.unknown) == (False, False)
    [text] = judge(result, BAD)
    assert "does not compile for sm_120" in text
    assert "power of 2" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing argument", "['BLOCK']"),
        ("unknown argument", "['EXTRA']"),
        ("aligned to nothing", "['BLOCK']"),
    ],
)
def test_a_spec_that_is_not_the_kernels_does_not_compile(
    results: dict[str, CompileResult], name: str, said: str
) -> None:
    result = results[name]

    assert (result.ok, result.unknown) == (False, False)
    assert said in str(result.error)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no such module", "cannot load kernel_zoo.kernels.missing.copy: ModuleNotFoundError"),
        ("broken", "cannot load kernel_zoo.kernels.broken.copy: ImportError"),
        ("not a kernel", "no compiled @triton.jit kernel"),
        ("crash", "signal 6"),
        ("no such target", "the toolchain compiles nothing for this target"),
    ],
)
def test_what_could_not_be_run_is_unknown(results: dict[str, CompileResult], name: str, said: str) -> None:
    result = results[name]

    assert (result.ok, result.unknown) == (False, True)
    assert said in str(result.error)
    with pytest.raises(UnavailableError, match="unknown"):
        judge(result, COPY)


def test_a_crash_does_not_take_later_kernels_with_it(results: dict[str, CompileResult]) -> None:
    assert results["chatty"].ok  # stands behind the crash, and prints to stdout as well


def test_a_timeout_leaves_everything_unknown(zoo: Path) -> None:
    slow = dataclasses.replace(COPY, name="slow", module="kernels.slow")
    never = dataclasses.replace(COPY, name="never", constexprs={"BLOCK": 2048})

    found = compile_all([slow, never], package=PACKAGE, path=zoo, timeout_s=4)

    assert [(r.name, r.ok, r.unknown) for r in found] == [("slow", False, True), ("never", False, True)]
    assert "time ran out" in str(found[0].error)


def test_constexprs_that_json_lacks_reach_the_compiler(zoo: Path) -> None:
    cast = dataclasses.replace(
        COPY, signature=COPY.signature | {"dst": "*bf16"}, constexprs={"BLOCK": 128, "TO": tl.bfloat16}
    )

    [result] = compile_all([cast], package=PACKAGE, path=zoo)

    assert result.ok, result.error


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shared_bytes": 101_377}, "101,377 bytes of shared memory, budget 101,376"),
        ({"spill_bytes": 8}, "8 bytes of local memory (stack and spills) a thread, budget 0"),
        ({"ptx_target": "sm_90a"}, "compiled for sm_90a, not for sm_120"),
        ({"ptx_target": "sm_1200"}, "compiled for sm_1200"),
        ({"ptx_target": None}, "compiled for None"),
        ({"ok": False, "error": "no such instruction"}, "does not compile for sm_120: no such instruction"),
    ],
)
def test_judge_names_what_is_exceeded(change: dict[str, object], text: str) -> None:
    held = CompileResult("x", "sm_120", True, False, None, "sm_120a", 101_376, 255, 0, 0, 1.0)
    assert judge(held, COPY) == []

    found = judge(dataclasses.replace(held, **change), COPY)  # type: ignore[arg-type]

    assert text in found[0]


@pytest.fixture
def child_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A child that compiles nothing and whose requests are recorded."""
    calls: list[dict[str, object]] = []

    def converse(request: dict[str, object], timeout_s: float, listen: Listener, children: object) -> str:
        calls.append(request)
        jobs = request["jobs"]
        assert isinstance(jobs, list)
        fields = {"ok": True, "ptx_target": "sm_120a", "registers": len(calls), "seconds": 0.0}
        for job in jobs:
            listen({"done": job["index"], "fields": fields})
        return ""

    monkeypatch.setattr(compile_check, "_converse", converse)
    monkeypatch.setattr(compile_check, "_results", {})
    return calls


def test_the_package_itself_is_the_default(child_calls: list[dict[str, object]]) -> None:
    compile_all([COPY])

    [request] = child_calls
    assert request["jobs"][0]["module"] == "sm120_mla.kernels.good"  # type: ignore[index]
    assert (Path(str(request["path"])) / "sm120_mla" / "testing" / "compile_check.py").is_file()


def test_results_are_remembered_in_the_process(zoo: Path, child_calls: list[dict[str, object]]) -> None:
    first = compile_all([COPY], package=PACKAGE, path=zoo)
    again = compile_all([dataclasses.replace(COPY, name="other")], package=PACKAGE, path=zoo)
    more = compile_all([COPY, dataclasses.replace(COPY, num_warps=8)], package=PACKAGE, path=zoo)

    assert [r.name for r in again] == ["other"]
    assert more[0] == first[0]
    assert [len(c["jobs"]) for c in child_calls] == [1, 1]  # type: ignore[arg-type]


def test_workers_share_the_jobs_and_each_result_is_told_once(
    zoo: Path, child_calls: list[dict[str, object]]
) -> None:
    specs = [dataclasses.replace(COPY, name=str(n), num_warps=n, capabilities=(120, 121)) for n in (1, 2, 4)]
    told: list[CompileResult] = []

    found = compile_all(specs, package=PACKAGE, path=zoo, workers=2, on_result=told.append)

    assert [(r.name, r.target) for r in found] == [(s.name, t) for s in specs for t in ("sm_120", "sm_121")]
    assert all(r.ok for r in found)
    assert [len(call["jobs"]) for call in child_calls] == [3, 3]  # type: ignore[arg-type]
    assert sorted((r.name, r.target) for r in told) == [(r.name, r.target) for r in found]

    told.clear()
    compile_all(specs, package=PACKAGE, path=zoo, workers=2, on_result=told.append)
    assert (len(told), len(child_calls)) == (6, 2)  # remembered, and told all the same


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_listener_that_raises_ends_the_children(zoo: Path, workers: int) -> None:
    slow = dataclasses.replace(COPY, name="slow", module="kernels.slow")

    def refuse(result: CompileResult) -> None:
        time.sleep(0.3)  # the child is on its next job by then
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        compile_all(
            [dataclasses.replace(COPY, num_warps=(2, 8)[workers - 1]), slow],
            package=PACKAGE,
            path=zoo,
            workers=workers,
            on_result=refuse,
        )

    assert threading.active_count() == before


@pytest.mark.parametrize("changed", ["layout.py", "kernels/broken.py"])
def test_files_hold_results_until_a_source_changes(
    tmp_path: Path, child_calls: list[dict[str, object]], changed: str
) -> None:
    root, cache = write_zoo(tmp_path / "root"), tmp_path / "cache"
    arguments = {"package": PACKAGE, "path": root, "cache_dir": cache}

    first = compile_all([COPY], **arguments)
    compile_check.clear_cache()
    again = compile_all([COPY], **arguments)
    assert (again, len(child_calls)) == (first, 1)
    assert [f.suffix for f in cache.iterdir()] == [".json"]

    with (root / PACKAGE / changed).open("a") as file:
        file.write("# changed\n")
    compile_all([COPY], **arguments)
    assert len(child_calls) == 2


def test_a_damaged_file_is_compiled_anew(tmp_path: Path, child_calls: list[dict[str, object]]) -> None:
    root, cache = write_zoo(tmp_path / "root"), tmp_path / "cache"
    compile_all([COPY], package=PACKAGE, path=root, cache_dir=cache)
    [file] = cache.iterdir()
    file.write_text('{"name": "copy", "tar')
    compile_check.clear_cache()

    [result] = compile_all([COPY], package=PACKAGE, path=root, cache_dir=cache)

    assert result.registers == 2
    assert json.loads(file.read_text())["registers"] == 2


def test_unknown_results_are_not_remembered(
    zoo: Path, tmp_path: Path, child_calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_check, "_converse", lambda *arguments: "no room")
    [lost] = compile_all([COPY], package=PACKAGE, path=zoo, cache_dir=tmp_path)

    assert (lost.unknown, lost.error, list(tmp_path.iterdir())) == (True, "no room", [])
    assert compile_check._results == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"workers": 0}, "workers"),
        ({"package": "a-b"}, "package"),
        ({"path": "/no/such/folder"}, "path"),
    ],
)
def test_bad_arguments_are_named(
    arguments: dict[str, object], named: str, child_calls: list[dict[str, object]]
) -> None:
    with pytest.raises(ArgumentError) as caught:
        compile_all([COPY], **arguments)  # type: ignore[arg-type]

    assert caught.value.argument == named
    assert child_calls == []


def test_a_constexpr_that_cannot_travel_is_named(child_calls: list[dict[str, object]]) -> None:
    with pytest.raises(ArgumentError, match=r"copy.constexprs\['BLOCK'\]"):
        compile_all([dataclasses.replace(COPY, constexprs={"BLOCK": object()})])

    assert child_calls == []


CUOBJDUMP = """
Resource usage:
 Common:
  GLOBAL:0
 Function helper:
  REG:40 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:936 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel:
  REG:26 STACK:32 SHARED:1024 LOCAL:0 CONSTANT[0]:936 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
PTXAS = """
ptxas info    : Compiling entry function 'k' for 'sm_120a'
    48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 48 bytes cumulative stack size
"""
PTX = ".version 8.7\n.target sm_120a, debug\n.address_size 64\n.visible .entry k()\n{\n  ret;\n}\n"


def test_tool_output_is_read() -> None:
    worst = {"registers": 40, "stack_bytes": 32, "local_bytes": 32}
    assert aot_child.parse_cuobjdump(CUOBJDUMP) == worst
    assert aot_child.parse_cuobjdump("cuobjdump fatal: not a cubin") is None
    assert aot_child.parse_ptxas(PTXAS) == {"registers": 40, "stack_bytes": 48, "local_bytes": 48}
    assert aot_child.parse_ptxas("ptxas fatal: out of luck") is None
    assert aot_child.ptx_target(PTX) == "sm_120a"
    assert aot_child.ptx_target("no target here") is None


def test_without_cuobjdump_the_assembler_is_asked() -> None:
    tools = {"cuobjdump": "/no/such/cuobjdump", "ptxas-blackwell": aot_child.tool_path("ptxas-blackwell")}

    usage = aot_child.resource_usage(b"no cubin", PTX.replace(", debug", ""), tools.__getitem__)

    assert usage["local_bytes"] == 0
    assert usage["registers"] > 0


def test_without_either_tool_nothing_is_claimed() -> None:
    with pytest.raises(aot_child.NotRunError, match="cannot be read"):
        aot_child.resource_usage(b"no cubin", PTX, lambda name: shutil.which("true") or name)
