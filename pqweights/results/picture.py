"""A picture of divergence against size: one point for each file or format, as SVG that needs nothing beside it.

It has a background of its own, which changes with its ink where the reader prefers dark colours, so it can be read on
any page, by itself or as an image. Divergences are on a logarithmic scale, because they halve with each half bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pqweights.common.markdown import html_text
from pqweights.common.units import size_text
from pqweights.results.offers import Offer, finite_points

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 30, 46, 52
LABEL_WIDTH = 70
STYLE = (
    "svg.kl{font:13px system-ui,sans-serif}svg.kl .bg{fill:#fff}svg.kl text{fill:#1f2328}svg.kl .dim{fill:#59636e}"
    "svg.kl .grid{stroke:#d1d9e0}svg.kl .line{stroke:#0969da;fill:none;stroke-width:2}svg.kl .dot{fill:#0969da}"
    "@media(prefers-color-scheme:dark){svg.kl .bg{fill:#0d1117}svg.kl text{fill:#f0f6fc}svg.kl .dim{fill:#9198a1}"
    "svg.kl .grid{stroke:#3d444d}svg.kl .line{stroke:#4493f8}svg.kl .dot{fill:#4493f8}}"
)


def kl_picture(offered: Sequence[Offer]) -> str | None:
    """Return the picture; None with fewer than two points."""
    points = sorted(((offer.bytes, kl, offer.kind) for offer, kl in finite_points(offered)), key=lambda point: point[0])
    if len(points) < 2:
        return None
    low, high = math.floor(math.log10(min(kl for _, kl, _ in points))), _top_decade([kl for _, kl, _ in points])
    least, most = points[0][0], points[-1][0]
    margin = max(1, (most - least) // 12)

    def x(size: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (size - least + margin) / (most - least + 2 * margin)

    def y(kl: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(kl)) / (high - low)

    described = "; ".join(f"{kind}: {size_text(size)}, {kl:.4g}" for size, kl, kind in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kl" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-labelledby="kl-title kl-text">',
        '<title id="kl-title">KL divergence against size</title>',
        f'<desc id="kl-text">{html_text(described[:2000])}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
        f'<text x="{LEFT}" y="26" font-weight="600">Divergence from the original against size</text>',
        f'<text class="dim" x="{WIDTH - RIGHT}" y="26" text-anchor="end">KL in nats per token; lower is better</text>',
    ]
    for decade in range(low, high + 1):
        height = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text class="dim" x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for part in range(5):
        size = least + (most - least) * part // 4
        below = f'x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 24}" text-anchor="middle"'
        parts.append(f'<text class="dim" {below}>{size_text(size)}</text>')
    line = " ".join(f"{x(size):.1f},{y(kl):.1f}" for size, kl, _ in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    for number, (size, kl, kind) in enumerate(points):
        across, down = x(size), y(kl)
        parts.append(f'<circle class="dot" cx="{across:.1f}" cy="{down:.1f}" r="5"/>')
        # The line falls to the right, so there is room above it to the right, and below it to the left.
        is_above = number % 2 == 0 and number + 1 < len(points)
        left = across - 6 if across > LEFT + LABEL_WIDTH else across + 6
        place = f'x="{across + 7:.1f}" y="{down - 7:.1f}"' if is_above else f'x="{left:.1f}" y="{down + 18:.1f}"'
        anchor = "end" if not is_above and left < across else "start"
        parts.append(f'<text {place} text-anchor="{anchor}">{html_text(kind)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _top_decade(values: Sequence[float]) -> int:
    """Return the power of ten above all values, and at least one above the one below them."""
    low = math.floor(math.log10(min(values)))
    return max(low + 1, math.ceil(math.log10(max(values))))
