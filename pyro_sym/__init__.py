"""Symmetry-aware Bayesian inference for Pyro.

Models whose parameters can be relabelled (mixtures, HMMs, factor models, neural networks) have a posterior
with |G| copies of every mode. This package averages guides over the group, samples with tempered
stochastic-gradient MCMC, and exports draws to ArviZ aligned modulo the symmetry.
"""

from pyro_sym import diagnostics as diagnostics
from pyro_sym import nn as nn
from pyro_sym import testing as testing
from pyro_sym.errors import DivergenceError, NoDensityError, SymmetryError
from pyro_sym.export import allocation_probabilities, dataset, from_pyro, from_pyro_svi, log_likelihood
from pyro_sym.infer.autoguide import AutoSymmetrized, AutoSymmetrizedNormal, SymmetryGain
from pyro_sym.infer.elbo import RecordedELBO
from pyro_sym.infer.kernels import BAOA, SGHMC, SGLD, SGNHT, LeimkuhlerMatthews
from pyro_sym.infer.open_run import Run, open_run
from pyro_sym.infer.potential import Potential
from pyro_sym.infer.preconditioners import Diagonal, PerSite, RMSprop
from pyro_sym.infer.schedules import Constant, Cyclical, Polynomial
from pyro_sym.infer.skeleton import StochasticGradientKernel
from pyro_sym.infer.temperature import kinetic_band
from pyro_sym.infer.vectorized import VectorizedMCMC, deep_ensemble
from pyro_sym.nn import BayesianModule
from pyro_sym.symmetry import (
    Alignment,
    NetworkSymmetry,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    Viewed,
    align,
    align_allocations,
    align_by_order,
    check_symmetry,
    find_symmetry,
    normalise_scales,
    symmetry_of,
)

__all__ = [
    "BAOA",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Alignment",
    "AutoSymmetrized",
    "AutoSymmetrizedNormal",
    "BayesianModule",
    "Constant",
    "Cyclical",
    "Diagonal",
    "DivergenceError",
    "LeimkuhlerMatthews",
    "NetworkSymmetry",
    "NoDensityError",
    "PerSite",
    "Permutation",
    "Polynomial",
    "Potential",
    "Product",
    "RMSprop",
    "RecordedELBO",
    "Run",
    "SignFlip",
    "StochasticGradientKernel",
    "Symmetry",
    "SymmetryError",
    "SymmetryGain",
    "VectorizedMCMC",
    "Viewed",
    "align",
    "align_allocations",
    "align_by_order",
    "allocation_probabilities",
    "check_symmetry",
    "dataset",
    "deep_ensemble",
    "find_symmetry",
    "from_pyro",
    "from_pyro_svi",
    "kinetic_band",
    "log_likelihood",
    "normalise_scales",
    "open_run",
    "symmetry_of",
]
