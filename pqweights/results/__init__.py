"""What is done with a finished folder: inspect it, verify it, and read the figures recorded beside it."""
