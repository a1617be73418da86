"""Attention calls as the engines make them, by every backend: what their own tests leave out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flashinfer_target
import pytest
import torch

from sm120_mla.codec import pack, quantise, view_field
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.layout import DSV4
from sm120_mla.pages import pool_geometry
from sm120_mla.reference.attention import Entries
from sm120_mla.targets.base import AttentionInputs
from sm120_mla.targets.own import OwnTarget
from sm120_mla.testing import budgets
from sm120_mla.testing.derive import run_device

DEVICE = run_device()
SCALE = 512**-0.5
OWN = ("reference", "triton")
STANDING = ("A", "B", "C") if INTERPRETED else ()
"""FlashInfer of each generation, emulated on the CPU."""

every_backend = pytest.mark.parametrize("backend", [*OWN, *STANDING])


def target_of(backend: str) -> OwnTarget:
    if backend in OWN:
        return OwnTarget(backend=backend)
    made: OwnTarget = getattr(flashinfer_target, backend)()
    return made


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_pool(pages: int, size: int, stride: int, seed: int) -> torch.Tensor:
    """uint8 ``[pages, payload]``, pages ``stride`` bytes apart."""
    storage = torch.zeros(pages * stride, dtype=torch.uint8)
    pool = storage.as_strided((pages, DSV4.payload(size)), (stride, 1))
    pack(quantise(torch.randn(pages, size, 512, generator=generator(seed)).bfloat16()), DSV4, size, out=pool)
    return storage.to(DEVICE).as_strided(pool.shape, pool.stride())


def window(pages: int = 2, seed: int = 1) -> torch.Tensor:
    """A sliding-window pool as sglang has it: pages of 256 tokens, padded to 576."""
    return make_pool(pages, 256, 149_760, seed)


def drawn(rows: int, width: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(0, tokens, (rows, width), generator=generator(seed)).int()


def queries(rows: int, heads: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, heads, 512, generator=generator(seed)).bfloat16().to(DEVICE)


def sinks(heads: int) -> torch.Tensor:
    return torch.randn(heads, generator=generator(6)).to(DEVICE)


@dataclass
class Cache:
    pool: torch.Tensor
    size: int
    indices: torch.Tensor
    lengths: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.indices = self.indices.to(DEVICE)
        self.lengths = None if self.lengths is None else self.lengths.to(DEVICE)

    def entries(self) -> Entries:
        return Entries(self.pool, pool_geometry(self.pool, self.size, DSV4), self.indices, self.lengths)


@dataclass
class Call:
    q: torch.Tensor
    main: Cache
    extra: Cache | None = None
    sink: torch.Tensor | None = None

    def inputs(self) -> AttentionInputs:
        extra = self.extra
        return AttentionInputs(
            q=self.q,
            kv_cache=self.main.pool,
            page_size=self.main.size,
            indices=self.main.indices,
            topk_length=self.main.lengths,
            attn_sink=self.sink,
            softmax_scale=SCALE,
            extra_kv_cache=None if extra is None else extra.pool,
            extra_page_size=None if extra is None else extra.size,
            extra_indices=None if extra is None else extra.indices,
            extra_topk_length=None if extra is None else extra.lengths,
        )

    def rows(self, pick: Sequence[int]) -> Call:
        def of(cache: Cache | None) -> Any:
            if cache is None:
                return None
            lengths = None if cache.lengths is None else cache.lengths[list(pick)]
            return Cache(cache.pool, cache.size, cache.indices[list(pick)], lengths)

        return dataclasses.replace(self, q=self.q[list(pick)], main=of(self.main), extra=of(self.extra))


Result = tuple[torch.Tensor, torch.Tensor]


def attend(backend: str, call: Call) -> Result:
    """The backend's answer; skips what it says it does not serve."""
    target = target_of(backend)
    support = target.serves(call.inputs())
    if not support:
        pytest.skip(support.reason)
    return target.attend(call.inputs())


def accept(backend: str, call: Call, answer: Result) -> None:
    """Within the backend's budget, in value and in lse."""
    entries = [cache.entries() for cache in (call.main, call.extra) if cache is not None]
    name = backend if backend in OWN else "flashinfer"
    found = budgets.judge(name, call.q, entries, call.sink, SCALE, *answer)
    assert (found.value, found.lse) == ("", "")
    assert found.judgement.unjudged == 0


def check(backend: str, call: Call) -> Result:
    answer = attend(backend, call)
    accept(backend, call, answer)
    return answer


