"""How to fit and sample."""
