"""Scales, masks and local latents in guides: what an average leaves as it is, and that it gives a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import (
    ELBO,
    SVI,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoGuideList, AutoMultivariateNormal, AutoNormal, AutoNormalMessenger
from pyro.optim import Adam
from torch import Tensor

from pyro_sym import AutoSymmetrized, NoDensityError, Permutation, Product, SymmetryError, find_symmetry
from pyro_sym.guides.average import OneBlock
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

Program = Callable[..., Any]
Y = torch.tensor([-2.2, -1.7, -1.9, 1.6, 2.1, 2.4], dtype=torch.float64)
PRIOR_SD = 2.0
SWAP = Permutation({"locs": -1})
EVEN = torch.tensor([[True], [False]])  # of two features by two components: the same for both components


def model(prior: float = 1.0, likelihood: float = 1.0, features: bool = False, mean: float = 0.0) -> None:
    """Two components; features that no datum depends on, of which the second row may be masked."""
    with poutine.scale(scale=prior), pyro.plate("components", 2, dim=-1):
        locs = pyro.sample("locs", dist.Normal(torch.tensor([-mean, mean]), PRIOR_SD))
        if features:
            with pyro.plate("features", 2, dim=-2), poutine.mask(mask=EVEN):
                pyro.sample("w", dist.Normal(0.0, 1.0))
    with poutine.scale(scale=likelihood), pyro.plate("data", len(Y), dim=-1):
        components = dist.Normal(locs.unsqueeze(-2), 1.0)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), components), obs=Y)


def guide(scale: float = 1.0, features: bool = False, sharpness: float = 1.0) -> None:
    """Near the posterior of the likelihood to the power of the sharpness, in one of its two modes."""
    precision = PRIOR_SD**-2 + 3 * sharpness
    means = sharpness * torch.stack([Y[:3].sum(), Y[3:].sum()]) / precision
    with poutine.scale(scale=scale), pyro.plate("components", 2, dim=-1):
        pyro.sample("locs", dist.Normal(means, precision**-0.5))
        if features:
            with pyro.plate("features", 2, dim=-2), poutine.mask(mask=EVEN):
                pyro.sample("w", dist.Normal(torch.tensor([0.5, -0.5]), 0.8))


def log_evidence(power: float, mean: float = 0.0) -> float:
    """Of the model with its likelihood to a power, on a grid of both locations."""
    grid = torch.linspace(-9.0, 9.0, 901)
    at = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)
    total = dist.Normal(torch.tensor([-mean, mean]), PRIOR_SD).log_prob(at).sum(-1)
    for y in Y:
        total = total + power * (dist.Normal(at, 1.0).log_prob(y).logsumexp(-1) - math.log(2.0))
    return float(total.flatten().logsumexp(0)) + 2 * math.log(float(grid[1] - grid[0]))


def elbo_of(program: Program, symmetrised: Program, vectorise: bool = True) -> tuple[float, float]:
    """Mean and standard error of the ELBO of 60 times 50 particles, or 60 times one."""
    count = 50 if vectorise else 1
    elbo = Trace_ELBO(num_particles=count, vectorize_particles=vectorise, max_plate_nesting=2)
    with torch.no_grad():
        values = torch.tensor([-elbo.loss(program, symmetrised) for _ in range(60)])
    return float(values.mean()), float(values.std()) / math.sqrt(60)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    # model, guide, the power of the likelihood whose evidence bounds the ELBO, and by which factor
    "plain": ({}, {}, 1.0, 1.0),
    "likelihood to a power": ({"likelihood": 0.5}, {"sharpness": 0.5}, 0.5, 1.0),
    "both scaled": ({"prior": 0.3, "likelihood": 0.3}, {"scale": 0.3}, 1.0, 0.3),
    "annealed": ({"prior": 0.5}, {"scale": 0.5, "sharpness": 2.0}, 2.0, 0.5),
    "masked": ({"features": True}, {"features": True}, 1.0, 1.0),
    "masked and annealed": (
        {"features": True, "prior": 0.5},
        {"features": True, "scale": 0.5, "sharpness": 2.0},
        2.0,
        0.5,
    ),
}


@pytest.mark.parametrize("estimator", ["exact", "importance", "uniform"])
@pytest.mark.parametrize("case", CASES)
def test_the_elbo_stays_below_the_log_evidence(case: str, estimator: Any) -> None:
    """With a scale s inside of the guide and on the prior, the bound is s log of the integral of the prior
    times the likelihood to the power 1 / s."""
    of_model, of_guide, power, factor = CASES[case]
    program = partial(model, **of_model)
    moved = {"locs": -1, "w": -1} if of_model.get("features") else {"locs": -1}
    average = AutoSymmetrized(
        partial(guide, **of_guide), Permutation(moved), model=program, estimator=estimator
    )
    bound = factor * log_evidence(power)
    value, error = elbo_of(program, average, vectorise=False)
    assert value <= bound + Z_LIMIT * error
    value, error = elbo_of(program, average)
    assert value <= bound + Z_LIMIT * error
    assert value > bound - 0.5 + Z_LIMIT * error, "the case is tight enough for the controls below"


def test_what_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: a group that the model does not have, and an average with the wrong scale."""
    lopsided = partial(model, mean=1.5)
    with pytest.warns(UserWarning, match="is not checked"):
        value, error = elbo_of(lopsided, AutoSymmetrized(guide, SWAP))
    assert value > log_evidence(1.0, mean=1.5) + Z_LIMIT * error
    of_model, of_guide, power, factor = CASES["annealed"]
    program = partial(model, **of_model)
    average = AutoSymmetrized(partial(guide, **of_guide), SWAP, model=program)
    monkeypatch.setattr("pyro_sym.guides.symmetrized.common_scale", lambda sites, moved: 1.0)
    monkeypatch.setattr("pyro_sym.guides.symmetrized.sites_apart", lambda sites, scale: frozenset())
    value, error = elbo_of(program, average)
    assert value > factor * log_evidence(power) + Z_LIMIT * error


