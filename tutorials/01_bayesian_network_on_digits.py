# %% [markdown]
# # A Bayesian network on digits, from its symmetries to its diagnostics
#
# A network computes the same function when its hidden units are renumbered and, with `tanh` units, when the
# signs of all weights into and out of a unit are flipped. The posterior of the small network below therefore
# has 10⁴⁵ copies of each mode. This does not affect predictions. It does affect what we say *about* the
# posterior: the ELBO, and every diagnostic of the weights.
#
# This tutorial uses all parts of the package on one network and the 1,797 digits of scikit-learn. It
#
# 1. finds the symmetries of a PyTorch module, and turns the module into a Pyro model that has them;
# 2. fits a mean-field guide, averages it over the group, and computes the gain in nats;
# 3. runs one sampler at two temperatures: at T = 0 it is SGD, and several runs are a deep ensemble; at T = 1
#    it draws from the posterior;
# 4. splits predictive uncertainty into the part due to the digits and the part due to the weights;
# 5. checks whether the chains agree about the weights, the weights up to symmetry, and the function;
# 6. checks its own claims.
#
# Run it with `python tutorials/01_bayesian_network_on_digits.py`, or in less time with
# `PYRO_SYM_TUTORIALS=small` in the environment; it writes `digits/posterior.nc`, `digits/diagnostics.png`
# and `digits/uncertainty.png`.

# %%
from __future__ import annotations

import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.optim import ClippedAdam
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import pyro_sym as ps
from pyro_sym.nn import Categorical, FanInPrior, IIDPrior, LayerwisePrior, Prediction

SMALL = (
    os.environ.get("PYRO_SYM_TUTORIALS", "full") == "small"
)  # a smoke run: shorter chains, and fewer of them
SVI_STEPS, CHAINS, WARMUP, DRAWS = (300, 3, 30, 40) if SMALL else (1000, 4, 100, 100)
THINNING = 20  # steps a draw

pyro.set_rng_seed(1)
torch.set_num_threads(1)
OUT = Path("digits")
OUT.mkdir(exist_ok=True)

# %% [markdown]
# ## The digits
# The images have 8 × 8 pixels; each pixel is centred. 400 images are held out for testing, stratified by
# class.

# %%
digits = load_digits()
train_x, test_x, train_y, test_y = (
    torch.as_tensor(part)
    for part in train_test_split(
        digits.data.astype(np.float32),
        digits.target,
        test_size=400,
        stratify=digits.target,
        random_state=0,
    )
)
centre, scale = train_x.mean(0), train_x.std()
x, test_x = (train_x - centre) / scale, (test_x - centre) / scale
y = train_y
N = len(x)

# %% [markdown]
# ## The network and its symmetries
# Any `torch.nn.Module` works. We train this one briefly in the usual way; the guide will start from it.
# `symmetry_of` reads the permutations and sign flips from the graph that `torch.export` makes, and verifies
# each on a copy of the network.

# %%
net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(300):
    rows = torch.randperm(N)[:128]
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
    optimiser.step()

symmetry = ps.symmetry_of(net, x[:2])
print(symmetry)

# %% [markdown]
# The table reads: permute the rows of the first layer's weights, its biases, and the columns of the second
# layer's weights, all by the same permutation; or flip their signs, all with the same signs. That makes 32!
# · 2³² elements.
#
# ## The model
# A prior for every parameter and a likelihood for the output make the network a Pyro model. Its sites have
# the names of the parameters. With `batch_size` the model takes all data and draws minibatches in its own
# plate.
#
# The *model* has the network's symmetry only if the prior has it, too: units must be exchangeable and, for
# the flips, symmetric about zero. A prior that depends on the number of inputs qualifies. One that treats
# the first unit differently does not, and the check raises an error.

# %%
prior = LayerwisePrior(
    {"0": FanInPrior(3.0), "2": FanInPrior(6.0)}
)  # standard deviations 3/√64 and 6/√32
model = ps.BayesianModule(net, prior, Categorical(), batch_size=128)
whole = ps.BayesianModule(net, prior, Categorical())  # the same model, on all rows at each call
ps.check_symmetry(whole, symmetry, x, y)

