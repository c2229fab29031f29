"""How much the copies are worth: the log orbit average of a density."""
