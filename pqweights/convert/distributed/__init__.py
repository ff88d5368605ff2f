"""Rewrites on more than one machine: output files as tasks of Ray."""
