"""Public reports as rows: preflight names what failed in the configuration, and lets the fix pass."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sm120_mla.preflight import engines, models
from sm120_mla.preflight.hazards import hazards, over_budget
from sm120_mla.preflight.judge import Report, Request, judge, preflight
from sm120_mla.preflight.launches import Setup, Speculation

WIDE_WINDOW = models.from_config(
    {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "sliding_window": 320,
        "index_topk": 512,
        "compress_ratios": [0, 0],
    },
    "window of 320",
)


def pooled(topk: int, kpool: int) -> models.Model:
    """A DSA model whose index rows get a tail of ``kpool - 1``."""
    config = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "index_topk": topk,
        "index_kpool": kpool,
    }
    return models.from_config(config, f"top-k {topk}, pool {kpool}")


@dataclass(frozen=True)
class Asked:
    """A configuration in the words of the command line; ``more`` are other fields of ``Setup``."""

    model: str | models.Model = "deepseek-v4-flash"
    engine: str = "vllm"
    tp: int = 1
    speculative: str = "none"
    flashinfer: str = "0.6.18"
    backend: str = "flashinfer"
    capability: tuple[int, int] = (12, 0)
    without: tuple[str, ...] = ()
    carrying: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def request(self) -> Request:
        model = models.by_name(self.model) if isinstance(self.model, str) else self.model
        setup = Setup(
            model=model,
            engine=engines.by_name(self.engine, self.without, self.carrying),
            tp=self.tp,
            speculation=Speculation.parse(self.speculative, model),
            flashinfer=self.flashinfer,
            **self.more,
        )
        return Request(setup, self.backend, self.capability)


@dataclass(frozen=True)
class Fault:
    """The launch that has no route: its kind and layer, rows, heads, and the argument with its value."""

    launch: str
    rows: int
    heads: int
    argument: str
    value: str
    state: str = "refused"
    says: str = ""


@dataclass(frozen=True)
class ReportRow:
    """``fixed``: the configuration with what mended it. ``change``: one that preflight must offer."""

    id: str
    link: str
    asked: Asked
    fault: Fault
    fixed: Asked
    change: str = ""


FI, VLLM, SGLANG = (
    "https://github.com/flashinfer-ai/flashinfer",
    "https://github.com/vllm-project/vllm",
    "https://github.com/sgl-project/sglang",
)
ELEVEN = {"max_batch": 11, "graph_sizes": (1, 10, 11)}
STRIDED = "128 of 2048 columns"
NARROW = Asked(tp=2, speculative="dspark:5", without=("vllm#53574",), more=ELEVEN)
DRAFT_256 = Asked(tp=2, speculative="dspark:7", flashinfer="0.6.14", without=("vllm#51538",))
SGLANG_192 = Asked(engine="sglang", tp=2, speculative="dspark:5", flashinfer="0.6.16")
WINDOW_320 = Asked(model=WIDE_WINDOW, speculative="dspark:5")
VISION = Asked(model="deepseek-v4-flash-vision", tp=4)
V41 = Asked(model="deepseek-v4.1-flash", tp=4, carrying=("vllm#56509",), more={"block": 128})
V41_WIDE = Asked(model="deepseek-v4.1-flash", without=("vllm#57152",), carrying=("vllm#56509",))
V41_SGLANG = Asked(model="deepseek-v4.1-flash", engine="sglang", tp=8, carrying=("sglang#35104",))
EIGHT = Asked(tp=8, flashinfer="0.6.17")

ROWS = (
    ReportRow(
        "B01",
        f"{VLLM}/pull/53574",
        NARROW,
        Fault(
            "verify C128A",
            66,
            32,
            "extra indices view",
            STRIDED,
            says="eidx must be contiguous",
        ),
        replace(NARROW, without=()),
        "vllm with vllm#53574",
    ),
    ReportRow(
        "B01, up to 64 rows",
        f"{VLLM}/pull/53574",
        NARROW,
        Fault("verify C128A", 60, 32, "extra indices view", STRIDED, "wrong", "nothing"),
        replace(NARROW, flashinfer="0.7.4", more={"max_batch": 10}),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "B01, in 0.7",
        f"{VLLM}/pull/53574",
        replace(NARROW, flashinfer="0.7.4"),
        Fault("verify C128A", 66, 32, "extra indices view", STRIDED, says="no decode kernel for this shape"),
        replace(NARROW, flashinfer="0.7.4", without=()),
        "vllm with vllm#53574",
    ),
    ReportRow(
        "B08",
        f"{VLLM}/pull/53969",
        Asked(model=pooled(2048, 4), tp=4),
        Fault("prefill DSA", 4096, 16, "indices width", "2176"),
        Asked(model=pooled(2044, 4), tp=4),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "C01, decode",
        f"{FI}/issues/3828",
        DRAFT_256,
        Fault("draft SWA", 7, 32, "indices width", "256", says="num_tokens <= 64"),
        replace(DRAFT_256, flashinfer="0.6.18"),
        "FlashInfer 0.6.18",
    ),
    ReportRow(
        "C01, prefill",
        f"{FI}/pull/3834",
        DRAFT_256,
        Fault("draft SWA", 128, 32, "indices width", "256", says="Unsupported sparse-MLA prefill"),
        replace(DRAFT_256, flashinfer="0.6.18"),
        "draft rows padded to 512 columns",
    ),
    ReportRow(
        "C01, 16 heads",
        f"{FI}/pull/3989",
        replace(DRAFT_256, tp=4),
        Fault("draft SWA", 14, 16, "indices width", "256"),
        replace(DRAFT_256, tp=4, flashinfer="0.6.18"),
    ),
    ReportRow(
        "C02",
        f"{FI}/issues/4541",
        WINDOW_320,
        Fault("draft SWA", 5, 64, "indices width", "384", says="no decode kernel for this shape"),
        replace(WINDOW_320, flashinfer="0.7.4"),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "C03",
        f"{SGLANG}/issues/33134",
        SGLANG_192,
        Fault("draft SWA", 5, 64, "indices width", "192"),
        replace(SGLANG_192, flashinfer="0.6.18"),
        "sglang with sglang#34717",
    ),
    ReportRow(
        "C03, the engine's own fix",
        f"{SGLANG}/pull/34717",
        replace(SGLANG_192, tp=4),
        Fault("draft SWA", 80, 64, "indices width", "192"),
        replace(SGLANG_192, tp=4, carrying=("sglang#34717",)),
    ),
    ReportRow(
        "C04",
        f"{FI}/issues/5135",
        VISION,
        Fault("prefill C4A", 4096, 16, "indices width", "512"),
        replace(VISION, flashinfer="0.7.4"),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "C06",
        f"{FI}/pull/5244",
        V41,
        Fault("prefill C1A", 4096, 16, "extra page size", "128"),
        replace(V41, flashinfer="0.7.4"),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "C07",
        f"{VLLM}/issues/56837",
        V41_WIDE,
        Fault("prefill C2A", 16, 64, "indices width", "1152", says="no decode kernel for this shape"),
        replace(V41_WIDE, flashinfer="0.7.4"),
        "vllm with vllm#57152",
    ),
    ReportRow(
        "C08",
        f"{VLLM}/issues/50720",
        replace(DRAFT_256, speculative="dspark:5"),
        Fault("draft SWA", 5, 32, "indices width", "256"),
        replace(DRAFT_256, speculative="dspark:5", backend="sm120-mla"),
        "backend sm120-mla",
    ),
    ReportRow(
        "C09",
        f"{SGLANG}/pull/38969",
        V41_SGLANG,
        Fault("prefill C2A", 4096, 8, "extra page size", "128"),
        replace(V41_SGLANG, carrying=("sglang#35104", "sglang#38969")),
        "sglang with sglang#38969",
    ),
    ReportRow(
        "C11",
        f"{SGLANG}/pull/35104",
        replace(EIGHT, engine="sglang", carrying=("sglang#35104",)),
        Fault("prefill C4A", 4096, 8, "heads", "8"),
        replace(EIGHT, engine="sglang"),
        "FlashInfer 0.6.18",
    ),
    ReportRow(
        "C11, before 0.6.14",
        f"{VLLM}/pull/48047",
        replace(EIGHT, flashinfer="0.6.13"),
        Fault("decode SWA", 1, 8, "flashinfer version", "0.6.13: has no SM120 kernels for sparse MLA"),
        replace(EIGHT, tp=4, flashinfer="0.6.14"),
        "FlashInfer 0.6.18",
    ),
    ReportRow(
        "D09",
        f"{VLLM}/issues/56702",
        replace(V41, carrying=()),
        Fault("decode SWA", 1, 16, "page size", "32"),
        replace(V41, carrying=(), flashinfer="0.7.4"),
    ),
    ReportRow(
        "D11",
        f"{SGLANG}/pull/39914",
        replace(V41_SGLANG, carrying=()),
        Fault("prefill C2A", 4096, 64, "extra page size", "128"),
        replace(V41_SGLANG, carrying=("sglang#39914",)),
        "sglang with sglang#39914",
    ),
    ReportRow(
        "D14",
        f"{FI}/pull/3395",
        replace(V41, carrying=()),
        Fault("prefill SWA", 4096, 16, "page size", "32", "wrong", "addresses every page as 64"),
        replace(V41, carrying=(), flashinfer="0.7.4"),
        "FlashInfer 0.7.1",
    ),
    ReportRow(
        "G01",
        f"{VLLM}/issues/45317",
        Asked(backend="flashmla", capability=(12, 1)),
        Fault("decode SWA", 1, 64, "capability", "12.1"),
        Asked(capability=(12, 1)),
        "backend flashinfer",
    ),
    ReportRow(
        "G08",
        f"{SGLANG}/issues/31578",
        Asked(engine="sglang", backend="flashmla"),
        Fault("prefill SWA", 4096, 64, "capability", "12.0"),
        Asked(engine="sglang"),
        "backend triton",
    ),
)


def lacking(report: Report, fault: Fault) -> list[tuple[object, ...]]:
    """Verdicts of the launches that a fault speaks of."""
    return [
        (row.launch.heads, row.verdict.argument, row.verdict.value, row.verdict.state, row.verdict.says)
        for row in report.rows
        if " ".join(row.launch.key) == fault.launch and row.launch.least <= fault.rows <= row.launch.most
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_launch_and_the_argument_at_fault_are_named(row: ReportRow) -> None:
    report = preflight(row.asked.request())
    fault = row.fault

    found = lacking(report, fault)
    assert found, [str(r.launch) for r in report.rows]
    for heads, argument, value, state, says in found:
        assert (heads, argument, value, state) == (fault.heads, fault.argument, fault.value, fault.state)
        assert fault.says in str(says)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_mended_it_passes(row: ReportRow) -> None:
    report = preflight(row.fixed.request())

    same = [r for r in report.rows if " ".join(r.launch.key) == row.fault.launch]
    assert same
    assert [str(r.launch) for r in same if not r.verdict] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.change], ids=lambda row: row.id)
def test_the_fix_is_among_the_changes(row: ReportRow) -> None:
    report = preflight(row.asked.request())

    what, layer = row.fault.launch.split()
    changes = dict(report.changes)[what, layer, row.fault.rows > 64]
    assert row.change in [change.text for change in changes]


# ---- reports of what a route does not tell


@dataclass(frozen=True)
class HazardRow:
    """``hazard``: its id; ``names``: words of its text. ``without``: a configuration that is free of it."""

    id: str
    link: str
    asked: Asked
    hazard: str
    names: tuple[str, ...]
    without: Asked


SPARK = "https://github.com/MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark/issues/141"
PAIR = Asked(tp=2, speculative="dspark:5", flashinfer="0.6.17", more={"draft_width": 512, "max_batch": 11})
LONG = Asked(model="deepseek-v4-flash-vision", flashinfer="0.7.4", more={"max_model_len": 1_048_576})

HAZARDS = (
    HazardRow(
        "B03",
        "https://github.com/eugr/spark-vllm-docker/issues/400",
        LONG,
        "c128a-assert",
        ("8,192", "8,194", "1,048,320"),
        replace(LONG, more={"max_model_len": 1_048_320}),
    ),
    HazardRow(
        "C10",
        SPARK,
        PAIR,
        "prefill-hang",
        ("verify C4A", "prefill SWA"),
        replace(PAIR, flashinfer="0.6.18"),
    ),
    HazardRow(
        "C10, 64 rows",
        SPARK,
        replace(PAIR, flashinfer="0.7.4"),
        "cutoff-64",
        ("verify C4A", "at most 10 requests"),
        replace(PAIR, more={"draft_width": 512, "max_batch": 10}),
    ),
    HazardRow(
        "C12",
        f"{FI}/issues/3700",
        Asked(flashinfer="0.6.14", capability=(12, 1)),
        "prefill-hang",
        ("0.6.18",),
        Asked(flashinfer="0.6.14", capability=(12, 1), more={"prefill_chunk": 64}),
    ),
    HazardRow(
        "C15",
        f"{VLLM}/issues/55526",
        Asked(tp=16),
        "jit-cache",
        ("flashinfer-jit-cache",),
        Asked(tp=16, backend="triton"),
    ),
    HazardRow(
        "E02",
        f"{SGLANG}/pull/39288",
        Asked(engine="sglang"),
        "page-zero",
        ("page split leaves that page as allocated",),
        Asked(engine="sglang", flashinfer="0.7.4"),
    ),
    HazardRow(
        "F03",
        f"{FI}/issues/4485",
        Asked(),
        "lse-base",
        ("base 2", "-1e30"),
        Asked(backend="sm120-mla"),
    ),
    HazardRow(
        "G03",
        f"{SGLANG}/pull/27962",
        Asked(engine="sglang"),
        "shared-memory",
        ("131,072", "101,376"),
        Asked(),
    ),
)


@pytest.mark.parametrize("row", HAZARDS, ids=lambda row: row.id)
def test_a_hazard_is_named_where_it_applies_and_nowhere_else(row: HazardRow) -> None:
    def of(asked: Asked) -> dict[str, str]:
        request = asked.request()
        found = hazards(request, preflight(request).rows)
        return {h.id: f"{h.text} {h.where} {h.remedy} {h.reference}" for h in found}

    assert row.hazard in of(row.asked)
    assert [word for word in row.names if word not in of(row.asked)[row.hazard]] == []
    assert row.hazard not in of(row.without)


def test_what_a_hopper_kernel_asks_for_does_not_fit() -> None:
    """G11, https://github.com/QwenLM/FlashQLA/issues/4: 192 KB on a DGX Spark."""
    assert over_budget(196_608, (12, 1))
    assert not over_budget(196_608, (9, 0))
    assert not over_budget(101_376, (12, 0))


def test_fewer_requests_are_no_way_out_where_their_launches_have_no_route() -> None:
    """8 heads above 64 rows and width 192 below: with at most 10 requests the drafts have width 192 still."""
    report = preflight(replace(EIGHT, speculative="dspark:5").request())
    above = dict(report.changes)["draft", "SWA", True]

    assert [change.text for change in above if change.kind == "batch"] == []
    assert [c.text for c in dict(report.changes)["verify", "C4A", True] if c.kind == "batch"]


def test_every_change_offered_gives_a_route() -> None:
    for row in ROWS:
        for (what, layer, many), changes in preflight(row.asked.request()).changes:
            for change in changes:
                after = [r for r in judge(change.apply()) if r.launch.key == (what, layer)]
                same = [r for r in after if (r.launch.most > 64) == many] or after
                assert [str(r.launch) for r in same if not r.verdict] == [], (row.id, change.text)


def test_enough_reports_of_each_class() -> None:
    reports = {row.id.split(",")[0] for row in ROWS} | {row.id.split(",")[0] for row in HAZARDS} | {"G11"}

    assert len([one for one in reports if one[0] in "BCG"]) >= 15
    assert {one[0] for one in reports} >= {"B", "C", "G"}
