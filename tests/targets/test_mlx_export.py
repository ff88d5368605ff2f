"""The mlx target: its tensors match mlx_lm.convert, the tensors left out are named, and mlx-lm loads the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from closeness import F32_SUM, approx
from commands import done, refused
from helpers import (
    Array,
    Tensor,
    bf16,
    folder_bytes,
    gaussian,
    master_weights,
    read_all,
    run_command,
    safetensors_bytes,
    write_checkpoint,
)

from pqweights.convert.manifest import read_manifest
from pqweights.results.verify import verify

# Keys that mlx-lm needs to build the model, and that transformers 5 no longer writes.
NEEDED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "rope_theta": 50000.0},
    "qwen3_vl": {"text_config": {"rope_theta": 500000.0}},
    "gpt2": {"n_ctx": 128},
}
OLD_NAMES = {"rope_theta", "rope_scaling", "num_experts", "n_ctx", "partial_rotary_factor", "rope_local_base_freq"}


def adapted(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in the layout that mlx-lm reads: experts of gpt-oss as [E, out, in], those of Qwen3.5 stacked."""
    if name == "gpt_oss":
        turned = {}
        for key, (dtype, values) in tensors.items():
            fused = key.endswith(("experts.gate_up_proj", "experts.down_proj"))
            turned[f"{key}.weight" if fused else key] = (dtype, values.swapaxes(1, 2) if fused else values)
        return turned
    if name == "qwen3_5_moe":
        rest = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
        for layer in sorted({key.split(".experts.")[0] for key in tensors.keys() - rest.keys()}):

            def of(expert: int, kind: str, layer: str = layer) -> Array:
                return tensors[f"{layer}.experts.{expert}.{kind}_proj.weight"][1]

            pairs = [np.concatenate([of(e, "gate"), of(e, "up")]) for e in range(4)]
            rest[f"{layer}.experts.gate_up_proj"] = ("BF16", np.stack(pairs))
            rest[f"{layer}.experts.down_proj"] = ("BF16", np.stack([of(e, "down") for e in range(4)]))
        return rest
    return tensors


def converted(name: str, base: Path, out: Path, **options: Any) -> Path:
    """Convert the BF16 export with mlx_lm.convert."""
    exported = families.exported(base, name, "bf16")
    config = json.loads((exported / "config.json").read_bytes())
    for key, value in NEEDED.get(name, {}).items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    small = {path.name: path.read_bytes() for path in exported.iterdir() if path.suffix == ".json"}
    del small["config.json"], small["model.safetensors.index.json"], small["pqweights.json"]
    source = write_checkpoint(out / "adapted", adapted(name, read_all(exported)), config=config, companions=small)
    mlx_lm.convert(str(source), str(out / "converted"), quantize=True, **options)
    return out / "converted"


def without_old_names(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: without_old_names(value) if key == "text_config" else value
        for key, value in config.items()
        if key not in OLD_NAMES
    }


def assert_same(found: Path, expected: Path) -> None:
    """Check that all tensors are the same byte for byte, and the configuration except for added keys."""
    ours, theirs = read_all(found), read_all(expected)
    assert ours.keys() == theirs.keys()
    for name, (dtype, values) in theirs.items():
        assert ours[name][0] == dtype and ours[name][1].shape == values.shape, name
        assert ours[name][1].tobytes() == values.tobytes(), name
    ours_config, theirs_config = (json.loads((folder / "config.json").read_bytes()) for folder in (found, expected))
    assert without_old_names(ours_config) == without_old_names(theirs_config)
    for place, other in (
        (ours_config, theirs_config),
        (ours_config.get("text_config", {}), theirs_config.get("text_config", {})),
    ):
        assert {key: place[key] for key in OLD_NAMES & other.keys()} == {k: other[k] for k in OLD_NAMES & other.keys()}
        rope = place.get("rope_parameters", {})
        assert place.get("rope_theta") == rope.get("rope_theta", place.get("rope_theta"))


