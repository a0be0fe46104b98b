# SPDX-License-Identifier: Apache-2.0
"""Runs in vLLM's worker: replays a forward pass with the reference attention.

Two forward passes cannot be compared by their results alone: quantization turns the
smallest difference in one layer into other codes in the next, and after a few layers
the difference is as large as the quantization error itself. So the first pass is
recorded, and the second stores the recorded keys and values: both passes attend to
the same bytes, and what differs is the attention kernel.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class TestExtension:
    """Mixed into the worker class by `worker_extension_cls`."""

    __test__ = False

    def polykv_record(self) -> None:
        """Keep the keys and values of the following forward passes."""
        ops = self._real_ops()
        self._tape: list[Any] = []

        def reshape_and_cache(key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
            self._tape.append((key.clone(), value.clone()))
            ops.reshape_and_cache(key, value, *args, **kwargs)

        self._set_ops(reshape_and_cache, ops.paged_attention)

    def polykv_replay(self) -> None:
        """Store the recorded keys and values, attend with the reference."""
        ops = self._real_ops()
        tape = iter(self._tape)

        def reshape_and_cache(
            key: Any, value: Any, cache: Any, slots: Any, fmt: Any, **_: Any
        ) -> None:
            recorded_key, recorded_value = next(tape)
            assert recorded_key.shape == key.shape, "not the recorded batch"
            ops.reshape_and_cache(
                recorded_key, recorded_value, cache, slots, fmt, isa="reference"
            )

        def paged_attention(*args: Any, **kwargs: Any) -> None:
            ops.paged_attention(*args, **kwargs | {"isa": "reference"})

        self._set_ops(reshape_and_cache, paged_attention)

    def polykv_stop(self) -> int:
        """Back to normal; returns the number of recorded layer calls."""
        from polykv_vllm.attention import impl

        impl.ops = self._real_ops()
        return len(self._tape)

    def polykv_attention_layers(self) -> dict[str, str]:
        """Implementation class of each attention layer."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        return {name: type(layer.impl).__name__ for name, layer in layers.items()}

    def polykv_cache_shapes(self) -> dict[str, list[int]]:
        """Shape of each layer's cache."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        return {name: list(layer.kv_cache.shape) for name, layer in layers.items()}

    def polykv_touch_cache(self) -> None:
        """Write to every cache page, so that using it later takes no new memory."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        for layer in layers.values():
            layer.kv_cache.zero_()

    def polykv_peak_memory_kib(self) -> int:
        """Highest resident memory of this process so far."""
        status = Path("/proc/self/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert match
        return int(match[1])

    @staticmethod
    def _real_ops() -> Any:
        from polykv_vllm import ops

        return ops

    @staticmethod
    def _set_ops(reshape_and_cache: Any, paged_attention: Any) -> None:
        from polykv_vllm.attention import impl

        impl.ops = SimpleNamespace(
            reshape_and_cache=reshape_and_cache,
            paged_attention=paged_attention,
            current_isa=impl.ops.current_isa,
        )
