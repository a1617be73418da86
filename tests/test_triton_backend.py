"""The Triton backend against plain fp64 torch: values, what must not matter, plans, scratch.

Budgets follow from the arithmetic. K and q are exact in bf16 and scores are fp32, so two roundings to bf16
remain, each within 2^-8: of the weights, and of the output. Pointwise that is 2^-8 of ``sum(p |v|) + |out|``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sm120_mla import device, graphs
from sm120_mla.backends import triton as backend
from sm120_mla.backends.base import AttentionCall, AttentionShape, CacheInput, CacheShape
from sm120_mla.backends.triton import Plan, TritonBackend, plan, reserve_attention
from sm120_mla.buffers import PersistentBuffers
from sm120_mla.codec import decode_e4m3, decode_ue8m0, dequantise_pages, pack_pages, view_field
from sm120_mla.errors import ArgumentError, GrowthDuringCaptureError
from sm120_mla.kernels import merge, mla_tiles
from sm120_mla.kernels import sparse_mla as kernels
from sm120_mla.kernels.runtime import INTERPRETED, tl, triton
from sm120_mla.layout import DSV4, DSV32, PageGeometry

DEVICE = "cpu" if INTERPRETED else "cuda"
DIM = 512
NAN = float("nan")
WIDE, NARROW = (512,), (64,) * 8


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- cases


@dataclass
class Cache:
    """A pool and the index rows into it. ``view`` is what the backend gets."""

    view: torch.Tensor
    geometry: PageGeometry
    indices: torch.Tensor
    lengths: torch.Tensor | None

    @property
    def bytes(self) -> torch.Tensor:
        return self.view.view(torch.uint8)

    def records(self, token: int) -> list[torch.Tensor]:
        """The bytes of one token, field by field, to be written."""
        page, slot = divmod(token, self.geometry.page_size)
        pool = torch.as_strided(
            self.bytes,
            (self.geometry.pages, DSV4.payload(self.geometry.page_size)),
            (self.geometry.page_stride, 1),
            self.bytes.storage_offset(),
        )
        names = ("nope", "rope", "scales")
        return [view_field(pool, DSV4, name, self.geometry.page_size)[page, slot] for name in names]

    def counted(self, row: int) -> torch.Tensor:
        """Token indices of ``row`` that count, in column order."""
        width = self.indices.shape[1]
        length = width if self.lengths is None else min(max(int(self.lengths[row]), 0), width)
        found = self.indices[row, :length].long()
        return found[(found >= 0) & (found < self.geometry.tokens)]


def make_cache(
    rows: int,
    width: int,
    *,
    page_size: int = 64,
    pages: int = 2,
    stride: int | None = None,
    offset: int = 0,
    dtype: torch.dtype = torch.int32,
    holes: float = 0.3,
    lengths: list[int] | None = None,
    length_dtype: torch.dtype = torch.int32,
    gap: int = 0,
    seed: int = 0,
) -> Cache:
    gen = generator(seed)
    stride = DSV4.default_stride(page_size) if stride is None else stride
    storage = torch.zeros(offset + pages * stride + 64, dtype=torch.uint8)
    pool = torch.as_strided(storage, (pages, DSV4.payload(page_size)), (stride, 1), offset)
    pack_pages(torch.randn(pages, page_size, DIM, generator=gen).bfloat16(), DSV4, out=pool)
    index = torch.randint(0, pages * page_size, (rows, width + gap), generator=gen).to(dtype)
    index[torch.rand(rows, width + gap, generator=gen) < holes] = -1
    on = storage.to(DEVICE)
    return Cache(
        torch.as_strided(on, pool.shape, pool.stride(), offset),
        PageGeometry(DSV4, page_size, pages, stride, offset, "uint8"),
        index.to(DEVICE)[:, :width],
        None if lengths is None else torch.tensor(lengths, dtype=length_dtype, device=DEVICE),
    )


@dataclass
class Attention:
    q: torch.Tensor
    main: Cache
    extra: Cache | None = None
    sink: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    want_lse: bool = True
    buffers: PersistentBuffers = field(default_factory=PersistentBuffers)

    def call(self) -> AttentionCall:
        tokens, heads = self.q.shape[:2]
        out = self.out
        if out is None:
            out = torch.full((tokens, heads, DIM), NAN, device=DEVICE).bfloat16()
        lse = self.lse
        if lse is None and self.want_lse:
            lse = torch.full((tokens, heads), NAN, device=DEVICE)

        def shape(c: Cache) -> CacheShape:
            lane = c.geometry.lane_bytes(c.view.data_ptr())
            dtype = str(c.indices.dtype).removeprefix("torch.")
            g = c.geometry
            return CacheShape(g.page_size, g.pages, g.page_stride, c.indices.shape[1], dtype, lane)

        def given(c: Cache) -> CacheInput:
            return CacheInput(c.view, c.geometry, c.indices, c.lengths)

        numbers = AttentionShape(
            DSV4.name,
            tokens,
            heads,
            shape(self.main),
            shape(self.extra) if self.extra else None,
            self.sink is not None,
            lse is not None,
        )
        extra = given(self.extra) if self.extra else None
        scale = DIM**-0.5
        return AttentionCall(
            self.q, given(self.main), extra, self.sink, scale, out, lse, numbers, self.buffers
        )

    def run(self, chosen: Plan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        call = self.call()
        if chosen is None:
            TritonBackend().run(call)
        else:
            TritonBackend().launch(call, chosen)
        return call.out, call.lse if call.lse is not None else torch.empty(0)


def queries(rows: int, heads: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, heads, DIM, generator=generator(seed)).bfloat16().to(DEVICE)


def both_caches(rows: int = 3, heads: int = 5, **changes: Any) -> Attention:
    """A main cache of pages of 64 and an extra one of pages of 2, with holes and lengths in both."""
    main = make_cache(rows, 70, lengths=[70, 37, 6][:rows], seed=1, **changes)
    extra = make_cache(rows, 21, page_size=2, pages=40, lengths=[9, 21, 0][:rows], seed=2)
    sink = torch.randn(heads, generator=generator(3)).to(DEVICE)
    return Attention(queries(rows, heads), main, extra, sink)


# ---- the yardstick


def reference(a: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 out, lse, ``sum(p |v|)`` and the largest ``scale * sum(|q| |k|)`` of each row and head."""
    rows, heads = a.q.shape[:2]
    scale = DIM**-0.5
    out, spread = torch.zeros(2, rows, heads, DIM, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    size = torch.zeros(rows, heads, dtype=torch.float64)
    sink = None if a.sink is None else a.sink.double().cpu()
    for row in range(rows):
        found = []
        for cache in (a.main, a.extra):
            if cache is not None:
                pages = torch.as_strided(
                    cache.bytes,
                    (cache.geometry.pages, DSV4.payload(cache.geometry.page_size)),
                    (cache.geometry.page_stride, 1),
                    cache.bytes.storage_offset(),
                ).cpu()
                index = cache.counted(row).cpu()
                page, slot = index // cache.geometry.page_size, index % cache.geometry.page_size
                used = page.unique()  # so that a pool of gigabytes is not read
                values = dequantise_pages(pages[used], DSV4, cache.geometry.page_size)
                found.append(values[torch.searchsorted(used, page), slot])
        k = torch.cat(found).double()
        if not len(k):
            continue
        q = a.q[row].double().cpu()
        scores = q @ k.T * scale
        lse[row] = torch.logsumexp(scores, 1)
        total = lse[row] if sink is None else torch.logaddexp(lse[row], sink)
        weights = torch.exp(scores - total[:, None])
        out[row], spread[row] = weights @ k, weights @ k.abs()
        size[row] = (q.abs() @ k.abs().T).amax(1) * scale
    return out, lse, spread, size


def assert_close(got: tuple[torch.Tensor, torch.Tensor], a: Attention) -> None:
    want, want_lse, spread, size = reference(a)
    out, lse = got[0].double().cpu(), got[1].double().cpu()
    excess = (out - want).abs() - (2.0**-8 * 1.01 * (spread + want.abs()) + 2.0**-20 * size[..., None])
    assert excess.max() <= 0, f"pointwise budget exceeded by {excess.max():.3g}"
    power = (want * want).sum()
    if power > 0:
        assert ((out - want).square().sum() / power).sqrt() < 2.0**-8
        # Roundings to nearest have no bias, so what they do to the size of out averages out over the heads.
        assert abs((out * want).sum() / power - 1) < 2.0**-8 / math.sqrt(lse.numel() or out[..., 0].numel())
    if lse.numel():
        empty = want_lse == -math.inf
        assert torch.equal(lse == -math.inf, empty)
        error = (lse - want_lse)[~empty].abs() - (2.0**-20 * size + 2.0**-22 * want_lse.abs())[~empty]
        assert error.numel() == 0 or error.max() <= 0, f"lse budget exceeded by {error.max():.3g}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def small(
    widths: tuple[int, ...] = WIDE,
    splits: int = 1,
    block_h: int = 16,
    block_n: int = 32,
    staged: bool = False,
) -> Plan:
    """A plan of the interpreter's, or as small a one for the GPU at hand."""
    if INTERPRETED:
        base = replace(kernels.interpreted_config(1), widths=widths, num_stages=1)
    else:
        base = backend.configs(device.capability())[0]
    config = replace(base, block_h=block_h, block_n=block_n, staged=staged)
    if staged:  # whose tiles are four times as large
        config = replace(config, num_stages=min(config.num_stages, 2))
    return Plan(config, splits, by_bits=INTERPRETED)


