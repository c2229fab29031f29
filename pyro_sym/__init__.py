"""Symmetry-aware Bayesian inference for Pyro.

Models whose parameters can be relabelled (mixtures, HMMs, factor models, neural networks) have a posterior
with |G| copies of every mode. This package averages guides over the group, samples with tempered
stochastic-gradient MCMC, and exports draws to ArviZ aligned modulo the symmetry.
"""

from pyro_sym import diagnostics as diagnostics
from pyro_sym import nn as nn
from pyro_sym import testing as testing
from pyro_sym.alignment.by_allocations import align_allocations
from pyro_sym.alignment.by_order import align_by_order
from pyro_sym.alignment.by_values import align
from pyro_sym.alignment.result import Alignment
from pyro_sym.alignment.scales import normalise_scales
from pyro_sym.draws.open_run import Run, open_run
from pyro_sym.errors import DivergenceError, NoDensityError, SymmetryError
from pyro_sym.export.api import dataset, from_pyro, from_pyro_svi
from pyro_sym.export.component_probabilities import allocation_probabilities
from pyro_sym.export.likelihood import log_likelihood
from pyro_sym.guides.gain import SymmetryGain
from pyro_sym.guides.recorded_elbo import RecordedELBO
from pyro_sym.guides.symmetrized import AutoSymmetrized
from pyro_sym.guides.symmetrized_normal import AutoSymmetrizedNormal
from pyro_sym.model.potential import Potential
from pyro_sym.network.symmetry_of import NetworkSymmetry, symmetry_of
from pyro_sym.nn import BayesianModule
from pyro_sym.search.check import check_symmetry
from pyro_sym.search.find import find_symmetry
from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.preconditioners import Diagonal, PerSite, RMSprop
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.schedules import Constant, Cyclical, Polynomial
from pyro_sym.sgmcmc.thermometers import kinetic_band
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC, deep_ensemble
from pyro_sym.symmetry.base import FiniteGroup, Group, Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.orthogonal import Orthogonal
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.viewed import Viewed

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
    "FiniteGroup",
    "Group",
    "LeimkuhlerMatthews",
    "NetworkSymmetry",
    "NoDensityError",
    "Orthogonal",
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
