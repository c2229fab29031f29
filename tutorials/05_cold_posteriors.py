# %% [markdown]
# # Cold posteriors: what a temperature does, and what it tells
#
# All samplers of this package take a `temperature`. At temperature T they draw from
#
# $$\pi_T(\theta) \propto p(\theta, D)^{1/T},$$
#
# which is the posterior at T = 1, more concentrated around the same modes below 1, and the modes alone at
# T = 0. One number thus leads from SGD (T = 0) to Bayes (T = 1), and it is natural to ask at which value
# predictions are best. By Bayes' theorem it is 1, if the model is right. Networks often predict better below
# 1, which Wenzel et al. (2020) called the *cold posterior effect*.
#
# This tutorial
#
# 1. runs a small network on digits at three temperatures;
# 2. checks that the chains have the temperature that was asked for, and shows one that has not;
# 3. finds a cold posterior effect, and removes it with data for which the model is right;
# 4. checks its own claims.
#
# It writes `cold_posteriors/kinetic.png` and `cold_posteriors/effect.png`. With the environment variable
# `PYRO_SYM_TUTORIALS=small` it takes fewer steps.

# %%
from __future__ import annotations

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_sample
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import pyro_sym as ps
from pyro_sym.nn import Categorical, FanInPrior, Prediction

SMALL = os.environ.get("PYRO_SYM_TUTORIALS", "full") == "small"
CHAINS, WARMUP, DRAWS, WORLDS = (6, 10, 15, 2) if SMALL else (6, 25, 40, 4)
THINNING = 20  # steps a draw
TEMPERATURES = (0.0, 0.1, 1.0)

pyro.set_rng_seed(1)
torch.set_num_threads(1)
OUT = Path("cold_posteriors")
OUT.mkdir(exist_ok=True)

# %% [markdown]
# ## Digits, a network, a prior
# We train on 150 of scikit-learn's digits and test on the other 1,647. With so few data, uncertainty matters.

# %%
digits = load_digits()
x, test_x, y, test_y = (
    torch.as_tensor(part)
    for part in train_test_split(
        digits.data.astype(np.float32) / 8 - 1,
        digits.target,
        train_size=150,
        stratify=digits.target,
        random_state=0,
    )
)
N = len(x)
net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
prior = FanInPrior(3.0, bias_scale=0.3)
model = ps.BayesianModule(net, prior, Categorical(), batch_size=75)
dimension = sum(parameter.numel() for parameter in net.parameters())

# %% [markdown]
# ## A tempered run
# `BAOA.from_sgd` takes the learning rate and the momentum of SGD, and a temperature. Nothing else changes
# between the runs below: at T = 0 there is no noise and each chain is a run of SGD, so that the draws are a
# deep ensemble; at T = 1 the noise has the variance that makes the chain a sampler of the posterior.
#
# (With a guide instead of chains, a temperature is a factor on the guide's entropy: `SVI(model,
# pyro.poutine.scale(guide, scale=T), ...)` fits the guide to the same target.)


# %%
def tempered(
    model: ps.BayesianModule, y: Tensor, temperature: float, *, lr: float = 0.03
) -> ps.VectorizedMCMC:
    """Chains at a temperature, each from its own draw of the prior."""
    kernel = ps.BAOA.from_sgd(
        model,
        lr=lr,
        momentum=0.9,
        num_data=N,
        temperature=temperature,
        init_strategy=init_to_sample,
    )
    mcmc = ps.VectorizedMCMC(
        kernel,
        num_samples=DRAWS,
        warmup_steps=WARMUP,
        num_chains=CHAINS,
        thinning=THINNING,
        disable_progbar=True,
    )
    mcmc.run(x, y)
    return mcmc


def loss(prediction: Prediction, y: Tensor) -> float:
    return -float(prediction.log_prob(y).mean())


