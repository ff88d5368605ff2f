"""Plots, as PNG or SVG. matplotlib is imported only when one is drawn."""
