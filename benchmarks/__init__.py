"""Benchmarks: what each part costs beside its peers, and how exact it is; see ``__main__.py``."""
