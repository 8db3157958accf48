"""Pinned memory of the host, by the same engine with another upstream."""
