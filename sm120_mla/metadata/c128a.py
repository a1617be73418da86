"""C128A index rows (a drop-in for vLLM's builder), and which view of the buffer the consumer gets."""

from __future__ import annotations

import torch

from .. import device
from ..errors import ArgumentError
from ..kernels import c128a as kernels
from . import _checks as checks
from . import _values as values

__all__ = ["build_c128a_topk_metadata"]


def build_c128a_topk_metadata(
    positions: torch.Tensor,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    global_decode_buffer: torch.Tensor,
    decode_lens_buffer: torch.Tensor,
    prefill_buffer: torch.Tensor,
    max_compressed_tokens: int,
    *,
    num_blocks: int | None = None,
    validate: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill the rows of every token: the first ``num_decode_tokens`` decode, the rest prefill.

    A token at position p has ``n = min((p + 1) // compress_ratio, max_compressed_tokens)`` entries. A
    decode row gets their global slots ``block_table[request, j // block_size] * block_size
    + j % block_size``, a prefill row their numbers ``0..n-1``; then -1 up to ``max_compressed_tokens``
    columns (the active width W). Columns from W on are not written and hold what an earlier build left.

    Args:
        positions: ``[T]``, tokens from 0.
        compress_ratio: tokens per entry (128).
        token_to_req_indices: ``[>= T]``, row of ``block_table`` of each token.
        block_table: ``[requests, columns]``, dense rows of any stride; never changed.
        block_size: entries per block of the compressed cache (256 / 128 = 2).
        slot_mapping: ``[>= T]``, uncompressed slots; a negative one marks a padding row.
        global_decode_buffer, prefill_buffer: int32 ``[>= rows, capacity]``, row-major.
        decode_lens_buffer: int32 ``[>= rows]``.
        max_compressed_tokens: W, at most either capacity; see ``widths.active_width``.
        num_blocks: block ids from here on are out of range; None: what an int32 slot can name.
        validate: ``values`` also refuses a live row whose position, request, table or block id is out of
            range; ``metadata`` does not look. None: values in reference mode. Never in capture.
        Index inputs are int32 or int64 and dense.

    Returns:
        ``(decode rows, decode lengths, prefill rows)``, views of the buffers. The decode view has all
        columns on capability 12.x, so that it is contiguous and its stride is one at every width, which
        FlashInfer's SM120 prefill path asks for above 64 rows (vLLM #53574); consumers must stop at the
        length. Elsewhere, and without a GPU, it is ``[:nd, :W]``. The prefill view is ``[:np, :W]``
        everywhere, as its consumer counts entries that are not negative.

    A length is n, or 0 for a padding row. A padding row is filled from its position like any other, as
    vLLM does it: the length is what protects. Unchecked, a request, table column or block id out of range
    gives -1 in its column and leaves the length as it is.

    Raises ``ArgumentError`` (nothing is written) and ``IndexValueError``.
    """
    ratio = checks.positive("compress_ratio", compress_ratio)
    block = checks.positive("block_size", block_size)
    width = checks.positive("max_compressed_tokens", max_compressed_tokens)
    blocks = checks.block_count(num_blocks)
    tokens = checks.int_vector("positions", positions, 0, "").shape[0]
    if checks.positive("num_decode_tokens", num_decode_tokens, 0) > tokens:
        raise ArgumentError(
            "num_decode_tokens",
            num_decode_tokens,
            f"at most {tokens}, the tokens of positions",
            "Pass the positions of all tokens, decodes first.",
        )
    prefill_tokens = tokens - num_decode_tokens
    width_is = "max_compressed_tokens"
    decode = checks.row_output(
        "global_decode_buffer", global_decode_buffer, num_decode_tokens, width, width_is
    )
    lens = checks.length_output("decode_lens_buffer", decode_lens_buffer, num_decode_tokens)
    prefill = checks.row_output("prefill_buffer", prefill_buffer, prefill_tokens, width, width_is)
    inputs = {
        "positions": positions,
        "token_to_req_indices": checks.int_vector(
            "token_to_req_indices", token_to_req_indices, tokens, "positions"
        ),
        "block_table": checks.block_table(block_table),
        "slot_mapping": checks.int_vector("slot_mapping", slot_mapping, tokens, "positions"),
    }
    outputs = {"global_decode_buffer": decode, "decode_lens_buffer": lens, "prefill_buffer": prefill}
    checks.same_device(inputs | outputs)
    checks.disjoint(outputs, inputs)
    if device.validate_values(validate):
        _check_values(inputs, num_decode_tokens, ratio, block, width, blocks)

    if tokens:
        kernels.c128a_kernel[kernels.grid(tokens, width)](
            **kernels.arguments(
                decode,
                lens,
                prefill,
                positions,
                token_to_req_indices,
                slot_mapping,
                block_table,
                decode_tokens=num_decode_tokens,
                width=width,
                ratio=ratio,
                block_size=block,
                num_blocks=blocks,
            )
        )
    rows = decode[:num_decode_tokens]
    if not device.is_sm12x(positions.device):
        rows = rows[:, :width]
    return rows, lens[:num_decode_tokens], prefill[:prefill_tokens, :width]


def _check_values(
    inputs: dict[str, torch.Tensor],
    decode_tokens: int,
    ratio: int,
    block_size: int,
    width: int,
    num_blocks: int | None,
) -> None:
    tokens = inputs["positions"].shape[0]
    live = inputs["slot_mapping"][:tokens] >= 0
    positions = inputs["positions"]
    values.refuse(live & (positions < 0), "positions", positions, ">= 0", "Give padding rows slot -1.")
    last = (positions[:decode_tokens].to(torch.int64).clamp(-1, width * ratio) + 1) // ratio
    last = last.clamp(max=width) - 1
    values.lookups(
        inputs["block_table"],
        inputs["token_to_req_indices"][:decode_tokens],
        torch.zeros_like(last),
        last,
        live[:decode_tokens],
        block_size,
        num_blocks,
    )