def errors(folder: Path, exact: Mapping[str, Array]) -> dict[str, float]:
    """The relative squared errors of the quantized weights of an export, decoded by mlx, in float64."""
    loaded: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        loaded |= mx.load(str(path))
    config = json.loads((folder / "config.json").read_bytes())["quantization"]
    result = {}
    for name in [n for n in loaded if f"{n.removesuffix('.weight')}.scales" in loaded]:
        module = name.removesuffix(".weight")
        own = config.get(module, config)
        how = {"group_size": own["group_size"], "bits": own["bits"], "mode": own.get("mode", "affine")}
        scales, biases = loaded[f"{module}.scales"], loaded.get(f"{module}.biases")
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        values = np.array(mx.dequantize(loaded[name], scales, biases, **how).astype(mx.float32))
        wanted = exact[name].astype(np.float64)
        result[name] = float(((values - wanted) ** 2).sum() / (wanted**2).sum())
    return result


# Of each layout one; test_architectures.py compares the outputs of others.
LAYOUTS = ("llama-tied", "llama-uneven", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe", "qwen3_vl", "gpt2")


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_match_mlx_lm_convert(name: str, base: Path, tmp_path: Path) -> None:
    exported = families.exported(base, name, "mlx", qparams="minmax")
    assert_same(exported, converted(name, base, tmp_path))
    assert verify(exported, threads=1).ok


MODES = [
    *({"bits": bits} for bits in (2, 3, 5, 6, 8)),
    {"group_size": 32},
    {"group_size": 128, "bits": 3},
    {"mode": "mxfp4"},
    {"mode": "mxfp8"},
    {"mode": "nvfp4"},
]


@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(map(str, options.values())))
def test_modes_and_bit_widths_match_mlx_lm_convert(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    command = {"export": str(families.master(base, "llama")), "target": "mlx", "qparams": "minmax", **options}
    report = run_command(command, tmp_path / "out")
    assert_same(tmp_path / "out", converted("llama", base, tmp_path, **{f"q_{key}": v for key, v in options.items()}))
    found = errors(tmp_path / "out", master_weights(families.master(base, "llama")))
    for tensor, record in zip(report.plan.tensors, report.records, strict=True):
        if tensor.action == "integer":
            assert record.relative_mse == approx(found[tensor.name], F32_SUM)


@pytest.mark.parametrize("mix", ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"])
def test_mixes_are_those_of_mlx_lm(mix: str, base: Path, tmp_path: Path) -> None:
    assert_same(
        families.exported(base, "llama", "mlx", qparams="minmax", format=mix),
        converted("llama", base, tmp_path, quant_predicate=mix, q_bits=int(mix[6]), q_group_size=64),
    )


@pytest.mark.parametrize(("name", "options"), [("q6", {"bits": 6}), ("nvfp4", {"mode": "nvfp4"})])
def test_formats_by_name_are_modes_with_bits(name: str, options: dict[str, Any], base: Path) -> None:
    by_name = families.exported(base, "llama", "mlx", format=name)
    assert folder_bytes(by_name) == folder_bytes(families.exported(base, "llama", "mlx", **options))


def test_rules_give_modules_different_formats(base: Path, tmp_path: Path) -> None:
    rules = ("*.down_proj.weight=q8", "*.1.self_attn.q_proj.weight=mxfp4")
    folder = families.exported(base, "llama", "mlx", format="q3", set_format=rules, keep=("role:embedding",))
    found = {tensor.name: (tensor.codec, tensor.bits) for tensor in read_manifest(folder).tensors}
    assert found["model.layers.0.mlp.down_proj.weight"] == ("affine-g64", 8)
    assert found["model.layers.1.self_attn.q_proj.weight"] == ("mxfp4-g32", 4)
    assert found["model.layers.0.self_attn.q_proj.weight"] == ("affine-g64", 3)
    assert found["model.embed_tokens.weight"][0] is None
    assert mlx_lm.load(str(folder))
    weights = master_weights(families.master(base, "llama"))
    records = {record.name: record for record in read_manifest(folder).records}
    for name, error in errors(folder, weights).items():
        assert records[name].relative_mse == approx(error, F32_SUM)
    asked = ("export", families.master(base, "llama"), tmp_path / "out", "-t", "mlx")
    assert "*.nothing" in refused(*asked, "--set", "*.nothing=q8")
    assert "--set *=q9" in refused(*asked, "--set", "*=q9", code=2)
    assert "--bits" in refused(*asked, "--format", "q8", "--bits", "8", code=2)


RECIPE = """
format: {default}
rules:
  - {{name: "*.down_proj.weight", format: {down}}}
  - {{name: "*.self_attn.*", layers: 0, keep: true}}
  - {{role: [embedding, lm_head], keep: true}}
"""
# What a recipe says of each target: the default, and another format.
OF_TARGETS = {"mlx": ("q3", "q8"), "vllm": ("fp8", "nvfp4"), "torchao": ("int8", "fp8")}


@pytest.mark.parametrize("target", OF_TARGETS)
def test_one_recipe_gives_formats_for_every_target(target: str, base: Path, tmp_path: Path) -> None:
    """The command line comes before it, and what is wrong in the file is one line."""
    default, down = OF_TARGETS[target]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(RECIPE.format(default=default, down=down))
    master = families.master(base, "llama")
    done("export", master, tmp_path / "out", "-t", target, "-r", recipe, "--keep", "*.1.mlp.up_proj.weight")
    kept = ("*.1.mlp.up_proj.weight", "*.0.self_attn.*", "role:embedding", "role:lm_head")
    rules = ("--set", f"*.down_proj.weight={down}", *(part for pattern in kept for part in ("--keep", pattern)))
    done("export", master, tmp_path / "set", "-t", target, "--format", default, *rules)
    found, expected = (read_manifest(tmp_path / out).tensors for out in ("out", "set"))
    assert [(t.name, t.codec, t.bits) for t in found] == [(t.name, t.codec, t.bits) for t in expected]
    assert len({(t.codec, t.bits) for t in found}) > 2
    for text, said in (("formats: q4", "formats"), ("rules: [{format: q4}]", "condition"), ("- 1", "r.yaml")):
        recipe.write_text(text)
        assert said in refused("export", master, tmp_path / "other", "-t", target, "-r", recipe)


def test_formats_are_chosen_for_a_size(base: Path) -> None:
    whole = {name: weights_bytes(families.exported(base, "llama", "mlx", format=name)) for name in ("q3", "q6")}
    size = sum(whole.values()) // 2
    folder = families.exported(base, "llama", "mlx", target_size=size)
    assert 0.93 * size < weights_bytes(folder) <= size
    assert len({tensor.bits for tensor in read_manifest(folder).tensors if tensor.action == "integer"}) > 1
    assert mlx_lm.load(str(folder))


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_tensors_that_mlx_lm_does_not_hold_are_named(base: Path, tmp_path: Path) -> None:
    name = "qwen3_vl"
    master = families.master(base, name)
    seeing = {tensor for tensor in read_all(families.model(base, name)) if ".visual." in tensor}
    assert len(seeing) > 10
    report = run_command({"export": str(master), "target": "mlx"}, tmp_path / "out")
    assert report.plan.left_out_tensors.keys() == seeing
    manifest = read_manifest(tmp_path / "out")
    assert manifest.left_out == report.plan.left_out_tensors
    assert all("does not hold" in reason for reason in manifest.left_out.values())
    shown = done("export", master, tmp_path / "out", "-t", "mlx")
    assert f"{tmp_path / 'out'}: " in shown.stderr
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("left out: ") and " tensor" in line]
    assert line.startswith(f"left out: {len(seeing)} tensors: mlx-lm's model of type") and "visual" in line
    shown = done("export", master, tmp_path / "out", "-t", "mlx", "--json")
    assert set(json.loads(shown.stdout)["left_out_tensors"]) == seeing


def test_draft_layers_that_are_left_out_are_not_declared(base: Path, tmp_path: Path) -> None:
    """Below `mtp`, as Qwen3.5 has them; the count stands in the configuration of the text model."""
    source = families.model(base, "qwen3_5_moe")
    config = json.loads((source / "config.json").read_bytes())
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 1
    write_checkpoint(tmp_path / "model", read_all(source) | {"mtp.fc.weight": bf16(gaussian(64, 128))}, config=config)
    run_command({"quantize": str(tmp_path / "model")}, tmp_path / "master")
    for target, declared in (("mlx", 0), ("bf16", 1)):
        run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / target)
        exported = json.loads((tmp_path / target / "config.json").read_bytes())
        assert exported.get("text_config", exported)["mtp_num_hidden_layers"] == declared


