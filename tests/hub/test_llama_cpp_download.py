"""llama.cpp's own download finds, by repository and type, the files that a push brings, and fetches them whole."""

from __future__ import annotations

import subprocess
from pathlib import Path

import families
import language_models
import pytest
from commands import done
from hub_cases import TARGET, Client, files_of
from loopback_hub import LoopbackHub

SOURCE = Path(__file__).parents[1] / "support/llama_download.cpp"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of llama_download.cpp, compiled with g++, whose standard library llama.cpp's library uses."""
    import llama_cpp

    libraries = Path(llama_cpp.__file__).parent / "lib"
    out = tmp_path_factory.mktemp("program") / "llama_download"
    command = ["g++", "-std=c++17", str(SOURCE), "-o", str(out), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, "-l:libllama-common.so", "-Wl,--allow-shlib-undefined"], check=True)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of GGUF files: several types, and one in parts."""
    folder = tmp_path_factory.mktemp("made")
    source = language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "source"))
    for name, options in {
        "ladder": ("q3_k_m,q4_k_m,q8_0,bf16",),
        "parts": ("q6_k", "--max-shard-size", "300KB"),
    }.items():
        done("export", source, folder / name, "-t", "gguf", "--name", "model", "-q", "--type", *options)
    return folder


def fetched(program: Path, hub: LoopbackHub, home: Path, repository: str) -> list[tuple[str, str, str]]:
    """What llama.cpp resolves and fetches: what it is, its path in the repository, and where it lies."""
    environment = hub.environment(home) | {
        "MODEL_ENDPOINT": hub.url,
        "LLAMA_CACHE": "",
        "HF_HUB_CACHE": str(home / "hub"),
    }
    del environment["HF_ENDPOINT"]
    ran = subprocess.run([program, repository], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    kind_path_where = [line.split("\t") for line in ran.stdout.splitlines() if line.count("\t") == 2]
    return [(kind, path, where) for kind, path, where in kind_path_where]


def test_llama_cpp_finds_each_type(program: Path, hub: LoopbackHub, client: Client, made: Path, tmp_path: Path) -> None:
    for name in ("ladder", "parts"):
        client.well("push", made / name, TARGET)
    expected = {path.name: path.read_bytes() for path in made.glob("*/*.gguf")}
    types = {"Q3_K_M": 1, "q4_k_m": 1, "Q8_0": 1, "BF16": 1, "Q6_K": sum("Q6_K" in name for name in expected)}
    assert types["Q6_K"] > 1
    for number, (name, count) in enumerate(types.items()):
        (_, model, _), *files = fetched(program, hub, tmp_path / str(number), f"{TARGET}:{name}")
        assert name.upper() in model and len(files) == count
        for kind, path, where in files:
            assert kind == "file" and Path(where).read_bytes() == expected[path]
    assert fetched(program, hub, tmp_path / "default", TARGET)[0] == ("model", "model-Q4_K_M.gguf", "")


def test_llama_cpp_takes_the_tower_and_not_for_a_model(
    program: Path, hub: LoopbackHub, made: Path, tmp_path: Path
) -> None:
    files = {name: path for name, path in files_of(made / "ladder").items() if "Q8_0" in name}
    hub.commit(TARGET, {**files, "mmproj-model-F16.gguf": b"GGUF of a tower"})
    found = fetched(program, hub, tmp_path / "home", f"{TARGET}:Q8_0")
    assert [(kind, path) for kind, path, _ in found] == [
        ("model", "model-Q8_0.gguf"), ("file", "model-Q8_0.gguf"), ("tower", "mmproj-model-F16.gguf"),
    ]  # fmt: skip
    assert Path(found[-1][2]).read_bytes() == b"GGUF of a tower"


def test_f16_finds_bf16_if_both_are_there(program: Path, hub: LoopbackHub, made: Path, tmp_path: Path) -> None:
    """What docs/hub.md warns of; when llama.cpp looks for whole names, this fails, and the page has a line too many."""
    hub.commit(TARGET, {"model-BF16.gguf": made / "ladder/model-BF16.gguf", "model-F16.gguf": b"GGUF"})
    assert fetched(program, hub, tmp_path / "home", f"{TARGET}:F16")[0][1] == "model-BF16.gguf"
