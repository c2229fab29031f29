"""Any ``torch.nn.Module`` as a Pyro model: its parameters are the sites, under their own names."""

from pyro_sym.nn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroskedasticGaussian,
    Likelihood,
    Poisson,
)
from pyro_sym.nn.module import BayesianModule
from pyro_sym.nn.prediction import Prediction, Uncertainty
from pyro_sym.nn.priors import FanInPrior, IIDPrior, LayerwisePrior, Prior

__all__ = [
    "BayesianModule",
    "Bernoulli",
    "Categorical",
    "FanInPrior",
    "Gaussian",
    "HeteroskedasticGaussian",
    "IIDPrior",
    "LayerwisePrior",
    "Likelihood",
    "Poisson",
    "Prediction",
    "Prior",
    "Uncertainty",
]