def compressed(ratio: int, rows: int, width: int = 70, seed: int = 3) -> Cache:
    """C4A: pages of 64 tokens. C128A: pages of 2, padded to 1,728 bytes. Lengths from 1, as sglang's are."""
    size, stride, pages = (64, 37_440, 3) if ratio == 4 else (2, 1_728, 40)
    indices = drawn(rows, width, pages * size, seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator(seed + 1)).int()
    indices[torch.arange(width) >= lengths[:, None]] = -1
    indices[0], lengths[0] = -1, 1  # "length 1, index -1": too short a sequence to have an entry
    return Cache(make_pool(pages, size, stride, seed), size, indices, lengths)


@every_backend
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_window_beside_each_compressed_cache(backend: str, ratio: int) -> None:
    main = Cache(window(), 256, drawn(3, 20, 512, 2), torch.tensor([20, 1, 13]).int())
    check(backend, Call(queries(3, 16), main, compressed(ratio, 3), sinks(16)))


@every_backend
def test_sinks_at_their_edges(backend: str) -> None:
    edges = [float("inf"), float("-inf"), -1e30, 1e30, 0.0, 88.0, -88.0, 3e38]
    main = Cache(window(), 256, drawn(2, 9, 512, 2))
    call = Call(queries(2, 8), main, sink=torch.tensor(edges, device=DEVICE))
    out, lse = check(backend, call)
    plain_out, plain_lse = attend(backend, dataclasses.replace(call, sink=None))
    assert torch.equal(lse, plain_lse)  # whatever the sink is
    assert not out[:, [0, 3, 7]].any()
    assert torch.equal(out[:, [1, 2]], plain_out[:, [1, 2]])


@every_backend
def test_padding_rows_as_sglang_pads_them(backend: str) -> None:
    """Window index 0 under length 1, compressed index -1 under length 1; slot 0 is a bin for garbage."""
    main = Cache(window(), 256, drawn(4, 20, 512, 2).clamp_min(1), torch.tensor([20, 9, 20, 20]).int())
    extra = compressed(4, 4)
    call = Call(queries(4, 16), main, extra, sinks(16))
    real = attend(backend, call.rows([0, 1]))
    main.indices[2:], main.lengths[2:] = -1, 1
    main.indices[2:, 0] = 0
    extra.indices[2:], extra.lengths[2:] = -1, 1
    rope = view_field(main.pool, DSV4, "rope", 256)[0, 0]
    rope.copy_(torch.tensor([0xC0, 0x7F], dtype=torch.uint8, device=DEVICE).repeat(64))  # bf16 NaN

    out, lse = attend(backend, call)

    if backend in OWN:
        assert out[2:].isnan().any()
    accept(backend, call.rows([0, 1]), (out[:2], lse[:2]))
    assert torch.equal(out[:2], real[0])
    assert torch.equal(lse[:2], real[1])


@every_backend
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128, 1, 7, 96])
def test_head_counts(backend: str, heads: int) -> None:
    call = Call(queries(1, heads), Cache(window(), 256, drawn(1, 12, 512, 2)), sink=sinks(heads))
    if backend in ("A", "B") and heads in (1, 7, 96):
        assert not target_of(backend).serves(call.inputs())
        return
    check(backend, call)


def most_rows(backend: str) -> int:
    """Past the switch to prefill; Triton has none, and costs the interpreter a program a row."""
    return 6 if backend == "triton" and INTERPRETED else 65


@every_backend
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128])
def test_row_counts(backend: str, rows: int) -> None:
    if rows > most_rows(backend) and backend == "triton":
        pytest.skip("to Triton's kernel in the interpreter, rows are only more programs")
    check(backend, Call(queries(rows, 16), Cache(window(), 256, drawn(rows, 3, 512, 2))))


