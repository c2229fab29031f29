"""Symmetry-aware Bayesian inference for Pyro.

Models whose parameters can be relabelled (mixtures, HMMs, factor models, neural networks) have a posterior with |G| copies
of every mode. This package averages guides over the group, samples with tempered stochastic-gradient MCMC, and exports
draws to ArviZ aligned modulo the symmetry.
"""

from pyro_sym.errors import NoDensityError, SymmetryError
from pyro_sym.infer.autoguide import AutoSymmetrized, AutoSymmetrizedNormal, SymmetryGain
from pyro_sym.symmetry import Permutation, Product, SignFlip, Symmetry, check_symmetry

__all__ = [
    "AutoSymmetrized",
    "AutoSymmetrizedNormal",
    "NoDensityError",
    "Permutation",
    "Product",
    "SignFlip",
    "Symmetry",
    "SymmetryError",
    "SymmetryGain",
    "check_symmetry",
]
