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
