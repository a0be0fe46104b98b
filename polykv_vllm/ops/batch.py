# SPDX-License-Identifier: Apache-2.0
"""The part of attention's arguments that all layers of a KV cache group share."""

from dataclasses import dataclass, field
from typing import Any

import torch

from polykv_vllm.ops._checks import check_index
from polykv_vllm.ops._structs import Windows
from polykv_vllm.ops.segments import PrefixForest
from polykv_vllm.ops.windows import WindowBatch


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """One batch, checked once for all layers.

    Attributes:
        block_table: `[num_reqs, max_num_blocks]` int32 on the CPU.
        seq_lens: `[num_reqs]` int32, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32, offsets into the query rows.
        forest: Blocks to read once for several requests (`build_prefix_forest`).
        windows: Which tokens are seen as the model made them; None for none.
        fields: The same as values of `AttentionArgs`.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit.

    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    forest: PrefixForest | None = None
    windows: WindowBatch | None = None
    fields: tuple[tuple[str, Any], ...] = field(init=False, repr=False)

    @property
    def host_seq_lens(self) -> torch.Tensor:
        """As `DeviceBatch` has it: here all is on the CPU."""
        return self.seq_lens

    @property
    def host_query_start_loc(self) -> torch.Tensor:
        """As `DeviceBatch` has it."""
        return self.query_start_loc

    @property
    def share(self) -> bool:
        """As `DeviceBatch` has it."""
        return self.forest is not None

    def __post_init__(self) -> None:
        """Check the tensors and note where they are."""
        table, lens, starts = self.block_table, self.seq_lens, self.query_start_loc
        check_batch(table, lens, starts)
        if self.windows is not None:
            self.windows.check_requests(lens.shape[0])
        fields: dict[str, Any] = {
            "block_table": table.data_ptr(),
            "seq_lens": lens.data_ptr(),
            "query_start_loc": starts.data_ptr(),
            "block_table_stride": table.stride(0),
            "block_table_width": table.shape[1],
            "num_reqs": lens.shape[0],
            "segments": None,
            "readers": None,
            "num_readers": 0,
            "num_segments": 0,
            "windows": Windows() if self.windows is None else self.windows.struct(),
        }
        if self.forest is not None:
            segments, readers = self.forest.segments, self.forest.readers
            check_index("segments", segments, torch.int32, 2)
            check_index("readers", readers, torch.int32, 1)
            if segments.shape[1] != 4 or not segments.is_contiguous():
                raise ValueError(
                    "segments must be contiguous [num_segments, 4], not "
                    f"{list(segments.shape)} with strides {segments.stride()}"
                )
            fields |= {
                "segments": segments.data_ptr(),
                "readers": readers.data_ptr(),
                "num_readers": readers.shape[0],
                "num_segments": segments.shape[0],
            }
        object.__setattr__(self, "fields", tuple(fields.items()))


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """One batch whose tensors are on a GPU, for kernels that never wait for the host.

    Attributes:
        block_table: `[num_reqs, max_num_blocks]` int32 on the GPU.
        seq_lens: `[num_reqs]` int32 on the GPU, the query tokens included.
        query_start_loc: `[num_reqs + 1]` int32 on the GPU, offsets into the query rows.
        host_seq_lens: `[num_reqs]` int32 on the CPU; each at least the true length.
        host_query_start_loc: Like `query_start_loc`, on the CPU.
        share: Whether blocks that several requests have are read once for all of them.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.

    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    host_seq_lens: torch.Tensor
    host_query_start_loc: torch.Tensor
    share: bool = True

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices; nothing is read from the device."""
        check_batch(
            self.block_table,
            self.host_seq_lens,
            self.host_query_start_loc,
            device=self.block_table.device.type,
        )
        for name, device, host in (
            ("seq_lens", self.seq_lens, self.host_seq_lens),
            ("query_start_loc", self.query_start_loc, self.host_query_start_loc),
        ):
            check_index(name, device, torch.int32, 1, self.block_table.device.type)
            if device.shape != host.shape:
                raise ValueError(
                    f"{name} has {device.shape[0]} entries on the device and "
                    f"{host.shape[0]} on the host"
                )


def check_batch(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    device: str = "cpu",
) -> None:
    """Check the tensors that describe a batch; their values are the library's task.

    Args:
        block_table: On `device`, the others on the CPU.
        seq_lens: See `AttentionBatch`.
        query_start_loc: See `AttentionBatch`.
        device: Type of the block table's device.

    Raises:
        ValueError: One has another dtype, device or stride, or they do not fit.

    """
    check_index("block_table", block_table, torch.int32, 2, device)
    check_index("seq_lens", seq_lens, torch.int32, 1)
    check_index("query_start_loc", query_start_loc, torch.int32, 1)
    num_reqs = seq_lens.shape[0]
    if query_start_loc.shape[0] != num_reqs + 1 or block_table.shape[0] < num_reqs:
        raise ValueError(
            f"{num_reqs} requests with {query_start_loc.shape[0]} query offsets and "
            f"{block_table.shape[0]} block table rows"
        )
