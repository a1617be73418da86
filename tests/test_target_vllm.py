"""The vLLM target on small trees: every design of the view, signatures, capabilities, absent, unknown."""

from __future__ import annotations

import sys

import pytest
import torch
from vllm_trees import FILE, MAJOR, WRITER, WRITER_FILE, module, plant, sparse

from sm120_mla import device, targets
from sm120_mla.case import MetaBatch, MetaCase, SplitCase, WriteCase
from sm120_mla.codec import encode_e4m3
from sm120_mla.errors import ArgumentError, UnavailableError
from sm120_mla.kernels.runtime import INTERPRETED, tl, triton
from sm120_mla.targets import vllm_casts
from sm120_mla.targets.vllm import VllmTarget
from sm120_mla.targets.vllm_builder import settle_padding
from sm120_mla.targets.vllm_stand_ins import Platform
from sm120_mla.testing import verdict
from sm120_mla.testing.meta_batch import inputs_of, make_buffers

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the trees are interpreted")

FULL, PACKED, NARROW, EXCEPT = "full", "packed", "narrow", "narrow, full on 12"
META = (
    "META-VALUES",
    "META-VIEW",
    "META-STRIDE",
    "META-STALE",
    "GRAPH-REPLAY",
    "ATTN-ROWS",
    "ROUTE-CONTRACT",
)


def case(capability=(12, 0), **more):
    builds = (
        MetaBatch(decode=3, prefill=2, padding=2, max_seq_len=30_000, seed=1),
        MetaBatch(decode=4, prefill=2, padding=1, max_seq_len=900, seed=2),
    )
    return MetaCase(capability=capability, max_model_len=32_768, builds=builds, seed=3, **more)


def ask(target, *ids, **more):
    return {id: verdict.judge(verdict.by_id(id), target, case(**more)) for id in ids}


def outcomes(target, *ids, **more):
    return {id: found.outcome for id, found in ask(target, *(ids or META), **more).items()}


@pytest.fixture
def tree(tmp_path):
    def make(files, name="tree"):
        return VllmTarget(str(plant(tmp_path / name, files)))

    return make


H, V, U = "holds", "violated", "unknown"


@pytest.mark.parametrize(
    ("design", "capability", "found"),
    [
        (FULL, (12, 0), [H, V, H, H, H, H, H]),  # the prefill view is wide
        (FULL, (9, 0), [H, V, H, H, H, H, U]),
        (PACKED, (12, 1), [V, V, V, H, H, V, H]),  # prefill rows lie elsewhere; strides move
        (PACKED, None, [V, H, V, H, H, V, U]),
        (NARROW, (12, 0), [H, V, H, H, H, H, V]),
        (NARROW, (9, 0), [H, H, H, H, H, H, U]),
        (EXCEPT, (12, 0), [H] * 7),
        (EXCEPT, (12, 1), [H] * 7),
        (EXCEPT, (10, 0), [H] * 6 + [U]),
        (EXCEPT, None, [H] * 6 + [U]),
    ],
)
def test_each_design_is_told_apart(tree, design, capability, found):
    assert list(outcomes(tree(module(design)), capability=capability).values()) == found


@pytest.mark.parametrize(
    ("design", "said"),
    [
        (FULL, "decode view: full width on 9.0, 12.0, no GPU"),
        (PACKED, "decode view: packed on 9.0, 12.0, no GPU"),
        (NARROW, "decode view: narrow slice on 9.0, 12.0, no GPU"),
        (EXCEPT, "decode view: narrow slice on 9.0, no GPU; full width on 12.0"),
    ],
)
def test_the_notes_name_the_design_and_what_is_driven(tree, design, said):
    notes = tree(module(design)).notes()
    assert said in notes
    assert "driven through MetadataBuilder.build of vllm.models.deepseek_v4.sparse_mla" in notes


