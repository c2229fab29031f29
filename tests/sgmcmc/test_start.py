"""Where chains start: a bad start is told from a run that diverges, copies and flat sites are refused.

Covers also `sgmcmc.starting_points` and `sgmcmc.bad_start`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_median, init_to_sample
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc import bad_start, divergence
from pyro_sym.sgmcmc.overdamped import SGLD
from pyro_sym.sgmcmc.schedules import Cyclical
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC, deep_ensemble
from tests.catalogue import normal_mean, normals, quartic

pytestmark = pytest.mark.usefixtures("float64")


def run(kernel: Any, *args: Any, num_samples: int = 5, **options: Any) -> VectorizedMCMC:
    pyro.set_rng_seed(0)
    mcmc = VectorizedMCMC(kernel, num_samples, **{"warmup_steps": 0, "disable_progbar": True, **options})
    mcmc.run(*args)
    return mcmc


# --- a bad start, or a run that diverges --------------------------------------------------------------------


FAR = {"x": torch.tensor([[0.1, 0.2], [300.0, 1.0]])}


@pytest.mark.parametrize(("kind", "step_size"), [(BAOA, 0.05), (BAOA, 0.005), (SGHMC, 0.05), (SGLD, 0.01)])
def test_a_start_is_blamed_where_others_stay_finite(kind: Any, step_size: float) -> None:
    starts = {"x": FAR["x"].double()}
    with pytest.raises(DivergenceError, match=r"chain 1.*the start is to blame") as error:
        run(kind(quartic(2), step_size=step_size), num_samples=200, num_chains=2, initial_params=starts)
    message = str(error.value)
    assert "potential energy is 8.1e+09" in message and "site 'x' (= 300, 1)" in message
    assert "init_strategy=init_to_median" in message and "lower step_size" not in message
    cured = kind(quartic(2), step_size=step_size, init_strategy=init_to_median)
    run(cured, num_samples=200, num_chains=2)  # the cure of the message


def test_one_chain_and_one_temperature_each_are_tried_too() -> None:
    with pytest.raises(DivergenceError, match=r"^step \d+.*the start is to blame"):
        run(BAOA(quartic(2), step_size=0.05), initial_params={"x": FAR["x"].double()[1:]})
    kernel = BAOA(quartic(2), step_size=0.05, temperature=[0.0, 1.0])
    with pytest.raises(DivergenceError, match=r"chain 1.*the start is to blame"):
        run(kernel, num_chains=2, initial_params={"x": FAR["x"].double()})


narrow = normals({"x": ()}, 1e-3)


def test_a_step_size_too_large_is_still_the_step_size() -> None:
    """From every start, the one that is advised elsewhere included."""
    for strategy in (init_to_median, init_to_sample, init_to_feasible):
        with pytest.raises(DivergenceError, match="lower step_size") as error:
            run(BAOA(narrow, step_size=1.0, init_strategy=strategy), num_samples=300, num_chains=3)
        assert "start is to blame" not in str(error.value)


def test_no_start_is_blamed_long_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_start, "EARLY", 0)
    with pytest.raises(DivergenceError, match="lower step_size"):
        run(BAOA(quartic(2), step_size=0.05), num_chains=2, initial_params={"x": FAR["x"].double()})


def test_looking_for_the_cause_draws_no_random_numbers() -> None:
    states = []
    for early in (divergence.EARLY, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bad_start, "EARLY", early)
            with pytest.raises(DivergenceError):
                run(BAOA(quartic(2), step_size=0.05), num_chains=2, initial_params={"x": FAR["x"].double()})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# --- copies -------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 12, dtype=torch.float64)


def regression(x: Tensor, y: Tensor, subsample_size: int | None = None) -> None:
    slope = pyro.sample("slope", dist.Normal(torch.tensor(0.0).double(), 1.0))
    with pyro.plate("rows", 12, subsample_size=subsample_size or len(x)) as rows:
        rows = rows if len(x) == 12 else slice(None)
        pyro.sample("y", dist.Normal(slope * x[rows], 1.0), obs=y[rows])


BATCHES = list(zip(X.split(4), (2 * X).split(4), strict=True))
EQUAL = torch.ones(4, dtype=torch.float64)
TWO_EQUAL = torch.tensor([0.5, 1.0, 0.7, 1.0], dtype=torch.float64)


def started(starts: Tensor, *args: Any, shared: bool = False, **options: Any) -> VectorizedMCMC:
    kernel = SGLD(regression, step_size=0.01, shared_minibatch=shared, **options)
    return run(kernel, *args, num_chains=len(starts), num_samples=20, initial_params={"slope": starts})


@pytest.mark.parametrize(
    ("starts", "pair"), [(EQUAL, "chains 0 and 1"), (TWO_EQUAL, "chains 1 and 3")], ids=["all", "two"]
)
@pytest.mark.parametrize(
    ("args", "options", "why"),
    [
        ((), {"batches": BATCHES}, "a loader that all chains share"),
        ((X, 2 * X), {}, "each step sees all the data"),
        ((X, 2 * X, 5), {"shared": True}, "shared_minibatch=True"),
    ],
)
def test_copies_are_refused(starts: Tensor, pair: str, args: Any, options: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"{pair} start at the same point.*{why}"):
        started(starts, *args, temperature=0.0, **options)
    # the controls: noise, starts of their own, rows of their own
    for control in (
        started(starts, *args, temperature=1.0, **options),
        started(starts + torch.arange(4) / 8, *args, temperature=0.0, **options),
        started(starts, X, 2 * X, 5, temperature=0.0),
    ):
        assert len(control.get_samples(group_by_chain=True)["slope"][:, -1].unique()) == 4


def test_only_cold_chains_of_a_ladder_can_be_copies() -> None:
    with pytest.raises(ValueError, match="chains 0 and 2 start at the same point"):
        started(EQUAL, X, 2 * X, temperature=[0.0, 1.0, 0.0, 1.0])
    ladder = started(EQUAL, X, 2 * X, temperature=[0.0, 0.5, 1.0, 1.0])
    assert len(ladder.get_samples(group_by_chain=True)["slope"][:, -1].unique()) == 4


def test_a_cold_phase_makes_no_copies_but_a_schedule_that_stays_cold_does() -> None:
    cycle = Cyclical(0.01, 10, relaxation=1)
    warm = started(EQUAL, X, 2 * X, temperature=cycle.temperature)
    assert len(warm.get_samples(group_by_chain=True)["slope"][:, -1].unique()) == 4
    with pytest.raises(ValueError, match="copies of each other"):
        started(EQUAL, X, 2 * X, temperature=lambda step: 0.0)


def test_a_deep_ensemble_has_no_copies() -> None:
    settings: dict[str, Any] = {"num_members": 4, "num_steps": 9, "lr": 0.1, "num_data": 12}
    with pytest.raises(ValueError, match="chains 0 and 1 start at the same point"):
        deep_ensemble(regression, batches=BATCHES, init_strategy=init_to_feasible, **settings)
    pyro.set_rng_seed(0)
    starts = {"slope": torch.randn(4, dtype=torch.float64)}
    for options in ({}, {"init_strategy": init_to_sample}, {"initial_params": starts}):
        members = deep_ensemble(regression, batches=BATCHES, **options, **settings).get_samples()["slope"]
        assert len(members.unique()) == 4


def test_equal_draws_among_many_members_are_chance() -> None:
    """In a coarse law; a strategy that draws one point for half of the members is refused."""

    def coarse(site: Any) -> Tensor:
        return (torch.randint(30_000, ()) / 30_000).double()

    def coarser(site: Any) -> Tensor:
        return torch.randint(2, ()).double()

    settings: dict[str, Any] = {"num_members": 400, "num_steps": 1, "lr": 0.1, "num_data": 12}
    members = deep_ensemble(regression, X, 2 * X, init_strategy=coarse, **settings).get_samples()["slope"]
    assert len(members.unique()) < 400
    with pytest.raises(ValueError, match="copies of each other"):
        deep_ensemble(regression, X, 2 * X, init_strategy=coarser, **settings)


# --- sites without a density, or without elements -----------------------------------------------------------


def masked() -> None:
    pyro.sample("flat", dist.Normal(0.0, 1.0).mask(False))


def masked_by_tensor() -> None:
    pyro.sample("b", dist.Normal(0.0, 1.0))
    with poutine.mask(mask=torch.tensor(False)):
        pyro.sample("flat", dist.Normal(torch.zeros(3), 1.0).to_event(1))


def improper() -> None:
    pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.sample("flat", dist.ImproperUniform(constraints.real, (), ()))


def improper_positive() -> None:
    pyro.sample("flat", dist.ImproperUniform(constraints.positive, (), ()))


def detached() -> None:
    flat = pyro.sample("flat", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    pyro.sample("y", dist.Normal(flat.detach(), 1.0).to_event(1), obs=torch.zeros(2))


@pytest.mark.parametrize("model", [masked, masked_by_tensor, improper, improper_positive, detached])
def test_a_density_that_does_not_depend_on_a_site_is_refused(model: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="the log density does not depend on site 'flat'"):
        run(BAOA(model, step_size=0.1), num_chains=2)
    with pytest.raises(ValueError, match="the log density does not depend on site 'flat'"):
        pyro.infer.MCMC(BAOA(model, step_size=0.1), 5, warmup_steps=0, disable_progbar=True).run()


def bounded() -> None:
    """Uniform on bounded supports, proper although no gradient of the log joint shows them."""
    pyro.sample("a", dist.Uniform(0.0, 2.0))
    pyro.sample("b", dist.ImproperUniform(constraints.simplex, (), (3,)))
    pyro.sample("c", dist.Uniform(torch.zeros(2), 1e6).to_event(1))


def branching() -> None:
    """At the first point looked at the density does not depend on b; elsewhere it does."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.ImproperUniform(constraints.real, (), ()))
    if a > 0.0:
        pyro.factor("b_counts", -b.square())


