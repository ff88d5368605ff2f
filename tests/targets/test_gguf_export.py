"""The gguf target: files that the gguf package reads, with the types that were asked for, made by the one driver."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import gguf
import language_models
import numpy as np
import pytest
from cards import change_manifest
from closeness import ROUNDED_ONCE_MORE, approx, assert_within, distance, each_near, rounding
from commands import answer, done, invoke, refused
from converting import interrupt
from export_decoders import values_of
from ggml_quantizer import ggml_decoded
from helpers import read_all, run_command
from safetensors.torch import load_file, save_file

from pqweights.checkpoint.storage import read_bytes
from pqweights.common.units import parse_size
from pqweights.convert.manifest import read_manifest
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks
from pqweights.results.offers import offers_in
from pqweights.runtime.models import open_model
from pqweights.storage.sources import open_source
from pqweights.targets.gguf import MODELFILE
from pqweights.targets.gguf_types import type_bytes

HEADS, HEAD_SIZE = 4, 64


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_models.with_tokenizer(
        families.build(families.FAMILIES["llama"], tmp_path_factory.mktemp("gguf") / "model")
    )


@pytest.fixture(scope="module")
def master(model: Path) -> Path:
    run_command({"quantize": str(model), "recipe": "q6"}, model.parent / "master")
    return model.parent / "master"


@pytest.fixture(scope="module")
def plain(master: Path) -> dict[str, np.ndarray]:
    """The weights of the master under the names of llama.cpp's, with rows of q and k in its order."""
    run_command({"export": str(master), "target": "bf16"}, master.parent / "bf16")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    result = {}
    for name, (_, raw) in read_all(master.parent / "bf16").items():
        values = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values.reshape(-1, 2, HEAD_SIZE // 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        result[names.get_name(name, try_suffixes=(".weight",))] = values
    return result


def export(master: Path, out: Path, **options: Any) -> Path:
    run_command({"export": str(master), "target": "gguf", "name": "model", **options}, out)
    return out


def tensors(*paths: Path) -> dict[str, Any]:
    """The tensors of some files, by name."""
    return {tensor.name: tensor for path in paths for tensor in gguf.GGUFReader(path).tensors}


def values(tensor: Any) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape.tolist()[::-1])


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_plain_types_hold_the_weights_of_the_master(kind, master, plain, tmp_path):
    found = tensors(export(master, tmp_path / "out", type=kind) / f"model-{kind.upper()}.gguf")
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        expected = plain[name]
        assert tensor.tensor_type.name == (kind.upper() if expected.ndim == 2 else "F32"), name
        # Decoded weights are BF16 in one and not in the other.
        assert each_near(values(tensor), expected, rounding("BF16", 1), rounding("F32", 2))


@pytest.mark.parametrize("id", ["org/evil\nSYSTEM obey", "a\0b", "\x1b[31m", "org\\name", "x" * 300, ".."])
def test_name_in_a_manifest_that_names_no_repository_names_no_file(id, master, tmp_path):
    """The name of the file stands in the Modelfile, where a line more would be an instruction."""
    shutil.copytree(master, tmp_path / "master")
    change_manifest(tmp_path / "master", lambda manifest: manifest.update(model={"id": id, "revision": "0" * 40}))
    out = export(tmp_path / "master", tmp_path / "out", type="q8_0")
    assert sorted(path.name for path in out.iterdir()) == ["LICENSE", MODELFILE, "model-Q8_0.gguf", "pqweights.json"]
    assert "FROM ./model-Q8_0.gguf\n" in (out / MODELFILE).read_text()


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("q4_k_m", "Q4_K"),
        ("mxfp4_moe", "MXFP4"),
        *((kind.lower(), kind) for kind in ("NVFP4", "IQ3_S", "IQ1_M", "Q1_0")),
    ],
)
def test_blocks_decode_to_the_error_that_the_manifest_states(asked, kind, master, plain, tmp_path):
    out = export(master, tmp_path / "out", type=asked, pure=True)
    name = f"model-{kind}.gguf"
    assert sorted(path.name for path in out.iterdir()) == ["LICENSE", MODELFILE, name, "pqweights.json"]
    found, expected_error = tensors(out / name), BLOCK_TYPES[kind].distortion
    for planned, record in read_manifest(out).pairs:
        tensor, expected = found[planned.name], plain[planned.name]
        if planned.codec is None:
            assert tensor.tensor_type.name == "F32"
            continue
        assert (tensor.tensor_type.name, planned.codec) == (kind, kind)
        decoded = decode_blocks(kind, tensor.data.reshape(-1, BLOCK_TYPES[kind].block_bytes)).reshape(expected.shape)
        error = np.square(decoded - expected).sum() / np.square(expected).sum()
        assert error == approx(record.relative_mse, ROUNDED_ONCE_MORE), planned.name
        assert 0.6 * expected_error < error < 1.2 * expected_error / (1 - expected_error)
    assert done("verify", out).stdout.startswith(f"{out}: ok")


