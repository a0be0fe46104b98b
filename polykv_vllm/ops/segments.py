# SPDX-License-Identifier: Apache-2.0
"""What a prefix forest is; `forest.py` finds one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SharingCounts:
    """What a batch shares. A pair is one (query token, cached token) of a request.

    Attributes:
        shared_pairs: Pairs attended through shared segments.
        own_token_pairs: Pairs with tokens that the request computes in this step.
        no_other_reader_pairs: Pairs whose tile no other request of the batch has.
        no_gain_pairs: Pairs whose tile others have, but each of them fills its
            passes over the cache alone, as long prefills do.
        distinct_prefixes: Segments that no other segment continues.
        max_readers: Requests that read the most popular segment.
        physical_tokens: Tokens of all segments, each counted once.
        logical_tokens: The same, counted once for each reader.

    """

    shared_pairs: int = 0
    own_token_pairs: int = 0
    no_other_reader_pairs: int = 0
    no_gain_pairs: int = 0
    distinct_prefixes: int = 0
    max_readers: int = 0
    physical_tokens: int = 0
    logical_tokens: int = 0


@dataclass(frozen=True)
class PrefixForest:
    """The shared segments of one batch and KV cache group.

    Attributes:
        segments: `[num_segments, 4]` int32: first tile, end tile (exclusive), first
            index into `readers`, number of readers. Those of one request ascend.
        readers: `[num_readers]` int32, numbers of requests.
        counts: What the batch shares, and why not more.

    """

    segments: torch.Tensor
    readers: torch.Tensor
    counts: SharingCounts

    def __len__(self) -> int:
        """Return the number of segments."""
        return self.segments.shape[0]
