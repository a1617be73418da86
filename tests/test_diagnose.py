"""Known failures: every signature finds what it is for and nothing ordinary; logs are read as a stream."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sm120_mla import settings
from sm120_mla.known_failures import CLASSES, FAILURES, KnownFailure, Strength, match
from sm120_mla.known_failures.match import diagnose
from sm120_mla.known_failures.row import likely, named, symptom
from sm120_mla.testing import invariants, verdict
from sm120_mla.tools import cli, exits
from sm120_mla.tools.diagnose import show_diagnosis, show_known

ORDINARY = Path(__file__).parent / "logs" / "ordinary.txt"
BY_ID = {failure.id: failure for failure in FAILURES}

PLANNED = {"ROUTE-TOTAL", "ROUTE-CONTRACT", "MIRROR-COHERENT"}
"""Invariants of the design that need not be registered yet."""

ALSO = {
    "c-eight-heads": {"c-extra-page"},
}
"""Rows that match another row's example too, besides the rule that it narrows."""

LINES = {
    "a-warmup-misses-width": ["INFO: No tuned config covers sparse_mla_sm120_decode_dsv4 at this shape"],
    "a-forbidden-in-capture": ["RuntimeError: cudaErrorStreamCaptureInvalidated"],
    "b-wrong-dtype": [
        "RuntimeError: Inconsistency of Tensor type: etl",
        "ValueError: SM120 DSv4 sparse MLA only supports BF16 query, got torch.float16",
    ],
    "b-index-rows": [
        "ValueError: Expected sparse_mla_segments[0].indices.shape == (8, 6, 128), got (8, 5, 128)"
    ],
    "b-not-contiguous": [
        "RuntimeError: kv_cachemust be contiguous at last dimension",
        "RuntimeError: etl must be contiguous",
    ],
    "b-topk-buffer-width": ["ValueError: block_tables (B, 1, 2176) but sparse_mla_top_k is 2048"],
    "c-decode-falls-through": ["    Check failed: num_tokens > 64 (7 vs. 64)"],
    "c-no-prefill-kernel": ["Unsupported sparse-MLA prefill configuration: cut off here"],
    "c-no-decode-kernel": ["SM120 sparse-MLA has no decode kernel for this shape: cut off here"],
    "c-width-192": [
        "SM120 sparse-MLA has no decode kernel for this shape: num_tokens=5, num_heads=32, topk=192, d_qk=512"
    ],
    "c-width-256": [
        "SM120 sparse-MLA has no decode kernel for this shape: num_tokens=5, num_heads=32, topk=256, d_qk=512"
    ],
    "c-width-1152": ["Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=64 topk=1152 page"],
    "c-main-page": [
        "Unsupported sparse-MLA prefill configuration: model=DSV3_2 num_heads=64 topk=2048 page_block_size=32"
    ],
    "c-hang-beyond-64-rows": [
        "[2026-09-01 TP0] Scheduler watchdog timeout (watchdog_timeout=300, soft=False)",
        "shm_broadcast.py:701 in acquire_read: cancelled",
        'shm_broadcast.py RuntimeError("cancelled")',
    ],
    "d-indexer-page": ["Assertion error (csrc/apis/attention.hpp:301): block_kv == 64"],
    "d-not-packed": [
        "ValueError: kv_cache last dim must be 584, got 656",
        "ValueError: kv_cache 2-D block width 37440 is not divisible by 584 bytes/token",
    ],
    "e-block-table-bound": ["RuntimeError: CUDA error: device-side assert triggered"],
    "e-zero-query-rows": ["Error: Failed to initialize the TMA descriptor 1"],
    "f-nan-logits": ["ValueError: Out of range float values are not JSON compliant: nan"],
    "f-scale-arguments": ["SM120/SM121 DSv4 sparse MLA expects bmm1_scale to be a float"],
    "g-dynamic-shared-memory": ["cannot set dynamic shared memory size to 196608"],
    "g-arch-suffix": ["error: Feature '.block_scale' requires .target sm_120a or higher"],
    "g-deepgemm-arch": [
        "csrc/apis/attention.hpp:301: device.get_arch_major() == 10",
        "DeepGEMM only supports Hopper (SM90) architectures, but current device compute capability is 120.",
    ],
    "g-dot-scaled": ["error: RuntimeError: PassManager::run failed (compute-capability=120)"],
    "h-no-triton-driver": ["Triton is installed but 2 active driver(s) found (expected 1)."],
    "h-workers-share-a-gpu": ["worker 'gw3' crashed while running 'property_tests/test_page_split.py'"],
    "i-mixed-flashinfer": ["flashinfer-cubin : 0.6.13  MISMATCH vs flashinfer-python==0.6.15"],
    "i-stale-extension": ["ImportError: libcudart.so.13: cannot open shared object file: No such file"],
}
"""Further lines that a row is for: with the examples they exercise every pattern."""


