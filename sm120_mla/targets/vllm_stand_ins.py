"""What stands in for the parts of vLLM that its metadata builder and cache writer import.

The platform answers as ``device.capability()`` does, so that ``pretend_device`` reaches whatever a commit
asks it. Configuration objects raise ``UnknownFieldError`` where a commit asks for something nobody foresaw:
its verdict is then unknown, not wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from .. import device
from ..errors import UnavailableError
from ..kernels.runtime import tl, triton

__all__ = ["OWN", "DeviceCapability", "Fields", "Platform", "UnknownFieldError", "as_gpu", "stand_ins"]

OWN = (
    "vllm.envs",
    "vllm.utils.math_utils",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
    "vllm.models.deepseek_v4.common.ops.cache_utils",
    "vllm.models.deepseek_v4.sparse_mla",
    "vllm.v1.attention.ops.deepseek_v4_ops.cache_utils",
)
"""Modules that are taken from the tree where another module of it imports them: plain Python and kernels."""

_HEADS, _INDEX_TOPK = 64, 512


class UnknownFieldError(UnavailableError, AttributeError):
    """A commit reads a field of vLLM's configuration or batch that this adapter does not provide."""


class Fields(SimpleNamespace):
    """An object of vLLM's, with the fields known to be read. ``hasattr`` and ``getattr`` work as ever."""

    def __init__(self, title: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.__dict__["_title"] = title

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownFieldError(
            f"{self.__dict__.get('_title', 'a stand-in')}.{name}",
            "the adapter does not provide it",
            "Teach targets/vllm_stand_ins.py this commit's use of it.",
        )


class DeviceCapability(NamedTuple):
    """vLLM's type of a capability."""

    major: int
    minor: int

    def to_int(self) -> int:
        """12.0 as 120."""
        return self.major * 10 + self.minor

    def as_version_str(self) -> str:
        """12.0 as text."""
        return f"{self.major}.{self.minor}"


class Platform:
    """``current_platform``: an NVIDIA GPU of ``device.capability()``, or no GPU."""

    device_type = "cuda"
    device_name = "cuda"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """(major, minor), or None where there is no GPU."""
        found = device.capability()
        return None if found is None else DeviceCapability(*found)

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        """Whether the GPU has at least ``capability``: (major, minor) or an int like 120."""
        found = self.get_device_capability()
        if found is None:
            return False
        return found >= tuple(capability) if isinstance(capability, tuple) else found.to_int() >= capability

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        """Whether it is exactly ``capability``."""
        found = self.get_device_capability()
        if found is None:
            return False
        return found == tuple(capability) if isinstance(capability, tuple) else found.to_int() == capability

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        """Whether the major number is that of ``capability`` (120 for 12.x)."""
        found = self.get_device_capability()
        return found is not None and found.major == capability // 10

    def is_cuda(self) -> bool:
        """Whether there is a GPU at all."""
        return device.capability() is not None

    is_cuda_alike = is_cuda

    def fp8_dtype(self) -> torch.dtype:
        """OCP e4m3."""
        return torch.float8_e4m3fn

    def num_compute_units(self, device_id: int = 0) -> int:
        """Of an RTX PRO 6000."""
        return 188

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):  # is_rocm, is_xpu, is_fp8_fnuz, ...: another platform's question
            return lambda *_, **__: False
        raise UnknownFieldError(
            f"current_platform.{name}",
            "the adapter does not provide it",
            "Teach targets/vllm_stand_ins.py this commit's use of it.",
        )


class _MetadataBuilder:
    """Base of builders: keeps what it is given."""

    reorder_batch_threshold: int | None = None

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, threshold: int = 1, *_: Any, **__: Any) -> None:
        self.reorder_batch_threshold = threshold


class _Metadata:
    """Base of metadata classes."""

    def __class_getitem__(cls, item: object) -> type:
        return cls


def _split(common: Any, *_: Any, **__: Any) -> tuple[int, int, int, int]:
    """``split_decodes_and_prefills``: as the batch was made, whatever the threshold."""
    return common.split


def _compressed_slots(num_tokens: int, *_: Any, out: Any = None, **__: Any) -> Any:
    """``get_compressed_slot_mapping``: not judged, so left as it is."""
    return out


class _Logger:
    """Says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@cache
def stand_ins() -> Mapping[str, Mapping[str, Any]]:
    """Attributes by dotted name of the module they stand in for."""
    builders = {"AttentionMetadataBuilder": _MetadataBuilder, "AttentionMetadata": _Metadata}
    return {
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.platforms.interface": {"DeviceCapability": DeviceCapability},
        "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
        "vllm.logger": {"init_logger": lambda *_: _Logger()},
        "vllm.v1.attention.backend": builders,
        "vllm.v1.attention.backends.utils": {"split_decodes_and_prefills": _split, **builders},
        "vllm.v1.attention.backends.mla.compressor_utils": {
            "get_compressed_slot_mapping": _compressed_slots,
        },
        "vllm.model_executor.layers.attention.mla_attention": {
            "get_mla_dims": lambda *_: Fields("mla_dims", kv_lora_rank=512, qk_rope_head_dim=64)
        },
        "vllm.utils.import_utils": {"has_cutedsl": lambda: False},
        "vllm.utils.platform_utils": {"num_compute_units": lambda *_: 188},
        "vllm.utils.torch_utils": {
            "np_to_pinned_tensor": torch.from_numpy,
            "is_quantized_kv_cache": lambda dtype: dtype != "auto",
        },
    }


def configuration(rows: int, max_model_len: int) -> Fields:
    """A ``VllmConfig`` of DeepSeek-V4 on one GPU. ``rows``: of a batch; ``max_model_len``: tokens."""
    hf = Fields("hf_config", index_topk=_INDEX_TOPK, compress_ratios=[1, 4, 128], sliding_window=128)
    return Fields(
        "vllm_config",
        model_config=Fields(
            "model_config",
            max_model_len=max_model_len,
            hf_config=hf,
            hf_text_config=hf,
            dtype=torch.bfloat16,
            get_num_attention_heads=lambda *_: _HEADS,
        ),
        scheduler_config=Fields("scheduler_config", max_num_batched_tokens=rows, max_num_seqs=rows),
        cache_config=Fields("cache_config", cache_dtype="fp8_ds_mla", block_size=256),
        parallel_config=Fields(
            "parallel_config",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
            data_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        speculative_config=None,
    )


def cache_spec(block_size: int, compress_ratio: int) -> Fields:
    """The spec of the compressed cache: blocks of ``block_size`` entries of ``compress_ratio`` tokens."""
    return Fields(
        "kv_cache_spec",
        block_size=block_size * compress_ratio,
        storage_block_size=block_size,
        compress_ratio=compress_ratio,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
    )


@contextlib.contextmanager
def as_gpu() -> Iterator[None]:
    """Within it, torch answers a commit as on the pretended GPU: its capability, and pinned memory."""

    def capability(*_: Any, **__: Any) -> tuple[int, int]:
        found = device.capability()
        if found is None:
            raise RuntimeError("no CUDA GPU is available")
        return found

    with contextlib.ExitStack() as stack:
        if not device.cuda_available():
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", capability))
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self))
        yield
