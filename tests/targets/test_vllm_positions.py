"""vLLM computes what transformers does with rotary embeddings and windows as exports state them.

They are some cells of test_position_matrix.py, in one process of vLLM, in BF16.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from closeness import assert_within
from external_runtimes import run_in_vllm
from helpers import run_command
from position_cases import saved
from shared import made_once, run_folder
from test_position_matrix import stated

SCRIPT = Path(__file__).parents[1] / "support" / "run_vllm.py"
# Windows are of 8 tokens, and texts of 48. vLLM takes no windows in a part of the layers of Qwen 2 and 3.
CELLS = {
    "llama, linear": ("llama", "linear"),
    "llama, llama3": ("llama", "llama3"),
    "llama, yarn": ("llama", "yarn"),
    "mistral, windows": ("mistral, windows", "default"),
    "phi3, windows": ("phi3, windows", "default"),
    "starcoder2": ("starcoder2", "default"),
}
TOKENS = [np.random.default_rng(seed).integers(3, 120, 48).tolist() for seed in range(2)]


def make(folder: Path) -> None:
    """Make the models with their exports, and let one process of vLLM score the tokens with all of them."""
    folder.mkdir(parents=True)
    folders = {name: str(folder / f"{name}-out") for name in CELLS}
    for name, cell in CELLS.items():
        saved(folder / name, stated(*cell) | {"max_position_embeddings": 256})
        run_command({"export": str(folder / name), "target": "bf16"}, Path(folders[name]))
    job = {"folders": folders, "tokens": TOKENS, "codes": np.zeros((64, 96), int).tolist()}
    run_in_vllm(SCRIPT, folder / "result.json", json.dumps(job))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(run_folder(tmp_path_factory.getbasetemp()) / "vllm-positions", make)


@pytest.mark.parametrize("name", CELLS)
def test_vllm_predicts_what_transformers_does(name: str, work: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.bfloat16).float()
    with torch.inference_mode():
        logits = model(torch.tensor(TOKENS)).logits.log_softmax(-1)
    expected = logits[:, :-1].gather(-1, torch.tensor(TOKENS)[:, 1:, None])[..., 0].numpy()
    found = json.loads((work / "result.json").read_text())["scores"][name]
    assert not isinstance(found, str), f"vLLM does not load it: {found}"
    difference = np.abs(np.array(found) - expected)
    assert_within(difference.mean(), "vLLM, BF16 on average")
    assert_within(difference.max(), "vLLM, BF16")