def ids(text: str | bytes) -> list[str]:
    raw = text.encode() if isinstance(text, str) else text
    return [found.failure.id for found in diagnose(io.BytesIO(raw)).matches]


# ---- the rows


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_a_row_matches_its_own_example_and_those_named(failure: KnownFailure) -> None:
    found = diagnose(io.BytesIO(failure.example.encode())).matches
    names = {m.failure.id for m in found}

    rules = {failure.narrows} - {""}
    assert names == {failure.id} | rules | ALSO.get(failure.id, set())
    strongest = max(m.strength for m in found if m.failure.id not in ALSO.get(failure.id, set()))
    [own] = [m for m in found if m.failure.id == failure.id]
    before = [m.failure.id for m in found[: found.index(own)]]
    assert rules.isdisjoint(before) or own.strength < strongest, "a case stands before its rule"


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.id)
def test_every_pattern_of_a_row_is_exercised(failure: KnownFailure) -> None:
    lines = [*failure.example.splitlines(), *LINES.get(failure.id, [])]
    for signature in failure.signatures:
        pattern = signature.pattern or re.escape(signature.text)
        hits = [line for line in lines if signature.text in line and re.search(pattern, line)]
        assert hits or not signature.pattern, signature
    for line in LINES.get(failure.id, []):
        context = "".join(f"{text}\n" for s in failure.signatures for text in s.near[:1])
        assert failure.id in ids(context + line), line


def test_rows_are_well_formed() -> None:
    registered = {invariant.id for invariant in verdict.all_invariants()} | PLANNED
    assert invariants is not None  # the registry is filled by its import
    assert len(BY_ID) == len(FAILURES)
    for failure in FAILURES:
        assert re.fullmatch(r"[a-i](-[a-z0-9]+)+", failure.id)
        assert failure.family in CLASSES
        assert set(failure.invariants) <= registered, failure.id
        assert failure.invariants or failure.family in "hi", failure.id
        assert len(failure.urls) == len(failure.references) > 0, failure.id
        assert failure.narrows == "" or failure.narrows in BY_ID.keys() - {failure.id}
        assert all((failure.title, failure.engine, failure.versions, failure.cause, failure.remedy))
        for signature in failure.signatures:
            assert signature.text.isascii()
            assert len(signature.text) >= 8 or signature.pattern, signature
            assert "\n" not in signature.text
            assert signature.times >= 1
    assert failure_classes() >= set("abcdefg")


def failure_classes() -> set[str]:
    return {failure.family for failure in FAILURES}


def test_at_least_sixty_reports_have_a_signature() -> None:
    reports = {report for failure in FAILURES for report in failure.reports}

    assert len(reports) >= 60
    assert all(re.fullmatch(r"[A-I]\d\d", report) for report in reports)
    for letter in "ABCDEFG":
        assert sum(report[0] == letter for report in reports) >= 4, letter
    strong = {
        report
        for failure in FAILURES
        if any(s.strength > Strength.SYMPTOM for s in failure.signatures)
        for report in failure.reports
    }
    assert len(strong) >= 60, "beyond mere symptoms"


# ---- what must not match