# ---- values


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_values_of_both_caches(splits):
    a = both_caches()
    assert_close(a.run(small(splits=splits)), a)


@pytest.mark.parametrize(
    "widths",
    [NARROW, (128, 128, 128, 64, 64), (256, 128, 64, 64), (256, 256)],
    ids=lambda w: f"{w[0]}x{len(w)}",
)
def test_values_by_any_pieces(widths):
    a = both_caches(rows=2, heads=3)
    assert_close(a.run(small(widths)), a)


def test_values_by_every_configuration():
    """On a GPU, what it may be given there; in the interpreter, its own."""
    a = both_caches()
    if INTERPRETED:
        assert_close(a.run(), a)
    else:
        for config in backend.configs(device.capability()):
            for splits in (1, 3):
                assert_close(a.run(Plan(config, splits, by_bits=False)), a)


@pytest.mark.parametrize("heads", [1, 16, 20])
def test_any_number_of_heads(heads):
    a = both_caches(rows=2, heads=heads)
    assert_close(a.run(small()), a)


@pytest.mark.parametrize("capped", [False, True])
def test_without_extra_sink_or_lse(capped):
    cache = make_cache(2, 33, lengths=[33, 20] if capped else None, seed=4)
    a = Attention(queries(2, 4), cache, want_lse=False)
    assert_close(a.run(small(splits=2 if capped else 1)), a)


