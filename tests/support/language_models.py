"""Tiny language models whose text is known: each token has one successor, and tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from helpers import f32, write_checkpoint

BYTES = 256
BEGIN, END, USER, ASSISTANT, SYSTEM = range(BYTES, BYTES + 5)
SPECIAL = {"<s>": BEGIN, "</s>": END, "<|user|>": USER, "<|assistant|>": ASSISTANT, "<|system|>": SYSTEM}
VOCABULARY = HIDDEN = 384
CONTEXT = 128
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As the model of Gemma's first version has it.
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
# No byte of it comes twice, so that each one can have its successor.
SPEECH = "Zé€😀\t1"


def letters() -> list[str]:
    """The character that stands for each byte in the vocabularies of byte-level tokenizers, as in GPT-2."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(BYTES) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(BYTES + n) for n, byte in enumerate(hidden)}
    return [names[byte] for byte in range(BYTES)]


def tokenizer_files(template: str | None = None) -> dict[str, bytes]:
    """A tokenizer with a token for each byte, and with a chat template if one is given."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": number, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text, number in SPECIAL.items()
    ]
    vocabulary = {letter: number for number, letter in enumerate(letters())}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def with_tokenizer(folder: Path) -> Path:
    """Give a tiny model a tokenizer that llama.cpp has, and settings of generation."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    files = tokenizer_files()
    tokenizer = json.loads(files["tokenizer.json"])
    # With them in the vocabulary, transformers gives them the ids that they have here.
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"] | added | {"ab": max(added.values()) + 1}
    tokenizer["model"] |= {"vocab": vocab, "merges": [["a", "b"]]}
    for name, data in (files | {"tokenizer.json": json.dumps(tokenizer).encode()}).items():
        (folder / name).write_bytes(data)
    settings = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "LICENSE").write_text("a licence\n")
    return folder


def llama_config(**changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "dtype": "float32",
        **changed,
    }


def speaker(
    folder: Path,
    speech: str = SPEECH,
    *,
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    endless: bool = False,
    **changed: Any,
) -> Path:
    """A model that says `speech` after every prompt that ends with a letter of ASCII, or in a chat.

    template: of chats
    generation: the content of generation_config.json
    endless: whether it then says the speech again, instead of ending
    changed: settings of the config
    """
    said = list(speech.encode())
    assert len(set(said)) == len(said)
    successor = np.full(VOCABULARY, said[0])
    for before, after in zip(said, [*said[1:], said[0] if endless else END], strict=True):
        successor[before] = after
    head = np.zeros((VOCABULARY, HIDDEN))
    head[successor, np.arange(VOCABULARY)] = 1
    return _llama(folder, head, template=template, generation=generation, **changed)


def babbler(folder: Path, *, generation: dict[str, Any] | None = None) -> Path:
    """A model with random weights, all of which change what it says."""
    random = np.random.default_rng(5)
    head = random.standard_normal((VOCABULARY, HIDDEN))
    head[END] = 0
    return _llama(folder, head, template=None, generation=generation, random=random)


def _llama(
    folder: Path,
    head: Any,
    *,
    template: str | None,
    generation: dict[str, Any] | None,
    random: np.random.Generator | None = None,
    **changed: Any,
) -> Path:
    def weight(*shape: int) -> Any:
        return f32(np.zeros(shape) if random is None else random.standard_normal(shape) * 0.3)

    layer, half = "model.layers.0", HIDDEN // 2
    tensors = {
        "model.embed_tokens.weight": f32(np.eye(VOCABULARY, HIDDEN) if random is None else weight(*head.shape)[1]),
        "lm_head.weight": f32(head),
        "model.norm.weight": f32(np.ones(HIDDEN)),
        f"{layer}.input_layernorm.weight": f32(np.ones(HIDDEN)),
        f"{layer}.post_attention_layernorm.weight": f32(np.ones(HIDDEN)),
        f"{layer}.self_attn.q_proj.weight": weight(HIDDEN, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": weight(half, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": weight(half, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": weight(HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": weight(128, HIDDEN),
        f"{layer}.mlp.up_proj.weight": weight(128, HIDDEN),
        f"{layer}.mlp.down_proj.weight": weight(HIDDEN, 128),
    }
    files = tokenizer_files(template)
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    return write_checkpoint(folder, tensors, config=llama_config(**changed), companions=files)