@pytest.mark.parametrize("rule", ["name: lm_head.weight", "role: embedding", 'name: "*.0.self_attn.k_proj.weight"'])
def test_weight_that_the_recipe_keeps_stays_plain(rule: str, base: Path, tmp_path: Path) -> None:
    """The rule of mlx-lm would quantize it."""
    (tmp_path / "recipe.yaml").write_text(f"bits: 5\nrules: [{{{rule}, keep: true}}]\n")
    source = families.model(base, "llama")
    run_command({"quantize": str(source), "recipe": str(tmp_path / "recipe.yaml")}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": "mlx"}, tmp_path / "out")
    name = {"name: lm_head.weight": "lm_head.weight", "role: embedding": "model.embed_tokens.weight"}.get(
        rule, "model.layers.0.self_attn.k_proj.weight"
    )
    found, exact = read_all(tmp_path / "out"), read_all(source)
    assert found[name][0] == "BF16"
    assert found[name][1].tobytes() == exact[name][1].tobytes()
    module = name.removesuffix(".weight")
    assert f"{module}.scales" not in found
    assert "model.layers.1.self_attn.k_proj.scales" in found


def small_llama(folder: Path, width: int = 192) -> Path:
    """Make a master of a Llama with rows of 128 and of `width` weights."""
    settings = {"hidden_size": 128, "intermediate_size": width, "num_hidden_layers": 1, "head_dim": 32}
    families.build(families.causal("Llama", **settings), folder / "model")
    run_command({"quantize": str(folder / "model")}, folder / "master")
    return folder / "master"


def test_rows_that_groups_do_not_divide_stay_plain(tmp_path: Path) -> None:
    master, out = small_llama(tmp_path, 144), tmp_path / "out"
    line = refused("export", master, out, "-t", "mlx", "--group-size", "64")
    assert "down_proj" in line and "144" in line
    assert not out.exists()
    (plain,) = [x for x in done("export", master, out, "-t", "mlx").stdout.splitlines() if x.startswith("plain: ")]
    assert plain.startswith("plain: 1 tensor (18432 weights), groups of 64 or 32 do not divide its rows of 144 weights")
    assert plain.endswith("model.layers.0.mlp.down_proj.weight")
    (stays,) = [tensor for tensor in read_manifest(out).tensors if tensor.name.endswith("down_proj.weight")]
    assert stays.bits is None
    assert stays.reason.startswith(
        "groups of 64 or 32 do not divide its rows of 144 weights (--group-size that would: none)"
    )
    line = refused("export", master, out, "-t", "mlx", "--mode", "nvfp4", "--group-size", "32", code=2)
    assert "--group-size 32" in line and "nvfp4" in line


@pytest.mark.parametrize("change", ["a tensor less", "a tensor more", "another shape"])
def test_unexpected_missing_or_misshapen_weights_are_refused(change: str, base: Path, tmp_path: Path) -> None:
    master = small_llama(tmp_path)
    source = tmp_path / "model"
    tensors = read_all(source)
    name = "model.layers.0.self_attn.k_proj.weight"
    if change == "a tensor less":
        del tensors[name]
    elif change == "a tensor more":
        tensors["model.layers.0.self_attn.rotary.weight"] = bf16(gaussian(64, 128))
    else:
        tensors[name] = bf16(gaussian(62, 128))
    (source / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    run_command({"quantize": str(source), "overwrite": True}, master)
    line = refused("export", master, tmp_path / "out", "-t", "mlx")
    assert "mlx-lm" in line and "'llama'" in line
    assert ("rotary" if change == "a tensor more" else "k_proj") in line
    assert not (tmp_path / "out").exists()
