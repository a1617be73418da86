"""The benchmarks up to the GPU: what they time, what their bytes are, and how they print."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from sm120_mla import device
from sm120_mla.errors import ArgumentError
from sm120_mla.tools import (
    bench,
    bench_attention,
    bench_metadata,
    bench_split,
    bench_timing,
    cli,
    exits,
)
from sm120_mla.tools.bench_timing import BenchCase, Row, floor_us


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Everything but the launches, on the CPU: the numbers of calls that would have been timed."""
    timed: list[int] = []

    def time_graph(calls):
        timed.append(len(calls))
        return 2.0, 1.0

    monkeypatch.setattr(bench_timing, "DEVICE", "cpu")
    monkeypatch.setattr(bench_timing, "time_graph", time_graph)
    monkeypatch.setattr(bench_timing, "copy_times", lambda source: ("eagerly", (4.0, 3.0)))
    monkeypatch.setattr(bench_attention, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(bench_attention, "_calls", lambda case, buffers: [case])
    monkeypatch.setattr(bench_split, "PAGES", 256)
    for module in (bench_split, bench_metadata, bench_attention):
        monkeypatch.setattr(module, "require_cuda", lambda: None)
        monkeypatch.setattr(module, "CALLS", 1)
    return timed


def test_the_cases_are_those_of_the_design() -> None:
    listed = {case["name"]: case["target_us"] for case in bench.listing()}

    assert listed["sparse decode, 64 heads, 64 rows, 128+512 entries"] == 44
    assert listed["sparse decode, 64 heads, 1 row, 128+512 entries"] == 13
    assert listed["sparse decode, 128 heads, 128 rows, 128+512 entries"] == 80
    assert listed["touched: 2 pages, all 4 sub-pages, 1 row x 128"] == 4
    assert len(listed) == len(bench.listing())
    assert {case["group"] for case in bench.listing()} == {"split", "metadata", "attention"}


@pytest.mark.parametrize("group", bench.GROUPS)
def test_every_case_of_a_group_is_measured_in_order(group: str, no_clock: list[int]) -> None:
    module = bench.GROUPS[group]

    rows = module.measure()

    assert [row.name for row in rows] == [case.name for case in module.CASES]
    assert [row.target_us for row in rows] == [case.target_us for case in module.CASES]
    assert all(row.median_us in (2.0, 4.0) for row in rows)


def test_the_bytes_of_a_decode() -> None:
    [one] = [case for case in bench_attention.CASES if case.rows == 1]
    [many] = [case for case in bench_attention.CASES if (case.heads, case.rows) == (64, 64)]

    assert one.entries == 640
    assert one.needed_bytes == 640 * (584 + 4) + 2 * 64 * 512 * 2
    assert many.needed_bytes == 64 * one.needed_bytes
    assert bench_attention.CASES[2].needed_bytes == 128 * (640 * 588 + 2 * 128 * 512 * 2)


def test_a_decode_is_timed_twice_and_as_sm120_is_served(
    no_clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        bench_timing, "time_graph", lambda calls: asked.append(device.capability()) or (len(asked), 1.0)
    )
    with device.pretend_device((9, 0)):
        [first, *_] = bench_attention.measure()

    assert asked == [(9, 0), (12, 0)] * 3
    assert (first.median_us, first.sm120_us) == (1, 2)
    assert first.note.startswith("here ")
    assert "; SM120 " in first.note


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_on_sm120_there_is_no_second_time(no_clock: list[int], capability: tuple[int, int]) -> None:
    with device.pretend_device(capability):
        rows = bench_attention.measure()

    assert len(no_clock) == len(rows) == 3
    assert all(row.sm120_us == row.median_us for row in rows)


def test_the_plan_named_is_that_of_the_capability() -> None:
    case = bench_attention.CASES[1]
    chosen = bench_attention.triton_backend.plan(64, 64, (128, 512), (12, 0), interpreted=False)

    text = bench_attention.plan_text(case, (12, 0))

    assert text == f"{chosen.config.block_h}x{chosen.config.block_n}, {chosen.splits} parts"
    assert text != bench_attention.plan_text(case, (9, 0))


def test_scratch_is_written_and_read(no_clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench_attention.CASES[0]
    monkeypatch.setattr(bench_attention, "_time", lambda case, pretended: ((2.0, 1.0), 1000))

    row = bench_attention._measure(case, (4.0, 3.0))

    assert row.bytes_moved == case.needed_bytes + 2000
    assert row.gbps == pytest.approx(row.bytes_moved / 2.0 / 1e3)
    assert row.floor_us == pytest.approx(case.needed_bytes * 4.0 / (2 * (1 << 20)))


def test_the_floor_is_the_rate_of_a_copy() -> None:
    assert floor_us(1000, 500, 7.0) == 7.0  # a copy of 500 bytes reads and writes 1,000
    assert floor_us(10, 500, 7.0) == pytest.approx(0.07)


def test_a_call_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "DEVICE", "cpu")
    small = bench_attention.AttentionCase(
        "x", None, 8, 2, bench_attention.Pool(256, 2, 64), bench_attention.Pool(64, 2, 64)
    )
    monkeypatch.setattr(bench_attention, "CALLS", 1)
    buffers = bench_attention.PersistentBuffers()

    [call] = bench_attention._calls(small, buffers)
    out = call()

    assert out.shape == (2, 8, 512)
    assert out.isfinite().all()
    assert out.abs().max() > 0


def render(rows: list[Row]) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(bench.table(rows, "title"))
    return out.getvalue()


def test_the_table_has_the_columns_that_have_figures() -> None:
    plain = bench_timing.row(BenchCase("a thing"), (2.5, 2.25), 0)
    full = bench_timing.row(
        BenchCase("another", 44), (50.0, 49.0), 100_000_000, "n", floor_us=7.6, sm120_us=81
    )

    assert "floor us" not in render([plain])
    text = render([plain, full])
    for part in ("median us", "2.50", "2.25", "floor us", "7.60", "target us", "44", "SM120 us", "81.00"):
        assert part in text
    assert "100.00" in text  # MB
    assert "2,000" in text  # GB/s: 100 MB in 50 us


def test_a_row_is_data() -> None:
    row = bench_timing.row(BenchCase("a", 4), (2.0, 1.0), 4000)

    assert json.loads(json.dumps(row.as_dict())) == {
        "name": "a",
        "median_us": 2.0,
        "best_us": 1.0,
        "bytes_moved": 4000,
        "gbps": 2.0,
        "note": "",
        "target_us": 4,
        "floor_us": None,
        "sm120_us": None,
    }


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--list", "--only", "attention"]) == exits.HELD

    assert capsys.readouterr().out.splitlines() == [
        "attention: sparse decode, 64 heads, 1 row, 128+512 entries (target 13 us)",
        "attention: sparse decode, 64 heads, 64 rows, 128+512 entries (target 44 us)",
        "attention: sparse decode, 128 heads, 128 rows, 128+512 entries (target 80 us)",
    ]
    assert cli.run(["bench", "--list", "--json"]) == exits.HELD
    assert json.loads(capsys.readouterr().out) == bench.listing()


def test_without_a_gpu_nothing_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_timing.torch.cuda, "is_available", lambda: False)

    assert cli.run(["bench"]) == exits.NOTHING_JUDGED
    assert "no CUDA GPU" in capsys.readouterr().err
    assert cli.run(["bench", "--only", "everything"]) == exits.WRONG_USE
    with pytest.raises(ArgumentError, match="split, metadata, attention"):
        bench.show_bench(False, ("x",))
