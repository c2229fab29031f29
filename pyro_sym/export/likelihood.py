"""The log likelihood of every datum at every draw."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from pyro_sym.export.joined_windows import JoinedWindows, Shown, on_all_rows
from pyro_sym.export.pointwise import Data, picks_rows, terms_of
from pyro_sym.export.sites import unseen
from pyro_sym.model.all_rows import Window, windows
from pyro_sym.model.conditioned_sites import FromPrior, fixed_parameters
from pyro_sym.model.program import Args, Program, in_subsampled_plate, is_data, is_deterministic
from pyro_sym.unwrap import base_of

__all__ = ["PointwiseLikelihood", "log_likelihood"]

# Log probabilities computed at once by default: enough to keep torch busy, few enough for the cache.
CHUNK_NUMEL = 2**18

Values = Mapping[str, Tensor]


def log_likelihood(
    model: Callable[..., Any],
    draws: Values,
    *args: Any,
    group_by_chain: bool = False,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    r"""The log likelihood of every datum at every draw, as leave-one-out cross-validation needs it.

    For each observed site and each entry :math:`n` of its batch shape this is

    .. math::

        \ell_{mn} = \log p(y_n \mid \theta_m)
                  = \log \sum_z p(z \mid \theta_m) \, p(y_n \mid z, \theta_m),

    with the sum over enumerable discrete sites that :math:`y_n` depends on and that have no draws. If several
    data share such a site, as all steps of a sequence do in a hidden Markov model, their log likelihood is
    one joint term, in the plates of the shared site; the joint term of several observed sites is named
    ``"x+y"``.

    * Scales (of ``poutine.scale`` and of subsampled plates) are left out: they are weights for inference.
    * The result covers all rows of a subsampled plate.
    * Masked entries are NaN, as they are not data (the exporter drops them). In a joint term they add 0.
    * Factors and deterministic sites are not data, nor are parameters that ``poutine.condition`` fixes
      (sites whose density does not depend on the latent sites).

    Draws are evaluated together by ``torch.func.vmap`` or, where the model's control flow depends on their
    values, one by one with a warning. The random state is restored, and handlers outside see nothing.

    Args:
        model: a Pyro model.
        draws: constrained values of its latent sites, of shape ``(num_samples, *shape)``.
        *args: the model's positional arguments.
        group_by_chain: whether draws have a chain dim in front, ``(num_chains, num_samples, *shape)``.
        chunk_size: how many draws to evaluate at once; by default as many as give about 260,000 terms.
        **kwargs: the model's keyword arguments.

    Returns:
        Nats by observed site, of shape ``(num_samples, *batch_shape)``, or ``(num_chains, num_samples,
        *batch_shape)``.

    Raises:
        ValueError: if there are no draws or their shapes don't fit the model's sites, a latent site has none
            and can't be summed out, or the model's arguments choose the rows of a subsampled plate.

    Warns:
        UserWarning: if the model has no data, so that the result is empty, or a ``pyro.factor`` in a plate of
            data, which may belong to the likelihood but is not in the result.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y), subsample_size=2) as rows:
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])
        >>> log_likelihood(model, {"loc": torch.zeros(10)}, torch.arange(5.0))["y"].shape
        torch.Size([10, 5])

    References:
        Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out
        cross-validation and WAIC".
    """
    sample_ndim = 2 if group_by_chain else 1
    if not draws:
        raise ValueError("there are no draws: draws is empty")
    for name, value in draws.items():
        if 0 in value.shape[:sample_ndim]:
            raise ValueError(f"there are no draws: those of site {name!r} have shape {tuple(value.shape)}")
        if value.dim() < sample_ndim:
            raise _wrong_shape(name, value, group_by_chain)
    flat = {name: value.flatten(0, sample_ndim - 1) for name, value in draws.items()}
    first = {name: value[0] for name, value in flat.items()}
    with unseen(), pyro.validation_enabled(False), _ShapeCheck(draws, group_by_chain):
        FromPrior()(poutine.condition(model, data=first))(*args, **kwargs)
    likelihood = PointwiseLikelihood(model, first, args, kwargs)
    likelihood.warn_of_factors(stacklevel=3)
    terms = likelihood.at(flat, chunk_size)
    lead = next(iter(draws.values())).shape[:sample_ndim]
    return {name: term.reshape(*lead, *term.shape[1:]) for name, term in terms.items()}


def _wrong_shape(name: str, value: Tensor, group_by_chain: bool) -> ValueError:
    expected = "(num_chains, num_samples, *shape)" if group_by_chain else "(num_samples, *shape)"
    return ValueError(
        f"draws of site {name!r} have shape {tuple(value.shape)}, where {expected} is expected; pass "
        f"group_by_chain={not group_by_chain} if they {'have no' if group_by_chain else 'have a'} chain dim"
    )


class _ShapeCheck(poutine.messenger.Messenger):
    """Refuses draws with dims that their site has not, which may broadcast, or with too few for its event.

    Dims of size 1 in front, which Pyro's ``Predictive`` adds, are allowed. So are missing batch dims: a site
    in a plate may have one value for the whole plate.
    """

    def __init__(self, draws: Values, group_by_chain: bool) -> None:
        super().__init__()
        self.draws, self.group_by_chain = draws, group_by_chain

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.draws or is_deterministic(msg):
            return
        fn, value = msg["fn"], self.draws[msg["name"]]
        shape = value.shape[2 if self.group_by_chain else 1 :]  # of one draw
        surplus = max(0, len(shape) - len(fn.shape()))
        if len(shape) < fn.event_dim or any(size != 1 for size in shape[:surplus]):
            raise _wrong_shape(msg["name"], value, self.group_by_chain)


class PointwiseLikelihood:
    """The log likelihood of a model, by datum; ``draw`` is one draw of its latent sites.

    Attributes:
        data: the data of each term, by name, over all rows.
    """

    def __init__(
        self, model: Callable[..., Any], draw: Values, args: Args, kwargs: Mapping[str, Any]
    ) -> None:
        self._draw = draw

        def held(*args: Any, **kwargs: Any) -> Any:
            return poutine.condition(model, data=dict(self._draw))(*args, **kwargs)

        with unseen(), pyro.validation_enabled(False):
            self._no_data = draw.keys() | fixed_parameters(model, args, kwargs, draw)
            self._program = Program(held, args, kwargs)
            if self._program.latents:
                raise ValueError(
                    f"there are no draws of the latent sites {list(self._program.latents)}; pass draws of "
                    "all sites that can't be summed out"
                )
            self.data = self._check_all_rows()

    def at(self, draws: Values, chunk_size: int | None = None) -> dict[str, Tensor]:
        """The log likelihood at draws of shape ``(M, *shape)``, as tensors of shape ``(M, *batch_shape)``."""

        def one(draw: dict[str, Tensor], window: Window) -> dict[str, Shown]:
            self._draw = draw
            terms = terms_of(self._program.trace({}, window), self._no_data)
            return {term.name: Shown(term.masked_out, term.data.frames) for term in terms}

        size = chunk_size or max(1, CHUNK_NUMEL // self._numel)
        with unseen():
            return on_all_rows(one, windows(self._program.plates), size, draws)

    def warn_of_factors(self, stacklevel: int) -> None:
        """Warn of factors, which may belong to the likelihood and are not in the terms."""
        if not self.data:
            factors = f", and its factors {list(self._factors)} are no data" if self._factors else ""
            warnings.warn(
                f"the model has no observed sites{factors}, so that there is no log likelihood by datum; use "
                "pyro.sample(..., obs=...), if need be with a distribution whose log_prob is the factor",
                stacklevel=stacklevel,
            )
            return
        plates = {frame.name for data in self.data.values() for frame in data.frames}
        if among := [name for name, inside in self._factors.items() if inside & plates]:
            warnings.warn(
                f"the factors {among} lie in plates of data, and are not in the log likelihood; if they "
                "belong to it, observe the data by pyro.sample(..., obs=...)",
                stacklevel=stacklevel,
            )

    def _check_all_rows(self) -> dict[str, Data]:
        """Run the model on all windows at one draw, and check that it shows the rows that it is asked for."""
        whole, frames = JoinedWindows(), {}
        seen: dict[str, Tensor] = {}
        self._numel = 1
        self._factors: dict[str, set[str]] = {}  # plates by factor
        for window in windows(self._program.plates):
            trace = self._program.trace({}, window)
            for name, site in trace.nodes.items():
                if site["type"] == "sample" and isinstance(base_of(site["fn"]), Unit):
                    self._factors[name] = {frame.name for frame in site["cond_indep_stack"]}
                if not is_data(site) or name in self._no_data:
                    continue
                if in_subsampled_plate(site["cond_indep_stack"]) and not picks_rows(site, window, seen):
                    raise ValueError(
                        f"site {name!r} shows some rows of a subsampled plate, and the model's arguments "
                        "choose which, not the plate; pass args and kwargs with all rows"
                    )
            terms = list(terms_of(trace, self._no_data))
            self._numel = max(self._numel, sum(term.log_prob.numel() for term in terms))
            for term in terms:
                frames[term.name] = term.data.frames
                if term.data.kept is not None:
                    whole.put(term.name, term.data.kept, term.data.frames, window)
        return {name: Data(several, whole.values.get(name)) for name, several in frames.items()}
