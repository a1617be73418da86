"""The codec against upstream's own pages, against exact arithmetic, and against bad input."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from sm120_mla.codec import (
    DEEPSEEK,
    ENGINES,
    RECIPES,
    SGLANG_TRITON_OLD,
    Quantised,
    Recipe,
    decode_e4m3,
    decode_ue8m0,
    dequantise,
    dequantise_pages,
    encode_e4m3,
    pack,
    pack_pages,
    quantise,
    recipe_by_name,
    scale_bytes,
    unpack,
    view_field,
)
from sm120_mla.errors import ArgumentError, LayoutError, NonFiniteError
from sm120_mla.layout import DSV4, DSV32, DSV41_FOOTER, DSV41_INLINE, LAYOUTS, PageLayout

GOLDEN = Path(__file__).parents[1] / "fixtures" / "pages" / "dsv4_pages.npz"
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda row: row.name)
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda row: row.name)
every_device = pytest.mark.parametrize("device", DEVICES)


def golden(page_size: int, field: str, device: str = "cpu") -> torch.Tensor:
    with np.load(GOLDEN) as arrays:
        return torch.from_numpy(arrays[f"p{page_size}_{field}"]).to(device)


def finite_bf16(first: int = 0, last: int = 0x7F80) -> torch.Tensor:
    """bf16 values of the bit patterns ``[first, last)``: by default all that are >= 0 and finite."""
    return torch.arange(first, last, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def next_bf16(value: float) -> float:
    bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16) + 1
    return float(bits.view(torch.bfloat16))


def random_k(lead: tuple[int, ...], layout: PageLayout = DSV4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((*lead, layout.head_dim), generator=generator).to(torch.bfloat16)


def token_with(values: dict[int, float], layout: PageLayout = DSV4) -> torch.Tensor:
    """One token ``[1, head_dim]``, zero but for ``values`` by dimension."""
    k = torch.zeros((1, layout.head_dim), dtype=torch.bfloat16)
    for dim, value in values.items():
        k[0, dim] = value
    return k


# --- golden pages ----------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("page_size", [2, 53, 64, 256])
def test_deepseek_pages_are_byte_exact(page_size: int, device: str) -> None:
    k = golden(page_size, "input_bf16_bits", device).view(torch.bfloat16)
    expected = golden(page_size, "page_bytes", device)

    pool = pack_pages(k)

    assert pool.stride(0) == int(golden(page_size, "page_stride"))
    assert torch.equal(pool[:, : expected.shape[1]], expected)
    assert not pool[:, expected.shape[1] :].any()


@every_device
@pytest.mark.parametrize("page_size", [2, 53, 64, 256])
def test_deepseek_pages_dequantise_bit_for_bit(page_size: int, device: str) -> None:
    pool = golden(page_size, "page_bytes", device)

    k = dequantise_pages(pool, DSV4, page_size)

    assert torch.equal(k.view(torch.int16), golden(page_size, "dequant_bf16_bits", device))


@pytest.mark.parametrize("recipe", [ENGINES, SGLANG_TRITON_OLD], ids=lambda row: row.name)
def test_the_golden_pages_tell_the_other_recipes_apart(recipe: Recipe) -> None:
    pool = pack_pages(golden(64, "input_bf16_bits").view(torch.bfloat16), recipe=recipe)
    assert not torch.equal(pool[:, : DSV4.payload(64)], golden(64, "page_bytes"))


# --- single codes ----------------------------------------------------------------------------------------


def e4m3_of_bf16_bits(bits: int) -> int:
    """e4m3fn code of a finite bf16, by integer arithmetic: nearest even, saturating."""
    sign, exponent, mantissa = bits >> 8 & 0x80, bits >> 7 & 0xFF, bits & 0x7F
    significand = mantissa | 0x80 if exponent else mantissa  # value = significand * 2^(power - 7)
    power = max(exponent, 1) - 127
    target = max(power, -6)  # e4m3's exponent; its quantum is 2^(target - 3)
    shift = min(target - power + 4, 16)
    quanta, rest = significand >> shift, significand & (1 << shift) - 1
    half = 1 << shift - 1
    quanta += rest > half or (rest == half and quanta & 1)
    return sign | min((target + 6) * 8 + quanta, 0x7E)


@every_device
def test_e4m3_is_nearest_even_and_saturating_for_every_bf16(device: str) -> None:
    patterns = [bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80]
    expected = torch.tensor([e4m3_of_bf16_bits(bits) for bits in patterns], dtype=torch.uint8)
    values = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    codes = encode_e4m3(values.float().to(device)).cpu()

    assert torch.equal(codes, expected)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (1.0, 0x38),
        (1.0625, 0x38),  # a tie, down to even
        (1.1875, 0x3A),  # a tie, up to even
        (2.0**-10, 0x00),  # half the smallest subnormal
        (1.5 * 2.0**-9, 0x02),
        (-(2.0**-9), 0x81),
        (15.5 * 2.0**-10, 0x08),  # carries from the subnormals into 2^-6
        (448.0, 0x7E),
        (464.0, 0x7E),
        (-480.0, 0xFE),
        (3.0e38, 0x7E),
    ],
)
def test_e4m3_codes_by_hand(value: float, code: int) -> None:
    assert encode_e4m3(torch.tensor([value])).item() == code


@every_device
def test_e4m3_decodes_every_code(device: str) -> None:
    values = decode_e4m3(torch.arange(256, dtype=torch.uint8, device=device)).tolist()

    for code, value in enumerate(values):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = math.ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
        if code & 0x7F == 0x7F:
            assert math.isnan(value), hex(code)
        else:
            assert struct.pack("f", value) == struct.pack("f", -magnitude if code & 0x80 else magnitude)


@every_device
def test_ue8m0_decodes_every_byte(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)

    values = decode_ue8m0(codes)

    assert values[:255].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert math.isnan(values[255].item())
    assert torch.equal(values[:255], codes.view(torch.float8_e8m0fnu).float()[:255])


# --- scales ----------------------------------------------------------------------------------------------


@every_recipe
def test_scale_bytes_are_the_least_power_of_two_for_every_bf16_amax(recipe: Recipe) -> None:
    floor = Fraction(struct.unpack("f", struct.pack("f", recipe.floor))[0])
    amax = finite_bf16()

    powers = (scale_bytes(amax, recipe).to(torch.int32) - 127).tolist()

    for value, power in zip(amax.tolist(), powers, strict=True):
        exact = Fraction(value)
        least = max(exact / 448, floor) if recipe.floor_on == "scale" else max(exact, floor) / 448
        assert Fraction(2) ** (power - 1) < least <= Fraction(2) ** power, value


@every_device
@every_recipe
@pytest.mark.parametrize("reciprocal", [False, True], ids=["divide", "times 1/448"])
def test_scale_bytes_are_what_the_writers_formula_gives_for_every_bf16(recipe, reciprocal, device) -> None:
    amax = finite_bf16().to(device)

    def over_448(x: torch.Tensor) -> torch.Tensor:
        number = torch.tensor(448.0, device=device)  # a tensor: torch would invert a scalar on CUDA
        return x * (1 / number) if reciprocal else x / number

    wide = amax.float()
    if recipe.floor_on == "scale":
        scale = over_448(wide).clamp_min(recipe.floor)
    else:
        scale = over_448(wide.clamp_min(recipe.floor))
    expected = (scale.cpu().log2().ceil() + 127).to(torch.uint8)

    assert torch.equal(scale_bytes(amax, recipe).cpu(), expected)


@pytest.mark.parametrize("power", [-12, -4, 0, 1, 7, 100, 119])
def test_scale_bytes_step_at_the_float32_after_448_times_a_power(power: int) -> None:
    at = torch.tensor(math.ldexp(448.0, power))
    after = torch.nextafter(at, torch.tensor(math.inf))
    got = [scale_bytes(value, DEEPSEEK).item() for value in (at, after)]
    assert got == [127 + power, 128 + power]


BOUNDARIES = {  # amax: bytes of DEEPSEEK, ENGINES, SGLANG_TRITON_OLD
    0.0: (114, 105, 92),
    1e-30: (114, 105, 92),
    1e-9: (114, 105, 92),
    1e-8: (114, 105, 92),
    448 * 2.0**-35: (114, 105, 92),
    next_bf16(448 * 2.0**-35): (114, 105, 93),
    5.34e-5: (114, 105, 104),
    448 * 2.0**-23: (114, 105, 104),
    next_bf16(448 * 2.0**-23): (114, 105, 105),
    1e-4: (114, 105, 105),
    448 * 2.0**-22: (114, 105, 105),
    next_bf16(448 * 2.0**-22): (114, 106, 106),
    0.02734375: (114, 113, 113),
    next_bf16(0.02734375): (114, 114, 114),
    448 * 2.0**-13: (114, 114, 114),
    next_bf16(448 * 2.0**-13): (115, 115, 115),
    1.0: (119, 119, 119),
    447.0: (127, 127, 127),
    448.0: (127, 127, 127),
    next_bf16(448.0): (128, 128, 128),
    448.0 * 2**100: (227, 227, 227),
    next_bf16(448.0 * 2**100): (228, 228, 228),
}


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative only"])
@pytest.mark.parametrize("amax", BOUNDARIES)
def test_boundary_tiles_have_the_scale_of_their_recipe(amax: float, sign: int) -> None:
    k = token_with({3 * 64 + 17: sign * amax})
    others = [0, 1, 2, 4, 5, 6]
    for recipe, expected in zip(RECIPES, BOUNDARIES[amax], strict=True):
        scales = quantise(k, DSV4, recipe).scales[0].tolist()
        assert scales[3] == expected, recipe.name
        assert [scales[tile] for tile in others] == [recipe.min_byte] * 6


def test_recipes_differ_for_small_tiles_and_only_there() -> None:
    amax = finite_bf16()
    deepseek, engines, old = (scale_bytes(amax, recipe) for recipe in RECIPES)
    assert torch.equal(deepseek != engines, amax.double() <= 448 * 2.0**-14)
    assert torch.equal(engines != old, amax.double() <= 448 * 2.0**-23)


def test_recipes_state_their_smallest_byte_and_source() -> None:
    assert [recipe.min_byte for recipe in RECIPES] == [114, 105, 92]
    assert all(recipe.source for recipe in RECIPES)
    assert [recipe_by_name(recipe.name) for recipe in RECIPES] == list(RECIPES)


def test_an_unknown_recipe_is_refused_with_the_known_names() -> None:
    with pytest.raises(ArgumentError, match="deepseek, engines, sglang_triton_old"):
        recipe_by_name("flashmla")
    nearest = Recipe("nearest", 1e-4, "amax", "nearest", "nobody")
    with pytest.raises(ArgumentError, match=r"recipe\.rounding = 'nearest'"):
        quantise(random_k((1,)), DSV4, nearest)


# --- tokens ----------------------------------------------------------------------------------------------


def test_a_negative_tile_keeps_its_signs() -> None:
    k = token_with(dict.fromkeys(range(64), -448.0) | {5: -0.0, 6: -1e-30})
    codes = quantise(k).nope[0, :64].tolist()
    assert codes == [0xFE] * 5 + [0x80, 0x80] + [0xFE] * 57


def test_float32_is_rounded_to_bf16_before_anything_else() -> None:
    k = torch.zeros((1, 512))
    k[0, 0] = 448.9  # bf16: 448, so a scale of 1; a scale of 2 if it were taken as it is
    tokens = quantise(k)
    assert (tokens.scales[0, 0].item(), tokens.nope[0, 0].item()) == (127, 0x7E)
    assert tokens.rope.dtype == torch.int16


def test_the_largest_tiles_dequantise_to_inf_where_documented() -> None:
    below, at = 1.921875 * 2.0**127, 1.9375 * 2.0**127
    k = token_with({0: below, 64: at, 128: -at})
    got = dequantise(quantise(k))[0, [0, 64, 128]].tolist()
    assert got == [1.875 * 2.0**127, math.inf, -math.inf]


def test_special_codes_dequantise_as_documented() -> None:
    codes = torch.full((1, 448), 0x38, dtype=torch.uint8)  # 1.0
    codes[0, :3] = torch.tensor([0x7F, 0xFF, 0x7E])
    scales = torch.tensor([[127, 0, 255, 254, 1, 247, 114]], dtype=torch.uint8)
    codes[0, 3 * 64 : 3 * 64 + 2] = torch.tensor([0x40, 0xC0])  # +-2 under 2^127
    rope = torch.arange(64, dtype=torch.int16) + 0x7FA1  # NaNs of many payloads, then negative values

    k = dequantise(Quantised(codes, scales, rope[None]))

    assert torch.equal(k[0, 448:].view(torch.int16), rope)
    assert k[0, :2].isnan().all()
    assert k[0, 2:64].tolist() == [448.0] + [1.0] * 61
    assert k[0, 64:128].unique().tolist() == [2.0**-127]
    assert k[0, 128:192].isnan().all()
    assert k[0, 192:195].tolist() == [math.inf, -math.inf, 2.0**127]
    assert k[0, [256, 320, 384]].tolist() == [2.0**-126, 2.0**120, 2.0**-13]


@every_layout
@every_recipe
def test_each_element_is_within_half_a_step_of_what_was_stored(layout: PageLayout, recipe: Recipe) -> None:
    k = (random_k((40,), layout) * 2.0 ** torch.arange(-30, 10).unsqueeze(1)).to(torch.bfloat16)
    nope, tile = layout.field("nope").count, layout.tile
    largest = k[:, :nope].unflatten(1, (-1, tile)).abs().amax(-1)
    step = torch.exp2(scale_bytes(largest, recipe).double() - 127).repeat_interleave(tile, dim=1)

    got = dequantise(quantise(k, layout, recipe), layout)

    x, y = k[:, :nope].double(), got[:, :nope].double()
    assert ((x - y).abs() <= torch.maximum(x.abs() * 2.0**-4, step * 2.0**-10)).all()
    assert torch.equal(got[:, nope:], k[:, nope:])


# --- non-finite input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("layout", "dim", "where"),
    [
        (DSV4, 0, "nope, tile 0"),
        (DSV4, 447, "nope, tile 6"),
        (DSV4, 448, "rope[0]"),
        (DSV4, 511, "rope[63]"),
        (DSV32, 511, "nope, tile 3"),
        (DSV32, 512, "rope[0]"),
        (DSV41_FOOTER, 511, "nope, tile 15"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_non_finite_value_is_refused_and_nothing_is_written(value, layout, dim, where) -> None:
    k = random_k((2, 3), layout)
    k[1, 1, dim] = value
    k[1, 2, 0] = value  # a later one; the first is named
    out = torch.full((2, layout.payload(3)), 0xA5, dtype=torch.uint8)

    with pytest.raises(NonFiniteError) as error:
        pack_pages(k, layout, out=out)

    assert error.value.argument == f"k[1, 1, {dim}]"
    assert error.value.value == f"{value} (token 4, {where})"
    assert (out == 0xA5).all()


def test_a_float32_that_bf16_cannot_hold_is_refused() -> None:
    k = torch.zeros((1, 512))
    k[0, 70] = 3.4e38
    with pytest.raises(NonFiniteError, match=r"rounds to inf in bf16 \(token 0, nope, tile 1\)"):
        quantise(k)


# --- pages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "nope", "scale", "rope"),
    [
        (DSV4, 576 + 64, 3 * 576 + 8 + 1, 576 + 448 + 4),
        (DSV32, 656 + 128, 656 + 512 + 4, 656 + 528 + 4),
        (DSV41_FOOTER, 512 + 32, 3 * 512 + 16 + 1, None),
        (DSV41_INLINE, 528 + 32, 528 + 512 + 1, None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_page_of_three_tokens_by_hand(layout: PageLayout, nope: int, scale: int, rope: int | None) -> None:
    """Token 1 has 448 first in tile 1, so a scale of 2^0, and 1.5 as rope[2]."""
    k = torch.zeros((1, 3, layout.head_dim), dtype=torch.bfloat16)
    k[0, 1, layout.tile] = 448.0
    if rope is not None:
        k[0, 1, layout.field("nope").count + 2] = 1.5
    zero = pack_pages(torch.zeros_like(k), layout)[0].tolist()

    page = pack_pages(k, layout)[0].tolist()

    changed = {at: byte for at, byte in enumerate(page) if byte != zero[at]}
    expected = {nope: 0x7E} | ({} if rope is None else {rope: 0xC0, rope + 1: 0x3F})
    # fp32 1.0 is 00 00 80 3F; an empty tile's 2^-13 is 00 00 00 39.
    expected |= {scale + 2: 0x80, scale + 3: 0x3F} if layout is DSV32 else {scale: 127}
    assert changed == expected


@every_layout
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_packing_into_a_pool_changes_its_payload_only(layout: PageLayout, dtype: torch.dtype) -> None:
    storage = torch.full((3 + 4 * 100_003,), 0xA5, dtype=torch.uint8)
    out = storage.as_strided((3, 90_000), (100_003, 1), 3)
    payload, k = layout.payload(53), random_k((3, 53), layout)

    returned = pack_pages(k, layout, out=out.view(dtype))

    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :payload], pack_pages(k, layout)[:, :payload])
    rest = storage.clone()
    rest.as_strided((3, payload), (100_003, 1), 3).fill_(0xA5)
    assert (rest == 0xA5).all()


def test_the_pad_byte_is_written_zero() -> None:
    out = torch.full((2, DSV4.payload(5)), 0xA5, dtype=torch.uint8)
    pack_pages(random_k((2, 5)), out=out)
    assert not view_field(out, DSV4, "scale_pad", 5).any()
    assert not (view_field(out, DSV4, "scales", 5) == 0xA5).any()


@every_layout
def test_a_page_may_start_at_any_byte(layout: PageLayout) -> None:
    k = random_k((1, 1), layout)
    stored = pack_pages(k, layout)
    odd = torch.zeros(stored.numel() + 1, dtype=torch.uint8)[1:].view(stored.shape)
    odd.copy_(stored)
    tokens = unpack(odd, layout, 1)
    assert torch.equal(pack(tokens, layout, 1), stored)


@every_layout
def test_flat_tokens_fill_pages_in_order(layout: PageLayout) -> None:
    k = random_k((2, 7), layout)
    flat = pack(quantise(k.flatten(0, 1), layout), layout, 7)
    assert torch.equal(flat, pack_pages(k, layout))


@every_layout
def test_a_pool_of_no_pages_round_trips(layout: PageLayout) -> None:
    pool = pack_pages(torch.zeros((0, 64, layout.head_dim), dtype=torch.bfloat16), layout)
    assert pool.shape == (0, layout.default_stride(64))
    assert dequantise_pages(pool, layout, 64).shape == (0, 64, layout.head_dim)


def test_a_given_page_stride_is_kept() -> None:
    k = random_k((2, 2))
    pool = pack_pages(k, page_stride=1_168)
    assert pool.shape == (2, 1_168)
    assert torch.equal(pool, pack_pages(k)[:, :1_168])


# --- bad arguments ---------------------------------------------------------------------------------------


def out_pool(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_PACKS = {
    "out too short": ({"out": out_pool(2, 1_751)}, "out.shape"),
    "out 1-D": ({"out": out_pool(10_000)}, "out.shape"),
    "out of another count": ({"out": out_pool(3, 2_000)}, "out.shape[0]"),
    "out of another dtype": ({"out": out_pool(2, 2_000, dtype=torch.int8)}, "out.dtype"),
    "out expanded": ({"out": out_pool(1, 2_000).expand(2, -1)}, "out.stride(0)"),
    "out overlapping": ({"out": out_pool(9_999).as_strided((2, 1_752), (1_751, 1))}, "out.stride(0)"),
    "out strided": ({"out": out_pool(2, 4_000)[:, ::2]}, "out.stride(1)"),
    "out on another device": (
        {"out": torch.empty((2, 2_000), dtype=torch.uint8, device="meta")},
        "out.device",
    ),
    "stride below payload": ({"page_stride": 1_751}, "page_stride"),
    "stride contradicts out": ({"page_stride": 2_304, "out": out_pool(2, 2_000)}, "page_stride"),
    "page size 0": ({"page_size": 0}, "page_size"),
    "page size True": ({"page_size": True}, "page_size"),
    "page size of other tokens": ({"page_size": 1}, "tokens"),
    "page size between tokens": ({"page_size": 2}, "tokens"),
}


@pytest.mark.parametrize(("change", "argument"), BAD_PACKS.values(), ids=list(BAD_PACKS))
def test_a_pack_that_cannot_be_is_refused_and_nothing_is_written(change, argument) -> None:
    arguments = {"tokens": quantise(random_k((2, 3))), "layout": DSV4, "page_size": 3} | change

    with pytest.raises(ArgumentError) as error:
        pack(**arguments)

    assert error.value.argument == argument
    out = change.get("out")
    assert out is None or out.is_meta or not out.any()


@pytest.mark.parametrize("count", [1, 5, 7])
def test_flat_tokens_that_do_not_fill_pages_are_refused(count: int) -> None:
    with pytest.raises(LayoutError, match=r"^tokens = "):
        pack(quantise(random_k((count,))), DSV4, 3)


def test_tokens_of_another_layout_are_refused() -> None:
    tokens = quantise(random_k((2, 3)))
    for layout, field in ((DSV32, "nope"), (DSV41_INLINE, "nope")):
        with pytest.raises(LayoutError, match=rf"^tokens\.{field} = .*{layout.name}"):
            dequantise(tokens, layout)
    no_rope = Quantised(tokens.nope, tokens.scales, None)
    with pytest.raises(LayoutError, match=r"^tokens\.rope = None"):
        pack(no_rope, DSV4, 3)
    wide_scales = Quantised(tokens.nope, tokens.scales.float(), tokens.rope)
    with pytest.raises(LayoutError, match=r"^tokens\.scales = "):
        dequantise(wide_scales)


@pytest.mark.parametrize(
    ("k", "argument"),
    [
        (torch.zeros((1, 576), dtype=torch.bfloat16), "k.shape"),
        (torch.zeros((), dtype=torch.bfloat16), "k.shape"),
        (torch.zeros((1, 512), dtype=torch.float16), "k.dtype"),
        (torch.zeros((1, 512), dtype=torch.int32), "k.dtype"),
    ],
)
def test_rows_that_are_not_k_are_refused(k: torch.Tensor, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        quantise(k)
    assert error.value.argument == argument


def test_pages_need_a_page_axis() -> None:
    with pytest.raises(LayoutError, match=r"k\.shape = \(6, 512\)"):
        pack_pages(random_k((6,)))


@pytest.mark.parametrize("read", [unpack, dequantise_pages])
def test_a_pool_that_is_too_short_is_refused(read) -> None:
    with pytest.raises(LayoutError, match=r"pool\.shape = \(2, 37375\).* 37,376 bytes"):
        read(out_pool(2, 37_375), DSV4, 64)