runs = {temperature: tempered(model, y, temperature) for temperature in TEMPERATURES}
predictions = {
    temperature: model.predict(mcmc.get_samples(), test_x) for temperature, mcmc in runs.items()
}
print(f"{'on the test digits':<20}{'log loss':>10}{'accuracy':>10}{'confidence':>12}")
for temperature, prediction in predictions.items():
    confidence, classes = prediction.probs.max(-1)
    print(
        f"{f'T = {temperature:g}':<20}{loss(prediction, test_y):>10.3f}"
        f"{(classes == test_y).double().mean():>10.3f}{confidence.mean():>12.3f}"
    )

# %% [markdown]
# The colder the chains, the lower the loss: this is the effect. Compare the last two columns: at T = 1 the
# network is right far more often than its probabilities say. We come back to that.
#
# ## Did the chains have their temperature?
# First check the temperature of the chains. At stationarity the momenta of a
# chain at temperature T are normal with variance T, so their mean square, the *kinetic temperature*, is T
# times a χ² variable of d degrees of freedom over d. Every draw records it, and `kinetic_band` says where
# it should be.
#
# The noise of minibatches raises it above T: gradients of few rows vary, and this noise adds to that of the
# sampler. The heating doesn't depend on T, so it matters most where T is small. It is proportional to the
# learning rate, and falls with the batch size. Here is the run
# at T = 0.1 again, with five rows a step instead of 75.


# %%
def kinetic(mcmc: ps.VectorizedMCMC) -> np.ndarray:
    """Kinetic temperatures, chains by draws."""
    stats = mcmc.diagnostics()["sample_stats"].values()
    return np.stack([own["kinetic_temperature"].numpy() for own in stats])


small_batches = ps.BayesianModule(net, prior, Categorical(), batch_size=5)
measured = {f"T = {temperature:g}": kinetic(mcmc) for temperature, mcmc in runs.items()}
measured["T = 0.1, 5 rows a step"] = kinetic(tempered(small_batches, y, 0.1))

print(f"\n{'kinetic temperature':<26}{'mean':>8}{'inside of the 99 % band':>26}")
share = {}
for name, values in measured.items():
    wanted = float(name.split(",")[0].removeprefix("T = "))
    if wanted:
        low, high = ps.kinetic_band(wanted, dimension)
        share[name] = float(((low < values) & (values < high)).mean())
    print(f"{name:<26}{values.mean():>8.3f}" + (f"{share[name]:>26.0%}" if wanted else f"{'':>26}"))

# %% [markdown]
# With 75 rows a step nearly all draws are in the band. SGD isn't exactly at T = 0 either, because of the
# noise of its minibatches. With five rows the chain is far hotter than its nominal T = 0.1, so a cold
# posterior measured there would in fact be a warmer one. Use larger batches or a smaller learning rate, or
# let the thermostat of `SGNHT` absorb the heat.
#
# On a Gaussian the kinetic temperature doesn't depend on the step size; on other targets it does. If it is
# too high even on all rows, halve the step. The same report has a `configurational_temperature`, of
# positions.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for panel, name in zip(panels, ("T = 0.1", "T = 0.1, 5 rows a step"), strict=True):
    panel.axhspan(*ps.kinetic_band(0.1, dimension), color="0.85", label="99 % of draws at T = 0.1")
    panel.plot(measured[name].T, color="#0072B2", linewidth=0.8)
    panel.set(title=name, xlabel="draw")
panels[0].set(
    ylabel="kinetic temperature", ylim=(0, 1.2 * measured["T = 0.1, 5 rows a step"].max())
)
panels[0].legend(loc="lower left")
figure.savefig(OUT / "kinetic.png", dpi=150)

# %% [markdown]
# ## Why is colder better?
# If weights were drawn from the prior and labels from the network with those weights, then no prediction
# would have a lower expected loss than the posterior's at T = 1. This follows from Bayes' theorem, for any
# network and any prior. So if T = 0.1 predicts better, and the chains have their temperature, **the model is
# wrong about these data**: its prior or its likelihood.
#
# We can test this. Keep the images, draw weights from the prior, let the network draw its own labels for
# training and test, and run the same chains again. The loss is averaged over a few such data sets.

