# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention: prepare the queries, attend tile by tile, finish.

    prepare_kernel   each query row, treated like the keys, as two int8 terms
    attend_kernel    work items: rows x a range of splits -> partial states
    finish_kernel    fold a row's partial states, rotate back, write the output

A work item is a list of query tokens of one KV head and splits of 512 tokens that all
of them read from the same blocks: one request's decode, a chunk of its prefill, or
tokens of many requests with a common prefix. In a prefill (`chained`) one program goes
through all splits in turn and keeps one state, else each split has a state of its own.
"""

import triton
import triton.language as tl

from polykv_vllm.kernels.triton.rows import (
    NON_FINITE,
    float_of,
    fwht,
    key_order,
    load_rows,
    max_magnitude_bits,
    round_to_int,
    store_rows,
    transform_rows,
)
from polykv_vllm.kernels.triton.softmax import (
    MINUS_INF,
    PROB_MAX,
    finite_scales,
    fold_values,
    fold_weights,
    int8_terms,
    tile_probabilities,
    two_term_dot,
)
from polykv_vllm.kernels.triton.unpack import (
    TILE_TOKENS,
    key_codes,
    load_keys,
    load_scales,
    load_values,
    subtile_offsets,
    value_octet,
)

SPLIT_TILES = tl.constexpr(8)
QUERY_TINY = tl.constexpr(1e-34)
SCALE_TINY = tl.constexpr(1e-37)
ITEM_FIELDS = tl.constexpr(6)


@triton.jit
def prepare_kernel(
    query,
    terms,
    row_scale,
    correction,
    multipliers,
    num_rows,
    token_stride,
    head_stride,
    norm,
    softmax_scale,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write int8 terms `[tokens, heads, 2, D]` in the keys' order, scale, correction.

    A row is (token, head). `softmax_scale` has log2(e) in it. The correction takes the
    bias of 7-bit keys off the integer scores.
    """
    D: tl.constexpr = T.head_dim
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    at = (token * token_stride + head * head_stride)[:, None] + tl.arange(0, D)[None, :]
    q = load_rows(query + at, mask[:, None], DTYPE)
    treat = multipliers + (head // GROUP * D)[:, None]
    q = transform_rows(q, treat, norm, SCALED, ROTATED, ROWS, T)
    bits = max_magnitude_bits(q)
    finite = bits < NON_FINITE
    peak = float_of(tl.where(finite, bits, 0))
    tiny = peak < QUERY_TINY
    inverse = tl.where(tiny, 0.0, PROB_MAX / tl.where(tiny, 1.0, peak))
    codes = round_to_int(tl.where(finite[:, None], q, 0.0) * inverse[:, None])
    codes = key_order(codes, ROWS, D)
    high, low = int8_terms(codes, False)
    to = terms + (row.to(tl.int64) * 2 * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(to, high, mask=mask[:, None])
    tl.store(to + D, low, mask=mask[:, None])
    # Never zero: hidden scores are -inf, and 0 * inf is NaN.
    scale = tl.maximum(peak * (softmax_scale / PROB_MAX), SCALE_TINY)
    scale = tl.where(finite, scale, float("nan"))
    tl.store(row_scale + row, scale, mask=mask)
    bias = 64 if T.key_bits == 7 else 0
    tl.store(correction + row, -bias * tl.sum(codes, axis=1), mask=mask)


@triton.jit
def _attend_tile(
    state,
    queries,
    rows,
    cache,
    at,
    token,
    tile,
    T: tl.constexpr,
    A: tl.constexpr,
    STACKED: tl.constexpr,
    INT8: tl.constexpr,
):
    """Fold one tile into the state of the rows."""
    peak, total, acc = state
    high, low, row_scale, correction = queries
    begin, end = rows
    keys = load_keys(cache, at, token, T)
    key_scale, bad = finite_scales(load_scales(cache, at, token, T.key_scales_at))
    value_scale, _ = finite_scales(load_scales(cache, at, token, T.value_scales_at))
    codes = tl.trans(key_codes(keys, T, A))
    dots = two_term_dot(high, low, codes, STACKED, INT8) + correction[:, None]
    scores = dots.to(tl.float32) * key_scale[None, :]
    position = (tl.arange(0, TILE_TOKENS) + tile * TILE_TOKENS)[None, :]
    # One comparison: positions before `begin` wrap around to large numbers.
    length = (end - begin)[:, None].to(tl.uint32)
    visible = (position - begin[:, None]).to(tl.uint32) < length
    prob, factor, part_peak, part_total = tile_probabilities(
        scores, row_scale, value_scale, visible
    )
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        # A poisoned token makes NaN of every row that attends to it.
        poisoned = tl.max((visible & bad[None, :]).to(tl.int32), axis=1) > 0
        part_total = tl.where(poisoned, float("nan"), part_total)
    prob_high, prob_low = int8_terms(prob, STACKED)
    peak, total, old, fresh = fold_weights(peak, total, part_peak, part_total)
    packed = load_values(cache, at, token, keys, T, A, INT8)
    folded = ()
    for e in tl.static_range(8):
        values = tl.trans(value_octet(packed, e, T, A))
        part = two_term_dot(prob_high, prob_low, values, STACKED, INT8)
        part = part.to(tl.float32)
        folded = folded + (fold_values(acc[e], old, part, fresh * factor),)
    return peak, total, folded


@triton.jit
def _load_queries(terms, row_scale, correction, row, valid, D: tl.constexpr, STACKED):
    """Return the terms of the rows (stacked or apart), their scales and corrections."""
    at = (row.to(tl.int64) * 2 * D)[:, None] + tl.arange(0, D)[None, :]
    high = tl.load(terms + at, mask=valid[:, None], other=0)
    low = tl.load(terms + at + D, mask=valid[:, None], other=0)
    if STACKED:
        both = tl.trans(tl.join(high, low), (2, 0, 1))
        high = tl.reshape(both, (2 * row.shape[0], D))
    scale = tl.load(row_scale + row, mask=valid, other=0.0)
    return high, low, scale, tl.load(correction + row, mask=valid, other=0)


@triton.jit
def _zeros(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Return eight accumulators, one for each octet of dimensions."""
    zero = tl.zeros((ROWS, DIMS), tl.float32)
    return zero, zero, zero, zero, zero, zero, zero, zero


@triton.jit
def _write_state(
    state, part_acc, part_peak, part_total, place, valid, continued, D: tl.constexpr
):
    """Store the state of a split, folded into what is there if it continues a chain."""
    peak, total, acc = state
    index = tl.arange(0, D // 8)
    dim = index // 8 * 64 + index % 8
    to = part_acc + (place * D)[:, None] + dim[None, :]
    old = tl.zeros(peak.shape, tl.float32)
    fresh = old + 1.0
    if continued:
        before = tl.load(part_peak + place, mask=valid, other=MINUS_INF)
        before_total = tl.load(part_total + place, mask=valid, other=0.0)
        peak, total, old, fresh = fold_weights(before, before_total, peak, total)
    tl.store(part_peak + place, peak, mask=valid)
    tl.store(part_total + place, total, mask=valid)
    for e in tl.static_range(8):
        values = acc[e]
        if continued:
            before_acc = tl.load(to + 8 * e, mask=valid[:, None], other=0.0)
            values = fold_values(before_acc, old, values, fresh)
        tl.store(to + 8 * e, values, mask=valid[:, None])
    # The next split of a chain may read this state with other threads.
    tl.debug_barrier()


@triton.jit
def attend_kernel(
    terms,
    row_scale,
    correction,
    cache,
    block_table,
    items,
    item_count,
    item_tokens,
    token_end,
    token_slot,
    token_split,
    part_acc,
    part_peak,
    part_total,
    num_slots,
    table_stride,
    block_stride,
    head_stride,
    first_head,
    window,
    T: tl.constexpr,
    A: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STACKED: tl.constexpr,
    INT8: tl.constexpr,
):
    """Attend the work items of one list; grid (programs, KV heads in flight).

    Args:
        terms: int8 `[tokens, heads, 2, D]`, with `row_scale` fp32 and `correction`
            int32 `[tokens, heads]` from `prepare_kernel`.
        cache: uint8, in the order of `GpuTileLayout`; as int8.
        block_table: int32 `[num_reqs, table_stride]`.
        items: int32 `[capacity, 6]`: request, first index into `item_tokens`, tokens,
            first split, end split, whether chained.
        item_count: int32 `[1]`, on the device: the grid does not depend on it.
        item_tokens: int32, numbers of tokens.
        token_end: int32 `[tokens]`, keys before this position are seen.
        token_slot: int32 `[tokens]`, where its partial states begin.
        token_split: int32 `[tokens]`, the split of its first one.
        part_acc: fp32 `[KV heads in flight, num_slots, group, D]`, written; with
            `part_peak` and `part_total` without the last dimension.
        num_slots: Slots of partial states.
        table_stride: Elements.
        block_stride: Bytes, as `head_stride`.
        first_head: KV head of grid position 0.
        window: Keys that a query sees, itself included; 0 for all.

    """
    D: tl.constexpr = T.head_dim
    kv_head = first_head + tl.program_id(1)
    r = tl.arange(0, ROWS)
    count = tl.load(item_count)
    for w in range(tl.program_id(0), count, tl.num_programs(0)):
        item = items + w * ITEM_FIELDS
        table = block_table + tl.load(item).to(tl.int64) * table_stride
        split_begin, split_end = tl.load(item + 3), tl.load(item + 4)
        chained = tl.load(item + 5)
        valid = r // GROUP < tl.load(item + 2)
        token = tl.load(
            item_tokens + tl.load(item + 1) + r // GROUP, mask=valid, other=0
        )
        end = tl.load(token_end + token, mask=valid, other=0)
        begin = tl.where(window > 0, tl.maximum(end - window, 0), 0)
        row = token * HEADS + kv_head * GROUP + r % GROUP
        queries = _load_queries(terms, row_scale, correction, row, valid, D, STACKED)
        last = tl.max(end, axis=0)
        first = tl.min(tl.where(valid, begin, last), axis=0)
        slot = tl.load(token_slot + token, mask=valid, other=0)
        slot -= tl.where(
            chained > 0, 0, tl.load(token_split + token, mask=valid, other=0)
        )
        for split in range(split_begin, split_end):
            peak = tl.full((ROWS,), MINUS_INF, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = _zeros(ROWS, D // 8)
            tile_begin = tl.maximum(split * SPLIT_TILES, first // TILE_TOKENS)
            tile_end = tl.minimum(
                (split + 1) * SPLIT_TILES, (last + TILE_TOKENS - 1) // TILE_TOKENS
            )
            for tile in range(tile_begin, tile_end):
                at, offset = subtile_offsets(
                    table,
                    kv_head.to(tl.int64) * head_stride,
                    tile,
                    last,
                    block_stride,
                    T,
                )
                peak, total, acc = _attend_tile(
                    (peak, total, acc),
                    queries,
                    (begin, end),
                    cache,
                    at,
                    offset,
                    tile,
                    T,
                    A,
                    STACKED,
                    INT8,
                )
            place = slot + tl.where(chained > 0, 0, split)
            place = (tl.program_id(1) * num_slots + place).to(
                tl.int64
            ) * GROUP + r % GROUP
            _write_state(
                (peak, total, acc),
                part_acc,
                part_peak,
                part_total,
                place,
                valid,
                (chained > 0) & (split > split_begin),
                D,
            )


@triton.jit
def finish_kernel(
    output,
    row_scale,
    tokens,
    token_slot,
    token_parts,
    part_acc,
    part_peak,
    part_total,
    num_tokens,
    num_slots,
    token_stride,
    head_stride,
    first_head,
    norm,
    T: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the output of one token and KV head; grid (tokens, KV heads in flight).

    `tokens` int32 lists the rows of `output` to write; `num_tokens` of them count.
    """
    D: tl.constexpr = T.head_dim
    index = tl.program_id(0)
    if index >= tl.load(num_tokens):
        return
    token = tl.load(tokens + index).to(tl.int64)
    r = tl.arange(0, ROWS)
    valid = r < GROUP
    head = (first_head + tl.program_id(1)) * GROUP + r
    slot = (tl.program_id(1) * num_slots + tl.load(token_slot + token)).to(tl.int64)
    peak = tl.full((ROWS,), MINUS_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for part in range(0, tl.load(token_parts + token)):
        place = (slot + part) * GROUP + r
        at = part_acc + (place * D)[:, None] + tl.arange(0, D)[None, :]
        part_top = tl.load(part_peak + place, mask=valid, other=MINUS_INF)
        part_sum = tl.load(part_total + place, mask=valid, other=0.0)
        values = tl.load(at, mask=valid[:, None], other=0.0)
        peak, total, old, fresh = fold_weights(peak, total, part_top, part_sum)
        acc = fold_values(acc, old, values, fresh)
    factor = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    scale = tl.load(row_scale + token * HEADS + head, mask=valid, other=0.0)
    factor = tl.where(scale != scale, scale, factor)  # a query with an inf or a NaN
    acc = acc * factor[:, None]
    if T.rotated:
        acc = fwht(acc * norm, ROWS, T)
    at = token * token_stride + head[:, None] * head_stride + tl.arange(0, D)[None, :]
    store_rows(output + at, acc, valid[:, None], DTYPE)
