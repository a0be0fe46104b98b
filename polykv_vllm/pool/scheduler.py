# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, with one physical copy of each block of a prompt.

Three methods of vLLM's scheduler are extended, whose fingerprints `seams/scheduler.py`
holds. What it does otherwise, in which order and with which budget, stays vLLM's.
"""

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from polykv_vllm.pool.disk.connector import PolyKVPoolConnector
from polykv_vllm.pool.duplicates import fold_duplicates
from polykv_vllm.pool.leader import Leader, Share, Wait, find_wait, num_usable


class SingleCopyScheduler(Scheduler):
    """Lets requests wait for blocks that others compute, and folds what is left."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._managers = [m for m in managers if m.kv_cache_spec.prefix_cacheable]
        self._is_caching = bool(self.kv_cache_manager.enable_caching and self._managers)
        self._can_fold = self._is_caching and self._tables_can_change()
        self._leaders: list[Leader[Request]] = []
        self._num_running_seen = 0
        self._num_followers = 0
        self._shares: dict[str, Share] = {}  # of the last step in which any waited
        self._next_shares: dict[str, Share] = {}
        self._was_asked = False
        self._num_budgeted = 0
        self._folded: set[str] = set()
        self._untold: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Fold what the last step duplicated, then schedule as vLLM does."""
        self._leaders.clear()
        self._num_running_seen = 0
        self._num_followers = 0
        self._num_budgeted = 0
        if self._was_asked:  # else the budget was used up: they still wait
            self._shares, self._next_shares = self._next_shares, {}
        self._was_asked = False
        if self._can_fold:
            self._fold_finished_prefills()
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Let a leader compute the share of those that wait for it.

        vLLM asks for each request when it has settled the tokens of its chunk, and
        takes the answer from the step's budget.
        """
        share = self._shares.get(request.request_id)
        if share is not None and not request.has_encoder_inputs:
            budget = self._budget() - self._reserved(request, num_new_tokens)
            missing = request.num_tokens - num_computed_tokens
            num_new_tokens = share.chunk(
                num_computed_tokens, missing, num_new_tokens, budget
            )
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        self._num_budgeted += num_new_tokens + self._num_draft_slots()
        return num_new_tokens

    def _budget(self) -> int:
        """Tokens that are left in this step for one request; never too many.

        vLLM keeps the budget to itself. It is at least what this step started with
        less all chunks so far, some of which may have been taken back.
        """
        num_tokens = min(
            self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens
        )
        return num_tokens - self._num_budgeted - self._num_draft_slots()

    def _reserved(self, leader: Request, chunk: int) -> int:
        """Tokens that go to requests which do not wait: those after the leader."""
        waiting = sum(self.get_request_counts()) - len(self.running)
        followers = sum(share.num_followers for share in self._shares.values())
        reserved = max(waiting - followers, 0) * chunk
        if leader in self.running:
            for request in self.running[self.running.index(leader) + 1 :]:
                missing = request.num_tokens_with_spec - request.num_computed_tokens
                reserved += min(chunk, missing)
        return reserved

    def _num_draft_slots(self) -> int:
        speculation = self.vllm_config.speculative_config
        return speculation.max_num_new_slots_for_drafting if speculation else 0

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Hold a request back while another one computes what it needs.

        vLLM asks before it looks for the request's blocks in the cache, after all
        running requests were scheduled, and in the order of the waiting queue.
        """
        self._was_asked = True
        if not super()._handle_blocked_waiting_request(request):
            return False
        if not self._is_caching or request.num_computed_tokens > 0:
            return True  # it holds blocks already
        if self._must_wait(request):
            self._num_followers += 1
            return False
        # Whoever waits for a leader keeps its turn: those behind it may pass, but not
        # into the slot that it would have.
        taken = len(self.running) + self.num_waiting_for_streaming_input
        return bool(taken + self._num_followers < self.max_num_active_reqs)

    def _must_wait(self, request: Request) -> bool:
        if request.skip_reading_prefix_cache:
            return False
        self._update_leaders()
        if not self._leaders:
            return False
        wait = find_wait(
            request.block_hashes,
            num_usable(request.num_tokens, self.hash_block_size),
            lambda known: self._num_hit(request, known),
            self._leaders,
        )
        if wait is None or not self._keep_until(wait):
            return False
        leader = wait.leader.request.request_id
        share = self._next_shares.get(leader, Share(0, 0))
        end = wait.num_shared * self.hash_block_size
        self._next_shares[leader] = share.joined_by(end)
        return True

    def _update_leaders(self) -> None:
        """Add what has started to run; in the waiting phase `running` only grows."""
        for request in self.running[self._num_running_seen :]:
            num_cached = self._num_cached(request)
            if num_cached < len(request.block_hashes):
                self._leaders.append(Leader(request, request.block_hashes, num_cached))
        self._num_running_seen = len(self.running)

    def _num_cached(self, request: Request) -> int:
        """Count the blocks, in units of hashes, that a running request has cached.

        vLLM caches a block when it schedules the block's last token: a request that
        is scheduled later in the same step can already use it.
        """
        num_tokens = min(
            manager.num_cached_block.get(request.request_id, 0) * manager.block_size
            for manager in self._managers
        )
        return int(num_tokens // self.hash_block_size)

    def _num_hit(self, request: Request, known: int) -> int:
        """Count the blocks in the cache, given that `known` of them are there."""
        next_hash = request.block_hashes[known]
        for manager in self._managers:
            if manager.block_size != self.hash_block_size:
                continue
            groups = [manager.kv_cache_group_id]
            if manager.block_pool.get_cached_block(next_hash, groups) is None:
                return known  # the common case: nobody has computed the next one
        _, num_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        return int(num_tokens // self.hash_block_size)

    def _keep_until(self, wait: Wait[Request]) -> bool:
        """Let the leader keep its window where the follower will go on.

        Of layers with a sliding window vLLM caches only the blocks at places where it
        expects a hit. Without them there would be none, and waiting would be in vain.

        Returns:
            Whether the follower will find the blocks.

        """
        leader = wait.leader.request
        junction = wait.num_shared * self.hash_block_size
        junction -= junction % self.block_size
        num_cached = wait.leader.num_cached * self.hash_block_size
        if junction <= num_cached:
            return False
        last = num_usable(leader.num_prompt_tokens, self.block_size) * self.block_size
        if junction in (leader.shared_prefix_boundary, last) or not self._is_sparse():
            return True
        if leader.shared_prefix_boundary > num_cached:
            return False  # another junction is ahead, and there can be only one
        if any(num_cached > start for start in self._window_starts(junction)):
            return False
        leader.shared_prefix_boundary = junction
        return True

    def _is_sparse(self) -> bool:
        is_dense = self.kv_cache_manager.coordinator.retention_interval is None
        return not is_dense and any(self._window_starts(0))

    def _window_starts(self, junction: int) -> Iterator[int]:
        """First token that each windowed group needs to go on at `junction`."""
        for manager in self._managers:
            if isinstance(manager, SlidingWindowManager):
                window = manager.sliding_window - 1
                num_blocks = -(-window // manager.block_size) + manager.use_eagle
                yield junction - num_blocks * manager.block_size

    def _tables_can_change(self) -> bool:
        """Whether a request's blocks may be exchanged while it runs.

        Not while steps are in flight, not under a connector that knows the blocks by
        number (ours asks for them in every step), not with a draft model whose last
        entry of a block depends on the next one, and not with the model runner V2,
        which has no way to be told.
        """
        return (
            (self.connector is None or isinstance(self.connector, PolyKVPoolConnector))
            and not self.use_eagle
            and not self.use_v2_model_runner
            and self.vllm_config.max_concurrent_batches == 1
        )

    def _fold_finished_prefills(self) -> None:
        """Look once at each request whose prompt has been computed.

        Of two copies the one that was cached later is folded, and its request looks
        after that: so none is missed.
        """
        running = {request.request_id for request in self.running}
        self._folded &= running
        self._untold &= running
        for request in self.running:
            if request.request_id in self._folded or request.is_prefill_chunk:
                continue
            self._folded.add(request.request_id)
            num_folded = sum(
                fold_duplicates(manager, request.request_id, request.num_prompt_tokens)
                for manager in self._managers
                if isinstance(manager, (FullAttentionManager, SlidingWindowManager))
            )
            if num_folded:
                self._untold.add(request.request_id)

    def _make_cached_request_data(
        self,
        running_reqs: list[Request],
        resumed_reqs: list[Request],
        num_scheduled_tokens: dict[str, int],
        spec_decode_tokens: dict[str, list[int]],
        req_to_new_blocks: dict[str, Any],
    ) -> CachedRequestData:
        """Send a folded request's whole table, as vLLM does after a preemption."""
        folded = [r for r in running_reqs if r.request_id in self._untold]
        if folded:
            running_reqs = [r for r in running_reqs if r.request_id not in self._untold]
            resumed_reqs = [*resumed_reqs, *folded]
            tables = {
                request.request_id: self.kv_cache_manager.get_blocks(request.request_id)
                for request in folded
            }
            req_to_new_blocks = req_to_new_blocks | tables
            self._untold.difference_update(tables)
        return super()._make_cached_request_data(
            running_reqs,
            resumed_reqs,
            num_scheduled_tokens,
            spec_decode_tokens,
            req_to_new_blocks,
        )
