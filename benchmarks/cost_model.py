# SPDX-License-Identifier: Apache-2.0
"""What a decode step should cost on machines that are not at hand: a model on paper.

    python -m benchmarks.cost_model

One step of an 8B model for agents that share a prefix. The linear layers read all
weights once. Attention reads keys and values, once per agent or once for all, and
multiplies every query row with every token. Each part takes the longer of its bytes
over the memory's bandwidth and its work over the processor's rate; nothing overlaps.
`docs/cost_model.md` says where the rates come from and what the model leaves out.
"""

from dataclasses import dataclass

import typer
from rich.table import Table

from benchmarks import _report
from polykv_vllm.formats import get_format

AGENTS = (1, 15, 64, 256)
SHARED_TOKENS = (3_072, 32_768)
OWN_TOKENS = 512
BITS = {"bf16": None, "k8v3": "polykv_k8v3"}


@dataclass(frozen=True)
class Model:
    """Shape of a model with grouped-query attention; weights in 16 bits."""

    name: str
    parameters: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return 2 * self.parameters

    def token_bytes(self, slot_bytes: float) -> float:
        """Cache bytes of one token; `slot_bytes` per (token, KV head)."""
        return self.num_layers * self.num_kv_heads * slot_bytes

    def scores(self, agents: int, tokens: int) -> float:
        """Pairs (query row, cached token) of a step."""
        return float(self.num_layers * self.num_heads * agents * tokens)


@dataclass(frozen=True)
class Machine:
    """Sustained rates of the whole machine.

    Attributes:
        name: For the table.
        bytes_per_s: Of its memory.
        flops: Dense 16-bit multiplications and additions per second.
        stock_scores: Scores per second of vLLM's attention, values included.
        our_scores: The same of attention over a compressed cache.

    """

    name: str
    bytes_per_s: float
    flops: float
    stock_scores: float
    our_scores: float


LLAMA_8B = Model("Llama-3.1-8B", 8.03e9, 32, 32, 8, 128)


def _cpu(
    name: str, cores: int, gigabytes: float, stock_ns: float, our_ns: float
) -> Machine:
    """A CPU from what one core takes for a score, measured (docs/cost_model.md)."""
    flops = cores * 1.0e12  # AMX in bf16, half of its peak at 2 GHz
    return Machine(
        f"{name}, {cores} cores",
        gigabytes * 1e9,
        flops,
        cores * 1e9 / stock_ns,
        cores * 1e9 / our_ns,
    )


def _gpu(name: str, terabytes: float, teraflops: float) -> Machine:
    """A GPU: a score costs 4 x 128 operations, ours three times the tensor-core work.

    Half of the peak is reached. Ours: two int8 terms for keys at twice the rate of 16
    bits, two for values, and as much again for unpacking.
    """
    flops = teraflops * 1e12 / 2
    per_score = 4 * LLAMA_8B.head_dim
    return Machine(
        name, terabytes * 1e12, flops, flops / per_score, flops / per_score / 3
    )


