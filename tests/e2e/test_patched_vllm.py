# SPDX-License-Identifier: Apache-2.0
"""A vLLM built with `patches/` serves a polykv cache."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_vllm.seams import registry
from tests.e2e.features.models import save_llama
from tests.seams.patched_vllm import PATCHES, patch

SCRIPT = """
import json, sys
import vllm
from vllm import LLM, SamplingParams
from polykv_vllm.seams import registry

llm = LLM(
    sys.argv[1], kv_cache_dtype="polykv", enforce_eager=True, dtype="float32",
    kv_cache_memory_bytes=16 << 20, max_model_len=256, block_size=32,
    worker_extension_cls="tests.e2e.worker_extension.TestExtension",
)
sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
prompt = {"prompt_token_ids": list(range(3, 100))}
outputs = [llm.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2)]
print("RESULT", json.dumps({
    "module": vllm.__file__,
    "states": sorted(str(row.state) for row in registry.report()),
    "layers": sorted(llm.collective_rpc("polykv_attention_layers")[0].values()),
    "transforms": len(llm.collective_rpc("polykv_key_transforms")[0]),
    "scheduler": str(llm.llm_engine.vllm_config.scheduler_config.scheduler_cls),
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "cached": [output.num_cached_tokens for output in outputs],
}))
"""


def run(model: Path, environment: dict[str, str]) -> dict[str, object]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=model,
        capture_output=True,
        text=True,
    )
    lines = [n for n in done.stdout.splitlines() if n.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-3000:]
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@pytest.mark.skipif(
    registry.vllm_version() != "0.32.0" or shutil.which("patch") is None,
    reason="needs vLLM 0.32.0, which the patches are for, and the program patch",
)
def test_a_patched_vllm_generates_what_the_plugin_does(tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    environment = patch(tmp_path)
    patched = run(tmp_path / "model", environment)
    root = environment["PYTHONPATH"].split(":")[1]
    plain = run(tmp_path / "model", environment | {"PYTHONPATH": root})
    assert patched.pop("module") == f"{tmp_path}/vllm/__init__.py"
    assert plain.pop("module") != f"{tmp_path}/vllm/__init__.py"
    total, present = len(registry.SEAMS), len(list(PATCHES.glob("*.patch")))
    states = ["installed"] * (total - present) + ["present upstream"] * present
    assert patched.pop("states") == states
    assert plain.pop("states") == ["installed"] * total
    assert patched == plain
    assert plain["layers"] == ["PolyKVImpl"] * 3 and plain["transforms"] == 3
    assert plain["cached"] == [0, 96]
