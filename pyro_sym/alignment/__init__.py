"""Draws moved to one representative of their orbit."""