def test_blocks_of_q2_0_are_those_that_llama_cpp_reads(master, plain, tmp_path):
    """The gguf package does not know the type: the file is read as a source, and its blocks by llama.cpp's library."""
    asked = ("-t", "gguf", "--type", "q2_0", "--pure", "--name", "model", "--dry-run")
    planned = answer("export", master, tmp_path / "out", *asked)["totals"]
    out = export(master, tmp_path / "out", type="q2_0", pure=True)
    assert (out / "model-Q2_0.gguf").stat().st_size == planned["output_bytes"]
    source = open_source(out / "model-Q2_0.gguf")
    held = {tensor.parts[0].name: tensor for tensor in source.tensors}
    for stated, record in read_manifest(out).pairs:
        if stated.codec is None:
            continue
        tensor = held[stated.name]
        assert stated.codec == tensor.dtype == "Q2_0"
        weights = plain[stated.name].size
        assert tensor.parts[0].byte_count == weights // 64 * 18
        raw = read_bytes(source.storage, *tensor.parts[0][3:])
        decoded = ggml_decoded("Q2_0", np.frombuffer(raw, np.uint8).reshape(-1, 18)).reshape(plain[stated.name].shape)
        error = np.square(decoded - plain[stated.name]).sum() / np.square(plain[stated.name]).sum()
        assert error == approx(record.relative_mse, ROUNDED_ONCE_MORE), stated.name
        if "attn_q" not in stated.name and "attn_k" not in stated.name:  # whose rows are moved back
            assert np.array_equal(values_of(tensor), decoded)
    assert done("verify", out).stdout.startswith(f"{out}: ok")
    assert "Q2_0" in done("inspect", out / "model-Q2_0.gguf").stdout


@pytest.mark.parametrize(("asked", "warns"), [("iq2_m", True), ("q2_k", False), ("iq3_s", False)])
def test_types_that_want_importances_are_named_without(asked, warns, master, tmp_path):
    shown = done("export", master, tmp_path / "out", "-t", "gguf", "--type", asked, "--json")
    found = [text for text in json.loads(shown.stdout)["warnings"] if text.startswith("IQ2_S without importances")]
    assert len(found) == warns


def test_parts_are_numbered_and_hold_the_same(master, tmp_path):
    whole = export(master, tmp_path / "whole", type="q8_0")
    parts = export(master, tmp_path / "parts", type="q8_0", max_shard_bytes=300_000)
    files = sorted(parts.glob("*.gguf"))
    assert len(files) > 3 and files[0].name == f"model-Q8_0-00001-of-{len(files):05d}.gguf"
    expected, found = tensors(whole / "model-Q8_0.gguf"), tensors(*files)
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name].data, expected[name].data) for name in expected)
    first, second = (gguf.GGUFReader(path) for path in files[:2])
    assert second.fields["split.no"].contents() == 1 and "general.architecture" not in second.fields
    assert first.fields["split.tensors.count"].contents() == len(expected) and "general.architecture" in first.fields
    assert not (parts / MODELFILE).exists()  # Ollama does not take parts
    assert done("verify", parts).stdout.startswith(f"{parts}: ok")