# %%
losses: dict[str, list[list[float]]] = {
    "the digits": [[loss(p, test_y) for p in predictions.values()]]
}
losses["labels drawn by the model"] = []
whole = ps.BayesianModule(net, prior, Categorical())
for _ in range(WORLDS):
    with torch.no_grad():
        labels = whole(torch.cat([x, test_x]))
    own_y, own_test_y = labels[:N], labels[N:]
    losses["labels drawn by the model"].append(
        [
            loss(
                model.predict(tempered(model, own_y, temperature).get_samples(), test_x), own_test_y
            )
            for temperature in TEMPERATURES
        ]
    )
mean = {name: np.mean(values, axis=0) for name, values in losses.items()}
print(
    f"\n{'log loss':<28}" + "".join(f"{f'T = {temperature:g}':>10}" for temperature in TEMPERATURES)
)
for name, values in mean.items():
    print(f"{name:<28}" + "".join(f"{value:>10.3f}" for value in values))

# %% [markdown]
# With the same network, prior, images and chains the order is reversed: where the model is right, cooling
# increases the loss. So the effect was not caused by networks or samplers, but by the digits.
#
# What is wrong with the model there? Draws from this prior are uncertain networks whose labels are noisy.
# Real labels are not: a digit got into the data because people agreed on it. Aitchison (2021) writes this as
# a likelihood: if a label is kept only where S people agree, each row counts S times, and the posterior of
# that model is sharper than the one that counts each row once. Lowering the temperature counts rows, and the
# prior, more often. This fits what we saw above: at T = 1 the network was right more often than it said.
#
# Izmailov et al. (2021) ran long full-batch HMC on large networks, and found almost no effect without data
# augmentation. With augmentation it isn't clear how often a row should count that is seen in many versions,
# and so it isn't clear which temperature is 1. A poor approximation can also look better when cold: a
# mean-field guide adds up the noise of all coordinates, and cooling reduces it. The study of cold posteriors
# in the benchmarks measures this.
#
# A cold posterior effect therefore raises questions about the model. Which prior makes networks as certain as
# the labels? Does each row count as often as it should? Is the guide too coarse? Choosing a temperature on
# held-out data is a legitimate way to predict, but the result is not a posterior.
#
# In the figure, each thin line is a draw of the prior, and the thick line is their mean.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for panel, (name, values) in zip(panels, losses.items(), strict=True):
    for world in values:
        panel.plot(range(len(TEMPERATURES)), world, color="#0072B2", linewidth=1)
    panel.plot(range(len(TEMPERATURES)), mean[name], color="#D55E00", marker="o", linewidth=2)
    panel.set_xticks(range(len(TEMPERATURES)), [f"{temperature:g}" for temperature in TEMPERATURES])
    panel.set(title=name, xlabel="temperature")
panels[0].set_ylabel("test log loss, nats a row")
figure.savefig(OUT / "effect.png", dpi=150)
print(f"\nwrote {OUT}/: kinetic.png, effect.png")

# %% [markdown]
# ## What this shows

# %%
cold, warm = TEMPERATURES.index(0.1), TEMPERATURES.index(1.0)
confidence, classes = predictions[1.0].probs.max(-1)
for temperature in (0.1, 1.0):
    name = f"T = {temperature:g}"
    assert abs(measured[name].mean() / temperature - 1) < 0.1, (
        f"the chains at {name} hold their temperature"
    )
assert measured["T = 0.1, 5 rows a step"].mean() > 0.12, "small batches heat"
assert mean["the digits"][cold] < mean["the digits"][warm], (
    "on digits, T = 0.1 predicts better than T = 1"
)
assert confidence.mean() < (classes == test_y).double().mean(), (
    "at T = 1 the network is right more than it says"
)
assert mean["labels drawn by the model"][cold] > mean["labels drawn by the model"][warm], (
    "where the model is right, T = 1 predicts better"
)
print("all claims hold")

# %% [markdown]
# ## References
# * Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?" (arXiv 2002.02405).
# * Aitchison 2021, "A statistical theory of cold posteriors in deep neural networks" (arXiv 2008.05912).
# * Izmailov et al. 2021, "What are Bayesian neural network posteriors really like?" (arXiv 2104.14421).
# * Duffield et al. 2024, "Scalable Bayesian learning with posteriors" (arXiv 2406.00104).