@pytest.mark.parametrize(
    "major",
    [
        MAJOR,
        "(12 if current_platform.is_device_capability_family(120) else 0)",
        "(12 if current_platform.has_device_capability(120) else 0)",
        "(12 if current_platform.has_device_capability((12, 0)) else 0)",
        "(12 if current_platform.is_cuda() and torch.cuda.get_device_capability()[0] == 12 else 0)",
        "READ_AT_IMPORT",
    ],
)
def test_whatever_a_commit_asks_the_pretended_gpu_answers(tree, major):
    target = tree(module(EXCEPT, major=major, imports=f"READ_AT_IMPORT = {MAJOR}"))
    for capability in ((12, 0), (9, 0), None, (12, 1), (10, 0)):
        assert outcomes(target, "META-VIEW", capability=capability) == {"META-VIEW": "holds"}


def test_the_platform_is_an_nvidia_gpu_of_the_pretended_capability():
    platform = Platform()
    for capability in ((9, 0), (10, 3), (12, 0), (12, 1)):
        with device.pretend_device(capability):
            number = 10 * capability[0] + capability[1]
            assert platform.get_device_capability().to_int() == number
            family = [f for f in (80, 90, 100, 120) if platform.is_device_capability_family(f)]
            assert family == [10 * capability[0]]
            assert [c for c in (90, 100, 120, 121) if platform.has_device_capability(c)] == [
                c for c in (90, 100, 120, 121) if c <= number
            ]
            assert platform.is_device_capability(capability)
            assert platform.is_cuda()
            assert not platform.is_rocm()
    with device.pretend_device(None):
        assert platform.get_device_capability() is None
        assert not platform.has_device_capability((7, 0))
        assert not platform.is_device_capability_family(120)
        assert not platform.is_cuda()


def test_a_view_chosen_in_the_builder_is_the_one_judged(tree):
    text = sparse(NARROW).replace(
        "rows.unsqueeze(1) if decode", "self.c128a_global_decode_buffer[:decode, None] if decode"
    )
    assert outcomes(tree({FILE: text}), "META-VIEW", "META-STRIDE", "ROUTE-CONTRACT") == {
        "META-VIEW": "holds",
        "META-STRIDE": "holds",
        "ROUTE-CONTRACT": "holds",
    }


def test_a_block_table_edited_in_place_is_seen(tree):
    found = ask(tree(module(EXCEPT, clamp="clamp_")), "META-VALUES", "META-VIEW")
    assert "block table was changed in place" in found["META-VALUES"].details
    assert found["META-VIEW"].holds


def test_a_builder_that_counts_requests_itself_and_pins_memory(tree):
    start = """
        lengths = np.diff(np.asarray(cm.query_start_loc_cpu, dtype=np.int32))
        counted = np.repeat(np.arange(lengths.shape[0], dtype=np.int32), lengths)
        self.requests.fill_(0)
        self.requests[: counted.shape[0]].copy_(torch.from_numpy(counted).pin_memory(), non_blocking=True)
    """
    requests = "self.requests[: cm.num_actual_tokens]"
    target = tree(module(EXCEPT, start=start, requests=requests))
    assert set(outcomes(target).values()) == {"holds"}
    assert "decode view: narrow slice on 9.0, no GPU; full width on 12.0" in target.notes()


@pytest.mark.parametrize(
    "place", ["vllm/v1/attention/backends/mla/flashmla_sparse.py", "vllm/somewhere/c.py"]
)
def test_a_moved_file_is_found(tree, place):
    assert set(outcomes(tree({place: sparse(EXCEPT)})).values()) == {"holds"}


def test_a_checkout_whose_package_lies_in_src(tree):
    files = {f"src/{name}": text for name, text in module(EXCEPT).items()}
    target = tree(files | {"src/vllm/utils/math_utils.py": "def cdiv(a, b):\n    return -(-a // b)\n"})
    (target._first.root / "vllm").rename(target._first.root / "docs")
    assert set(outcomes(VllmTarget(str(target._first.root))).values()) == {"holds"}