def test_lengths_beyond_the_row_and_below_zero():
    a = both_caches()
    a.main.lengths = torch.tensor([2**40, -3, 5], device=DEVICE)
    a.extra.lengths = torch.tensor([-(2**40), 2**33 + 1, 3], device=DEVICE)
    assert_close(a.run(small(splits=2)), a)


def test_duplicates_count_each_time():
    cache = make_cache(1, 12, holes=0, seed=5)
    cache.indices[0, 3:9] = cache.indices[0, 2]
    a = Attention(queries(1, 5), cache)
    once = Attention(a.q, dataclasses.replace(cache, indices=cache.indices[:, [0, 1, 2, 9, 10, 11]]))
    assert_close(a.run(small()), a)
    assert (a.run(small())[1] - once.run(small())[1]).abs().min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_out_of_range_are_no_tokens(dtype):
    a = both_caches(dtype=dtype)
    tokens, info = a.main.geometry.tokens, torch.iinfo(dtype)
    wrong = [tokens, tokens + 1, info.max, info.min, -2, -tokens, 2 * tokens]
    if dtype is torch.int64:
        wrong += [2**32, 2**32 + 5, -(2**32), 2**63 - 1]
    a.main.indices[:, 10 : 10 + len(wrong)] = torch.tensor(wrong, dtype=dtype)
    want = [t.clone() for t in a.run(small(splits=2))]
    assert_close((want[0], want[1]), a)
    a.main.indices[:, 10 : 10 + len(wrong)] = -1
    assert all(same_bits(x, y) for x, y in zip(want, a.run(small(splits=2)), strict=True))


def test_rows_of_unknown_length_are_searched_to_their_last_token():
    width = kernels.SCAN_FROM + 70
    cache = make_cache(2, width, holes=1.0)
    cache.indices[0, [3, 40]] = torch.tensor([5, 77], dtype=torch.int32, device=DEVICE)
    cache.indices[1, width - 1] = 9
    a = Attention(queries(2, 3), cache)
    assert_close(a.run(small(splits=2)), a)


@pytest.mark.parametrize("splits", [1, 3])
def test_empty_rows(splits):
    a = both_caches()
    for cache, row in ((a.main, 0), (a.extra, 0), (a.extra, 1)):
        cache.indices[row] = -1
    a.main.lengths[1] = 0
    out, lse = a.run(small(splits=splits))
    assert_close((out, lse), a)
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()
    assert out[2].any()
    a.sink = None
    out, lse = a.run(small(splits=splits))
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()


def test_nothing_to_look_at():
    cache = make_cache(2, 0)
    a = Attention(queries(2, 3), cache)
    out, lse = a.run(small())
    assert not out.any()
    assert (lse == -math.inf).all()
    empty = Attention(queries(0, 3), make_cache(0, 4))
    assert empty.run(small())[0].shape == (0, 3, DIM)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("splits", [1, 2])
