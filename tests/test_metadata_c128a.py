"""The C128A builder: values against the reference, views by capability, checks, capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sm120_mla import device, graphs
from sm120_mla.errors import ArgumentError, IndexValueError
from sm120_mla.kernels import c128a as kernels
from sm120_mla.kernels.runtime import INTERPRETED
from sm120_mla.metadata import build_c128a_topk_metadata
from sm120_mla.reference import metadata as reference

DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = -99
CAPABILITIES = [(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), None]


@dataclass
class Batch:
    """Arguments of one build, by name; ``args`` may be edited before ``build``."""

    args: dict[str, Any]
    num_blocks: int | None = None

    def build(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return build_c128a_topk_metadata(**(self.args | more))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = self.args
        return reference.c128a(
            *(a[name] for name in list(a)[:7]), width=a["max_compressed_tokens"], num_blocks=self.num_blocks
        )

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        names = ("global_decode_buffer", "decode_lens_buffer", "prefill_buffer")
        return tuple(self.args[name] for name in names)  # type: ignore[return-value]


def make(
    tokens: int = 7,
    decodes: int = 4,
    *,
    seed: int = 0,
    ratio: int = 128,
    block_size: int = 2,
    width: int = 128,
    capacity: int = 256,
    dtype: torch.dtype = torch.int64,
    padding: float = 0.2,
) -> Batch:
    """A batch whose longest sequence fills the width, in buffers full of poison."""
    g = torch.Generator().manual_seed(seed)
    requests, columns = 3, -(-width // block_size)
    slots = torch.where(torch.rand(tokens, generator=g) < padding, -1, torch.arange(tokens))
    args = {
        "positions": torch.randint(0, ratio * width + ratio - 1, (tokens,), generator=g).to(dtype),
        "compress_ratio": ratio,
        "num_decode_tokens": decodes,
        "token_to_req_indices": torch.randint(0, requests, (tokens,), generator=g, dtype=torch.int32),
        "block_table": torch.randint(0, 5000, (requests, columns), generator=g, dtype=torch.int32),
        "block_size": block_size,
        "slot_mapping": slots.to(dtype),
        "global_decode_buffer": torch.full((tokens + 2, capacity), POISON, dtype=torch.int32),
        "decode_lens_buffer": torch.full((tokens + 2,), POISON, dtype=torch.int32),
        "prefill_buffer": torch.full((tokens + 2, capacity), POISON, dtype=torch.int32),
        "max_compressed_tokens": width,
    }
    return Batch({k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in args.items()})


def assert_same(views: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], width: int) -> None:
    decode, lens, prefill = views
    assert torch.equal(decode[:, :width], expected[0])
    assert torch.equal(lens, expected[1])
    assert torch.equal(prefill, expected[2])


@pytest.mark.parametrize("capability", [(12, 0), None], ids=str)
@pytest.mark.parametrize(
    ("seed", "shape"),
    [
        (1, {"tokens": 9, "decodes": 4}),
        (2, {"tokens": 70, "decodes": 66, "dtype": torch.int32}),  # more rows than one tile
        (3, {"tokens": 6, "decodes": 3, "width": 1280, "capacity": 1408}),  # more columns than one tile
        (4, {"tokens": 5, "decodes": 5, "ratio": 4, "block_size": 64}),
        (5, {"tokens": 5, "decodes": 0, "width": 256}),
        (6, {"tokens": 8, "decodes": 5, "ratio": 1, "block_size": 3, "width": 37, "capacity": 41}),
        (7, {"tokens": 1, "decodes": 1, "width": 1, "capacity": 1}),
    ],
)
def test_rows_and_lengths_equal_the_reference(
    seed: int, shape: dict[str, Any], capability: tuple[int, int] | None
) -> None:
    batch = make(seed=seed, **shape)
    before = {k: v.clone() for k, v in batch.args.items() if isinstance(v, torch.Tensor)}
    decodes, width = batch.args["num_decode_tokens"], batch.args["max_compressed_tokens"]
    prefills = batch.args["positions"].shape[0] - decodes

    with device.pretend_device(capability):
        views = batch.build()

    assert_same(views, batch.expected(), width)
    decode, lens, prefill = batch.buffers
    for buffer, rows in ((decode, decodes), (prefill, prefills)):
        assert (buffer[:rows, width:] == POISON).all()
        assert (buffer[rows:] == POISON).all()
    assert (lens[decodes:] == POISON).all()
    for name in ("positions", "token_to_req_indices", "block_table", "slot_mapping"):
        assert torch.equal(batch.args[name], before[name]), name


def test_a_small_batch_by_hand() -> None:
    batch = make(tokens=4, decodes=3, width=128, capacity=128, padding=0)
    i32 = {"dtype": torch.int32, "device": DEVICE}
    batch.args |= {
        "positions": torch.tensor([127, 126, 639, 300], **i32),
        "token_to_req_indices": torch.tensor([1, 0, 1, 0], **i32),
        "slot_mapping": torch.tensor([5, 6, -1, 8], **i32),
        "block_table": torch.tensor([[30, 31, 32], [9, 7, 8]], **i32),
    }

    decode, lens, prefill = batch.build()

    assert decode[0, :3].tolist() == [18, -1, -1]
    assert decode[1, :2].tolist() == [-1, -1]
    assert decode[2, :6].tolist() == [18, 19, 14, 15, 16, -1]  # padding is filled, its length is 0
    assert lens.tolist() == [1, 0, 0]
    assert prefill[0, :4].tolist() == [0, 1, -1, -1]
    assert (decode[:, 5:] == -1).all()


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_view_follows_the_capability(capability: tuple[int, int] | None) -> None:
    batch = make(tokens=9, decodes=5)
    wide = capability in ((12, 0), (12, 1))

    with device.pretend_device(capability):
        decode, lens, prefill = batch.build()

    assert decode.shape == (5, 256 if wide else 128)
    assert decode.is_contiguous() is wide
    assert prefill.shape == (4, 128)
    assert not prefill.is_contiguous()
    assert decode.stride() == prefill.stride() == (256, 1)
    assert lens.shape == (5,)
    for view, buffer in zip((decode, lens, prefill), batch.buffers, strict=True):
        assert view.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("capability", [(12, 0), None], ids=str)
def test_the_row_stride_is_one_at_every_width(capability: tuple[int, int] | None) -> None:
    batch = make(tokens=6, decodes=3, capacity=512)

    with device.pretend_device(capability):
        strides = [
            [view.stride() for view in batch.build(max_compressed_tokens=width, validate="metadata")]
            for width in (512, 128, 256)
        ]

    assert strides == [[(512, 1), (1,), (512, 1)]] * 3


def test_a_narrow_build_leaves_the_tail_of_a_wide_one() -> None:
    batch = make(tokens=4, decodes=4, width=256)
    with device.pretend_device((12, 0)):
        wide = batch.build()[0].clone()
        batch.args["positions"].clamp_(max=100 * 128)

        decode, lens, _ = batch.build(max_compressed_tokens=128)

    assert torch.equal(decode[:, 128:], wide[:, 128:])
    assert (lens <= 100).all()


@pytest.mark.parametrize(
    ("tokens", "decodes"), [(0, 0), (3, 3), (3, 0)], ids=["no tokens", "all decode", "all prefill"]
)
@pytest.mark.parametrize("capability", [(12, 0), None], ids=str)
def test_one_sided_batches_give_valid_views(
    tokens: int, decodes: int, capability: tuple[int, int] | None
) -> None:
    batch = make(tokens=tokens, decodes=decodes)

    with device.pretend_device(capability):
        decode, lens, prefill = batch.build()

    assert decode.shape == (decodes, 256 if capability else 128)
    assert lens.shape == (decodes,)
    assert prefill.shape == (tokens - decodes, 128)
    assert_same((decode, lens, prefill), batch.expected(), 128)


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "c128a_kernel", None)  # any launch would be a TypeError

    views = make(tokens=0, decodes=0).build()

    assert [view.numel() for view in views] == [0, 0, 0]
    with pytest.raises(TypeError):
        make(tokens=1, decodes=1).build()


def test_inputs_may_be_longer_than_the_batch_and_tables_have_any_row_stride() -> None:
    batch = make(tokens=8, decodes=5)
    wider = torch.full((3, 200), -7, dtype=torch.int32, device=DEVICE)
    wider[:, 5:69] = batch.args["block_table"]
    batch.args["block_table"] = wider[:, 5:69]
    expected = batch.expected()
    for name in ("token_to_req_indices", "slot_mapping"):
        batch.args[name] = torch.cat([batch.args[name], torch.full_like(batch.args[name], -(2**31))])

    assert_same(batch.build(), expected, 128)


@pytest.mark.parametrize("offset", [1, 4])
def test_buffers_at_any_offset_of_their_storage(offset: int) -> None:
    batch = make(tokens=5, decodes=3)
    for name in ("global_decode_buffer", "prefill_buffer"):
        flat = torch.full((offset + 7 * 256 + 5,), POISON, dtype=torch.int32, device=DEVICE)
        batch.args[name] = flat[offset : offset + 7 * 256].view(7, 256)

    assert_same(batch.build(), batch.expected(), 128)


@pytest.mark.parametrize("ratio", [1, 128])
def test_positions_past_the_width_stop_at_the_width(ratio: int) -> None:
    batch = make(tokens=4, decodes=2, padding=0, ratio=ratio)
    batch.args["positions"].fill_(1 << 21)

    views = batch.build()

    assert views[1].tolist() == [128, 128]
    assert_same(views, batch.expected(), 128)


def test_unchecked_garbage_gives_no_token_and_reads_nothing_outside() -> None:
    # The table is a window into poison: a read outside it would show.
    batch = make(tokens=10, decodes=8, padding=0)
    storage = torch.full((9, 300), 4321, dtype=torch.int32, device=DEVICE)
    table = storage[3:5, 100:104]
    table[:] = torch.tensor([[3, -5, 2, 2**30], [4, 1 << 30, 6, 2**30 - 1]])
    i64 = {"dtype": torch.int64, "device": DEVICE}
    batch.args |= {
        "block_table": table,
        "positions": torch.tensor(
            [1023, 1023, 1023, 1023, -1, -(2**63), 2**63 - 1, 5000, -(2**63), 2**63 - 1], **i64
        ),
        "token_to_req_indices": torch.tensor([0, 1, 2, -1, 0, 0, 1, 2**62, 0, 0], **i64),
    }

    views = batch.build(validate="metadata")

    assert_same(views, batch.expected(), 128)
    decode, lens, prefill = views
    assert decode[0, :9].tolist() == [6, 7, -1, -1, 4, 5, -1, -1, -1]
    assert decode[1, :9].tolist() == [8, 9, -1, -1, 12, 13, 2**31 - 2, 2**31 - 1, -1]
    assert (decode[[2, 3, 4, 5, 7]] == -1).all()
    assert (decode[6, 8:] == -1).all()
    assert lens.tolist() == [8, 8, 8, 8, 0, 0, 128, 39]
    assert (prefill[0] == -1).all()
    assert prefill[1].tolist() == list(range(128))


def test_num_blocks_bounds_the_block_ids() -> None:
    batch = make(tokens=6, decodes=6, padding=0, seed=3)
    batch.num_blocks = 2500

    views = batch.build(num_blocks=2500, validate="metadata")

    assert_same(views, batch.expected(), 128)
    assert views[0].max() < 5000
    assert (views[0][:, 0] == -1).any()


def test_a_table_without_rows_or_columns_gives_no_token() -> None:
    for shape in ((0, 5), (2, 0)):
        batch = make(tokens=3, decodes=2, padding=0)
        batch.args["block_table"] = torch.zeros(shape, dtype=torch.int32, device=DEVICE)

        decode, _, _ = batch.build(validate="metadata")

        assert (decode[:, :128] == -1).all()


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Batch], None]:
    def edit(batch: Batch) -> None:
        batch.args[name] = change(batch.args[name])

    return edit


def share(name: str, other: str, row: Any = slice(None)) -> Callable[[Batch], None]:
    def edit(batch: Batch) -> None:
        batch.args[name] = batch.args[other][row]

    return edit


BAD_METADATA = {
    "ratio 0": (replaced("compress_ratio", lambda _: 0), "compress_ratio"),
    "ratio float": (replaced("compress_ratio", lambda _: 128.0), "compress_ratio"),
    "block 0": (replaced("block_size", lambda _: 64 // 128), "block_size"),
    "width 0": (replaced("max_compressed_tokens", lambda _: 0), "max_compressed_tokens"),
    "width above decode": (
        replaced("global_decode_buffer", lambda t: t[:, :64].contiguous()),
        "global_decode_buffer.shape[1]",
    ),
    "width above prefill": (
        replaced("prefill_buffer", lambda t: t[:, :64].contiguous()),
        "prefill_buffer.shape[1]",
    ),
    "decodes negative": (replaced("num_decode_tokens", lambda _: -1), "num_decode_tokens"),
    "decodes bool": (replaced("num_decode_tokens", lambda _: True), "num_decode_tokens"),
    "decodes past T": (replaced("num_decode_tokens", lambda _: 8), "num_decode_tokens"),
    "positions a list": (replaced("positions", lambda t: t.tolist()), "positions"),
    "positions 2-D": (replaced("positions", lambda t: t[None]), "positions.dim()"),
    "positions float": (replaced("positions", lambda t: t.float()), "positions.dtype"),
    "positions strided": (
        replaced("positions", lambda t: t.repeat_interleave(2)[::2]),
        "positions.stride(-1)",
    ),
    "requests short": (replaced("token_to_req_indices", lambda t: t[:-1]), "token_to_req_indices.shape[0]"),
    "requests int8": (replaced("token_to_req_indices", lambda t: t.char()), "token_to_req_indices.dtype"),
    "slots short": (replaced("slot_mapping", lambda t: t[:-1]), "slot_mapping.shape[0]"),
    "slots bool": (replaced("slot_mapping", lambda t: t >= 0), "slot_mapping.dtype"),
    "table 1-D": (replaced("block_table", lambda t: t[0]), "block_table.dim()"),
    "table transposed": (
        replaced("block_table", lambda t: t.t().contiguous().t()),
        "block_table.stride(-1)",
    ),
    "table float": (replaced("block_table", lambda t: t.float()), "block_table.dtype"),
    "decode int64": (replaced("global_decode_buffer", lambda t: t.long()), "global_decode_buffer.dtype"),
    "decode narrow slice": (
        replaced("global_decode_buffer", lambda t: t[:, :128]),
        "global_decode_buffer.stride()",
    ),
    "decode rows": (replaced("global_decode_buffer", lambda t: t[:3]), "global_decode_buffer.shape[0]"),
    "prefill rows": (replaced("prefill_buffer", lambda t: t[:2]), "prefill_buffer.shape[0]"),
    "prefill expanded": (
        replaced("prefill_buffer", lambda t: t[:1].expand(9, -1)),
        "prefill_buffer.stride()",
    ),
    "lens rows": (replaced("decode_lens_buffer", lambda t: t[:3]), "decode_lens_buffer.shape[0]"),
    "lens int64": (replaced("decode_lens_buffer", lambda t: t.long()), "decode_lens_buffer.dtype"),
    "lens strided": (
        replaced("decode_lens_buffer", lambda t: t.repeat(2)[::2]),
        "decode_lens_buffer.stride(-1)",
    ),
    "another device": (replaced("block_table", lambda t: t.to("meta")), "block_table.device"),
    "output on another device": (
        replaced("decode_lens_buffer", lambda t: t.to("meta")),
        "decode_lens_buffer.device",
    ),
    "one buffer twice": (share("prefill_buffer", "global_decode_buffer"), "global_decode_buffer"),
    "lens over table": (
        share("decode_lens_buffer", "block_table", 1),
        "decode_lens_buffer",
    ),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_refused_by_name_and_nothing_is_written(case: str) -> None:
    edit, argument = BAD_METADATA[case]
    batch = make(tokens=7, decodes=4, padding=0)
    originals = batch.buffers
    edit(batch)
    table = batch.args["block_table"].clone()

    with pytest.raises(ArgumentError) as caught:
        batch.build(validate="metadata")

    assert caught.value.argument == argument
    assert all((buffer == POISON).all() for buffer in originals)
    assert table.device.type == "meta" or torch.equal(batch.args["block_table"], table)


@pytest.mark.parametrize(
    ("more", "argument"), [({"num_blocks": 0}, "num_blocks"), ({"validate": "all"}, "validate")]
)
def test_bad_options_are_refused(more: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make().build(**more)

    assert caught.value.argument == argument


def poke(name: str, at: Any, value: int) -> Callable[[Batch], None]:
    def edit(batch: Batch) -> None:
        batch.args[name][at] = value

    return edit


BAD_VALUES = {
    "decode position": (poke("positions", 1, -1), "positions[1]"),
    "prefill position": (poke("positions", 6, -3), "positions[6]"),
    "request past": (poke("token_to_req_indices", 2, 3), "token_to_req_indices[2]"),
    "request negative": (poke("token_to_req_indices", 0, -1), "token_to_req_indices[0]"),
    "table short": (replaced("block_table", lambda t: t[:, :2]), "block_table.shape[1]"),
    "block negative": (poke("block_table", (slice(None), 0), -1), "block_table["),
    "block past": (poke("block_table", (slice(None), 0), 5000), "block_table["),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_refused_where_values_are_looked_at(case: str) -> None:
    edit, argument = BAD_VALUES[case]
    batch = make(tokens=7, decodes=4, padding=0)
    batch.args["positions"].clamp_(min=1000)
    edit(batch)

    with pytest.raises(IndexValueError) as caught:
        batch.build(validate="values", num_blocks=5000)

    assert caught.value.argument.startswith(argument)
    assert all((buffer == POISON).all() for buffer in batch.buffers)
    batch.build(validate="metadata", num_blocks=5000)


def test_padding_and_prefill_rows_need_no_valid_request() -> None:
    batch = make(tokens=4, decodes=2, padding=0)
    i64 = {"dtype": torch.int64, "device": DEVICE}
    batch.args |= {
        "positions": torch.tensor([500, -77, 300, -5], **i64),
        "token_to_req_indices": torch.tensor([0, 1 << 40, -8, 99], **i64),
        "slot_mapping": torch.tensor([3, -1, 4, -1], **i64),
    }

    decode, lens, _ = batch.build(validate="values")

    assert lens.tolist() == [3, 0]
    assert (decode[1, :128] == -1).all()


def test_a_capture_reads_no_value_and_allocates_nothing() -> None:
    batch = make(tokens=7, decodes=4, padding=0)
    batch.args["positions"][0] = -4  # would be refused if looked at
    batch.build(validate="metadata")

    graph = graphs.capture(lambda: batch.build(validate="values"))

    if INTERPRETED:
        assert not [held for held in graph.addresses() or [] if held.inside]
    graph.replay()
    assert_same(graph.result, batch.expected(), 128)


@pytest.mark.parametrize("capability", [(12, 0), None], ids=str)
def test_a_replay_after_a_build_at_another_width_reads_right_rows(
    capability: tuple[int, int] | None,
) -> None:
    batch = make(tokens=6, decodes=6, width=128, capacity=512)
    with device.pretend_device(capability):
        batch.build()
        graph = graphs.capture(batch.build)
        other = make(tokens=6, decodes=6, width=512, capacity=512, seed=8)
        batch.build(**{**other.args, **dict(zip(list(batch.args)[7:10], batch.buffers, strict=True))})
        batch.args["positions"].copy_(make(tokens=6, decodes=6, seed=9).args["positions"])
        batch.args["slot_mapping"][2] = -1

        graph.replay()

    assert_same(graph.result, batch.expected(), 128)


def test_builds_inside_and_outside_inference_mode_agree() -> None:
    batch = make(tokens=6, decodes=3)
    with torch.inference_mode():
        inside = [view.clone() for view in batch.build()]

    outside = batch.build()

    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
