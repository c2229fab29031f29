"""Guides averaged over a group, and the ELBO that is recorded once."""
