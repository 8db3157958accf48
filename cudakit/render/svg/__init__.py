"""Pictures of a page as SVG: coordinates in percent and pixels, so that text keeps its size."""
