"""Symmetries of a model: checked, and found."""
