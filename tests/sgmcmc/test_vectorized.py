"""Many chains in one process: each is the chain it would be alone; what ends a run leaves what was drawn.

Covers also `sgmcmc.chains`, `sgmcmc.shard`, `sgmcmc.statistics`, `sgmcmc.thermometers`,
`sgmcmc.control_variate` and `model.full_data`.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from pathlib import Path
from typing import Any, Literal, cast

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.model import gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.preconditioners import PerSite, RMSprop
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.thermometers import kinetic_band
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC, deep_ensemble
from tests.catalogue import normals, slope
from tests.catalogue import real_and_positive as full_model
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


def regression(x: Tensor, y: Tensor, subsample_size: int | None = 5) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x), subsample_size=subsample_size) as rows:
        pyro.sample("y", dist.Normal(slope * x[rows], scale), obs=y[rows])


def run(kernel: StochasticGradientKernel, *args: Any, seed: int = 0, **options: Any) -> VectorizedMCMC:
    pyro.set_rng_seed(seed)
    mcmc = VectorizedMCMC(kernel, **{"warmup_steps": 0, "disable_progbar": True, **options})
    mcmc.run(*args)
    return mcmc


STARTS = {"a": torch.tensor([-1.0, 0.5, 2.0]), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, -1.0]])}


@pytest.mark.parametrize("kind", [SGLD, LeimkuhlerMatthews, SGHMC, BAOA, SGNHT])
def test_each_chain_is_the_one_it_would_be_alone(kind: type[StochasticGradientKernel]) -> None:
    """At T = 0, so that chains side by side and one by one draw no noise."""
    starts = {name: value.double() for name, value in STARTS.items()}
    kernel = kind(full_model, step_size=0.05, temperature=0.0)
    together = run(kernel, num_samples=6, num_chains=3, thinning=2, initial_params=starts)
    for chain in range(3):
        alone = MCMC(
            kind(full_model, step_size=0.05, temperature=0.0, thinning=2),
            num_samples=6,
            warmup_steps=0,
            initial_params={name: value[chain] for name, value in starts.items()},
            disable_progbar=True,
        )
        alone.run()
        for name, value in together.get_samples(group_by_chain=True).items():
            torch.testing.assert_close(value[chain], alone.get_samples()[name])


def test_one_chain_is_that_of_pyros_driver_draw_by_draw() -> None:
    data = torch.randn(20), torch.randn(20)
    vectorized = run(BAOA(regression, step_size=0.01, thinning=3), *data, num_samples=4, warmup_steps=2)
    pyro.set_rng_seed(0)
    mcmc = MCMC(BAOA(regression, step_size=0.01, thinning=3), 4, warmup_steps=2, disable_progbar=True)
    mcmc.run(*data)
    for name, value in mcmc.get_samples().items():
        assert torch.equal(vectorized.get_samples()[name], value)
    theirs, ours = mcmc.diagnostics()["sample_stats"], vectorized.diagnostics()["sample_stats"]
    for name, value in theirs["chain 0"].items():
        assert torch.equal(ours["chain 0"][name], value)


def test_samples_statistics_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    mcmc = run(
        BAOA(regression, step_size=0.01), torch.randn(20), torch.randn(20), num_samples=12, num_chains=5
    )
    assert {name: value.shape for name, value in mcmc.get_samples(group_by_chain=True).items()} == {
        "slope": (5, 12),
        "scale": (5, 12),
    }
    assert mcmc.get_samples()["slope"].shape == (60,)
    assert mcmc.get_samples(num_samples=7)["slope"].shape == (7,)
    report = mcmc.diagnostics()
    assert report["slope"]["r_hat"].shape == ()
    assert set(report["sample_stats"]) == {f"chain {chain}" for chain in range(5)}
    assert report["sample_stats"]["chain 3"]["site_kinetic_temperature"].shape == (12, 2)
    mcmc.summary()
    assert "slope" in capsys.readouterr().out


def test_runs_are_reproducible_and_chains_are_not_alike() -> None:
    data = torch.randn(20), torch.randn(20)
    first, again, other = (
        run(BAOA(regression, step_size=0.01), *data, seed=seed, num_samples=4, num_chains=3).get_samples()
        for seed in (1, 1, 2)
    )
    assert torch.equal(first["slope"], again["slope"])
    assert len(torch.cat([first["slope"], other["slope"]]).unique()) == 24


def test_chains_start_from_constrained_values_as_well() -> None:
    starts = {name: value.double() for name, value in STARTS.items()}
    values = {"a": starts["a"].exp(), "b": starts["b"]}
    kernel = BAOA(full_model, step_size=0.1, temperature=0.0)
    by_params = run(kernel, num_samples=2, num_chains=3, initial_params=starts)
    by_values = run(kernel, num_samples=2, num_chains=3, initial_values=values)
    torch.testing.assert_close(by_params.get_samples(), by_values.get_samples())


def test_large_chains_one_after_the_other_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(20), torch.randn(20)
    options: dict[str, Any] = {"num_samples": 6, "num_chains": 3, "thinning": 2}
    noise = torch.randn(12, 3, 2)  # they draw it in another order
    monkeypatch.setattr(Chains, "_noise", lambda self, shard: noise[self.step][shard.rows])
    together = run(BAOA(regression, step_size=0.01), *data, **options)
    monkeypatch.setattr(gradient, "LARGE", 1)
    apart = run(BAOA(regression, step_size=0.01), *data, **options)
    torch.testing.assert_close(apart.get_samples(), together.get_samples())
    torch.testing.assert_close(*(m.diagnostics()["sample_stats"]["chain 2"] for m in (apart, together)))


def peak_of(num_chains: int, **options: Any) -> int:
    """Bytes that a run had allocated at most, its one draw a chain included."""

    model = normals({"w": (20_000,)})

    kernel = BAOA(model, step_size=0.1, thinning=3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # what earlier tests left would be freed in between, and be counted off
    gc.disable()
    try:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            run(kernel, num_samples=1, num_chains=num_chains, **options)
    finally:
        gc.enable()
    events = cast(Any, profile.profiler).kineto_results.events()
    return max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


@pytest.mark.parametrize("on_divergence", ["raise", "mask"])
def test_a_large_chain_adds_position_momentum_and_gradient(
    on_divergence: Literal["raise", "mask"], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = 20_000 * torch.get_default_dtype().itemsize
    together = (peak_of(40, on_divergence=on_divergence) - peak_of(20, on_divergence=on_divergence)) / 20
    assert together > 5.9 * weights
    monkeypatch.setattr(gradient, "LARGE", 10_000)
    apart = (peak_of(40, on_divergence=on_divergence) - peak_of(20, on_divergence=on_divergence)) / 20
    assert apart < 4.1 * weights  # and the draw that is kept


# --- minibatches --------------------------------------------------------------------------------------------


def test_shared_minibatches_are_one_for_all_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    evaluate = Chains._evaluate

    def recording(self: Chains, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        shapes.append(minibatch.indices["rows"].shape)
        return evaluate(self, position, minibatch)

    monkeypatch.setattr(Chains, "_evaluate", recording)
    data = torch.randn(20), torch.randn(20)
    run(BAOA(regression, step_size=0.01, shared_minibatch=True), *data, num_samples=2, num_chains=3)
    assert set(shapes) == {(5,)}
    shapes.clear()
    run(BAOA(regression, step_size=0.01), *data, num_samples=2, num_chains=3)
    assert set(shapes) == {(3, 5)}


def loader_model(x: Tensor, y: Tensor, num_data: int = 23) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", num_data, subsample_size=len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def test_batches_of_a_loader_are_sgd_at_zero_temperature() -> None:
    """Three epochs with a short last batch, against a loss written by hand."""
    x, y = torch.randn(23), torch.randn(23)
    batches = list(zip(x.split(5), y.split(5), strict=True))
    kernel = SGLD.from_sgd(loader_model, lr=0.1, num_data=23, temperature=0.0, batches=batches)
    mcmc = run(kernel, num_samples=15, initial_params={"slope": torch.tensor([2.0])})
    slope = torch.nn.Parameter(torch.tensor(2.0))
    optimiser = torch.optim.SGD([slope], lr=0.1)
    for step in range(15):
        rows, targets = batches[step % 5]
        optimiser.zero_grad()
        loss = (slope * rows - targets).square().mean() / 2 + slope.square() / 2 / 23
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        torch.testing.assert_close(mcmc.get_samples()["slope"][step], slope.detach())


def test_batches_that_cannot_be_had_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="can be iterated over once only"):
        run(BAOA(loader_model, step_size=0.1, batches=iter([])), num_samples=1)
    with pytest.raises(ValueError, match="yields no batch"):
        run(BAOA(loader_model, step_size=0.1, batches=[]), num_samples=1)
    with pytest.raises(ValueError, match="given 1 positional arguments"):
        run(BAOA(loader_model, step_size=0.1, batches=[(torch.ones(2),) * 2]), 3, num_samples=1)


# --- control variates ---------------------------------------------------------------------------------------


def spread_of_gradients(kernel: StochasticGradientKernel, *args: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over 2,000 minibatches, side by side."""
    starts = {name: row.expand(2000) for name, row in zip(("slope", "scale"), at, strict=True)}
    chains = kernel.start(args, num_chains=2000, initial_params=starts)
    return chains.gradient.mean(0), chains.gradient.std(0)


