"""What Triton's interpreter does, fact by fact: where it agrees with hardware and where it is known to lie.

Each fact has a probe and the Triton versions on which that probe was seen to hold. Reference mode rests
on these facts; on a version where nobody looked the verdict is unknown, whatever the probe answers.
"""

# mypy: allow-untyped-defs
# (the kernels: Triton takes a Python annotation for one of its own types)

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .. import device
from ..errors import UnavailableError
from ..kernels import runtime
from ..kernels.runtime import tl, triton

__all__ = ["FACTS", "Fact", "Standing", "check", "fact", "installed_version"]

Standing = Literal["holds", "changed", "unknown"]

_SEEN = ("3.6", "3.7", "3.8", "3.9")
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Fact:
    """One thing the interpreter does.

    ``probe`` runs it in this process and answers whether ``statement`` is true here; it raises
    ``UnavailableError`` where the machine cannot decide. ``seen_on`` are Triton's minor versions
    (``3.9``) on which it was seen true; ``relied_on_by`` says what breaks with it.
    """

    name: str
    statement: str
    probe: Callable[[], bool]
    seen_on: tuple[str, ...]
    relied_on_by: str


def installed_version() -> str:
    """Version of the Triton of this process."""
    return str(triton.__version__)


def check(fact: Fact, triton_version: str | None = None) -> tuple[Standing, str]:
    """Standing of a fact on a version of Triton (default: the installed one), and a sentence on it.

    The probe runs in any case; its answer decides only on a version that the fact was seen on.
    """
    version = triton_version or installed_version()
    minor = ".".join(re.findall(r"\d+", version)[:2])
    seen = f"seen on Triton {', '.join(fact.seen_on)}"
    relied = f"Relied on by: {fact.relied_on_by}"
    if not runtime.INTERPRETED:
        return "unknown", f"{fact.name}: kernels are compiled in this process. {relied}"
    try:
        held, answer = fact.probe(), ""
    except UnavailableError as error:
        return "unknown", f"{fact.name}: {error} {relied}"
    except Exception as error:
        held, answer = False, f" ({type(error).__name__}: {error})"
    if minor not in fact.seen_on:
        today = "it seems to hold" if held else f"it seems not to hold{answer}"
        return "unknown", f"{fact.name}: {seen}, not on {version}, where {today}: {fact.statement}. {relied}"
    if held:
        return "holds", f"{fact.name} holds on Triton {version}: {fact.statement}"
    return "changed", f"{fact.name} changed on Triton {version} ({seen}){answer}: {fact.statement}. {relied}"


def fact(name: str) -> Fact:
    """The fact of that name; KeyError where there is none."""
    return {f.name: f for f in FACTS}[name]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(20_261_130)


def _resident() -> int:
    """Bytes of this process that are in memory."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError) as error:
        raise UnavailableError("resident memory", f"/proc/self/statm: {error}", "Use Linux.") from error
    return pages * os.sysconf("SC_PAGE_SIZE")


def _untouched(size: int) -> torch.Tensor:
    """``size`` bytes of address space without memory behind them."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:  # strict overcommit, or a limit on address space
        raise UnavailableError(
            f"{size / _GIB:g} GiB of address space", str(error).splitlines()[0], "Raise ulimit -v."
        ) from error


# --- arithmetic -------------------------------------------------------------------------------------


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _cast_kernel(src, dst, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at, tl.load(src + at).to(dst.dtype.element_ty))


@triton.jit
def _divide_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at) / tl.load(b + at))


@triton.jit
def _multiply_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at) * tl.load(b + at))


