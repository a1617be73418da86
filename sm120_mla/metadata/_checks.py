"""Checks of metadata that the builders share: shape, dtype, stride, device, memory. None looks at a value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import ArgumentError
from ..placement import disjoint, same_device
from ..widths import positive

__all__ = [
    "block_count",
    "block_table",
    "disjoint",
    "index_rows",
    "int_vector",
    "length_output",
    "outputs",
    "positive",
    "row_output",
    "same_device",
]

_INDEX_DTYPES = (torch.int32, torch.int64)


def _tensor(name: str, value: object, dims: tuple[int, ...]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, type(value).__name__, "a torch.Tensor", "Pass a tensor.")
    if value.dim() not in dims:
        expected = " or ".join(str(d) for d in dims)
        raise ArgumentError(f"{name}.dim()", value.dim(), expected, "Reshape it.")
    return value


def _index_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _INDEX_DTYPES:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, "torch.int32 or torch.int64", "Convert it.")


def _dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            f"{name}.stride(-1)", tensor.stride(-1), "1", "Pass a tensor whose last dimension is dense."
        )


def int_vector(name: str, value: object, at_least: int, rows_of: str) -> torch.Tensor:
    """A dense 1-D index tensor of at least ``at_least`` entries (one for each of ``rows_of``)."""
    tensor = _tensor(name, value, (1,))
    _index_dtype(name, tensor)
    _dense(name, tensor)
    if tensor.shape[0] < at_least:
        raise ArgumentError(
            f"{name}.shape[0]",
            tensor.shape[0],
            f"at least {at_least}, one for each of {rows_of}",
            "Extend it.",
        )
    return tensor


def block_table(value: object, name: str = "block_table") -> torch.Tensor:
    """An index table ``[requests, columns]`` with dense rows, any row stride that does not overlap."""
    tensor = _tensor(name, value, (2,))
    _index_dtype(name, tensor)
    _dense(name, tensor)
    return tensor


def index_rows(name: str, value: object) -> torch.Tensor:
    """``[T, k]`` or ``[T, 1, k]`` index rows with a dense last dimension, as a 2-D view."""
    tensor = _tensor(name, value, (2, 3))
    _index_dtype(name, tensor)
    if tensor.dim() == 3:
        if tensor.shape[1] != 1:
            raise ArgumentError(f"{name}.shape", tuple(tensor.shape), "[T, k] or [T, 1, k]", "Reshape it.")
        tensor = tensor[:, 0]
    _dense(name, tensor)
    return tensor


def row_output(name: str, value: object, rows: int, columns: int, columns_are: str) -> torch.Tensor:
    """An int32 row-major buffer of at least ``rows`` by ``columns``."""
    tensor = _tensor(name, value, (2,))
    _output_dtype(name, tensor)
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{name}.stride()",
            tensor.stride(),
            f"{(tensor.shape[1], 1)}, row-major without gaps",
            "Pass the whole buffer, not a slice of its columns.",
        )
    if tensor.shape[0] < rows:
        raise ArgumentError(
            f"{name}.shape[0]", tensor.shape[0], f"at least {rows} rows", "Allocate more rows."
        )
    if tensor.shape[1] < columns:
        raise ArgumentError(
            f"{name}.shape[1]",
            tensor.shape[1],
            f"at least {columns} columns, {columns_are}",
            "Allocate wider rows, or ask for a narrower width.",
        )
    return tensor


def length_output(name: str, value: object, rows: int) -> torch.Tensor:
    """An int32 dense vector of at least ``rows`` entries."""
    tensor = _tensor(name, value, (1,))
    _output_dtype(name, tensor)
    _dense(name, tensor)
    if tensor.shape[0] < rows:
        raise ArgumentError(
            f"{name}.shape[0]", tensor.shape[0], f"at least {rows} rows", "Allocate more rows."
        )
    return tensor


def _output_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, "torch.int32", "Allocate it as int32.")


def block_count(num_blocks: object) -> int | None:
    """``num_blocks`` if it is None or a positive int."""
    return None if num_blocks is None else positive("num_blocks", num_blocks)


def outputs(
    out: object,
    lens_out: object,
    rows: int,
    needed: int,
    width: int,
    needed_are: str,
    inputs: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and length buffers, checked with the inputs; a fresh one of ``width`` columns for each None."""
    given: dict[str, torch.Tensor] = {}
    if out is not None:
        given["out"] = row_output("out", out, rows, needed, needed_are)
    if lens_out is not None:
        given["lens_out"] = length_output("lens_out", lens_out, rows)
    same_device({**inputs, **given})
    disjoint(given, inputs)
    like = next(iter(inputs.values()))
    made = given["out"] if "out" in given else like.new_empty((rows, width), dtype=torch.int32)
    lens = given["lens_out"] if "lens_out" in given else like.new_empty((rows,), dtype=torch.int32)
    return made, lens
