"""BAOA as users run it, in Pyro's MCMC: from the optimiser at T = 0 to sampled targets, and bad input.

Covers `sgmcmc.kernel`, `sgmcmc.pyro_driver` and `sgmcmc.divergence`.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from pyro.infer.autoguide.initialization import init_to_value
from pyro.infer.mcmc import StreamingMCMC
from scipy import stats
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.model.minibatch import Minibatch, PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from tests.catalogue import normal_mean, normals
from tests.catalogue import real_and_positive as full_model
from tests.conftest import FAILURE_RATE

pytestmark = pytest.mark.usefixtures("float64")


def mixed_model(data: Tensor) -> None:
    """Constrained sites of several shapes, and a subsampled plate."""
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(data), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(loc.sum() + weights[..., 0], scale), obs=data[rows])


# Picklable whatever the name that pytest gave this module.
picklable_model = functools.partial(pyro.sample, "a", dist.LogNormal(0.0, 1.0))


def run(
    kernel: StochasticGradientKernel, num_samples: int, *args: Any, seed: int = 0, **options: Any
) -> MCMC:
    pyro.set_rng_seed(seed)
    mcmc = MCMC(kernel, num_samples, disable_progbar=True, **{"warmup_steps": 0, **options})
    mcmc.run(*args)
    return mcmc


# --- T = 0 is the optimiser ---------------------------------------------------------------------------------


def network(data: Tensor, targets: Tensor) -> None:
    first = pyro.sample("first", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
    second = pyro.sample("second", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with pyro.plate("rows", len(data), subsample_size=8) as rows:
        mean = torch.tanh(data[rows] @ first) @ second
        pyro.sample("y", dist.Normal(mean, 0.5), obs=targets[rows])


@pytest.mark.parametrize(
    ("kind", "momentum"), [(BAOA, 0.9), (SGHMC, 0.9), (SGLD, 0.0), (LeimkuhlerMatthews, 0.0)]
)
def test_zero_temperature_is_torch_sgd(kind: Any, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 minibatch steps of a network through the kernel, against a loss written by hand."""
    lr, num_steps = 0.02, 200
    data, targets = torch.randn(40, 3), torch.randn(40)
    seen: list[Tensor] = []
    draw = PlateRows.draw

    def recording(self: PlateRows) -> Minibatch:
        minibatch = draw(self)
        seen.append(minibatch.indices["rows"][0])
        return minibatch

    monkeypatch.setattr(PlateRows, "draw", recording)
    settings = {"momentum": momentum} if momentum else {}
    kernel = kind.from_sgd(network, lr=lr, num_data=40, temperature=0.0, **settings)
    kernel.setup(0, data, targets)
    del seen[:-1]  # the last one drawn is that of the first step
    params = kernel.initial_params
    assert params is not None
    first, second = (torch.nn.Parameter(params[name].clone()) for name in ("first", "second"))
    optimiser = torch.optim.SGD([first, second], lr=lr, momentum=momentum)
    start = first.detach().clone()
    for step in range(num_steps):
        params = kernel.sample(params)
        optimiser.zero_grad()
        residuals = torch.tanh(data[seen[step]] @ first) @ second - targets[seen[step]]
        loss = (residuals**2).mean() / (2 * 0.5**2) + ((first**2).sum() + (second**2).sum()) / 2 / 40
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        torch.testing.assert_close(params["first"], first.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(params["second"], second.detach(), rtol=0, atol=1e-10)
    assert len({tuple(rows.tolist()) for rows in seen[:num_steps]}) > 190, "minibatches must be fresh"
    assert (first.detach() - start).abs().max() > 0.1, "the run must have gone somewhere"


@pytest.mark.parametrize(("temperature", "consumes"), [(0.0, False), (0.5, True)])
def test_no_random_number_is_consumed_at_zero_temperature(temperature: float, consumes: bool) -> None:
    kernel = BAOA(full_model, step_size=0.1, temperature=temperature, thinning=10)
    kernel.initial_params = {"a": torch.tensor(0.3), "b": torch.ones(2)}
    before = torch.get_rng_state()
    kernel.setup(0)
    assert kernel.initial_params is not None
    kernel.sample(kernel.initial_params)
    assert torch.equal(torch.get_rng_state(), before) is not consumes


# --- sampled targets ----------------------------------------------------------------------------------------

ROWS, DIMS, SPREAD = 64, 40, 0.5


@functools.cache
def conjugate_data() -> Tensor:
    """Columns of variance SPREAD**2, exactly, whose deviations are orthogonal: minibatch noise is alike in
    all."""
    deviations = torch.randn(ROWS, DIMS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orthogonal = torch.linalg.qr(deviations - deviations.mean(0)).Q
    means = torch.linspace(-3, 3, DIMS, dtype=torch.float64)
    return means + SPREAD * math.sqrt(ROWS - 1) * orthogonal


def t_statistic(values: Tensor) -> float:
    return float(values.mean() / (values.std() / math.sqrt(len(values))))


@functools.cache
def conjugate_statistics(
    temperature: float, subsample_size: int | None
) -> tuple[Tensor, Tensor, float, float]:
    """Errors of the time averages a dimension; the exact variance, and its part due to minibatches."""
    h, friction = 0.0877, 6.0
    data = conjugate_data()
    kernel = BAOA(normal_mean, step_size=h, friction=friction, temperature=temperature, thinning=2)
    draws = run(kernel, 400, data, subsample_size, warmup_steps=50, seed=7).get_samples()["loc"]
    precision = 1.0 + ROWS
    mean = data.sum(0) / precision
    c, x = math.exp(-friction * h), h**2 * precision
    noise = 0.0
    if subsample_size is not None:  # variance of the gradient, from sampling without replacement
        noise = ROWS**2 / subsample_size * (1 - subsample_size / ROWS) * SPREAD**2
    heating = noise * h**2 * (1 + c) / (precision * (1 - c) * (4 - x))
    errors = (draws.mean(0) - mean) * mean.sign()
    return errors, ((draws - mean) ** 2).mean(0), temperature / precision + heating, heating


CASES = [(1.0, None), (0.25, None), (1.0, 16), (0.25, 16)]
#: Dimensions are independent, so the standard error over dimensions is that of the run, autocorrelation
#: included. Each assert below fails by bad luck at this rate; the seed is fixed.
T_LIMIT = float(stats.t.isf(FAILURE_RATE / 2, DIMS - 1))


@pytest.mark.parametrize(("temperature", "subsample_size"), CASES)
def test_conjugate_posterior(temperature: float, subsample_size: int | None) -> None:
    errors, squares, variance, _ = conjugate_statistics(temperature, subsample_size)
    assert abs(t_statistic(errors)) < T_LIMIT
    assert abs(t_statistic(squares - variance)) < T_LIMIT
    assert squares.std() / math.sqrt(DIMS) < 0.03 * variance, "the check must be sharp"


@pytest.mark.parametrize(("temperature", "subsample_size"), CASES)
def test_conjugate_posterior_check_has_power(temperature: float, subsample_size: int | None) -> None:
    """Negative controls: another temperature, minibatch heating left out, a mean that is off by half an
    sd."""
    errors, squares, variance, heating = conjugate_statistics(temperature, subsample_size)
    wrong = (math.sqrt(temperature) if temperature < 1 else 0.8) * (
        variance - heating
    ) / temperature + heating
    assert abs(t_statistic(squares - wrong)) > T_LIMIT
    assert abs(t_statistic(errors + math.sqrt(variance) / 2)) > T_LIMIT
    if subsample_size is not None:
        assert abs(t_statistic(squares - (variance - heating))) > T_LIMIT


# --- the start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.25, 4.0])
def test_momenta_start_at_the_temperature(temperature: float) -> None:
    size = 20_000

    model = normals({"x": (size,)})

    momenta = []
    kernel = BAOA(model, step_size=1e-8, friction=1e-8, temperature=temperature)
    run(
        kernel,
        1,
        hook_fn=lambda k, *_: momenta.append(k.diagnostics()["sample_stats"]["kinetic_temperature"]),
    )
    scaled = size * momenta[0].item()
    if temperature == 0:
        assert scaled < 1e-6
    else:
        low, high = stats.chi2.ppf([FAILURE_RATE / 2, 1 - FAILURE_RATE / 2], size)
        assert low < scaled / temperature < high


def test_chains_start_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    params = {"a": torch.tensor([-1.0, 0.5]), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    with pytest.warns(UserWarning, match="drawn sequentially"):
        mcmc = run(BAOA(full_model, step_size=1e-9, temperature=0.0), 2, num_chains=2, initial_params=params)
    samples = mcmc.get_samples(group_by_chain=True)
    torch.testing.assert_close(samples["a"][:, 0], params["a"].exp())
    torch.testing.assert_close(samples["b"][:, 1], params["b"])


def start_of(kernel: StochasticGradientKernel) -> Mapping[str, Tensor]:
    params = kernel.initial_params
    assert params is not None
    return params


def test_initial_params_stay_and_can_be_replaced() -> None:
    kernel = BAOA(full_model, step_size=0.1)
    rows = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2, 2)}
    for chain in (0, 1, 0):
        given = {name: value[chain] for name, value in rows.items()}
        kernel.initial_params = given
        kernel.setup(0)
        assert kernel.initial_params is not None
        kernel.sample(kernel.initial_params)
        torch.testing.assert_close(dict(kernel.initial_params), given)
        kernel.cleanup()
        torch.testing.assert_close(dict(kernel.initial_params), given)
    kernel.initial_params = None
    kernel.setup(0)
    assert start_of(kernel)["a"] != rows["a"][0]


def test_chains_start_apart_when_they_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    with pytest.warns(UserWarning, match="drawn sequentially"):
        mcmc = run(BAOA(full_model, step_size=1e-9, temperature=0.0), 1, num_chains=3)
    starts = mcmc.get_samples(group_by_chain=True)["b"][:, 0]
    assert len(starts.unique()) == 6 and starts.abs().max() <= 2


def test_init_strategy_is_used() -> None:
    strategy = init_to_value(values={"a": torch.tensor(2.0), "b": torch.tensor([5.0, 6.0])})
    kernel = BAOA(full_model, step_size=0.1, init_strategy=strategy)
    kernel.setup(0)
    assert kernel.initial_params is not None
    torch.testing.assert_close(kernel.initial_params["a"], torch.tensor(math.log(2.0)))
    torch.testing.assert_close(kernel.initial_params["b"], torch.tensor([5.0, 6.0]))


# --- what comes back ----------------------------------------------------------------------------------------

BY_SITE = {"site_kinetic_temperature", "site_configurational_temperature"}
STATISTICS = {
    *("lp", "energy", "potential_energy", "gradient_norm", "step_size", "temperature"),
    *("kinetic_temperature", "configurational_temperature"),
    *BY_SITE,
}


def test_samples_and_statistics_of_several_chains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 1)
    kernel = BAOA(mixed_model, step_size=0.02, temperature=0.5, thinning=2)
    with pytest.warns(UserWarning, match="drawn sequentially"):
        mcmc = run(kernel, 12, torch.randn(20), warmup_steps=3, num_chains=2)
    samples = mcmc.get_samples(group_by_chain=True)
    assert {name: value.shape for name, value in samples.items()} == {
        "weights": (2, 12, 3),
        "scale": (2, 12),
        "loc": (2, 12, 2),
    }
    torch.testing.assert_close(samples["weights"].sum(-1), torch.ones(2, 12))
    assert (samples["scale"] > 0).all() and samples["loc"].isfinite().all()
    diagnostics = mcmc.diagnostics()
    assert set(diagnostics["sample_stats"]) == {"chain 0", "chain 1"}
    for chain in diagnostics["sample_stats"].values():
        assert set(chain) == STATISTICS
        assert all(value.dtype == torch.float64 for value in chain.values())
        assert {name: value.shape for name, value in chain.items()} == {
            name: (12, 3) if name in BY_SITE else (12,) for name in STATISTICS
        }
        assert (chain["step_size"] == 0.02).all() and (chain["temperature"] == 0.5).all()
    assert diagnostics["loc"]["r_hat"].shape == (2,)
    mcmc.summary()
    assert "weights[2]" in capsys.readouterr().out


