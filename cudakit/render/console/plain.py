"""ASCII instead of line-drawing characters, for terminals that show no others."""

from __future__ import annotations

# One character for one, so that columns stay aligned.
_ASCII = str.maketrans(
    {
        **dict.fromkeys("━", "="),
        **dict.fromkeys("─", "-"),
        **dict.fromkeys("│├└┤┼", "|"),
        **dict.fromkeys("█▉▊▋▌", "#"),
        **dict.fromkeys("▍▎▏", "-"),
        **dict.fromkeys("⣤⠶⠛", "#"),
        **dict.fromkeys("⣀⠤⠒⠉", "-"),
        **dict.fromkeys("⡀⠄⠂⠁·", "."),
        **dict(zip("✓✗▲→←…×±°µ", "+x^><~x~'u", strict=True)),
    }
)


def ascii_drawing(text: str) -> str:
    """Replace the line-drawing characters and symbols of reports by ASCII; other text stays."""
    return text.translate(_ASCII)