def test_sinks_of_every_size(splits):
    a = both_caches(heads=7)
    without = dataclasses.replace(a, sink=None).run(small(splits=splits))
    a.sink = torch.tensor([0.5, math.inf, -math.inf, 1e30, -1e30, 30.0, -30.0], device=DEVICE)
    out, lse = a.run(small(splits=splits))
    assert same_bits(lse, without[1])
    assert not out[:, [1, 3]].any()
    assert same_bits(out[:, [2, 4]], without[0][:, [2, 4]])
    kept = [0, 5, 6]
    part = dataclasses.replace(a, q=a.q[:, kept], sink=a.sink[kept])
    assert_close((out[:, kept], lse[:, kept]), part)


def test_scores_far_apart():
    """The running maximum moves by hundreds between tiles, in both directions."""
    cache = make_cache(2, 96, pages=2, holes=0, seed=8)
    a = Attention(queries(2, 4, seed=8) * 60, cache)
    assert_close(a.run(small()), a)
    assert_close(a.run(small(splits=3)), a)


# ---- what must not matter


def poison(a: Attention, seed: int) -> None:
    """NaN codes, scales and RoPE in every slot that no row counts, noise in every tail and pad."""
    for cache in (a.main, a.extra):
        assert cache is not None
        rows = range(cache.indices.shape[0])
        counted = set(torch.cat([cache.counted(row) for row in rows]).tolist())
        kept = {token: [r.clone() for r in cache.records(token)] for token in counted}
        everything = torch.as_strided(
            cache.bytes, (cache.bytes.untyped_storage().nbytes(),), (1,), 0
        )  # tails, pads and what lies around the pool
        everything.copy_(torch.randint(0, 256, everything.shape, generator=generator(seed)).to(torch.uint8))
        for token in range(cache.geometry.tokens):
            for n, record in enumerate(cache.records(token)):
                record.copy_(kept[token][n]) if token in kept else record.fill_(0xFF)


@pytest.mark.parametrize("staged", [False, True])
def test_uncounted_bytes_change_no_bit(staged):
    a = both_caches()
    a.main.indices[:, 5] = a.main.geometry.tokens + 3
    chosen = small(splits=2, staged=staged)
    clean = [t.clone() for t in a.run(chosen)]
    assert not clean[0].isnan().any()
    poison(a, seed=11)
    for value in (0.0, NAN):
        for name, tensor in a.buffers.tensors().items():
            tensor.fill_(-1 if "words" in name else value)
        got = a.run(chosen)
        assert all(same_bits(x, y) for x, y in zip(clean, got, strict=True))


@pytest.mark.parametrize("where", ["nope", "rope", "scales"])
def test_nan_in_a_counted_token_shows_in_its_row_alone(where):
    cache = make_cache(3, 6, holes=0, seed=6)
    cache.indices.copy_(torch.arange(18).reshape(3, 6))
    a = Attention(queries(3, 4), cache)
    clean = [t.clone() for t in a.run(small(splits=1))]
    record = dict(zip(("nope", "rope", "scales"), cache.records(8), strict=True))[where]
    record[:2] = 0xFF if where == "scales" else 0x7F
    record[:2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8) if where == "rope" else record[:2]
    out, lse = a.run(small(splits=1))
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    for row in (0, 2):
        assert same_bits(out[row], clean[0][row])
        assert same_bits(lse[row], clean[1][row])
    split, split_lse = a.run(small(splits=2))
    assert split[1].isnan().all()
    assert split_lse[1].isnan().all()
    assert not split[[0, 2]].isnan().any()


def test_scratch_and_outputs_of_a_split_are_written_whole():
    a = both_caches()
    first = [t.clone() for t in a.run(small(splits=3))]
    a.out, a.lse = torch.full_like(first[0], 3.0), torch.full_like(first[1], 3.0)
    assert all(same_bits(x, y) for x, y in zip(first, a.run(small(splits=3)), strict=True))


def test_rows_do_not_depend_on_each_other():
    a = both_caches()
    want = [t.clone() for t in a.run(small(splits=2))]
    for row in range(3):

        def only(cache: Cache | None, row: int = row) -> Cache:
            assert cache is not None
            assert cache.lengths is not None
            return replace(cache, indices=cache.indices[row : row + 1], lengths=cache.lengths[row : row + 1])

        one = Attention(a.q[row : row + 1], only(a.main), only(a.extra), a.sink)
        out, lse = one.run(small(splits=2))
        assert same_bits(out[0], want[0][row])
        assert same_bits(lse[0], want[1][row])


