"""What Pyro calls observed: data, deterministic sites, and parameters that ``poutine.condition`` fixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.reparam import LocScaleReparam, SplitReparam
from torch import Tensor

from pyro_sym import AutoSymmetrized, Permutation, find_symmetry
from pyro_sym.errors import NoDensityError
from pyro_sym.model.conditioned_sites import fixed_parameters
from pyro_sym.model.program import Program, is_data, is_deterministic, traced
from tests.catalogue import normals

Y = torch.cat([torch.linspace(-4.0, -2.0, 6), torch.linspace(2.0, 4.0, 6)])


def mixture(y: Tensor | None = None, write: Callable[..., Any] = pyro.deterministic) -> None:
    """``write`` makes the deterministic site in the plate of the components."""
    spread = pyro.sample("spread", dist.Gamma(2.0, 2.0))
    with pyro.plate("component", 2):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0 * spread))
        sd = write("sd", pyro.sample("tau", dist.Gamma(2.0, 2.0)).rsqrt())
    with pyro.plate("data", 12):
        both = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(mu, sd))
        pyro.sample("y", both, obs=y)


def as_delta(name: str, value: Tensor) -> Any:
    return pyro.sample(name, dist.Delta(value))


def as_observed_delta(name: str, value: Tensor) -> Any:
    return pyro.sample(name, dist.Delta(value), obs=value)


WRITTEN = pytest.mark.parametrize("write", [pyro.deterministic, as_delta, as_observed_delta])


@WRITTEN
def test_deterministic_sites_are_neither_latent_nor_data(write: Callable[..., Any]) -> None:
    program = Program(mixture, (Y, write))
    assert list(program.latents) == ["spread", "mu", "tau"]
    nodes = program.trace(program.draw()[0]).nodes
    assert [name for name, node in nodes.items() if is_data(node) and name not in program.latents] == ["y"]
    assert is_deterministic(nodes["sd"]) and not is_deterministic(nodes["y"])


@WRITTEN
def test_components_with_a_deterministic_site_are_exchangeable(write: Callable[..., Any]) -> None:
    """Their plate was taken for one of data, or the site for a point mass that may move by itself."""
    assert str(find_symmetry(mixture, Y, write)) == "Permutation({'mu': -1, 'tau': -1})"


def test_reparametrised_components_are_exchangeable() -> None:
    model = poutine.reparam(mixture, {"mu": LocScaleReparam(0.0)})
    assert list(Program(model, (Y,)).latents) == ["spread", "mu_decentered", "tau"]
    assert str(find_symmetry(model, Y)) == "Permutation({'mu_decentered': -1, 'tau': -1})"


@pytest.mark.usefixtures("float64")
def test_a_density_in_a_delta_is_a_factor() -> None:
    """The program has the log joint of the same model written with ``pyro.factor``."""

    def model(as_factor: bool) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        if as_factor:
            pyro.factor("f", -z.square())
        else:
            pyro.sample("x", dist.Delta(z.exp(), log_density=-z.square()))

    values = {"z": torch.tensor(0.7)}
    assert torch.equal(Program(model, (False,)).log_joint(values), Program(model, (True,)).log_joint(values))

    split = poutine.reparam(normals({"v": (3,)}), {"v": SplitReparam([1, 2], -1)})
    parts = {"v_split_0": torch.tensor([0.3]), "v_split_1": torch.tensor([1.0, -2.0])}
    expected = dist.Normal(0.0, 1.0).log_prob(torch.tensor([0.3, 1.0, -2.0])).sum()
    assert torch.allclose(Program(split).log_joint(parts), expected, rtol=1e-12)


def test_conditioned_sites_are_data_if_their_density_depends_on_the_latent_ones() -> None:
    data, spread = {"y": Y}, {"spread": torch.tensor(1.0)}
    assert fixed_parameters(mixture, (Y,)) == frozenset()
    assert fixed_parameters(poutine.condition(mixture, data)) == frozenset()
    assert fixed_parameters(poutine.condition(mixture, data | spread)) == {"spread"}
    assert fixed_parameters(poutine.condition(poutine.condition(mixture, spread), data)) == {"spread"}
    inside = fixed_parameters(lambda: poutine.condition(mixture, spread)(Y))
    assert inside == {"spread"}
    # The control: mu says something about the spread that it is drawn with, unless that is fixed, too.
    mu = {"mu": torch.tensor([-3.0, 3.0])}
    assert fixed_parameters(poutine.condition(mixture, mu), (Y,)) == frozenset()
    assert fixed_parameters(poutine.condition(mixture, mu | spread), (Y,)) == {"mu", "spread"}


def test_parameters_from_a_trace_and_on_minibatches() -> None:
    def model() -> None:
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, subsample_size=3) as rows:
            offset = pyro.sample("offset", dist.Normal(torch.arange(12.0)[rows], 1.0))
            pyro.sample("y", dist.Normal(loc + offset, scale), obs=Y[rows])

    trace = poutine.trace(lambda: pyro.sample("scale", dist.HalfNormal(1.0))).get_trace()
    assert fixed_parameters(poutine.condition(model, trace)) == {"scale"}
    # Another minibatch at the second look would make data of the offsets, whose prior depends on the rows.
    fixed = poutine.condition(model, {"offset": torch.zeros(3)})
    assert fixed_parameters(fixed) == {"offset"}


@pytest.mark.parametrize(
    ("tau", "found"),
    [([2.0, 2.0], "Permutation({'mu': -1})"), ([2.0, 3.0], "Product()")],
)
def test_a_plate_with_a_fixed_parameter_may_be_exchangeable(tau: list[float], found: str) -> None:
    """The check decides: it is where the fixed values are the same for all components."""
    # Data that lie symmetrically about 0 would add a symmetry of their own: one sign for all means.
    model = poutine.condition(mixture, {"tau": torch.tensor(tau), "y": Y + 0.5})
    assert str(find_symmetry(model)) == found


def test_refusals_come_without_the_shapes_that_pyro_adds() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 12, subsample_size=3):
            pass

    with pytest.raises(ValueError, match=r"has no indices; pass a tensor [^\n]*$"):
        Program(model).trace({"w": torch.tensor(0.0)})
    # The control: where the model fails, the shapes help.
    with pytest.raises(RuntimeError, match="Trace Shapes"):
        traced(lambda: torch.zeros(2) @ torch.zeros(3), (), {})


def test_a_guide_may_have_deterministic_sites() -> None:
    def guide(y: Tensor, extra: Callable[[], Any]) -> None:
        extra()
        with pyro.plate("component", 2):
            pyro.sample("mu", dist.Normal(torch.tensor([-3.0, 3.0]), 0.5))

    def model(y: Tensor, extra: Callable[[], Any]) -> None:
        with pyro.plate("component", 2):
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("data", 12):
            pyro.sample(
                "y", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(mu, 1.0)), obs=y
            )

    losses = []
    for extra in (lambda: None, lambda: pyro.deterministic("sd", torch.ones(2))):
        pyro.set_rng_seed(0)
        symmetrised = AutoSymmetrized(guide, Permutation({"mu": -1}), model=model)
        losses.append(Trace_ELBO().loss(model, symmetrised, Y, extra))
    assert losses[0] == losses[1]
    # The control: a factor belongs to the density of the guide, and is refused.
    with pytest.raises(NoDensityError, match="a factor or an observation 'f'"):
        symmetrised(Y, lambda: pyro.factor("f", torch.tensor(1.0), has_rsample=True))
