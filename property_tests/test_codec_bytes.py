"""Pages of every layout: what is packed is what is unpacked, and nothing else in the pool changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from sm120_mla.codec import (
    RECIPES,
    Quantised,
    Recipe,
    dequantise,
    pack,
    pack_pages,
    quantise,
    scale_bytes,
    unpack,
)
from sm120_mla.layout import LAYOUTS, PageLayout
from sm120_mla.testing.profiles import scaled

POISON = 0xA5

layouts = st.sampled_from(LAYOUTS)
recipes = st.sampled_from(RECIPES)
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Pool:
    """Where pages lie in a storage: ``gap`` bytes between payloads, ``offset`` before, ``after`` behind."""

    layout: PageLayout
    page_size: int
    pages: int
    gap: int
    offset: int
    after: int
    dtype: str

    def poisoned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The storage, and the pool ``[pages, payload]`` in it."""
        payload = self.layout.payload(self.page_size)
        stride = payload + self.gap
        storage = torch.full((self.offset + self.pages * stride + self.after,), POISON, dtype=torch.uint8)
        pool = storage.as_strided((self.pages, payload), (stride, 1), self.offset)
        return storage, pool.view(getattr(torch, self.dtype))


pools = st.builds(
    Pool,
    layout=layouts,
    page_size=st.one_of(st.integers(1, 80), st.sampled_from([53, 64, 128, 256])),
    pages=st.integers(0, 3),
    gap=st.one_of(st.just(0), st.integers(1, 1_000)),
    offset=st.integers(0, 600),
    after=st.integers(0, 9),
    dtype=st.sampled_from(["uint8", "float8_e4m3fn"]),
)


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_tokens(layout: PageLayout, lead: tuple[int, ...], seed: int) -> Quantised:
    """Any bits whatever in each field: NaN codes, scale bytes 0 and 255 included."""
    record = random_bytes((*lead, layout.bytes_per_token), seed)
    parts, at = {}, 0
    for field in layout.fields:
        parts[field.name] = record[..., at : at + field.nbytes].clone()
        at += field.nbytes
    scales = parts["scales"]
    if layout.field("scales").dtype == "fp32":
        scales = scales.view(torch.float32)
    return Quantised(parts["nope"], scales, parts["rope"].view(torch.int16) if "rope" in parts else None)


def bits(tokens: Quantised) -> list[torch.Tensor]:
    """Each field as bytes: NaN equals itself."""
    fields = (tokens.nope, tokens.scales, tokens.rope)
    return [field.contiguous().view(torch.uint8) for field in fields if field is not None]