def weighted(masked: bool = True) -> None:
    """A guide with two scales, a mask in its distributions and one around them."""
    with pyro.plate("components", 2, dim=-1):
        with poutine.scale(scale=0.3):
            loc = pyro.param("loc", torch.tensor([-2.0, 2.0]))
            pyro.sample("locs", dist.Normal(loc, 0.4))
        tempered, masked_ = poutine.scale(scale=torch.tensor(0.7)), poutine.mask(mask=EVEN)
        with tempered, pyro.plate("features", 2, dim=-2), masked_:
            pyro.sample("w", dist.Normal(0.1, 0.5).expand([2, 2]).mask(torch.tensor([True, masked])))


ELBOS = [
    Trace_ELBO(max_plate_nesting=2),
    Trace_ELBO(num_particles=5, vectorize_particles=True, max_plate_nesting=2),
    TraceMeanField_ELBO(max_plate_nesting=2),
    TraceGraph_ELBO(max_plate_nesting=2),
    TraceEnum_ELBO(max_plate_nesting=2),
    RenyiELBO(alpha=0.5, num_particles=3, max_plate_nesting=2),
]


@pytest.mark.filterwarnings("ignore:TraceEnum_ELBO found no sample sites")
@pytest.mark.parametrize("elbo", ELBOS, ids=lambda elbo: f"{type(elbo).__name__}{elbo.num_particles}")
@pytest.mark.parametrize("base", [weighted, AutoNormal, AutoNormalMessenger])
def test_the_trivial_group_leaves_every_loss_as_it_is(base: Any, elbo: ELBO) -> None:
    program = partial(model, prior=0.5, features=True)
    if base is AutoNormalMessenger and isinstance(elbo, TraceEnum_ELBO | RenyiELBO):
        return  # Pyro's don't take such guides
    losses = []
    for trivial in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        one = base if base is weighted else base(program)
        one = AutoSymmetrized(one, Product(), model=program) if trivial else one
        one()
        pyro.set_rng_seed(4)
        losses.append([SVI(program, one, Adam({"lr": 0.1}), elbo).step() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def factor_of(average: AutoSymmetrized, *args: Any) -> tuple[float, dict[str, Tensor]]:
    """What a symmetrised guide adds for its hidden sites, and its draw."""
    trace = poutine.trace(average).get_trace(*args)
    trace.compute_log_prob()
    values = {name: site["value"].detach() for name, site in trace.nodes.items() if name in ("locs", "w")}
    (factor,) = (site for name, site in trace.nodes.items() if name.endswith("_log_density"))
    return float(factor["log_prob_sum"].detach()), values


def test_the_average_counts_by_the_scale_of_the_moved_sites() -> None:
    """s log q^G of these, and a scale of its own for what is independent of them, against the formula."""
    program = partial(model, features=True)
    average = AutoSymmetrized(weighted, SWAP, model=program)
    value, drawn = factor_of(average)
    q = dist.Normal(torch.tensor([-2.0, 2.0]), 0.4)
    pair = [q.log_prob(drawn["locs"]).sum(), q.log_prob(drawn["locs"].flip(-1)).sum()]
    rest = dist.Normal(0.1, 0.5).log_prob(drawn["w"])[0].sum()
    expected = 0.3 * (torch.logaddexp(*pair) - math.log(2.0)) + 0.7 * rest
    assert value == pytest.approx(float(expected), abs=1e-10)
    pyro.set_rng_seed(1)
    once = factor_of(average)[0]
    pyro.set_rng_seed(1)
    assert factor_of(poutine.scale(average, scale=0.1))[0] == pytest.approx(0.1 * once), "and once, outside"


def test_averages_of_masked_entries() -> None:
    """The density of what is not masked, averaged over the group, against the formula."""

    def masked() -> None:
        with pyro.plate("components", 2, dim=-1):
            pyro.sample("locs", dist.Normal(torch.tensor([-0.5, 0.5]), 1.0))
            with pyro.plate("features", 2, dim=-2), poutine.mask(mask=EVEN):
                pyro.sample("w", dist.Normal(torch.tensor([0.3, -0.3]), 0.5))

    symmetry = Permutation({"locs": -1, "w": -1})
    for estimator in ("exact", "auto"):
        average = AutoSymmetrized(masked, symmetry, model=partial(model, features=True), estimator=estimator)
        value, drawn = factor_of(average)
        assert isinstance(average._average, OneBlock)

        def log_q(locs: Tensor, w: Tensor) -> Tensor:
            own = dist.Normal(torch.tensor([-0.5, 0.5]), 1.0).log_prob(locs).sum()
            return own + dist.Normal(torch.tensor([0.3, -0.3]), 0.5).log_prob(w)[0].sum()

        images = [log_q(**drawn), log_q(**{name: value.flip(-1) for name, value in drawn.items()})]
        assert value == pytest.approx(float(torch.logaddexp(*images)) - math.log(2.0), abs=1e-10)


def uneven_scales() -> None:
    with poutine.scale(scale=0.3), pyro.plate("components", 2, dim=-1):
        locs = pyro.sample("locs", dist.Normal(0.0, 1.0))
        with pyro.plate("features", 2, dim=-2), poutine.scale(scale=0.5):
            pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]))
    del locs


