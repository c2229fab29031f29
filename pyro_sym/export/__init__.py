"""Draws to ArviZ, and what is computed from draws on the way."""