def test_ordinary_logs_match_nothing() -> None:
    text = ORDINARY.read_bytes()

    assert text.count(b"\n") >= 90
    assert ids(text) == []
    assert [line for line in text.splitlines() if ids(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "out of resource: shared memory, Required: 262144, Hardware limit: 232448.",
        "ValueError: all tensors must be contiguous",
        "TypeError: f() got an unexpected keyword argument 'topk'",
        "kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=166",  # no b12x anywhere
        "hello!!!!!!!!!!",
        "Unsupported architecture",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",  # no fallback, no workers
        "ImportError: libfoo.so: cannot open shared object file: No such file or directory",
        "ValueError: No valid attention backend found for cuda with "
        "AttentionSelectorConfig(use_sparse=False)",
        "INFO RuntimeError: cancelled by the user",
        "RuntimeError: q must be contiguous in the last dimension",
        'assert output.is_contiguous(), "output must be contiguous"',
        "!!!!!!!!!!!!!!!!!!!!!!!!!! stopping after 1 failures !!!!!!!!!!!!!!!!!!!!!!!!!!!",
        "!!!!!!!!!!!!!!!!!!!!!!!!!! Interrupted: 1 error during collection !!!!!!!!!!!!!!!!!!!!!!!!!!",
        "RuntimeError: PassManager::run failed",
    ],
)
def test_near_misses_match_nothing(line: str) -> None:
    assert ids(line) == []


def test_one_line_of_waiting_is_ordinary_and_five_are_not() -> None:
    line = "INFO No available shared memory broadcast block found in 60 seconds.\n"

    assert ids(line * 4) == []
    [found] = diagnose(io.BytesIO(line.encode() * 5)).matches
    assert (found.failure.id, found.strength, found.count) == ("c-hang-beyond-64-rows", Strength.SYMPTOM, 5)
    [found] = diagnose(io.BytesIO(line.encode() * 5 + b"DeepSeek-V4")).matches
    assert found.strength is Strength.LIKELY


# ---- what a log says


def test_values_are_read_from_the_line() -> None:
    [case, rule] = diagnose(io.BytesIO(BY_ID["c-width-192"].example.encode())).matches

    assert case.values == {"num_heads": ["64"], "topk": ["192"]}
    assert rule.values["page_block_size"] == ["64"]


def test_repeats_are_counted_and_the_first_and_last_lines_kept() -> None:
    error = b"RuntimeError: eidx must be contiguous"
    log = b"\n".join([b"quiet", error, b"quiet", error, error, b"", error, b"quiet"])

    [found] = diagnose(io.BytesIO(log)).matches

    assert found.count == 4
    assert [s.line for s in found.sightings] == [2, 4, 5]
    assert found.last_line == 7


def test_the_strongest_match_comes_first() -> None:
    names = ("e-illegal-access", "f-nan-logits", "b-workspace-int8")
    log = "\n".join(BY_ID[name].example for name in names)

    assert ids(log) == ["b-workspace-int8", "f-nan-logits", "e-illegal-access"]


def test_context_counts_wherever_it_stands() -> None:
    error = b"RuntimeError: CUDA error: an illegal memory access was encountered\n"

    for log in (b"in capture_one\n" + error, error + b"in capture_one\n"):
        assert ids(log)[0] == "a-capture-race"
    assert ids(error) == ["e-illegal-access"]


def test_two_signatures_of_a_row_on_one_line_count_once() -> None:
    row = KnownFailure("a-x", "t", (named("alpha"), symptom("beta")), "e", "v", (), "c", "r", ("a/b#1",), "")

    [found] = diagnose(io.BytesIO(b"alpha beta\nbeta\n"), [row]).matches

    assert (found.count, found.strength, found.last_line) == (2, Strength.NAMED, 2)


def test_memory_does_not_grow_with_repeats() -> None:
    scan = match._Scan(FAILURES)
    scan.feed(b"eidx must be contiguous\n" * 100)

    [found] = scan.found.values()
    assert [len(kept) for kept in found.sightings.values()] == [match.SHOWN]
    assert len(scan.suspects) <= match.SHOWN


def test_a_signature_without_its_context_takes_no_lines_with_it() -> None:
    row = KnownFailure(
        "a-x",
        "t",
        (likely("alpha", near=("gamma",)), symptom("beta")),
        "e",
        "v",
        (),
        "c",
        "r",
        ("a/b#1",),
        "",
    )

    [found] = diagnose(io.BytesIO(b"alpha\nbeta\n"), [row]).matches

    assert (found.count, found.strength, found.sightings[0].line) == (1, Strength.SYMPTOM, 2)


# ---- what somebody pastes

