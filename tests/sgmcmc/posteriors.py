"""Seven posteriors of posteriordb as Pyro models, with the statistics of their reference draws.

The models have the priors that posteriordb's Stan programs have; a parameter without one is flat on its
support. ``low_dim_gauss_mix`` alone is sampled in another form, without the ordering of its means, so that it
is symmetric under swapping its components; draws relabelled by ``mu[1] < mu[2]`` have the reference law.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.ops.stats import effective_sample_size
from torch import Tensor

DATA = Path(os.environ.get("PYRO_SYM_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))

Draws = Mapping[str, Tensor]


@dataclass(frozen=True)
class Posterior:
    """A model with its data, and where its reference draws are.

    Attributes:
        model: called with ``args``; regressions also take ``subsample_size``.
        args: tensors.
        draws: the stem of the file of reference draws.
        quantities: from draws of the model's sites to what the reference draws are of.
    """

    model: Callable[..., Any]
    args: tuple[Tensor, ...]
    draws: str
    quantities: Callable[[Draws], Draws] = field(default=dict)

    def reference(self) -> dict[str, Tensor]:
        """Reference draws, ten chains of 1,000, by scalar component."""
        chains = _read(f"{self.draws}.draws")
        return {name: torch.tensor([chain[name] for chain in chains]).double() for name in chains[0]}

    def components(self, samples: Draws) -> dict[str, Tensor]:
        """Draws grouped by chain, as scalar components with the names of the reference's."""
        scalars: dict[str, Tensor] = {}
        for name, value in self.quantities(samples).items():
            if value.dim() == 2:
                scalars[name] = value
            else:
                scalars |= {f"{name}[{i + 1}]": part for i, part in enumerate(value.unbind(-1))}
        return scalars

    def compare(self, samples: Draws) -> list[Agreement]:
        """Set draws grouped by chain beside the reference draws, component by component."""
        ours, theirs = self.components(samples), self.reference()
        return [Agreement.of(name, ours[name].double(), theirs[name]) for name in theirs]


@dataclass(frozen=True)
class Agreement:
    """One component of draws against the reference draws.

    Attributes:
        name: of the component.
        mean_error: difference of the means, in reference sd.
        sd_ratio: our sd over the reference's.
        n_eff: effective sample size of our draws.
    """

    name: str
    mean_error: float
    sd_ratio: float
    n_eff: float

    @staticmethod
    def of(name: str, ours: Tensor, theirs: Tensor) -> Agreement:
        """Compare draws of shape ``(chains, draws)``."""
        sd = theirs.std()
        return Agreement(
            name,
            float((ours.mean() - theirs.mean()) / sd),
            float(ours.std() / sd),
            float(effective_sample_size(ours, chain_dim=0, sample_dim=1)),
        )


def worst(agreements: list[Agreement]) -> tuple[Agreement, Agreement]:
    """The components whose mean, and whose sd, is farthest off."""
    return (
        max(agreements, key=lambda a: abs(a.mean_error)),
        max(agreements, key=lambda a: abs(a.sd_ratio - 1)),
    )


def load(name: str) -> Posterior:
    """One of :data:`NAMES`, in the default dtype."""
    return _LOADERS[name]()


def _read(stem: str) -> Any:
    with zipfile.ZipFile(DATA / "posteriordb" / f"{stem}.json.zip") as archive:
        return json.loads(archive.read(archive.namelist()[0]))


def read_data(stem: str) -> dict[str, Tensor]:
    """The data of a posterior, by name, in the default dtype."""
    default = torch.get_default_dtype()
    return {name: torch.tensor(value, dtype=default) for name, value in _read(f"{stem}.data").items()}


# --- linear regressions -------------------------------------------------------------------------------------


def flat(size: int) -> dist.Distribution:
    """The improper flat density on vectors."""
    return dist.ImproperUniform(constraints.real_vector, (), (size,))


def flat_positive() -> dist.Distribution:
    """The improper flat density on positive numbers."""
    return dist.ImproperUniform(constraints.positive, (), ())


def _regression(
    stem: str, draws: str, x: Tensor, y: Tensor, beta_prior: dist.Distribution, sigma_prior: dist.Distribution
) -> Posterior:
    def model(x: Tensor, y: Tensor, subsample_size: int | None = None) -> None:
        beta = pyro.sample("beta", beta_prior)
        sigma = pyro.sample("sigma", sigma_prior)
        with pyro.plate("rows", len(y), subsample_size=subsample_size) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ beta, sigma), obs=y[rows])

    return Posterior(model, (x, y), f"{stem}-{draws}")


def _kidscore_momiq() -> Posterior:
    data = read_data("kidiq")
    x = torch.stack([torch.ones_like(data["mom_iq"]), data["mom_iq"]], -1)
    return _regression(
        "kidiq", "kidscore_momiq", x, data["kid_score"], flat(2), dist.HalfCauchy(torch.tensor(2.5))
    )


