"""From a case to tensors: every kind is what its name says, and everything follows from the seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sm120_mla.case import ENTRY_KINDS, LENGTH_KINDS, IndexSpec, SplitCase
from sm120_mla.layout import DSV4, LAYOUTS, PageLayout
from sm120_mla.pages import pool_geometry
from sm120_mla.testing.derive import indices_of, lengths_of, make_pool, pool_of, run_device
from sm120_mla.testing.guards import GUARD_BYTES, guarded_bytes, noise, poison

DEVICE = run_device()
PAGE, PAGES = 128, 5
TOKENS = PAGE * PAGES
VIEWS = ("2d", "3d", "nhd", "hnd")


def spec(**fields: object) -> IndexSpec:
    return IndexSpec(**({"rows": 40, "width": 30, "dtype": "int64", "seed": 3} | fields))  # type: ignore[arg-type]


def values(spec_: IndexSpec, tokens: int = TOKENS) -> torch.Tensor:
    """int64 ``[T, k]`` on the CPU."""
    return indices_of(spec_, tokens, PAGE).reshape(spec_.rows, spec_.width).to("cpu", torch.int64)


def is_window(rows: torch.Tensor) -> bool:
    """A token, then those before it one by one, and token 0 from there on."""
    steps = rows[:, :-1] - rows[:, 1:]
    return bool(((steps == 1) | (rows[:, 1:] == 0)).all() and (rows >= 0).all() and (rows < TOKENS).all())


INT64, INT32 = torch.iinfo(torch.int64), torch.iinfo(torch.int32)
IS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "valid": lambda v: (v >= 0) & (v < TOKENS),
    "window": lambda v: (v >= 0) & (v < TOKENS),
    "duplicate": lambda v: (v >= 0) & (v < TOKENS),
    "minus_one": lambda v: v == -1,
    "negative": lambda v: (v < -1) & (v >= -(1 << 20)),
    "int_min": lambda v: v == INT64.min,
    "past_end": lambda v: (v >= TOKENS) & (v < TOKENS + 2 * PAGE),
    "int_max": lambda v: v == INT64.max,
    "wide": lambda v: (v >= 1 << 32) & ((v & 0xFFFFFFFF) < TOKENS),
}


# ---- index entries


@pytest.mark.parametrize("kind", ENTRY_KINDS)
@pytest.mark.parametrize("seed", [0, 1, 65536])
def test_an_entry_is_what_its_kind_says(kind: str, seed: int) -> None:
    found = values(spec(kinds=(kind,), seed=seed))

    assert bool(IS[kind](found).all())


@pytest.mark.parametrize("kind", [k for k in ENTRY_KINDS if k != "wide"])
def test_32_bit_entries_are_the_same_kinds_at_their_own_ends(kind: str) -> None:
    found = indices_of(spec(kinds=(kind,), dtype="int32"), TOKENS, PAGE)
    ends = {"int_min": INT32.min, "int_max": INT32.max}

    assert found.dtype == torch.int32
    if kind in ends:
        assert bool((found == ends[kind]).all())
    else:
        assert bool(IS[kind](found.to(torch.int64)).all())


def test_valid_entries_reach_every_page_and_both_ends() -> None:
    found = values(spec(rows=200, width=100))

    assert (found // PAGE).unique().tolist() == list(range(PAGES))
    assert (int(found.min()), int(found.max())) == (0, TOKENS - 1)


def test_windows_run_backwards_from_a_token_of_their_row() -> None:
    rows = values(spec(kinds=("window",)))

    assert is_window(rows)
    assert len(set(rows[:, 0].tolist())) > 20
    assert not is_window(values(spec()))


def test_duplicates_repeat_one_token_of_their_row() -> None:
    rows = values(spec(kinds=("duplicate",)))

    assert bool((rows == rows[:, :1]).all())
    assert len(set(rows[:, 0].tolist())) > 20


def test_entries_past_the_end_begin_at_the_end_and_span_two_pages() -> None:
    found = values(spec(kinds=("past_end",), rows=200, width=100))

    assert int(found.min()) == TOKENS
    assert int(found.max()) == TOKENS + 2 * PAGE - 1


def test_kinds_are_mixed_entry_by_entry() -> None:
    kinds = ("valid", "minus_one", "past_end", "wide")

    found = values(spec(kinds=kinds, rows=100))

    which = torch.stack([IS[kind](found) for kind in kinds])
    assert bool((which.sum(dim=0) == 1).all())
    shares = which.float().mean(dim=(1, 2))
    assert bool(((shares > 0.2) & (shares < 0.3)).all())
    assert all(len(set(row.tolist())) > 2 for row in which.int().argmax(dim=0))


def test_no_kinds_means_no_token() -> None:
    assert bool((values(spec(kinds=())) == -1).all())


@pytest.mark.parametrize("kind", ["valid", "window", "duplicate"])
def test_an_empty_pool_has_no_valid_token_so_entries_lie_at_its_end(kind: str) -> None:
    assert not values(spec(kinds=(kind,)), tokens=0).any()


@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 7), (7, 0), (1, 1)])
@pytest.mark.parametrize("kind", ENTRY_KINDS)
def test_any_shape_can_be_drawn(kind: str, rows: int, width: int) -> None:
    found = indices_of(spec(rows=rows, width=width, kinds=(kind,)), TOKENS, PAGE)

    assert found.shape == (rows, width)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("gap", [0, 1, 64])
def test_rows_lie_a_gap_apart_and_the_gap_names_a_token(dtype: str, rank: int, gap: int) -> None:
    wanted = spec(rows=4, width=6, dtype=dtype, rank=rank, row_gap=gap, kinds=("minus_one",))

    found = indices_of(wanted, TOKENS, PAGE)

    assert found.dtype == getattr(torch, dtype)
    assert found.shape == ((4, 6) if rank == 2 else (4, 1, 6))
    assert (found.stride(0), found.stride(-1)) == (6 + gap, 1)
    assert found.device.type == DEVICE
    all_of_it = torch.as_strided(found, (4, 6 + gap), (6 + gap, 1))
    assert bool((all_of_it[:, :6] == -1).all())
    assert bool(IS["valid"](all_of_it[:, 6:]).all())


# ---- lengths

WIDTH = 30
LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda n: n == WIDTH,
    "zero": lambda n: n == 0,
    "random": lambda n: (n >= 0) & (n <= WIDTH),
    "negative": lambda n: n <= WIDTH,
    "beyond": lambda n: (n >= WIDTH) & (n.long() % 2**32 <= 2 * WIDTH),
}


@pytest.mark.parametrize("kind", [k for k in LENGTH_KINDS if k != "none"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_length_is_what_its_kind_says(kind: str, dtype: str, rank: int) -> None:
    found = lengths_of(spec(lengths=kind, length_dtype=dtype, length_rank=rank))

    assert found is not None
    assert found.dtype == getattr(torch, dtype)
    assert found.shape == ((40,) if rank == 1 else (40, 1))
    assert found.device.type == DEVICE
    assert bool(LENGTHS[kind](found).all())


def test_random_lengths_are_all_there_is_in_between() -> None:
    found = lengths_of(spec(rows=900, width=3, lengths="random"))

    assert found is not None
    assert found.unique().tolist() == [0, 1, 2, 3]


def test_negative_and_long_lengths_are_really_out_of_range() -> None:
    negative, beyond = (lengths_of(spec(lengths=kind)) for kind in ("negative", "beyond"))

    assert negative is not None
    assert beyond is not None
    assert 5 < int((negative < 0).sum()) < 35
    assert int((beyond > WIDTH).sum()) > 30


def test_some_long_lengths_of_64_bits_are_short_in_32() -> None:
    found = lengths_of(spec(lengths="beyond", length_dtype="int64"))

    assert found is not None
    assert 5 < int((found.to(torch.int32) < WIDTH).sum()) < 35
    assert 5 < int((found <= 2 * WIDTH).sum()) < 35


def test_no_lengths_means_none() -> None:
    assert lengths_of(spec(lengths="none")) is None


# ---- pools


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_shows_the_same_bytes(layout: PageLayout, dtype: str, view: str) -> None:
    payload = layout.payload(PAGE)
    plain = make_pool(layout, PAGE, 3, page_stride=payload + 70, offset=9, seed=4)

    pool = make_pool(layout, PAGE, 3, page_stride=payload + 70, offset=9, view=view, dtype=dtype, seed=4)

    token = layout.bytes_per_token
    shapes = {
        "2d": (3, payload),
        "3d": (3, PAGE, token),
        "nhd": (3, PAGE, 1, token),
        "hnd": (3, 1, PAGE, token),
    }
    assert pool.view.shape == shapes[view]
    assert pool.view.dtype == getattr(torch, dtype)
    assert pool.view.device.type == DEVICE
    seen = pool.view.view(torch.uint8).flatten(1)
    assert torch.equal(seen, pool.bytes)
    assert torch.equal(seen, plain.bytes)
    assert pool.view.data_ptr() == pool.bytes.data_ptr() == pool.guard.storage.data_ptr() + GUARD_BYTES + 9


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("pages", [0, 1, 3])
def test_the_geometry_is_what_the_product_makes_of_the_view(view: str, pages: int) -> None:
    pool = make_pool(DSV4, PAGE, pages, view=view, offset=3)

    found = pool_geometry(pool.view, PAGE, DSV4)

    assert (found.layout, found.page_size, found.pages) == (DSV4, PAGE, pages)
    assert found.storage_offset == pool.geometry.storage_offset
    assert found.dtype == pool.geometry.dtype
    assert found.page_stride == pool.geometry.page_stride == DSV4.default_stride(PAGE)


def test_a_write_through_the_view_is_seen_in_the_bytes() -> None:
    pool = make_pool(DSV4, PAGE, 3, view="hnd", dtype="float8_e4m3fn")

    pool.view.view(torch.uint8)[2, 0, 7, 11] ^= 1

    assert pool.guard.stray() == [2 * DSV4.default_stride(PAGE) + 7 * 584 + 11]


def test_pages_are_noise_and_differ() -> None:
    pool = make_pool(DSV4, PAGE, 3, seed=1)

    assert pool.bytes[0].unique().numel() == 256
    assert not torch.equal(pool.bytes[0], pool.bytes[1])


def test_room_is_left_for_an_index_two_pages_past_the_end() -> None:
    stride = DSV4.default_stride(PAGE)
    pool = make_pool(DSV4, PAGE, 3)

    behind = pool.guard.storage.numel() - pool.guard.start - 3 * stride

    assert behind >= 2 * stride + DSV4.payload(PAGE)


def test_a_case_gives_its_pool() -> None:
    case = SplitCase(page_size=192, pages=3, stride_gap=37, offset=5, view="3d", dtype="float8_e4m3fn")

    pool = pool_of(case, 8)

    assert pool.view.stride(0) == pool.geometry.page_stride == case.page_stride
    assert (pool.geometry.page_size, pool.geometry.pages) == (192, 3)
    assert pool.view.dtype == torch.float8_e4m3fn
    assert pool.guard.start == GUARD_BYTES + 5
    assert torch.equal(pool_of(case, 8).bytes, pool.bytes)
    assert not torch.equal(pool_of(case, 9).bytes, pool.bytes)


# ---- guards


@pytest.mark.parametrize("byte", [0, GUARD_BYTES + 6, GUARD_BYTES + 7, GUARD_BYTES + 106, -1])
def test_a_stray_write_shows_anywhere_in_the_storage(byte: int) -> None:
    guard = guarded_bytes(100, 2, DEVICE, offset=7, room=50)
    assert guard.storage.numel() == 2 * GUARD_BYTES + 157
    assert guard.stray() == []

    guard.storage[byte] ^= 0xFF

    assert guard.stray() == [byte % guard.storage.numel() - GUARD_BYTES - 7]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000])
def test_noise_has_the_length_asked_for(nbytes: int) -> None:
    made = noise(nbytes, 1, DEVICE)

    assert (made.numel(), made.dtype, made.device.type) == (nbytes, torch.uint8, DEVICE)


@pytest.mark.parametrize("seed", [-5, 0, 1 << 40])
def test_noise_takes_any_seed(seed: int) -> None:
    assert torch.equal(noise(64, seed), noise(64, seed))
    assert not torch.equal(noise(64, seed), noise(64, seed + 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_poison_fills_memory_of_any_kind(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = torch.zeros(6, 16, dtype=dtype, device=DEVICE)

    filled = poison(tensor, 4)

    assert tensor.is_inference() is inference
    with torch.inference_mode():
        assert torch.equal(tensor.view(torch.uint8), filled)
    assert torch.equal(filled.flatten().cpu(), noise(filled.numel(), 4))


# ---- determinism


def everything(seed: int) -> list[torch.Tensor]:
    """What one seed gives."""
    drawn = spec(kinds=("valid", "window", "negative", "past_end", "wide"), lengths="random", seed=seed)
    lengths = lengths_of(drawn)
    assert lengths is not None
    return [values(drawn), lengths, make_pool(DSV4, 64, 1, seed=seed).bytes, noise(99, seed)]


def test_everything_follows_from_the_seed() -> None:
    first, other = everything(1), everything(2)
    torch.manual_seed(5)

    again = everything(1)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_nobody_elses_random_numbers_are_used_up() -> None:
    before = torch.random.get_rng_state()

    everything(1)

    assert torch.equal(torch.random.get_rng_state(), before)