def test_control_variates_are_unbiased_and_reduce_the_variance() -> None:
    x = torch.randn(200)
    y = 2 * x + 0.5 * torch.randn(200)
    full = BAOA(regression, step_size=0.01).start((x, y, None))
    at = torch.tensor([2.0, -0.69])
    _, exact = full.potential.value_and_grad(at)
    plain_mean, plain = spread_of_gradients(BAOA(regression, step_size=0.01), x, y, at=at)
    kernel = BAOA(regression, step_size=0.01, gradient="control_variate")
    mean, centred = spread_of_gradients(kernel, x, y, at=at)
    assert (centred < plain / 3).all()
    for means, spread in ((plain_mean, plain), (mean, centred)):
        assert ((means - exact).abs() < Z_LIMIT * spread / 2000**0.5).all()


def test_control_variates_centred_elsewhere_stay_unbiased() -> None:
    """Negative control: without the full gradient at the centre the mean is off."""
    x = torch.randn(200)
    y = 2 * x + 0.5 * torch.randn(200)
    at = torch.tensor([2.0, -0.69])
    _, exact = BAOA(regression, step_size=0.01).start((x, y, None)).potential.value_and_grad(at)
    center = {"slope": torch.tensor(1.9), "scale": torch.tensor(-0.5)}
    kernel = BAOA(regression, step_size=0.01, gradient="control_variate", center=center)
    mean, spread = spread_of_gradients(kernel, x, y, at=at)
    assert ((mean - exact).abs() < Z_LIMIT * spread / 2000**0.5).all()
    potential = BAOA(regression, step_size=0.01).start((x, y, None)).potential
    _, slope = potential.value_and_grad(potential.flatten(center))
    assert ((mean - slope - exact).abs() > Z_LIMIT * spread / 2000**0.5).any()


