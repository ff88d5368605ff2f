"""How byte-level tokenizers split text, by the names that llama.cpp has for it (src/llama-vocab.cpp).

Both directions go by one table: a tokenizer's expressions are found in it, and those of a file by the name. Where
llama.cpp states an expression otherwise than published tokenizers do, as its engine lacks something, it is theirs.
"""

from __future__ import annotations

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_JOINED_WORDS = r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
EXAONE_MOE = _CONTRACTIONS + _JOINED_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
TEKKEN = "".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
GPT4O = f"{_CASED[0]}{_CONTRACTIONS}?{_CASED[1]}{_CONTRACTIONS}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
DEEPSEEK3 = _PUNCTUATION + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
_LETTERS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
MINICPM5 = _CONTRACTIONS + _LETTERS + r"|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
JAIS2 = (
    LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
UFAKZEKA = _LETTERS[1:] + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
YOUTU = GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
SPARK = DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]")
# Kimi's words are not Chinese.
KIMI = r"[\p{Han}]+|" + GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"
LINES = r"[^\n]+|[\n]+"
THREES = r"\p{N}{1,3}"
_SIGNS = r"[\p{P}\$\+<=>\^~\|%s]+"
_CHAMELEON = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")
_THREE = "[0-9][0-9][0-9]"
_LATIN_TO_COPTIC = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_ASCII_SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU_SIGNS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

# The expressions by which text is split, one after the other; whether whole words of the vocabulary are taken before
# merges apply -> the name in llama.cpp.
NAMES = {
    ((GPT2,), False): "gpt-2",
    ((DIGIT, GPT2), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "smaug-bpe",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((SEED,), False): "seed-coder",
    ((EXAONE_MOE,), False): "exaone-moe",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
    ((GPT4O,), True): "granite-embed-multi-97m",
    ((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), False): "tiny_aya",
    ((_YOUTU_SIGNS, YOUTU), True): "youtu",
    ((KIMI,), False): "kimi-k2",
    ((THREES, CJK, DEEPSEEK3), False): "deepseek-v3",
    ((THREES, CJK, SPARK, DIGIT), False): "spark2_5",
    ((r"[\r\n]", _LATIN_TO_COPTIC, _ASCII_SIGNS, r"\s+$", _EAST_ASIAN, DIGITS), False): "deepseek-llm",
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, DIGIT), False): "deepseek-coder",
    ((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, DEEPSEEK3), False): "afmoe",
    ((THREES, MINICPM5), True): "minicpm5",
    ((JAIS2,), False): "jais-2",
    ((BAILING,), False): "bailingmoe",
    ((UFAKZEKA,), False): "ufakzeka",
    ((LINES, QWEN2), False): "laguna",
    ((_SENTENCES,), False): "bloom",
    ((_SENTENCES, DIGIT), False): "viking",
    ((DIGITS, r"(?=(\d{3})+(?!\d))"), False): "superbpe",
    ((_SIGNS % "`", GPT2, _THREE), False): "falcon",
    ((_SIGNS % "", GPT2, DIGITS, _THREE), False): "default",
    ((*_CHAMELEON, DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT2), False): "chameleon",
}
# Other names.
SAME_PRE = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("jina-v5-nano", "glm4", "glm5"), "llama-bpe"),
    **dict.fromkeys(("dbrx", "chatglm-bpe"), "smaug-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), "qwen2"),
    **dict.fromkeys(("solar-open", "grok-2"), "qwen2"),
    **dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion"), "gpt-2"),
    **dict.fromkeys(("granite-docling", "roberta-bpe", "modern-bert", "jina-v1-en", "jina-v2-code"), "gpt-2"),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("llama4", "kanana2", "talkie", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("hunyuan-dense", "joyai-llm", "hy_v4"), "deepseek-v3"),
    **dict.fromkeys(("poro-chat", "gpt3-finnish"), "bloom"),
    **dict.fromkeys(("bailingmoe2", "llada-moe"), "bailingmoe"),
    "cohere2moe": "tiny_aya",
}
# Those for which llama.cpp begins texts with a token unless it is told otherwise, and those with a second text behind
# the end of the first.
BEGINS = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
ALWAYS_BEGINS = ("gemma4", "granite-embed-multi-311m")  # whatever it is told
SEPARATES = ("roberta-bpe", "jina-v1-en", "jina-v2-code")
# Tokenizers with a normalizer, which llama.cpp does without.
NORMALIZED = ("qwen2", "deepseek-r1-qwen", "qwen35")
# Characters as they are, with spaces made visible, and tokens of bytes for those that the vocabulary lacks.
OF_CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
# Where llama.cpp only approximates the expressions, of which its engine lacks some classes of characters.
_ROUGHLY = (
    "words with combining marks, or with capitals outside ASCII after small letters (llama.cpp splits them differently)"
)
DIFFERS = dict.fromkeys(("tekken", "gpt-4o", "granite-embed-multi-97m"), _ROUGHLY)
