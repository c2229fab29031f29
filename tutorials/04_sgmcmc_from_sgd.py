# %% [markdown]
# # SG-MCMC from SGD: the same loop, and one number
#
# You have a training loop that works: a learning rate, a momentum, minibatches. It returns one set of
# weights, and doesn't tell how well the data determine them. Stochastic-gradient MCMC is the same loop with
# added noise and does tell, if step size, temperature and minibatches are right. If they are not, the answer
# is wrong and nothing crashes.
#
# This tutorial takes a logistic regression on the breast-cancer data of scikit-learn, and
#
# 1. runs `torch.optim.SGD` and a sampler at temperature 0, and compares their paths;
# 2. sets the temperature to 1, and gets the posterior;
# 3. gets a wrong posterior from minibatches, which the temperatures show and R-hat doesn't, explains where
#    the heat comes from, and fixes it in two ways;
# 4. takes a step that is too large, and shows how to notice;
# 5. uses a `DataLoader`, a deep ensemble and a cyclical schedule;
# 6. checks its own claims.
#
# Run it with `python tutorials/04_sgmcmc_from_sgd.py`; it writes a figure to `sgd/`.

# %%
from __future__ import annotations

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_sym as ps

SMALL = os.environ.get("PYRO_SYM_TUTORIALS", "full") == "small"  # a smoke run
CHAINS, DRAWS, THINNING = (16, 100, 8) if SMALL else (32, 300, 20)
BATCH = 32

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
pyro.set_rng_seed(0)
OUT = Path("sgd")
OUT.mkdir(exist_ok=True)

# %% [markdown]
# ## The loop that you have
# The data are 30 measurements of 569 tumours, benign or malignant. The loss is the mean over the data, and
# weight decay keeps the weights finite. Each step uses all data; minibatches come later.

# %%
cancer = load_breast_cancer()
x = torch.tensor((cancer.data - cancer.data.mean(0)) / cancer.data.std(0))
y = torch.tensor(cancer.target, dtype=torch.float64)
N, D = x.shape
LR, MOMENTUM, PRIOR = 0.8, 0.9, 1.0

weight = torch.zeros(D, requires_grad=True)
bias = torch.zeros((), requires_grad=True)
optimiser = torch.optim.SGD(
    [weight, bias], lr=LR, momentum=MOMENTUM, weight_decay=1 / (N * PRIOR**2)
)
path = []
for _ in range(200):
    optimiser.zero_grad()
    torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, y).backward()
    optimiser.step()
    path.append(weight.detach().clone())
path = torch.stack(path)

# %% [markdown]
# ## The same loop as a sampler at temperature 0
# The loss, times N, is the negative log joint of a Pyro model; a weight decay of 1/(N s²) is a normal prior
# of standard deviation s. `from_sgd` takes the optimiser's numbers. At temperature 0 no noise is added, and
# the sampler *is* the optimiser: not nearly, but step by step.


# %%
def model(x: Tensor, y: Tensor, batch_size: int | None = None) -> None:
    weight = pyro.sample("weight", dist.Normal(torch.zeros(D), PRIOR).to_event(1))
    bias = pyro.sample("bias", dist.Normal(torch.tensor(0.0), PRIOR))
    with pyro.plate("tumour", len(x), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Bernoulli(logits=x[rows] @ weight + bias), obs=y[rows])


sgd = {"lr": LR, "momentum": MOMENTUM, "num_data": N}
origin = {"weight": torch.zeros(1, D), "bias": torch.zeros(1)}
apart = {}
for Kernel in (ps.BAOA, ps.SGHMC):
    cold = ps.VectorizedMCMC(
        Kernel.from_sgd(model, temperature=0.0, **sgd),
        num_samples=len(path),
        warmup_steps=0,
        initial_params=origin,
        disable_progbar=True,
    )
    cold.run(x, y)
    name, distance = Kernel.__name__, float((cold.get_samples()["weight"] - path).abs().max())
    apart[name] = distance
    print(f"{name:<6} at T = 0, largest distance from SGD in {len(path)} steps: {distance:.1e}")

