"""Stochastic-gradient MCMC: kernels, chains, and the two drivers."""
