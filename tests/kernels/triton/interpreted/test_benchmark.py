# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/gpu.py --interpret` checks, for one format."""

from polykv_vllm.formats import FORMATS
from tests.gpu_cases import only_interpreted

pytestmark = only_interpreted


def test_the_checks_pass() -> None:
    from benchmarks.gpu import check_format

    result = check_format(FORMATS["polykv_k8v4"], 64, "cpu")
    assert result["ok"], result
    assert 0 < result["attention_error"] < 1e-3
    assert result["assembly_equal"] is None  # there is no PTX in the interpreter
