"""A network as a Pyro model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call, vmap
from torch.nn.parameter import is_lazy

from pyro_sym._private import tree_leaves, tree_map
from pyro_sym.network.outputs import how_to_wrap
from pyro_sym.nn.likelihoods import Likelihood
from pyro_sym.nn.prediction import Prediction
from pyro_sym.nn.priors import IIDPrior, Prior, fitted, moved
from pyro_sym.nn.selection import Selector, select

__all__ = ["BayesianModule"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BayesianModule(nn.Module):
    r"""Any ``torch.nn.Module`` as a Pyro model of rows ``x`` and targets ``y``.

    Its latent sites are the network's parameters under their own names, as ``net.named_parameters()`` has
    them, tied ones once, then those of the likelihood:

    .. math::

        \log p(\theta, D) = \sum_{\text{names}} \log p(\theta_{\text{name}})
        + \frac{N}{|B|} \sum_{n \in B} \log p(y_n \mid f_\theta(x_n)).

    The observed site is ``"y"``, in the plate ``"data"``. The model is called as ``model(x, y)``, or without
    ``y`` to draw it; ``x`` is a tensor, a tuple of positional or a dict of keyword arguments of the network.
    Guides and kernels of Pyro and of this package accept it, vectorised particles included.

    The network is copied, and the copy always runs **in evaluation mode**, whatever ``train()`` says. Dropout
    is off: random masks would make the log joint a random number. Batch normalisation uses the running
    statistics that it has at construction: with those of a batch the rows would not be independent. Run data
    through a fresh network in train mode first, or use another normalisation.

    Args:
        net: the network; it is copied, so later changes have no effect here.
        prior: a function of (name, parameter, module that holds it) that returns a distribution, or ``None``
            to leave the parameter deterministic: :class:`~pyro_sym.nn.IIDPrior`,
            :class:`~pyro_sym.nn.FanInPrior`, :class:`~pyro_sym.nn.LayerwisePrior`, or your own. Its
            result is expanded to the parameter's shape. A distribution is taken as ``IIDPrior`` of it.
        likelihood: one of :mod:`pyro_sym.nn`'s; it knows the number of rows in all.
        hide: parameters that stay deterministic: a name, a pattern of names (``"*.bias"``), the name of a
            module, a type of module, a module, a parameter, or a list of such.
        expose: the only Bayesian parameters, except hidden ones: ``expose=net[-1]`` for the last layer only.
        hidden: ``"fixed"`` if deterministic parameters keep their values, ``"param"`` if each is the
            ``pyro.param`` of its name, which SVI trains and samplers hold at its value.
        batch_size: if given, ``x`` and ``y`` are all the data, and the plate draws this many rows a call.

    Attributes:
        net: the copy.
        sites: names of the latent sites, parameters of the likelihood included.

    Raises:
        ValueError: if a prior doesn't fit its parameter, no parameter is Bayesian, a selector
            selects none, names clash, a parameter has no shape yet (lazy modules), or a batch normalisation
            keeps no running statistics; on a call, if target and output don't fit each other, or there are
            more rows than ``num_data``.
        TypeError: on a call, if the network returns more than one tensor; the message says how to wrap it.

    Example:
        >>> from pyro_sym.nn import Categorical, FanInPrior
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> model = BayesianModule(net, FanInPrior(), Categorical(num_data=1000))
        >>> model.sites
        ('0.weight', '0.bias', '2.weight', '2.bias')
        >>> x, y = torch.randn(50, 3), torch.randint(2, (50,))
        >>> guide = AutoNormal(model, init_loc_fn=model.init_to_pretrained)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
        >>> loss = svi.step(x, y)
        >>> draws = pyro.infer.Predictive(guide, num_samples=20)(x)
        >>> prediction = model.predict(draws, x)
        >>> prediction.probs.shape, prediction.entropy.epistemic.shape, prediction.log_prob(y).shape
        (torch.Size([50, 2]), torch.Size([50]), torch.Size([50]))
    """

    def __init__(
        self,
        net: nn.Module,
        prior: Prior | Distribution,
        likelihood: Likelihood,
        *,
        hide: Selector | Sequence[Selector] = (),
        expose: Selector | Sequence[Selector] | None = None,
        hidden: Literal["fixed", "param"] = "fixed",
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(likelihood, Likelihood):
            raise TypeError(f"likelihood is {likelihood!r}; pass one of pyro_sym.nn's, as Categorical()")
        if hidden not in ("fixed", "param"):
            raise ValueError(f"hidden is {hidden!r}; pass 'fixed' or 'param'")
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise ValueError(f"batch_size is {batch_size!r}; pass an integer >= 1")
        _refuse_lazy_and_batch_statistics(net)
        self.likelihood, self.hidden, self.batch_size = likelihood, hidden, batch_size
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        chosen = {name for name, _ in net.named_parameters()} if expose is None else select(net, expose)
        self._priors = _priors_of(net, prior, chosen - select(net, hide))
        names = dict(net.named_parameters()).keys()
        if clash := [name for name in ("y", "data", *likelihood.priors) if name in names]:
            raise ValueError(
                f"the network has a parameter named {clash[0]!r}, which is the name of another site; put the "
                "network into a module, as torch.nn.Sequential(net), to have its names begin with '0.'"
            )
        anchor = next(self.net.parameters())
        self._priors |= {name: moved(own, anchor) for name, own in likelihood.priors.items()}

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the latent sites, those of the likelihood last."""
        return tuple(self._priors)

    def train(self, mode: bool = True) -> Self:
        """Set the flag ``training`` of this module; the network stays in evaluation mode."""
        super().train(mode)
        self.net.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        anchor = next(self.net.parameters())
        self._priors = {name: moved(prior, anchor) for name, prior in self._priors.items()}
        return self

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """The model: sample the parameters, observe the targets.

        Args:
            x: the network's input, or tuple or dict of inputs, rows first.
            y: the targets, rows first; without them they are drawn.

        Returns:
            The targets.
        """
        values = {name: pyro.sample(name, prior) for name, prior in self._priors.items()}
        with self._plate(tree_leaves(x)[0]) as rows:
            if self.batch_size is not None:
                x, y = tree_map(lambda part: part[rows], (x, y))
            output, own, draws = self._output(values, x)
            law = self.likelihood.law(output, **own)
            shape = law.batch_shape[draws:]
            if not shape or shape[0] != len(rows):
                raise ValueError(
                    f"the network's output has shape {tuple(output.shape)} for {len(rows)} rows; under "
                    f"{self.likelihood!r} its first axis has to be that of the rows"
                )
            if y is not None:
                y = self.likelihood.target(y, shape, output)
            return pyro.sample("y", law.to_event(len(shape) - 1) if len(shape) > 1 else law, obs=y)

    def _plate(self, x: Tensor) -> Any:
        """The plate of the rows, which knows how many there are in all."""
        num_data = self.likelihood.num_data
        if self.batch_size is not None:
            if num_data not in (None, len(x)):
                raise ValueError(
                    f"num_data is {num_data}, but with batch_size the model takes all the data, and x has "
                    f"{len(x)} rows; drop num_data, or pass all rows"
                )
            size = min(self.batch_size, len(x))
            return pyro.plate("data", len(x), subsample_size=size, dim=-1, device=x.device)
        if num_data is not None and len(x) > num_data:
            raise ValueError(f"x has {len(x)} rows, but num_data is {num_data}, the number of rows in all")
        # Given a subsample_size instead of row numbers, Pyro would draw a permutation of all rows.
        given = torch.arange(len(x), device=x.device)
        return pyro.plate("data", num_data or len(x), subsample=given, dim=-1, device=x.device)

    def _output(self, values: Mapping[str, Tensor], x: Any) -> tuple[Tensor, dict[str, Tensor], int]:
        """Outputs ``(*draws, rows, …)``, the likelihood's parameters ``(*draws, …)``, and ``len(draws)``.

        There are such dims if the model runs in plates, such as those of vectorised particles.
        """
        if all(value.dim() == self._priors[name].event_dim for name, value in values.items()):
            weights, own = self._split(values)
            return self._run({**self._deterministic(), **weights}, x), own, 0
        leads = (value.shape[: value.dim() - self._priors[name].event_dim] for name, value in values.items())
        lead = torch.broadcast_shapes(*leads)
        if lead[-1] != 1:
            raise ValueError(
                f"values of the sites have dims {tuple(lead)} in front of their own, and dim -1 is that of "
                "the plate 'data'; for many draws use predict, or put them at dim -2 before a dim of size 1"
            )
        each = {  # (S, *event) a site
            name: value.expand(*lead, *self._priors[name].event_shape).flatten(0, len(lead) - 1)
            for name, value in values.items()
        }
        weights, own = self._split(each)
        output = self._over_draws(weights, x, None)
        spread = {name: value.unflatten(0, lead[:-1] or (1,)) for name, value in {**own, "": output}.items()}
        if len(lead) == 1:
            spread = {name: value.squeeze(0) for name, value in spread.items()}
        return spread.pop(""), spread, len(lead) - 1

    def _split(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The network's parameters, and the likelihood's."""
        own = {name: values[name] for name in self.likelihood.priors}
        return {name: value for name, value in values.items() if name not in own}, own

    def _deterministic(self) -> dict[str, Tensor]:
        """The values of parameters that are not the network's own."""
        if self.hidden == "fixed":
            return {}
        return {
            name: pyro.param(name, parameter.detach().clone())
            for name, parameter in self.net.named_parameters()
            if name not in self._priors
        }

    def _run(self, values: dict[str, Tensor], x: Any) -> Tensor:
        args = () if isinstance(x, dict) else x if isinstance(x, tuple) else (x,)
        try:
            output: Tensor = functional_call(self.net, values, args, x if isinstance(x, dict) else None)
        except RuntimeError as error:
            own = next(self.net.parameters()).dtype
            others = {part.dtype for part in tree_leaves(x) if isinstance(part, Tensor)} - {own}
            if odd := [dtype for dtype in others if dtype.is_floating_point]:
                raise ValueError(
                    f"the network fails at inputs of dtype {odd[0]}, and its parameters are of {own} "
                    f"({error}); pass x.to({own}), or make the model of net.to({odd[0]})"
                ) from error
            raise
        if not isinstance(output, Tensor):
            raise TypeError(f"the likelihood needs one tensor, but {how_to_wrap(self.net, output)}")
        return output

    def _over_draws(self, weights: dict[str, Tensor], x: Any, chunk_size: int | None) -> Tensor:
        """Outputs ``(S, rows, …)`` for weights ``(S, …)``."""
        deterministic = self._deterministic()

        def run(weights: dict[str, Tensor]) -> Tensor:
            return self._run({**deterministic, **weights}, x)

        if chunk_size == 1:
            count = len(next(iter(weights.values())))
            return torch.stack([run({name: w[s] for name, w in weights.items()}) for s in range(count)])
        try:
            return vmap(run, chunk_size=chunk_size)(weights)
        except RuntimeError as error:
            if "atching rule" not in str(error):
                raise
            raise RuntimeError(
                f"torch.func.vmap can't run the network for many draws at once: {error} Pass chunk_size=1 to "
                "predict, and use no vectorised particles"
            ) from error

    @torch.no_grad()
    def predict(self, draws: Mapping[str, Tensor], x: Any, *, chunk_size: int = 64) -> Prediction:
        """The posterior predictive at new rows.

        Args:
            draws: values by site, as ``get_samples()``, ``Predictive`` or a guide give them: ``(S, *shape)``,
                or ``(C, S, *shape)`` grouped by chain, or one point ``shape``. Other sites are ignored.
            x: the network's input, or tuple or dict of inputs.
            chunk_size: how many draws run at once, by ``torch.func.vmap``; with 1 they run one by one
                without it, for networks that it can't run.

        Returns:
            The prediction over all draws, chains concatenated.

        Raises:
            ValueError: if a site is missing, or of another shape.
            RuntimeError: if the network can't be run for many draws at once, as recurrent ones.
        """
        values: dict[str, Tensor] = {}
        for name, prior in self._priors.items():
            if name not in draws:
                raise ValueError(f"draws have no site {name!r}; the model's sites are {list(self.sites)}")
            shape, own_shape = tuple(draws[name].shape), tuple(prior.event_shape)
            if shape != shape[: len(shape) - len(own_shape)] + own_shape:
                raise ValueError(
                    f"draws of site {name!r} have shape {shape}, which does not end in its own, {own_shape}"
                )
            values[name] = draws[name].reshape(-1, *own_shape)  # (S, *shape)
        counts = {name: len(value) for name, value in values.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"sites have different numbers of draws: {counts}")
        weights, own = self._split(values)
        output = self._over_draws(weights, x, chunk_size)
        return Prediction(self.likelihood, output, self.likelihood.law(output, **own))

    def init_to_pretrained(self, site: Any) -> Tensor:
        """Start at the network's own values: an ``init_loc_fn`` of guides, an ``init_strategy`` of kernels.

        Args:
            site: Pyro's message.

        Returns:
            The value of the parameter when this model was made; the prior's median of other sites.

        Raises:
            ValueError: if the value is outside of the prior's support.
        """
        name, fn = site["name"], site["fn"]
        if name not in self._priors or name in self.likelihood.priors:
            value: Tensor = init_to_median(site)
            return value
        value = self.net.get_parameter(name).detach()
        if not fn.support.check(value).all():
            raise ValueError(
                f"the network's own value of {name!r} is outside of its prior's support, {fn.support}; start "
                "elsewhere, or choose a prior that has it"
            )
        return value.expand(fn.shape()).clone()


def _priors_of(net: nn.Module, prior: Any, chosen: Collection[str]) -> dict[str, Any]:
    """The priors of Bayesian parameters, in the network's order."""
    if isinstance(prior, Distribution):
        prior = IIDPrior(prior)
    if not callable(prior) or isinstance(prior, type):
        raise TypeError(
            f"prior is {prior!r}; pass a distribution for every entry, as dist.Normal(0.0, 1.0), one of "
            "pyro_sym.nn's priors, or a function of (name, parameter, module)"
        )
    priors: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        if name in chosen:
            own = prior(name, parameter, net.get_submodule(name.rpartition(".")[0]))
            if own is not None:
                priors[name] = fitted(own, name, parameter)
    if not priors:
        raise ValueError("no parameter of the network is Bayesian: all are hidden, or have no prior")
    return priors


def _refuse_lazy_and_batch_statistics(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet; call the network once on some rows first")
    for name, module in net.named_modules():
        if isinstance(module, _BATCH_NORMS) and module.running_mean is None:
            raise ValueError(
                f"module {name!r}, a {type(module).__name__}, keeps no running statistics, and with those of "
                "a minibatch rows would not be independent; pass track_running_stats=True and run data "
                "through the network in train mode first, or use LayerNorm or GroupNorm"
            )