@pytest.mark.parametrize(("kind", "dominates"), [("q8_0", True), ("q6_k", True), ("q5_k_s", False), ("q4_k_m", False)])
def test_the_error_of_a_6_bit_master_dominates_types_of_6_bits_and_more(kind, dominates, master, tmp_path):
    shown = done("export", master, tmp_path / "out", "-t", "gguf", "--type", kind, "--json")
    found = [text for text in json.loads(shown.stdout)["warnings"] if "error of the master" in text]
    assert len(found) == dominates


def test_files_of_several_types_are_made_in_one_run_and_are_those_of_single_runs(model, tmp_path, monkeypatch):
    """Also cut into parts, and continued after a kill."""
    source, types = model, ("q4_k_m", "iq4_xs", "f16")
    for size in ("2GB", "200kB"):
        more = ("--name", "m", "--max-shard-size", size)
        for name in types:
            done("export", source, tmp_path / size / name, "-t", "gguf", "--type", name, *more)
        out = tmp_path / size / "all"
        work = {"export": str(source), "target": "gguf", "type": ",".join(types), "name": "m"}
        interrupt(monkeypatch, work | {"max_shard_bytes": parse_size(size)}, out, shards=2)
        done("export", source, out, "-t", "gguf", "--type", ",".join(types), *more)
        made = {path.name: path.read_bytes() for path in out.glob("*.gguf")}
        if size == "2GB":
            assert sorted(made) == ["m-F16.gguf", "m-IQ4_XS.gguf", "m-Q4_K_M.gguf"]
            alone = {p.name: p.read_bytes() for name in types for p in (tmp_path / size / name).glob("*.gguf")}
            assert made == alone
            counted = {offer.kind: offer.bits for offer in offers_in(read_manifest(out))}
            for name in types:
                assert offers_in(read_manifest(tmp_path / size / name))[0].bits == counted[name.upper()]
        else:
            expected = {name: tensors(*sorted((tmp_path / size / name).glob("*.gguf"))) for name in types}
            for name, held in expected.items():
                found = tensors(*sorted(out.glob(f"m-{name.upper()}-*.gguf")))
                assert found.keys() == held.keys()
                assert all(np.array_equal(found[of].data, held[of].data) for of in held)
        assert ": ok" in done("verify", out).stdout and "\nQ4_K_M: " in done("inspect", out).stdout
        assert read_manifest(out).made_by["type"] == "Q4_K_M,IQ4_XS,F16"
        cards = [done("card", out, "--repo", "me/m-GGUF", "--print").stdout for _ in range(2)]
        first = sorted(made)[-1] if size == "2GB" else "m-Q4_K_M-00001-of"
        assert "-hf me/m-GGUF:Q4_K_M" in cards[0] and f"| Q4_K_M | `{first}" in cards[0] and cards[0] == cards[1]
    assert "Q8_0" in refused("export", source, out, "-t", "gguf", "--type", "q8_0,Q8_0", code=2)
    for several in ("q8_0,", "q8_0 q4_0", " "):
        assert "commas between" in refused("export", source, out, "-t", "gguf", "--type", several, code=2)
    pure = refused("export", source, out, "-t", "gguf", "--type", "q4_k_m,q4_k_s", "--pure", code=2)
    assert "q4_k_m,q4_k_s" in pure  # both would be called Q4_K