def half_dead() -> None:
    """A flat prior, and a likelihood that is flat for half of the values."""
    b = pyro.sample("b", dist.ImproperUniform(constraints.real, (), ()))
    pyro.sample("y", dist.Normal(b.relu(), 1.0), obs=torch.tensor(1.0))


@pytest.mark.parametrize("model", [bounded, branching, half_dead])
def test_sites_that_count_somewhere_are_not_refused(model: Callable[[], None]) -> None:
    kernel = BAOA(model, step_size=0.01, jit="eager", init_strategy=init_to_feasible)
    assert run(kernel, num_samples=2).get_samples()


def test_a_likelihood_of_other_rows_is_not_taken_for_a_flat_density() -> None:
    """A minibatch of 1 of 1,000 rows sees nothing of a site that one row is about."""

    def model(y: Tensor) -> None:
        b = pyro.sample("b", dist.ImproperUniform(constraints.real, (), ()))
        pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 1000, subsample_size=1) as rows:
            pyro.sample("y", dist.Normal(torch.where(rows == 7, b, 0.0), 1.0), obs=y[rows])

    assert run(BAOA(model, step_size=0.01), torch.zeros(1000), num_samples=2).get_samples()


def test_a_constant_potential_has_a_zero_gradient() -> None:
    energy, gradient = Potential(masked).value_and_grad(torch.tensor([3.0]))
    assert energy == 0 and torch.equal(gradient, torch.zeros(1))