def test_statistics_are_those_of_the_draws_themselves() -> None:
    mcmc = run(BAOA(full_model, step_size=0.3, thinning=3), 6, warmup_steps=2)
    chain = mcmc.diagnostics()["sample_stats"]["chain 0"]
    potential = Potential(full_model)
    for draw in range(6):
        params = potential.unconstrain({name: value[draw] for name, value in mcmc.get_samples().items()})
        torch.testing.assert_close(chain["potential_energy"][draw], potential(params))
    torch.testing.assert_close(chain["lp"], -chain["potential_energy"])
    kinetic = chain["energy"] - chain["potential_energy"]
    torch.testing.assert_close(kinetic, 3 / 2 * chain["kinetic_temperature"])
    assert kinetic.min() > 0


def test_end_warmup_starts_the_statistics() -> None:
    kernel = BAOA(full_model, step_size=0.1)
    kernel.setup(100)
    params = kernel.initial_params
    assert params is not None
    for _ in range(2):
        params = kernel.sample(params)
    assert not kernel.diagnostics()["sample_stats"]
    kernel.end_warmup()
    kernel.sample(params)
    assert kernel.diagnostics()["sample_stats"]["lp"].shape == (1,)


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyro 1.9.2 itself gives every process the initial values of the last chain."""
    monkeypatch.setattr(torch.multiprocessing, "cpu_count", lambda: 8)
    kernel = BAOA(picklable_model, step_size=0.1)
    mcmc = run(
        kernel,
        5,
        num_chains=2,
        mp_context="spawn",
        initial_params={"a": torch.tensor([-9.0, 9.0])},
    )
    samples = mcmc.get_samples(group_by_chain=True)["a"]
    assert samples.shape == (2, 5) and samples[0].max() < 1 < samples[1].min()
    statistics = mcmc.diagnostics()["sample_stats"]
    assert {name: set(chain) for name, chain in statistics.items()} == {
        "chain 0": STATISTICS,
        "chain 1": STATISTICS,
    }
    assert statistics["chain 1"]["lp"].shape == (5,)


def test_streaming() -> None:
    draws = run(BAOA(full_model, step_size=0.1), 20).get_samples()
    pyro.set_rng_seed(0)
    streaming = StreamingMCMC(BAOA(full_model, step_size=0.1), 20, warmup_steps=0, disable_progbar=True)
    streaming.run()
    statistics = streaming.get_statistics()
    torch.testing.assert_close(statistics[0, "a"]["mean"], draws["a"].mean(0))
    torch.testing.assert_close(statistics[0, "b"]["variance"], draws["b"].var(0))
    assert streaming.diagnostics()["sample_stats"]["chain 0"]["lp"].shape == (20,)


def test_progress_bar_text() -> None:
    kernel = BAOA(full_model, step_size=0.125, temperature=0.5)
    kernel.setup(0)
    assert kernel.initial_params is not None
    kernel.sample(kernel.initial_params)
    shown = kernel.logging()
    assert shown["step size"] == "1.25e-01" and shown["temp."] == "0.5"
    assert math.isfinite(float(shown["potential"])) and float(shown["kinetic temp."]) > 0


# --- steps, seeds, schedules --------------------------------------------------------------------------------


def test_runs_are_reproducible_by_seed() -> None:
    data = torch.randn(20)
    runs = [
        run(BAOA(mixed_model, step_size=0.02), 5, data, seed=seed).get_samples()["loc"] for seed in (1, 1, 2)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.isclose(runs[0], runs[2]).any()


def test_thinning_is_steps_per_draw() -> None:
    data = torch.randn(20)
    every = run(BAOA(mixed_model, step_size=0.02), 12, data).get_samples()
    third = run(BAOA(mixed_model, step_size=0.02, thinning=3), 4, data).get_samples()
    for name in every:
        assert torch.equal(every[name][2::3], third[name])


def test_schedules_are_functions_of_the_step() -> None:
    kernel = BAOA(
        full_model,
        step_size=lambda step: 0.1 / (1 + step),
        temperature=lambda step: 0.5 * (step % 2),
        thinning=3,
    )
    chain = run(kernel, 4, warmup_steps=1).diagnostics()["sample_stats"]["chain 0"]
    torch.testing.assert_close(chain["step_size"], 0.1 / (1 + torch.tensor([5.0, 8.0, 11.0, 14.0])))
    torch.testing.assert_close(chain["temperature"], torch.tensor([0.5, 0.0, 0.5, 0.0]))


def test_scheduled_step_size_moves_the_chain_by_it() -> None:
    """The first step at T = 0 from rest is -h^2/2 (1 + c) times the gradient, with the step size at step
    0."""
    kernel = BAOA(
        full_model,
        step_size=lambda step: 0.1 if step == 0 else 9.0,
        friction=math.inf,
        temperature=0.0,
    )
    kernel.initial_params = {"a": torch.tensor(0.0), "b": torch.tensor([2.0, -4.0])}
    kernel.setup(0)
    after = kernel.sample(kernel.initial_params)
    torch.testing.assert_close(after["b"], (1 - 0.1**2 / 2) * torch.tensor([2.0, -4.0]))


def test_sampling_goes_on_from_params_that_are_handed_in() -> None:
    kernel = BAOA(full_model, step_size=0.1, friction=math.inf, temperature=0.0)
    kernel.setup(0)
    after = kernel.sample({"a": torch.tensor(0.0), "b": torch.tensor([2.0, -4.0])})
    torch.testing.assert_close(after["b"], (1 - 0.1**2 / 2) * torch.tensor([2.0, -4.0]))


def test_dtype_of_the_model_is_kept() -> None:
    def model() -> None:
        pyro.sample("single", dist.Normal(torch.tensor(0.0, dtype=torch.float32), 1.0))
        pyro.sample("double", dist.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0))

    kernel = BAOA(model, step_size=0.1)
    kernel.setup(0)
    assert kernel.initial_params is not None
    after = kernel.sample(kernel.initial_params)
    assert {name: value.dtype for name, value in after.items()} == {
        "single": torch.float32,
        "double": torch.float64,
    }


def test_validation_is_left_as_it_was() -> None:
    kernel = BAOA(full_model, step_size=0.1)
    kernel.setup(0)
    assert kernel.initial_params is not None
    for enabled in (True, False):
        with pyro.validation_enabled(enabled):
            kernel.sample(kernel.initial_params)
            assert torch.distributions.Distribution._validate_args is enabled


def test_a_kernel_is_picklable_during_a_run_and_starts_afresh() -> None:
    kernel = BAOA(picklable_model, step_size=0.1, temperature=0.3, thinning=2)
    kernel.setup(0)
    copy = pickle.loads(pickle.dumps(kernel))
    assert (copy.step_size, copy.temperature, copy.thinning) == (0.1, 0.3, 2)
    with pytest.raises(RuntimeError, match="call setup"):
        copy.diagnostics()
    assert run(copy, 3).get_samples()["a"].shape == (3,)


def test_cleanup_forgets_the_chain_and_keeps_the_transforms() -> None:
    kernel = BAOA(full_model, step_size=0.1)
    kernel.setup(0)
    kernel.cleanup()
    assert kernel.initial_params is None and kernel.transforms is not None
    with pytest.raises(RuntimeError, match="call setup"):
        kernel.sample({"a": torch.tensor(0.0), "b": torch.zeros(2)})


# --- what bad input gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size is 0.0; pass a finite number > 0"),
        ({"step_size": -0.1}, "step_size is -0.1"),
        ({"step_size": math.nan}, "step_size is nan"),
        ({"step_size": 0.1, "friction": 0.0}, "friction is 0.0"),
        ({"step_size": 0.1, "friction": math.nan}, "friction is nan"),
        ({"step_size": 0.1, "temperature": -1.0}, "temperature is -1.0; pass a finite number >= 0"),
        ({"step_size": 0.1, "temperature": math.inf}, "temperature is inf"),
        ({"step_size": 0.1, "thinning": 0}, "thinning is 0"),
        ({"step_size": 0.1, "thinning": 1.5}, "thinning is 1.5"),
        ({"step_size": 0.1, "thinning": True}, "thinning is True"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAOA(full_model, **options)


def test_model_that_is_none() -> None:
    with pytest.raises(TypeError, match="model is None"):
        BAOA(None, step_size=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": lambda step: 0.1 - 0.05 * step}, r"step_size is 0.0 at step 2"),
        (
            {"step_size": 0.1, "temperature": lambda step: 1.0 if step < 2 else -1.0},
            "temperature is -1.0 at step 2",
        ),
    ],
)
def test_schedules_out_of_range_name_the_step(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(BAOA(full_model, **options), 5)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": torch.tensor(0.0)}, r"given for \['a'\]; the model's latent sites are \['a', 'b'\]"),
        (
            {"a": torch.tensor(0.0), "b": torch.zeros(3)},
            r"'b' have shape \(1, 3\); unconstrained values of 1 chains have shape \(1, 2\)",
        ),
        (
            {"a": torch.tensor(0.0), "b": torch.tensor([0.0, math.nan])},
            "unconstrained value of site 'b'",
        ),
    ],
)
def test_bad_initial_params(params: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(BAOA(full_model, step_size=0.1), 1, initial_params=params)


def test_models_that_cannot_be_sampled() -> None:
    def local(count: int) -> None:
        with pyro.plate("people", 6, subsample_size=count):
            pyro.sample("effect", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="'effect' is inside the subsampled plate 'people'"):
        run(BAOA(local, step_size=0.1), 1, 2)
    with pytest.raises(ValueError, match="no continuous latent site"):
        run(BAOA(lambda: None, step_size=0.1), 1)


def inject(monkeypatch: pytest.MonkeyPatch, at_step: int, spoil: Callable[[Tensor, Tensor], None]) -> None:
    """Spoil the evaluation that follows the move of the given step."""
    evaluate = Chains._evaluate
    calls = 0

    def spoiled(self: Chains, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        nonlocal calls
        energy, gradient = evaluate(self, position, minibatch)
        if calls == at_step:
            spoil(energy[0], gradient[0])
        calls += 1
        return energy, gradient

    monkeypatch.setattr(Chains, "_evaluate", spoiled)


@pytest.mark.parametrize("step", [0, 7])
def test_a_gradient_that_is_not_finite_is_reported_at_once(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = BAOA(full_model, step_size=0.125, thinning=3)
    kernel.setup(0)
    params = kernel.initial_params
    assert params is not None

    def spoil(energy: Tensor, gradient: Tensor) -> None:
        gradient[-1] = math.inf  # b comes first in the model, a last

    inject(monkeypatch, step, spoil)
    message = rf"step {step}: the gradient of site 'a' is not finite; lower step_size \(0.125 at this step;"
    for _ in range(step // 3):
        params = kernel.sample(params)
    with pytest.raises(DivergenceError, match=message):
        kernel.sample(params)
    assert kernel.diagnostics()["sample_stats"].get("lp", torch.zeros(0)).shape == (step // 3,)


def test_a_log_probability_that_is_not_finite_is_reported_with_its_site() -> None:
    failing = False

    def model() -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("late", torch.tensor(math.nan if failing else 0.0))

    kernel = BAOA(model, step_size=0.1, jit="eager")
    kernel.setup(0)
    params = kernel.initial_params
    assert params is not None
    params = kernel.sample(kernel.sample(params))
    failing = True
    with pytest.raises(DivergenceError, match="step 2: the log probability of site 'late' is not finite"):
        kernel.sample(params)


def test_a_step_size_beyond_stability_ends_in_an_error_that_says_so() -> None:
    model = normals({"fine": (), "steep": ()}, {"fine": 1e6, "steep": 0.01})

    with pytest.raises(DivergenceError, match=r"of site 'steep' is not finite; lower step_size \(1 at"):
        run(BAOA(model, step_size=1.0), 1000)


def test_data_out_of_support_is_named_at_the_start() -> None:
    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        pyro.sample("y", dist.Exponential(rate), obs=torch.tensor(math.nan))

    with pytest.raises(ValueError, match=r"no initial point .* log probability of site 'y'"):
        run(BAOA(model, step_size=0.1), 1)
