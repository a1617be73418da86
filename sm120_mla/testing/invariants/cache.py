"""CACHE: the cache writer's bytes, against the reference quantiser's."""

from __future__ import annotations

import torch

from ...case import WriteCase
from ...codec import recipe_by_name
from ...layout import by_name
from ...targets.base import Target
from ..cache_cases import after_write, differences
from ..derive import run_device
from ..guards import GUARD_BYTES, noise
from ..observe import run
from ..verdict import HOLDS, Verdict, invariant, violated

__all__ = ["rows_of_k"]


def rows_of_k(case: WriteCase) -> torch.Tensor:
    """bf16 ``[tokens, head_dim]`` on the CPU: each tile of the kind the case draws for it."""
    layout = by_name(case.layout)
    gen = torch.Generator().manual_seed(case.seed)
    tiles = layout.head_dim // 64
    kinds = case.tiles or ("normal",)
    k = torch.randn((case.tokens, tiles, 64), generator=gen)
    choice = torch.randint(0, len(kinds), (case.tokens, tiles), generator=gen)
    # Amax at which the scale steps up, exactly on it and one bf16 above.
    power = torch.exp2(torch.randint(-24, 8, (case.tokens, tiles), generator=gen).float())
    step = 1 + torch.randint(0, 2, (case.tokens, tiles), generator=gen) / 128
    edge = k.clamp(-1, 1)
    edge[..., 0] = 1
    values = {
        "normal": k,
        "zero": torch.zeros_like(k),
        "tiny": k * 2.0**-26,
        "huge": k * 2.0**12,
        "negative": -k.abs(),
        "edge": edge * (448 * power * step)[..., None],
    }
    out = torch.zeros_like(k)
    for n, kind in enumerate(kinds):
        out = torch.where((choice == n)[..., None], values[kind], out)
    return out.reshape(case.tokens, layout.head_dim).to(torch.bfloat16)


def _slots(case: WriteCase) -> torch.Tensor:
    """``[tokens]`` distinct slots; then some that write nothing."""
    total = case.pages * case.page_size
    gen = torch.Generator().manual_seed(case.seed + 1)
    slots = torch.full((case.tokens,), -1, dtype=torch.int64)
    some = torch.randperm(total, generator=gen)[: case.tokens]
    slots[: some.numel()] = some
    if case.slots == "none":
        slots.fill_(-1)
    if case.slots == "skipped":
        slots[::2] = -1
    if case.slots == "past_end":
        slots[::2] = total + torch.arange(slots[::2].numel())
    return slots.to(getattr(torch, case.dtype))


@invariant(
    "CACHE-BYTES",
    "the cache writer's bytes equal the reference quantiser's, for the recipe named, zero, tiny, huge and "
    "boundary tiles included; skipped slots, tails and other tokens stay as they are, and the pad byte is 0",
    origin="three recipes and two pad conventions in the field; gaps 28-30, 32 of docs/upstream-gaps.md",
    where=("reference", "cuda", "sm120"),
    cases=("write",),
)
def cache_bytes(target: Target, case: WriteCase) -> Verdict:
    """The whole storage, byte by byte, guard zones included."""
    layout, recipe = by_name(case.layout), recipe_by_name(case.recipe)
    payload = layout.payload(case.page_size)
    stride = payload + case.stride_gap
    start = GUARD_BYTES + case.offset
    room = 2 * stride if case.slots == "past_end" else 0
    before = noise(start + case.pages * stride + room + GUARD_BYTES, case.seed + 2)
    live = before.clone().to(run_device())
    cache = torch.as_strided(live, (case.pages, payload), (stride, 1), start)
    k, slots = rows_of_k(case), _slots(case)

    run(
        "writing the cache",
        lambda: target.write_cache(
            k.to(live.device),
            slots.to(live.device),
            cache,
            case.page_size,
            layout=layout,
            recipe=case.recipe,
        ),
    )

    wanted = before.clone()
    view = torch.as_strided(wanted, (case.pages, payload), (stride, 1), start)
    view.copy_(after_write(view, k, slots, layout, case.page_size, recipe))
    wrong = (live.cpu() != wanted).nonzero().flatten()
    if not wrong.numel():
        return HOLDS
    inside = differences(cache, view, layout, case.page_size)
    where = inside[0] if inside else f"byte {int(wrong[0]) - start} of the pool, which is no page's"
    held = f"it held 0x{int(before[wrong[0]]):02x} before; {wrong.numel()} bytes differ"
    return violated(f"the writer ({case.recipe}) left wrong bytes", f"{where}\n{held}")