def depends() -> None:
    with pyro.plate("components", 2, dim=-1), poutine.scale(scale=0.3):
        locs = pyro.sample("locs", dist.Normal(torch.tensor([-2.0, 2.0]), 1.0))
    with pyro.plate("components_", 2, dim=-1), pyro.plate("features", 2, dim=-2):
        pyro.sample("w", dist.Normal(locs, 1.0))


def uneven_mask() -> None:
    with pyro.plate("components", 2, dim=-1):
        with poutine.mask(mask=torch.tensor([True, False])):
            pyro.sample("locs", dist.Normal(0.0, 1.0))
        with pyro.plate("features", 2, dim=-2):
            pyro.sample("w", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("base", "moved", "message"),
    [
        (uneven_scales, {"locs": -1, "w": -1}, "'locs' has 0.3, 'w' has 0.15"),
        (depends, {"locs": -1}, r"ties the sites \['w'\], which have a scale of their own, to"),
        (uneven_mask, {"locs": -1, "w": -1}, "masks some entries of site 'locs'.*swapping 0 and 1"),
    ],
)
def test_weights_that_no_average_can_have_are_refused(
    base: Program, moved: dict[str, Any], message: str
) -> None:
    average = AutoSymmetrized(base, Permutation(moved), model=partial(model, features=True))
    with pytest.raises(NoDensityError, match=message):
        poutine.trace(average).get_trace()


@pytest.mark.parametrize(
    "handler",
    [poutine.scale(scale=torch.tensor([0.1, 0.2])), poutine.mask(mask=torch.tensor([True, False]))],
)
def test_weights_outside_that_tell_entries_apart_are_refused(handler: Any) -> None:
    average = AutoSymmetrized(guide, SWAP, model=model)
    with pytest.raises(NoDensityError, match=r"shape \(2,\) around the symmetrised guide.*'locs'"), handler:
        poutine.trace(average).get_trace()


# --- local latents ------------------------------------------------------------------------------------------

ROWS = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64)


def local_model(discrete: bool = False, second: bool = False) -> None:
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", 40, subsample_size=8, dim=-1) as rows:
        if discrete:
            z = 1.0 * pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))
        else:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        components = dist.Normal(locs.unsqueeze(-2) + z.unsqueeze(-1), 1.0)
        mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), components)
        pyro.sample("y", mixture, obs=ROWS[rows])
    if second:
        with pyro.plate("others", 30, subsample_size=5, dim=-1):
            pyro.sample("u", dist.Normal(0.0, 1.0))


def local_guide(kind: str = "plain") -> None:
    """Components far apart, so that the gain is log 2 at every draw."""
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(pyro.param("m", torch.tensor([-9.0, 9.0])), 0.3))
    with pyro.plate("rows", 40, subsample_size=8, dim=-1) as rows:
        if kind == "discrete":
            pyro.sample("z", dist.Bernoulli(torch.tensor(0.3)), infer={"enumerate": "parallel"})
        elif kind == "amortised":
            weight = pyro.param("weight", torch.tensor(0.7))
            pyro.sample("z", dist.Normal(weight * ROWS[rows].tanh(), 0.5))
        elif kind == "entangled":
            pyro.sample("z", dist.Normal(ROWS[rows] - locs[..., :1], 0.5))
        else:
            pyro.sample("z", dist.Normal(torch.zeros(8), 1.0))
    if kind == "second":
        with pyro.plate("others", 30, subsample_size=5, dim=-1):
            pyro.sample("u", dist.Normal(torch.zeros(5), 0.5))


