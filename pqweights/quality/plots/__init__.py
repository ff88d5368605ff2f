"""Plots as PNG or SVG files. matplotlib is imported only when one is drawn."""
