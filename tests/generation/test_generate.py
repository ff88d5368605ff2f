"""pqweights generate: the tokens of transformers' `generate`, chat templates, masters, caches, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import language_models
import pytest
import torch
import transformers
from calls import export, quantize
from commands import answer, done, invoke, raises
from language_models import NO_SYSTEM, SPEECH, TEMPLATE, babbler, speaker
from pqweights_cli.main import app
from tiny_gguf import llama_gguf
from typer.testing import CliRunner

import pqweights
from pqweights.errors import GenerationError, MasterError, PqweightsError
from pqweights.planning.recipe import load_recipe
from pqweights.runtime import generation
from pqweights.runtime.generation import Generation

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models: speaker, chat, endless, babbler, its masters q4 and t4, and exports of q4."""
    folder = tmp_path_factory.mktemp("models")
    speaker(folder / "speaker")
    speaker(folder / "chat", template=TEMPLATE)
    speaker(folder / "endless", "Zé€😀 1", endless=True, max_position_embeddings=10**6)
    babbler(folder / "babbler")
    for recipe in ("q4", "t4"):
        quantize(folder / "babbler", folder / recipe, load_recipe(recipe), threads=2)
    for target in ("bf16", "torchao", "mlx", "vllm"):
        export(folder / "q4", folder / target, target, threads=2)
    return folder


def reply(path: Path, prompt: str = "Hello", **options: Any) -> Generation:
    return pqweights.generate(path, prompt, **options)


def greedy(path: Path, count: int) -> list[int]:
    """What generate of transformers continues a prompt with, up to an end of text."""
    model = pqweights.load_model(path)
    given = transformers.AutoTokenizer.from_pretrained(path)("Hello", return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, given["input_ids"].shape[1] :].tolist()


# --- tokens ---


