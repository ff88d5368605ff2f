"""Where config.json and the files say different things: it is said, and targets make what transformers computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import gguf_cases
import numpy as np
import packed_cases
import pytest
import torch
import transformers
from commands import answer, done, invoke, refused
from gguf_files import without_tokenizer, write_gguf
from helpers import bf16, folder_bytes, gaussian, read_all, write_checkpoint
from memory_storage import put
from safetensors.torch import load_file, save_file

from pqweights.checkpoint import promise
from pqweights.checkpoint.source import open_checkpoint, open_local, proven
from pqweights.checkpoint.storage import Storage
from pqweights.storage.sources import open_source

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TARGETS: dict[str, tuple[str, ...]] = {"bf16": (), "vllm": ("--format", "w8a16"), "mlx": ("--format", "q8"), "gguf": ()}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], object], **config: Any) -> Path:
    """A copy of a checkpoint with other tensors and another configuration."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config))
    return folder


def logits(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(families.IDS)).logits[0]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return found


def other_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def last_row_of_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 1


def same_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def answer_of(*arguments: object) -> Any:
    """The JSON of a command that may warn."""
    return json.loads(done(*arguments, "--json").stdout)


def head_alone(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_that_differs_from_tied_embeddings_reaches_every_target(target: str, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", other_head)
    expected = load_file(source / "model.safetensors")[HEAD].float()
    planned = done("plan", source)
    assert HEAD in planned.stderr and "tie_word_embeddings" in planned.stderr
    assert HEAD in done("quantize", source, tmp_path / "m", "--bits", 8).stderr
    assert config_of(tmp_path / "m")["tie_word_embeddings"] is False
    if target == "gguf":
        found = values_of(gguf_tensors(tmp_path / "m")["output.weight"])
    else:
        done("export", tmp_path / "m", tmp_path / "out", "-t", target, *TARGETS[target])
        assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
        found = read_values(tmp_path / "out", target)[HEAD]
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("tied", [True, None])
@pytest.mark.parametrize("name", ["gemma", "gemma2", "cohere", "cohere2"])
def test_mlx_refuses_a_head_for_which_its_model_has_the_embeddings(
    name: str, tied: bool | None, tmp_path: Path
) -> None:
    """The models of mlx-lm have no head, whatever is said of it."""
    gguf_cases.saved(gguf_cases.CASES[name], tmp_path / "model")
    said = {} if tied is None else {"tie_word_embeddings": tied}
    source = changed(tmp_path / "model", tmp_path / "src", other_head, **said)
    if tied is None:
        config = config_of(source)
        config.pop("tie_word_embeddings", None)
        (source / "config.json").write_text(json.dumps(config))
    done("quantize", source, tmp_path / "m", "--bits", 8)
    for given in (source, tmp_path / "m"):
        file = next(given.glob("*.safetensors")).name
        line = refused("export", given, tmp_path / "out", "-t", "mlx", "--format", "q8").splitlines()[-1]
        assert HEAD in line and file in line and EMBEDDING in line
    same = changed(tmp_path / "model", tmp_path / "same", same_head, **said)
    done("export", same, tmp_path / "other", "-t", "mlx", "--format", "q8")
    assert not any(name.startswith("lm_head.") for name in read_all(tmp_path / "other"))


SIBLINGS: dict[str, tuple[str, Callable[[dict[str, Any]], object], dict[str, Any], str]] = {
    "fewer layers stored": (
        "llama-tied",
        lambda t: [t.pop(name) for name in [*t] if ".layers.1." in name],
        {},
        "model.layers.1.",
    ),
    "a bias that is declared": ("llama-tied", lambda t: None, {"mlp_bias": True}, "bias"),
    "another width": ("llama-tied", lambda t: None, {"intermediate_size": 384}, "mlp."),
    "kinds of layers": ("llama-tied", lambda t: None, {"layer_types": ["full_attention"]}, "model.layers.1."),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_mlx_refuses_files_that_are_not_what_config_says(name: str, base: Path, tmp_path: Path) -> None:
    family, change, config, named = SIBLINGS[name]
    source = changed(families.model(base, family), tmp_path / "src", change, **config)
    result = invoke("export", source, tmp_path / "out", "-t", "mlx", "--format", "q8")
    assert result.exit_code == 1 and named in result.stderr


@pytest.mark.parametrize("name", ["k_scale", "rotary_emb.inv_freq"])
def test_leftovers_of_one_layer_are_no_difference(name: str, base: Path, tmp_path: Path) -> None:
    """transformers has no place for them in any layer."""

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones((8,) if "inv" in name else ())

    assert not open_local(changed(families.model(base, "llama-tied"), tmp_path / "src", add)).remarks


def gguf_tensors(master: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in without_tokenizer(open_local(master)).tensors}


def read_values(folder: Path, target: str) -> dict[str, Any]:
    """The weights of a result, decoded where they are in codes."""
    if target == "mlx":
        import mlx.core as mx

        tensors = mx.load(str(next(folder.glob("*.safetensors"))))
        parts = [tensors["lm_head." + part] for part in ("weight", "scales", "biases")]
        values = mx.dequantize(*parts, group_size=64, bits=8).astype(mx.float32)
        return {HEAD: torch.from_numpy(np.array(values))}
    return {tensor.name: values_of(tensor) for tensor in open_local(folder).tensors}


def values_of(tensor: Any) -> Any:
    count = int(np.prod(tensor.shape))
    raw = np.empty(4 * count, dtype=np.uint8)
    tensor.read(0, count, "F32", raw)
    return torch.from_numpy(raw.view(np.float32).reshape(tensor.shape).copy())


def test_one_number_that_differs_is_found(base: Path, tmp_path: Path) -> None:
    opened = open_local(changed(families.model(base, "llama-tied"), tmp_path / "src", last_row_of_head))
    assert opened.config is not None and opened.config["tie_word_embeddings"] is False and opened.remarks


@pytest.mark.parametrize("change", [same_head, lambda tensors: None], ids=["stored twice", "stored once"])
def test_tied_embeddings_that_are_the_same_stay_tied(change: Any, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", change)
    opened = open_local(source)
    assert opened.remarks == () and opened.config == config_of(source)
    done("quantize", source, tmp_path / "m", "--bits", 8)
    assert "output.weight" not in gguf_tensors(tmp_path / "m")


@pytest.mark.parametrize("target", TARGETS)
def test_a_head_alone_is_the_embeddings_too_if_they_are_tied(target: str, base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", head_alone)
    expected = logits(source)
    planned = done("plan", source)
    assert HEAD in planned.stderr and EMBEDDING in planned.stderr
    done("quantize", source, tmp_path / "m", "--bits", 8)
    if target == "gguf":
        assert "token_embd.weight" in gguf_tensors(tmp_path / "m")
        return
    done("export", tmp_path / "m", tmp_path / "out", "-t", target, *TARGETS[target])
    if target == "mlx":
        import mlx.core as mx

        assert "model.embed_tokens.weight" in mx.load(str(next((tmp_path / "out").glob("*.safetensors"))))
    else:
        assert (logits(tmp_path / "out") - expected).norm() < 0.05 * expected.norm()


def test_a_head_in_another_dtype_is_compared_by_its_numbers(base: Path, tmp_path: Path) -> None:
    def wider(tensors: dict[str, Any]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].float()

    assert open_local(changed(families.model(base, "llama-tied"), tmp_path / "src", wider)).remarks == ()


def test_both_places_of_a_configuration_say_that_the_head_is_its_own(tmp_path: Path) -> None:
    names = {f"model.language_model.{name}": gaussian(64, 128, seed=3) for name in ("embed_tokens.weight",)}
    tensors = {name: bf16(values) for name, values in (names | {HEAD: gaussian(64, 128, seed=4)}).items()}
    config = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "tie_word_embeddings": True}}
    opened = open_local(write_checkpoint(tmp_path / "src", tensors, config=config))
    assert opened.config is not None
    assert opened.config["tie_word_embeddings"] is opened.config["text_config"]["tie_word_embeddings"] is False
    assert read_all(tmp_path / "src").keys() == {tensor.name for tensor in opened.tensors}


def in_fp8(tensors: dict[str, Any], head: Any) -> dict[str, Any]:
    tensors[HEAD] = (head * 100).to(torch.float8_e4m3fn)
    tensors[f"{HEAD}_scale_inv"] = torch.full((4, 2), 0.01)
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def in_gptq(tensors: dict[str, Any], head: Any) -> dict[str, Any]:
    of_head, settings, _ = packed_cases.gptq(4, "gptq", shape=tuple(head.shape))
    of_head["scales"] /= 100
    tensors |= {f"lm_head.{name}": tensor for name, tensor in of_head.items()}
    return {"quantization_config": settings | {"lm_head": True}}


def in_mlx(tensors: dict[str, Any], head: Any) -> dict[str, Any]:
    settings = {}
    for name, values in ((HEAD, head), (EMBEDDING, tensors.pop(EMBEDDING))):
        parts, settings = of_mlx(values)
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    return settings


def of_mlx(values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    import mlx.core as mx

    made = zip(("weight", "scales", "biases"), mx.quantize(mx.array(values.float().numpy()), 64, 8), strict=True)
    arrays = {name: np.array(part) for name, part in made}
    return {n: torch.from_numpy(a) for n, a in arrays.items()}, {"quantization": {"group_size": 64, "bits": 8}}


QUANTIZED = {"fp8": in_fp8, "gptq": in_gptq, "mlx": in_mlx}


def with_quantized_head(base: Path, folder: Path, kind: str, *, differs: bool = True) -> Path:
    """A model with tied embeddings, and beside them a head in the format of a tool."""
    plain = families.model(base, "llama-tied")
    embeddings = load_file(plain / "model.safetensors")[EMBEDDING]
    head = embeddings.flip(0).contiguous() if differs else embeddings
    if kind == "gguf":
        untied = changed(plain, folder.parent / "untied", lambda t: t.update({HEAD: head}), tie_word_embeddings=False)
        for file in untied.glob("tokenizer*"):
            file.unlink()
        folder.mkdir()
        shutil.move(write_gguf(untied, "Q8_0"), folder / "model.gguf")
        shutil.copy(plain / "config.json", folder)
        return folder
    settings = dict[str, Any]()
    changed(plain, folder, lambda tensors: settings.update(QUANTIZED[kind](tensors, head)))
    (folder / "config.json").write_text(json.dumps(config_of(folder) | settings))
    return folder


@pytest.mark.parametrize("kind", [*QUANTIZED, "gguf"])
def test_a_quantized_head_that_differs_reaches_every_target(kind: str, base: Path, tmp_path: Path) -> None:
    source, master = with_quantized_head(base, tmp_path / "src", kind), tmp_path / "m"
    opened = open_source(source)
    assert opened.config is not None and opened.config["tie_word_embeddings"] is False
    expected = values_of(next(tensor for tensor in opened.tensors if tensor.name == HEAD))
    assert HEAD in done("quantize", source, master, "--bits", 8).stderr
    assert config_of(master)["tie_word_embeddings"] is False
    found = {"gguf": values_of(gguf_tensors(master)["output.weight"])}
    for target in ("bf16", "mlx"):
        done("export", master, tmp_path / target, "-t", target, *TARGETS[target])
        assert config_of(tmp_path / target)["tie_word_embeddings"] is False
        found[target] = read_values(tmp_path / target, target)[HEAD]
    for values in found.values():
        assert (values - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["mlx", "gguf"])
def test_a_quantized_head_that_is_the_same_stays_tied(kind: str, base: Path, tmp_path: Path) -> None:
    source = with_quantized_head(base, tmp_path / "src", kind, differs=False)
    opened = open_source(source)
    assert opened.remarks == () and opened.config == config_of(source)
    assert (HEAD in opened.left_out_tensors) == (kind == "gguf")


class Elsewhere(Storage):
    """A folder of which only places are read at first, as if each read were a request."""

    def local_folder(self) -> None:
        return None


def number_between_places(tensors: dict[str, Any]) -> None:
    """The head has one other number, behind the second of the places that are compared first."""
    tensors[EMBEDDING] = torch.arange(1 << 20).reshape(4096, 256).remainder(251).to(torch.bfloat16)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD].view(-1)[(1 << 17) + (promise.PLACE_BYTES // 2)] += 1


def nothing_between_places(tensors: dict[str, Any]) -> None:
    number_between_places(tensors)
    same_head(tensors)


@pytest.mark.parametrize(
    ("change", "differs"),
    [(other_head, True), (number_between_places, True), (same_head, False), (nothing_between_places, False)],
)
def test_of_files_elsewhere_places_prove_nothing_but_a_difference(
    change: Any, differs: bool, base: Path, tmp_path: Path
) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", change, vocab_size=4096)
    storage, read = Elsewhere(source), list[int]()
    opened = open_checkpoint(storage)
    assert storage.bytes_read < 2 * promise.PLACES * promise.PLACE_BYTES + (1 << 18)
    assert opened.config is not None
    if change in (other_head, same_head):  # one differs, and of the other the places are all
        assert opened.unproven == () and opened.config["tie_word_embeddings"] is not differs
        return
    assert opened.config == config_of(source) and not any(HEAD in remark for remark in opened.remarks)
    (pair,) = opened.unproven
    assert HEAD in pair.seems and EMBEDDING in pair.seems
    sure = proven(opened, lambda done, total, name: read.append(total - done))
    assert sure.config is not None and sure.unproven == () and read[-1] == 0
    assert sure.config["tie_word_embeddings"] is not differs
    assert any(HEAD in remark for remark in sure.remarks) == differs


@pytest.mark.parametrize("change", [number_between_places, nothing_between_places])
def test_what_makes_a_result_of_files_elsewhere_reads_all_values(change: Any, base: Path, tmp_path: Path) -> None:
    """A plan says that places are the same; a master and its exports have the head if anything differs."""
    address, differs = f"memory://promise/{tmp_path.name}", change is number_between_places
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", change, vocab_size=4096)
    put(f"{address}/src", folder_bytes(source))
    planned = answer_of("plan", f"{address}/src")["warnings"]
    assert any(HEAD in warning and EMBEDDING in warning for warning in planned)
    done("quantize", f"{address}/src", f"{address}/m", "--bits", 8)
    done("export", f"{address}/m", tmp_path / "out", "-t", "mlx", *TARGETS["mlx"])
    config = config_of(tmp_path / "out")
    assert config["tie_word_embeddings"] is not differs
    names = json.loads((tmp_path / "out/model.safetensors.index.json").read_bytes())["weight_map"].keys()
    assert any(name.startswith("lm_head.") for name in names) == differs


def test_a_manifest_keeps_what_was_said_of_the_source(base: Path, tmp_path: Path) -> None:
    source = changed(families.model(base, "llama-tied"), tmp_path / "src", other_head)
    warnings = answer_of("plan", source)["warnings"]
    done("quantize", source, tmp_path / "m", "--bits", 8)
    done("export", tmp_path / "m", tmp_path / "out", "-t", "bf16")
    for folder in (tmp_path / "m", tmp_path / "out"):
        assert answer("inspect", folder)["warnings"] == warnings != []
        assert HEAD in done("inspect", folder).stdout and "WARNING" in done("inspect", folder).stdout
        assert ": ok: " in done("verify", folder).stdout
    assert f"{tmp_path / 'm'}: " in done("quantize", source, tmp_path / "m", "--bits", 8).stderr


@pytest.mark.parametrize("differs", [False, True])
def test_embeddings_of_encoder_and_decoder_that_differ_are_named(differs: bool, tmp_path: Path) -> None:
    shared, other = gaussian(64, 128, seed=1), gaussian(64, 128, seed=2 if differs else 1)
    tensors = {"shared.weight": bf16(shared), "encoder.embed_tokens.weight": bf16(other)}
    config = {"model_type": "t5", "tie_word_embeddings": True, "is_encoder_decoder": True}
    remarks = open_local(write_checkpoint(tmp_path / "src", tensors, config=config)).remarks
    assert len(remarks) == differs and all("encoder.embed_tokens.weight" in remark for remark in remarks)