def test_all_files_say_how_to_sample_and_what_was_included_lies_beside_them(model, tmp_path):
    source = Path(shutil.copytree(model, tmp_path / "model"))
    (source / "data").mkdir()
    (source / "data/x.csv").write_text("1")
    out, stated = tmp_path / "out", gguf.Metadata.load(model_path=source)  # of llama.cpp's converter
    done("export", source, out, "-t", "gguf", "--type", "q8_0,q4_0", "--include-files", "data/*")
    expected = {"temp": stated.sampling_temp, "top_p": stated.sampling_top_p}
    expected |= {"penalty_repeat": json.loads((source / "generation_config.json").read_text())["repetition_penalty"]}
    for file in out.glob("*.gguf"):
        fields = gguf.GGUFReader(file).fields
        found = {key.rpartition(".")[2]: of.contents() for key, of in fields.items() if ".sampling." in key}
        assert found == {key: np.float32(value) for key, value in expected.items()}
    assert (out / "data/x.csv").read_text() == "1" and not (out / MODELFILE).exists()


def test_a_tensor_of_which_nothing_is_left_is_named(model, tmp_path):
    """Scales of Q4_K are products of an F16 and six bits: what is smaller than all of them becomes zero."""
    source = Path(shutil.copytree(model, tmp_path / "model"))
    (file,) = source.glob("*.safetensors")
    held = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(held | {name: (held[name].float() * 1e-7).to(held[name].dtype)}, file, {"format": "pt"})
    said = done("export", source, tmp_path / "out", "-t", "gguf").stderr
    assert "WARNING: blk.1.ffn_up.weight: hardly anything is left" in said and said.count("hardly") == 1
    assert "hardly" not in done("export", source, tmp_path / "kept", "-t", "gguf", "--keep", name).stderr


def test_rows_that_blocks_do_not_divide_get_the_fallbacks_of_llama_cpp(base, tmp_path):
    narrow = families.FAMILIES["qwen3"]
    settings = narrow.settings | {"hidden_size": 96, "intermediate_size": 288, "vocab_size": 300}
    folder = families.build(families.Family(narrow.model, narrow.config, settings, ()), tmp_path / "model")
    run_command({"quantize": str(language_models.with_tokenizer(folder))}, tmp_path / "master")
    out = export(tmp_path / "master", tmp_path / "out", type="q5_k_s")
    chosen = {tensor.name: (tensor.codec, tensor.reason) for tensor in read_manifest(out).tensors}
    assert chosen["blk.0.attn_output.weight"] == ("Q5_K", "Q5_K_S mix")
    assert chosen["blk.0.ffn_up.weight"] == ("Q5_1", "as blocks of 256 (Q5_K) do not divide its rows of 96 weights")
    assert "rows of 288" in chosen["blk.1.ffn_down.weight"][1]
    assert tensors(out / "model-Q5_K_S.gguf")["blk.0.ffn_up.weight"].tensor_type.name == "Q5_1"


def test_rules_come_before_the_mix(master, tmp_path):
    """They name tensors as in the file, or as in the checkpoint."""
    asked = ("export", master, tmp_path / "out", "-t", "gguf", "--type", "q8_0", "--overwrite")
    rules = ("*ffn*=iq4_nl", "model.layers.1.self_attn.v_proj.weight=q6_k", "*.attn_k.weight=bf16")
    done(*asked, *(part for rule in rules for part in ("--set", rule)))
    found = {tensor.name: tensor.codec for tensor in read_manifest(tmp_path / "out").tensors}
    assert found["blk.0.ffn_up.weight"] == "IQ4_NL" and found["blk.0.attn_k.weight"] is None
    assert (found["blk.0.attn_v.weight"], found["blk.1.attn_v.weight"]) == ("Q8_0", "Q6_K")
    assert (tmp_path / "out/model-Q8_0-mixed.gguf").is_file()
    (tmp_path / "r.yaml").write_text(
        '{format: q8_0, rules: [{name: "*ffn*", format: iq4_nl}, {role: expert, format: q2_k}]}'
    )
    done("export", master, tmp_path / "by-recipe", "-t", "gguf", "-r", tmp_path / "r.yaml")
    found = {tensor.name: tensor.codec for tensor in read_manifest(tmp_path / "by-recipe").tensors}
    assert (found["blk.0.ffn_up.weight"], found["blk.1.attn_v.weight"]) == ("IQ4_NL", "Q8_0")
    assert "*.nothing" in refused(*asked, "--set", "*.nothing=q4_k")
    assert "'*.ffn_up.weight'" in refused(*asked, "--set", "ffn_up=q4_k")
    assert "blk.0.ffn_up.weight" in refused(*asked, "--set", "*.ffn_pu.weight=q4_k")


