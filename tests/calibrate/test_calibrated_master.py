"""quantize --calibrate: masters of the same size that diverge less, whatever interrupts them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from closeness import ALIKE, ORTHOGONAL, approx
from commands import done, raises, refused
from helpers import as_float32, folder_bytes, master_weights, read_all, write_checkpoint
from tasks_here import use_tasks_here

import pqweights
from pqweights.calibrate import calibrated, sample
from pqweights.checkpoint import writer
from pqweights.errors import ClusterError, OptionError, OutputError, RecipeError, SourceError
from pqweights.formats import column_encoding, columns

TOKENS, WINDOW = 2048, 64
SHORT: dict[str, Any] = {"calibration_tokens": TOKENS, "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def short_windows() -> Iterator[None]:
    """Draw short windows, which takes a quarter of the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "WINDOW", WINDOW)
        yield


def sharpened(model: Any) -> None:
    """Make some channels matter much more than others, and predictions sharp."""
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.mul_(torch.exp(torch.randn(128)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    """A model of which some channels matter much more than others, and whose predictions are sharp."""
    small = families.causal("Llama", hidden_size=128, intermediate_size=256, head_dim=64)
    return families.build(small, tmp_path_factory.mktemp("sharp"), sharpened)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: Any) -> tuple[Path, Any]:
    """A master, and the report of its making."""
    out = tmp_path_factory.mktemp("masters") / "calibrated"
    return out, pqweights.quantize(source, out, "t3", calibrate="self", **SHORT)


@pytest.fixture(scope="module")
def master(made: tuple[Path, Any]) -> Path:
    return made[0]


def divergence(folder: Path, source: Path) -> float:
    """KL of what a master predicts from what its source does, over random tokens."""
    ids = torch.from_numpy(np.random.default_rng(9).integers(0, 490, (8, 64)))
    with torch.no_grad():
        reference, found = (
            torch.log_softmax(pqweights.load_model(path, dtype="float32").eval()(ids).logits, -1)
            for path in (source, folder)
        )
    return float((reference.exp() * (reference - found)).sum(-1).mean())


def manifest(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "pqweights.json").read_text())
    return result


def test_a_master_of_the_same_size_diverges_much_less(source: Path, master: Path, tmp_path: Path) -> None:
    plain = pqweights.quantize(source, tmp_path / "plain", "t3").totals
    ours = pqweights.inspect(master).totals
    assert ours.bits_per_weight == approx(plain.bits_per_weight, ALIKE)
    assert divergence(master, source) < 0.6 * divergence(tmp_path / "plain", source)
    assert pqweights.verify(master).ok
    assert not list(master.parent.glob(".*"))


def test_the_manifest_states_the_sample_and_what_was_measured(source: Path, master: Path) -> None:
    stated = manifest(master)
    assert stated["calibrated"].items() >= {"sample": "self", "tokens": TOKENS, "window": WINDOW, "weights": 15}.items()
    encoded = {t["name"]: t for t in stated["tensors"] if t["codec"] == "hadamard-trellis-columns"}
    assert len(encoded) == 15 and "model.embed_tokens.weight" not in encoded
    original, decoded = read_all(source), master_weights(master)
    for name, entry in encoded.items():
        values = as_float32(original[name])
        error = np.square(values - decoded[name]).sum() / np.square(values).sum()
        assert entry["relative_mse"] == approx(error, ALIKE)
        assert 0 < entry["weighed_mse"] < 4 * entry["relative_mse"]


def test_a_calibrated_master_is_proved_from_its_source(source: Path, master: Path) -> None:
    """The sample is drawn, and everything learned, once more."""
    assert pqweights.verify(master, source=source, threads=1).problems == ()