PASTES = [
    "Unsupported sparse-MLA prefill\nconfiguration: model=DSV4 num_heads=64 topk=192 page_block_size=64",
    "Unsupported sparse-MLA prefill configuration:\n  model=DSV4 num_heads=64 topk=192 page_block_size=64",
    "SM120 sparse-MLA has no decode ker\nnel for this shape: num_tokens=5, num_heads=64, to\npk=192, x",
    "SM120 SPARSE-MLA HAS NO DECODE KERNEL FOR THIS SHAPE: NUM_TOKENS=5, NUM_HEADS=64, TOPK=192, D_QK=512",
]


@pytest.mark.parametrize("text", PASTES)
def test_a_paste_may_be_wrapped_or_in_capitals(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diagnose", text, "--json"]) == exits.HELD

    found = json.loads(capsys.readouterr().out)
    assert found["matches"][0]["id"] == "c-width-192"
    assert (found["lines"], found["bytes"]) == (text.count("\n") + 1, len(text))
    assert "c-width-192" not in ids(text)


def test_a_log_is_not_read_as_one_line() -> None:
    ordinary = b"quiet\n" * 1000
    lines = PASTES[0].encode() + b"\n"

    assert [m.failure.id for m in match.diagnose_paste(ordinary + lines).matches] == []
    for at in range(0, len(ORDINARY.read_bytes()), 1000):
        assert match.diagnose_paste(ORDINARY.read_bytes()[at : at + match.PASTE]).matches == ()


# ---- streaming


def test_blocks_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"".join(b"quiet %d\n%s\n" % (i, f.example.encode()) for i, f in enumerate(FAILURES))
    whole = diagnose(io.BytesIO(log))

    for size in (7, 64, 1000):
        monkeypatch.setattr(match, "BLOCK", size)
        assert diagnose(io.BytesIO(log)) == whole
    assert len(whole.matches) == len(FAILURES)
    assert (whole.lines, whole.bytes) == (log.count(b"\n"), len(log))


def test_a_log_is_read_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "BLOCK", 1 << 16)

    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self.sizes: list[int] = []
            self.left = 3 * match.BLOCK

        def read(self, size: int = -1) -> bytes:
            self.sizes.append(size)
            given, self.left = min(size, self.left), self.left - min(size, self.left)
            return (b"x" * 63 + b"\n") * (given // 64)

    stream = Endless()
    found = diagnose(stream)  # type: ignore[arg-type]

    assert set(stream.sizes) == {match.BLOCK}
    assert found.lines == 3 * match.BLOCK // 64


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "BLOCK", 64)
    monkeypatch.setattr(match, "LONGEST_LINE", 256)
    log = (
        b"y" * 1000 + b" eidx must be contiguous " + b"z" * 1000 + b"\nRuntimeError: eidx must be contiguous"
    )

    blocks = list(match._blocks(io.BytesIO(log)))
    found = diagnose(io.BytesIO(log))

    assert max(map(len, blocks)) <= 256 + 64
    assert b"".join(blocks) == log
    assert found.lines == 2
    assert found.matches[0].sightings[-1].line == 2
    assert all(len(s.text) <= match.WINDOW + 2 for s in found.matches[0].sightings)


@pytest.mark.parametrize(
    "line",
    [
        b"\x1b[31mRuntimeError: eidx \x1b[1mmust be\x1b[0m contiguous\x1b[0m",
        b"RuntimeError: eidx must be contiguous\r",
        b"\xff\xfe\x00 RuntimeError: eidx must be contiguous \xc3",
    ],
)
def test_colours_carriage_returns_and_broken_bytes_do_not_hide_a_line(line: bytes) -> None:
    [found] = diagnose(io.BytesIO(b"first\n" + line + b"\n")).matches

    assert found.sightings[0].line == 2
    assert "eidx must be contiguous" in found.sightings[0].text


def test_a_long_line_is_shown_around_what_was_found() -> None:
    [found] = diagnose(io.BytesIO(b"a" * 5000 + b" eidx must be contiguous " + b"b" * 5000)).matches

    text = found.sightings[0].text
    assert "eidx must be contiguous" in text
    assert text[0] == text[-1] == "…"
    assert len(text) <= match.WINDOW + 2


def test_an_empty_log_is_no_log() -> None:
    found = diagnose(io.BytesIO(b""))

    assert (found.matches, found.lines, found.bytes, found.suspects) == ((), 0, 0, ())


def test_the_last_lines_that_look_like_errors_are_kept_for_the_unknown() -> None:
    log = b"KeyError: 'a'\nquiet\nfatal: no\nZeroDivisionError: x\nfatal: no\nOSError: last\n"

    found = diagnose(io.BytesIO(log))

    assert [s.line for s in found.suspects] == [3, 4, 6]


