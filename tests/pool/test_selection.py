# SPDX-License-Identifier: Apache-2.0
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from polykv_vllm.config import parse_options
from polykv_vllm.errors import UnsupportedError
from polykv_vllm.pool import selection

OWN = "somebody.Scheduler"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "eligible", {selection.SCHEDULER})


def choose(
    caching: bool = True,
    own: Any = None,
    asynchronous: bool = False,
    hybrid: bool = False,
    **options: Any,
) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
        scheduler_config=SimpleNamespace(
            scheduler_cls=own, async_scheduling=asynchronous
        ),
    )
    selection.select_scheduler(config, parse_options({"polykv": options}))
    return config.scheduler_config.scheduler_cls


def test_ours_is_chosen() -> None:
    assert choose() == choose(single_copy=True) == selection.SCHEDULER
    assert choose(own=selection.SCHEDULER) == selection.SCHEDULER


def test_it_can_be_switched_off() -> None:
    assert choose(single_copy=False) is None
    assert choose(single_copy=False, own=OWN) == OWN


def test_without_prefix_caching_there_is_nothing_to_share() -> None:
    assert choose(caching=False) is None


@pytest.mark.parametrize(
    ("changes", "kept", "name"),
    [
        ({"own": OWN}, OWN, f"--scheduler-cls {OWN}"),
        ({"asynchronous": True}, None, "--async-scheduling"),
        ({"hybrid": True}, None, "a model with linear attention"),
    ],
)
def test_the_choice_of_a_user_is_kept_and_told(
    changes: dict[str, Any], kept: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm.polykv").addHandler(caplog.handler)
    assert choose(**changes) == kept
    assert f"{name}: requests that arrive together" in caplog.text
    with pytest.raises(UnsupportedError, match=f"single_copy=true .*{name}"):
        choose(**changes, single_copy=True)


def test_an_unknown_base_class_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selection, "eligible", set())
    logging.getLogger("vllm.polykv").addHandler(caplog.handler)
    assert choose() is None
    assert "another one than expected" in caplog.text


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_a_truth_value(value: Any) -> None:
    from polykv_vllm.errors import OptionError

    with pytest.raises(OptionError, match=r"single_copy.*allowed: true, false"):
        choose(single_copy=value)


def engine_args(**options: Any) -> Any:
    pool = {"path": "/somewhere"} | options.pop("pool", {})
    given = {
        "additional_config": {"polykv": {"pool": pool}},
        "kv_transfer_config": None,
        "enable_prefix_caching": None,
        "kv_cache_dtype_skip_layers": [],
        "speculative_config": None,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**given | options)


def test_the_connector_is_chosen_where_blocks_are_kept() -> None:
    args = engine_args()
    selection.choose_connector(args)
    asked = args.kv_transfer_config
    assert asked.kv_connector == selection.CONNECTOR
    assert asked.kv_load_failure_policy == "recompute"  # never a failed request
    selection.choose_connector(args)
    assert args.kv_transfer_config is asked
    without = engine_args(additional_config={"polykv": {}})
    selection.choose_connector(without)
    assert without.kv_transfer_config is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kv_transfer_config": SimpleNamespace(kv_connector="X")}, "connector .X."),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "skip-layers"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"speculative_config": {"method": "ngram"}}, "--speculative-config"),
    ],
)
def test_what_cannot_be_had_with_blocks_on_disk(
    options: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedError, match=name):
        selection.choose_connector(engine_args(**options))


def layers(sliding_window: int | None) -> Any:
    model = SimpleNamespace(num_hidden_layers=2, sliding_window=sliding_window)
    return SimpleNamespace(
        additional_config={"polykv": {"pool": {"path": "/somewhere"}}},
        cache_config=SimpleNamespace(cache_dtype="polykv"),
        model_config=SimpleNamespace(hf_text_config=model),
    )


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="2 layers with sliding windows"):
        selection.check_layers(layers(64))
    selection.check_layers(layers(None))


def test_prefixes_need_the_routes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text("prefixes: [{name: a, text: x}]")
    config = {"polykv": {"pool": {"prefixes": str(file)}}}
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS=polykv"):
        selection.check_prefixes(config)
    monkeypatch.setenv("VLLM_PLUGINS", "other,polykv")
    selection.check_prefixes(config)
