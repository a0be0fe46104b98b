# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest

from polykv_vllm.pool.disk.weights import UnidentifiedError, files_digest, weight_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for part in ("1.safetensors", "2.safetensors", "config.json"):
        (model / part).write_bytes(part.encode() * 50_000)
    return model


def test_weights_are_read_once(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "cache" / "digests.json"
    files = weight_files(model)
    assert [file.name for file in files] == ["1.safetensors", "2.safetensors"]
    first = files_digest(files, memory)
    known = json.loads(memory.read_text())
    known[str(files[0])]["digest"] = "remembered"
    memory.write_text(json.dumps(known))
    assert files_digest(files, memory) != first


@pytest.mark.parametrize("what", ["head", "tail", "size", "time and middle", "name"])
def test_a_change_is_seen(model: Path, tmp_path: Path, what: str) -> None:
    memory = tmp_path / "digests.json"
    first = files_digest(weight_files(model), memory)
    file = model / "1.safetensors"
    before, content = file.stat(), bytearray(file.read_bytes())
    if what == "name":
        file.rename(model / "0.safetensors")
    else:
        places = {"head": 5, "tail": -5, "time and middle": len(content) // 2}
        if what in places:
            content[places[what]] ^= 1
        file.write_bytes(content + b"x" * (what == "size"))
        shift = 10**9 if what == "time and middle" else 0
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + shift))
    assert files_digest(weight_files(model), memory) != first


@pytest.mark.parametrize("memory", ["", "{", "[]", '{"x": 3}'])
def test_a_damaged_memory_is_no_error(model: Path, tmp_path: Path, memory: str) -> None:
    expected = files_digest(weight_files(model), tmp_path / "a.json")
    (tmp_path / "b.json").write_text(memory)
    assert files_digest(weight_files(model), tmp_path / "b.json") == expected
    nowhere = tmp_path / "b.json" / "c.json"
    assert files_digest(weight_files(model), nowhere) == expected


def test_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UnidentifiedError, match="safetensors"):
        weight_files(tmp_path)