def values(layout: PageLayout, lead: tuple[int, ...], low: int, span: int, seed: int) -> torch.Tensor:
    """bf16 rows whose tiles each have a magnitude in ``2^low .. 2^(low+span)``; some tiles are 0."""
    generator = torch.Generator().manual_seed(seed)
    size = (*lead, layout.head_dim // layout.tile, 1)
    k = torch.randn((*size[:-1], layout.tile), generator=generator)
    power = torch.randint(low, low + span + 1, size, generator=generator)
    k = k * torch.exp2(power.float()) * (torch.rand(size, generator=generator) > 0.1)
    # The last tile may be partly rope (DSv3.2: 576 = 4.5 * 128): fill what is missing.
    k = torch.cat((k.flatten(-2), torch.randn((*lead, layout.tile), generator=generator)), dim=-1)
    return k[..., : layout.head_dim].to(torch.bfloat16)


magnitudes = {"low": st.integers(-40, 20), "span": st.integers(0, 12)}


@scaled(2)
@given(pool=pools, seed=seeds)
def test_any_tokens_come_back_from_any_pool_as_they_were_packed(pool: Pool, seed: int) -> None:
    tokens = random_tokens(pool.layout, (pool.pages, pool.page_size), seed)
    _, out = pool.poisoned()

    pack(tokens, pool.layout, pool.page_size, out=out)
    back = unpack(out, pool.layout, pool.page_size)

    for stored, given_ in zip(bits(back), bits(tokens), strict=True):
        assert torch.equal(stored, given_)


@scaled(2)
@given(pool=pools, seed=seeds)
def test_any_page_is_rebuilt_from_its_tokens(pool: Pool, seed: int) -> None:
    storage, out = pool.poisoned()
    raw = out.view(torch.uint8)
    raw.copy_(random_bytes(tuple(raw.shape), seed))
    before, page = storage.clone(), raw.clone()

    again = pack(unpack(out, pool.layout, pool.page_size), pool.layout, pool.page_size)

    payload = pool.layout.payload(pool.page_size)
    differing = (again[:, :payload] != page).any(0).nonzero().flatten().tolist()
    assert {pool.layout.locate(at, pool.page_size).field for at in differing} <= {"scale_pad"}
    assert torch.equal(storage, before)


@scaled(2)
@given(pool=pools, seed=seeds)
def test_packing_writes_every_payload_byte_and_no_other(pool: Pool, seed: int) -> None:
    tokens = random_tokens(pool.layout, (pool.pages, pool.page_size), seed)
    storage, out = pool.poisoned()
    other, twin = pool.poisoned()
    other.fill_(POISON ^ 0xFF)

    pack(tokens, pool.layout, pool.page_size, out=out)
    pack(tokens, pool.layout, pool.page_size, out=twin)

    assert torch.equal(out.view(torch.uint8), twin.view(torch.uint8))
    out.view(torch.uint8).fill_(POISON)
    assert (storage == POISON).all()


@scaled(2)
@given(layout=layouts, recipe=recipes, tokens=st.integers(1, 6), seed=seeds, **magnitudes)
def test_each_element_comes_back_within_half_a_step(
    layout: PageLayout, recipe: Recipe, tokens: int, low: int, span: int, seed: int
) -> None:
    k = values(layout, (tokens,), low, span, seed)
    n, tile = layout.field("nope").count, layout.tile
    largest = k[:, :n].unflatten(1, (-1, tile)).abs().amax(-1)
    step = torch.exp2(scale_bytes(largest, recipe).double() - 127).repeat_interleave(tile, dim=1)

    got = dequantise(quantise(k, layout, recipe), layout)

    x, y = k[:, :n].double(), got[:, :n].double()
    # e4m3 has 3 mantissa bits, and a quantum of 2^-9 below 2^-6; bf16 holds each product exactly.
    assert ((x - y).abs() <= torch.maximum(x.abs() * 2.0**-4, step * 2.0**-10)).all()
    assert torch.equal(got[:, n:].contiguous().view(torch.int16), k[:, n:].contiguous().view(torch.int16))


@scaled(2)
@given(layout=layouts, recipe=recipes, tokens=st.integers(1, 6), seed=seeds, **magnitudes)
def test_quantising_what_was_dequantised_changes_no_value(
    layout: PageLayout, recipe: Recipe, tokens: int, low: int, span: int, seed: int
) -> None:
    once = dequantise(quantise(values(layout, (tokens,), low, span, seed), layout, recipe), layout)

    twice = dequantise(quantise(once, layout, recipe), layout)

    assert torch.equal(twice.view(torch.int16), once.view(torch.int16))


@scaled(2)
@given(
    layout=layouts,
    recipe=recipes,
    page_size=st.integers(1, 70),
    seed=seeds,
    where=st.floats(0, 1, exclude_max=True),
    factor=st.sampled_from([-1.0, 0.0, 0.5, 3.0, 1e6]),
    **magnitudes,
)
def test_a_value_reaches_the_bytes_of_its_own_token_and_tile_only(
    layout: PageLayout,
    recipe: Recipe,
    page_size: int,
    low: int,
    span: int,
    seed: int,
    where: float,
    factor: float,
) -> None:
    k = values(layout, (1, page_size), low, span, seed)
    token, dim = divmod(int(where * page_size * layout.head_dim), layout.head_dim)
    changed = k.clone()
    changed[0, token, dim] *= factor

    before, after = pack_pages(k, layout, recipe)[0], pack_pages(changed, layout, recipe)[0]

    differing = (before != after).nonzero().flatten().tolist()
    found = [layout.locate(at, page_size) for at in differing]
    assert {place.token for place in found} <= {token}
    n = layout.field("nope").count
    if dim < n:
        assert {(place.field, place.tile) for place in found} <= {
            ("nope", dim // layout.tile),
            ("scales", dim // layout.tile),
        }
    else:
        assert {(place.field, place.element) for place in found} <= {("rope", dim - n)}