def test_a_sample_in_a_file_gives_the_codes_of_the_drawn_one(source: Path, master: Path, tmp_path: Path) -> None:
    kept, drawn, given = tmp_path / "sample.safetensors", tmp_path / "drawn", tmp_path / "given"
    pqweights.quantize(source, drawn, "t3", calibrate="self", save_sample=kept, **SHORT)
    assert folder_bytes(drawn) == folder_bytes(master)
    pqweights.quantize(source, given, "t3", calibrate=kept, **SHORT)
    ours, theirs = folder_bytes(given), folder_bytes(drawn)
    assert {name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)} == {"pqweights.json"}
    about, before = manifest(given)["calibrated"], manifest(drawn)["calibrated"]
    assert about["sample"] == "tokens" and about["sample_sha256"] == before["sample_sha256"]
    assert "--calibrate" in refused("verify", given, "--from", source, code=2)
    assert pqweights.verify(given, source=source, calibrate=kept, threads=1).problems == ()


def test_the_mixture_serves_where_there_is_neither_text_nor_a_sample(source: Path, tmp_path: Path) -> None:
    pqweights.quantize(source, tmp_path / "mixed", "t3", calibrate="mixture", **SHORT)
    assert manifest(tmp_path / "mixed")["calibrated"]["sample"] == "mixture"


def test_the_embedding_that_is_only_looked_up_is_named(made: tuple[Path, Any]) -> None:
    assert any("'model.embed_tokens.weight': not calibrated" in line for line in made[1].warnings)


def test_an_interrupted_calibration_goes_on_and_ends_with_the_same_bytes(
    source: Path, master: Path, tmp_path: Path
) -> None:
    out, steps = tmp_path / "out", []

    class Killed(BaseException):
        pass

    for last in (2, 5, 8):  # a step of each pass

        def stop(done: int, total: int, what: str, last: int = last) -> None:
            steps.append(what)
            if done == last:
                raise Killed

        with pytest.raises(Killed):
            pqweights.quantize(source, out, "t3", calibrate="self", **SHORT, calibration_progress=stop)
    pqweights.quantize(source, out, "t3", calibrate="self", **SHORT)
    assert folder_bytes(out) == folder_bytes(master)
    assert len(set(steps)) > 5


def test_moments_that_are_not_kept_are_computed_again_to_the_same_bytes(
    source: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated, "MOST_KEPT_BYTES", 700_000)  # those of one layer
    out, kept = tmp_path / "out", set[str]()

    def look(*_: Any) -> None:
        kept.update(path.name.split("-")[1] for path in tmp_path.glob(".*/moments-*"))

    pqweights.quantize(source, out, "t3", calibrate="self", **SHORT, calibration_progress=look)
    assert kept == {"0001"}
    assert folder_bytes(out) == folder_bytes(master)