# %% [markdown]
# ## Temperature 1
# Only one number differs between optimiser and posterior. The sampler's own parameters are physical: a step
# size h in units of time and a friction γ per unit of time. A learning rate is roughly the square of a step
# size, for the *mean* loss, hence the N:
#
# $$h = \sqrt{\frac{2 \, \mathrm{lr}}{N (1 + \mu)}}, \qquad \gamma = -\frac{\ln \mu}{h}.$$
#
# Half the learning rate means a step 0.7 times as long. T tempers the whole joint: p(θ, D)^(1/T). At T = 1
# the target is the posterior, whatever N is. Code that adds noise to the *mean* loss needs T/N in its place;
# otherwise the temperature is N times too high, and a Gaussian posterior √N times too wide.

# %%
kernel = ps.BAOA.from_sgd(model, temperature=1.0, **sgd)
print(f"learning rate {LR}, momentum {MOMENTUM}")
print(f"step size {kernel.step_size:.5f}, friction {kernel.friction:.2f}")
mode = {"weight": weight.detach().expand(CHAINS, D), "bias": bias.detach().expand(CHAINS)}


def run(kernel: ps.StochasticGradientKernel, *args: object) -> ps.VectorizedMCMC:
    pyro.set_rng_seed(1)
    mcmc = ps.VectorizedMCMC(
        kernel,
        num_samples=DRAWS,
        warmup_steps=DRAWS // 2,
        num_chains=CHAINS,
        thinning=THINNING,
        initial_params=mode,
        disable_progbar=True,
    )
    mcmc.run(*args)
    return mcmc


exact = run(kernel, x, y)

# %% [markdown]
# ## Minibatches, and what they do to the temperature
# With `subsample_size` the plate draws new rows in each step and scales up their likelihood. The gradient is
# unbiased but noisy, and the noise of the minibatch adds to that of the sampler: it *heats* the chain. The
# effect can be predicted. If V is the variance of a coordinate of the gradient, heating and friction balance
# at
#
# $$T_{\text{kinetic}} \approx 1 + \frac{h V}{2 \gamma}, \qquad
#   V = \frac{N (N - B)}{B} \, \operatorname{var}_n(g_n),$$
#
# with the variance over rows of their gradients g, in batches of B rows. There are two remedies:
#
# * a smaller step: with the same momentum, half the step doubles the friction, so the heat is a quarter;
# * **control variates**: the gradient is centred at a mode, where it is known on all data, and the minibatch
#   estimates only the difference. V is then the variance of the differences. Each step evaluates the batch
#   twice.


# %%
def temperature(mcmc: ps.VectorizedMCMC) -> float:
    statistics = mcmc.diagnostics()["sample_stats"]
    return float(
        torch.stack([chain["kinetic_temperature"].mean() for chain in statistics.values()]).mean()
    )


def width(mcmc: ps.VectorizedMCMC) -> float:
    """The standard deviations of the weights, as a multiple of the exact ones; their median."""
    sd, reference = (run.get_samples()["weight"].std(0) for run in (mcmc, exact))
    return float((sd / reference).median())


def r_hat(mcmc: ps.VectorizedMCMC) -> float:
    """The largest of the weights."""
    draws = ps.from_pyro({"weight": mcmc.get_samples(group_by_chain=True)["weight"]})
    import arviz as az

    return float(az.rhat(ps.dataset(draws, "posterior"))["weight"].max())


def heat(kernel: ps.BAOA, mcmc: ps.VectorizedMCMC, centred: bool = False) -> float:
    """1 + h V / 2γ, with V averaged over coordinates and the draws of a run."""
    design = torch.cat([x, torch.ones(N, 1)], -1)
    at_mode = torch.sigmoid(x @ weight.detach() + bias.detach())
    variances = []
    for w, b in zip(*(mcmc.get_samples()[site][::7] for site in ("weight", "bias")), strict=True):
        residuals = torch.sigmoid(x @ w + b) - (at_mode if centred else y)
        variances.append((residuals[:, None] * design).var(0).mean())
    V = N * (N - BATCH) / BATCH * float(torch.stack(variances).mean())
    return 1 + kernel.step_size * V / (2 * kernel.friction)


small_steps = sgd | {"lr": LR / 4}
half_step = ps.BAOA.from_sgd(model, temperature=1.0, **small_steps)
variates = ps.BAOA.from_sgd(model, temperature=1.0, gradient="control_variate", **sgd)
runs = {
    "all data": exact,
    "minibatches of 32": run(kernel, x, y, BATCH),
    "... half the step": run(half_step, x, y, BATCH),
    "... control variates": run(variates, x, y, BATCH),
}

