# SPDX-License-Identifier: Apache-2.0
"""Runs in vLLM's worker: replays a forward pass with the reference attention.

Two forward passes cannot be compared by their results alone: quantization turns the
smallest difference in one layer into other codes in the next, and after a few layers
the difference is as large as the quantization error itself. So the first pass is
recorded, and the second stores the recorded keys and values: both passes attend to
the same bytes, and what differs is the attention kernel.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any


def _plain(record: Any) -> dict[str, Any]:
    """Turn a dataclass of tensors into what an RPC can return."""
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in asdict(record).items()
    }


class TestExtension:
    """Mixed into the worker class by `worker_extension_cls`."""

    __test__ = False

    def polykv_record(self) -> None:
        """Keep the keys and values of the following forward passes."""
        self._tape: list[Any] = []
        for impl in self._impls():
            self._replace(impl, _store=self._recording(impl._store))

    def _recording(self, store: Any) -> Any:
        def record(key: Any, value: Any, cache: Any, slots: Any) -> None:
            self._tape.append((key.clone(), value.clone()))
            store(key, value, cache, slots)

        return record

    def polykv_replay(self) -> None:
        """Store the recorded keys and values, attend with the reference."""
        from polykv_vllm import ops

        self._restore()
        tape = iter(self._tape)

        def replaying(store: Any) -> Any:
            def replay(key: Any, value: Any, cache: Any, slots: Any) -> None:
                recorded_key, recorded_value = next(tape)
                assert recorded_key.shape == key.shape, "not the recorded batch"
                store(recorded_key, recorded_value, cache, slots)

            return replay

        for impl in self._impls():
            reference = ops.layer_attention(
                impl.fmt,
                impl.scale,
                impl.sliding_window,
                key_transform=impl.key_transform,
                logits=impl._logits,
                isa="reference",
            )
            store = ops.layer_store(
                impl.fmt, key_transform=impl.key_transform, isa="reference"
            )
            self._replace(impl, _store=replaying(store), _attend=reference)

    def polykv_stop(self) -> int:
        """Back to normal; returns the number of recorded layer calls."""
        self._restore()
        return len(self._tape)

    def polykv_attention_layers(self) -> dict[str, str]:
        """Implementation class of each attention layer."""
        return {name: type(impl).__name__ for name, impl in self._named_impls()}

    def polykv_key_transforms(self) -> dict[str, tuple[str, Any]]:
        """Treatment and scales of each layer with one of our caches."""
        return {
            name: (impl.key_transform.treatment, _plain(impl.key_transform)["scales"])
            for name, impl in self._named_impls()
            if getattr(impl, "key_transform", None) is not None
        }

    def polykv_calibrations(self) -> list[str]:
        """Digests of what was folded into the layers with one of our caches."""
        return sorted({impl.calibration for impl in self._impls()} - {None})

    def polykv_key_projections(self) -> dict[str, Any]:
        """Fields of the `KeyProjection` of each layer with one of our caches."""
        from polykv_vllm.attention.key_projection import read_key_projection

        modules = dict(self.get_model().named_modules())  # type: ignore
        dtype = self.model_config.dtype  # type: ignore
        return {
            name: _plain(read_key_projection(modules, name, impl, dtype))
            for name, impl in self._named_impls()
            if hasattr(impl, "key_transform")
        }

    def polykv_cache_shapes(self) -> dict[str, list[int]]:
        """Shape of each layer's cache."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        return {name: list(layer.kv_cache.shape) for name, layer in layers.items()}

    def polykv_layers(self) -> list[dict[str, Any]]:
        """What each attention layer is, and the bytes of its cache."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        return [
            {
                "name": name,
                "impl": type(layer.impl).__name__,
                "isa": getattr(layer.impl, "isa", None),
                "num_heads": layer.impl.num_heads,
                "num_kv_heads": layer.impl.num_kv_heads,
                "head_size": layer.impl.head_size,
                "sliding_window": max(layer.impl.sliding_window, 0),
                "treatment": layer.impl.key_transform.treatment,
                "cache_bytes": layer.kv_cache.nbytes,
            }
            for name, layer in layers.items()
            if hasattr(layer, "impl")
        ]

    def polykv_cache_storages(self) -> list[list[int]]:
        """Address and bytes of the memory behind each layer's cache."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        storages = [layer.kv_cache.untyped_storage() for layer in layers.values()]
        return [[storage.data_ptr(), storage.nbytes()] for storage in storages]

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

    def _named_impls(self) -> list[tuple[str, Any]]:
        """Return the attention layers' implementations; other layers have none."""
        layers = self.compilation_config.static_forward_context  # type: ignore
        found = [(name, getattr(layer, "impl", None)) for name, layer in layers.items()]
        return [(name, impl) for name, impl in found if impl is not None]

    def _impls(self) -> list[Any]:
        """Return those with one of our caches, in the order they run."""
        return [impl for _, impl in self._named_impls() if hasattr(impl, "_store")]

    def _replace(self, impl: Any, **members: Any) -> None:
        """Set members of a layer until `_restore`."""
        self._replaced: list[Any] = getattr(self, "_replaced", [])
        for name, member in members.items():
            self._replaced.append((impl, name, getattr(impl, name)))
            setattr(impl, name, member)

    def _restore(self) -> None:
        for impl, name, member in getattr(self, "_replaced", []):
            setattr(impl, name, member)
        self._replaced = []