MACHINES = (
    _gpu("H200", 4.8, 989),
    _gpu("L40S", 0.864, 362),
    _cpu("Xeon with AMX", 32, 220, 3.8, 1.9),
    _cpu("Xeon with AMX", 64, 400, 3.8, 1.9),
    _cpu("AVX-512 only", 64, 400, 10.9, 2.9),
)


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step.

    Attributes:
        linear_s: All linear layers; what a step with free attention takes.
        attention_s: Attention of all layers.

    """

    linear_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.linear_s + self.attention_s


def step(
    model: Model,
    machine: Machine,
    agents: int,
    shared_tokens: int,
    own_tokens: int,
    format_name: str | None,
    sharing: bool,
) -> Step:
    """Estimate a decode step.

    Args:
        model: The model.
        machine: Where it runs.
        agents: Sequences in the batch.
        shared_tokens: Cached tokens that all of them have in common.
        own_tokens: Cached tokens of each.
        format_name: Cache format; None is 16 bits and vLLM's attention.
        sharing: Whether the shared tokens are read once, not once per agent.

    """
    linear = max(
        model.weight_bytes / machine.bytes_per_s,
        2 * model.parameters * agents / machine.flops,
    )
    if format_name is None:
        slot_bytes, rate = 4.0 * model.head_dim, machine.stock_scores
    else:
        slot_bytes = get_format(format_name).slot_bytes(model.head_dim)
        rate = machine.our_scores
    readers = 1 if sharing else agents
    tokens = readers * shared_tokens + agents * own_tokens
    attention = max(
        model.token_bytes(slot_bytes) * tokens / machine.bytes_per_s,
        model.scores(agents, shared_tokens + own_tokens) / rate,
    )
    return Step(linear, attention)


def agents_until_attention_equals_weights(
    model: Model, shared_tokens: int, format_name: str | None
) -> float:
    """Return how many agents read as many cache bytes as the model has weights.

    Each reads its own copy or the shared one for itself, as without sharing.
    """
    slot_bytes = (
        get_format(format_name).slot_bytes(model.head_dim)
        if format_name
        else 4.0 * model.head_dim
    )
    return model.weight_bytes / (model.token_bytes(slot_bytes) * shared_tokens)


def agents_until_compute_bound(model: Model, machine: Machine) -> float:
    """Return from how many agents on a shared tile costs more work than reading.

    From there on, more compression no longer makes a step faster (it still holds more
    prefixes), only faster arithmetic does.
    """
    slot_bytes = get_format("polykv").slot_bytes(model.head_dim)
    seconds_to_read = model.token_bytes(slot_bytes) / machine.bytes_per_s
    seconds_per_agent = model.scores(1, 1) / machine.our_scores
    return seconds_to_read / seconds_per_agent


def _steps_table(model: Model, shared_tokens: int) -> Table:
    table = Table(
        title=f"{model.name}, decode step, {shared_tokens:,} shared tokens, "
        f"{OWN_TOKENS} own; ms",
        title_justify="left",
    )
    table.add_column("machine", no_wrap=True)
    names = ("agents", "linear", "stock", "unshared", "shared", "step ratio", "bound")
    for name in names:
        table.add_column(name, justify="right")
    for machine in MACHINES:
        for agents in AGENTS:
            arguments = (model, machine, agents, shared_tokens, OWN_TOKENS)
            stock = step(*arguments, None, False)
            unshared = step(*arguments, "polykv", False)
            shared = step(*arguments, "polykv", True)
            table.add_row(
                machine.name if agents == AGENTS[0] else "",
                str(agents),
                _report.milliseconds(stock.linear_s),
                _report.milliseconds(stock.attention_s),
                _report.milliseconds(unshared.attention_s),
                _report.milliseconds(shared.attention_s),
                _report.ratio(stock.total_s / shared.total_s),
                _report.ratio(stock.total_s / stock.linear_s),
            )
        table.add_section()
    return table


def _crossover_table(model: Model) -> Table:
    table = Table(title="Crossover points, in agents", title_justify="left")
    table.add_column("where")
    table.add_column("agents", justify="right")
    for tokens in SHARED_TOKENS:
        for name, format_name in BITS.items():
            agents = agents_until_attention_equals_weights(model, tokens, format_name)
            table.add_row(
                f"unshared {name} cache of {tokens:,} tokens: as many bytes as weights",
                f"{agents:.1f}",
            )
    for machine in MACHINES:
        agents = agents_until_compute_bound(model, machine)
        table.add_row(
            f"{machine.name}: a shared tile costs more work than reading",
            f"{agents:.1f}",
        )
    return table


def main() -> None:
    """Estimate decode steps of an 8B model on GPUs and large CPUs."""
    for tokens in SHARED_TOKENS:
        _report.console.print(_steps_table(LLAMA_8B, tokens))
    _report.console.print(_crossover_table(LLAMA_8B))


if __name__ == "__main__":
    typer.run(main)
