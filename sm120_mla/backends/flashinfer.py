"""FlashInfer's SM120 kernels behind the backend interface: 0.7.1 to 0.7.4, and 0.6.14 to 0.6.18.

Newer releases read the caches as they are. Older ones take pages of 64 tokens, which a split makes, in a
destination whose first page is not the pool's: masked columns of those releases read slot 0 of their
cache, and slot 0 there is written with zeros in each step, so no byte of the pool can reach a masked
column. A pool that is handed to them as it is, a main cache of pages of 64 or an extra cache of pages of 2
or 64, must have a finite slot 0 (``preconditions``).

The kernels' LSE includes the sink. Where the LSE is wanted, they run without it and the output is
multiplied by ``sigmoid(lse - sink)`` afterwards: the sink cannot be subtracted again from a folded LSE in
fp32.
"""

from __future__ import annotations

from .. import device, pages
from ..device import Capability
from ..envelopes import Plan, Refusal, plan
from ..errors import ArgumentError, CaptureError, UnavailableError
from ..kernels import fi_finish, fi_prepare
from . import flashinfer_api as api
from .base import AttentionCall, AttentionShape, Support
from .flashinfer_job import Job, assemble

__all__ = ["FlashInferBackend"]

_SMALLEST_SCALE = 2.0**-60
"""Below it the mask of 0.6, -1e30 times the scale, is no longer far from any logit."""


class FlashInferBackend:
    """One per process: it remembers what was found installed and which shapes have run."""

    name = "flashinfer"

    def __init__(self, found: api.Installed | Support | None = None) -> None:
        """``found``: what counts as installed; None: what ``flashinfer_api.probe`` finds."""
        self._found = found
        self._ran: set[tuple[object, ...]] = set()

    def available(self) -> Support:
        """Whether FlashInfer is installed in a release that is served, and there is a GPU for it."""
        found = self._probe()
        if isinstance(found, Support):
            return found
        if found.needs_gpu and not api.reachable():
            return Support(
                False,
                "there is no CUDA GPU for FlashInfer's compiled kernels",
                "Use the triton backend or the reference.",
            )
        return Support(True, f"flashinfer {found.version}, tables {found.envelope.name}")

    def supports(self, shape: AttentionShape, capability: Capability | None) -> Support:
        """Whether the installed release serves a call of these numbers; else the nearest shape that works."""
        available = self.available()
        if not available:
            return available
        found = self._installed()
        if capability is None or capability[0] != 12:
            have = "there is no GPU" if capability is None else f"the GPU has {capability[0]}.{capability[1]}"
            return Support(
                False, f"its sparse MLA kernels are for capability 12.x; {have}", "Use the triton backend."
            )
        served = plan(found.envelope, shape)
        if isinstance(served, Refusal):
            reason = f"{served.argument} = {served.value}: flashinfer {found.version} takes {served.expected}"
            return Support(False, reason, served.remedy)
        refusal = _scale_refusal(found, shape.scale)
        if refusal is not None:
            return Support(False, f"{refusal.argument} = {refusal.value}: {refusal.expected}", refusal.remedy)
        return Support(True, "; ".join(found.envelope.known))

    def preconditions(self, shape: AttentionShape) -> tuple[str, ...]:
        """Arguments whose slot 0 must be finite for a call of these numbers; empty where nothing is asked."""
        served = plan(self._installed().envelope, shape)
        return () if isinstance(served, Refusal) else served.finite_slot_zero

    def run(self, call: AttentionCall) -> None:
        """Write ``call.out`` and, where wanted, ``call.lse``.

        Raises ``ArgumentError`` for a shape or scale that the installed release does not serve,
        ``UnavailableError`` without FlashInfer, ``GrowthDuringCaptureError`` and ``CaptureError`` in a
        capture of a shape that has not run before. Nothing is launched before these checks.
        """
        found = self._installed()
        if call.shape.tokens == 0:
            return
        served = self._checked(call, found)
        job = assemble(call, served, found.envelope)
        if found.envelope.warm_up and device.is_capturing() and job.kernel.signature not in self._ran:
            raise CaptureError(
                f"flashinfer {found.version} plans a shape when it first runs, which a capture forbids. "
                f"Run the same call ({call.shape.tokens} rows) once before the capture."
            )
        _prepare(call, job)
        found.attend(job.kernel)
        if found.envelope.warm_up:
            self._ran.add(job.kernel.signature)
        _finish(job)

    def _probe(self) -> api.Installed | Support:
        if self._found is None:
            self._found = api.probe()
        return self._found

    def _installed(self) -> api.Installed:
        found = self._probe()
        if isinstance(found, Support):
            raise UnavailableError("the flashinfer backend", found.reason, found.remedy)
        return found

    @staticmethod
    def _checked(call: AttentionCall, found: api.Installed) -> Plan:
        served = plan(found.envelope, call.shape)
        if isinstance(served, Refusal):
            raise ArgumentError(
                served.argument,
                served.value,
                f"{served.expected}, as flashinfer {found.version} has it",
                served.remedy,
            )
        refusal = _scale_refusal(found, call.scale)
        if refusal is not None:
            raise ArgumentError(refusal.argument, refusal.value, refusal.expected, refusal.remedy)
        return served


def _scale_refusal(found: api.Installed, scale: float) -> Refusal | None:
    if not found.envelope.masks_before_scale or scale >= _SMALLEST_SCALE:
        return None
    return Refusal(
        "softmax_scale",
        scale,
        f"at least 2**-60, as flashinfer {found.version} scales its mask",
        "Use flashinfer 0.7.1 or later, or the triton backend.",
    )


def _prepare(call: AttentionCall, job: Job) -> None:
    """Index rows, copies of what is not contiguous, and the split of pages."""
    arguments = fi_prepare.arguments(job.main, job.extra)
    fi_prepare.prepare_kernel[fi_prepare.grid(call.shape.tokens, job.extra is not None)](**arguments)
    for target, source in job.copies:
        target.copy_(source)
    for cache, destination in job.splits:
        # In as many parts as one split can take: nothing may be refused any more.
        rows, step = cache.indices.shape[0], max(pages.rows_at_once(cache.indices.shape[1]), 1)
        for begin in range(0, rows, step):
            pages.split_pages(
                cache.pool,
                cache.geometry.page_size,
                cache.indices[begin : begin + step],
                topk_length=None if cache.lengths is None else cache.lengths[begin : begin + step],
                layout=cache.geometry.layout,
                buffers=call.buffers,
                scope=call.scope,
                out=destination,
                validate="metadata",
            )


def _finish(job: Job) -> None:
    if job.finish is None:
        return
    rows, heads = job.kernel.q.shape[:2]
    fi_finish.finish_kernel[fi_finish.grid(rows, heads)](**job.finish)
