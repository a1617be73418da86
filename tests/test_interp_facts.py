"""interp_facts: every fact holds on the Triton installed, every probe can tell when it does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sm120_mla import device
from sm120_mla.errors import UnavailableError
from sm120_mla.kernels import runtime
from sm120_mla.testing import interp_facts
from sm120_mla.testing.interp_facts import FACTS, Fact, check, fact

NAMES = [f.name for f in FACTS]
MADE_UP = Fact("made-up", "something is so", lambda: True, ("3.9", "3.10"), "a kernel")

interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are compiled in this process")


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_the_fact_holds_here(name: str) -> None:
    found = fact(name)
    try:
        held = found.probe()
    except UnavailableError as error:
        pytest.skip(str(error))

    assert held, found.statement
    known = ".".join(interp_facts.installed_version().split(".")[:2]) in found.seen_on
    assert check(found)[0] == ("holds" if known else "unknown")


class Pretend:
    """Stands for a kernel: ``Pretend(body)[grid](...)`` calls ``body(grid, ...)``."""

    def __init__(self, body: Callable[..., None]) -> None:
        self.body = body

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.body(grid, *args)


def right_product(grid: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n: int) -> None:
    out.copy_(a.float() @ b.float())


def product_off_by_one(grid: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n: int) -> None:
    out.copy_(a.float() @ b.float() + 1)


def right_cast(grid: Any, src: torch.Tensor, dst: torch.Tensor, n: int) -> None:
    dst.copy_(src.to(dst.dtype))


def by_reciprocal(grid: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n: int) -> None:
    out.copy_(a * (1 / b))


def saturating(grid: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, n: int) -> None:
    out.copy_((a.long() * b.long()).clamp(-(2**31), 2**31 - 1))


def on_a_copy(grid: Any, dst: torch.Tensor, offset: int, value: int) -> None:
    pass


def touching_memory(grid: Any, dst: torch.Tensor, offset: int, value: int) -> None:
    dst[: 128 << 20].zero_()
    dst[offset] = value


def bounded(grid: Any, dst: torch.Tensor, offset: int, value: int) -> None:
    if offset < dst.numel():
        dst[offset] = value


def wrong_address(grid: Any, src: torch.Tensor, dst: torch.Tensor, offset: int) -> None:
    dst.copy_(src.view(torch.int64)[offset // 8 - 1])


def mask_ignored(grid: Any, dst: torch.Tensor, mask: torch.Tensor, stride: int, n: int) -> None:
    dst[: n * stride : stride] = 7


def masked_lanes_written_back(grid: Any, dst: torch.Tensor, mask: torch.Tensor, stride: int, n: int) -> None:
    lanes = dst[: n * stride : stride]
    lanes.copy_(torch.where(mask != 0, 7, lanes).to(torch.uint8))


def no_return(grid: tuple[int, ...], out: torch.Tensor, n: int) -> None:
    out[: grid[0]] = 1


def refused(grid: Any, *args: Any) -> None:
    raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")


def all_win(
    grid: Any, cells: torch.Tensor, old: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, *rest: int
) -> None:
    active = mask != 0
    old[active] = cells[ids[active]]
    cells[ids[active]] = rest[0] if len(rest) == 2 else cells[ids[active]] + 1


def masked_lanes_take_part(
    grid: Any, cells: torch.Tensor, old: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, *rest: int
) -> None:
    for lane in range(len(ids)):
        cell = int(ids[lane])
        if mask[lane]:
            old[lane] = cells[cell]
        cells[cell] = rest[0] if len(rest) == 2 else cells[cell] + 1


OTHER_BEHAVIOUR: list[tuple[str, str, Callable[..., None]]] = [
    ("dot-bf16", "_dot_kernel", right_product),
    ("dot-fp16", "_dot_kernel", product_off_by_one),
    ("dot-fp32", "_dot_kernel", product_off_by_one),
    ("cast-e4m3", "_cast_kernel", right_cast),
    ("cast-bf16", "_cast_kernel", right_cast),
    ("nan-e4m3", "_cast_kernel", right_cast),
    ("division", "_divide_kernel", by_reciprocal),
    ("int32-wrap", "_multiply_kernel", saturating),
    ("storage-in-place", "_poke_kernel", on_a_copy),
    ("storage-in-place", "_poke_kernel", touching_memory),
    ("store-unbounded", "_poke_kernel", bounded),
    ("pointer-cast", "_pointer_kernel", wrong_address),
    ("masked-store", "_masked_kernel", mask_ignored),
    ("masked-store", "_masked_kernel", masked_lanes_written_back),
    ("early-return", "_return_kernel", no_return),
    ("inference-tensor", "_poke_kernel", refused),
    ("inference-tensor", "_poke_kernel", on_a_copy),
    ("atomic-xchg", "_exchange_kernel", all_win),
    ("atomic-xchg", "_exchange_kernel", masked_lanes_take_part),
    ("atomic-add", "_add_kernel", all_win),
    ("atomic-add", "_add_kernel", masked_lanes_take_part),
    ("autotune", "_step_kernel", refused),
    ("do-not-specialize", "_unspecialised_kernel", refused),
]


@interpreted
@pytest.mark.parametrize(("name", "kernel", "body"), OTHER_BEHAVIOUR)
def test_a_probe_notices_another_behaviour(
    name: str, kernel: str, body: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interp_facts, kernel, Pretend(body))
    monkeypatch.setattr(device, "cuda_available", lambda: False)

    standing, text = check(fact(name), "3.9.0")

    assert standing == "changed"
    assert fact(name).relied_on_by in text


@interpreted
def test_autotune_that_works_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interp_facts, "_tuned", lambda *steps: steps[0])
    monkeypatch.setattr(device, "cuda_available", lambda: False)

    assert check(fact("autotune"), "3.9.0")[0] == "changed"


def test_every_fact_has_another_behaviour_to_notice() -> None:
    assert {name for name, _, _ in OTHER_BEHAVIOUR} == set(NAMES)


def test_names_are_unique_and_facts_complete() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(f.statement and f.relied_on_by and f.seen_on for f in FACTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTS[0].name = "other"  # type: ignore[misc]


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_on_a_version_never_looked_at_the_verdict_is_unknown(name: str) -> None:
    standing, text = check(fact(name), "99.1.0")

    assert standing == "unknown"
    assert fact(name).relied_on_by in text


@interpreted
@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("3.9.0", "holds"),
        ("3.9", "holds"),
        ("3.10.2+git0a1b2c", "holds"),
        ("3.1.0", "unknown"),
        ("3.90.0", "unknown"),
        ("4.3.9", "unknown"),
    ],
)
def test_versions_match_by_major_and_minor(version: str, standing: str) -> None:
    assert check(MADE_UP, version)[0] == standing


@interpreted
@pytest.mark.parametrize(
    ("held", "version", "standing", "said"),
    [
        (True, "3.9.0", "holds", "made-up holds on Triton 3.9.0: something is so"),
        (False, "3.9.0", "changed", "made-up changed on Triton 3.9.0 (seen on Triton 3.9, 3.10)"),
        (True, "4.0.0", "unknown", "it seems to hold"),
        (False, "4.0.0", "unknown", "it seems not to hold"),
    ],
)
def test_the_four_outcomes(held: bool, version: str, standing: str, said: str) -> None:
    found, text = check(dataclasses.replace(MADE_UP, probe=lambda: held), version)

    assert found == standing
    assert said in text
    assert ("Relied on by: a kernel" in text) is (standing != "holds")


def raising(error: Exception) -> Callable[[], bool]:
    def probe() -> bool:
        raise error

    return probe


@interpreted
@pytest.mark.parametrize(
    ("error", "standing", "said"),
    [
        (ValueError("no such op"), "changed", "ValueError: no such op"),
        (UnavailableError("room", "there is none", "Make room."), "unknown", "there is none"),
    ],
)
def test_a_probe_that_raises(error: Exception, standing: str, said: str) -> None:
    found, text = check(dataclasses.replace(MADE_UP, probe=raising(error)), "3.9.0")

    assert found == standing
    assert said in text


def test_compiled_kernels_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)

    standing, text = check(dataclasses.replace(MADE_UP, probe=raising(AssertionError("was run"))), "3.9.0")

    assert standing == "unknown"
    assert "compiled in this process" in text


@interpreted
def test_a_gpu_leaves_autotune_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_available", lambda: True)

    assert check(fact("autotune"), "3.9.0")[0] == "unknown"


@interpreted
def test_want_of_address_space_leaves_offsets_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*size: Any, **how: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory: you tried to allocate 5368709120 bytes.")

    monkeypatch.setattr(torch, "empty", empty)

    standing, text = check(fact("storage-in-place"), "3.9.0")

    assert standing == "unknown"
    assert "ulimit" in text


@interpreted
def test_the_installed_version_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interp_facts, "installed_version", lambda: "4.0.1")

    standing, text = check(MADE_UP)

    assert standing == "unknown"
    assert "4.0.1" in text
