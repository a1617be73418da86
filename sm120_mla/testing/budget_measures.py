"""A result held against its budget: which measures are out, where, and by how much."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Judgement", "Measures", "Miss"]


@dataclass(frozen=True)
class Miss:
    """One measure out of its budget, at its worst place. -1 stands for all rows, heads or dimensions."""

    measure: str
    row: int
    head: int
    dim: int
    got: float
    want: float
    allowed: float
    count: int
    note: str = ""

    def __str__(self) -> str:
        at = [f"{n} {v}" for n, v in (("row", self.row), ("head", self.head), ("dim", self.dim)) if v >= 0]
        where = ", ".join(at) or "over the whole result"
        more = f"; {self.count:,} such" if self.count > 1 else ""
        note = f" ({self.note})" if self.note else ""
        values = f"got {self.got:.6g}, want {self.want:.6g} +- {self.allowed:.3g}"
        return f"{self.measure}, {where}: {values}{more}{note}"


@dataclass(frozen=True)
class Judgement:
    """``ratios``: the largest part of each budget that was used. Rows and heads are counted together."""

    misses: tuple[Miss, ...]
    ratios: dict[str, float]
    judged: int
    unjudged: int

    @property
    def ok(self) -> bool:
        """Whether every measure is within its budget."""
        return not self.misses

    def complaint(self, *measures: str) -> str:
        """The misses of some measures, one a line; "" where there is none."""
        return "\n".join(str(miss) for miss in self.misses if miss.measure in measures)


@dataclass
class Measures:
    """Collects measures of one result."""

    misses: list[Miss] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def elements(
        self,
        measure: str,
        got: torch.Tensor,
        want: torch.Tensor,
        allowed: torch.Tensor,
        judged: torch.Tensor,
        *,
        empty_is_exact: bool = False,
    ) -> None:
        """Element by element; the first axes are row and head, a third the dimension.

        Where the reference is not finite, so must the result be; with ``empty_is_exact``, -inf is wanted
        as it is.
        """
        exact = (want == -torch.inf) & empty_is_exact
        same = (got == want) | (~got.isfinite() & ~want.isfinite() & ~exact)
        error = torch.where(same, 0.0, (got - want).abs())
        wrong = ~(error <= allowed) & ~same & judged
        ratio = torch.where(error == 0, 0.0, torch.where(error.isfinite(), error / allowed, torch.inf))
        ratio = torch.where(judged & ~ratio.isnan(), ratio, 0.0)
        self.ratios[measure] = float(ratio.max()) if ratio.numel() else 0.0
        if not bool(wrong.any()):
            return
        worst = torch.where(wrong, ratio, -1.0).argmax()
        place = tuple(int(n) for n in torch.unravel_index(worst, ratio.shape))
        row, head, dim = place if len(place) == 3 else (*place, -1)
        self.misses.append(
            Miss(
                measure,
                row,
                head,
                dim,
                float(got[place]),
                float(want[place]),
                float(allowed[place]),
                int(wrong.sum()),
            )
        )

    def rows(
        self, measure: str, got: torch.Tensor, want: float, allowed: torch.Tensor, judged: torch.Tensor
    ) -> None:
        """One value for each row and head."""
        target = torch.full_like(got, want)
        self.elements(measure, torch.where(judged, got, target), target, allowed, judged)

    def whole(self, measure: str, got: float, want: float, allowed: float) -> None:
        """One value over everything."""
        error = abs(got - want)
        self.ratios[measure] = error / allowed if allowed else 0.0
        if not error <= allowed:
            self.misses.append(Miss(measure, -1, -1, -1, got, want, allowed, 1))