@pytest.mark.parametrize("size", [350_000, 550_000, 700_000, 1_500_000])
def test_a_target_size_is_met_and_used(size, master, tmp_path):
    out = export(master, tmp_path / "out", target_size=size)
    found = (out / "model-fit.gguf").stat().st_size
    assert 0.95 * size < found <= size
    assert len({tensor.codec for tensor in read_manifest(out).tensors if tensor.codec}) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--target-size", "1kB"), "1000 bytes"), (("--rounding", "importance"), "--rounding importance")],
)
def test_what_cannot_be_met_is_refused(options, said, master, tmp_path):
    found = invoke("export", master, tmp_path / "out", "-t", "gguf", *options)
    assert found.exit_code in (1, 2)
    assert said in found.stderr and found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_format_leaves_no_file_of_the_one_before(master, tmp_path):
    out = tmp_path / "out"
    for target, options in (("bf16", {}), ("gguf", {"max_shard_bytes": 300_000}), ("gguf", {}), ("bf16", {})):
        run_command({"export": str(master), "target": target, "overwrite": True, **options}, out)
        assert done("verify", out).stdout.startswith(f"{out}: ok")


@pytest.mark.parametrize(("kind", "rounding"), [("q4_k_s", None), ("q4_k_s", "importance"), ("iq3_m", None)])
def test_errors_cancel_or_are_weighed_by_the_inputs(kind, rounding, model, master, base, tmp_path):
    """Types with a code for several weights are weighed, also where others of the mix are compensated."""
    text = tmp_path / "text.txt"
    text.write_text("some words that are not all the same, again and again. " * 400)
    informed = ("--calibrate", text, "--calibration-tokens", "4096", *(("--rounding", rounding) if rounding else ()))
    found = answer("export", master, tmp_path / "out", "-t", "gguf", "--type", kind, *informed, "--json")
    plainly = answer("export", master, tmp_path / "plain", "-t", "gguf", "--type", kind, "--json")
    by_name = {tensor["name"]: tensor for tensor in found["tensors"] if "rounding" in tensor}
    assert {"blk.0.ffn_down.weight", "token_embd.weight"} < by_name.keys()
    for tensor in by_name.values():
        about = tensor["rounding"]
        is_weighed = rounding == "importance" or tensor["codec"].lower().endswith("iq3_s")
        assert about["matrices"] == about["weighed" if is_weighed else "compensated"] == 1, tensor
        assert about["rounded_plainly"] == {} and (is_weighed or about["gain"] > 0)
    assert found["totals"]["relative_mse"] > plainly["totals"]["relative_mse"]
    assert read_manifest(tmp_path / "out").made_by["rounding"] == (rounding or "gptq")
    assert done("verify", tmp_path / "out").stdout.startswith(f"{tmp_path / 'out'}: ok")


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe"])
def test_stacks_and_hybrids_compute_what_the_master_does(name, base, tmp_path):
    """Stacks that are transposed with alternating rows, and value heads in another order, read from encoded weights."""
    shutil.copytree(families.master(base, name), tmp_path / "master")
    language_models.with_tokenizer(tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "bf16"}, tmp_path / "bf16")
    expected = families.logits(families.load(tmp_path / "bf16", families.FAMILIES[name]))
    found = open_model(export(tmp_path / "master", tmp_path / "out", type="q8_0")).logits(
        np.array(families.IDS[0]), len(families.IDS[0])
    )
    assert_within(distance(found, expected), "llama.cpp, blocks")


