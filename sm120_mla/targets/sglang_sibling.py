"""The sibling site: sglang's ``flashinfer_cutedsl.py`` makes its persistent buffers lazily, too.

``ensure_cutedsl_wrapper(layer)`` builds FlashInfer's CuteDSL MoE wrapper at the first forward, which
usually is the autotune run under inference mode. Here a stand-in takes the wrapper's place, which allocates
as its constructor does, and the tree's function decides in which mode that happens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .base import AbsentError
from .checkout import Checkout
from .tree_tensors import tensors_of

__all__ = ["STAND_INS", "Sibling"]

FILE, FUNCTION = "flashinfer_cutedsl.py", "ensure_cutedsl_wrapper"

STAND_INS: dict[str, dict[str, Any]] = {
    "sglang.srt.server_args": {"get_global_server_args": lambda: _server_args()},
    "sglang.srt.model_executor.cuda_graph_config": {"cuda_graph_fully_disabled": lambda: False},
    "sglang.srt.utils.common": {
        "log_info_on_rank0": lambda *_, **__: None,
        "print_warning_once": lambda *_, **__: None,
    },
}
"""What the function asks of its engine when it is called."""

_EXPERTS, _TOKENS, _HIDDEN = 2, 4, 8


def _server_args() -> Any:
    return SimpleNamespace(
        disable_cuda_graph=False,
        cuda_graph_max_bs=_TOKENS,
        chunked_prefill_size=_TOKENS,
        dp_size=1,
        cutedsl_moe_max_num_tokens=lambda: _TOKENS,
    )


class _Wrapper:
    """Stands for flashinfer's ``CuteDslMoEWrapper``: its constructor allocates the graph's buffers."""

    def __init__(self, *_: Any, use_cuda_graph: bool = True, **__: Any) -> None:
        if use_cuda_graph:
            self.output = torch.empty(_TOKENS, _HIDDEN, dtype=torch.bfloat16)
            self.workspace = torch.empty(_TOKENS * _HIDDEN, dtype=torch.uint8)


class _Anything:
    """An enumeration of which every member is wanted only by name."""

    def __getattr__(self, name: str) -> str:
        return name


class Sibling:
    """The lazily built wrapper of one tree. ``present``: whether the tree has the function."""

    def __init__(self, tree: Checkout) -> None:
        self._tree = tree
        self.path = tree.find(FILE, ("srt/layers/moe/moe_runner",), defines=FUNCTION)
        self._layer: Any = None
        self.problem = ""
        """Why it could not be exercised."""

    @property
    def present(self) -> bool:
        """Whether the tree has it."""
        return self.path is not None

    def touch(self) -> None:
        """What a forward does to it: the first one makes the buffers, later ones find them.

        A function that asks for something unknown to this stand-in is noted in ``problem``, once.
        """
        if self.path is None or self.problem:
            return
        if self._layer is None:
            self._layer = _layer()
        flashinfer = {"CuteDslMoEWrapper": _Wrapper, "ActivationType": _Anything()}
        try:
            function = self._tree.attribute(self.path, FUNCTION)
            with self._tree.active(), self._tree.standing_in("flashinfer", flashinfer):
                self._give_server_args()
                function(self._layer)
        except AbsentError:
            raise
        except Exception as error:
            self.problem = f"{FUNCTION} could not be exercised: {type(error).__name__}: {error}"

    def _give_server_args(self) -> None:
        """Where the engine keeps its arguments in the runtime context, which here has none."""
        name = "sglang.srt.runtime_context"
        if self._tree.source_of(name) is None:
            return
        with self._tree.active():
            context = self._tree.optional_module(name)
            if context is not None and "get_server_args" in vars(context):
                vars(context)["get_server_args"] = _server_args

    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers of the wrapper. Constants cached beside it are no buffers: see ``lazy_scan``."""
        wrapper = getattr(self._layer, "_cutedsl_wrapper", None)
        return {} if wrapper is None else tensors_of(vars(wrapper), "cutedsl_wrapper")

    def forget(self) -> None:
        """As a new process."""
        self._layer = None


def _layer() -> Any:
    with torch.inference_mode(False):
        ones = torch.ones(_EXPERTS)
        return SimpleNamespace(
            num_experts=_EXPERTS,
            num_local_experts=_EXPERTS,
            moe_ep_rank=0,
            top_k=1,
            hidden_size=_HIDDEN,
            intermediate_size_per_partition=_HIDDEN,
            moe_runner_config=SimpleNamespace(params_dtype=torch.bfloat16, activation="silu", top_k=1),
            dispatcher=None,
            w13_weight=torch.zeros(_EXPERTS, 2 * _HIDDEN, _HIDDEN),
            w2_weight=torch.zeros(_EXPERTS, _HIDDEN, _HIDDEN),
            w13_input_scale_quant=ones.clone(),
            w2_input_scale_quant=ones.clone(),
            w13_weight_scale_2=ones.clone(),
            w2_weight_scale_2=ones.clone(),
            g1_alphas=ones.clone(),
            g2_alphas=ones.clone(),
        )