# --- preconditioners, temperatures --------------------------------------------------------------------------

scaled_model = normals({"wide": (400,), "narrow": (400,)}, {"wide": 10.0, "narrow": 0.1})


@pytest.mark.parametrize("kind", [SGHMC, BAOA, SGNHT])
def test_momenta_keep_their_temperature_when_the_mass_changes(kind: type[StochasticGradientKernel]) -> None:
    kernel = kind(scaled_model, step_size=0.02, temperature=0.5, preconditioner=PerSite())
    pyro.set_rng_seed(1)
    starts = {"wide": 10 * 0.5**0.5 * torch.randn(2, 400), "narrow": 0.1 * 0.5**0.5 * torch.randn(2, 400)}
    mcmc = run(kernel, num_samples=20, warmup_steps=20, num_chains=2, initial_params=starts)
    kinetic = mcmc.diagnostics()["sample_stats"]["chain 0"]["site_kinetic_temperature"]
    # 20 draws of 2 sites, each at a rate of 1e-6
    low, high = kinetic_band(0.5, 400, probability=1 - 1e-6)
    assert (low < kinetic).all() and (kinetic < high).all()


def test_rmsprop_at_zero_temperature_is_torch_rmsprop() -> None:
    start = torch.tensor([3.0, -2.0])
    kernel = SGLD(full_model, step_size=0.01, temperature=0.0, preconditioner=RMSprop(decay=0.9, eps=1e-6))
    mcmc = run(kernel, num_samples=20, initial_params={"b": start.unsqueeze(0), "a": torch.tensor([0.0])})
    weights = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.RMSprop([weights], lr=0.01, alpha=0.9, eps=1e-6)
    for step in range(20):
        optimiser.zero_grad()
        (weights.square().sum() / 2).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        torch.testing.assert_close(mcmc.get_samples()["b"][step], weights.detach())