def test_layers_are_encoded_by_tasks_of_a_cluster_to_the_same_bytes(
    source: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, out = use_tasks_here(monkeypatch), tmp_path / "out"
    ray.resources["memory"] = 900_000_000
    with pytest.raises(ClusterError):
        pqweights.quantize(source, out, "t3", calibrate="self", ray="here", **SHORT)
    ray.resources["memory"] = 1 << 40
    ray.lost = ray.exceptions.OutOfMemoryError()
    with raises(ClusterError, "memory"):
        pqweights.quantize(source, out, "t3", calibrate="self", ray="here", **SHORT)
    ray.lost = None
    pqweights.quantize(source, out, "t3", calibrate="self", ray="here", **SHORT)
    assert sorted(ray.made) == [0, 0, 1, 2]  # the two layers and the head, and the only file of the result
    assert folder_bytes(out) == folder_bytes(master)
    with raises(OptionError, "`ray`"):
        pqweights.quantize(source, "s3://models/out", "t3", calibrate="self", ray="here", **SHORT)


def test_the_same_command_again_finds_the_result(source: Path, master: Path, tmp_path: Path) -> None:
    before = folder_bytes(master)
    steps: list[str] = []
    again = pqweights.quantize(
        source, master, "t3", calibrate="self", **SHORT, calibration_progress=lambda *step: steps.append(step[2])
    )
    assert again.already_done and not steps and folder_bytes(master) == before
    with pytest.raises(OutputError):
        pqweights.quantize(source, master, "t4", calibrate="self", **SHORT)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        pqweights.quantize(source, tmp_path / "file", "t3", calibrate="self", **SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and not list(master.parent.glob(".*"))


def test_weights_that_do_nothing_or_would_grow_are_left(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.zero_()  # so no gradient reaches q, k and v of the layer

    small = families.causal("Llama", hidden_size=128, intermediate_size=256, head_dim=32)
    folder = families.build(small, tmp_path / "source", change)
    report = pqweights.quantize(folder, tmp_path / "out", "t4", calibrate="self", **SHORT)
    codecs = {t["name"]: t["codec"] for t in manifest(tmp_path / "out")["tensors"]}
    assert codecs["model.layers.0.self_attn.q_proj.weight"] == "hadamard-trellis"
    assert codecs["model.layers.1.self_attn.k_proj.weight"] == "hadamard-trellis"  # of 64 rows
    assert codecs["model.layers.1.self_attn.q_proj.weight"] == "hadamard-trellis-columns"
    assert any("and 3 more: not calibrated" in line for line in report.warnings)
    assert "0.self_attn.k_proj" in report.warnings[0]
    assert any("fewer than 64 tokens of the sample reached it" in line for line in report.warnings)


def test_tied_weights_may_be_stored_under_either_name_or_both(tmp_path: Path, tmp_path_factory: Any) -> None:
    folder = families.model(tmp_path_factory.getbasetemp(), "llama-tied")
    tensors = read_all(folder)
    embedding = tensors.pop("model.embed_tokens.weight")
    for name, stored in {
        "head": {"lm_head.weight": embedding},
        "both": {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding},
    }.items():
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        write_checkpoint(tmp_path / name, {**tensors, **stored})
        pqweights.quantize(tmp_path / name, tmp_path / f"{name}-out", "t4", calibrate="self", **SHORT)
        pqweights.load_model(tmp_path / f"{name}-out")


def test_another_calibration_does_not_go_on_with_what_the_last_one_left(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("encoding"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pqweights.quantize(source, out, "t2", calibrate="self", **SHORT, calibration_progress=stop)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n % 490}" for n in range(3000)))
    pqweights.quantize(source, out, "t3", calibrate=text, **SHORT)
    assert manifest(out)["calibrated"]["sample"] == "text"
    pqweights.quantize(source, tmp_path / "fresh", "t3", calibrate=text, **SHORT)
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh")


def test_tied_weights_are_calibrated_as_one(tmp_path: Path, tmp_path_factory: Any) -> None:
    folder = families.model(tmp_path_factory.getbasetemp(), "llama-tied")
    pqweights.quantize(folder, tmp_path / "out", "t4", calibrate="self", **SHORT)
    codecs = {t["name"]: t["codec"] for t in manifest(tmp_path / "out")["tensors"]}
    assert codecs["model.embed_tokens.weight"] == "hadamard-trellis-columns"


EXPERTS: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": families.causal("Mixtral", **EXPERTS, intermediate_size=128, num_local_experts=4),
    "qwen3_moe": families.causal("Qwen3Moe", **EXPERTS, moe_intermediate_size=128, num_experts=4),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_calibrated_each_on_its_own_tokens(name: str, tmp_path: Path) -> None:
    """The last expert of the first layer gets no token."""

    def change(model: Any) -> None:
        sharpened(model)
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 0.1  # of all tokens, and the first router dislikes it
            for layer, least in zip(model.model.layers, (-50, 0), strict=True):
                layer.mlp.gate.weight[:, 0] = torch.tensor([0, 0, 0, least])
                layer.self_attn.o_proj.weight[0] = 0
                layer.post_attention_layernorm.weight[0] = 1

    folder, out = families.build(MIXTURES[name], tmp_path / "source", change), tmp_path / "out"
    report = pqweights.quantize(folder, out, "t3", calibrate="self", **SHORT)
    codecs = {t["name"]: t["codec"] for t in manifest(out)["tensors"] if ".experts." in t["name"]}
    left = {tensor for tensor, codec in codecs.items() if codec == "hadamard-trellis"}
    assert len(codecs) == 24 and len(left) == 3 and all(".0." in tensor and ".3." in tensor for tensor in left)
    assert any(f"{min(left)!r} and 2 more: " in line for line in report.warnings)
    pqweights.quantize(folder, tmp_path / "plain", "t3")
    assert divergence(out, folder) < 0.6 * divergence(tmp_path / "plain", folder)
    assert pqweights.verify(out).ok


@pytest.mark.parametrize("target", [{"target_size": "330kB"}, {"target_bpw": 3.4}], ids=["size", "bits"])
def test_a_target_is_met_and_decides_how_many_bits_there_are(
    target: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    report = pqweights.quantize(source, tmp_path / "out", "t4", calibrate="self", **SHORT, **target)
    assert not any("after the last attempt" in line for line in report.warnings)
    if "target_size" in target:
        (file,) = (tmp_path / "out").glob("*.safetensors")
        assert 0.985 < file.stat().st_size / 330_000 <= 1
    else:
        assert 0.985 < report.totals.bits_per_weight / 3.4 <= 1
    assert "fit" not in manifest(tmp_path / "out")
    again = pqweights.quantize(source, tmp_path / "out", "t4", calibrate="self", **SHORT, **target)
    assert again.already_done and pqweights.verify(tmp_path / "out").ok


def test_each_weight_has_the_bits_of_its_rule_if_that_is_wanted(source: Path, tmp_path: Path) -> None:
    asked = {"set_format": {"*.o_proj.*": 4}, "calibrate": "self", "rate": "tensor", **SHORT}
    done = pqweights.quantize(source, tmp_path / "out", "t3", **asked)
    calibrated = [tensor for tensor, _ in done.pairs if tensor.codec == "hadamard-trellis-columns"]
    plain = {
        tensor.name: tensor for tensor in pqweights.plan(source, "t3", set_format=asked["set_format"]).plan.tensors
    }
    assert len(calibrated) == 15
    for tensor in calibrated:
        assert tensor.bytes == approx(plain[tensor.name].bytes, ORTHOGONAL), tensor.name


def test_a_size_that_is_missed_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "_TOLERANCE", -1.0)
    out, encoded = tmp_path / "out", []

    def stop(done: int, total: int, what: str) -> None:
        encoded.append(what)
        if encoded.count("encoding layer 1") == 2:  # of the second attempt
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pqweights.quantize(source, out, "t3", calibrate="self", **SHORT, calibration_progress=stop)
    assert len(list(tmp_path.glob(".out.calibration/codes-*"))) == 1
    report = pqweights.quantize(source, out, "t3", calibrate="self", **SHORT)
    pqweights.quantize(source, tmp_path / "whole", "t3", calibrate="self", **SHORT)
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    line = next(line for line in report.warnings if "after the last attempt" in line)
    assert re.search(r"^`calibrate`: the calibrated weights take \d+ bytes .* (99\.\d|100\.\d)% of the \d+ that", line)


def test_a_plan_says_what_a_calibration_takes(source: Path, tmp_path: Path, made: tuple[Path, Any]) -> None:
    planned = pqweights.plan(source, "t3", calibrate="self", calibration_tokens=TOKENS)
    assert planned.calibration is not None and planned.calibration.weights == 16  # the embedding that is only read, too
    hidden_states = 2 * TOKENS * 128 * (2 + 3)
    assert planned.calibration.disk_bytes == hidden_states + planned.calibration.weight_bytes
    assert planned.needs.peak_disk_bytes > pqweights.plan(source, "t3").needs.peak_disk_bytes + hidden_states
    shown = done("quantize", source, tmp_path / "out", "-r", "t3", "--calibrate", "self", "--dry-run").stdout
    assert f"calibrated: 16 weights of about {planned.calibration.weight_bytes} bytes together" in shown
    with raises(RecipeError, "`calibrate`"):
        pqweights.plan(source, "q4", calibrate="self")


def test_a_disk_without_room_is_refused_before_anything_is_computed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "free_bytes", lambda folder: 1_000_000)
    with raises(OutputError, "take fewer tokens"):
        pqweights.quantize(source, tmp_path / "out", "t3", calibrate="self", **SHORT)


def test_pickled_weights_are_calibrated_if_they_may_be_read(source: Path, master: Path, tmp_path: Path) -> None:
    import transformers

    pickled = tmp_path / "pickled"
    shutil.copytree(source, pickled)
    (pickled / "model.safetensors").unlink()
    state = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    torch.save(state, pickled / "pytorch_model.bin")
    with raises(SourceError, "`allow_pickle`"):
        pqweights.quantize(pickled, tmp_path / "out", "t3", calibrate="self", **SHORT)
    pqweights.quantize(pickled, tmp_path / "out", "t3", calibrate="self", allow_pickle=True, **SHORT)
    assert manifest(tmp_path / "out")["calibrated"]["weights"] == 15


def test_a_model_of_many_inputs_is_calibrated_with_moments_in_blocks(
    tmp_path: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_MOST", 64)  # columns of a superblock
    monkeypatch.setattr(column_encoding, "MOST_INPUTS", 128)
    folder = families.model(tmp_path_factory.getbasetemp(), "llama-tied")  # of 256 and 512 inputs
    pqweights.quantize(folder, tmp_path / "out", "t3", calibrate="self", **SHORT)
    pqweights.quantize(folder, tmp_path / "plain", "t3")
    assert divergence(tmp_path / "out", folder) < 0.9 * divergence(tmp_path / "plain", folder)


def test_a_large_model_is_sampled_from_a_draft_that_stays_packed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "MOST_IN_MEMORY", 1)
    pqweights.quantize(source, tmp_path / "out", "t3", calibrate="self", **SHORT)
    assert manifest(tmp_path / "out")["calibrated"]["sample"] == "self"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_left_out_is_left_out_of_the_calibration(
    source: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a tensor that cannot be encoded."""
    states = {f"optimizer.{name}": ("BF16", np.full((64, 128), 0x7FC0, np.uint16)) for name in ("first", "second")}
    config = json.loads((source / "config.json").read_text())
    folder = write_checkpoint(tmp_path / "source", read_all(source) | states, config=config)
    out = tmp_path / "out"
    pqweights.quantize(folder, out, "t3", calibrate="self", leave_out=["optimizer.*"], **SHORT)
    assert manifest(out)["left_out"].keys() == states.keys()
    assert master_weights(out).keys() == master_weights(master).keys()
    with pytest.raises(OutputError):  # which has as many bytes
        pqweights.quantize(folder, out, "t3", calibrate="self", leave_out=["*.first", "lm_head.weight"], **SHORT)
    monkeypatch.setattr(sample, "MOST_IN_MEMORY", 1)
    drafted = tmp_path / "drafted"
    pqweights.quantize(folder, drafted, "t3", calibrate="self", leave_out=["optimizer.*"], **SHORT)
    assert manifest(drafted)["left_out"].keys() == states.keys()


def test_the_command_says_what_came_of_it(source: Path, tmp_path: Path) -> None:
    tokens = ("--calibration-tokens", str(TOKENS), "--threads", "1")
    result = done("quantize", source, tmp_path / "out", "-r", "t3", "--calibrate", "self", *tokens)
    assert "not calibrated" in result.stderr and result.stdout.count("worst calibrated: ") == 5
    says = refused("quantize", source, tmp_path / "other", "-r", "q4", "--calibrate", "self", *tokens)
    assert "--calibrate" in says and "hadamard-trellis" in says