by_unit = IIDPrior(dist.Normal(0.0, torch.linspace(0.1, 1.0, 32)))
unequal = LayerwisePrior({"0.bias": by_unit}, default=prior)
try:
    ps.check_symmetry(ps.BayesianModule(net, unequal, Categorical()), symmetry, x, y)
except ps.SymmetryError as error:
    refusal = str(error)
    print(f"\na prior with a scale for each unit: {refusal}")

# %% [markdown]
# ## A symmetrised guide
# A mean-field guide fits one copy of a mode. Its average over the group covers all copies, and its ELBO is
# higher, by log |G| if the copies don't overlap. The average has 10⁴⁵ terms, but the estimator finds those
# that matter; where units lie far apart, the average is known without computing it.
#
# It works with `SVI` like any guide, and starts from the weights of the network.

# %%
guide = ps.AutoSymmetrizedNormal(
    model, symmetry, init_loc_fn=model.init_to_pretrained, init_scale=0.03
)
svi = SVI(model, guide, ClippedAdam({"lr": 0.02, "lrd": 0.05 ** (1 / SVI_STEPS)}), Trace_ELBO())
for _ in range(SVI_STEPS):
    svi.step(x, y)

gain = guide.symmetry_gain(x, y, num_samples=100)
elbo = Trace_ELBO(num_particles=100, vectorize_particles=True, max_plate_nesting=1)
pyro.set_rng_seed(2)
symmetrised_elbo = -elbo.loss(whole, guide, x, y)
pyro.set_rng_seed(2)  # the same draws
plain_elbo = -elbo.loss(whole, guide.guide, x, y)

print(f"\nlog |G|                          {gain.log_order:9.2f} nats")
print(f"gain of the average, bracketed   {gain.lower:9.2f} to {gain.upper:.2f} ({gain.method})")
print(f"ELBO, the guide inside           {plain_elbo:9.2f}")
print(f"ELBO, averaged over the group    {symmetrised_elbo:9.2f}")

# %% [markdown]
# At the same draws, the two ELBOs differ by exactly the gain. The gain may be a little less than log |G|: the
# weights of a unit that is hardly used stay near the prior, so that its copies overlap.
#
# ## One sampler, two temperatures
# `BAOA.from_sgd` takes the learning rate and momentum of an optimiser. At T = 0 the chain *is* SGD with
# momentum on the log joint, and several runs are a deep ensemble. At T = 1 noise is added, with the variance
# that makes the chain a sampler of the posterior. Each chain starts from its own draw of the prior, and all
# chains run side by side in one process.

# %%
sgd = {"lr": 0.2, "momentum": 0.9, "num_data": N, "init_strategy": init_to_sample}

ensemble = ps.deep_ensemble(
    model, x, y, num_members=CHAINS, num_steps=THINNING * (WARMUP + DRAWS), temperature=0.0, **sgd
)
mcmc = ps.VectorizedMCMC(
    ps.BAOA.from_sgd(model, temperature=1.0, **sgd),
    num_samples=DRAWS,
    warmup_steps=WARMUP,
    num_chains=CHAINS,
    thinning=THINNING,
    disable_progbar=True,
)
mcmc.run(x, y)

# %% [markdown]
# ## Predictions
# `predict` runs the network for all draws at once. The predictive distribution is the average over draws;
# its entropy has two parts. The *aleatoric* part would remain if the weights were known: some digits are
# drawn so badly that nobody can read them. The *epistemic* part is the disagreement between draws, which
# more data would remove.

# %%
predictions = {
    "one network": model.predict(
        {name: value.detach() for name, value in net.named_parameters()}, test_x
    ),
    "mean-field guide": model.predict(guide.sample_posterior(x, y, sample_shape=(100,)), test_x),
    "ensemble, T = 0": model.predict(ensemble.get_samples(), test_x),
    "one draw, T = 1": model.predict(
        {name: values[-1] for name, values in mcmc.get_samples().items()}, test_x
    ),
    "posterior, T = 1": model.predict(mcmc.get_samples(), test_x),
}


def accuracy(prediction: Prediction) -> float:
    return float((prediction.probs.argmax(-1) == test_y).double().mean())