@pytest.mark.parametrize("name", ["speaker", "chat"])
def test_text_comes_in_pieces_and_ends_with_the_model(name, work):
    pieces: list[str] = []
    found = reply(work / name, "A", on_text=pieces.append)
    assert "".join(pieces) == found.text == SPEECH
    assert found.token_ids == (*SPEECH.encode(), language_models.END)
    assert found.prompt_tokens == (1 if name == "speaker" else 4)
    assert reply(work / name, "A", no_chat=True).prompt_tokens == 1


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 1}, {"min_length": 30}])
def test_settings_of_the_model_are_applied(settings, work, tmp_path):
    folder = Path(shutil.copytree(work / "babbler", tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": 257}))
    tokens = list(reply(folder, max_tokens=40).token_ids)
    assert tokens == greedy(folder, 40)
    assert "min_length" in settings or tokens != greedy(work / "babbler", 40)


def test_every_end_of_text_of_the_model_ends_a_reply(tmp_path):
    euro = "€".encode()[-1]
    folder = speaker(tmp_path / "model", generation={"eos_token_id": [language_models.END, euro]}, eos_token_id=None)
    assert reply(folder).token_ids == tuple("Zé€".encode())
    (folder / "generation_config.json").unlink()
    assert reply(folder).text == SPEECH  # as the tokenizer says


def test_a_reply_ends_at_the_limits(work):
    assert len(reply(work / "speaker", max_tokens=3).token_ids) == 3
    assert len(reply(work / "babbler", "A" * (language_models.CONTEXT - 5), max_tokens=9).token_ids) == 5


def test_the_temperature_of_the_caller_goes_before_that_of_the_model(work, tmp_path):
    folder = babbler(tmp_path / "model", generation={"do_sample": True, "temperature": 3.0, "top_k": 20})
    first, again, other = (reply(folder, max_tokens=20, seed=seed).token_ids for seed in (1, 1, 2))
    assert first == again != other
    likeliest = reply(folder, max_tokens=20, temperature=0.0).token_ids
    assert likeliest == reply(work / "babbler", max_tokens=20).token_ids != first
    drawn = [reply(work / "babbler", max_tokens=20, temperature=3.0).token_ids for _ in range(2)]
    assert drawn[0] != drawn[1]


def test_random_numbers_of_the_program_stay_as_they_were(work):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    reply(work / "babbler", max_tokens=3, temperature=1.0, seed=8)
    assert torch.equal(torch.rand(1), expected)


# --- masters, exports, caches ---


def test_scalar_masters_run_packed_and_others_decoded(work):
    for name, asked, packed in (("q4", None, True), ("t4", None, False), ("q4", False, False), ("t4", True, True)):
        found = reply(work / name, max_tokens=20, packed=asked)
        assert found.packed == packed
        assert packed or list(found.token_ids) == greedy(work / name, 20)


@pytest.mark.parametrize("name", ["bf16", "torchao", "vllm"])
def test_exports_run_in_transformers(name, work):
    assert len(reply(work / name, max_tokens=8).token_ids) == 8


def test_formats_of_other_libraries_name_their_command(work, tmp_path):
    (folder := tmp_path / "a folder").mkdir()
    file = llama_gguf(work / "chat", folder / "a.gguf")
    in_mlx = f"`mlx_lm.generate --model {work / 'mlx'}`"
    for path, command in ((work / "mlx", in_mlx), (file, f"`llama-cli -m '{file}'`"), (folder, f"-m '{file}'`")):
        with raises(GenerationError, command, path.name):
            reply(path)


@pytest.mark.parametrize("spec", ["none", "hadamard:8", "klt:2", "polar-rope:m4n2,residual=0,values=2"])
@pytest.mark.parametrize("name", ["babbler", "q4"])
def test_quantized_caches_hold_all_tokens_but_the_last(name, spec, work):
    found, plain = (reply(work / name, "The quick brown fox", max_tokens=50, kv_cache=kind) for kind in (spec, None))
    assert found.kv_cache is not None and plain.kv_cache is None
    assert (found.kv_cache.spec, found.kv_cache.tokens) == (spec, found.prompt_tokens + len(found.token_ids) - 1)
    assert spec != "none" or found.token_ids == plain.token_ids


def test_hybrid_models_generate_with_a_quantized_cache(tmp_path):
    folder = families.build(families.FAMILIES["qwen3_5"], tmp_path / "model")
    for name, data in language_models.tokenizer_files().items():
        (folder / name).write_bytes(data)
    plain, none = (reply(folder, "Hello", max_tokens=8, kv_cache=spec) for spec in (None, "none"))
    assert plain.token_ids == none.token_ids


# --- the command ---


def test_the_text_goes_to_stdout_and_the_figures_to_stderr(work):
    result = done("generate", work / "chat", "--prompt", "A")
    assert result.stdout == SPEECH + "\n"
    assert "4 tokens read and 13 chosen" in result.stderr and result.stderr.count("\n") == 1
    result = done("generate", work / "chat", "--prompt", "A", "--quiet", "--kv-cache", "hadamard:4")
    assert (result.stdout, result.stderr) == (SPEECH + "\n", "")


def test_json_is_the_only_output(work):
    found = answer("generate", work / "chat", "--prompt", "Hi", "--max-tokens", 11, "--temperature", 0.01, "--seed", 3)
    assert found["text"] == bytes(found["token_ids"]).decode() and found["model"] == str(work / "chat")
    assert (len(found["token_ids"]), found["prompt_tokens"], found["packed"]) == (11, 5, False)
    assert found["seconds"] > 0 and found["kv_cache"] is None
    found = answer("generate", work / "chat", "--prompt", "Hi" * 20, "--kv-cache", "hadamard:4")
    assert 4 < found["kv_cache"]["bits_per_coordinate"] <= 16


@pytest.mark.parametrize(("data", "tokens"), [(b"Hi\n", 5), (b"Hi", 5), (b"Hi\r\n", 5), ("\ufeffHé\n\n".encode(), 7)])
def test_a_prompt_on_stdin_loses_its_last_line_feed(data, tokens, work):
    result = CliRunner().invoke(app, ["generate", str(work / "chat"), "--json"], input=data)
    assert json.loads(result.stdout)["prompt_tokens"] == tokens


@pytest.mark.parametrize("data", [b"", b"\n", b"a\xff"])
def test_what_is_no_prompt_on_stdin_is_refused(data, work):
    result = CliRunner().invoke(app, ["generate", str(work / "chat")], input=data)
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_template_without_a_system_message_is_taken(tmp_path):
    assert reply(speaker(tmp_path / "no system", template=NO_SYSTEM + TEMPLATE)).text == SPEECH


def test_a_pipe_that_cannot_hold_the_text_gets_marks_and_may_be_closed(work):
    line = f"{sys.executable} -m pqweights_cli generate {work / 'endless'} -p A --max-tokens 9000 | head -c 20"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, check=False, env=environment)
    assert found.stdout.startswith(b"Z??? 1Z") and b"Traceback" not in found.stderr


def fails_after(tokens: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every reply fail after some tokens."""
    calls = iter(range(tokens + 1))

    def process(_: Any, scores: Any) -> Any:
        if next(calls) == tokens:
            raise error
        return scores

    monkeypatch.setattr(generation, "_numbers", process)


def test_an_interrupt_ends_the_command(work, monkeypatch):
    fails_after(3, KeyboardInterrupt(), monkeypatch)
    result = invoke("generate", work / "chat", "-p", "A")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_an_error_in_the_middle_ends_the_line_of_the_text(work, tmp_path, monkeypatch):
    spaced = speaker(tmp_path / "spaced", "Zé 1")
    fails_after(4, MasterError("model.safetensors: lm_head.weight: block 3: damaged"), monkeypatch)
    result = invoke("generate", spaced, "-p", "A", "--quiet")
    assert (result.exit_code, result.stdout) == (1, "Zé \n")
    assert result.stderr == "error: model.safetensors: lm_head.weight: block 3: damaged\n"


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_those_that_compute(threads: int, work: Path) -> None:
    before = torch.get_num_threads()
    try:
        reply(work / "speaker", threads=threads)
        assert torch.get_num_threads() == threads
        (work / "text.txt").write_text("abc " * 50)
        torch.set_num_threads(2)
        done("eval", work / "speaker", "--text", work / "text.txt", "--threads", threads, "--no-record")
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# --- what is refused ---


def test_prompts_beyond_the_limit_are_refused_before_the_model_is_loaded(work, monkeypatch):
    monkeypatch.setattr(generation, "open_model", None)
    with raises(GenerationError, "128 tokens"):
        reply(work / "speaker", "A" * 128)


def test_errors_of_transformers_are_one_line_and_those_of_the_caller_stay(work, monkeypatch):
    def broken(_: Any, scores: Any) -> None:
        raise OSError("of transformers")

    def show(piece: str) -> None:
        raise OSError("of the caller")

    with pytest.raises(OSError, match="of the caller"):
        reply(work / "chat", on_text=show)
    monkeypatch.setattr(generation, "_numbers", broken)
    with raises(PqweightsError, "of transformers"):
        reply(work / "chat")


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_logits_that_are_nan_are_an_error(temperature, tmp_path, monkeypatch):
    folder = speaker(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    place = data.index(b"\x00\x00\x80\x3f", 8)  # a weight that is 1
    data[place : place + 4] = b"\x00\x00\xc0\x7f"
    file.write_bytes(data)
    with raises(GenerationError, "NaN"):
        reply(folder, "\x00", temperature=temperature)
