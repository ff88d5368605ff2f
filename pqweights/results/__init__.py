"""What is done with a finished folder: inspect it, verify it, and read the figures that lie beside it."""
