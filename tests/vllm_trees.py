"""Small trees in the shape of vLLM's, written for these tests: one per design the builder has had."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

__all__ = ["DESIGNS", "FILE", "WRITER", "WRITER_FILE", "module", "plant", "sparse"]

FILE = "vllm/models/deepseek_v4/sparse_mla.py"
WRITER_FILE = "vllm/models/deepseek_v4/common/ops/cache_utils.py"

DESIGNS = {
    "full": ("self.capacity", "rows_of(buffer, n, buffer.shape[1], buffer.stride(0))"),
    "packed": ("self.width(cm)", "rows_of(buffer, n, columns, columns)"),
    "narrow": ("self.width(cm)", "rows_of(buffer, n, columns, buffer.stride(0))"),
    "narrow, full on 12": (
        "self.width(cm)",
        "rows_of(buffer, n, buffer.shape[1] if {major} == 12 and decode else columns, buffer.stride(0))",
    ),
}
"""The width the builder passes, and the view the function makes of a buffer."""

MAJOR = "(current_platform.get_device_capability() or (0, 0))[0]"

KERNEL = """
@triton.jit
def fill(rows_ptr, lens_ptr, local_ptr, pos_ptr, req_ptr, table_ptr, slot_ptr, decode_stride, local_stride,
         table_stride, ratio, block, width, num_decode, WIDE: tl.constexpr):
    token = tl.program_id(0)
    have = tl.minimum((tl.load(pos_ptr + token) + 1) // ratio, width)
    column = tl.arange(0, WIDE)
    if token < num_decode:
        at = table_ptr + tl.load(req_ptr + token) * table_stride + column // block
        found = tl.load(at, mask=column < have, other=0) * block + column % block
        tl.store(rows_ptr + token * decode_stride + column, tl.where(column < have, found, -1),
                 mask=column < width)
        tl.store(lens_ptr + token, tl.where(tl.load(slot_ptr + token) >= 0, tl.maximum(have, 0), 0))
    else:
        at = local_ptr + (token - num_decode) * local_stride + column
        tl.store(at, tl.where(column < have, column, -1), mask=column < width)
"""

FUNCTION = """
def rows_of(buffer, n, columns, stride):
    return buffer.as_strided((n, columns), (stride, 1))


def view_of(buffer, n, columns, decode):
    return {view}


def build_c128a_topk_metadata(
    positions, compress_ratio, num_decode_tokens, token_to_req_indices, block_table, block_size, slot_mapping,
    global_decode_buffer, decode_lens_buffer, prefill_buffer, max_compressed_tokens=8192{more},
):
    tokens, width = positions.shape[0], max_compressed_tokens
    decode = view_of(global_decode_buffer, num_decode_tokens, width, True)
    prefill = view_of(prefill_buffer, tokens - num_decode_tokens, width, False)
    lens = decode_lens_buffer[:num_decode_tokens]
    {before}
    if tokens:
        fill[(tokens,)](
            decode, lens, prefill, positions, token_to_req_indices, block_table, slot_mapping,
            decode.stride(0), prefill.stride(0), block_table.stride(0), compress_ratio, block_size, width,
            num_decode_tokens, WIDE=triton.next_power_of_2(width),
        )
    return decode, lens, prefill
"""

BUILDER = """
@dataclass
class Metadata(AttentionMetadata):
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    c128a_global_decode_topk_indices: torch.Tensor | None = None
    c128a_decode_topk_lens: torch.Tensor | None = None
    c128a_prefill_topk_indices: torch.Tensor | None = None


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.ratio = self.kv_cache_spec.compress_ratio
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.capacity = cdiv(cdiv(vllm_config.model_config.max_model_len, self.ratio), 128) * 128
        self.slots = torch.empty(rows, dtype=torch.int64, device=device)
        self.requests = torch.empty(rows, dtype=torch.int32, device=device)
        self.c128a_global_decode_buffer = torch.empty((rows, self.capacity), dtype=torch.int32, device=device)
        self.c128a_decode_lens_buffer = torch.empty(rows, dtype=torch.int32, device=device)
        self.c128a_prefill_buffer = torch.empty((rows, self.capacity), dtype=torch.int32, device=device)
        {init}

    def width(self, cm):
        width = triton.next_power_of_2(max(cm.max_seq_len // self.ratio, 1))
        return min(max(width, 128), self.capacity)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        cm = common_attn_metadata
        {start}
        slots = get_compressed_slot_mapping(
            cm.num_actual_tokens, cm.query_start_loc, cm.seq_lens, cm.block_table_tensor.{clamp}(min=0),
            int(self.kv_cache_spec.storage_block_size), self.ratio, out=self.slots,
        )
        decodes, _, decode, prefill = split_decodes_and_prefills(
            cm, decode_threshold=self.reorder_batch_threshold or 1
        )
        if decode + prefill == 0:
            return Metadata(cm.block_table_tensor, slots)
        rows, lens, local = build_c128a_topk_metadata(
            cm.positions[: decode + prefill], self.ratio, decode, {requests}, cm.block_table_tensor[:decodes],
            self.kv_cache_spec.block_size // self.ratio, cm.slot_mapping, self.c128a_global_decode_buffer,
            self.c128a_decode_lens_buffer, self.c128a_prefill_buffer, max_compressed_tokens={width}{given},
        )
        return Metadata(
            cm.block_table_tensor,
            slots,
            rows.unsqueeze(1) if decode else None,
            lens if decode else None,
            local if prefill else None,
        )
"""

IMPORTS = """
import numpy as np
import torch
from dataclasses import dataclass
from typing import ClassVar
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
{imports}
"""

WRITER = """
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton


@triton.jit
def insert(k_ptr, slots_ptr, cache_ptr, block_size, stride, floor):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if slot == -1:
        return
    block = cache_ptr + (slot // block_size).to(tl.int64) * stride
    data = block + (slot % block_size) * 576
    scales = block + block_size * 576 + (slot % block_size) * 8
    for tile in tl.static_range(7):
        at = tile * 64 + tl.arange(0, 64)
        x = tl.load(k_ptr + token * 512 + at).to(tl.float32)
        exponent = tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), axis=0), floor) / 448.0))
        code = tl.clamp(x / tl.exp2(exponent), -448.0, 448.0).to(tl.float8e4nv)
        tl.store(data + at, code.to(tl.uint8, bitcast=True))
        tl.store(scales + tile, (exponent + 127.0).to(tl.uint8))
    tl.store(scales + 7, tl.zeros((), dtype=tl.uint8))
    at = tl.arange(0, 64)
    rope = (data + 448).to(tl.pointer_type(tl.bfloat16))
    tl.store(rope + at, tl.load(k_ptr + token * 512 + 448 + at))


def quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size=64, is_ue8m0=True):
    insert[(slot_mapping.shape[0],)](k, slot_mapping, k_cache, block_size, k_cache.stride(0), 1e-4)
"""


def sparse(design: str = "full", *, builder: bool = True, major: str = MAJOR, **parts: str) -> str:
    """``sparse_mla.py``. ``parts``: imports, more, before, init, start, clamp, requests, given, width."""
    width, view = DESIGNS[design]
    blanks = dict.fromkeys(("imports", "more", "before", "init", "start", "given"), "")
    filled = {**blanks, "before": "pass", "init": "pass", "start": "pass", "clamp": "clamp"}
    filled |= {"requests": "cm.token_to_req_indices(self.requests)", "width": width} | parts
    filled["view"] = view.format(major=major)
    for name, depth in (("before", 4), ("init", 8), ("start", 8)):
        filled[name] = indent(dedent(filled[name]).strip(), " " * depth).strip()
    texts = [IMPORTS, KERNEL, FUNCTION, *([BUILDER] if builder else [])]
    return "\n".join(text if text is KERNEL else text.format_map(filled) for text in texts)


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a tree: ``files`` by path, beside the few plain modules every tree has."""
    plain = {"vllm/__init__.py": "raise ImportError('not to be run')", "vllm/utils/__init__.py": ""}
    plain["vllm/utils/math_utils.py"] = "def cdiv(a, b):\n    return -(-a // b)\n"
    for name, text in (plain | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def module(design: str = "full", **parts: str) -> dict[str, str]:
    """A tree's files with one builder in its usual place."""
    return {FILE: sparse(design, **parts)}
