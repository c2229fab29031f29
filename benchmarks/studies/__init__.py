"""Studies: the experiments of the two papers made again, each by one command; see ``python -m benchmarks.studies --help``."""
