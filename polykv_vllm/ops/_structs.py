# SPDX-License-Identifier: Apache-2.0
"""ctypes mirror of csrc/include/polykv/args.h; sizes are compared at load."""

import ctypes as ct

from polykv_vllm.formats import FormatSpec, clip_place

_QUANTIZERS = ("symmetric", "codebook", "affine")
"""Names by the numbers of `polykv::Quantizer`."""


class Format(ct.Structure):
    """`polykv::Format`."""

    _fields_ = [
        ("key_bits", ct.c_int32),
        ("value_bits", ct.c_int32),
        ("rotate", ct.c_int32),
        ("key_quantizer", ct.c_int32),
        ("value_quantizer", ct.c_int32),
        ("key_clip", ct.c_int32),
        ("value_clip", ct.c_int32),
    ]

    @classmethod
    def of(cls, fmt: FormatSpec, head_dim: int) -> "Format":
        """Return the struct for `fmt` with rows of `head_dim` elements."""
        return cls(
            fmt.key_bits,
            fmt.value_bits,
            fmt.value_rotation == "hadamard",
            _QUANTIZERS.index(fmt.key_quantizer),
            _QUANTIZERS.index(fmt.value_quantizer),
            clip_place(fmt.key_clip, head_dim),
            clip_place(fmt.value_clip, head_dim),
        )


class Cache(ct.Structure):
    """`polykv::Cache`."""

    _fields_ = [
        ("data", ct.c_void_p),
        ("num_blocks", ct.c_int64),
        ("block_stride", ct.c_int64),
        ("head_stride", ct.c_int64),
        ("num_kv_heads", ct.c_int32),
        ("block_size", ct.c_int32),
        ("head_dim", ct.c_int32),
        ("format", Format),
    ]


class RowTransform(ct.Structure):
    """`polykv::RowTransform`."""

    _fields_ = [
        ("centers", ct.c_void_p),
        ("multipliers", ct.c_void_p),
        ("matrices", ct.c_void_p),
        ("rotate", ct.c_int32),
    ]


class StoreArgs(ct.Structure):
    """`polykv::StoreArgs`."""

    _fields_ = [
        ("cache", Cache),
        ("key", ct.c_void_p),
        ("value", ct.c_void_p),
        ("slot_mapping", ct.c_void_p),
        ("num_tokens", ct.c_int64),
        ("key_token_stride", ct.c_int64),
        ("key_head_stride", ct.c_int64),
        ("value_token_stride", ct.c_int64),
        ("value_head_stride", ct.c_int64),
        ("key_transform", RowTransform),
        ("dtype", ct.c_int32),
        ("num_threads", ct.c_int32),
    ]


class LogitStruct(ct.Structure):
    """`polykv::LogitTerms`."""

    _fields_ = [
        ("alibi_slopes", ct.c_void_p),
        ("sinks", ct.c_void_p),
        ("soft_cap", ct.c_float),
    ]


class Windows(ct.Structure):
    """`polykv::Windows`."""

    _fields_ = [
        ("sink_tokens", ct.c_void_p),
        ("recent_begin", ct.c_void_p),
        ("sink_pages", ct.c_void_p),
        ("recent_pages", ct.c_void_p),
        ("sink_pages_stride", ct.c_int64),
        ("recent_pages_stride", ct.c_int64),
        ("sink_pages_width", ct.c_int32),
        ("recent_pages_width", ct.c_int32),
        ("recent_tokens", ct.c_int32),
    ]


class RawRowStruct(ct.Structure):
    """`polykv::RawRows`."""

    _fields_ = [
        ("key", ct.c_void_p),
        ("value", ct.c_void_p),
        ("cache", ct.c_void_p),
        ("key_token_stride", ct.c_int64),
        ("key_head_stride", ct.c_int64),
        ("value_token_stride", ct.c_int64),
        ("value_head_stride", ct.c_int64),
        ("num_pages", ct.c_int64),
        ("page_stride", ct.c_int64),
        ("kind_stride", ct.c_int64),
        ("head_stride", ct.c_int64),
    ]


class AttentionArgs(ct.Structure):
    """`polykv::AttentionArgs`."""

    _fields_ = [
        ("cache", Cache),
        ("query", ct.c_void_p),
        ("output", ct.c_void_p),
        ("block_table", ct.c_void_p),
        ("seq_lens", ct.c_void_p),
        ("query_start_loc", ct.c_void_p),
        ("query_token_stride", ct.c_int64),
        ("query_head_stride", ct.c_int64),
        ("output_token_stride", ct.c_int64),
        ("output_head_stride", ct.c_int64),
        ("segments", ct.c_void_p),
        ("readers", ct.c_void_p),
        ("num_readers", ct.c_int64),
        ("block_table_stride", ct.c_int64),
        ("num_rows", ct.c_int64),
        ("query_transform", RowTransform),
        ("logits", LogitStruct),
        ("windows", Windows),
        ("raw", RawRowStruct),
        ("block_table_width", ct.c_int32),
        ("num_reqs", ct.c_int32),
        ("num_segments", ct.c_int32),
        ("num_heads", ct.c_int32),
        ("sliding_window", ct.c_int32),
        ("dtype", ct.c_int32),
        ("query_dtype", ct.c_int32),
        ("scale", ct.c_float),
        ("fast", ct.c_int32),
        ("num_threads", ct.c_int32),
    ]


class SharingStats(ct.Structure):
    """`polykv::SharingStats`."""

    _fields_ = [
        ("shared_pairs", ct.c_int64),
        ("unshared_own_token", ct.c_int64),
        ("unshared_no_other_reader", ct.c_int64),
        ("unshared_no_gain", ct.c_int64),
        ("distinct_prefixes", ct.c_int64),
        ("max_readers", ct.c_int64),
        ("physical_tokens", ct.c_int64),
        ("logical_tokens", ct.c_int64),
    ]


class ForestArgs(ct.Structure):
    """`polykv::ForestArgs` (include/polykv/forest.h)."""

    _fields_ = [
        ("block_table", ct.c_void_p),
        ("seq_lens", ct.c_void_p),
        ("query_start_loc", ct.c_void_p),
        ("segments", ct.c_void_p),
        ("readers", ct.c_void_p),
        ("stats", ct.c_void_p),
        ("block_table_stride", ct.c_int64),
        ("max_segments", ct.c_int64),
        ("max_readers", ct.c_int64),
        ("block_table_width", ct.c_int32),
        ("num_reqs", ct.c_int32),
        ("block_size", ct.c_int32),
        ("group", ct.c_int32),
        ("sliding_window", ct.c_int32),
    ]
