"""pqweights inspect of GGUF files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import answer, done
from tiny_gguf import TYPES, small_gguf

from pqweights.results.inspect import inspect_gguf

BYTES = {"F32": 384, "F16": 192, "BF16": 192, "Q8_0": 102, "Q4_0": 54}  # of 3 rows of 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gguf(tmp_path_factory.mktemp("inspect") / "model.gguf", {"tokenizer.chat_template": "{{ messages }}"})


def test_text_has_tensors_types_and_metadata(model: Path) -> None:
    lines = done("inspect", model).stdout.splitlines()
    assert lines[0].split() == ["tensor", "shape", "type", "bytes"]
    assert [line.split() for line in lines[1:6]] == [
        [f"blk.{number}.ffn_up.weight", "3x32", kind, str(BYTES[kind])] for number, kind in enumerate(TYPES)
    ]
    assert lines[7].split() == ["type", "tensors", "weights", "bytes", "bits/weight"]
    assert [line.split() for line in lines[8:14]] == [
        ["F32", "1", "96", "384", "32.000"],
        ["BF16", "1", "96", "192", "16.000"],
        ["F16", "1", "96", "192", "16.000"],
        ["Q8_0", "1", "96", "102", "8.500"],
        ["Q4_0", "1", "96", "54", "4.500"],
        ["all", "5", "480", "924", "15.400"],
    ]
    assert lines[15].startswith("GGUF 3: llama (a model), type Q4_0: ")
    assert lines[16] == (
        "hyper-parameters: block_count 2, context_length 64, attention.layer_norm_rms_epsilon 1e-06, "
        "attention.head_count_kv [1, 2], attention.causal true"
    )
    assert lines[17] == "tokenizer: gpt2 (llama-bpe), 3000 tokens, begin 7, chat template"


def test_json_has_the_same(model: Path) -> None:
    found = answer("inspect", model)
    assert found == inspect_gguf(model).to_json()
    assert (found["kind"], found["architecture"], found["file_type"]) == ("gguf", "llama", "Q4_0")
    assert found["totals"] == {
        "tensors": 5, "weights": 480, "bytes": 924, "bits_per_weight": 15.4, "file_bytes": model.stat().st_size,
    }  # fmt: skip
    assert found["metadata"]["tokenizer.ggml.tokens"] == {"list_of": "string", "length": 3000}
    assert found["metadata"]["llama.attention.head_count_kv"] == [1, 2]
    first = found["tensors"][0]
    assert first == {"name": "blk.0.ffn_up.weight", "shape": [3, 32], "type": "F32", "file": "model.gguf",
                     "offset": first["offset"], "bytes": 384}  # fmt: skip


def test_split_model_is_shown_as_one(tmp_path: Path) -> None:
    small_gguf(tmp_path / "m.gguf", split_max_tensors=2)
    shown = answer("inspect", tmp_path)
    assert len(shown["files"]) == 3 and shown["totals"]["tensors"] == 5
    assert " in 3 files" in done("inspect", tmp_path / shown["files"][1]).stdout


def test_text_of_a_file_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = small_gguf(tmp_path / "a.gguf", {"llama.note": "a\x1b[31m\nb" * 40, "llama.scale": float("nan")})
    assert answer("inspect", path)["metadata"]["llama.scale"] is None  # which JSON lacks
    shown = done("inspect", path, "--summary").stdout
    assert shown.split()[0] == "type" and "blk.0" not in shown
    assert "\x1b" not in shown and r"note a\x1b[31m\nba\x1b[31m\nb" in shown


def test_inspect_needs_neither_gguf_nor_llama_cpp(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pqweights.results.inspect import inspect_gguf; "
        f"inspect_gguf(Path({str(model)!r})); print(*sorted(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"gguf", "llama_cpp", "torch", "transformers"} & set(loaded)
