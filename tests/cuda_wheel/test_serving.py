# SPDX-License-Identifier: Apache-2.0
"""From the command line to the metadata of a batch, without a GPU."""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polykv_vllm.formats import CACHE_DTYPES, FORMATS, get_format
from tests.cuda_wheel.models import GEMMA, LLAMA, QWEN, engine_config

SERVED = [name for name, fmt in FORMATS.items() if not fmt.is_low_bit]
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)]


def test_every_seam_is_installed() -> None:
    from polykv_vllm.seams import registry

    registry.require()
    states = {row.seam.name: str(row.state) for row in registry.report()}
    assert set(states.values()) == {"installed"}, states


def test_the_command_line_takes_our_dtypes() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for name in CACHE_DTYPES:
        parsed = parser.parse_args(["--model", "m", "--kv-cache-dtype", name])
        assert EngineArgs.from_cli_args(parsed).kv_cache_dtype == name


@pytest.fixture(scope="module", autouse=True)
def _one_worker() -> Iterator[None]:
    """vLLM's process groups, of this process alone."""
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            1, 0, f"file://{file.name}", 0, "gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)
        yield


def layer(config: Any, head_size: int, name: str = "model.layers.0.self_attn") -> Any:
    """Return an attention layer as a model makes it: 8 query heads, 2 KV heads."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    with set_current_vllm_config(config):
        return Attention(
            8,
            head_size,
            head_size**-0.5,
            2,
            cache_config=config.cache_config,
            prefix=f"{name}.attn",
        )


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_backend_is_selected(
    tmp_path: Path, gpu: Any, capability: tuple[int, int]
) -> None:
    gpu.capability = capability
    for dtype in SERVED:
        config = engine_config(tmp_path, LLAMA, dtype)
        found = layer(config, 64)
        assert found.attn_backend.fmt == get_format(dtype)
        assert found.impl.isa == "triton"
        assert (
            type(found.impl._attend).__module__ == "polykv_vllm.kernels.triton.launch"
        )


def test_other_dtypes_keep_the_backend_of_vllm(tmp_path: Path) -> None:
    config = engine_config(tmp_path, LLAMA, "auto")
    assert layer(config, 64).attn_backend.__module__.startswith("vllm.")


@pytest.mark.parametrize(
    ("model", "head_size"),
    [(LLAMA, 64), (QWEN, 128), (GEMMA, 256)],
    ids=["Llama", "Qwen", "Gemma"],
)
@pytest.mark.parametrize("dtype", ["polykv_k8v3", "polykv_k7v4"])
def test_specs_of_whole_models(
    tmp_path: Path, model: dict[str, Any], head_size: int, dtype: str
) -> None:
    """The layers that the model itself makes, as model runner V2 asks for them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import SlidingWindowSpec
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = engine_config(tmp_path, model, dtype, max_model_len=2048)
    assert config.use_v2_model_runner
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(config)
    # As the engine does before it asks for specs; 16 is vLLM's default.
    current_platform.update_block_size_for_backend(config)
    assert config.cache_config.block_size == 32
    specs = get_kv_cache_spec(config)
    assert len(specs) == model["num_hidden_layers"]
    slot_bytes = FORMATS[dtype].slot_bytes(head_size)
    for spec in specs.values():
        assert spec.page_size_bytes == 32 * 2 * slot_bytes
    sliding = [s for s in specs.values() if isinstance(s, SlidingWindowSpec)]
    assert len(sliding) == model.get("layer_types", []).count("sliding_attention")


def test_a_batch_on_the_device(tmp_path: Path) -> None:
    """The builder gets tensors without values: to read one on the host would raise."""
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

    from polykv_vllm import ops
    from polykv_vllm.kernels.triton.launch import plan_of

    config = engine_config(tmp_path, LLAMA)
    attention = layer(config, 64)
    backend = attention.attn_backend
    spec = backend.customize_spec(attention.get_kv_cache_spec(config))
    builder = backend.get_builder_cls()(
        spec, [attention.layer_name], config, torch.device("meta")
    )
    assert builder.get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER

    def on_device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    starts = torch.tensor([0, 1, 2, 50], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=on_device(4),
        query_start_loc_cpu=starts,
        seq_lens=on_device(3),
        num_reqs=3,
        num_actual_tokens=50,
        max_query_len=48,
        max_seq_len=2000,
        block_table_tensor=on_device(3, 64),
        slot_mapping=on_device(50, dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.tensor([2000, 1990, 700], dtype=torch.int32),
    )
    batch = builder.build(0, common).batch
    assert isinstance(batch, ops.DeviceBatch) and batch.share
    plan = plan_of(batch, 4, 32, -1, torch.device("meta"))
    assert plan.num_slots == 4 + 4 + 48
    assert {work.items.device.type for work in plan.lists} == {"meta"}


def test_scratch_memory_is_taken_in_the_profile_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For decoding with all requests at full length, before the cache gets the rest."""
    from polykv_vllm.kernels.triton import scratch

    monkeypatch.setattr(scratch, "SCRATCH", scratch.Scratch())
    attention = layer(engine_config(tmp_path, LLAMA, max_num_seqs=16), 64)
    query = torch.empty(2048, 8, 64, dtype=torch.bfloat16, device="meta")
    attention.impl.forward(attention, query, query, query, query, None, query)
    taken = {key[0]: x.numel() for key, x in scratch.SCRATCH._buffers.items()}
    assert taken["terms"] == 2 * query.numel()
    # A state for each row of a prefill, or for each of 8 splits of 16 requests.
    assert taken["acc"] == 2 * 4 * max(2048, 16 * 8) * 64


def test_the_dtypes_are_typed() -> None:
    from vllm.config.cache import CacheDType

    assert set(CACHE_DTYPES) <= set(typing.get_args(CacheDType))
