"""The symmetries of a neural network, read off its graph."""
