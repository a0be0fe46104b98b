# SPDX-License-Identifier: Apache-2.0
"""The table of raw pages against a simple model of a cache and its requests.

The model writes the name of each token where the plan says, and looks at every read
whether the names are those of the request's own tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from polykv_vllm.windows.sizes import PAGE_TOKENS, WindowSizes
from polykv_vllm.windows.table import RawTokens, Row, WindowTable

SEEDS = st.integers(0, 2**32)
Token = int  # a token is known by the hash of all tokens up to it

SIZES = [
    (64, 256),
    (16, 128),
    (0, 40),
    (40, 0),
    (0, 1),
    (33, 33),
    (1, 2),
    (5, 31),
]


@dataclass
class Request:
    """A sequence, and where the model has put it."""

    name: str
    tokens: list[Token] = field(default_factory=list)
    context: int = 0
    blocks: list[int] = field(default_factory=list)
    rejected: int = 0  # of the step's draft tokens
    is_whole: bool = False  # whatever it should see in full precision is there

    def grow(self, *words: int) -> "Request":
        for word in words:
            self.tokens.append(hash((self.tokens[-1] if self.tokens else 0, word)))
        return self

    def shrink(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


class Cache:
    """Blocks with reference counts and a prefix cache, as vLLM has them."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.users = [0] * num_blocks
        self.free = list(range(1, num_blocks))
        self.name_of: dict[int, Token] = {}
        self.block_of: dict[Token, int] = {}

    def name(self, request: Request, index: int) -> Token:
        return request.tokens[(index + 1) * self.block_tokens - 1]

    def hit(self, request: Request) -> list[int]:
        blocks: list[int] = []
        for index in range((len(request.tokens) - 1) // self.block_tokens):
            block = self.block_of.get(self.name(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def use(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def allocate(self) -> int | None:
        if not self.free:
            return None
        block = self.free[0]
        name = self.name_of.pop(block, None)
        if name is not None and self.block_of.get(name) == block:
            del self.block_of[name]
        self.use(block)
        return block

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def store(self, request: Request, length: int) -> None:
        """Name the blocks that are full now."""
        for index in range(length // self.block_tokens):
            name, block = self.name(request, index), request.blocks[index]
            if block:
                self.name_of[block] = name
                self.block_of.setdefault(name, block)


class Machine(RuleBasedStateMachine):
    @initialize(
        sizes=st.sampled_from(SIZES),
        draft_tokens=st.sampled_from([0, 0, 3]),
        block_tokens=st.sampled_from([32, 64, 128]),
        sliding=st.sampled_from([-1, -1, 20, 100]),
        max_running=st.integers(1, 4),
    )
    def start(
        self,
        sizes: tuple[int, int],
        draft_tokens: int,
        block_tokens: int,
        sliding: int,
        max_running: int,
    ) -> None:
        self.sizes = WindowSizes(*sizes, draft_tokens)
        self.sliding, self.max_running = sliding, max_running
        num_pages = max(1, max_running * self.sizes.pages_per_sequence)
        granules = block_tokens // PAGE_TOKENS
        self.table = WindowTable(num_pages, self.sizes, block_tokens, granules, sliding)
        self.memory: list[list[Token | None]] = [
            [None] * PAGE_TOKENS for _ in range(num_pages)
        ]
        self.cache = Cache(16 * 128 // block_tokens, block_tokens)
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.ended: list[str] = []
        self.count = 0

    @rule(
        seed=SEEDS,
        base=st.integers(0, 1),
        shared=st.sampled_from([0, 100, 256, 300, 520]),
        own=st.integers(1, 300),
    )
    def arrive(self, seed: int, base: int, shared: int, own: int) -> None:
        if len(self.running) == self.max_running:
            self._leave(self.running[0])
        self.count += 1
        words = [base] * shared + [1000 + self.count] * own
        self._admit(Request(f"r{self.count}").grow(*words))
        self._run(Random(seed), 3)

    def _admit(self, request: Request) -> None:
        request.blocks = self.cache.hit(request)
        for block in request.blocks:
            self.cache.use(block)
        request.context = len(request.blocks) * self.cache.block_tokens
        request.is_whole = request.context == 0
        self._slide(request)
        self.running.append(request)

    def _slide(self, request: Request) -> None:
        """Put the null block where no later query looks."""
        if self.sliding < 0:
            return
        first = request.context - self.sliding + 1
        for index in range(max(0, first) // self.cache.block_tokens):
            if request.blocks[index]:
                self.cache.release(request.blocks[index])
                request.blocks[index] = 0

    @rule(seed=SEEDS, steps=st.integers(1, 40))
    def run_some(self, seed: int, steps: int) -> None:
        self._run(Random(seed), steps)

    def _run(self, random: Random, steps: int) -> None:
        for _ in range(steps if self.running else 0):
            self._step(random)

    def _step(self, random: Random) -> None:
        rows: list[tuple[Request, int]] = []
        for request in random.sample(
            self.running, random.randint(1, len(self.running))
        ):
            left = len(request.tokens) - request.context
            if left == 0:
                request.grow(random.randint(0, 3))
                left = 1
            chunk = min(left, random.choice([1, 7, 31, 32, 64, 100, 500]))
            drafts = random.randint(0, self.sizes.draft_tokens) * (chunk == left)
            request.grow(*[9999] * drafts)
            length = request.context + chunk + drafts
            if self._allocate(request, length):
                rows.append((request, length))
                request.rejected = random.randint(0, drafts)
            else:
                request.shrink(drafts)
                self._preempt(request)
        self._compute(rows)
        for request, length in rows:
            request.context = length - request.rejected
            request.shrink(request.rejected)
            self.cache.store(request, request.context)
            self._slide(request)

    def _allocate(self, request: Request, length: int) -> bool:
        while len(request.blocks) * self.cache.block_tokens < length:
            block = self.cache.allocate()
            if block is None:
                return False
            request.blocks.append(block)
        return True

    def _compute(self, rows: list[tuple[Request, int]]) -> None:
        self.table.end(sorted(self.ended))
        self.ended = []
        plan = self.table.plan(
            [Row(r.name, r.context, length, r.blocks) for r, length in rows]
        )
        for (request, length), read in zip(rows, plan.reads, strict=True):
            had = dict(self._raw(request, read))
            for token, found in had.items():
                assert found == request.tokens[token], (token, request.name)
            self._check_complete(request, length, read)
        assert len({w.page for w in plan.writes}) == len(plan.writes)
        for write in plan.writes:
            request, length = rows[write.row]
            assert request.context <= write.begin < write.begin + write.count <= length
            offset = write.begin % PAGE_TOKENS
            assert offset + write.count <= PAGE_TOKENS
            for i in range(write.count):
                self.memory[write.page][offset + i] = request.tokens[write.begin + i]

    def _raw(
        self, request: Request, read: RawTokens
    ) -> Iterator[tuple[int, Token | None]]:
        """Yield the tokens before the chunk that rows may see raw, as the pages are."""
        seen = 0 if self.sliding < 0 else max(0, request.context - self.sliding + 1)
        for token in range(seen, min(read.sink_tokens, request.context)):
            page = read.sink_pages[token // PAGE_TOKENS]
            yield token, self.memory[page][token % PAGE_TOKENS]
        first = read.recent_begin // PAGE_TOKENS
        for token in range(read.recent_begin, request.context):
            page = read.recent_pages[token // PAGE_TOKENS - first]
            yield token, self.memory[page][token % PAGE_TOKENS]

    def _check_complete(self, request: Request, length: int, read: RawTokens) -> None:
        """Count what is missing, and see that nothing gets lost meanwhile."""
        expected = 0
        for position in range(request.context, length):
            low = max(0, position - self.sliding + 1) if self.sliding >= 0 else 0
            recent = position - self.sizes.recent_tokens + 1
            wanted = {
                token
                for token in range(low, request.context)
                if token >= read.sink_tokens
                and (token < self.sizes.sink_tokens or token >= recent)
            }
            first = max(recent, read.recent_begin)
            expected += sum(token < first for token in wanted)
        missing = read.missing_pairs
        assert missing == expected
        assert not (request.is_whole and missing)
        request.is_whole = missing == 0

    @rule(seed=SEEDS)
    def finish(self, seed: int) -> None:
        if self.running:
            self._leave(Random(seed).choice(self.running))
            self._run(Random(seed), 2)

    @rule(seed=SEEDS, steps=st.integers(0, 3))
    def preempt(self, seed: int, steps: int) -> None:
        if self.running:
            self._preempt(Random(seed).choice(self.running))
            self._run(Random(seed), steps)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.preempted.append(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.ended.append(request.name)
        for block in reversed([b for b in request.blocks if b]):
            self.cache.release(block)

    @rule(seed=SEEDS)
    def resume(self, seed: int) -> None:
        if self.preempted and len(self.running) < self.max_running:
            self._admit(self.preempted.pop())
            self._run(Random(seed), 2)

    @rule(seed=SEEDS)
    def fold(self, seed: int) -> None:
        """Exchange blocks for the first copies of the same, as single_copy does."""
        for request in self.running:
            for index in range(request.context // self.cache.block_tokens):
                first = self.cache.block_of.get(self.cache.name(request, index))
                own = request.blocks[index]
                if own and first is not None and first != own:
                    self.cache.use(first)
                    request.blocks[index] = first
                    self.cache.release(own)
                    request.is_whole = False  # the first copy's page may be in use
        self._run(Random(seed), 2)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.cache.block_of.clear()
        self.cache.name_of.clear()

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "table"):
            pages = self.table.pages
            most = (len(self.running) + len(self.ended)) * max(
                1, self.sizes.pages_per_sequence
            )
            assert 0 <= pages.num_held <= most


TestWindowTable = Machine.TestCase
TestWindowTable.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    # What is drawn are seeds: a shrunk example would say no more.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