# %% [markdown]
# A `DataLoader` works as well as a subsampled plate. Its batches become the model's arguments, and the model
# must state the total number of rows.


# %%
def on_batch(x: Tensor, y: Tensor) -> None:
    weight = pyro.sample("weight", dist.Normal(torch.zeros(D), PRIOR).to_event(1))
    bias = pyro.sample("bias", dist.Normal(torch.tensor(0.0), PRIOR))
    with pyro.plate("tumour", N, subsample_size=len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ weight + bias), obs=y)


loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, drop_last=True)
runs["... by a DataLoader"] = run(
    ps.BAOA.from_sgd(on_batch, temperature=1.0, batches=loader, **sgd)
)

low, high = ps.kinetic_band(1.0, D + 1)
kernels = dict(zip(runs, (kernel, kernel, half_step, variates, kernel), strict=True))
foreseen, explained = {}, {}
print(f"{'':<22}{'temperature':>12}{'foreseen':>10}{'explained':>11}{'width':>8}{'R-hat':>8}")
for name, mcmc in runs.items():
    centred = name == "... control variates"
    foreseen[name], explained[name] = (
        1.0 if mcmc is exact else heat(kernels[name], draws, centred) for draws in (exact, mcmc)
    )
    print(
        f"{name:<22}{temperature(mcmc):>12.3f}{foreseen[name]:>10.3f}{explained[name]:>11.3f}"
        f"{width(mcmc):>8.3f}{r_hat(mcmc):>8.3f}"
    )
print(f"(single draws at T = 1: 99 % between {low:.2f} and {high:.2f}; their mean is closer to 1)")

# %% [markdown]
# Two columns evaluate the formula: *foreseen* with V at draws of the posterior, and *explained* with V at the
# run's own draws. A hot chain reaches regions where the gradients of the rows differ more, which heats it
# further: where the heat is large, the prediction is too low.
#
# Plate and loader run too hot, and their posterior is too wide. R-hat doesn't show it: the chains agree with
# each other on the wrong distribution. Half the step, which is a quarter of the learning rate, removes most
# of the excess; so do control variates, at the same learning rate and with the same minibatches. Half the
# step has a price: with twice the friction the chains move a quarter as far in the same number of steps, and
# R-hat does show that.
#
# ## A step that is too large
# At T = 0 a learning rate is too large when the loss explodes. On a Gaussian of curvature λ, optimiser and
# BAOA are stable up to h²λ = 4, and BAOA has the right variance up to there. If the posterior isn't Gaussian,
# there is an error of order h²: halve the step, run again, and compare. Beyond the limit the temperature is
# wrong by orders of magnitude. The gradients of a logistic likelihood are bounded, so nothing overflows; if
# they were not, a `DivergenceError` would name chain, step and site.

# %%
p = torch.sigmoid(x @ weight.detach() + bias.detach())
design = torch.cat([x, torch.ones(N, 1)], -1)
hessian = (design * (p * (1 - p))[:, None]).T @ design + torch.eye(D + 1) / PRIOR**2
curvature = float(torch.linalg.eigvalsh(hessian).max())  # the largest at the mode

by_step, limits = {}, {}
for factor in (1, 16, 256):
    scaled = ps.BAOA.from_sgd(model, temperature=1.0, **sgd | {"lr": LR * factor})
    large = exact if factor == 1 else run(scaled, x, y)
    by_step[factor], limits[factor] = temperature(large), scaled.step_size**2 * curvature
    print(
        f"lr {LR * factor:>6.1f}, h²λ = {limits[factor]:>6.2f}: "
        f"kinetic temperature {by_step[factor]:>8.3f}, "
        f"width {width(large):>6.3f}"
    )

# %% [markdown]
# ## Deep ensembles, and cycles
# `deep_ensemble` trains members side by side, each from its own start. At T = 0 they are runs of SGD. This
# loss is strictly convex, so all members end at its one minimum, and their spread says nothing about the
# posterior. The same call at T = 1 draws from the posterior.
#
# `Cyclical` holds step size and temperature in one object: each cycle explores at T = 0 with a large step,
# then samples at T = 1 with smaller ones. With one mode there is nothing to explore, and each cycle loses its
# spread and must regain it. The kernel knows from its friction how long that takes; until then it records
# draws with a temperature of NaN. Keep the draws with a positive temperature.

