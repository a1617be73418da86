"""The sglang target on small trees in every design it has to know: what is served, and what is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_trees import OLD, sglang_tree, split_module

from sm120_mla import case as case_module
from sm120_mla import device
from sm120_mla.case import AttnCase, CacheSpec, IndexSpec, OrderCase, SplitCase, Step
from sm120_mla.errors import ArgumentError
from sm120_mla.targets.base import Support
from sm120_mla.targets.roomy import RoomyAllocations
from sm120_mla.targets.sglang import SglangTarget
from sm120_mla.testing import boots, verdict
from sm120_mla.testing.orderings import Boot
from sm120_mla.testing.verdict import Verdict

FAULT_CASES = Path(__file__).parents[1] / "fixtures" / "faults"
GUARD, OPEN = "torch.inference_mode(False)", "torch.no_grad()"

pytestmark = pytest.mark.skipif(device.mode() != "reference", reason="the trees run on CPU tensors")


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., SglangTarget]:
    """A target of a tree with these properties; see ``sglang_tree`` and ``split_module``."""

    def make(split: str | None = None, /, **tree: Any) -> SglangTarget:
        return SglangTarget(str(sglang_tree(tmp_path, split, **tree)))

    return make


def judged(target: SglangTarget, id: str, case: Any) -> Verdict:
    if isinstance(case, str):
        case = case_module.load(FAULT_CASES / f"{case}.json").case
    return verdict.judge(verdict.by_id(id), target, case)


def boot(*steps: str, page_size: int = 128) -> OrderCase:
    """Steps by name; a star runs one under inference mode."""
    made = [Step(do=s.rstrip("*"), inference=s.endswith("*"), arg=n + 1) for n, s in enumerate(steps)]
    return OrderCase(page_size=page_size, steps=tuple(made))


FIRST_TOUCH = boot("load", "autotune*", "capture", "replay")
DESIGNS = {
    "module dict": ({"store": "dict"}, {"place": OLD}),
    "class attribute": ({"store": "attribute"}, {}),
    "resources": ({"store": "resources"}, {}),
    "whole pools": ({"store": "dict", "indexed": False}, {"place": OLD}),
}


# ---- the buffers


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("guarded", ["both", "split", "marks", "none"])
def test_a_lost_guard_is_seen_wherever_the_buffers_are_kept(
    made: Callable[..., SglangTarget], design: str, guarded: str
) -> None:
    split, tree = DESIGNS[design]
    target = made(split_module(guarded=guarded, **split), **tree)
    fine = guarded == "both" or (guarded == "split" and design == "whole pools")

    found = judged(target, "BUF-GUARD", FIRST_TOUCH)

    assert found.outcome == ("holds" if fine else "violated"), found
    lost = {"split": "marks", "marks": "split", "none": "split"}.get(guarded, "")
    assert fine or f"'{lost}'" in found.headline
    assert judged(target, "BUF-WRITABLE", FIRST_TOUCH).outcome == found.outcome


def test_the_table_of_guards_is_reproduced(made: Callable[..., SglangTarget]) -> None:
    unguarded = made(split_module(guarded="none"))
    found = judged(unguarded, "BUF-WRITABLE", boot("load", "autotune*", "capture"))

    assert found.violated
    latent = made(split_module(guarded="marks"))
    assert "'split'" in judged(latent, "BUF-GUARD", FIRST_TOUCH).headline
    assert judged(latent, "GRAPH-REPLAY", FIRST_TOUCH).holds
    assert judged(unguarded, "BUF-GUARD", boot("load", "autotune", "capture")).holds


def test_growth_that_frees_and_growth_that_keeps(made: Callable[..., SglangTarget]) -> None:
    growth = boot("load", "split", "capture", "grow", "replay")

    found = judged(made(split_module(indexed=False)), "BUF-ADDRESS", growth)
    assert found.violated
    assert "freed at step 3 (grow)" in found.headline
    assert judged(made(split_module(indexed=False, keeps=True)), "BUF-ADDRESS", growth).holds


def test_a_first_touch_inside_a_capture_is_seen(made: Callable[..., SglangTarget]) -> None:
    target = made(split_module())

    assert judged(target, "BUF-CAPTURE", boot("load", "capture")).violated
    assert judged(target, "BUF-CAPTURE", boot("load", "split", "capture")).holds
    assert judged(target, "BUF-KEY", "boot-keys").holds


def test_buffers_are_found_by_walking_and_gone_after_a_reset(made: Callable[..., SglangTarget]) -> None:
    target = made(split_module(), cutedsl=GUARD)
    assert target.persistent() == {}

    target.split(torch.zeros(2, 128 * 584, dtype=torch.uint8), 128, None, None, layout=_dsv4())

    assert set(target.persistent()) == {
        "runtime_context._RESOURCES.buffers['split']", "cutedsl_wrapper['output']",
        "cutedsl_wrapper['workspace']",
    }  # fmt: skip
    target.reset()
    assert target.persistent() == {}


def _dsv4() -> Any:
    from sm120_mla.layout import DSV4

    return DSV4


# ---- the sibling site


@pytest.mark.parametrize(("guard", "outcome"), [(GUARD, "holds"), (OPEN, "violated")])
def test_the_sibling_site_is_judged_with_the_split_and_without(
    made: Callable[..., SglangTarget], guard: str, outcome: str
) -> None:
    alone = made(cutedsl=guard)
    assert judged(alone, "BUF-GUARD", FIRST_TOUCH).outcome == outcome
    assert judged(alone, "BUF-ADDRESS", FIRST_TOUCH).absent

    target = made(split_module(), cutedsl=guard)
    found = judged(target, "BUF-GUARD", FIRST_TOUCH)
    assert found.outcome == outcome
    assert not found.violated or "cutedsl_wrapper" in found.headline
    assert target.notes() == ()


def test_a_sibling_that_cannot_be_exercised_is_noted(
    made: Callable[..., SglangTarget], tmp_path: Path
) -> None:
    made(split_module(), cutedsl=GUARD)
    file = next(tmp_path.rglob("flashinfer_cutedsl.py"))
    file.write_text(file.read_text().replace("pass\n", "layer.of_a_later_commit\n", 1))
    target = SglangTarget(str(tmp_path))

    assert judged(target, "BUF-GUARD", FIRST_TOUCH).holds
    assert "of_a_later_commit" in target.notes()[0]


# ---- the split


@pytest.mark.parametrize("split", [{}, {"store": "dict", "bounded": False}])
@pytest.mark.parametrize("id", ["SPLIT-BYTES", "SPLIT-FRAME", "SPLIT-INDEX", "SPLIT-TOUCHED"])
@pytest.mark.parametrize("case", ["split-holes", "split-full", "split-64"])
def test_a_right_split_holds(
    made: Callable[..., SglangTarget], id: str, case: str, split: dict[str, Any]
) -> None:
    assert judged(made(split_module(**split)), id, case).holds


def test_what_the_field_does_with_lengths_and_empty_rows_is_seen(made: Callable[..., SglangTarget]) -> None:
    target = made(split_module())

    assert "split but not touched" in judged(target, "SPLIT-TOUCHED", "split-lengths").details
    assert judged(target, "SPLIT-TOUCHED", "split-empty").violated
    assert judged(target, "SPLIT-TOUCHED", "split-wide").holds
    assert judged(made(split_module(bounded=False)), "SPLIT-TOUCHED", "split-wide").violated


def test_a_wrong_offset_is_seen(made: Callable[..., SglangTarget]) -> None:
    text = split_module().replace("tl.store(to + 36864 + f", "tl.store(to + 36872 + f")

    assert judged(made(text), "SPLIT-BYTES", "split-full").violated


@pytest.mark.parametrize(("bounded", "outcome"), [(True, "holds"), (False, "violated")])
def test_a_mark_past_the_end_is_seen_and_harms_nothing(
    made: Callable[..., SglangTarget], bounded: bool, outcome: str
) -> None:
    spec = IndexSpec(rows=1, width=6, kinds=("past_end",), seed=2)
    case = SplitCase(page_size=128, pages=2, spare_pages=0, calls=(spec,), seed=6)

    found = judged(made(split_module(bounded=bounded)), "SPLIT-FRAME", case)

    assert found.outcome == outcome
    assert bounded or "past an allocation of 2 bytes" in found.details


@pytest.mark.parametrize(("wide", "outcome"), [(True, "holds"), (False, "violated")])
def test_an_offset_that_wraps_is_seen_and_harms_nothing(
    made: Callable[..., SglangTarget], wide: bool, outcome: str
) -> None:
    case = case_module.Offset64Case(page_stride=1_308_672)

    assert judged(made(split_module(wide=wide)), "SPLIT-OFFSET64", case).outcome == outcome


@pytest.mark.parametrize(("nbytes", "lead"), [(16, 4096), (1 << 30, 1 << 31)])
def test_allocations_have_room_for_an_offset_that_wraps(nbytes: int, lead: int) -> None:
    with RoomyAllocations() as roomy:
        made = torch.empty(nbytes // 2, dtype=torch.int16)
        ones = torch.ones(3, 2)
    around = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())

    assert made.storage_offset() * 2 == lead
    assert around.numel() == lead + nbytes + 4096
    assert ones.tolist() == [[1, 1]] * 3
    around[lead + nbytes] += 1
    assert roomy.strays() == (f"1 bytes past an allocation of {nbytes:,} bytes",)
    roomy.arm()
    assert roomy.strays() == ()


def test_a_step_that_a_target_declines_ends_a_boot_as_unknown() -> None:
    class Declines(SglangTarget):
        def supports(self, case: Any, capability: Any) -> Support:
            return Support(True) if case.kind == "order" else Support.no("not on a Monday")

    found = judged(Declines(str(FAULT_CASES)), "BUF-GUARD", FIRST_TOUCH)

    assert found.unknown
    assert "not on a Monday" in found.headline


def test_whole_pools_are_judged_where_they_can_be(made: Callable[..., SglangTarget]) -> None:
    target = made(split_module(store="dict", indexed=False))

    assert judged(target, "SPLIT-BYTES", "split-full").holds
    assert judged(target, "SPLIT-BYTES", "split-holes").absent
    assert judged(target, "SPLIT-TOUCHED", "split-full").absent
    assert judged(target, "GRAPH-REPLAY", "boot-replay-other-pages").holds
    assert "whole pools" in judged(target, "SPLIT-OFFSET64", "offset-2g").headline


def test_a_page_size_that_is_fixed_bounds_what_is_served(made: Callable[..., SglangTarget]) -> None:
    target = made(split_module(page_size=False))

    assert judged(target, "SPLIT-BYTES", "split-full").holds
    assert judged(target, "SPLIT-BYTES", SplitCase(page_size=128)).unknown
    assert judged(target, "BUF-GUARD", boot("split", page_size=256)).holds
    assert judged(target, "BUF-GUARD", boot("split", page_size=128)).unknown


@pytest.mark.parametrize(
    "case",
    [
        SplitCase(layout="dsv41"),
        SplitCase(offset=4),
        SplitCase(stride_gap=1),
        SplitCase(pages=0),
        SplitCase(calls=(IndexSpec(rows=1, width=2, kinds=("int_max",)),)),
    ],
    ids=["layout", "offset", "stride", "no pages", "far past the end"],
)
def test_what_sglang_does_not_claim_is_unknown(made: Callable[..., SglangTarget], case: SplitCase) -> None:
    assert judged(made(split_module()), "SPLIT-BYTES", case).unknown


# ---- what is not there


def test_an_empty_tree_is_absent_all_over(tmp_path: Path) -> None:
    target = SglangTarget(str(tmp_path))
    cases = ("split-full", "boot-a", "attn-small", "write-normal", "meta-12", "offset-2g", "interp-first")

    for case in cases:
        loaded = case_module.load(FAULT_CASES / f"{case}.json").case
        asked = [inv for inv in verdict.all_invariants() if inv.applies(loaded)]
        assert asked
        assert {verdict.judge(inv, target, loaded).outcome for inv in asked} == {"absent"}


def test_a_drawn_boot_of_an_empty_tree_or_of_one_that_declines_holds_nothing(
    made: Callable[..., SglangTarget], tmp_path: Path
) -> None:
    fixed = made(split_module(page_size=False))
    for target, word in ((SglangTarget(str(FAULT_CASES)), "absent"), (fixed, "unknown")):
        for steps in (("load", "build", "split"), ("restart",), ("build", "load")):
            boot_ = Boot(target, OrderCase(page_size=128))
            log = boot_.new_log()
            log.notes += [boot_.do(n, Step(do=do)) for n, do in enumerate(steps)]

            for id in ("BUF-GUARD", "BUF-WRITABLE", "BUF-ADDRESS", "BUF-KEY", "META-VIEW", "GRAPH-REPLAY"):
                said = "absent" if id == "META-VIEW" else word
                assert boots.judged(id, log).outcome == said, id


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a checkout"):
        SglangTarget(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["import no_such_package_at_all\n", "def (\n"])
def test_a_file_that_does_not_load_is_unknown_with_the_reason(
    made: Callable[..., SglangTarget], text: str
) -> None:
    target = made(text + split_module(), cutedsl=GUARD)

    for id, case in (("SPLIT-BYTES", "split-full"), ("BUF-GUARD", FIRST_TOUCH), ("BUF-KEY", FIRST_TOUCH)):
        found = judged(target, id, case)
        assert found.unknown
        assert "no_such_package_at_all" in found.headline or "SyntaxError" in found.headline


def test_a_parameter_nobody_knows_is_unknown(made: Callable[..., SglangTarget]) -> None:
    found = judged(made(split_module(wants="ref_mask")), "SPLIT-BYTES", "split-full")

    assert found.unknown
    assert "'ref_mask'" in found.headline


# ---- attention


@pytest.mark.parametrize("decode", ["sum", "dot"])
@pytest.mark.parametrize("case", ["attn-two-lengths", "attn-empty", "attn-wide"])
def test_a_right_decode_holds_with_bf16_dots_too(
    made: Callable[..., SglangTarget], decode: str, case: str
) -> None:
    target = made(split_module(), decode=decode)

    outcomes = {
        id: judged(target, id, case).outcome
        for id in ("ATTN-VALUE", "ATTN-LSE", "ATTN-EMPTY", "ATTN-DONTCARE", "ATTN-ROWS")
    }
    assert set(outcomes.values()) == {"holds"}, outcomes


def test_lengths_that_do_not_fit_its_32_bits_are_declined(made: Callable[..., SglangTarget]) -> None:
    """The engine passes no others."""
    target = made(split_module(), decode="sum")
    index = IndexSpec(rows=1, width=20, kinds=("valid",), lengths="beyond", length_dtype="int64")
    case = AttnCase(tokens=1, heads=4, main=CacheSpec(page_size=256, pages=1, index=index))

    found = judged(target, "ATTN-VALUE", case)

    assert found.unknown
    assert "32 bits" in found.headline


@pytest.mark.parametrize(("folded", "said"), [(True, "includes the sink"), (False, "leaves the sink out")])
def test_the_convention_of_the_lse_is_converted_and_recorded(
    made: Callable[..., SglangTarget], folded: bool, said: str
) -> None:
    target = made(split_module(), decode="sum", folded=folded)

    assert judged(target, "ATTN-LSE", "attn-small").holds
    assert said in target.convention
    assert target.convention in target.notes()
    assert target.backend == "triton"


def test_an_empty_row_of_plus_infinity_is_converted(
    made: Callable[..., SglangTarget], tmp_path: Path
) -> None:
    made(split_module(), decode="sum")
    file = next(tmp_path.rglob("flash_mla_sm120_triton.py"))
    flipped = 'torch.where(lse == float("-inf"), float("inf"), lse).permute(0, 2, 1)'
    file.write_text(file.read_text().replace("return out, lse.permute(0, 2, 1)", f"return out, {flipped}"))

    assert judged(SglangTarget(str(tmp_path)), "ATTN-EMPTY", "attn-empty").holds


@pytest.mark.filterwarnings("ignore:overflow encountered")  # what lies past a length is read
@pytest.mark.parametrize(
    ("old", "new", "id", "case"),
    [
        ("exp2(byte.to(tl.float32) - 127)", "exp2(byte.to(tl.float32) - 126)", "ATTN-VALUE", "attn-small"),
        ("ok = (i >= 0) & (t < limit)", "ok = (i >= 0) & (t < topk)", "ATTN-VALUE", "attn-lengths"),
        ("m + tl.log(safe), float", "m + tl.log2(safe), float", "ATTN-LSE", "attn-small"),
        ("share = torch.where(lse > -1e20, torch.exp(lse - whole), 0)", "share = torch.ones_like(lse)",
         "ATTN-VALUE", "attn-small"),
    ],
    ids=["scale", "lengths", "base 2", "sink"],
)  # fmt: skip
def test_a_wrong_decode_is_seen(
    made: Callable[..., SglangTarget], tmp_path: Path, old: str, new: str, id: str, case: str
) -> None:
    made(split_module(), decode="sum")
    file = next(tmp_path.rglob("flash_mla_sm120_triton.py"))
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))

    assert judged(SglangTarget(str(tmp_path)), id, case).violated


def test_indices_past_the_end_are_not_read(made: Callable[..., SglangTarget]) -> None:
    found = judged(made(split_module(), decode="sum"), "ATTN-VALUE", "attn-past-end")

    assert found.unknown
    assert "outside the pool" in found.headline


def test_a_decode_that_is_missing_or_wants_more(made: Callable[..., SglangTarget]) -> None:
    assert judged(made(split_module()), "ATTN-VALUE", "attn-small").absent
    more = made(split_module(), decode="sum", more=", *, of_a_later_commit")
    assert "'of_a_later_commit'" in judged(more, "ATTN-VALUE", "attn-small").headline
    assert judged(more, "ATTN-VALUE", "attn-small").unknown


# ---- manners


def test_the_process_is_left_as_it_was(made: Callable[..., SglangTarget]) -> None:
    from triton.runtime import interpreter

    kept = {name: vars(interpreter.InterpreterBuilder)[name] for name in ("create_dot", "cast_impl")}
    language = interpreter._patch_lang
    target = made(split_module(), decode="dot", cutedsl=GUARD)
    judged(target, "ATTN-VALUE", "attn-small")
    judged(target, "BUF-GUARD", FIRST_TOUCH)

    assert {name: vars(interpreter.InterpreterBuilder)[name] for name in kept} == kept
    assert interpreter._patch_lang is language
    assert [name for name in sys.modules if name.split(".")[0] == "sglang"] == []


def test_the_files_that_matter_are_named(made: Callable[..., SglangTarget], tmp_path: Path) -> None:
    target = made(split_module(), decode="sum", cutedsl=GUARD)
    judged(target, "ATTN-VALUE", "attn-small")
    judged(target, "BUF-GUARD", FIRST_TOUCH)

    names = {path.name for path in target.files()}
    assert names == {
        "flash_mla_sm120.py", "flash_mla_sm120_triton.py", "flashinfer_cutedsl.py", "environ.py",
        "runtime_context.py",
    }  # fmt: skip
    assert target.root == tmp_path


def test_platform_checks_answer_what_is_pretended(made: Callable[..., SglangTarget]) -> None:
    text = "from sglang.srt.utils import is_hip, is_sm120_supported\nHIP = is_hip()\n"
    target = made(text + split_module())
    target.splits_touched  # noqa: B018  loads the module
    module = next(m for name, m in target._tree.modules().items() if name.endswith("flash_mla_sm120"))

    assert module.HIP is False
    with target.pretend_device((12, 1)):
        assert module.is_sm120_supported()
    with target.pretend_device(None):
        assert not module.is_sm120_supported()
