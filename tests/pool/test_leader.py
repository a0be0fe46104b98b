# SPDX-License-Identifier: Apache-2.0
"""The policy alone, and in a scheduler of a few lines."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_vllm.pool.leader import Leader, Share, find_wait, num_shared, num_usable

BLOCK = 4


def chain(tokens: list[int]) -> list[bytes]:
    """Hashes of full blocks; each covers all tokens up to its end."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [bytes(tokens[:end]) for end in ends]


def no_hit(known: int) -> int:
    return known


@pytest.mark.parametrize(
    ("num_tokens", "usable"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)]
)
def test_the_last_token_is_always_computed(num_tokens: int, usable: int) -> None:
    assert num_usable(num_tokens, BLOCK) == usable


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(0, 12),
)
def test_bisection_counts_what_is_common(
    first: list[int], second: list[int], limit: int
) -> None:
    a, b = chain(first), chain(second)
    equal = [x == y for x, y in zip(a, b, strict=False)][:limit]
    assert num_shared(a, b, limit) == [*equal, False].index(False)


def test_a_follower_waits_until_its_part_is_cached() -> None:
    leader, follower = chain([0] * 20), chain([0] * 12 + [1] * 8)
    for num_cached in range(6):
        leaders = [Leader("leader", leader, num_cached)]
        wait = find_wait(follower, 4, no_hit, leaders)
        assert (wait is not None) == (num_cached < 3)
        assert wait is None or (wait.leader.request, wait.num_shared) == ("leader", 3)


def test_nobody_waits_for_what_cannot_be_used() -> None:
    hashes = chain([0] * 4)
    leaders = [Leader("leader", hashes, 0)]
    assert find_wait(hashes, num_usable(4, BLOCK), no_hit, leaders) is None


def test_nobody_waits_for_what_is_cached_by_others() -> None:
    """The leader does not read the cache and computes again what is there."""
    hashes = chain([0] * 20)
    leaders = [Leader("leader", hashes, 1)]
    assert find_wait(hashes, 4, lambda known: 4, leaders) is None
    assert find_wait(hashes, 4, lambda known: 3, leaders) is not None


def test_the_first_leader_that_is_ahead_is_taken() -> None:
    mine = chain([0] * 20)
    leaders = [
        Leader("other", chain([1] * 20), 0),
        Leader("done", chain([0] * 8 + [2] * 8), 2),
        Leader("ahead", chain([0] * 16), 2),
    ]
    wait = find_wait(mine, 4, no_hit, leaders)
    assert wait is not None and wait.leader.request == "ahead"


@pytest.mark.parametrize(
    ("followers", "end", "start", "missing", "budget", "expected"),
    [
        (3, 100, 0, 200, 1000, 40),  # its own ten and three times ten more
        (3, 25, 0, 200, 1000, 35),  # no help beyond what they wait for
        (3, 25, 0, 30, 1000, 30),  # not beyond its end
        (3, 100, 0, 200, 30, 30),  # not beyond the budget
        (3, 100, 0, 200, 5, 10),  # its own is granted already
        (3, 100, 98, 200, 1000, 12),
        (3, 100, 150, 200, 1000, 10),
        (0, 0, 0, 200, 1000, 10),
    ],
)
def test_share(
    followers: int, end: int, start: int, missing: int, budget: int, expected: int
) -> None:
    assert Share(followers, end).chunk(start, missing, 10, budget) == expected


def test_a_share_grows_with_its_followers() -> None:
    assert Share(0, 0).joined_by(8).joined_by(4) == Share(2, 8)


@dataclass
class Agent:
    tokens: list[int]
    arrival: int
    abort: int
    computed: int = 0
    first_step: int | None = None
    hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.hashes = chain(self.tokens)


def simulate(agents: list[Agent], cap: int, budget: int) -> list[bytes]:
    """Schedule like vLLM, in order of arrival; return every block computed."""
    cached: set[bytes] = set()
    computed: list[bytes] = []
    running: list[Agent] = []
    waiting: list[Agent] = []

    def compute(agent: Agent, left: int) -> int:
        end = min(len(agent.tokens), agent.computed + min(cap, left))
        new = agent.hashes[agent.computed // BLOCK : end // BLOCK]
        cached.update(new)
        computed.extend(new)
        used, agent.computed = end - agent.computed, end
        return used

    for step in range(400):
        waiting += [a for a in agents if a.arrival == step]
        running = [a for a in running if a.abort != step]
        waiting = [a for a in waiting if a.abort != step]
        left = budget
        for agent in running:
            if agent.computed < len(agent.tokens):
                left -= compute(agent, left)
        for agent in list(waiting):
            if left == 0:
                break
            leaders = [Leader(r, r.hashes, r.computed // BLOCK) for r in running]
            usable = num_usable(len(agent.tokens), BLOCK)
            hit = num_shared(agent.hashes, [h for h in agent.hashes if h in cached], 99)
            if find_wait(agent.hashes, usable, lambda known, hit=hit: hit, leaders):
                continue
            agent.computed = min(hit, usable) * BLOCK
            waiting.remove(agent)
            running.append(agent)
            left -= compute(agent, left)
        for agent in running:
            if agent.computed == len(agent.tokens) and agent.first_step is None:
                agent.first_step = step
    return computed


def draw_agents() -> st.SearchStrategy[list[Agent]]:
    tail = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    tokens = st.tuples(st.integers(0, 24), tail).map(lambda t: [0] * t[0] + t[1])
    abort = st.one_of(st.just(-1), st.integers(1, 9))
    return st.lists(st.builds(Agent, tokens, st.integers(0, 6), abort), max_size=7)


@settings(max_examples=300, deadline=None)
@given(draw_agents(), st.integers(1, 11))
def test_no_block_is_computed_twice_and_nobody_is_late(
    agents: list[Agent], cap: int
) -> None:
    """Blocks that end a prompt excepted: its last token is computed by everyone.

    A leader that is aborted takes a part of a block with it.
    """
    computed = simulate(agents, cap, budget=1000)
    last = {a.hashes[-1] for a in agents if len(a.tokens) % BLOCK == 0}
    for block in set(computed) - last:
        assert computed.count(block) == 1
    aborted = sum(agent.abort > agent.arrival for agent in agents)
    for agent in agents:
        if agent.abort < agent.arrival:
            steps = -(-len(agent.tokens) // cap) + aborted * -(-(BLOCK - 1) // cap)
            assert agent.first_step is not None
            assert agent.first_step < agent.arrival + steps


@settings(max_examples=200, deadline=None)
@given(draw_agents(), st.integers(1, 11), st.integers(1, 30))
def test_everyone_is_served_with_any_budget(
    agents: list[Agent], cap: int, budget: int
) -> None:
    simulate(agents, cap, budget)
    for agent in agents:
        if agent.abort < agent.arrival:
            assert agent.first_step is not None