def _logearn_interaction_z() -> Posterior:
    data = read_data("earnings")
    z, male = (data["height"] - data["height"].mean()) / data["height"].std(), data["male"]
    x = torch.stack([torch.ones_like(z), z, male, z * male], -1)
    return _regression("earnings", "logearn_interaction_z", x, data["earn"].log(), flat(4), flat_positive())


def _blr() -> Posterior:
    data = read_data("sblrc")
    return _regression(
        "sblrc",
        "blr",
        data["X"],
        data["y"],
        dist.Normal(torch.zeros(5), 10.0).to_event(1),
        dist.HalfNormal(torch.tensor(10.0)),
    )


def _nes() -> Posterior:
    data = read_data("nes2000")
    ages = [(data["age_discrete"] == group).to(data["income"]) for group in (2, 3, 4)]
    columns = [data["real_ideo"], data["race_adj"], *ages, data["educ1"], data["gender"], data["income"]]
    x = torch.stack([torch.ones_like(columns[0]), *columns], -1)
    return _regression("nes2000", "nes", x, data["partyid7"], flat(9), flat_positive())


# --- the others ---------------------------------------------------------------------------------------------


def _eight_schools_noncentered() -> Posterior:
    data = read_data("eight_schools")

    def model(y: Tensor, sigma: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
        theta_trans = pyro.sample("theta_trans", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("schools", len(y)):
            pyro.sample("y", dist.Normal(theta_trans * tau + mu, sigma), obs=y)

    def quantities(samples: Draws) -> Draws:
        mu, tau = samples["mu"], samples["tau"]
        return {
            "theta": samples["theta_trans"] * tau.unsqueeze(-1) + mu.unsqueeze(-1),
            "mu": mu,
            "tau": tau,
        }

    return Posterior(model, (data["y"], data["sigma"]), "eight_schools-eight_schools_noncentered", quantities)


def _hmm_example() -> Posterior:
    def model(y: Tensor) -> None:
        theta1 = pyro.sample("theta1", dist.Dirichlet(torch.ones(2)))
        theta2 = pyro.sample("theta2", dist.Dirichlet(torch.ones(2)))
        mu = pyro.sample("mu", dist.ImproperUniform(constraints.positive_ordered_vector, (), (2,)))
        prior = dist.Normal(torch.tensor([3.0, 10.0]), 1.0).log_prob(mu).sum()
        transition = torch.stack([theta1, theta2]).log()
        emission = dist.Normal(mu, 1.0).log_prob(y.unsqueeze(-1))  # shape: (times, states)
        # The first state has equal weights; each later time is a matrix from the state before.
        steps = _product(transition + emission[1:].unsqueeze(-2))
        likelihood = (emission[0].unsqueeze(-1) + steps).flatten().logsumexp(0)
        pyro.factor("prior_and_likelihood", prior + likelihood)

    return Posterior(model, (read_data("hmm_example")["y"],), "hmm_example-hmm_example")


def _product(matrices: Tensor) -> Tensor:
    """The product of matrices ``(n, k, k)`` of log weights, in order, by halves."""
    while len(matrices) > 1:
        left, right = matrices[:-1:2], matrices[1::2]
        pairs = (left.unsqueeze(-1) + right.unsqueeze(-3)).logsumexp(-2)
        matrices = torch.cat([pairs, matrices[2 * len(pairs) :]])
    return matrices[0]


def _low_dim_gauss_mix() -> Posterior:
    def model(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0 * torch.ones(2)).to_event(1))
        theta = pyro.sample("theta", dist.Beta(torch.tensor(5.0), 5.0))
        weights = torch.stack([theta, 1 - theta])
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mu, sigma))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", mixture, obs=y)

    def in_order(samples: Draws) -> Draws:
        order = samples["mu"].argsort(-1)
        swapped = order[..., 0] == 1
        return {
            "mu": samples["mu"].gather(-1, order),
            "sigma": samples["sigma"].gather(-1, order),
            "theta": torch.where(swapped, 1 - samples["theta"], samples["theta"]),
        }

    return Posterior(
        model, (read_data("low_dim_gauss_mix")["y"],), "low_dim_gauss_mix-low_dim_gauss_mix", in_order
    )


_LOADERS: dict[str, Callable[[], Posterior]] = {
    "eight_schools_noncentered": _eight_schools_noncentered,
    "kidscore_momiq": _kidscore_momiq,
    "logearn_interaction_z": _logearn_interaction_z,
    "sblrc-blr": _blr,
    "nes2000-nes": _nes,
    "hmm_example": _hmm_example,
    "low_dim_gauss_mix": _low_dim_gauss_mix,
}
NAMES = tuple(_LOADERS)
