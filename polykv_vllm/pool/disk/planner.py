# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the connector: which blocks to load, which to save.

A block is saved in the step that computes its last token, generated tokens included,
so that a server that dies right after an answer has it on disk. A prefix that is found
in memory is named to the workers, too: what is on disk already is only marked as used.

Loading is part of the step: the request that asks for a prefix caches its blocks at
once, and others that arrive with it share them. A block that turns out to be damaged
is computed again; until then nobody may find it, or what was computed from it, so both
leave vLLM's prefix cache.
"""

import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from polykv_vllm.pool.adapters import adapter_digest
from polykv_vllm.pool.disk.content import ContentNames, Context
from polykv_vllm.pool.disk.directory import NAMES, block_path
from polykv_vllm.pool.disk.messages import BlockAt, Orders, RankAnswer
from polykv_vllm.pool.public import longest_common, num_public_tokens

logger = logging.getLogger("vllm.polykv")

_MAX_REFUSED = 100_000


@dataclass
class _Tracked:
    """A request and what was ordered for it.

    Attributes:
        request: vLLM's.
        names: Names of its blocks; None when the pool must not serve it.
        num_ordered: Blocks that were named to the workers.
        num_found: Blocks on disk beyond those in memory, and the first one's index.

    """

    request: Request
    names: ContentNames | None
    num_ordered: int = 0
    found: tuple[int, int] = (0, 0)


@dataclass
class Planner:
    """Keeps track of requests.

    Attributes:
        block_size: Tokens per block.
        manager: vLLM's `KVCacheManager`, which knows the requests' blocks.
        pins: The engine's `PrefixPool`; None before anything was named.

    """

    block_size: int
    _ranks: list[Path] = field(default_factory=list)
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _load: list[BlockAt] = field(default_factory=list)
    _clear: bool = False
    pins: Any = None
    _pins_seen: int = -1
    _refused: dict[Path, int] = field(default_factory=dict)  # file: when written
    manager: Any = None

    def set_ranks(self, answers: Mapping[Any, RankAnswer]) -> None:
        """Learn where the workers have their blocks; one without switches all off."""
        directories = [answer.directory for answer in answers.values()]
        if all(directories):
            self._ranks = [Path(directory) for directory in directories if directory]

    @property
    def names_directory(self) -> Path | None:
        """Where the names of prefixes are kept, which are worth what their blocks are.

        Beside the blocks of the first worker: with another model or tokenizer the
        tokens of a prefix mean something else.
        """
        return self._ranks[0] / NAMES if self._ranks else None

    def add(self, request: Request) -> None:
        """Take note of a new request."""
        names = None
        if self._ranks and not request.mm_features and request.prompt_embeds is None:
            context = self._context(request)
            names = ContentNames(context, self.block_size) if context else None
        self._tracked[request.request_id] = _Tracked(request, names)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        self._tracked.pop(request.request_id, None)

    def find(self, request: Request, num_computed_tokens: int) -> int:
        """Count the tokens that can be loaded beyond those in memory.

        The last token of a prompt is always computed.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.names is None:
            return 0
        if request.skip_reading_prefix_cache or self._clear:
            return 0  # what is on disk yet will be gone before the step
        start = num_computed_tokens // self.block_size
        usable = (request.num_tokens - 1) // self.block_size
        end = start
        while end < usable:
            names = tracked.names.names(request.all_token_ids, end + 1)
            if not self._is_on_disk(names[end]):
                break
            end += 1
        tracked.found = (start, end - start)
        return (end - start) * self.block_size

    def num_on_disk(
        self, salt: str | None, token_ids: Sequence[int], start: int
    ) -> int:
        """Count the tokens that a prompt would find on disk from a place on.

        Args:
            salt: Of the prompt.
            token_ids: Its tokens.
            start: Tokens that are in memory, in whole blocks.

        """
        size = self.block_size
        num_blocks = 0 if self._clear or not self._ranks else len(token_ids) // size
        names = self._names(salt, token_ids, num_blocks)
        missing = (not self._is_on_disk(name) for name in names[start // size :])
        found = len(
            list(itertools.takewhile(lambda is_missing: not is_missing, missing))
        )
        return found * size

    def order_load(self, request: Request, num_tokens: int) -> None:
        """Have the blocks that `find` counted loaded into those of the request."""
        if num_tokens == 0:
            return
        tracked = self._tracked[request.request_id]
        start, count = tracked.found
        assert tracked.names is not None and count * self.block_size == num_tokens
        names = tracked.names.names(request.all_token_ids, start + count)
        ids = self._block_ids(request)
        for index in range(start, start + count):
            self._load.append(BlockAt(names[index], ids[index]))

    def orders(self, num_scheduled_tokens: Mapping[str, int]) -> Orders:
        """Return what the workers do in this step, and forget it."""
        orders = Orders(load=self._load, clear=self._clear, pinned=self._new_pins())
        self._load, self._clear = [], False
        for request_id, num_tokens in num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.names is not None:
                orders.save += self._saves(tracked, num_tokens)
        return orders

    def give_up(self, invalid_block_ids: set[int]) -> None:
        """Let nobody use blocks that could not be loaded, or what follows them.

        vLLM computes them again for the requests that have them, in several steps if
        they are many. What the workers did not save in this step is named again.
        """
        evicted = set(invalid_block_ids)
        for tracked in self._tracked.values():
            tracked.num_ordered = 0
            ids = self._block_ids(tracked.request)
            bad = [i for i, number in enumerate(ids) if number in invalid_block_ids]
            if not bad:
                continue
            evicted.update(ids[bad[0] :])
            if tracked.names is not None and len(self._refused) < _MAX_REFUSED:
                token_ids = tracked.request.all_token_ids
                names = tracked.names.names(token_ids, bad[-1] + 1)
                self._refuse(names[index] for index in bad)
        self.manager.evict_blocks(evicted)

    def clear(self) -> None:
        """Have every block removed from disk before the next step."""
        self._clear = True
        self._refused.clear()
        for tracked in self._tracked.values():
            tracked.num_ordered = 0

    def _saves(self, tracked: _Tracked, num_scheduled: int) -> list[BlockAt]:
        request = tracked.request
        computed = request.num_computed_tokens + num_scheduled
        # Beyond `num_tokens` there are drafts, which may be refused.
        end = min(computed, request.num_tokens) // self.block_size
        start = tracked.num_ordered
        if end <= start or tracked.names is None:
            return []
        tracked.num_ordered = end
        names = tracked.names.names(request.all_token_ids, end)
        ids = self._block_ids(request)
        # Number 0 is vLLM's placeholder for a block that is not kept.
        return [BlockAt(names[i], ids[i]) for i in range(start, end) if ids[i] != 0]

    def _new_pins(self) -> list[bytes] | None:
        """Return the names of all pinned blocks if they have changed."""
        if self.pins is None or self.pins.version == self._pins_seen:
            return None
        self._pins_seen = self.pins.version
        return [
            name
            for prefix in self.pins.prefixes.values()
            for name in self._names(prefix.salt, prefix.token_ids, len(prefix.held))
        ]

    def _names(
        self, salt: str | None, token_ids: Sequence[int], num_blocks: int
    ) -> list[bytes]:
        """Return the names of a prompt's first blocks, computed without an adapter."""
        size = self.block_size
        num_public = longest_common(token_ids) // size if salt else 0
        context = Context(salt, None, num_public)
        return ContentNames(context, size).names(token_ids, num_blocks)

    def _block_ids(self, request: Request) -> list[int]:
        (ids,) = self.manager.get_block_ids(request.request_id)
        return list(ids)

    def _refuse(self, names: Iterable[bytes]) -> None:
        """Look no more at damaged files that a reader must leave where they are."""
        for name in names:
            for rank in self._ranks:
                path = block_path(rank, name)
                if (written := _written(path)) is not None:
                    self._refused[path] = written

    def _is_on_disk(self, name: bytes) -> bool:
        for rank in self._ranks:
            path = block_path(rank, name)
            written = _written(path)
            if written is None or self._refused.get(path) == written:
                return False
        return True

    def _context(self, request: Request) -> Context | None:
        """Return what the request has beside its tokens; None: it is not served."""
        num_public = num_public_tokens(request) // self.block_size
        if request.lora_request is None:
            return Context(request.cache_salt, None, num_public)
        if (digest := adapter_digest(request)) is None:
            return None
        adapter = (request.lora_request.lora_name, digest)
        return Context(request.cache_salt, adapter, num_public)


def _written(path: Path) -> int | None:
    """Return what changes when a file is replaced; None when there is none."""
    try:
        return os.stat(path, follow_symlinks=False).st_ctime_ns
    except OSError:
        return None
