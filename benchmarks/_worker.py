# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmark asks of vLLM's worker, called through `collective_rpc`.

vLLM mixes the class named by `worker_extension_cls` into its worker. The methods only
look and count; `Avx512Worker` in _worker_avx512.py changes the attention path.
"""

import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch

_PAGE_BYTES = 4096


class BenchmarkWorker:
    """Probes in the worker's process."""

    model_runner: Any
    vllm_config: Any

    def bench_attention(self) -> str:
        """Return what computes the attention: package and instruction set."""
        layer = next(iter(self._bench_layers()))
        isa = getattr(layer, "isa", None)  # set by vLLM's own CPU backend
        if isa is None:
            from polykv_vllm import ops

            isa = ops.current_isa()
        return f"{type(layer.impl).__module__.split('.')[0]} {isa}"

    def bench_touch_cache(self) -> int:
        """Write to every page of the KV cache without changing it; return its bytes.

        The operating system gives memory at the first write. After this call the whole
        cache counts as resident, so that later growth is something else.
        """
        # The layers' tensors are views of few buffers, usually of one.
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in self.model_runner.kv_caches
        }
        for storage in storages.values():
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            flat[::_PAGE_BYTES].bitwise_or_(0)
        return sum(storage.nbytes() for storage in storages.values())

    def bench_reset_peak(self) -> None:
        """Make the peak resident memory what is resident now.

        Memory that is free but was kept by the C library is given back first: what it
        keeps depends on the order of earlier requests.
        """
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def bench_peak_bytes(self) -> int:
        """Return the peak resident memory since the last reset."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("/proc/self/status has no VmHWM")

    def bench_time_store(self) -> None:
        """From now on add up the time that all layers spend on storing K and V."""
        self._bench_store_s = 0.0
        for layer in self._bench_layers():
            layer.impl.do_kv_cache_update = self._bench_timed(
                layer.impl.do_kv_cache_update
            )

    def bench_store_seconds(self) -> float:
        """Return the time counted since the last call, and start again."""
        seconds, self._bench_store_s = self._bench_store_s, 0.0
        return seconds

    def _bench_layers(self) -> list[Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if hasattr(layer, "impl")]

    def _bench_timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._bench_store_s += time.perf_counter() - start
            return result

        return timed