# %%
members = {}
for T in (0.0, 1.0):
    pyro.set_rng_seed(2)
    ensemble = ps.deep_ensemble(
        model, x, y, num_members=CHAINS, num_steps=600, temperature=T, **sgd
    )
    members[T] = width(ensemble)
    print(f"deep ensemble, T = {T}: spread of the members {members[T]:.3f} of the posterior's")

cycle = ps.Cyclical(
    peak=kernel.step_size, period=100 * THINNING, sampling_fraction=0.5, floor=kernel.step_size / 4
)
options = {
    "step_size": cycle.step_size,
    "temperature": cycle.temperature,
    "friction": kernel.friction,
}
cyclic = run(ps.BAOA(model, **options), x, y)
at = torch.stack([c["temperature"] for c in cyclic.diagnostics()["sample_stats"].values()])
cyclic_width = {}
for name, chosen in (("on the way from T = 0", at.isnan()), ("to keep", at > 0)):
    draws = cyclic.get_samples(group_by_chain=True)["weight"][chosen]
    cyclic_width[name] = float((draws.std(0) / exact.get_samples()["weight"].std(0)).median())
    share = float(chosen.double().mean())
    print(f"cyclical, draws {name}: {share:.0%} of them, width {cyclic_width[name]:.3f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
exact_sd = exact.get_samples()["weight"].std(0)
worst = int(exact_sd.argmax())
for name in ("all data", "minibatches of 32", "... control variates"):
    left.hist(
        runs[name].get_samples()["weight"][:, worst].numpy(),
        40,
        density=True,
        histtype="step",
        linewidth=1.6,
        label=name,
    )
left.axvline(weight[worst].item(), color="k", linestyle=":", label="where SGD ends")
left.set(xlabel=f"weight of '{cancer.feature_names[worst]}'", ylabel="density")
left.legend(fontsize=8)
names = list(runs)
right.plot(
    [temperature(runs[name]) for name in names],
    np.arange(len(names)),
    "o",
    label="kinetic temperature",
)
right.plot(
    [width(runs[name]) for name in names],
    np.arange(len(names)),
    "s",
    mfc="none",
    label="width / exact width",
)
right.axvline(1.0, color="0.5", linewidth=0.8)
right.set(
    xlabel="kinetic temperature, and width: both should be 1",
    yticks=np.arange(len(names)),
    yticklabels=names,
)
right.invert_yaxis()
right.legend(fontsize=8)
figure.savefig(OUT / "temperatures.png", dpi=150)

# %% [markdown]
# ## What this shows

# %%
excess = {name: temperature(mcmc) - 1 for name, mcmc in runs.items()}
hot, half, centred, loaded = list(runs)[1:]
assert max(apart.values()) < 1e-10, "at T = 0 the sampler is SGD with momentum"
assert abs(excess["all data"]) < 0.05, "on all data the sampler holds its temperature"
for name in (hot, half, centred, loaded):
    # The formula is of first order in γh, which is 0.1; the rest of the margin is for noise.
    assert abs(excess[name] / (explained[name] - 1) - 1) < 0.3, f"{name}: the heat is that of V"
assert excess[hot] > 0.5 and excess[loaded] > 0.5, "minibatches heat it, from a plate or a loader"
assert excess[half] < 0.5 * excess[hot], "less so with smaller steps: a quarter is foreseen"
assert excess[centred] < 0.6 * excess[hot], "and with control variates: a third is foreseen"
assert foreseen[hot] < explained[hot], "a hot chain strays to where it is heated more"
assert width(runs[hot]) > 1, "a chain that is too hot has a posterior that is too wide"
assert r_hat(runs[hot]) < r_hat(exact) + 0.1, "which R-hat doesn't see"
assert r_hat(runs[half]) > r_hat(exact), "it sees that half the step moves more slowly"
assert limits[16] < 4 < limits[256], "one step is within the limit of stability, one past it"
assert abs(by_step[16] - 1) < 0.1 and by_step[256] > 10, "the temperature tells which is which"
assert members[0.0] < 0.05 and members[1.0] > 0.7, "a cold ensemble of a convex loss has no spread"
assert 0.9 < cyclic_width["to keep"] < 1.1, "draws to keep are as wide as the posterior"
assert cyclic_width["on the way from T = 0"] < cyclic_width["to keep"] - 0.05, (
    "the first of a phase are not"
)
print("all claims hold")
