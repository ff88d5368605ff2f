"""Text from outside, made fit for a terminal: what would control it, or would not be seen, is escaped visibly.

Names of tensors and files, reasons in a manifest, texts of a GGUF file, replies of the Hub and of models come from
anywhere. A terminal obeys some characters instead of showing them, others change the order in which text is read, and a
line break could begin a line that looks like one of ours.
"""

from __future__ import annotations

import re
import unicodedata

# Characters that Unicode counts as printable although they show nothing: fillers, joiners and variation selectors.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Characters that change the order in which others are shown: what is read would not be what is there.
_REORDERING = frozenset(
    "\N{LEFT-TO-RIGHT EMBEDDING}\N{RIGHT-TO-LEFT EMBEDDING}\N{POP DIRECTIONAL FORMATTING}\N{LEFT-TO-RIGHT OVERRIDE}"
    "\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}\N{RIGHT-TO-LEFT ISOLATE}\N{FIRST STRONG ISOLATE}"
    "\N{POP DIRECTIONAL ISOLATE}"
)
# Control characters, halves of surrogate pairs, and separators of lines and paragraphs.
_NEVER_IN_PROSE = ("Cc", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """Return a line in which every character is seen: others stand as in Python's literals, such as \\x1b or \\u202e.

    Line breaks are escaped, too: the caller, not the text, decides where a line ends.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(_escaped(char) if _is_unseen(char) else char for char in text)


def printable_prose(text: str) -> str:
    """Return a text, such as a model's reply, without characters that control a terminal or reorder what it shows.

    Line feeds and tabs stay, and so do joiners and variation selectors, which are parts of emoji and of many scripts.
    """
    return "".join(
        _escaped(char)
        if char in _REORDERING or (unicodedata.category(char) in _NEVER_IN_PROSE and char not in "\n\t")
        else char
        for char in text.replace("\r\n", "\n")
    )


def printable_json(text: str, encoding: str = "utf-8") -> str:
    """Return a JSON document with the same content in which unseen characters are escaped.

    All that is not ASCII is, in an encoding that may lack it. Only strings of a document hold such characters.
    """
    if text.isascii() and "\x7f" not in text:
        return text
    has_all = encoding.lower().replace("-", "").startswith("utf")
    return "".join(
        char if char == "\n" or ((char.isascii() or has_all) and not _is_unseen(char)) else _json_escaped(char)
        for char in text
    )


def _is_unseen(char: str) -> bool:
    return not char.isprintable() or _INVISIBLE.match(char) is not None


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _json_escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