def test_temperatures_of_a_gaussian_are_those_asked_for() -> None:
    """And of a chain that is too hot, as the negative control."""
    draws = 100
    for temperature in (0.25, 1.0):
        kernel = BAOA(scaled_model, step_size=0.05, friction=2.0, temperature=temperature)
        mcmc = run(kernel, num_samples=draws, warmup_steps=20, thinning=20)
        stats = mcmc.diagnostics()["sample_stats"]["chain 0"]
        mean = stats["kinetic_temperature"].mean()
        low, high = kinetic_band(temperature, 800 * draws, probability=1 - 2e-5)
        assert low < mean < high
        assert not low < 2 * mean < high
        assert stats["site_configurational_temperature"][:, 1].mean() == pytest.approx(temperature, rel=0.05)


# --- what ends a run ----------------------------------------------------------------------------------------


def inject_nan(monkeypatch: pytest.MonkeyPatch, at_step: int, chain: int) -> None:
    evaluate = Chains._evaluate
    calls = 0

    def spoiled(self: Chains, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        nonlocal calls
        energy, gradient = evaluate(self, position, minibatch)
        calls += 1
        if calls == at_step + 2:  # the first one is at the start
            gradient = gradient.clone()
            gradient[chain, -1] = torch.nan
        return energy, gradient

    monkeypatch.setattr(Chains, "_evaluate", spoiled)


def test_a_divergence_names_chain_step_and_site_and_keeps_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    inject_nan(monkeypatch, at_step=13, chain=2)
    mcmc = VectorizedMCMC(
        BAOA(full_model, step_size=0.1), 10, 2, num_chains=4, thinning=2, disable_progbar=True
    )
    with pytest.raises(DivergenceError, match="chain 2, step 13: the gradient of site 'a' is not finite"):
        mcmc.run()
    assert mcmc.get_samples(group_by_chain=True)["a"].shape == (4, 4)
    assert mcmc.diagnostics()["sample_stats"]["chain 0"]["lp"].shape == (4,)


def test_masked_chains_end_and_the_others_go_on_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"num_samples": 10, "num_chains": 4, "thinning": 2, "on_divergence": "mask"}
    whole = run(BAOA(full_model, step_size=0.1), **options)
    assert whole.diverged == {}
    inject_nan(monkeypatch, at_step=7, chain=2)
    masked = run(BAOA(full_model, step_size=0.1), **options)
    assert masked.diverged[2].step == 7 and "site 'a'" in masked.diverged[2].what
    kept, expected = (m.get_samples(group_by_chain=True)["b"] for m in (masked, whole))
    assert torch.equal(kept[[0, 1, 3]], expected[[0, 1, 3]])
    assert torch.equal(kept[2, :3], expected[2, :3]) and kept[2, 3:].isnan().all()
    assert masked.get_samples()["b"].shape == (33, 2)
    report = masked.diagnostics()
    assert report["divergences"] == {
        "chain 0": [],
        "chain 1": [],
        "chain 2": list(range(3, 10)),
        "chain 3": [],
    }
    masked.summary()
    assert "chain 2 diverged at step 7" in capsys.readouterr().out