def of_parts(program: Program, kind: str) -> AutoGuideList:
    """A list of an autoguide and a part with local sites only, which draws in the plates of the list."""
    plates = partial(pyro.plate, "rows", 40, subsample_size=8, dim=-1)
    parts = AutoGuideList(program, create_plates=plates if kind == "autoguides" else None)

    def local() -> None:
        with parts.plates["rows"]:
            pyro.sample("z", dist.Normal(torch.zeros(8), 1.0))

    of_locs = AutoMultivariateNormal if kind == "autoguides" else AutoNormal
    apart = partial(of_locs, init_loc_fn=lambda site: torch.tensor([-9.0, 9.0]))
    parts.append(apart(poutine.block(program, expose=["locs"])))
    parts.append(AutoNormal(poutine.block(program, expose=["z"])) if kind == "autoguides" else local)
    return parts


PARTICLES = Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)


# Pyro looks at the order of sites, and the average stands last.
@pytest.mark.filterwarnings("ignore:(.|\n)*possibly invalid dependency")
@pytest.mark.parametrize(
    ("kind", "elbo"),
    [
        ("plain", Trace_ELBO(max_plate_nesting=1)),
        ("plain", PARTICLES),
        ("amortised", PARTICLES),
        ("second", PARTICLES),
        ("parts", Trace_ELBO(max_plate_nesting=1)),
        ("autoguides", Trace_ELBO(max_plate_nesting=1)),
        ("autoguides", PARTICLES),
        ("discrete", TraceEnum_ELBO(max_plate_nesting=1)),
        ("discrete", TraceEnum_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)),
    ],
)
def test_local_latents_of_guides_by_hand_stay_as_they_are(kind: str, elbo: ELBO) -> None:
    """The loss differs from the plain guide's, of the same draws and rows, by log 2 and nothing else."""
    program = partial(local_model, discrete=kind == "discrete", second=kind == "second")
    base: Any = partial(local_guide, kind)
    if kind in ("parts", "autoguides"):
        base = of_parts(program, kind)
    average = AutoSymmetrized(base, SWAP, model=program)
    average()
    for seed in range(3):
        losses = []
        for one in (average, base):
            pyro.set_rng_seed(seed)
            losses.append(elbo.loss(program, one))
        assert losses[1] - losses[0] == pytest.approx(math.log(2.0), abs=1e-6)
    assert math.isfinite(SVI(program, average, Adam({"lr": 0.01}), elbo).step())
    assert average._layout is not None and "z" in average._layout.local


def test_local_latents_that_depend_on_what_moves_are_refused() -> None:
    average = AutoSymmetrized(partial(local_guide, "entangled"), SWAP, model=local_model)
    with pytest.raises(
        NoDensityError, match=r"\['z'\], which lie in subsampled plates, where .* part of their density, to"
    ):
        average()


COUNTS = torch.arange(40.0, dtype=torch.float64).unsqueeze(-1) * torch.arange(12) % 4


def local_weights() -> None:
    with pyro.plate("topics", 3):
        beta = pyro.sample("beta", dist.Dirichlet(torch.ones(12)))
    with pyro.plate("documents", 40, subsample_size=10) as rows:
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(3)))
        pyro.factor("words", (COUNTS[rows] * (theta @ beta).log()).sum(-1))


def full_weights() -> None:
    """The form that the refusal names."""
    with pyro.plate("topics", 3):
        beta = pyro.sample("beta", dist.Dirichlet(torch.ones(12)))
    with pyro.plate("documents", 40):
        theta = pyro.sample("theta", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("minibatch", 40, subsample_size=10) as rows:
        pyro.factor("words", (COUNTS[rows] * (theta[rows] @ beta).log()).sum(-1))


def test_topics_with_weights_by_document() -> None:
    symmetry = find_symmetry(local_weights)
    with pytest.raises(
        SymmetryError,
        match=r"'theta'.*plate 'documents'.*10 of 40.*plate\('documents', 40\).*theta\[rows\]",
    ):
        AutoSymmetrized(AutoNormal(local_weights), symmetry)()
    symmetry = find_symmetry(full_weights)
    assert str(symmetry) == "Permutation({'beta': -2, 'theta': -1})"
    average = AutoSymmetrized(AutoNormal(full_weights), symmetry)
    svi = SVI(full_weights, average, Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step() for _ in range(40)]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert average.method == "exact"
