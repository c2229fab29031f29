"""The log orbit average of a density: exact, sampled, and bounded."""