def _dot(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two 16x16 matrices of small integers, and what ``tl.dot`` makes of them in ``dtype``."""
    a, b = torch.randint(-8, 9, (2, 16, 16), generator=_generator()).to(dtype)
    out = torch.empty(16, 16)
    _dot_kernel[(1,)](a, b, out, 16)
    return a, b, out


def _dot_is_exact(dtype: torch.dtype) -> bool:
    a, b, out = _dot(dtype)
    return torch.equal(out, a.float() @ b.float())


def _dot_bf16_multiplies_bits() -> bool:
    a, b, out = _dot(torch.bfloat16)
    bits_a, bits_b = (x.view(torch.int16).double().remainder(65536.0) for x in (a, b))
    return torch.allclose(out.double(), bits_a @ bits_b, rtol=1e-5)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(values.numel(), dtype=dtype)
    _cast_kernel[(1,)](values, out, values.numel())
    return out


def _e4m3_carries_wrong() -> bool:
    values = torch.randn(4096, generator=_generator())
    got = _cast(values, torch.float8_e4m3fn).view(torch.uint8).int()
    want = values.to(torch.float8_e4m3fn).view(torch.uint8).int()
    # A carry has happened where a normal result has another exponent than the value. It is merged by OR:
    # lost where the exponent field (bias 7) was odd, right by chance where it was even.
    field = torch.frexp(values)[1] - 1 + 7
    carried = (field >= 1) & ((want >> 3 & 15) != field)
    lost = carried & (field % 2 == 1)
    share = (got != want).float().mean()
    return bool(lost.any() and (got - want)[lost].eq(-8).all() and 0.01 < share < 0.1)


def _bf16_truncates() -> bool:
    values = torch.randn(4096, generator=_generator())
    got = _cast(values, torch.bfloat16).view(torch.int16)
    return torch.equal(got, (values.view(torch.int32) >> 16).short())


def _e4m3_nan_is_480() -> bool:
    nans = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return _cast(nans, torch.float32).tolist() == [480.0, -480.0]


def _division_is_exact() -> bool:
    a, b = torch.randn(2, 4096, generator=_generator())
    out = torch.empty(4096)
    _divide_kernel[(1,)](a, b, out, 4096)
    # An fp64 quotient has more than 2 * 24 + 2 bits: rounding it again gives the IEEE fp32 quotient.
    return torch.equal(out, (a.double() / b.double()).float())


def _int32_wraps() -> bool:
    a, b = torch.randint(-(2**31), 2**31, (2, 1024), generator=_generator()).int()
    out = torch.empty(1024, dtype=torch.int64)
    _multiply_kernel[(1,)](a, b, out, 1024)
    low = (a.long() * b.long()) & 0xFFFF_FFFF
    return torch.equal(out, torch.where(low >= 2**31, low - 2**32, low))


# --- memory -----------------------------------------------------------------------------------------


@triton.jit
def _poke_kernel(dst, offset, value):
    tl.store(dst + offset, value)


@triton.jit
def _pointer_kernel(src, dst, offset):
    address = src.to(tl.uint64) + offset.to(tl.uint64)
    tl.store(dst, tl.load(address.to(tl.pointer_type(tl.int64))))


@triton.jit
def _masked_kernel(dst, mask, STRIDE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(dst + at.to(tl.int64) * STRIDE, 7, mask=tl.load(mask + at) != 0)


@triton.jit
def _return_kernel(dst, n):
    pid = tl.program_id(0)
    if pid >= n:
        return
    tl.store(dst + pid, 1)


@triton.jit
def _exchange_kernel(cells, old, ids, mask, value, N: tl.constexpr):
    at = tl.arange(0, N)
    active = tl.load(mask + at) != 0
    new = tl.zeros([N], tl.int64) + value
    tl.store(old + at, tl.atomic_xchg(cells + tl.load(ids + at), new, mask=active), mask=active)


@triton.jit
def _add_kernel(cells, old, ids, mask, N: tl.constexpr):
    at = tl.arange(0, N)
    active = tl.load(mask + at) != 0
    one = tl.zeros([N], tl.int64) + 1
    tl.store(old + at, tl.atomic_add(cells + tl.load(ids + at), one, mask=active), mask=active)


def _storages_are_not_copied() -> bool:
    pool = _untouched(5 * _GIB)
    offset = 4 * _GIB + 12_345
    before = _resident()
    _poke_kernel[(1,)](pool, offset, 7)
    return _resident() - before < 64 * _MIB and int(pool[offset]) == 7


def _stores_are_not_bounded() -> bool:
    memory = torch.zeros(64, dtype=torch.uint8)
    _poke_kernel[(1,)](memory[:8], 40, 7)
    return memory.nonzero().flatten().tolist() == [40]


def _pointers_cast() -> bool:
    memory = torch.arange(8, dtype=torch.int64) * 0x0102_0304_0506
    out = torch.zeros(1, dtype=torch.int64)
    _pointer_kernel[(1,)](memory.view(torch.uint8), out, 40)
    return int(out) == int(memory[5])


def _masked_stores_write_nothing() -> bool:
    lanes = 16_384
    memory = torch.full((lanes,), 3, dtype=torch.uint8)
    mask = torch.randint(0, 2, (lanes,), generator=_generator()).to(torch.uint8)
    _masked_kernel[(1,)](memory, mask, 1, lanes)
    if not torch.equal(memory, 3 + 4 * mask):
        return False
    # Nor is a masked address touched: one lane in each page of memory that nothing is behind.
    far, stride = _untouched(lanes * 4096), 4096
    mask.zero_()
    before = _resident()
    _masked_kernel[(1,)](far, mask, stride, lanes)
    return _resident() - before < 16 * _MIB


def _returns_early() -> bool:
    out = torch.zeros(4, dtype=torch.int32)
    _return_kernel[(4,)](out, 2)
    return out.tolist() == [1, 1, 0, 0]


def _inference_tensors_take_kernel_writes() -> bool:
    with torch.inference_mode():
        memory = torch.zeros(8, dtype=torch.uint8)
    _poke_kernel[(1,)](memory, 3, 7)
    written = memory.tolist() == [0, 0, 0, 7, 0, 0, 0, 0] and memory.is_inference()
    try:
        memory.zero_()
    except RuntimeError as error:
        return written and "inference tensor" in str(error)
    return False


def _contended() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """64 lanes on 8 cells, a quarter of them masked off: ids, mask, room for what each lane found."""
    ids = torch.randint(0, 8, (64,), generator=_generator())
    mask = (torch.randint(0, 4, (64,), generator=_generator()) > 0).to(torch.uint8)
    mask[ids == 5] = 0  # a cell that only masked lanes name
    return ids, mask, torch.full((64,), -1, dtype=torch.int64)


def _exchange_has_one_winner() -> bool:
    ids, mask, old = _contended()
    cells = torch.arange(100, 108, dtype=torch.int64)
    before, epoch = cells.clone(), (1 << 40) + 9
    _exchange_kernel[(1,)](cells, old, ids, mask, epoch, 64)
    for cell in range(8):
        lanes = old[(ids == cell) & (mask != 0)].tolist()
        want = [int(before[cell])] + [epoch] * (len(lanes) - 1) if lanes else []
        if sorted(lanes) != sorted(want) or int(cells[cell]) != (epoch if lanes else int(before[cell])):
            return False
    return bool((old[mask == 0] == -1).all())


def _add_counts_every_lane() -> bool:
    ids, mask, old = _contended()
    cells = torch.zeros(8, dtype=torch.int64)
    _add_kernel[(1,)](cells, old, ids, mask, 64)
    for cell in range(8):
        lanes = old[(ids == cell) & (mask != 0)].tolist()
        if sorted(lanes) != list(range(len(lanes))) or int(cells[cell]) != len(lanes):
            return False
    return bool((old[mask == 0] == -1).all())


# --- launching --------------------------------------------------------------------------------------


@triton.jit
def _step_kernel(out, STEP: tl.constexpr):
    tl.store(out, STEP)


@triton.jit(do_not_specialize=["value"])
def _unspecialised_kernel(out, value):
    tl.store(out, value)


def _tuned(*steps: int) -> int:
    """What an autotuned kernel with these configurations stores."""
    kernel: Any = triton.autotune([triton.Config({"STEP": s}) for s in steps], key=[])(_step_kernel)
    out = torch.zeros(1, dtype=torch.int32)
    kernel[(1,)](out)
    return int(out)


def _autotune_needs_a_driver() -> bool:
    if device.cuda_available():
        raise UnavailableError("a process without a GPU driver", "torch sees a GPU", "Hide the GPU.")
    if _tuned(3) != 3:
        return False
    try:
        _tuned(3, 5)
    except Exception as error:
        return "driver" in str(error)
    return False


def _do_not_specialize_is_accepted() -> bool:
    out = torch.zeros(2, dtype=torch.int64)
    _unspecialised_kernel[(1,)](out, 1)  # 1 and 16 are what a launch would specialise on
    _unspecialised_kernel[(1,)](out[1:], 16)
    return out.tolist() == [1, 16]


FACTS: tuple[Fact, ...] = (
    Fact(
        "dot-bf16",
        "tl.dot on bf16 operands multiplies their raw bit patterns",
        _dot_bf16_multiplies_bits,
        _SEEN,
        "attention kernels, which upcast operands to fp32 when interpreted (ATTN-*)",
    ),
    Fact(
        "dot-fp16",
        "tl.dot on fp16 operands accumulates in fp32 and is exact on small integers",
        lambda: _dot_is_exact(torch.float16),
        _SEEN,
        "attention kernels with fp16 operands (ATTN-*)",
    ),
    Fact(
        "dot-fp32",
        "tl.dot on fp32 operands is exact on small integers",
        lambda: _dot_is_exact(torch.float32),
        _SEEN,
        "attention kernels, which upcast operands to fp32 when interpreted (ATTN-*)",
    ),
    Fact(
        "cast-e4m3",
        "fp32 to e4m3 loses a rounding carry into an odd exponent field: some 3 % of values are wrong",
        _e4m3_carries_wrong,
        _SEEN,
        "the cache writer, which converts by integer arithmetic instead of a cast (CACHE-BYTES)",
    ),
    Fact(
        "cast-bf16",
        "fp32 to bf16 truncates",
        _bf16_truncates,
        _SEEN,
        "the cache writer's integer conversion (CACHE-BYTES) and the budgets of bf16 outputs (ATTN-VALUE)",
    ),
    Fact(
        "nan-e4m3",
        "e4m3fn bytes 0x7F and 0xFF decode to 480 and -480, not to NaN",
        _e4m3_nan_is_480,
        _SEEN,
        "poison: it is put into RoPE and scale bytes as well, where it is NaN (ATTN-DONTCARE)",
    ),
    Fact(
        "division",
        "fp32 division is the exact IEEE quotient",
        _division_is_exact,
        _SEEN,
        "byte-exact kernels, which must not use '/': hardware approximates it (CACHE-BYTES)",
    ),
    Fact(
        "int32-wrap",
        "int32 multiplication wraps as on hardware",
        _int32_wraps,
        _SEEN,
        "the fault of a 32-bit offset, which must show (SPLIT-OFFSET64)",
    ),
    Fact(
        "storage-in-place",
        "CPU storages are not copied at launch: a store past 4 GiB of an untouched tensor costs no memory",
        _storages_are_not_copied,
        _SEEN,
        "offsets past 2^31 and 2^32 bytes decided without resident gigabytes (SPLIT-OFFSET64)",
    ),
    Fact(
        "store-unbounded",
        "a store outside its tensor reaches the memory there",
        _stores_are_not_bounded,
        _SEEN,
        "canaries around every tensor, and the ban on running kernels known to leave theirs (SPLIT-FRAME)",
    ),
    Fact(
        "pointer-cast",
        "a pointer cast to uint64 and back, to another type, addresses the same bytes",
        _pointers_cast,
        _SEEN,
        "kernels that compute addresses as 64-bit integers (SPLIT-OFFSET64)",
    ),
    Fact(
        "masked-store",
        "a masked lane writes nothing and does not touch its address",
        _masked_stores_write_nothing,
        _SEEN,
        "every kernel with a ragged edge or an index out of range (SPLIT-FRAME, SPLIT-TOUCHED)",
    ),
    Fact(
        "early-return",
        "return under a scalar condition ends the program",
        _returns_early,
        _SEEN,
        "kernels that skip entries by returning (SPLIT-TOUCHED)",
    ),
    Fact(
        "inference-tensor",
        "a kernel writes an inference tensor silently, a torch in-place write to it raises",
        _inference_tensors_take_kernel_writes,
        _SEEN,
        "latent states reproduced without a GPU (BUF-GUARD, BUF-WRITABLE)",
    ),
    Fact(
        "atomic-xchg",
        "lanes of one int64 atomic_xchg on one address have exactly one winner; masked lanes take no part",
        _exchange_has_one_winner,
        _SEEN,
        "the touched split, which copies a sub-page once (SPLIT-TOUCHED, SPLIT-BYTES)",
    ),
    Fact(
        "atomic-add",
        "lanes of one int64 atomic_add on one address each see a different count; masked lanes take no part",
        _add_counts_every_lane,
        _SEEN,
        "tickets that tell one launch from the next (SPLIT-TOUCHED, GRAPH-REPLAY)",
    ),
    Fact(
        "autotune",
        "autotune runs with one configuration and raises for want of a driver with two",
        _autotune_needs_a_driver,
        _SEEN,
        "launch configurations chosen by table instead of by autotune when interpreted",
    ),
    Fact(
        "do-not-specialize",
        "do_not_specialize is accepted and changes nothing",
        _do_not_specialize_is_accepted,
        _SEEN,
        "kernels with scalars that change from call to call",
    ),
)
