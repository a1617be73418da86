"""The command ``preflight`` and its options. What it does is in ``tools.preflight``."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_options import JsonFlag

__all__ = ["preflight"]


def preflight(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model, or the path of a config.json.")
    ] = "deepseek-v4-flash",
    engine: Annotated[str, typer.Option(help="sglang or vllm (default: vllm; with --matrix both).")] = "",
    tp: Annotated[str, typer.Option(metavar="N", help="GPUs that share the heads.")] = "",
    dp: Annotated[int, typer.Option(help="Data-parallel ranks that share the batch.")] = 1,
    speculative: Annotated[str, typer.Option(metavar="SCHEME", help="none, mtp:K or dspark:K.")] = "",
    flashinfer: Annotated[
        str, typer.Option(metavar="VERSION", help="FlashInfer release (default: the one installed).")
    ] = "",
    backend: Annotated[
        str, typer.Option(help="flashinfer, sm120-mla, triton, reference or flashmla.")
    ] = "flashinfer",
    capability: Annotated[str, typer.Option(help="Of the GPU.")] = "12.0",
    max_batch: Annotated[int, typer.Option(help="Requests that decode at once.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens (default: the model's, 262144 at most).")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of the largest prefill step.")] = 8192,
    graph_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Captured batch sizes.")] = "",
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block (default: the engine's).")] = None,
    draft_width: Annotated[
        int | None, typer.Option(help="Columns of DSpark draft rows (default: the engine's).")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="CHANGE", help="A merged change the engine lacks.")
    ] = None,
    carrying: Annotated[
        list[str] | None, typer.Option("--with", metavar="CHANGE", help="An open change the engine has.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Versions and speculation against TP.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the matrix as Markdown.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Models, engines, versions and changes.")] = False,
    json: JsonFlag = False,
) -> None:
    """Say which kernel each attention launch reaches, or why none does, before a server starts.

    1 means that a launch has no route. Nothing is loaded, and no GPU is needed.
    """
    from .preflight import Asked, show_preflight

    asked = Asked(
        model=model,
        engine=engine,
        tp=tp,
        dp=dp,
        speculative=speculative,
        flashinfer=flashinfer,
        backend=backend,
        capability=capability,
        max_batch=max_batch,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        graph_sizes=graph_sizes,
        block_size=block_size,
        draft_width=draft_width,
        without=tuple(without or ()),
        carrying=tuple(carrying or ()),
    )
    raise typer.Exit(show_preflight(asked, json, matrix, markdown, names))
