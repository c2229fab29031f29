"""Tensor functions recorded once, simplified, and compiled."""