def test_an_interrupt_leaves_the_draws_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Chains._evaluate
    calls = 0

    def interrupting(self: Chains, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        return evaluate(self, position, minibatch)

    monkeypatch.setattr(Chains, "_evaluate", interrupting)
    mcmc = VectorizedMCMC(BAOA(full_model, step_size=0.1), 10, 1, num_chains=2, disable_progbar=True)
    with pytest.raises(KeyboardInterrupt):
        mcmc.run()
    assert mcmc.get_samples(group_by_chain=True)["b"].shape == (2, 6, 2)
    assert mcmc.get_samples()["b"].isfinite().all()
    assert mcmc.diagnostics()["sample_stats"]["chain 1"]["lp"].shape == (6,)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler on the path"
)
def test_compiled_blocks_are_the_steps_they_stand_for(own_packages: Path) -> None:
    """At T = 0 step by step, and in how they end; one package is compiled, some 15 s of CPU."""
    starts = {name: value.double() for name, value in STARTS.items()}

    def chains(jit: Any, step_size: float, **options: Any) -> VectorizedMCMC:
        kernel = SGHMC(full_model, step_size=step_size, temperature=0.0, jit=jit)
        return run(kernel, num_samples=20, num_chains=3, thinning=2, initial_params=starts, **options)

    compiled, traced = (chains(jit, 0.05) for jit in ("compile", "auto"))
    assert compiled._chains is not None and compiled._chains._compiles(False)
    torch.testing.assert_close(compiled.get_samples(), traced.get_samples(), rtol=1e-10, atol=1e-10)
    ours, theirs = (m.diagnostics()["sample_stats"]["chain 1"] for m in (compiled, traced))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    messages = []
    for jit in ("compile", "auto"):
        with pytest.raises(DivergenceError) as caught:
            chains(jit, 3.0)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "site 'a' is not finite" in messages[0]
    masked, expected = (chains(jit, 3.0, on_divergence="mask").diverged for jit in ("compile", "auto"))
    assert masked == expected and len(masked) > 0


# --- what bad input gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; pass an integer >= 1"),
        ({"num_samples": 5, "warmup_steps": -1}, "warmup_steps is -1"),
        ({"num_samples": 5, "num_chains": 1.5}, "num_chains is 1.5"),
        ({"num_samples": 5, "thinning": 0}, "thinning is 0"),
        ({"num_samples": 5, "on_divergence": "stop"}, "on_divergence is 'stop'"),
        ({"num_samples": 5, "initial_params": {}, "initial_values": {}}, "pass one of them"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VectorizedMCMC(BAOA(full_model, step_size=0.1), **options)


def test_other_kernels_and_unfit_starts_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Others run in pyro\.infer\.MCMC"):
        VectorizedMCMC(pyro.infer.NUTS(full_model), 5)  # type: ignore[arg-type]
    kernel = BAOA(full_model, step_size=0.1)
    with pytest.raises(ValueError, match=r"initial_values are given for \['a'\]"):
        run(kernel, num_samples=1, initial_values={"a": torch.ones(1)})
    with pytest.raises(
        ValueError, match=r"'a' have shape \(2,\); unconstrained values of 3 chains have shape \(3,\)"
    ):
        run(kernel, num_samples=1, num_chains=3, initial_params={**STARTS, "a": STARTS["a"][:2]})
    with pytest.raises(ValueError, match="there are no draws: call run"):
        VectorizedMCMC(kernel, 5).get_samples()


def test_a_deep_ensemble_is_the_optimiser_and_warm_it_is_a_sampler() -> None:
    x = torch.linspace(-1, 1, 40)
    data = x, 2 * x
    options: dict[str, Any] = {"num_members": 200, "num_steps": 400, "lr": 0.2, "num_data": 40}

    cold = deep_ensemble(slope, *data, **options).get_samples()["slope"]
    warm = deep_ensemble(slope, *data, temperature=1.0, **options).get_samples()["slope"]
    precision = 1 + x.square().sum()
    mode = 2 * x.square().sum() / precision
    torch.testing.assert_close(cold, mode.expand(200), rtol=0, atol=1e-6)
    assert abs(warm.mean() - mode) < Z_LIMIT / (200 * precision).sqrt()
    assert abs(warm.var() * precision - 1) < Z_LIMIT * (2 / 199) ** 0.5


def test_a_deep_ensemble_starts_from_draws_of_the_prior_unless_told_otherwise() -> None:
    def wide(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 100.0))
        pyro.sample("y", dist.Normal(w, 1e3), obs=y)

    options: dict[str, Any] = {"num_members": 500, "num_steps": 1, "lr": 1e-9, "num_data": 1}
    starts = deep_ensemble(wide, torch.tensor(0.0), **options).get_samples()["w"]
    assert abs(starts.var() / 100**2 - 1) < Z_LIMIT * (2 / 499) ** 0.5
    uniform = deep_ensemble(wide, torch.tensor(0.0), init_strategy=init_to_uniform, **options)
    assert uniform.get_samples()["w"].abs().max() < 2.01
