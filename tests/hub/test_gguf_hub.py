"""Files on the Hub as sources: named as a file, as the only model of a repository, or by the address of a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trained_tokenizers as trained
from diffusion_cases import single_file
from gguf_files import write_gguf, write_llama
from helpers import folder_bytes
from hub_cases import Client
from loopback_faults import Corrupt, Fault
from loopback_hub import LoopbackHub
from tiny_gguf import edited

from pqweights.errors import OptionError
from pqweights.storage.addresses import RepositoryName, repository_named

REPOSITORY = "me/model-GGUF"
# Downloads that are not of GGUF files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a tokenizer in two types, and in parts, in a folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = trained.KINDS["llama3"]()
    trained.save(tokenizer, folder)
    write_llama(folder, rows=tokenizer.get_vocab_size())
    (folder / "parts").mkdir()
    (folder / "alone").mkdir()
    alone = write_gguf(folder).rename(folder / "alone/m.gguf")
    edited(alone, folder / "parts/m.gguf", split_max_tensors=8)
    parts = sorted((folder / "parts").iterdir())
    return {
        "m-F32.gguf": alone, "m-BF16.gguf": write_gguf(folder, "BF16"), "mmproj-m.gguf": parts[0],
        **{f"F32/{part.name}": part for part in parts},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "hf://a/b/m-Q4_K_M.gguf": ("a/b", None, "m-Q4_K_M.gguf"),
        "hf://a/b@v1/Q8_0/m-00001-of-00002.GGUF": ("a/b", "v1", "Q8_0/m-00001-of-00002.GGUF"),
        "hf://a/b@refs/pr/1/m.gguf": ("a/b", "refs/pr/1", "m.gguf"),
        "https://huggingface.co/a/b/blob/main/m.gguf": ("a/b", "main", "m.gguf"),
        "https://hf.co/a/b/resolve/v1/Q8_0/m.gguf?download=true": ("a/b", "v1", "Q8_0/m.gguf"),
        "hf://a/b/../m.gguf": ("a/b/../m.gguf", None, ""),
        "hf://a/b@v1/split/m.safetensors": ("a/b", "v1", "split/m.safetensors"),
        "https://huggingface.co/a/b/blob/main/split/m.safetensors": ("a/b", "main", "split/m.safetensors"),
        "https://huggingface.co/a/b/blob/main/model-00001-of-00002.safetensors": ("a/b", "main", ""),
    }.items(),
)
def test_a_file_in_a_repository_is_named(text: str, expected: tuple[str, str | None, str]) -> None:
    assert repository_named(text) == RepositoryName(*expected)


def test_a_file_in_safetensors_in_a_folder_is_a_model(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    """As those of image and video models are, of which a repository has several."""
    file, places = single_file(tmp_path / "source", "FLUX.1"), ("split/flux1.safetensors", "other.safetensors")
    hub.commit(REPOSITORY, dict.fromkeys(places, file))
    client.well("export", file, tmp_path / "local", "--target", "comfyui", "--name", "flux1", "-q")
    remote = ("export", f"hf://{REPOSITORY}/{places[0]}", tmp_path / "out", "--target", "comfyui", "-q", "--low-disk")
    client.well(*remote, "--push", "me/made")
    made = hub.repositories["me/made"].read("flux1_fp8_scaled.safetensors")
    assert made == (tmp_path / "local/flux1_fp8_scaled.safetensors").read_bytes()
    assert "gives the same bytes" in client.well("verify", "me/made", "--from", remote[1]).stdout
    assert "absent" in client.line("plan", f"hf://{REPOSITORY}/split/absent.safetensors")


def test_a_page_that_leads_out_of_the_repository_is_refused() -> None:
    with pytest.raises(OptionError):
        repository_named("https://huggingface.co/a/b/blob/main/x/../../m.gguf")


def test_every_way_to_name_a_file_gives_the_same_master(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path
) -> None:
    hub.commit(REPOSITORY, {**files, "README.md": b"# GGUF\n"})
    client.patch.setenv("HF_ENDPOINT", hub.url)
    page = f"{hub.url}/{REPOSITORY}/blob/main/m-F32.gguf"
    client.well("quantize", files["m-F32.gguf"], tmp_path / "local", "-q")
    codes = {name: data for name, data in folder_bytes(tmp_path / "local").items() if not name.endswith(".json")}
    for number, name in enumerate((f"hf://{REPOSITORY}/m-F32.gguf", f"hf://{REPOSITORY}@main/m-F32.gguf", page)):
        plan = json.loads(client.well("plan", name, "--json").stdout)
        out = tmp_path / str(number)
        client.well("quantize", name, out, "-q", *(["--low-disk"] if number == 1 else []))
        found = folder_bytes(out)
        assert codes.items() <= found.items() and plan["totals"]["output_bytes"] == sum(
            len(data) for file, data in found.items() if file.endswith(".safetensors")
        )
        source = json.loads(found["pqweights.json"])["source"]
        assert source["id"] == REPOSITORY and source["revision"] == hub.repositories[REPOSITORY].sha()
        assert {"config.json", "tokenizer.json"} < found.keys() and not any("gguf" in file for file in found)
        client.well("verify", out)


def test_the_only_model_of_a_repository_needs_no_name(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path
) -> None:
    hub.commit(REPOSITORY, {name: files[name] for name in ("m-F32.gguf", "mmproj-m.gguf")})
    client.well("quantize", REPOSITORY, tmp_path / "out", "-q")
    hub.commit(REPOSITORY, files)
    line = client.line("plan", REPOSITORY)
    assert "m-BF16.gguf" in line and f"hf://{REPOSITORY}/" in line
    assert "absent.gguf" in client.line("plan", f"hf://{REPOSITORY}/absent.gguf")


def test_a_plan_reads_the_header_alone(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pqweights.checkpoint.ahead.SMALL_BYTES", 1000)
    monkeypatch.setattr("pqweights.checkpoint.gguf.file.PIECE_BYTES", 1 << 12)
    data = files["m-F32.gguf"].read_bytes()
    hub.commit(REPOSITORY, {"m.gguf": data})
    client.well("plan", REPOSITORY)
    assert not list(client.home.rglob("*.gguf"))
    hub.inject(Fault(Corrupt(data.index(b"tiny")), "GET", r"m\.gguf"))  # of which a plan is made all the same
    line = client.line("quantize", REPOSITORY, tmp_path / "out")
    assert "m.gguf" in line and "fetched for the plan" in line and not (tmp_path / "out/pqweights.json").exists()


def test_parts_in_a_folder_of_the_repository_are_one_model(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path
) -> None:
    hub.commit(REPOSITORY, files)
    part = max(name for name in files if "/" in name)
    client.well("quantize", f"hf://{REPOSITORY}/{part}", tmp_path / "parts", "-q")
    client.well("quantize", files["m-F32.gguf"], tmp_path / "whole", "-q")
    found, expected = folder_bytes(tmp_path / "parts"), folder_bytes(tmp_path / "whole")
    assert found["tokenizer.json"] == expected["tokenizer.json"]
    tensors = [json.loads(folder["pqweights.json"])["tensors"] for folder in (found, expected)]
    assert tensors[0] == tensors[1]


def test_what_reads_folders_gets_the_file(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path
) -> None:
    from pqweights.storage.sources import local_folder

    hub.commit(REPOSITORY, {**files, "config.json": b"{}", "notes.bin": b"x"})
    fetched = local_folder(f"hf://{REPOSITORY}/m-BF16.gguf")
    assert fetched.path.name == "m-BF16.gguf" and fetched.path.read_bytes() == files["m-BF16.gguf"].read_bytes()
    assert sorted(path.name for path in fetched.path.parent.iterdir()) == ["config.json", "m-BF16.gguf"]
    for command in (("verify",), ("inspect",)):
        assert "m-BF16.gguf" in client.line(*command, f"hf://{REPOSITORY}/m-BF16.gguf")
    assert "ORG/NAME" in client.line("push", tmp_path, f"hf://{REPOSITORY}/m-BF16.gguf")


def test_a_file_in_the_cache_serves_offline(
    hub: LoopbackHub, client: Client, files: dict[str, Path], tmp_path: Path
) -> None:
    from huggingface_hub import hf_hub_download

    hub.commit(REPOSITORY, files)
    name = f"hf://{REPOSITORY}/m-F32.gguf"
    client.well("quantize", name, tmp_path / "online", "-q")
    for file in ("m-F32.gguf", "mmproj-m.gguf"):  # both are looked at
        hf_hub_download(REPOSITORY, file)
    client.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    client.well("quantize", name, tmp_path / "offline", "-q")
    assert folder_bytes(tmp_path / "offline") == folder_bytes(tmp_path / "online") and not hub.requests
    assert "m-BF16.gguf" in client.line("plan", f"hf://{REPOSITORY}/m-BF16.gguf")
