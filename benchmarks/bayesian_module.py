"""A network as a Pyro model: ``BayesianModule`` against the same network written with ``PyroSample`` s.

The network has 784-128-10 units, minibatches 128 of 60,000 rows; both have Pyro's ``AutoNormal`` and
``Adam``. First the gradients are compared, in double precision, at the same draw of the guide.

* ``recorded``: a step of ``pyro.infer.SVI``, ours with ``RecordedELBO``, the peer with ``Trace_ELBO``;
* ``peer recorded``: the same with the peer's network on both sides, to tell what recording alone brings;
* ``svi step``: without recording;
* ``log joint``: the model alone, its log density and the gradient at a point;
* ``no model``: a step of the guide for sites of the same shapes whose density is a constant. What the model
  costs can be saved, this can't: it is the least that the ratio of a step can come to with that guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_sym as ps
from benchmarks._models import Model, network
from benchmarks._runner import Tables, command_line, compare, figure, ratios

ROWS, BATCH = 60_000, 128
TITLE = "A network as a Pyro model"


def bayesian_module() -> Model:
    """Ours."""
    prior = ps.nn.IIDPrior(dist.Normal(0.0, 1.0))
    return ps.BayesianModule(network(), prior, ps.nn.Categorical(num_data=ROWS))


class WithPyroSamples(PyroModule):
    """The peer, as Pyro's tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PyroModule[nn.Sequential](
            PyroModule[nn.Linear](784, 128), PyroModule[nn.ReLU](), PyroModule[nn.Linear](128, 10)
        )
        for layer in (self.layers[0], self.layers[2]):
            for name in ("weight", "bias"):
                shape = getattr(layer, name).shape
                setattr(layer, name, PyroSample(dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The model."""
        logits = self.layers(x)
        with pyro.plate("data", ROWS, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


class Constant(dist.Normal):
    """As a prior that costs nothing."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Zero."""
        return self.loc.new_zeros(())


def no_model(x: Tensor, y: Tensor) -> None:
    """The same sites, without a density."""
    for name, parameter in SHAPES.items():
        pyro.sample(name, Constant(torch.zeros(parameter), 1.0, validate_args=False).to_event(len(parameter)))


SHAPES = {name: parameter.shape for name, parameter in network().named_parameters()}


def guided(model: Model, *batch: Tensor) -> AutoNormal:
    """A guide with values of its own, the same for every model."""
    guide = AutoNormal(model, init_scale=0.01)
    guide(*batch)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in guide.locs.parameters():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return guide


def step_of(model: Model, *batch: Tensor, loss: ELBO | None = None) -> Callable[[], Any]:
    """One step of SVI."""
    svi = SVI(model, guided(model, *batch), Adam({"lr": 1e-3}), Trace_ELBO() if loss is None else loss)
    return lambda: svi.step(*batch)


def recorded_step_of(model: Model, *batch: Tensor) -> Callable[[], Any]:
    """The same of a recorded ELBO, after the steps that record and compare it."""
    loss = ps.RecordedELBO()
    step = step_of(model, *batch, loss=loss)
    for _ in range(4):
        step()
    if loss.reason is not None:
        raise RuntimeError(loss.reason)
    return step


def log_joint_of(model: Model, *batch: Tensor) -> Callable[[], Any]:
    """The log density and its gradient at a draw of the guide."""
    values = {k: v.detach().requires_grad_() for k, v in guided(model, *batch)(*batch).items()}
    conditioned = poutine.condition(model, data=values)

    def run() -> Any:
        energy = poutine.trace(conditioned).get_trace(*batch).log_prob_sum()
        return torch.autograd.grad(energy, list(values.values()))

    return run


def gradients_of(model: Model, elbo: ELBO, *batch: Tensor) -> list[Tensor]:
    """Of the ELBO, by the guide's parameters, on the second call: by the graph if it is recorded."""
    pyro.clear_param_store()
    guide = guided(model, *batch)
    elbo.loss(model, guide, *batch)
    pyro.set_rng_seed(0)
    elbo.loss_and_grads(model, guide, *batch)
    return [parameter.grad for parameter in guide.parameters()]


def difference(*batch: Tensor) -> float:
    """The largest between our gradients, recorded, and the peer's, relative to the largest gradient."""
    torch.set_default_dtype(torch.float64)
    batch = (batch[0].double(), *batch[1:])
    own = gradients_of(bayesian_module(), ps.RecordedELBO(), *batch)
    other = gradients_of(WithPyroSamples(), Trace_ELBO(), *batch)
    torch.set_default_dtype(torch.float32)
    scale = max(float(gradient.abs().max()) for gradient in other)
    return max(float((one - two).abs().max()) for one, two in zip(own, other, strict=True)) / scale


def measure(seconds: float, smoke: bool = False) -> Tables:
    """The cases."""
    pyro.set_rng_seed(0)
    batch = torch.rand(BATCH, 784), torch.randint(10, (BATCH,))
    deviation = difference(*batch)
    cases = {
        "recorded": (recorded_step_of, step_of, bayesian_module()),
        "peer recorded": (recorded_step_of, step_of, WithPyroSamples()),
        "svi step": (step_of, step_of, bayesian_module()),
        "log joint": (log_joint_of, log_joint_of, bayesian_module()),
        "no model": (step_of, step_of, no_model),
    }
    rows = []
    for name, (own_work, work, model) in cases.items():
        pyro.clear_param_store()
        ours, peer = own_work(model, *batch), work(WithPyroSamples(), *batch)
        ours(), peer()
        rows.append(compare(name, ours, peer, seconds=seconds, block=1 if smoke else 5))
    agreement = figure("largest difference of the gradients", deviation, "of the largest gradient", 1e-9)
    return ratios(rows) | {"Before that, in double precision.": [agreement]}


if __name__ == "__main__":
    command_line("bayesian_module")