def test_repeating_changes_no_bit():
    a = both_caches()
    first = [t.clone() for t in a.run()]
    assert all(same_bits(x, y) for x, y in zip(first, a.run(), strict=True))


def test_order_and_caches_are_interchangeable_within_the_budget():
    a = both_caches(rows=1)
    a.main.lengths = a.extra.lengths = None
    order = torch.randperm(70, generator=generator(4)).to(DEVICE)
    turned = replace(a, main=replace(a.main, indices=a.main.indices[:, order].contiguous()))
    assert_close(turned.run(small()), a)
    assert_close(replace(a, main=a.extra, extra=a.main).run(small()), a)


# ---- memory layouts


def strided(tensor: torch.Tensor, *gaps: int) -> torch.Tensor:
    """The same values in a larger tensor, with gaps between rows and heads."""
    rows, heads, *rest = tensor.shape
    big = torch.full((rows + gaps[0], heads + gaps[1], *rest), 7.0, dtype=tensor.dtype, device=tensor.device)
    big[:rows, :heads] = tensor
    return big[:rows, :heads]


@pytest.mark.parametrize("splits", [1, 2])
def test_strided_inputs_and_outputs(splits):
    a = both_caches()
    want = [t.clone() for t in a.run(small(splits=splits))]
    b = both_caches()
    padded = torch.full((3, 5, DIM + 24), 7.0, dtype=torch.bfloat16, device=DEVICE)
    padded[..., 8 : 8 + DIM] = b.q
    b.q = padded[..., 8 : 8 + DIM]
    b.out = torch.full((5, 3, DIM + 8), 7.0, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)[..., :DIM]
    b.lse = torch.full((5, 6), 7.0, device=DEVICE).T[:3]
    b.sink = strided(b.sink[:, None], 0, 2)[:, 0]
    b.main.lengths = torch.stack((b.main.lengths, b.main.lengths + 1), 1)[:, 0]
    wide = torch.full((3, 90), 1, dtype=torch.int32, device=DEVICE)
    wide[:, 3:73] = b.main.indices
    b.main.indices = wide[:, 3:73]
    got = b.run(small(splits=splits))
    assert all(same_bits(x, y) for x, y in zip(want, got, strict=True))
    assert (b.out._base[..., DIM:] == 7).all()  # what lies between the rows of out
    assert (b.lse._base[:, 3:] == 7).all()


@pytest.mark.parametrize("kind", ["3d", "nhd", "hnd", "fp8"])
def test_every_view_of_a_pool(kind):
    a = both_caches(rows=2)
    want = a.run(small())[0].clone()
    token, cache = DSV4.bytes_per_token, a.main
    stride, offset = cache.geometry.page_stride, cache.view.storage_offset()
    shapes = {
        "3d": ((2, 64, token), (stride, token, 1)),
        "nhd": ((2, 64, 1, token), (stride, token, token, 1)),
        "hnd": ((2, 1, 64, token), (stride, 64 * token, token, 1)),
        "fp8": ((2, 64 * token), (stride, 1)),
    }
    cache.view = torch.as_strided(cache.bytes, *shapes[kind], offset)
    if kind == "fp8":
        cache.view = cache.view.view(torch.float8_e4m3fn)
    assert same_bits(a.run(small())[0], want)


@pytest.mark.parametrize(
    ("offset", "stride"),
    [(1, None), (2, None), (8, None), (48, 37_376), (0, 64 * 584 + 1), (0, 64 * 584 + 6), (16, 50_000)],
)
def test_any_offset_and_stride(offset, stride):
    a = both_caches(rows=2, heads=3, offset=offset, stride=stride)
    assert_close(a.run(small(splits=2)), a)


@pytest.mark.parametrize(
    ("offset", "stride", "align"),
    [(0, None, 16), (48, 50_000, 16), (8, None, 2), (0, 37_382, 2), (3, None, 1)],
)
def test_a_launch_is_told_the_alignment_of_both_caches(offset, stride, align):
    call = both_caches(rows=1, offset=offset, stride=stride).call()
    assert call.extra is not None
    assert backend._align(call.main, None) == align
    assert backend._align(call.main, call.extra) == backend._align(call.extra, call.main) == align
    assert backend._align(call.extra, None) == 16


def test_misaligned_pieces_of_one_tile():
    a = both_caches(rows=2, heads=3, offset=3)
    assert_close(a.run(small(NARROW)), a)


