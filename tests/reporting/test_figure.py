# SPDX-License-Identifier: Apache-2.0
"""Labels of plots keep apart."""

import pytest

from polykv_vllm.reporting.figure import spread_apart


def test_labels_move_apart_as_little_as_possible() -> None:
    assert spread_apart([1.0, 5.0], 2.0) == [1.0, 5.0]
    assert spread_apart([1.0, 1.0, 9.0], 2.0) == [0.0, 2.0, 9.0]
    # The second cluster would reach into the first: they become one.
    assert spread_apart([0.0, 3.0, 3.2, 3.4], 2.0) == pytest.approx(
        [-0.6, 1.4, 3.4, 5.4]
    )
