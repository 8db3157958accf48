"""SVG for pages, with coordinates in percent and pixels, so that text does not scale."""
