"""matplotlib figures as SVG text for pages: colours by role, text as text, equal data equal bytes.

A picture is drawn in units of its view box. Colours are roles ("real", "padding"): while drawing, each is a colour that
nothing else has, and in the SVG it becomes the CSS variable of that name, so that one picture serves light, dark and paper.
Words stay text in the font of the page. What a page has no use for (metadata, clip paths, identifiers that nothing refers
to, a style for every element of the page) is taken out, and coordinates are rounded to two decimals.

matplotlib is imported inside, so that importing this module costs nothing.
"""

from __future__ import annotations

import hashlib
import io
import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["colour", "hint", "new_axes", "new_figure", "short_number", "svg_text"]

_ROLES = (
    *("ink", "soft", "rule", "sheet", "real", "before", "padding", "held", "baseline", "bound", "inside", "deep"),
    *(f"shade{number}" for number in range(5)),
    *("page", "off", "white", "mark", "first", "second", "third"),
)
_HINT = "hint:"


def colour(role: str) -> str:
    """The colour to draw with where the page's colour of `role` is meant."""
    return f"#0102{_ROLES.index(role):02x}"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` by `height` units, without a background."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def new_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes that leave so many units free on each side of the figure: light grid, soft ticks, no box."""
    width, height = figure.get_size_inches() * 72
    axes = figure.add_axes((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))
    axes.set_facecolor("none")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(colour("soft"))
    axes.tick_params(labelsize=11.5, labelcolor=colour("soft"), color=colour("soft"), length=4, pad=4)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.set_axisbelow(True)
    return axes


def hint(words: str) -> str:
    """The identifier (`gid`) that gives an artist these words, shown where the pointer rests on it."""
    return _HINT + words


def short_number(value: float, position: int = 0) -> str:
    """1500 as 1.5k, 2000000 as 2M, 0.25 as 0.25; a formatter of ticks."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def svg_text(figure: Figure, label: str, style: str = "") -> str:
    """The picture as one `svg` element.

    Args:
        figure: of `new_figure`.
        label: what the picture shows, for those who cannot see it.
        style: CSS of a picture that stands alone; without it the element is for a page, which has the style.
    """
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gaudi-bert"}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    content = buffer.getvalue()
    content = content[content.index(">", content.index("<svg")) + 1 : content.rindex("</svg>")]
    width, height = figure.get_size_inches() * 72
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ' if style else ""
    head = f'<svg {namespaces}viewBox="0 0 {width:g} {height:g}" role="img" stroke-linejoin="round" '
    head += f'aria-label="{escape(label)}">'
    return head + (f"<style>{style}</style>" if style else "") + _for_a_page(content, label) + "</svg>"


def _for_a_page(content: str, label: str) -> str:
    content = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", content, flags=re.DOTALL)
    content = re.sub(r'<clipPath.*?</clipPath>| clip-path="[^"]*"|<defs>\s*</defs>', "", content, flags=re.DOTALL)
    content = re.sub(r'<path d="[^"]*" style="fill: none"/>| transform="rotate\(-0 [^"]*"', "", content)
    content = _without_identifiers(content, f"p{hashlib.sha256(label.encode()).hexdigest()[:6]}-")
    content = re.sub(r'<text style="([^"]*)"', lambda found: f"<text{_text_attributes(found[1])}", content)
    content = re.sub(r"#0102([0-9a-f]{2})", lambda found: f"var(--{_ROLES[int(found[1], 16)]})", content)
    content = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{round(float(found[0]), 2) + 0.0:g}", content)
    return re.sub(r"> ?<", "><", re.sub(r"\s+", " ", content)).strip()


def _without_identifiers(content: str, prefix: str) -> str:
    """Hints become titles; of the other identifiers those that are referred to stay, as the picture's own."""
    referred = set(re.findall(r'xlink:href="#([^"]*)"', content))

    def replaced(found: re.Match[str]) -> str:
        if found[2].startswith(_HINT):
            return f"<{found[1]}><title>{found[2].removeprefix(_HINT)}</title>"
        return f'<{found[1]} id="{prefix}{found[2]}"{found[3]}' if found[2] in referred else f"<{found[1]}{found[3]}"

    content = re.sub(r'<(\w+) id="([^"]*)"([^>]*>)', replaced, content)
    return content.replace('xlink:href="#', f'xlink:href="#{prefix}')


def _text_attributes(style: str) -> str:
    """Size and weight as attributes, which a page may overrule; the font is the page's; the rest stays a style."""
    size = re.search(r"\b([\d.]+)px", style)
    weight = re.search(r"font(?:-weight)?: ([1-9]00)\b", style)
    kept = [part.strip() for part in style.split(";") if not part.strip().startswith("font")]
    return (
        (f' font-size="{size[1]}"' if size else "")
        + (f' font-weight="{weight[1]}"' if weight else "")
        + (f' style="{"; ".join(kept)}"' if kept else "")
    )
