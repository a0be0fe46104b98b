# SPDX-License-Identifier: Apache-2.0
"""The table of seams: `python -m polykv_vllm.seams`; and the seams as patches."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from polykv_vllm.seams import registry
from polykv_vllm.seams.patches import write_patches
from polykv_vllm.seams.seam import SeamState
from polykv_vllm.seams.source import SourceTree


def main(argv: list[str] | None = None) -> int:
    """Print every seam; return 1 when one does not fit the installed vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m polykv_vllm.seams",
        description="Show how the plugin fits the installed vLLM.",
    )
    parser.add_argument(
        "--write-patches",
        metavar="DIRECTORY",
        type=Path,
        help="write the seams as source patches of the installed vLLM, and end",
    )
    arguments = parser.parse_args([] if argv is None else argv)
    if arguments.write_patches is not None:
        return _write_patches(arguments.write_patches)
    print(f"vLLM {registry.vllm_version()}, supported {registry.VLLM_VERSIONS}")
    rows = registry.report()
    for row in rows:
        reason = f" ({row.reason})" if row.reason else ""
        print(f"\n{row.seam.name}: {row.state}{reason}")
        print(f"  target       {row.seam.target}")
        print(f"  why          {row.seam.why}")
        print(f"  upstream     {row.seam.upstream}")
        print(f"  remove when  {row.seam.remove_when}")
        print(f"  fingerprint  {', '.join(row.seam.expected)}")
    return any(row.state is SeamState.CHANGED for row in rows)


def _write_patches(directory: Path) -> int:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        print("vLLM is not installed: nothing to make patches of", file=sys.stderr)
        return 1
    unfit = {SeamState.CHANGED, SeamState.PRESENT, SeamState.OBSOLETE}
    for row in registry.report():
        if row.state in unfit:
            print(
                f"no patches of this vLLM: the seam {row.seam.name} is {row.state} in "
                "it; an unmodified vLLM of a supported version is needed",
                file=sys.stderr,
            )
            return 1
    tree = SourceTree(Path(spec.origin).parents[1])
    count = write_patches(registry.SEAMS, tree, directory)
    print(f"{count} patches for vLLM {registry.vllm_version()} in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