def test_a_builder_in_another_file_than_the_function(tree):
    alone, both = sparse(EXCEPT, builder=False), sparse(EXCEPT, clamp="clamp_")
    rest = both[both.index("@dataclass") :]
    imports = both[: both.index("@triton.jit")]
    builder = imports + "from vllm.ops.c128a import build_c128a_topk_metadata\n" + rest
    amd = {"vllm/amd/c128a.py": "raise RuntimeError('for another GPU')\n" + builder}
    target = tree({"vllm/ops/c128a.py": alone, "vllm/models/meta.py": builder} | amd)
    found = ask(target, "META-VIEW", "META-VALUES")
    assert found["META-VIEW"].holds
    assert "changed in place" in found["META-VALUES"].details
    assert "driven through MetadataBuilder.build of vllm.models.meta" in target.notes()


def test_a_tree_without_builder_is_asked_through_the_function(tree):
    target = tree({FILE: sparse(EXCEPT, builder=False)})
    assert set(outcomes(target).values()) == {"holds"}
    assert any("no metadata builder" in note for note in target.notes())


def test_parameters_a_commit_added(tree):
    given = ", max_seq_len=cm.max_seq_len"
    width = "width = min(width, -(-max_seq_len // 16384) * 128)"
    for name, more in (("optional", ", max_seq_len=None"), ("required", ", *, max_seq_len")):
        target = tree(module(NARROW, more=more, given=given, before="pass"), name)
        assert outcomes(target, "META-VALUES", capability=(9, 0)) == {"META-VALUES": "holds"}
    alone = {FILE: sparse(NARROW, builder=False, more=", *, max_seq_len", before=width)}
    assert outcomes(tree(alone, "known"), "META-VALUES", capability=(9, 0)) == {"META-VALUES": "holds"}
    strange = ask(tree({FILE: sparse(NARROW, builder=False, more=", *, phase")}, "strange"), "META-VALUES")
    assert strange["META-VALUES"].unknown
    assert "'phase'" in strange["META-VALUES"].headline


def test_contexts_longer_than_the_width_are_asked_of_the_function(tree):
    target = tree(module(FULL))
    long = MetaCase(
        max_model_len=32_768, builds=(MetaBatch(decode=3, max_seq_len=32_000, width_seq=9000, seed=1),)
    )
    assert verdict.judge(verdict.by_id("META-VALUES"), target, long).holds


def test_nothing_there_is_absent(tree):
    target = tree({"vllm/models/llama.py": "x = 1\n"})
    assert set(outcomes(target).values()) == {"absent"}
    writing = verdict.judge(verdict.by_id("CACHE-BYTES"), target, WriteCase(recipe="engines"))
    splitting = verdict.judge(verdict.by_id("SPLIT-BYTES"), target, SplitCase())
    assert writing.absent
    assert splitting.absent
    assert "splits none" in splitting.headline


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
        ("raise RuntimeError('driver too old')\n", "driver too old"),
        ("def broken(:\n", "SyntaxError"),
        ("from vllm.kernels import table\nN = table['a'] + 1\n", "stand-in"),
    ],
)
def test_what_does_not_load_is_unknown_with_the_reason(tree, text, said):
    found = ask(tree({FILE: text + sparse(EXCEPT)}), "META-VALUES")["META-VALUES"]
    assert found.unknown
    assert said in found.headline


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"init": "self.x = vllm_config.lora_config.rank"}, "vllm_config.lora_config"),
        ({"start": "cm.encoder_seq_lens + 1"}, "common_attn_metadata.encoder_seq_lens"),
        ({"start": "current_platform.get_sm_name()"}, "current_platform.get_sm_name"),
        ({"before": "current_platform.get_sm_name()"}, "current_platform.get_sm_name"),
        ({"start": "return None"}, "does not call"),
        ({"start": "cm.positions.reshape(7, 7, 7)"}, "RuntimeError"),
        (
            {"init": "self.other = torch.empty(9)", "start": "self.c128a_prefill_buffer = self.other"},
            "no known",
        ),
    ],
)
def test_a_builder_that_cannot_be_driven_is_unknown_not_violated(tree, parts, said):
    found = ask(tree(module(EXCEPT, **parts)), "META-VALUES")["META-VALUES"]
    assert found.unknown
    assert said in found.headline


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"start": "assert cm.max_seq_len < 1000, 'too long'"}, "AssertionError"),
        ({"before": "raise ValueError('no')"}, "ValueError"),
    ],
)
def test_what_the_tree_itself_refuses_is_a_violation(tree, parts, error):
    found = ask(tree(module(EXCEPT, **parts)), "META-VALUES")["META-VALUES"]
    assert found.violated
    assert found.raised
    assert error in found.headline


