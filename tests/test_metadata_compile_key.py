"""No active width, batch size or alignment of a step compiles a kernel anew; decided with no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm120_mla.errors import UnavailableError
from sm120_mla.kernels import c128a, compile_key
from sm120_mla.kernels.runtime import INTERPRETED

ROOT = Path(__file__).resolve().parents[1]

# Runs where kernels are compiled: an interpreted kernel has no key.
CHILD = """
import json, torch
from sm120_mla.kernels import c128a, index_topk, index_windows
from sm120_mla.kernels.compile_key import compile_key

def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

keys = {}

def note(name, kernel, arguments):
    keys.setdefault(name, {})[compile_key(kernel, arguments)] = {
        "constexprs": {k: v for k, v in arguments.items() if k.isupper()},
        "types": {k: str(v.dtype) if isinstance(v, torch.Tensor) else "int"
                  for k, v in arguments.items() if not k.isupper() and k != "num_warps"},
        "num_warps": arguments["num_warps"],
    }

vector = ints(80, dtype=torch.int64)
for capacity in (128, 2432, 8192):
    decode, prefill, lens = ints(80, capacity), ints(80, capacity), ints(81)
    for width in sorted({128, 256, 1024, capacity}):
        for tokens in (1, 2, 16, 66):
            for offset in (0, 1):  # a slice of a persistent input is aligned or not
                part = slice(offset, offset + tokens)
                for columns in (1, 64, 4097):
                    if width <= capacity:
                        note("c128a", c128a.c128a_kernel, c128a.arguments(
                            decode, lens[offset:], prefill, vector[part], vector[part].int(), vector[part],
                            ints(tokens, columns), decode_tokens=tokens // 2, width=width, ratio=128,
                            block_size=2, num_blocks=None))

for tokens in (1, 2, 16, 66):
    for columns in (1, 64, 4097):
        for offset in (0, 1):
            part = slice(offset, offset + tokens)
            table, lens = ints(tokens, columns), ints(81)[offset:]
            for width in (128, 192):
                note("window", index_windows.window_kernel, index_windows.arguments(
                    ints(80, width), lens, vector[part], vector[part].int(), vector[part], table,
                    rows=tokens, draft=0, window=128, block_size=64, num_blocks=None))
            note("verify", index_windows.window_kernel, index_windows.arguments(
                ints(80, 192), lens, vector[part].int(), vector[part].int(), vector[part], table,
                rows=tokens, draft=6, window=128, block_size=64, num_blocks=None))
            for topk in (128, 512, 1024):
                note("global", index_topk.global_kernel, index_topk.global_arguments(
                    ints(80, 1024), lens, ints(80, topk)[part], vector[part].int(), vector[part], table,
                    block_size=64, num_blocks=None))
                note("combine", index_topk.combine_kernel, index_topk.combine_arguments(
                    ints(80, topk + 128), lens, ints(80, topk)[part], ints(82)[part], ints(82)[part],
                    ints(82)[part], topk=topk, window=128, ratio=4, workspace_stride=16 * tokens + offset,
                    window_base=tokens))

specs = {}
for module in (c128a, index_topk, index_windows):
    for spec in module.compile_specs():
        specs[spec.name] = {
            "function": spec.function, "constexprs": spec.constexprs, "types": spec.signature,
            "num_warps": spec.num_warps,
        }
odd = c128a.arguments(ints(4, 129), ints(4), ints(4, 129), vector[:4], vector[:4].int(), vector[:4],
                      ints(4, 65), decode_tokens=2, width=128, ratio=128, block_size=2, num_blocks=None)
note("odd", c128a.c128a_kernel, odd)
print(json.dumps({"keys": keys, "specs": specs}))
"""


@pytest.fixture(scope="module")
def child() -> Any:
    unset = ("TRITON_INTERPRET", "SM120_MLA_MODE")
    env = {k: v for k, v in os.environ.items() if k not in unset} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", ["c128a", "window", "verify", "global", "combine"])
def test_one_binary_serves_every_step(child: dict[str, Any], kernel: str) -> None:
    keys = child["keys"][kernel]

    assert len(keys) == 1, "\n".join(keys)


def test_a_buffer_that_cannot_take_16_byte_stores_has_a_binary_of_its_own(
    child: dict[str, Any],
) -> None:
    keys = child["keys"]

    assert keys["odd"].keys() != keys["c128a"].keys()


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("c128a", "c128a_kernel"),
        ("odd", "c128a_kernel"),
        ("window", "window_kernel"),
        ("verify", "window_kernel"),
        ("global", "global_kernel"),
        ("combine", "combine_kernel"),
    ],
)
def test_what_is_launched_is_among_the_configurations_compiled_for_sm_120(
    child: dict[str, Any], kernel: str, function: str
) -> None:
    triton_names = {"torch.int32": "*i32", "torch.int64": "*i64", "int": "i32"}
    (launched,) = child["keys"][kernel].values()
    launched["types"] = {k: triton_names.get(v, v) for k, v in launched["types"].items()}

    specs = child["specs"].values()

    assert launched | {"function": function} in list(specs)


@pytest.mark.skipif(not INTERPRETED, reason="asks about an interpreted kernel")
def test_an_interpreted_kernel_has_no_key() -> None:
    with pytest.raises(UnavailableError, match="compile key"):
        compile_key.compile_key(c128a.c128a_kernel, {})
