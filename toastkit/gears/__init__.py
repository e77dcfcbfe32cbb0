"""Gears: the precision of modules, and the entropy that it follows (paper 003)."""