print(
    f"\n{'on 400 test digits':<20}{'accuracy':>10}{'log loss':>10}"
    f"{'aleatoric':>11}{'epistemic':>11}"
)
for name, prediction in predictions.items():
    log_loss, entropy = -prediction.log_prob(test_y).mean(), prediction.entropy
    print(
        f"{name:<20}{accuracy(prediction):>10.4f}{log_loss:>10.3f}"
        f"{entropy.aleatoric.mean():>11.3f}{entropy.epistemic.mean():>11.3f}"
    )

# %% [markdown]
# A single draw of the posterior is a poor classifier, and the average of the draws is a good one: a draw is
# not an estimate, but one set of weights that is compatible with the data. The cold ensemble has the lower
# log loss, as is common for networks with such vague priors (Wenzel et al. 2020 call it the cold posterior
# effect). But its members agree even where they are wrong: it has almost no epistemic uncertainty.
#
# Next come inputs that the network was not trained for: the same digits rotated by 90°, and with their
# pixels shuffled, in one order for all. Good predictions should be more uncertain here, and the additional
# uncertainty should be epistemic.

# %%
quarter = test_x.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)
shuffled = test_x[:, torch.randperm(64)]
inputs = {"test digits": test_x, "turned by 90°": quarter, "pixels shuffled": shuffled}
draws = {"ensemble, T = 0": ensemble.get_samples(), "posterior, T = 1": mcmc.get_samples()}
entropies = {
    (who, what): model.predict(values, rows).entropy
    for who, values in draws.items()
    for what, rows in inputs.items()
}
print(f"\n{'epistemic, nats':<20}" + "".join(f"{what:>17}" for what in inputs))
for who in draws:
    print(
        f"{who:<20}" + "".join(f"{entropies[who, what].epistemic.mean():>17.3f}" for what in inputs)
    )

# %% [markdown]
# ## Do the chains agree?
# R-hat compares the variance between chains with that within chains. We compute it for
#
# * the **raw** weights: meaningless, as each chain has numbered its units in its own way;
# * the **aligned** weights: every draw is moved to the same numbering and signs. The remaining differences
#   between chains are not due to labels;
# * the **function**: log probabilities at test digits, which no symmetry changes and on which predictions
#   depend.
#
# `from_pyro` exports all three: the values of the function are one more variable beside the weights. It
# warns if labels are in doubt, which happens for units that are hardly used.


# %% mystnb={"output_stderr": "show"}
def log_probs(draw: dict[str, Tensor]) -> Tensor:
    """Log probabilities of all classes at some test digits."""
    return model.predict(draw, test_x[:50]).law.logits[0]


idata = ps.from_pyro(mcmc, symmetry=symmetry, model=whole, functions={"log_probs": log_probs})
idata.to_netcdf(OUT / "posterior.nc", engine="h5netcdf")

import arviz as az


def rhats(group: str, variables: list[str]) -> np.ndarray:
    """R-hat of every coordinate of some variables."""
    found = az.rhat(ps.dataset(idata, group)[variables])
    return np.concatenate([values.values.ravel() for values in found.data_vars.values()])


sites = ["0.bias", "2.weight", "2.bias"]  # the 2,048 weights of pixels would take a while
r_hat = {
    "raw weights": rhats("posterior", sites),
    "aligned weights": rhats("posterior_aligned", sites),
    "function": rhats("posterior", ["log_probs"]),
}
temperature = ps.dataset(idata, "sample_stats")["kinetic_temperature"]
print(f"\n{'R-hat':<20}{'median':>10}{'95 %':>10}")
for name, values in r_hat.items():
    print(f"{name:<20}{np.median(values):>10.3f}{np.quantile(values, 0.95):>10.3f}")
print(f"{'kinetic temperature':<20}{float(temperature.mean()):>10.3f} (target 1)")

# %% [markdown]
# Alignment removes the effect of labels, and R-hat falls. It does not fall to 1, and should not: the chains
# are few and short, and a network has modes that differ in more than labels, although they predict nearly
# the same. This is why a network is best judged by its function. The last row shows that the chains nearly
# agree about it; run them longer before you publish.

