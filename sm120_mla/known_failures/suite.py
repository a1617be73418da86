"""Classes h and i: the interpreter, the test run, and binaries that are not those of the tree."""

from __future__ import annotations

from .row import KnownFailure, likely, named, symptom

__all__ = ["ROWS"]

ROWS = (
    KnownFailure(
        id="h-no-triton-driver",
        title="Triton counts no driver, or two, where one is expected",
        signatures=(
            named("active drivers (", r"(?P<drivers>\d+) active drivers \("),
            named("active driver(s) found (expected 1)", r"(?P<drivers>\d+) active driver"),
        ),
        engine="Triton, vLLM",
        versions="Triton 3.2 and later",
        invariants=("INTERP-FACT",),
        cause="An autotune decorator asks for the driver when its module is imported. On a machine with no "
        "GPU there is none; with a CPU backend there are two, and vLLM switches Triton off.",
        remedy="No @triton.autotune at import; in this suite SM120_MLA_MODE=reference.",
        references=("triton-lang/triton#6150", "triton-lang/triton#11207", "vllm-project/vllm#53530"),
        example="RuntimeError: 0 active drivers ([]). There should only be one.",
        reports=("H06",),
    ),
    KnownFailure(
        id="h-deadline",
        title="a Hypothesis example took longer than its deadline: the first GPU call compiles",
        signatures=(
            named("DeadlineExceeded"),
            likely("Unreliable test timings!"),
        ),
        engine="Hypothesis",
        versions="default deadline of 200 ms",
        invariants=(),
        cause="Compilation and the CUDA context fall into the first example: 12 to 27 seconds.",
        remedy="deadline=None (this suite's profiles have it) and a warm-up outside the test.",
        references=("pytorch/FBGEMM#5932",),
        example="hypothesis.errors.DeadlineExceeded: Test took 12841.20ms, which exceeds the deadline of "
        "200.00ms",
        reports=("H09",),
    ),
    KnownFailure(
        id="h-flaky",
        title="a failing example did not fail again: something random is not drawn by Hypothesis",
        signatures=(named("hypothesis.errors.Flaky"), likely("FlakyFailure")),
        engine="Hypothesis",
        versions="any",
        invariants=(),
        cause="torch.rand in a strategy or a test: Hypothesis replays what it drew, and that was not it.",
        remedy="Draw a seed and build the tensor from a generator of its own, as this suite's cases do.",
        references=("mit-ll-responsible-ai/equine#197", "pytorch/pytorch#25248"),
        example="hypothesis.errors.FlakyFailure: Hypothesis produces unreliable results: Falsified on the "
        "first call",
        reports=("H10",),
    ),
    KnownFailure(
        id="h-workers-share-a-gpu",
        title="several test workers fill one GPU",
        signatures=(
            likely("CUDA out of memory", near=("[gw0]", "[gw1]", "created: ", "pytest-xdist")),
            named("worker 'gw", r"worker '(?P<worker>gw\d+)' crashed"),
        ),
        engine="pytest-xdist",
        versions="any",
        invariants=(),
        cause="-n auto counts cores, not GPU memory; every worker opens a context on GPU 0.",
        remedy="One worker a GPU (this suite pins them), OMP_NUM_THREADS=1.",
        references=("NVIDIA/cccl#4722", "pytorch/pytorch#193647"),
        example="[gw1] linux -- Python 3.12.3\n"
        "E   torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        reports=("H08",),
    ),
    KnownFailure(
        id="i-mixed-flashinfer",
        title="flashinfer-python, -cubin and -jit-cache are of different versions",
        signatures=(
            named(
                "does not match flashinfer version",
                r"(?P<package>flashinfer-[\w-]+) version \((?P<has>[^)]+)\) does not match flashinfer "
                r"version \((?P<wants>[^)]+)\)",
            ),
            named("MISMATCH vs flashinfer-python", r"==(?P<wants>\S+)"),
        ),
        engine="FlashInfer",
        versions="any; 0.6.14 never had a cubin package",
        invariants=("ROUTE-CONTRACT",),
        cause="The packaged module is loaded before sources are looked at, so a fix in the sources, or in a "
        "newer flashinfer-python, has no effect.",
        remedy="Remove flashinfer-jit-cache and -cubin, or install all three of one version; then clear the "
        "user's FlashInfer cache.",
        references=("vllm-project/vllm#50720", "flashinfer-ai/flashinfer#3817"),
        example="RuntimeError: flashinfer-jit-cache version (0.6.13+cu130) does not match flashinfer version "
        "(0.6.14). Please install the same version of both packages.",
        reports=("C08", "I03"),
    ),
    KnownFailure(
        id="i-stale-extension",
        title="a compiled extension is not of the sources or the torch beside it",
        signatures=(
            likely("undefined symbol: ", r"undefined symbol: (?P<symbol>_Z\w{4,})"),
            symptom(
                "cannot open shared object file", r"(?P<library>lib(?:cudart|nvrtc|torch)\S*): cannot open"
            ),
        ),
        engine="any wheel built elsewhere",
        versions="any",
        invariants=(),
        cause="torch, CUDA or the package were upgraded without the extension; a bisect that only swaps "
        "sources judges the old binary.",
        remedy="Rebuild, or install wheels of one set; in a bisect such a commit is 125, not bad.",
        references=("flashinfer-ai/flashinfer#4885", "pytorch/pytorch#22868"),
        example="ImportError: vllm/_C.abi3.so: undefined symbol: "
        "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib",
        reports=("I02", "I04"),
    ),
)
