"""Measurements of a loaded model: speed, quality, limits, and checks that it computes correctly."""
