"""Time sparse decode through the Triton backend: the shapes of the README's figures.

Each is timed twice: as this GPU is served, and with the configuration that SM120 would get
(``device.pretend_device``), which says how far the one is from the other on the same silicon.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import device
from ..attention import sparse_mla
from ..backends import triton as triton_backend
from ..buffers import PersistentBuffers
from ..device import Capability
from ..layout import DSV4
from . import bench_timing
from .bench_timing import CALLS, BenchCase, Row, Times, floor_us, require_cuda, row

__all__ = ["CASES", "AttentionCase", "Pool", "measure"]

SM120: Capability = (12, 0)
COPY_BYTES = 512 << 20
"""Copied to learn the rate of this GPU's memory."""


@dataclass(frozen=True)
class Pool:
    """Of one cache: tokens a page, pages, and the entries that each row attends to."""

    page_size: int
    pages: int
    width: int


@dataclass(frozen=True)
class AttentionCase(BenchCase):
    """A decode of ``rows`` rows with sink and lengths, through pools larger than the L2 cache."""

    heads: int = 64
    rows: int = 64
    main: Pool = Pool(256, 512, 128)
    extra: Pool = Pool(64, 1024, 512)

    @property
    def entries(self) -> int:
        """Entries a row attends to."""
        return self.main.width + self.extra.width

    @property
    def needed_bytes(self) -> int:
        """What has to move: each row's entries and their indices, queries in, outputs out."""
        an_entry = DSV4.bytes_per_token + 4
        return self.rows * (self.entries * an_entry + 2 * self.heads * DSV4.head_dim * 2)


def _case(heads: int, rows: int, target_us: float) -> AttentionCase:
    name = f"sparse decode, {heads} heads, {rows} row{'s' if rows > 1 else ''}, 128+512 entries"
    return AttentionCase(name, target_us, heads, rows)


CASES = (_case(64, 1, 13), _case(64, 64, 44), _case(128, 128, 80))
"""What is timed, in this order."""


def measure() -> list[Row]:
    """One row a case. Raises ``UnavailableError`` without a GPU."""
    require_cuda()
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=bench_timing.DEVICE)
    _, copied = bench_timing.copy_times(source)
    del source
    return [_measure(case, copied) for case in CASES]


def _measure(case: AttentionCase, copied: Times) -> Row:
    here = device.capability()
    times, scratch = _time(case, None)
    sm120 = times if here and here[0] == SM120[0] else _time(case, SM120)[0]
    return row(
        case,
        times,
        case.needed_bytes + 2 * scratch,
        f"here {plan_text(case, here)}; SM120 {plan_text(case, SM120)}",
        floor_us=floor_us(case.needed_bytes, COPY_BYTES, copied[0]),
        sm120_us=sm120[0],
    )


def plan_text(case: AttentionCase, capability: Capability | None) -> str:
    """How a GPU of this capability is served: heads by entries a program, and parts a row."""
    widths = (case.main.width, case.extra.width)
    chosen = triton_backend.plan(case.rows, case.heads, widths, capability, interpreted=False)
    return f"{chosen.config.block_h}x{chosen.config.block_n}, {chosen.splits} parts"


def _time(case: AttentionCase, pretended: Capability | None) -> tuple[Times, int]:
    """Times, and bytes of scratch, which are written once and read once."""
    buffers = PersistentBuffers()
    pretence = device.pretend_device(pretended) if pretended else contextlib.nullcontext()
    with pretence:
        times = bench_timing.time_graph(_calls(case, buffers))
    return times, sum(t.numel() * t.element_size() for t in buffers.tensors().values())


def _pool(of: Pool) -> torch.Tensor:
    # Codes below 0x78 are finite in e4m3fn, as scales and as bf16 halves.
    stride = DSV4.default_stride(of.page_size)
    pool = torch.randint(0, 0x78, (of.pages, stride), dtype=torch.uint8, device=bench_timing.DEVICE)
    return pool[:, : DSV4.payload(of.page_size)]


def _calls(case: AttentionCase, buffers: PersistentBuffers) -> list[Callable[[], object]]:
    where = bench_timing.DEVICE
    main, extra = _pool(case.main), _pool(case.extra)
    gen = torch.Generator().manual_seed(case.heads + case.rows)

    def call() -> Callable[[], object]:
        q = torch.randn((case.rows, case.heads, DSV4.head_dim), generator=gen).to(where, torch.bfloat16)
        indices = [
            torch.randint(
                0, of.page_size * of.pages, (case.rows, of.width), generator=gen, dtype=torch.int32
            ).to(where)
            for of in (case.main, case.extra)
        ]
        lengths = [
            torch.full((case.rows,), of.width, dtype=torch.int32, device=where)
            for of in (case.main, case.extra)
        ]
        sink = torch.zeros(case.heads, device=where)
        out = torch.empty_like(q)
        return lambda: sparse_mla(
            q,
            main,
            indices[0],
            page_size=case.main.page_size,
            topk_length=lengths[0],
            attn_sink=sink,
            extra_kv_cache=extra,
            extra_page_size=case.extra.page_size,
            extra_indices=indices[1],
            extra_topk_length=lengths[1],
            backend="triton",
            buffers=buffers,
            out=out,
            validate="metadata",
        )

    return [call() for _ in range(CALLS)]
