# SPDX-License-Identifier: Apache-2.0
"""How fast are many agents behind one system prompt, and how many fit?

    python -m benchmarks.agents

The same as `polykv bench agents`; its code is in the package, polykv_vllm/bench.
"""

import typer

from polykv_vllm.cli.bench import agents

if __name__ == "__main__":
    typer.run(agents)