# ---- the command


def test_a_text_is_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")

    assert cli.run(["diagnose", BY_ID["c-width-192"].example]) == exits.HELD

    said = capsys.readouterr().out
    assert "the text given: 1 line, " in said
    assert "2 known failures" in said
    for part in (
        "c-width-192: ",
        "topk 192",
        "ROUTE-TOTAL",
        "FlashInfer 0.6.18, which has 192",
        "/issues/33134",
    ):
        assert part in said
    assert said.index("c-width-192") < said.index("c-no-prefill-kernel")
    assert said.count("ROUTE-TOTAL") == 1, "of the rule, only the remedy is shown"


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool) -> None:
    log = b"INFO fine\n" * 10 + BY_ID["a-workspace-locked"].example.encode() + b"\n"
    file = tmp_path / ("server.log.gz" if packed else "server.log")
    file.write_bytes(gzip.compress(log) if packed else log)

    assert cli.run(["diagnose", str(file), "--json"]) == exits.HELD

    data = json.loads(capsys.readouterr().out)
    assert (data["source"], data["lines"], data["bytes"]) == (file.name, 11, len(log))
    [found] = data["matches"]
    assert found["id"] == "a-workspace-locked"
    assert found["invariants"] == ["BUF-CAPTURE"]
    assert found["values"]["needed"] == ["607.70 MB"]
    assert found["sightings"] == [{"line": 11, "text": BY_ID["a-workspace-locked"].example}]
    assert found["strength"] == "named"
    assert found["references"][0].startswith("https://github.com/vllm-project/vllm/issues/")


def test_standard_input_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"eidx must be contiguous\n")))

    assert show_diagnosis("-", False) == exits.HELD
    assert capsys.readouterr().out.startswith("standard input: 1 line")


def test_the_unknown_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diagnose", "KeyError: 'nobody knows'"]) == exits.NOTHING_JUDGED

    said = capsys.readouterr().out
    assert "nothing recognised" in said
    assert "line 1  KeyError: 'nobody knows'" in said
    assert "To have it looked at, send:" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["diagnose"],
        ["diagnose", ""],
        ["diagnose", "logs/server.log"],
        ["diagnose", "server.txt"],
        ["diagnose", "text", "--list"],
    ],
)
def test_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == exits.WRONG_USE
    assert "log = " in capsys.readouterr().err


def test_a_damaged_archive_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.log.gz"
    file.write_bytes(gzip.compress(b"x\n" * 10_000)[:-20])

    assert cli.run(["diagnose", str(file)]) == exits.WRONG_USE
    assert "a file that can be read" in capsys.readouterr().err


def test_a_folder_is_wrong_use_and_a_pipe_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diagnose", str(tmp_path)]) == exits.WRONG_USE
    assert "Is a directory" in capfd.readouterr().err
    reading, writing = os.pipe()
    os.write(writing, b"eidx must be contiguous\n")
    os.close(writing)

    assert cli.run(["diagnose", f"/dev/fd/{reading}"]) == exits.HELD
    os.close(reading)


def test_a_closed_standard_input_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)

    assert cli.run(["diagnose", "-"]) == exits.WRONG_USE


def test_a_file_longer_than_a_paste_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_bytes(b"quiet\n" * 2000 + b"eidx must be contiguous\n")

    assert cli.run(["diagnose", str(file)]) == exits.HELD


def test_a_text_too_long_for_a_file_name_is_a_text() -> None:
    assert cli.run(["diagnose", "x" * 5000 + " eidx must be contiguous"]) == exits.HELD


def test_the_list_names_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_known(True) == exits.HELD
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [f.id for f in FAILURES]

    assert cli.run(["diagnose", "--list"]) == exits.HELD
    said = capsys.readouterr().out
    assert f"{len(FAILURES)} known failures" in said
    assert "c-width-192" in said


def test_diagnosing_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys\nfrom sm120_mla.tools import cli\n"
        "code = cli.run(['diagnose', 'eidx must be contiguous', '--json'])\n"
        "print(code, *({'torch', 'triton', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=settings.environment(),
        cwd=Path(__file__).parents[1],
    )

    assert done.stderr == "0\n"
