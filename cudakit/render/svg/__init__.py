"""SVG for pages: coordinates in percent and pixels, so that text keeps its size."""
