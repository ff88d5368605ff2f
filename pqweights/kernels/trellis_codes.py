"""The trellises: Ungerboeck's codes of rate 1/2 for one dimension (IEEE Trans. Inf. Theory IT-28, 1982)."""

from __future__ import annotations

# bits of a state -> what the parity of a number, and its bit 1, flip in the next state: the parity-check polynomials
# without their lowest bit
TRELLISES = {
    2: (0o5 >> 1, 0o2 >> 1),
    3: (0o13 >> 1, 0o04 >> 1),
    4: (0o23 >> 1, 0o04 >> 1),
    5: (0o45 >> 1, 0o10 >> 1),
    6: (0o103 >> 1, 0o024 >> 1),
    7: (0o235 >> 1, 0o126 >> 1),
    8: (0o515 >> 1, 0o362 >> 1),
}