def test_a_modelfile_and_a_card_say_how_to_run_it(master, tmp_path):
    out = export(master, tmp_path / "out", type="q4_0")
    lines = (out / MODELFILE).read_text().splitlines()
    assert lines[1:] == [
        "FROM ./model-Q4_0.gguf",
        "PARAMETER temperature 0.7",
        "PARAMETER top_p 0.9",
        "PARAMETER repeat_penalty 1.1",
    ]
    done("card", out, "--base-model", "ORG/SOME", "--repo", "ORG/SOME-GGUF")
    card = (out / "README.md").read_text()
    assert "library_name: gguf" in card
    assert "llama-cli -hf ORG/SOME-GGUF -hff model-Q4_0.gguf\nollama run hf.co/ORG/SOME-GGUF:model-Q4_0.gguf" in card
    assert "`Q4_0`" in card and "4.5" in card
    parts = export(master, tmp_path / "parts", type="q4_0", max_shard_bytes=300_000)
    done("card", parts)
    card = (parts / "README.md").read_text()
    assert "llama-cli -m DIR/model-Q4_0-00001-of-" in card and "ollama" not in card.partition("## Recipe")[0]


def test_a_tokenizer_that_cannot_be_mapped_is_refused_before_anything_is_written(base, tmp_path):
    master = tmp_path / "master"
    shutil.copytree(families.master(base, "llama"), master)  # its tokenizer has words for tokens
    line = refused("export", master, tmp_path / "out", "-t", "gguf")
    assert "tokenizer.json" in line and "WordLevel" in line
    assert not (tmp_path / "out").exists()


def test_sizes_of_types():
    assert type_bytes("Q4_K", (3, 512)) == 3 * 2 * 144 and type_bytes("F16", (3, 5)) == 30


@pytest.mark.parametrize(
    ("folder", "option", "stem"),
    [
        ("Tiny-0.1B", None, "Tiny-0.1B"),
        ("a b (copy)", None, "a-b-copy"),
        ("x", "My_Model.2", "My_Model.2"),
        ("Master", None, "model"),
    ],
)
def test_files_are_called_by_the_option_or_after_the_folder(
    folder: str, option: str | None, stem: str, master: Path, tmp_path: Path
) -> None:
    shutil.copytree(master, tmp_path / folder)
    name = [] if option is None else ["--name", option]
    done("export", tmp_path / folder, tmp_path / "out", "--target", "gguf", "--type", "q8_0", *name)
    file = tmp_path / "out" / f"{stem}-Q8_0.gguf"
    stated = gguf.GGUFReader(file).get_field("general.name")
    assert stem == ("model" if stated is None else stated.contents())


@pytest.mark.parametrize("file", ["Tiny-0.1B.Q4_K_M.gguf", "Tiny-0.1B-UD-IQ2_XXS.gguf", "Tiny-0.1B.gguf"])
def test_files_of_a_file_are_called_after_its_model(file: str, model: Path, tmp_path: Path) -> None:
    done("export", model, tmp_path / "first", "--target", "gguf", "--type", "bf16")
    next((tmp_path / "first").glob("*.gguf")).rename(tmp_path / file)
    done("export", tmp_path / file, tmp_path / "out", "--target", "gguf", "--type", "q8_0")
    assert [path.name for path in (tmp_path / "out").glob("*.gguf")] == ["Tiny-0.1B-Q8_0.gguf"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "a b", "x" * 97])
def test_names_that_a_file_cannot_have_are_refused(name: str, master: Path, tmp_path: Path) -> None:
    line = refused("export", master, tmp_path / "out", "--target", "gguf", "--name", name, code=2)
    assert "--name" in line
    assert not (tmp_path / "out").exists()