@pytest.mark.parametrize("page_size", [1, 3, 128, 256])
def test_any_page_size(page_size):
    pages = -(-130 // page_size)
    cache = make_cache(2, 40, page_size=page_size, pages=pages, seed=9)
    a = Attention(queries(2, 3), cache)
    assert_close(a.run(small()), a)


@pytest.mark.parametrize("boundary", [31, 32])
def test_offsets_past_32_bits(boundary):
    """Pages on both sides of the boundary, of a pool that nothing else is ever in."""
    stride = 1_308_672
    page = (1 << boundary) // stride
    looked_at = [0, page - 1, page, page + 1, page + 2]
    lead = 1 << 31  # so that an offset that wraps stays inside, and shows
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < (1 << boundary) * 2 + lead:
        pytest.skip("not enough free GPU memory")
    storage = torch.empty(lead + (looked_at[-1] + 1) * stride, dtype=torch.uint8, device=DEVICE)
    pages = looked_at[-1] + 1
    pool = torch.as_strided(storage, (pages, DSV4.payload(64)), (stride, 1), lead)
    fresh = pack_pages(torch.randn(5, 64, DIM, generator=generator(boundary)).bfloat16(), DSV4)
    for n, at in enumerate(looked_at):
        pool[at] = fresh[n, : DSV4.payload(64)].to(DEVICE)
    tokens = torch.tensor(looked_at)[:, None] * 64 + torch.tensor([0, 13, 63])
    cache = Cache(
        pool,
        PageGeometry(DSV4, 64, pages, stride, lead, "uint8"),
        tokens.reshape(1, -1).int().to(DEVICE),
        None,
    )
    a = Attention(queries(1, 3), cache)
    assert_close(a.run(small()), a)
    extra = replace(a, main=make_cache(1, 4, seed=3), extra=cache)
    assert_close(extra.run(small(splits=2)), extra)


# ---- arithmetic


@triton.jit
def _decode_kernel(out, BY_BITS: tl.constexpr):
    code = (tl.arange(0, 256)[None, :] + tl.zeros([64, 256], tl.int32)).to(tl.uint8)
    byte = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None]
    value = _dequantise(code, byte, BY_BITS)
    tl.store(out + byte * 256 + tl.arange(0, 256)[None, :], value.to(tl.float32))


_dequantise = mla_tiles.dequantise


@pytest.mark.parametrize("by_bits", [True, False])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_every_code_under_every_scale_is_the_codecs(by_bits):
    codes = torch.arange(256).to(torch.uint8)
    want = (decode_e4m3(codes)[None] * decode_ue8m0(codes)[:, None]).bfloat16().float()
    out = torch.zeros(256, 256, device=DEVICE)
    _decode_kernel[(4,)](out, by_bits)
    got = out.cpu()
    if INTERPRETED and not by_bits:  # the interpreter's own conversion takes NaN codes for 480
        got[:, [0x7F, 0xFF]] = NAN
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(0.0), want.nan_to_num(0.0))


@triton.jit
def _round_kernel(out, values, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, _bf16(tl.load(values + at)).to(tl.float32))


_bf16 = mla_tiles.bf16


def test_bf16_is_rounded_to_nearest_even():
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator(1)).int()
    bits[:8] = torch.tensor(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x80008000 - 2**32, 0, 1]
    )
    values = bits.view(torch.float32)
    out = torch.zeros(4096, device=DEVICE)
    _round_kernel[(1,)](out, values.to(DEVICE), 4096)
    want = values.bfloat16().float()
    assert torch.equal(out.cpu().isnan(), want.isnan())
    assert same_bits(out.cpu().nan_to_num(1.0), want.nan_to_num(1.0))


@pytest.mark.parametrize("parts", [1, 2, 3, merge.MAX_SPLITS])
def test_merge_weighs_parts_and_ignores_empty_ones(parts):
    gen = generator(parts)
    out = torch.randn(2, parts, 3, DIM, generator=gen)
    logs = torch.randn(2, parts, 3, generator=gen) * 8
    logs[0, 0] = -math.inf
    logs[:, :, 2] = -math.inf
    out[logs == -math.inf] = NAN  # as scratch that nobody wrote
    a = Attention(queries(2, 3), make_cache(2, 1), sink=torch.tensor([0.3, math.inf, 1.0], device=DEVICE))
    call = a.call()
    TritonBackend()._merge(call, out.to(DEVICE), logs.to(DEVICE), parts)
    natural = logs.double() * math.log(2)
    lse = torch.logsumexp(natural, 1)
    weights = torch.exp(natural - torch.logaddexp(lse, a.sink.double().cpu())[:, None])
    want = (weights.nan_to_num(0)[..., None] * out.double().nan_to_num(0)).sum(1)
    # log2 within 2^-22 on a GPU, and fp32 around 32 after it.
    assert torch.allclose(call.lse.double().cpu(), lse, rtol=1e-6, atol=2.0**-18)
    assert torch.allclose(call.out.double().cpu(), want, rtol=2.0**-8, atol=1e-5)
    assert not call.out[:, 1:].any()


