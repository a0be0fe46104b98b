# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for GPUs that are not here, and counts what they take.

    python -m benchmarks.gpu_compile               the sample that `make test` checks
    python -m benchmarks.gpu_compile --all         every configuration (tens of minutes)
    python -m benchmarks.gpu_compile --document docs/gpu.md      rewrite the table

Triton brings NVIDIA's assembler, so no GPU and no CUDA toolkit is needed. Registers and
spills come from the binary's resource report; instructions of the innermost loop are
counted in its disassembly where `nvdisasm` is at hand (Triton's wheel has it).
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# One rounding for each operation, as the reference has it; the launches say it too.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration; `rows` is 0 where a kernel has none."""

    kernel: str
    fmt: str
    head_dim: int
    capability: int
    rows: int = 0
    group: int = 4
    block_size: int = 128


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: Per thread.
        spill_bytes: Local memory per thread that is no array: 0 without spills.
        shared_bytes: Shared memory per program.
        warps: Warps per program.
        loop: Instructions of the innermost loop that multiplies; 0 if not counted.
        matrix: Matrix instructions among them.
        seconds: How long the compilation took.

    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    loop: int
    matrix: int
    seconds: float


SAMPLE = (
    Case("store", "polykv_k8v3", 128, 80),
    Case("store", "polykv_k7v4", 64, 75),
    Case("prepare", "polykv_k7v4", 128, 90),
    Case("finish", "polykv_k8v3", 128, 86),
    Case("attend", "polykv_k8v3", 128, 80, 8),
    Case("attend", "polykv_k8v3", 128, 90, 8),
    Case("attend", "polykv_k8v3", 128, 90, 32),
    Case("attend", "polykv_k7v4", 64, 86, 8),
    Case("attend", "polykv_k8v8", 64, 80, 32),
    Case("attend", "polykv_k8v4", 128, 90, 8),
)
"""What `make test` compiles: each kernel, each format, each architecture."""


def every_case() -> Iterator[Case]:
    """Yield all configurations that can be launched, and store kernels for sm_75."""
    from polykv_vllm.formats import FORMATS
    from polykv_vllm.kernels.triton.tile import HEAD_DIMS

    for fmt in FORMATS:
        for head_dim in HEAD_DIMS:
            for capability in (75, 80, 86, 89, 90):
                for block_size in (16, 32, 64, 128):
                    shape = {"block_size": block_size}
                    yield Case("store", fmt, head_dim, capability, **shape)
                    if capability == 75:
                        continue
                    for rows, group in ((8, 1), (8, 4), (8, 8), (16, 16), (32, 4)):
                        yield Case(
                            "attend", fmt, head_dim, capability, rows, group, block_size
                        )
                if capability != 75:
                    yield Case("prepare", fmt, head_dim, capability)
                    yield Case("finish", fmt, head_dim, capability)


_INT, _LONG, _FLOAT = "i32", "i64", "fp32"
_STATES = {"part_acc": "*fp32", "part_peak": "*fp32", "part_total": "*fp32"}
_TYPES: dict[str, dict[str, str]] = {
    "store": {
        "key": "*i16", "value": "*i16", "cache": "*u8", "slot_mapping": "*i64",
        "multipliers": "*fp32", "num_tokens": _INT, "key_token_stride": _INT,
        "key_head_stride": _INT, "value_token_stride": _INT,
        "value_head_stride": _INT, "block_stride": _LONG, "head_stride": _LONG,
        "norm": _FLOAT,
    },
    "prepare": {
        "query": "*i16", "terms": "*i8", "row_scale": "*fp32", "correction": "*i32",
        "multipliers": "*fp32", "num_rows": _INT, "token_stride": _INT,
        "head_stride": _INT, "norm": _FLOAT, "softmax_scale": _FLOAT,
    },
    "attend": {
        "terms": "*i8", "row_scale": "*fp32", "correction": "*i32", "cache": "*i8",
        "block_table": "*i32", "items": "*i32", "item_count": "*i32",
        "item_tokens": "*i32", "token_end": "*i32", "token_slot": "*i32",
        "token_split": "*i32", **_STATES, "num_slots": _INT, "table_stride": _INT,
        "block_stride": _LONG, "head_stride": _LONG, "first_head": _INT,
        "window": _INT,
    },
    "finish": {
        "output": "*i16", "row_scale": "*fp32", "tokens": "*i32",
        "token_slot": "*i32", "token_parts": "*i32", **_STATES, "num_tokens": "*i32",
        "num_slots": _INT, "token_stride": _INT, "head_stride": _INT,
        "first_head": _INT, "norm": _FLOAT,
    },
}  # fmt: skip
_ALIGNED = {
    "key", "value", "cache", "multipliers", "terms", "query", "output", "part_acc",
    "row_scale", "correction", "key_token_stride", "key_head_stride",
    "value_token_stride", "value_head_stride", "block_stride", "head_stride",
    "token_stride",
}  # fmt: skip


def _constants(case: Case) -> tuple[Any, dict[str, Any], Any]:
    """Return the kernel, its compile-time arguments and its launch configuration."""
    from polykv_vllm.formats import FORMATS
    from polykv_vllm.kernels.triton import attend, config, launch, store
    from polykv_vllm.kernels.triton.assembly import assembly_of
    from polykv_vllm.kernels.triton.tile import tile_of

    fmt = FORMATS[case.fmt]
    tile = tile_of(fmt, case.head_dim, case.block_size)
    int8 = case.capability >= config.INT8_CAPABILITY
    device = config.DeviceConfig(case.capability, int8, True)
    heads = {"HEADS": 8 * case.group, "GROUP": case.group}
    treated = {"DTYPE": 0, "SCALED": True, "ROTATED": True}
    plain = config.LaunchConfig(4, 1)
    if case.kernel == "store":
        tokens = config.store_tokens(case.head_dim)
        return store.store_kernel, {"T": tile, **treated, "TOKENS": tokens}, plain
    if case.kernel == "prepare":
        extra = {**heads, **treated, "ROWS": launch.PREPARE_ROWS}
        return attend.prepare_kernel, {"T": tile, **extra}, plain
    if case.kernel == "finish":
        rows = 1 << (case.group - 1).bit_length()
        extra = {**heads, "DTYPE": 0, "ROWS": rows}
        return attend.finish_kernel, {"T": tile, **extra}, config.LaunchConfig(2, 1)
    extra = {"A": assembly_of(tile), **heads, "ROWS": case.rows}
    extra |= {"STACKED": case.rows == 8, "INT8": int8}
    launched = config.attend_config(device, fmt, case.head_dim, case.rows)
    return attend.attend_kernel, {"T": tile, **extra}, launched


def compile_case(case: Case) -> Resources:
    """Compile one kernel for its architecture and read the resource report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants, launched = _constants(case)
    names = list(kernel.arg_names)
    types = _TYPES[case.kernel]
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): aligned for i, n in enumerate(names) if n in _ALIGNED},
    )
    begin = time.perf_counter()
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", case.capability, 32),
        options={
            "num_warps": launched.num_warps,
            "num_stages": launched.num_stages,
            "enable_fp_fusion": False,
        },
    )
    seconds = time.perf_counter() - begin
    report, listing = _inspect(compiled.asm["cubin"])
    loop, matrix = _innermost_loop(listing)
    return Resources(
        report["REG"],
        report["STACK"],
        int(compiled.metadata.shared),
        launched.num_warps,
        loop,
        matrix,
        round(seconds, 1),
    )


def _inspect(cubin: bytes) -> tuple[dict[str, int], str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
        report = {
            name: int(number)
            for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text.stdout)
        }
        command = [str(tools / "nvdisasm"), file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return report, listing.stdout


def _innermost_loop(listing: str) -> tuple[int, int]:
    """Return the instructions of the loop that multiplies most, and its products."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(match[1])
    loops = []
    for end, text in enumerate(instructions):
        match = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text)
        if match and labels.get(match[1], end + 1) <= end:
            loops.append((labels[match[1]], end))
    best = (0, 0)
    for begin, end in loops:
        if any((a, b) != (begin, end) and begin <= a and b <= end for a, b in loops):
            continue
        body = instructions[begin : end + 1]
        matrix = sum(bool(re.search(r"\b[IH]G?MMA\b", t)) for t in body)
        best = max(best, (matrix, len(body)))
    return best[1], best[0]


