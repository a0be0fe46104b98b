# SPDX-License-Identifier: Apache-2.0
"""`polykv calibrate` on a small model: files, notes, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polykv_vllm.calibrate.artifact import load_calibration
from polykv_vllm.cli import app
from tests.evaluate.byte_tokenizer import byte_tokenizer
from tests.hf.models import tiny_model

PROSE = "The archive keeps letters, maps and lists of ships. " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=320).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_text_becomes_a_calibration(model: Path, tmp_path: Path) -> None:
    prose, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    prose.write_text(PROSE)
    records = [{"ctxs": [{"text": PROSE[:200]}, {"text": PROSE[200:400]}]}] * 3
    lines.write_text("\n".join(map(json.dumps, records)))
    texts = ("--text", prose, "--text", lines, "--field", "ctxs.text")
    size = ("--sequences", 6, "--sequence-tokens", 64)
    code, output = run(model, *texts, *size, "-o", tmp_path / "one")
    assert code == 0, output
    assert "2 KV heads from 384 tokens" in output
    assert f'"calibration": "{tmp_path / "one"}"' in output
    found = load_calibration(tmp_path / "one").record
    assert found.text.files == ["a.txt", "b.jsonl"]
    assert (found.text.sequences, found.transform) == (6, "wush")
    again = run(model, *texts, *size, "-o", tmp_path / "two")
    assert again[0] == 0
    other = run(model, *texts, *size, "--seed", 1, "-o", tmp_path / "three")
    assert other[0] == 0
    options = ("--no-center-keys", "--dtype", "bfloat16")
    plain = run(model, *texts, *size, *options, "-o", tmp_path / "plain")
    assert plain[0] == 0, plain[1]
    assert found.center_keys
    assert not load_calibration(tmp_path / "plain").record.center_keys
    digests = [load_calibration(tmp_path / n).digest for n in ("one", "two", "three")]
    assert digests[0] == digests[1] != digests[2]


def test_a_short_text_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(PROSE[:40])
    where = ("--text", tmp_path / "short.txt", "-o", tmp_path / "out")
    code, output = run(model, *where, "--sequence-tokens", 32)
    assert code == 0, output
    assert "1 sequences of 32 tokens; 128 were asked for" in output
    assert "have not full rank" in output and "damping 0.01" in output
    record = load_calibration(tmp_path / "out").record
    assert record.rank_deficient[0].startswith("layer 0, KV head 0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["which text"]),
        (("--text", "{tmp}/none.txt"), ["none.txt"]),
        (("--text", "{tmp}/a.jsonl"), ["line 1", "'text'", "title"]),
        (("--text", "{tmp}/a.txt"), ["has 3 tokens", "--sequence-tokens 4"]),
        (("--text", "{tmp}/a.txt", "--sequence-tokens", "4096"), ["takes 512"]),
        (("--text", "{tmp}/a.txt", "--transform", "x"), ["'x'", "wush_a"]),
        (("--text", "{tmp}/a.txt", "--dtype", "int8"), ["'int8'", "bfloat16"]),
    ],
)
def test_errors_say_what_is_wrong(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "a.jsonl").write_text('{"title": "x"}')
    given = [each.replace("{tmp}", str(tmp_path)) for each in arguments]
    code, output = run(model, *given, "-o", tmp_path / "out")
    assert code == 1
    for word in words:
        assert word in " ".join(output.split())
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "quantized"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text(PROSE)
    code, output = run(copy, "--text", tmp_path / "a.txt", "-o", tmp_path / "out")
    assert code == 1
    assert "quantized checkpoint (gptq)" in " ".join(output.split())