def test_a_sync_in_the_function_breaks_its_capture(tree):
    target = tree(module(EXCEPT, before="assert positions.max().item() < 1 << 30"))
    found = ask(target, "META-VALUES", "GRAPH-REPLAY")
    assert found["META-VALUES"].holds
    assert found["GRAPH-REPLAY"].violated


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ("column % block", "column % (block + 1)", "META-VALUES"),
        ("token * decode_stride + column, tl", "token * decode_stride + column + 1, tl", "META-VALUES"),
        ("tl.load(slot_ptr + token) >= 0", "token >= 0", "ATTN-ROWS"),
        ("tl.maximum(have, 0), 0)", "2 * width, 0)", "META-STALE"),
        ("num_decode_tokens, WIDE", "int(num_decode_tokens), WIDE", ""),
    ],
)
def test_each_check_fails_on_a_tree_broken_for_it(tree, old, new, broken):
    text = sparse(EXCEPT)
    assert text.count(old) == 1
    found = outcomes(tree({FILE: text.replace(old, new)}))
    assert (found[broken] == "violated") if broken else (set(found.values()) == {"holds"})


def test_trees_meet_neither_each_other_nor_what_is_imported(tree):
    first, second = tree(module(FULL), "first"), tree(module(EXCEPT), "second")
    before = {name for name in sys.modules if name.split(".")[0] == "vllm"}
    wanted = {"META-VIEW": "violated"}, {"META-VIEW": "holds"}
    for _ in range(2):
        assert outcomes(first, "META-VIEW") == wanted[0]
        assert outcomes(second, "META-VIEW") == wanted[1]
    assert {name for name in sys.modules if name.split(".")[0] == "vllm"} == before
    assert all(str(first._first.root) in str(path) for path in first.files())
    assert first.files()


def test_padding_rows_are_put_in_order_and_real_rows_left_alone():
    batch = MetaBatch(decode=3, padding=4, prefill=2, max_seq_len=5000, seed=5)
    buffers = make_buffers(16, 256, 1)
    inputs, untouched = (inputs_of(batch, buffers, requests=2, block_size=2) for _ in range(2))
    padding = slice(3, 7)
    inputs.positions[padding] = torch.tensor([-9, 4999, 5000, 1 << 30], dtype=torch.int32)
    inputs.token_to_req_indices[padding] = torch.tensor([-3, 0, 2, 1 << 30], dtype=torch.int32)
    settle_padding(inputs)
    assert inputs.positions[padding].tolist() == [0, 4999, 4999, 4999]
    assert inputs.token_to_req_indices[padding].tolist() == [0, 0, 1, 1]
    for name in ("positions", "token_to_req_indices"):
        mine, theirs = getattr(inputs, name), getattr(untouched, name)
        assert torch.equal(mine[:3], theirs[:3])
        assert torch.equal(mine[7:], theirs[7:])


def write(target, **more):
    asked = WriteCase(**({"recipe": "engines", "tokens": 4, "page_size": 64, "pages": 2} | more))
    return verdict.judge(verdict.by_id("CACHE-BYTES"), target, asked)


@pytest.mark.parametrize("tiles", [("normal", "negative"), ("edge", "huge"), ("tiny", "zero")])
@pytest.mark.parametrize("more", [{}, {"slots": "skipped", "stride_gap": 64, "offset": 2, "page_size": 2}])
def test_a_writer_is_judged_byte_by_byte(tree, tiles, more):
    assert write(tree({WRITER_FILE: WRITER}), tiles=tiles, **more).holds


