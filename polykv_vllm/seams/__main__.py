# SPDX-License-Identifier: Apache-2.0
"""Prints the table of seams: `python -m polykv_vllm.seams`."""

import sys

from polykv_vllm.seams import registry
from polykv_vllm.seams.seam import SeamState


def main() -> int:
    """Print every seam; return 1 when one does not fit the installed vLLM."""
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


if __name__ == "__main__":
    sys.exit(main())