# %%
figure, (before, after, all_) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
of_weights = az.rhat(ps.dataset(idata, "posterior")[["2.weight"]])["2.weight"].values
worst = np.unravel_index(of_weights.argmax(), of_weights.shape)
for panel, group in ((before, "posterior"), (after, "posterior_aligned")):
    for chain, trace in enumerate(ps.dataset(idata, group)["2.weight"].values[(..., *worst)]):
        panel.plot(np.arange(DRAWS) + chain * DRAWS, trace, linewidth=0.8)
        panel.axvline(chain * DRAWS, color="0.8", linewidth=0.8, zorder=0)
    panel.set_xlabel("draw, chain after chain")
after.sharey(before)
before.set_title("a weight, raw")
before.set_ylabel("the weight with the largest raw R-hat")
after.set_title("the same place, aligned")
for name, values in r_hat.items():
    all_.plot(np.sort(values), np.linspace(0, 1, len(values)), label=name)
all_.set(
    xlim=(0.98, 2.5),
    xlabel="R-hat",
    ylabel="share of coordinates below",
    title="R-hat of all coordinates",
)
all_.legend(loc="lower right")
figure.savefig(OUT / "diagnostics.png", dpi=150)

# %%
figure = plt.figure(figsize=(13, 4), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=(2, 1.1))
panels = left.subplots(1, 2, sharex=True, sharey=True)
bins = np.linspace(0, 2, 41)
for panel, who in zip(panels, draws, strict=True):
    for what in inputs:
        panel.hist(
            entropies[who, what].epistemic.numpy(),
            bins,
            density=True,
            histtype="step",
            linewidth=1.6,
            label=what,
        )
    panel.set(yscale="log", xlabel="epistemic uncertainty, nats", title=who)
panels[0].set_ylabel("density of inputs")
panels[1].legend()

sampled = predictions["posterior, T = 1"]
doubtful = sampled.entropy.total.argsort(descending=True)[:8]
right.suptitle("The most doubtful test digits, T = 1")
for panel, index in zip(right.subplots(2, 4).flat, doubtful.tolist(), strict=True):
    panel.imshow((test_x[index] * scale + centre).reshape(8, 8).numpy(), cmap="gray_r")
    (first, second), classes = sampled.probs[index].topk(2)
    panel.set_title(f"{classes[0]}: {first:.0%}\n{classes[1]}: {second:.0%}", fontsize=9)
    panel.set_xlabel(f"is {test_y[index]}", fontsize=9)
    panel.set(xticks=[], yticks=[])
figure.savefig(OUT / "uncertainty.png", dpi=150)
print(f"\nwrote {OUT}/: posterior.nc, diagnostics.png, uncertainty.png")

# %% [markdown]
# ## What this shows

# %%
least = 0.96 if SMALL else 0.97
warm, cold = "posterior, T = 1", "ensemble, T = 0"
assert "'0.bias'" in refusal, (
    "a prior that tells the units apart is refused, by the name of its site"
)
assert gain.upper - gain.lower < 0.1, "the gain is known to a tenth of a nat"
assert 0.98 * gain.log_order < gain.estimate < gain.log_order + 0.1, (
    "the copies hardly overlap: log |G|"
)
assert abs(symmetrised_elbo - plain_elbo - gain.estimate) < 1.0, "the ELBOs differ by the gain"
for who in (warm, cold):
    assert accuracy(predictions[who]) > least, f"{who}: test accuracy above {least:.0%}"
    for what in ("turned by 90°", "pixels shuffled"):
        odd, usual = (
            float(entropies[who, rows].epistemic.mean()) for rows in (what, "test digits")
        )
        assert odd > 2 * usual, f"{who}: weights are in more doubt where digits are {what}"
assert (
    entropies[warm, "turned by 90°"].epistemic.mean()
    > 2 * entropies[cold, "turned by 90°"].epistemic.mean()
)
median = {name: np.median(values) for name, values in r_hat.items()}
assert median["raw weights"] > median["aligned weights"] > median["function"], (
    "each question has its answer"
)
assert abs(float(temperature.mean()) - 1) < 0.15, "the sampler holds its temperature"
print("all claims hold")