def table(results: list[tuple[Case, Resources]]) -> str:
    """Return the results as a Markdown table."""
    head = (
        "| kernel | format | D | sm | rows | warps | registers | spills | shared "
        "| loop | matrix |"
    )
    lines = [
        head,
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, got in results:
        loop = (str(got.loop), str(got.matrix)) if case.kernel == "attend" else ("", "")
        cells = (
            case.kernel, case.fmt, case.head_dim, case.capability, case.rows or "",
            got.warps, got.registers, got.spill_bytes, got.shared_bytes, *loop,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Compile and print; exit with 1 if anything spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every configuration")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--document", type=Path, help="rewrite the table in a document")
    options = parser.parse_args()
    results = []
    for case in every_case() if options.all else SAMPLE:
        results.append((case, compile_case(case)))
        print(json.dumps({**asdict(case), **asdict(results[-1][1])}), flush=True)
    if options.json:
        rows = [{**asdict(case), **asdict(got)} for case, got in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.document:
        before, rest = options.document.read_text().split(BEGIN)
        after = rest.split(END)[1]
        text = f"{before}{BEGIN}\n{table(results)}\n{END}{after}"
        options.document.write_text(text)
    spilled = [case for case, got in results if got.spill_bytes]
    if spilled:
        raise SystemExit(f"registers are spilled in {len(spilled)} of {len(results)}")


if __name__ == "__main__":
    main()