def test_a_site_without_elements_is_named() -> None:
    def model(count: int) -> None:
        pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("effect", dist.Normal(torch.zeros(count), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"latent site 'effect' has no elements \(its shape is \(0,\)\)"):
        run(BAOA(model, step_size=0.1), 0)
    assert run(BAOA(model, step_size=0.1), 1).get_samples()["effect"].shape == (5, 1)


# --- data that are not finite under a mask ------------------------------------------------------------------

Y = torch.tensor([1.0, math.nan, 2.0])


def by_handler(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("n", 3), poutine.mask(mask=~Y.isnan()):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def by_distribution(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("n", 3):
        pyro.sample("y", dist.Normal(w, 1.0).mask(~Y.isnan()), obs=y)


def by_where(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    each = dist.Normal(w, 1.0, validate_args=False).log_prob(y)
    pyro.factor("y", torch.where(Y.isnan(), 0.0, each).sum())


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("given", [None, {"w": torch.zeros(2)}], ids=["drawn", "given"])
@pytest.mark.parametrize("model", [by_handler, by_distribution, by_where])
def test_nan_under_a_mask_is_named_as_the_cause(model: Any, given: Any, validate: bool) -> None:
    where = "" if model is by_where else "the data of site 'y' are not finite there"
    with (
        pyro.validation_enabled(validate),
        pytest.raises(ValueError, match=rf"gradient at site 'w'.*{where}.*nan_to_num"),
    ):
        run(BAOA(model, step_size=0.1), Y, num_chains=2, initial_params=given)
    filled = run(BAOA(model, step_size=0.1), Y.nan_to_num(), num_chains=2, initial_params=given)
    assert filled.get_samples()["w"].isfinite().all()  # the cure of the message


def test_nan_without_a_mask_is_not_blamed_on_one() -> None:
    with (
        pyro.validation_enabled(False),
        pytest.raises(ValueError, match="site 'y'") as error,
    ):
        run(BAOA(normal_mean, step_size=0.1), Y)
    assert "mask" not in str(error.value)


# --- starts that are given ----------------------------------------------------------------------------------


def on_supports() -> None:
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    pyro.sample("share", dist.Uniform(torch.zeros(2), torch.tensor([1.0, 5.0])).to_event(1))
    pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    pyro.sample("chol", dist.LKJCholesky(3, 1.0))


def inside() -> dict[str, Tensor]:
    return {
        "scale": torch.tensor([1e-6, 1e6]),
        "share": torch.tensor([[0.5, 4.9], [0.1, 0.2]]),
        "weights": torch.tensor([[0.2, 0.3, 0.5], [1e-6, 1e-6, 1 - 2e-6]]),
        "chol": dist.LKJCholesky(3, 1.0).sample((2,)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_starts_inside_their_supports_are_taken(dtype: torch.dtype) -> None:
    given = {name: value.to(dtype) for name, value in inside().items()}
    mcmc = run(SGLD(on_supports, step_size=1e-12), num_samples=1, num_chains=2, initial_values=given)
    for name, value in mcmc.get_samples(group_by_chain=True).items():
        assert value.dtype == torch.float64  # the model's
        torch.testing.assert_close(value[:, 0], given[name].double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", -1.0, r"chain 1 \(= -1\.0\) are not inside the support of the site, GreaterThan"),
        ("scale", 0.0, r"chain 1 \(= 0\.0\) are not inside"),
        ("scale", math.nan, r"chain 1 \(= nan\) are not inside"),
        # Transforms of bounded supports clamp, and would start at another point without a word.
        ("share", [0.5, 7.0], r"chain 1 \(= \[0\.5, 7\.0\]\) are not inside"),
        ("weights", [1.0, 1.0, 1.0], r"chain 1 \(= \[1\.0, 1\.0, 1\.0\]\) are not inside .* Simplex"),
        ("chol", [[2.0, 0.0, 0.0]] * 3, r"chain 1 are not inside .* CorrCholesky"),
    ],
)
def test_starts_outside_of_their_supports_are_refused(name: str, value: Any, message: str) -> None:
    given = inside()
    given[name][1] = torch.tensor(value)
    with pytest.raises(ValueError, match=rf"initial_values of site {name!r} in {message}"):
        run(SGLD(on_supports, step_size=1e-9), num_chains=2, initial_values=given)


@pytest.mark.parametrize("argument", ["initial_values", "initial_params"])
def test_starts_may_be_arrays_lists_and_integers(argument: str) -> None:
    def last(given: Any) -> Tensor:
        options: dict[str, Any] = {argument: {"x": given}}
        mcmc = run(SGLD(narrow, step_size=1e-9), num_chains=2, **options)
        return mcmc.get_samples(group_by_chain=True)["x"]

    expected = last(torch.zeros(2))
    for given in ([0.0, 0.0], np.zeros(2), np.zeros(2, dtype=np.int64), torch.zeros(2, dtype=torch.long)):
        assert torch.equal(last(given), expected)
    with pytest.raises(TypeError, match=f"{argument} of site 'x' is a str that is no tensor"):
        last("zero")
    whole: dict[str, Any] = {argument: torch.zeros(2)}
    with pytest.raises(TypeError, match=f"{argument} is a Tensor; pass a dict"):
        run(SGLD(narrow, step_size=1e-9), num_chains=2, **whole)


def test_what_pyro_says_of_a_start_is_one_line_of_ours() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor([1.0, math.nan]))

    with pytest.raises(ValueError, match=r"probability of site 'y'.*invalid values.*check the data") as error:
        run(BAOA(model, step_size=0.1))
    assert "Trace Shapes" not in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"at the initial_params of chain 1; .*value of site 'w'") as error:
        run(BAOA(narrow_w, step_size=0.1), num_chains=2, initial_params={"w": torch.tensor([0.0, math.nan])})
    assert "Trace Shapes" not in str(error.value)


def narrow_w() -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(0.0, w.exp()), obs=torch.tensor(1.0))


def test_a_draw_that_pyro_refuses_is_drawn_anew() -> None:
    """Validation refuses a scale of 0, to which draws underflow: the prototype's, and a chain's."""
    tries: list[float] = []

    def strategy(site: Any) -> Tensor:
        tries.append(0.0 if len(tries) in (2, 4) else -1e4)
        return torch.tensor(tries[-1])

    with pyro.validation_enabled(True):
        run(BAOA(narrow_w, step_size=0.1, init_strategy=strategy))
        assert tries == [-1e4, -1e4, 0.0, -1e4, 0.0]
        with pytest.raises(ValueError, match="Expected parameter scale"):  # the model's own fault, always
            run(BAOA(narrow_w, step_size=0.1, init_strategy=lambda site: torch.tensor(-1e4)))