def test_a_merge_rounds_once_and_to_nearest_even():
    # A part that is all there is comes out as torch rounds it: budgets allow a truncated store.
    out = torch.randn(2, 2, 3, DIM, generator=generator(6))
    logs = torch.full((2, 2, 3), -math.inf)
    logs[:, 1] = 0.0
    call = Attention(queries(2, 3), make_cache(2, 1)).call()
    TritonBackend()._merge(call, out.to(DEVICE), logs.to(DEVICE), 2)
    assert same_bits(call.out.cpu(), out[:, 1].bfloat16())


def test_parts_are_kept_in_fp32():
    a = both_caches()
    a.run(small(splits=2))
    (part,) = (t for name, t in a.buffers.tensors().items() if name.startswith("mla-partial-out/"))
    assert part.dtype == torch.float32
    written = part.view(3, 2, 5, DIM)[:2]  # the last row has one tile, so a part of it stays as it was
    assert (written != written.bfloat16().float()).double().mean() > 0.9


# ---- plans


SHAPES = [(t, h) for t in (1, 3, 64, 65, 300, 4096) for h in (1, 8, 16, 40, 64, 128)]
LISTS = [(128, 0), (128, 512), (1, 1), (0, 0), (128, 8192)]


@pytest.mark.parametrize("capability", [(12, 0), (12, 1), (9, 0), (10, 0), (8, 9), (8, 0), None])
def test_a_plan_is_a_pure_function_within_its_bounds(capability):
    for tokens, heads in SHAPES:
        for widths in LISTS:
            chosen = plan(tokens, heads, widths, capability, interpreted=False)
            assert chosen == plan(tokens, heads, widths, capability, interpreted=False)
            tiles = sum(-(-w // chosen.config.block_n) for w in widths)
            assert 1 <= chosen.splits <= min(max(tiles, 1), merge.MAX_SPLITS)
            assert sum(chosen.config.widths) == DIM
            if capability is not None and capability[0] == 12:
                assert chosen.config in kernels.SM120_CONFIGS
            assert chosen.by_bits == (capability == (8, 0))


def test_a_plan_fills_the_gpu_and_does_not_split_what_fills_it():
    few = plan(1, 64, (128, 512), (12, 0), interpreted=False)
    assert few.splits * -(-64 // few.config.block_h) > 20
    assert plan(4096, 64, (128, 512), (12, 0), interpreted=False).splits == 1
    assert plan(4096, 64, (128, 512), (9, 0), interpreted=False).splits == 1


def test_compile_specs_name_every_sm120_configuration():
    specs = kernels.compile_specs()
    for config in kernels.SM120_CONFIGS:
        mine = [
            s
            for s in specs
            if (s.constexprs["BLOCK_H"], s.constexprs["BLOCK_N"], s.num_warps, s.num_stages)
            == (config.block_h, config.block_n, config.num_warps, config.num_stages)
        ]
        assert {s.constexprs["PARTIAL"] for s in mine} == {True, False}
    assert {s.constexprs["ALIGN"] for s in specs} == set(kernels.ALIGNMENTS)
    assert all(s.shared_bytes <= device.SM120_SHARED_MEMORY and s.capabilities == (120, 121) for s in specs)


# ---- scratch


def test_a_call_takes_the_scratch_its_plan_needs_and_no_other():
    a = both_caches()
    a.run(small(splits=1))
    assert len(a.buffers) == 0
    a.run(small(splits=2))
    parts = {"mla-partial-out", "mla-partial-lse"}
    assert {key.purpose for key in a.buffers} == parts
    a.run(small(splits=1, staged=True))
    assert {key.purpose for key in a.buffers} == parts | {"mla-stage", "mla-stage-words"}


# ---- staged


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("block_n", [32, 64])
def test_staged_values_are_those_of_the_one_launch(splits, block_n):
    # The same tiles in the same order, the same bf16 values: dequantised ahead or in registers.
    a = both_caches()
    want = [t.clone() for t in a.run(small(splits=splits, block_n=block_n))]
    got = a.run(small(splits=splits, block_n=block_n, staged=True))
    assert_close(got, a)
    assert not INTERPRETED or all(same_bits(x, y) for x, y in zip(want, got, strict=True))


def test_more_rows_than_scratch_holds_are_staged_in_parts(monkeypatch):
    a = both_caches()
    chosen = small(splits=2, staged=True)
    want = [t.clone() for t in a.run(chosen)]
    tiles = sum(-(-c.indices.shape[1] // 32) for c in (a.main, a.extra))
    monkeypatch.setattr(backend, "STAGE_BYTES", 2 * tiles * 32 * DIM * 2)
    assert backend.rows_at_once(chosen.config, 3, tiles) == 2
    few = replace(a, buffers=PersistentBuffers())
    assert all(same_bits(x, y) for x, y in zip(want, few.run(chosen), strict=True))
    stage = next(t for name, t in few.buffers.tensors().items() if name.startswith("mla-stage/"))
    assert stage.numel() == 2 * tiles * 32 * DIM


def test_staging_is_for_several_blocks_of_heads_on_hopper():
    def staged(tokens, heads, capability, widths=(128, 512)):
        return plan(tokens, heads, widths, capability, interpreted=False).config.staged

    assert staged(128, 128, (9, 0))
    assert not staged(128, 64, (9, 0))
    assert not staged(1, 128, (9, 0))
    assert not staged(128, 128, (12, 0))
    # A row that fills the scratch alone is not worth a launch of its own.
    assert not staged(64, 128, (9, 0), (128, 1 << 20))


def test_a_capture_needs_a_reservation_and_says_which():
    a = both_caches()
    call = replace(a.call(), scope="mine")
    assert backend._plan_of(call.shape, device.capability()).splits > 1
    with pytest.raises(
        GrowthDuringCaptureError, match=r"reserve_attention\(q, width=70, extra_width=21, scope='mine'\)"
    ):
        graphs.capture(lambda: TritonBackend().run(call))
    reserve_attention(call.q, width=70, extra_width=21, buffers=a.buffers, scope="mine")
    graph = graphs.capture(lambda: TritonBackend().run(call), warmup=1)
    a.q.copy_(queries(3, 5, seed=77))
    graph.replay()
    assert_close((call.out, call.lse), a)


@pytest.mark.parametrize(("heads", "kinds"), [(16, 2), (128, 4)])
def test_a_reservation_covers_every_smaller_batch(heads, kinds, monkeypatch):
    # As on a GPU: fewer rows are split into more parts.
    monkeypatch.setattr(backend, "plan", lambda *args, **_: plan(*args[:3], (9, 0), interpreted=False))
    buffers = PersistentBuffers()
    reserve_attention(queries(40, heads), width=128, extra_width=512, buffers=buffers)
    have = {n: t.numel() for n, t in buffers.tensors().items()}
    assert len(have) == kinds
    for tokens in range(1, 41):
        chosen = plan(tokens, heads, (128, 512), (9, 0), interpreted=False)
        for name, elements in backend.scratch_elements(chosen, tokens, heads, 10).items():
            assert elements <= next(n for k, n in have.items() if k.startswith(f"{name}/"))


@pytest.mark.parametrize("left", [(128, 0), (64, 0)])
def test_a_reservation_covers_calls_that_leave_a_cache_out(left, monkeypatch):
    # Fewer columns may be split into more parts as well: here 47 rows of 128 are, and of 128 + 64 not.
    monkeypatch.setattr(backend, "plan", lambda *args, **_: plan(*args[:3], (12, 0), interpreted=False))
    buffers = PersistentBuffers()
    reserve_attention(queries(47, 16), width=128, extra_width=64, buffers=buffers)
    have = {n: t.numel() for n, t in buffers.tensors().items()}
    for tokens in range(1, 48):
        chosen = plan(tokens, 16, left, (12, 0), interpreted=False)
        for name, elements in backend.scratch_elements(chosen, tokens, 16, left[0] // 32).items():
            assert elements <= next(n for k, n in have.items() if k.startswith(f"{name}/"))


def test_a_reservation_refuses_wrong_shapes():
    with pytest.raises(ArgumentError, match=r"q\.shape"):
        reserve_attention(queries(2, 3)[0], width=1)
    with pytest.raises(ArgumentError, match="extra_width"):
        reserve_attention(queries(2, 3), width=1, extra_width=-1)


# ---- support


def test_support():
    shape = both_caches().call().shape
    triton_backend = TritonBackend()
    assert triton_backend.available()
    for capability in (None, (8, 0), (9, 0), (10, 0), (12, 0), (12, 1)):
        assert triton_backend.supports(shape, capability)
    other = triton_backend.supports(replace(shape, layout=DSV32.name), (12, 0))
    assert not other
    assert "dsv32" in other.reason
    old = triton_backend.supports(shape, (7, 5))
    assert not old
    assert "7.5" in old.reason
    huge = triton_backend.supports(replace(shape, tokens=2**31, heads=128), (12, 0))
    assert not huge
    assert huge.remedy
