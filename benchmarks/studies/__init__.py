"""Studies: the experiments of the two papers made again, each by one command; see ``__main__.py``."""
