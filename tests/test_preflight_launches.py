"""Launches of a configuration: widths as the engines compute them, and laws that hold for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120_mla.contract import DECODE_MAX_ROWS
from sm120_mla.envelopes import NOT_SERVED, VERSIONS, Plan, for_version, plan
from sm120_mla.errors import ArgumentError
from sm120_mla.preflight import engines, models
from sm120_mla.preflight.handed import handed
from sm120_mla.preflight.judge import Request, judge, preflight
from sm120_mla.preflight.launches import Launch, Setup, Speculation, graph_batches, launches

FLASH = models.by_name("deepseek-v4-flash")


def made(
    engine: str = "vllm", model: str = "deepseek-v4-flash", speculative: str = "none", **more: Any
) -> Setup:
    names = {"without": more.pop("without", ()), "carrying": more.pop("carrying", ())}
    row = models.by_name(model)
    rules = engines.by_name(engine, **names)
    return Setup(row, rules, speculation=Speculation.parse(speculative, row), **more)


def of(setup: Setup, what: str, layer: str, many: bool = False) -> Launch:
    return next(n for n in launches(setup) if n.side == (what, layer, many))


# ---- widths, rows, heads and pages of one configuration


@pytest.mark.parametrize(
    ("engine", "without", "speculative", "width"),
    [
        ("sglang", (), "dspark:5", 192),
        ("vllm", (), "dspark:5", 192),
        ("vllm", (), "dspark:7", 192),
        ("vllm", (), "dspark:64", 192),
        ("vllm", (), "dspark:65", 256),
        ("vllm", ("vllm#51538",), "dspark:5", 256),
        ("vllm", ("vllm#51538",), "dspark:129", 384),
    ],
)
def test_draft_rows(engine: str, without: tuple[str, ...], speculative: str, width: int) -> None:
    drafts = [
        n for n in launches(made(engine, speculative=speculative, without=without)) if n.what == "draft"
    ]
    assert {n.main.widths for n in drafts} == {(width,)}


def test_an_engine_that_widens_draft_rows() -> None:
    assert of(
        made("sglang", speculative="dspark:5", carrying=("sglang#34717",)), "draft", "SWA"
    ).main.widths == (512,)


def test_rows_of_a_request() -> None:
    setup = made(speculative="dspark:5", max_batch=20, graph_sizes=(1, 10, 16))
    found = {(n.phase, n.what, n.least, n.most) for n in launches(setup) if n.layer == "SWA"}

    assert found == {
        ("warm-up", "prefill", 1, 16),
        ("warm-up", "verify", 6, 6),
        ("warm-up", "draft", 5, 5),
        ("capture", "verify", 6, 60),
        ("capture", "verify", 96, 96),
        ("capture", "draft", 5, 50),
        ("capture", "draft", 80, 80),
        ("serving", "verify", 102, 120),
        ("serving", "draft", 85, 100),
        ("serving", "prefill", 1, 64),
        ("serving", "prefill", 65, 8192),
    }


def test_an_mtp_step_extends_by_what_was_verified() -> None:
    setup = made(speculative="mtp:2", max_batch=4, graph_sizes=(4,))
    draft = of(setup, "draft", "SWA")

    assert (draft.least, draft.most, draft.main.widths) == (3, 3, (128,))
    assert [n.most for n in launches(setup) if n.what == "draft"] == [3, 12]


@pytest.mark.parametrize(
    ("engine", "carrying", "release", "tp", "few", "many"),
    [
        ("vllm", (), "0.6.18", 1, 64, 64),
        ("vllm", (), "0.6.18", 16, 8, 8),
        ("sglang", (), "0.6.18", 4, 16, 64),
        ("sglang", (), "0.6.18", 16, 64, 64),
        ("sglang", (), "0.7.4", 16, 4, 64),
        ("sglang", (), "0.6.13", 4, 64, 64),
        ("sglang", ("sglang#35104",), "0.6.18", 4, 16, 16),
    ],
)
def test_heads(engine: str, carrying: tuple[str, ...], release: str, tp: int, few: int, many: int) -> None:
    setup = made(engine, carrying=carrying, flashinfer=release, tp=tp)

    assert of(setup, "prefill", "C4A").heads == few
    assert of(setup, "prefill", "C4A", many=True).heads == many


def test_sixteen_heads_at_the_least_once() -> None:
    assert of(made(tp=8, without=("vllm:8-heads",)), "decode", "SWA").heads == 16


@pytest.mark.parametrize(
    ("engine", "layer", "page", "pool", "extra"),
    [
        ("vllm", "C4A", 64, 64, 64),
        ("vllm", "C128A", 64, 64, 2),
        ("sglang", "C4A", 64, 256, 64),
        ("sglang", "C128A", 64, 256, 2),
    ],
)
def test_pages(engine: str, layer: str, page: int, pool: int, extra: int) -> None:
    launch = of(made(engine), "decode", layer)

    assert (launch.main.page, launch.main.pool_page) == (page, pool)
    assert launch.extra is not None
    assert (launch.extra.page, launch.extra.pool_page) == (extra, extra)


def test_the_second_cache_of_c128a() -> None:
    decode, prefill = (of(made(max_model_len=100_000), what, "C128A").extra for what in ("decode", "prefill"))
    narrow = of(made(max_model_len=100_000, without=("vllm#53574",)), "decode", "C128A").extra
    pages = of(made("sglang", max_model_len=100_000), "decode", "C128A").extra

    assert decode is not None
    assert (decode.widths, decode.row_stride) == ((896,), 0)  # 782 groups in units of 128
    assert prefill is not None
    assert (prefill.widths, prefill.row_stride) == ((128, 256, 512, 896), 0)
    assert narrow is not None
    assert (narrow.widths, narrow.row_stride) == ((128, 256, 512, 896), 896)
    assert pages is not None
    assert pages.widths == (64, 832)  # 391 blocks of 2, in units of 64


def test_a_short_context_has_one_width_and_is_dense() -> None:
    narrow = of(made(max_model_len=8192, without=("vllm#53574",)), "decode", "C128A").extra
    assert narrow is not None
    assert (narrow.widths, narrow.row_stride) == ((128,), 0)


def test_images_widen_prefill_rows_only() -> None:
    vision = made(model="deepseek-v4-flash-vision")
    newer = "deepseek-v4.1-flash"

    assert of(vision, "prefill", "C4A").main.widths == (512,)
    assert of(vision, "decode", "C4A").main.widths == (128,)
    assert of(made(model=newer), "prefill", "C1A").main.widths == (128,)
    assert of(made(model=newer, without=("vllm#57152",)), "prefill", "C1A").main.widths == (1152,)


def test_pages_of_v41() -> None:
    vllm, sglang = made(model="deepseek-v4.1-flash", block=128), made("sglang", model="deepseek-v4.1-flash")
    pages = {
        (setup.engine.name, layer): (launch.main.page, launch.extra and launch.extra.page)
        for setup in (vllm, sglang)
        for layer in ("C1A", "C2A")
        for launch in [of(setup, "decode", layer)]
    }

    assert pages == {
        ("vllm", "C1A"): (32, 128),
        ("vllm", "C2A"): (32, 64),
        ("sglang", "C1A"): (64, 256),
        ("sglang", "C2A"): (64, 128),
    }


def test_dsa_has_one_cache() -> None:
    launch = of(made(model="glm-5", tp=4), "decode", "DSA")

    assert (launch.layout, launch.heads, launch.main.widths, launch.extra) == ("dsv32", 16, (2048,), None)


def test_where_one_change_is_not_enough_two_are_named() -> None:
    """sglang hands no DeepSeek-V3.2 to FlashInfer, and 0.6.13 has no kernel for it."""
    report = preflight(Request(made("sglang", model="deepseek-v3.2", flashinfer="0.6.18")))
    older = preflight(Request(made("sglang", model="deepseek-v3.2", flashinfer="0.6.13")))

    assert {row.verdict.argument for row in report.rows} == {"model"}
    assert [change.text for change in report.whole] == ["vllm instead"]
    assert "FlashInfer 0.6.14 and vllm instead" in [change.text for change in older.whole]
    assert preflight(Request(made("sglang", model="glm-5"))).ok


def test_another_gpu() -> None:
    direct, own = (judge(Request(made(), backend, (9, 0))) for backend in ("flashinfer", "sm120-mla"))

    assert {(row.verdict.argument, row.verdict.value) for row in direct} == {("capability", "9.0")}
    assert {row.verdict.route for row in own} == {"triton"}


def test_this_project_pads_and_splits_for_flashinfer() -> None:
    setup = made("sglang", speculative="dspark:5", flashinfer="0.6.14")
    routes = {
        (row.launch.what, row.launch.layer): row.verdict.route for row in judge(Request(setup, "sm120-mla"))
    }

    assert routes["draft", "SWA"] == "flashinfer prefill, padded to 512, split"
    assert routes["verify", "C4A"] == "flashinfer prefill, split"


def test_graph_batches() -> None:
    assert graph_batches(made(max_batch=48)) == (1, 2, 4, 8, 16, 32, 48)
    assert graph_batches(made(max_batch=1)) == (1,)
    assert graph_batches(made(max_batch=8, dp=2)) == (1, 2, 4)
    assert graph_batches(made(max_batch=9, dp=2)) == (1, 2, 4, 5)
    assert graph_batches(made(max_batch=8, graph_sizes=(8, 2))) == (2, 8)
    assert graph_batches(made(max_batch=8, graph_sizes=(16, 4, 4))) == (4,)


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        ({"tp": 3}, "tp"),
        ({"max_batch": 0}, "max-batch"),
        ({"graph_sizes": (0,)}, "graph-sizes"),
        ({"block": 32}, "block-size"),
        ({"block": 100}, "block-size"),
        ({"speculative": "dspark:5", "draft_width": 132}, "draft width"),
        ({"engine": "sglang", "model": "deepseek-v4.1-flash", "block": 96}, "block-size"),
    ],
    ids=str,
)
def test_what_no_engine_could_start(more: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        made(**more)
    assert error.value.argument == argument


@pytest.mark.parametrize("text", ["dspark", "dspark:0", "none:3", "eagle:2", "mtp:x", ""])
def test_a_scheme_that_there_is_not(text: str) -> None:
    with pytest.raises(ArgumentError):
        Speculation.parse(text)


def test_schemes() -> None:
    assert Speculation.parse("dspark", FLASH) == Speculation("dspark", 5)
    assert str(Speculation.parse(" MTP ")) == "mtp:1"
    assert str(Speculation()) == "none"


def test_changes_of_an_engine() -> None:
    for change in engines.CHANGES:
        option = {"without": (change.name,)} if change.merged else {"carrying": (change.name,)}
        assert engines.by_name(change.engine, **option) != engines.by_name(change.engine)
    with pytest.raises(ArgumentError, match="it is merged"):
        engines.by_name("vllm", carrying=("vllm#53574",))
    with pytest.raises(ArgumentError, match="it is not merged"):
        engines.by_name("sglang", without=("sglang#35104",))
    with pytest.raises(ArgumentError, match="a change of vllm"):
        engines.by_name("vllm", without=("sglang#35104",))
    with pytest.raises(ArgumentError, match="change = 'x'"):
        engines.by_name("vllm", without=("x",))
    with pytest.raises(ArgumentError, match="engine = 'x'"):
        engines.by_name("x")


# ---- laws


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    model = draw(st.sampled_from(models.MODELS))
    name = draw(st.sampled_from([engine.name for engine in engines.ENGINES]))
    chosen = draw(st.sets(st.sampled_from([c for c in engines.CHANGES if c.engine == name]), max_size=3))
    rules = engines.by_name(
        name, [c.name for c in chosen if c.merged], [c.name for c in chosen if not c.merged]
    )
    scheme = draw(st.sampled_from(("none", "mtp", "dspark")))
    tokens = draw(st.integers(1, 16)) if scheme != "none" else 0
    return Setup(
        model=model,
        engine=rules,
        tp=draw(st.sampled_from((1, 2, 4, 8, 16))),
        dp=draw(st.integers(1, 4)),
        max_batch=draw(st.integers(1, 300)),
        max_model_len=draw(st.integers(1, 1_100_000)),
        speculation=Speculation(scheme, tokens),
        prefill_chunk=draw(st.integers(1, 20_000)),
        graph_sizes=draw(st.none() | st.lists(st.integers(1, 300), max_size=4).map(tuple)),
        block=draw(st.sampled_from((None, 128, 256))),
        flashinfer=draw(st.sampled_from((*VERSIONS, *NOT_SERVED))),
    )


@given(setup=setups())
def test_a_row_holds_what_can_count(setup: Setup) -> None:
    for launch in launches(setup):
        assert 1 <= launch.least <= launch.most
        assert (launch.least > DECODE_MAX_ROWS) == (launch.most > DECODE_MAX_ROWS)
        assert launch.heads >= setup.local_heads
        assert min(launch.main.widths) >= launch.counts > 0
        if launch.extra is None:
            continue
        if launch.layer == "C128A":
            assert max(launch.extra.widths) >= setup.max_model_len // 128
        else:
            assert min(launch.extra.widths) >= setup.model.index_topk
        assert launch.extra.row_stride == 0 or launch.extra.row_stride >= max(launch.extra.widths)


@given(setup=setups(), more=st.integers(1, 200))
def test_a_larger_batch_has_all_launches_of_a_smaller(setup: Setup, more: int) -> None:
    def reach(of_setup: Setup) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for launch in launches(of_setup):
            found[launch.key] = max(found.get(launch.key, 0), launch.most)
        return found

    small, large = reach(setup), reach(replace(setup, max_batch=setup.max_batch + more))
    assert small.keys() <= large.keys()
    assert all(large[key] >= small[key] for key in small)


@given(setup=setups())
def test_every_request_is_covered(setup: Setup) -> None:
    per = 1 + setup.speculation.tokens
    what = "verify" if setup.speculation.tokens else "decode"
    most = max((n.most for n in launches(setup) if n.what == what), default=0)

    assert most >= setup.local_batch * per
    assert max(n.most for n in launches(setup) if n.what == "prefill") == max(
        setup.prefill_chunk, min(setup.engine.warm_up_rows, setup.prefill_chunk)
    )


@settings(max_examples=60)
@given(setup=setups(), capability=st.sampled_from(((12, 0), (12, 1), (9, 0))))
def test_what_has_no_route_names_an_argument_and_a_change_that_gives_it_one(
    setup: Setup, capability: tuple[int, int]
) -> None:
    report = preflight(Request(setup, capability=capability))
    for row in report.rows:
        if row.verdict:
            assert row.verdict.route
            continue
        assert row.verdict.argument
        assert row.verdict.value
        assert row.verdict.expected
        remedies = report.remedies(row.launch)
        assert remedies, (str(row.launch), row.verdict)
        for change in remedies:
            after = judge(change.apply())
            assert [r.verdict for r in after if r.launch.side == row.launch.side and not r.verdict] == []
    for change in report.whole:
        assert all(row.verdict for row in judge(change.apply())), change.text


@given(setup=setups(), backend=st.sampled_from(("sm120-mla", "triton", "reference")))
def test_this_project_serves_every_launch_of_deepseek_v4(setup: Setup, backend: str) -> None:
    for row in judge(Request(setup, backend)):
        if row.launch.layout == "dsv4":
            assert row.verdict, (str(row.launch), row.verdict)
        else:
            assert row.verdict.argument == "layout"


@given(setup=setups(), release=st.sampled_from(tuple(VERSIONS)), public=st.booleans())
def test_what_passes_as_it_is_passes_unpadded_through_this_project(
    setup: Setup, release: str, public: bool
) -> None:
    """The two encodings of the tables agree: what FlashInfer takes, the plan leaves as it is."""
    for launch in launches(setup):
        if launch.layout != "dsv4" or not handed(release, launch, public):
            continue
        cache = [_Numbers(c.page, max(c.widths)) for c in (launch.main, launch.extra) if c is not None]
        call = _Call(launch.most, launch.heads, cache[0], cache[1] if len(cache) > 1 else None)
        served = plan(for_version(release), call)
        assert isinstance(served, Plan), (str(launch), served)
        # 0.7 takes any width up to 64 rows as it is; the plan keeps to whole tiles there as well.
        assert served.main_width == -(-call.main.width // 64) * 64
        assert not served.split_main


class _Numbers:
    def __init__(self, page_size: int, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.pages, self.page_stride, self.lane_bytes = 1, page_size * 584, 16


class _Call:
    layout = "dsv4"
    scale = 512**-0.5

    def __init__(self, tokens: int, heads: int, main: _Numbers, extra: _Numbers | None) -> None:
        self.tokens, self.heads, self.main, self.extra = tokens, heads, main, extra
