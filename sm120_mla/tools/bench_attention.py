"""Sparse decode through the Triton backend on a CUDA GPU: the shapes of DESIGN section 11."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..attention import sparse_mla
from ..buffers import PersistentBuffers
from ..errors import UnavailableError
from ..layout import DSV4
from .bench import CALLS, Row, make_row, time_graph

__all__ = ["bench_attention"]

_SHAPES = ((64, 1, 13.0), (64, 64, 44.0), (128, 128, 80.0))
"""Heads, rows, and the time to reach in microseconds, for 128 main and 512 extra entries a row."""
_MAIN, _EXTRA = (256, 512, 128), (64, 1024, 512)
"""Tokens a page, pages, entries a row."""


def bench_attention() -> list[Row]:
    """Decode of 128 + 512 entries a row, with sink and lengths, through pools larger than the L2 cache."""
    if not torch.cuda.is_available():
        raise UnavailableError("bench", "torch sees no CUDA GPU", "Run it on a CUDA machine.")
    return [_measure(heads, rows, target) for heads, rows, target in _SHAPES]


def _pool(page_size: int, pages: int) -> torch.Tensor:
    pool = torch.randint(0, 120, (pages, DSV4.default_stride(page_size)), dtype=torch.uint8, device="cuda")
    return pool[:, : DSV4.payload(page_size)]


def _measure(heads: int, rows: int, target: float) -> Row:
    buffers = PersistentBuffers()
    main, extra = _pool(*_MAIN[:2]), _pool(*_EXTRA[:2])
    gen = torch.Generator().manual_seed(heads + rows)

    def call() -> Callable[[], object]:
        q = torch.randn((rows, heads, 512), generator=gen).to("cuda", torch.bfloat16)
        indices = [
            torch.randint(0, size * pages, (rows, width), generator=gen, dtype=torch.int32).cuda()
            for size, pages, width in (_MAIN, _EXTRA)
        ]
        lengths = [
            torch.full((rows,), width, dtype=torch.int32, device="cuda") for _, _, width in (_MAIN, _EXTRA)
        ]
        sink = torch.zeros(heads, device="cuda")
        out = torch.empty_like(q)
        return lambda: sparse_mla(
            q,
            main,
            indices[0],
            page_size=_MAIN[0],
            topk_length=lengths[0],
            attn_sink=sink,
            extra_kv_cache=extra,
            extra_page_size=_EXTRA[0],
            extra_indices=indices[1],
            extra_topk_length=lengths[1],
            backend="triton",
            buffers=buffers,
            out=out,
            validate="metadata",
        )

    times = time_graph([call() for _ in range(CALLS)])
    entries = _MAIN[2] + _EXTRA[2]
    nbytes = rows * (entries * DSV4.bytes_per_token + 2 * heads * 512 * 2)
    name = f"sparse decode, {heads} heads, {rows} rows, {_MAIN[2]}+{_EXTRA[2]} entries"
    return make_row(name, times, nbytes, f"target {target:g} us")