@pytest.mark.parametrize(
    ("old", "new", "tiles"),
    [
        ("floor) / 448.0", "1e-8) / 448.0", ("tiny",)),
        ("tl.ceil(", "tl.floor(", ("normal",)),
        ("    tl.store(scales + 7, tl.zeros((), dtype=tl.uint8))\n", "", ("normal",)),
        ("token * 512 + 448 + at", "token * 512 + 447 + at", ("normal",)),
        ("if slot == -1:", "if slot == -2:", ("normal",)),
        ("exponent + 127.0", "exponent + 128.0", ("edge",)),
        ("tl.exp2(exponent)", "tl.exp2(exponent + 1)", ("edge",)),
    ],
)
def test_each_fault_of_a_writer_shows(tree, old, new, tiles):
    assert WRITER.count(old) == 1
    target = tree({WRITER_FILE: WRITER.replace(old, new)})
    found = write(target, tiles=tiles, slots="skipped" if "slot" in old else "distinct", offset=4096)
    assert found.violated


def test_what_a_writer_cannot_be_asked_is_unknown(tree):
    target = tree({WRITER_FILE: WRITER})
    for more, said in (
        ({"slots": "past_end"}, "leave the cache"),
        ({"offset": 1}, "odd address"),
        ({"recipe": "deepseek", "tiles": ("zero",)}, "recipe engines"),
    ):
        found = write(target, **more)
        assert found.unknown
        assert said in found.headline
    assert write(target, recipe="deepseek", tiles=("normal",)).holds
    renamed = tree({WRITER_FILE: WRITER.replace("k_cache, slot_mapping", "cache, slots")}, "renamed")
    assert write(renamed).unknown


def test_a_triton_whose_casts_cannot_be_corrected_makes_the_writer_unknown(tree, monkeypatch):
    monkeypatch.setattr(vllm_casts, "reason", lambda: "its casts moved")
    found = write(tree({WRITER_FILE: WRITER}))
    assert found.unknown
    assert "its casts moved" in found.headline


if INTERPRETED:

    @triton.jit
    def cast_kernel(x_ptr, code_ptr, half_ptr, wide_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        x = tl.load(x_ptr + at)
        tl.store(code_ptr + at, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))
        tl.store(half_ptr + at, x.to(tl.bfloat16))
        tl.store(wide_ptr + at, x.to(tl.bfloat16).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def cast(x):
    codes, half, wide = (torch.empty(x.numel(), dtype=d) for d in (torch.uint8, torch.bfloat16, torch.uint8))
    cast_kernel[(1,)](x, codes, half, wide, N=x.numel())
    return codes, half, wide


def test_within_truthful_the_interpreter_rounds_as_a_gpu_does():
    assert vllm_casts.reason() == ""
    steps = torch.arange(0, 0x7F).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (steps[1:] + steps[:-1]) / 2
    near = torch.cat([middles, middles.nextafter(torch.tensor(9e9)), middles.nextafter(torch.tensor(0.0))])
    x = torch.cat([steps, near, torch.tensor([500.0, 1e9, 1e-9])])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 2048 - 2 * x.numel()))
    want = encode_e4m3(x), x.bfloat16(), encode_e4m3(x.bfloat16().float())
    with vllm_casts.truthful():
        assert all(torch.equal(got, w) for got, w in zip(cast(x), want, strict=True))
    assert not torch.equal(cast(x)[0], want[0]), "the interpreter needs no correction any more"


def test_a_target_by_name(tmp_path):
    plant(tmp_path, module(EXCEPT))
    assert isinstance(targets.resolve(f"vllm:{tmp_path}"), VllmTarget)
    with pytest.raises(ArgumentError):
        VllmTarget(str(tmp_path / "nowhere"))


def test_attention_is_not_served(tree):
    with pytest.raises(UnavailableError):
        tree(module(EXCEPT)).attend(None)
