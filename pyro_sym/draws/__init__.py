"""Where the draws of a run are kept, in memory and on disk."""
