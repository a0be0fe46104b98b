# SPDX-License-Identifier: Apache-2.0
import typing

import pytest
import torch

from polykv_vllm.formats import CACHE_DTYPES


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_configs_accept_our_dtypes(name: str) -> None:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    config = VllmConfig(cache_config=CacheConfig(cache_dtype=name))
    assert config.cache_config.cache_dtype == name
    assert STR_DTYPE_TO_TORCH_DTYPE[name] == torch.uint8


@pytest.mark.usefixtures("installed")
def test_every_copy_of_the_literal_has_our_names() -> None:
    import vllm.config.speculative
    import vllm.engine.arg_utils
    import vllm.v1.attention.selector
    from vllm.config.cache import CacheDType

    assert set(CACHE_DTYPES) <= set(typing.get_args(CacheDType))
    for module in (
        vllm.config.speculative,
        vllm.engine.arg_utils,
        vllm.v1.attention.selector,
    ):
        assert module.CacheDType is CacheDType
    hint = vllm.config.speculative.SpeculativeConfig.__annotations__["kv_cache_dtype"]
    assert hint == CacheDType | None


@pytest.mark.usefixtures("installed")
def test_the_command_line_offers_our_dtypes() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for name in CACHE_DTYPES:
        assert parser.parse_args(["--kv-cache-dtype", name]).kv_cache_dtype == name


@pytest.mark.usefixtures("installed")
def test_other_names_are_refused_with_a_list() -> None:
    from pydantic import ValidationError
    from vllm.config import CacheConfig

    with pytest.raises(ValidationError, match=r"'auto'.*'polykv_k7v4'"):
        CacheConfig(cache_dtype="polykv_k1v1")


@pytest.mark.usefixtures("removed")
def test_removed_without_a_trace() -> None:
    from pydantic import ValidationError
    from vllm.config import CacheConfig
    from vllm.config.cache import CacheDType
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    assert not set(CACHE_DTYPES) & set(typing.get_args(CacheDType))
    assert not set(CACHE_DTYPES) & set(STR_DTYPE_TO_TORCH_DTYPE)
    with pytest.raises(ValidationError):
        CacheConfig(cache_dtype="polykv")