@every_backend
@pytest.mark.parametrize("width", [128, 192, 256, 512, 1024, 2048])
def test_widths(backend: str, width: int) -> None:
    """Few entries of many columns, the last one among them."""

    def call_of(rows: int) -> Call:
        indices = torch.full((rows, width), -1, dtype=torch.int32)
        indices[:, [0, 63, 64, width // 2, width - 1]] = drawn(rows, 5, 512, 2)
        return Call(queries(rows, 16), Cache(window(), 256, indices))

    if width == 1024 and backend == "triton" and INTERPRETED:
        pytest.skip("a second a test, and 2,048 columns take the same way")
    call = call_of(1)
    if width == 2048 and backend in ("A", "B"):  # 0.6 has a kernel for it above 64 rows only
        assert not target_of(backend).serves(call.inputs())
        assert target_of(backend).serves(call_of(65).inputs())
        return
    answer = attend(backend, call)
    indices = call.main.indices
    few = Call(call.q, Cache(call.main.pool, 256, indices[:, indices[0] >= 0]))
    accept(backend, few, answer)  # holes are nothing


@every_backend
def test_decode_and_prefill_agree_on_the_same_rows(backend: str) -> None:
    """One call of 65 rows, and 3 of them by themselves; FlashInfer has a kernel for each."""
    rows = most_rows(backend)
    lengths = torch.randint(0, 5, (rows,), generator=generator(9)).int()
    whole = Call(queries(rows, 16), Cache(window(), 256, drawn(rows, 4, 512, 2), lengths), sink=sinks(16))
    picked = [0, rows // 2, rows - 1]
    few = whole.rows(picked)
    out, lse = check(backend, whole)

    alone = check(backend, few)

    accept(backend, few, (out[picked], lse[picked]))
    if backend in OWN and INTERPRETED:  # one kernel, in as many parts
        assert torch.equal(alone[0], out[picked])
        assert torch.equal(alone[1], lse[picked])


@every_backend
def test_a_batch_of_decode_and_prefill_rows(backend: str) -> None:
    """Two requests that decode, far apart in the pool, before the tokens of one that is prefilled."""
    rows, width = most_rows(backend), 6
    position = torch.arange(rows) - 2
    tail = position[:, None] - torch.arange(width)  # descending, as sglang's windows are
    indices = torch.where(tail >= 0, 300 + tail, -1).int()
    lengths = (position + 1).clamp(0, width).int()
    indices[0], lengths[0] = torch.arange(5, 5 - width, -1), width
    indices[1], lengths[1] = torch.arange(255, 255 - width, -1), 2
    extra = compressed(4, rows, width=8)
    extra.indices[2:5], extra.lengths[2:5] = -1, 1
    batch = Call(queries(rows, 16), Cache(window(), 256, indices, lengths), extra, sinks(16))

    out, lse = attend(backend, batch)

    for part in ([0, 1], list(range(2, rows))):
        accept(backend, batch.rows(part), (out[part], lse[part]))
        check(backend, batch.rows(part))  # by itself, as an engine that splits its batches calls


@every_backend
def test_scale_bytes_at_their_ends(backend: str) -> None:
    """In counted tokens: UE8M0 0 is 2^-127 (0 to FlashInfer's V), 255 is NaN, and so is e4m3 0x7F.

    Where a NaN goes inside a row is for our own backends to say; it stays in its row in all of them.
    """
    pool = window()
    scales = view_field(pool, DSV4, "scales", 256)
    codes = view_field(pool, DSV4, "nope", 256)
    scales[0, 3, 2], scales[0, 5, 1], codes[0, 7, 100] = 0, 255, 0x7F
    indices = torch.tensor([[3, 8], [5, 8], [7, 8], [8, 9]]).int()
    call = Call(queries(4, 16), Cache(pool, 256, indices))

    out, lse = attend(backend, call)

    accept(backend, call.rows([0, 3]), (out[[0, 3]], lse[[0, 3]]))
    assert out[[0, 3]].isfinite().all()
    if backend in OWN:
        assert out[1:3].isnan().all()
        assert lse[1:3].isnan().all()


@pytest.mark.parametrize("backend", OWN)
@pytest.mark.parametrize("bits", [31, 32])
def test_pages_past_two_and_four_gibibytes(backend: str, bits: int) -> None:
    stride, lead = 1_308_672, 1 << 31  # an offset that wraps stays in the storage
    boundary = (1 << bits) // stride
    looked_at = [0, boundary - 1, boundary, boundary + 1]
    need = lead + (looked_at[-1] + 1) * stride
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < need + (1 << 31):
        pytest.skip("not enough free GPU memory")
    storage = torch.empty(need, dtype=torch.uint8, device=DEVICE)
    pool = storage.as_strided((looked_at[-1] + 1, DSV4.payload(256)), (stride, 1), lead)
    near = window(pages=4)
    for n, page in enumerate(looked_at):
        pool[page] = near[n]
    indices = torch.tensor([[page * 256 + n for page in looked_at for n in (0, 200)]]).int()
    close = torch.tensor([[page * 256 + n for page in range(4) for n in (0, 200)]]).int()
    want = attend(backend, Call(queries(1, 8), Cache(near, 256, close)))

    got = attend(backend, Call(queries(1, 8), Cache(pool, 256, indices)))

    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
