"""Guides averaged over a symmetry of the model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, get_args

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoNormal
from pyro.infer.autoguide.initialization import init_to_feasible
from pyro.nn import PyroModule
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor

from pyro_sym._private import has_run
from pyro_sym._random import fork_random_state
from pyro_sym.errors import NoDensityError, SymmetryError
from pyro_sym.guides.average import OrbitAverage, Run, Trivial
from pyro_sym.guides.capture import Capture, Captured, Draws, InPlates
from pyro_sym.guides.choose import Estimator, EstimatorName, choose
from pyro_sym.guides.density import GuideCall, check_independence, log_density
from pyro_sym.guides.gain import SymmetryGain, reliable, symmetry_gain
from pyro_sym.guides.handwritten import factorises, pair_factors
from pyro_sym.guides.scale_and_mask import common_scale, is_one, masks, refuse_uneven_masks, sites_apart
from pyro_sym.guides.separation import Certificate, certificate
from pyro_sym.guides.site_normals import LogRatios, normals_of, pair_normals
from pyro_sym.model.program import in_subsampled_plate
from pyro_sym.orbit.enumeration import LogProb
from pyro_sym.search.check import check_symmetry
from pyro_sym.symmetry.base import Symmetry

__all__ = ["AutoSymmetrized", "AutoSymmetrizedNormal", "SymmetryGain"]

# Room for plates that the guide is run in.
MAX_OUTER = 4
# Draws at which it is tried whether a guide's density factorises over units.
NUM_TRIED = 8
# Images at which it is tried whether a guide's other sites depend on what moves.
NUM_MOVED = 16


@dataclass(frozen=True)
class _Layout:
    """What a call of the base guide shows once and for all.

    Attributes:
        native_dims: number of dims of one draw, by latent site.
        local: the sites in subsampled plates, which are left as they are.
        apart: other sites with a scale of their own, which are independent of the moved ones.
    """

    native_dims: dict[str, int]
    local: frozenset[str]
    apart: frozenset[str] = frozenset()

    @property
    def averaged(self) -> dict[str, int]:
        return {name: dim for name, dim in self.native_dims.items() if name not in self.local}


class AutoSymmetrized(AutoGuide):
    r"""A guide averaged over a finite symmetry group of the model.

    With a base guide :math:`q` and a group :math:`G` under which the model's log joint is invariant,

    .. math::

        q^G(\omega) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot \omega), \qquad
        \mathcal L^G = \mathbb E_{\omega \sim q}[\log p(\omega, D) - \log q^G(\omega)]
                     = \mathcal L + I(g; \omega) \ge \mathcal L.

    The guide runs the base guide, hides its sites, emits its latents again as point masses, and adds
    :math:`\log q^G(\omega)` as one factor, so that every Pyro ELBO optimises the symmetrised objective.
    Densities are compared in constrained space, where the group preserves volume. The ELBO stays a lower
    bound on the log evidence with each estimator:

    * ``"exact"`` computes the average itself: by permanents of up to 14 units, for ``AutoNormal`` (no simplex
      among the moved sites) under permutations that no site ties together, with or without signs, and for
      guides written by hand whose moved sites are independent of all others and from unit to unit, or
      Dirichlet weights of the units, under one permutation; and by enumeration, up to 200,000 elements,
      otherwise;
    * ``"importance"``, for permutations, sign flips and products of them and any guide with a density, weighs
      :math:`K` elements proposed by what the guide says of each unit, the identity among them. It stays tight
      where units are well separated, at any number of them
      (:func:`~pyro_sym.orbit.guided_permutations.importance`,
      :func:`~pyro_sym.orbit.guided_blocks.draw_elements`). For ``AutoNormal`` part of the group is summed
      over exactly, or, with weights on a simplex, elements are
      proposed by the other sites; for guides that do not factorise over units
      the proposals come from normals fitted to the guide's marginals now and then, and are looser where
      units are strongly correlated and overlap;
    * ``"uniform"`` averages over :math:`K` elements, the identity among them; its gain saturates at
      :math:`\log K`;
    * ``"auto"`` is exact by permanents where that is possible, or by enumeration of up to 1,000 elements;
      importance otherwise, and uniform only for groups that are not made of permutations and sign flips.
      :attr:`method` says which of the three was chosen.

    Where the units of a mean-field guide on one permutation lie far apart,
    :math:`\log q^G(\omega) = \log q(\omega) - \log |G|` up to an error that is bounded without computing the
    average, whatever the estimator: if the bound is within ``tolerance``, that value plus the bound is taken
    in training, with the gradient of the plain guide, which keeps the ELBO a lower bound
    (:class:`~pyro_sym.guides.separation.Certificate` has the argument).

    What is said of permutations and sign flips holds for a :class:`Viewed` of them too, as the channels of a
    flattened image are, and for products of views: the guide's coordinates are seen in the same shapes.
    (Views of views are groups of another kind.) A group with one element, such as ``Product()`` for a model
    in which no symmetry was found, leaves the guide as it is, for every ELBO and at no cost, with a gain of
    exactly 0.

    The guide's own scales and masks (``poutine.scale``, ``poutine.mask``, masked distributions) are kept.
    With a scale :math:`s` on the moved sites their term is :math:`s \log q^G(\omega)`; sites with another
    scale keep it, and have to be independent of the moved ones. What is masked counts nothing, and the group
    has to leave the mask as it is. With scales that differ between guide and model, the objective is no bound
    on the log evidence, as without symmetrising.

    In training :math:`\omega` is drawn from :math:`q`; by invariance that changes no expectation.
    :meth:`sample_posterior` draws from :math:`q^G`. :meth:`median` and :meth:`quantiles` are the base
    guide's: they speak of one representative of the orbit.

    On the first call the symmetry is checked against the model (:func:`~pyro_sym.check_symmetry`); a symmetry
    that the model does not have is an error.

    Args:
        guide: any Pyro guide whose density can be evaluated: Pyro's autoguides (but not the point masses),
            and hand-written guides without auxiliary variables. Sites inside subsampled plates are left as
            they are; the group must not move them, and they must not depend on what it moves. A guide that
            has been trained already goes on from there, its parameters under the names that they have.
        symmetry: the group; its sites must be latent sites of the guide.
        estimator: how the orbit average is computed: a name, or a way of your own, as a subclass of
            :class:`~pyro_sym.guides.average.OrbitAverage`.
        num_elements: :math:`K`, the identity included, for ``"importance"`` and ``"uniform"``.
        tolerance: the largest error, in nats and in the mean over draws, at which the average is left out; 0
            or ``None`` to compute it in every step.
        model: the model, for guides that don't carry theirs; without it the symmetry can't be checked, and a
            warning says so.

    Raises:
        ValueError: for an unknown estimator, ``num_elements < 2`` or a negative tolerance; for a guide that
            has been run without a name, or an autoguide that was copied before its first run.
        SymmetryError: on the first call, if the model is not invariant, a site is unknown, sizes disagree, or
            the group is too large for ``"exact"`` or of another kind than ``"importance"`` takes.
        NoDensityError: if the guide has no density that can be evaluated, if its moved sites have several
            scales or a mask that the group changes, or if sites with a scale of their own or in subsampled
            plates depend on the moved ones.

    Example:
        >>> def model(y):
        ...     with pyro.plate("components", 2):
        ...         locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0))
        ...         pyro.sample("y", mixture, obs=y)
        >>> guide = AutoSymmetrized(AutoNormal(model), Permutation({"locs": -1}))
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
        >>> loss = svi.step(torch.tensor([-5.0, -4.5, 5.0, 5.5]))
        >>> guide.method
        'exact'

    References:
        Gelberg et al. 2024, arXiv 2408.05496, equations 4 and 5.
    """

    def __init__(
        self,
        guide: Callable[..., Any],
        symmetry: Symmetry,
        *,
        estimator: Estimator = "auto",
        num_elements: int = 16,
        tolerance: float | None = 1e-6,
        model: Callable[..., Any] | None = None,
    ) -> None:
        own = isinstance(estimator, type) and issubclass(estimator, OrbitAverage)
        if not own and estimator not in get_args(EstimatorName):
            raise ValueError(
                f"estimator={estimator!r} is none of {get_args(EstimatorName)}, and no subclass of "
                "OrbitAverage"
            )
        if num_elements < 2:
            raise ValueError(f"num_elements={num_elements} must be at least 2: the identity and one more")
        if tolerance is not None and not tolerance >= 0:
            raise ValueError(f"tolerance={tolerance} must be a number of nats, at least 0, or None")
        found = _model_of(guide)
        super().__init__(model if model is not None else found)
        self.guide = guide
        if not symmetry.is_finite:
            raise SymmetryError(
                f"{symmetry!r} is not finite, and a guide can only be averaged over a finite group; name a "
                "finite subgroup, such as a Product of Permutation and SignFlip"
            )
        self.symmetry = symmetry
        self.estimator = estimator
        self.num_elements = num_elements
        self.tolerance = tolerance
        self._average: OrbitAverage | None = None
        self._layout: _Layout | None = None
        self._certificate: Certificate | None = None
        self._masks: dict[str, Tensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, PyroModule) and _has_run(value):
            # Its parameters have names in the store already, and go by them.
            torch.nn.Module.add_module(self, name, value)
            return
        # AutoGuide would become the master of a guide set as its attribute, and make its plates for it.
        PyroModule.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # For the same reason: a copy's base guide has set its own masters by now.
        super(AutoGuide, self).__setstate__(state)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw from the base guide, and add the log orbit average as a factor.

        Args:
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The latent values by site.
        """
        layout, captured = self._capture(args, kwargs)
        values = {name: site.value for name, site in captured.sites.items()}
        # Called for a draw, not for inference, there is nobody to take the factor.
        if not captured.hide or not am_i_wrapped():
            return values
        captured.refuse_uneven_weights_outside()
        draws = captured.draws(layout.native_dims)
        ratio: Any = self._certified_ratio(captured, draws)
        if ratio is None:
            ratio = self._log_ratio(layout, draws, args, kwargs)
        scale = common_scale(captured.sites, self.symmetry.sites)
        own = draws.own if draws.scaled is None else draws.scaled
        log_average = own + (ratio if is_one(scale) else scale * ratio)
        for name, site in captured.sites.items():
            if not site.local:
                with InPlates(site.frames):
                    # Masked, as the density of a point mass is a constant that need not be computed.
                    pyro.sample(name, dist.Delta(site.value, event_dim=site.fn.event_dim).mask(False))
        pyro.factor(
            f"_{self._pyro_name}_log_density", log_average.reshape(captured.outer_shape), has_rsample=True
        )
        return values

    def symmetry_gain(self, *args: Any, num_samples: int = 500, **kwargs: Any) -> SymmetryGain:
        r"""What averaging gains over the base guide's ELBO, with a bracket.

        .. math::

            I(g; \omega) = \mathbb E_{\omega \sim q}[\log q(\omega) - \log q^G(\omega)]

        Args:
            *args: the model's positional arguments.
            num_samples: number of draws of the guide.
            **kwargs: the model's keyword arguments.

        Returns:
            A :class:`SymmetryGain` with a lower bound, an estimate and an upper bound, which agree with the
            exact estimator. With the importance estimator they are the best of sampled and deterministic
            bounds (:func:`~pyro_sym.orbit.bracket.bracket`), with 64 permutations at least, and the estimate
            is their midpoint; a draw takes some 20 ms at 64 units and seconds at 512, where fewer draws do.
            With the uniform one the lower half is at most :math:`\log K`; the upper half, from an unbiased
            estimate of the density, is the better single figure.

        Raises:
            ValueError: if ``num_samples`` is below 1.

        Warns:
            UserWarning: if draws have another density when it is computed again from their values.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        with torch.no_grad():
            layout, draws = self._draw(num_samples, args, kwargs)
            good = torch.ones_like(draws.own, dtype=torch.bool)
            if not isinstance(self._average, Trivial):
                good = reliable(self._log_density(layout, draws, args, kwargs)(draws.values), draws.own)
            found = None
            if good.any():
                run = self._run(layout, draws.at(good), args, kwargs)
                found = self._chosen.bracket(run, self.num_elements)
        return symmetry_gain(found, good, self._chosen.method, self.symmetry.log_order(draws.values))

    @torch.no_grad()
    def sample_posterior(
        self, *args: Any, sample_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> dict[str, Tensor]:
        r"""Draw from :math:`q^G`: draws of the base guide, each moved by a uniform group element.

        Args:
            *args: the model's positional arguments.
            sample_shape: the batch shape of the draws.
            **kwargs: the model's keyword arguments.

        Returns:
            Values by site, each of shape ``(*sample_shape, *native)``.
        """
        count = math.prod(sample_shape)
        values = self._draw(count, args, kwargs)[1].values
        images = self.symmetry.act(self.symmetry.sample(values, (count,)), values)
        return {name: value.reshape(*sample_shape, *value.shape[1:]) for name, value in images.items()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The base guide's median: of one representative of the orbit, not of the average over it."""
        return self._of_base("median")(*args, **kwargs)

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The base guide's quantiles: of one representative of the orbit, not of the average over it."""
        return self._of_base("quantiles")(quantiles, *args, **kwargs)

    def _of_base(self, method: str) -> Callable[..., dict[str, Tensor]]:
        if not hasattr(self.guide, method):
            raise NotImplementedError(
                f"the base guide {self.guide!r} has no {method}(); use sample_posterior()"
            )
        return getattr(self.guide, method)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Layout, Capture]:
        """Run the base guide; set up anew if other sites stand outside of the average than at first."""
        layout = self._setup(args, kwargs)
        if isinstance(self._average, Trivial):  # the guide as it is, for any handler outside to see
            with Capture(self.guide, hide=False) as captured:
                self.guide(*args, **kwargs)
            return layout, captured
        with Capture(self.guide) as captured:
            self.guide(*args, **kwargs)
        if (captured.local, self._apart(captured)) != (layout.local, layout.apart):
            self._layout = None
            layout = self._setup(args, kwargs)
        self._check_masks(captured)
        return layout, captured

    def _apart(self, captured: Capture) -> frozenset[str]:
        return sites_apart(captured.sites, common_scale(captured.sites, self.symmetry.sites))

    def _check_masks(self, captured: Capture) -> None:
        """Whether the group leaves the guide's masks as they are; looked at again when they change."""
        found = masks(captured.sites, self.symmetry.sites)
        known = self._masks.keys() == found.keys() and all(
            mask.shape == self._masks[name].shape and torch.equal(mask, self._masks[name])
            for name, mask in found.items()
        )
        if not known:
            refuse_uneven_masks(self.symmetry, found, captured.sites)
            self._masks = {name: mask.clone() for name, mask in found.items()}

    def _draw(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Layout, Draws]:
        """Independent draws of the base guide, seen by nobody."""
        rows = []
        for _ in range(count):
            with poutine.block():
                layout, captured = self._capture(args, kwargs)
            rows.append(captured.draws(layout.native_dims))
        return layout, _joined(rows)

    def _redraw(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Independent draws of the base guide, all at once where it is known to allow that."""
        if not isinstance(self.guide, AutoGuide):
            return self._draw(count, args, kwargs)[1].values
        layout = self._setup(args, kwargs)
        plates = [plate.dim for plate in self.guide.plates.values()]
        lowest = min([*plates, *(-dim for dim in layout.native_dims.values())], default=0)
        with poutine.block(), pyro.plate("_redraw", count, dim=lowest - 1 - MAX_OUTER):
            captured = self._capture(args, kwargs)[1]
        return captured.draws(layout.native_dims).values

    def _log_density(
        self,
        layout: _Layout,
        draws: Draws,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sites: Collection[str] | None = None,
    ) -> LogProb:
        dims = {name: dim for name, dim in layout.averaged.items() if sites is None or name in sites}
        local = {name: layout.native_dims[name] for name in layout.local}
        return log_density(self.guide, GuideCall(dims, args, kwargs, draws.indices, local))

    def _certified_ratio(self, captured: Capture, draws: Draws) -> float | None:
        r""":math:`\log q^G - \log q` up to the tolerance, where units lie so far apart that it is known."""
        if self._certificate is None:
            return None
        bound = self._certificate.bound(normals_of(captured.auxiliary, self._certificate.axes))
        return None if bound is None else bound - self.symmetry.log_order(draws.values)

    def _log_ratio(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        r""":math:`\log q^G - \log q`, or what the estimator has for it, of shape ``(P,)``."""
        ratio = self._chosen.bound(self._run(layout, draws, args, kwargs), self.num_elements)
        return ratio.to(draws.own.dtype)

    def _log_orbit_average(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        return draws.own + self._log_ratio(layout, draws, args, kwargs)

    def _run(self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        return Run(
            draws,
            density=lambda sites=None: self._log_density(layout, draws, args, kwargs, sites),
            redraw=lambda count: self._redraw(count, args, kwargs),
        )

    @property
    def method(self) -> str | None:
        """``"exact"``, ``"importance"`` or ``"uniform"``, as chosen on the first call, or a class's name."""
        return None if self._average is None else self._average.method

    @property
    def _chosen(self) -> OrbitAverage:
        assert self._average is not None, "chosen on the first call"
        return self._average

    def _setup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Layout:
        """On the first call: look at the base guide, check the symmetry, choose the estimator."""
        if self._layout is None:
            with torch.no_grad(), fork_random_state(), poutine.block():
                with Capture(self.guide, hide=False) as captured:
                    self.guide(*args, **kwargs)
                values = {name: site.value for name, site in captured.sites.items()}
                self.symmetry.check_values(values)
                if self.symmetry.log_order(values) == 0:
                    dims = {name: value.dim() for name, value in values.items()}
                    self._average = Trivial(self.guide, self.symmetry, "exact")
                    self._certificate, self._layout = None, _Layout(dims, captured.local)
                    return self._layout
                with Capture(self.guide) as captured:
                    self.guide(*args, **kwargs)
                values = {name: site.value for name, site in captured.sites.items()}
                self._refuse_sites(captured)
                dims = {name: value.dim() for name, value in values.items()}
                layout = _Layout(dims, captured.local, self._apart(captured))
                draws = captured.draws(layout.native_dims)
                self._try_density(layout, draws, args, kwargs)
                units = pair_normals(self.guide, self.symmetry)
                units = units or self._pair_factors(layout, draws, args, kwargs)
            self._check_symmetry(args, kwargs)
            supports = {name: self._support(name, site) for name, site in captured.sites.items()}
            self._average = choose(self.estimator, self.guide, self.symmetry, values, supports, units)
            self._certificate = certificate(self.guide, self.symmetry, self.tolerance)
            self._layout = layout
        return self._layout

    def _refuse_sites(self, captured: Capture) -> None:
        for name, site in captured.sites.items():
            if site.local and name in self.symmetry.sites:
                plate = next(frame for frame in site.frames if in_subsampled_plate([frame]))
                whole = plate.full_size
                raise SymmetryError(
                    f"{self.symmetry!r} moves site {name!r}, which lies in the subsampled plate "
                    f"{plate.name!r}, where a minibatch shows {plate.size} of {whole} rows of what is moved. "
                    f"Draw {name!r} on all rows, in pyro.plate({plate.name!r}, {whole}), and observe the "
                    f"data in a second plate, with pyro.plate('minibatch', {whole}, "
                    f"subsample_size={plate.size}) as rows, by {name}[rows]; or sum {name!r} out"
                )
            if not site.local and not site.fn.has_rsample:
                discrete = site.fn.support is not None and site.fn.support.is_discrete
                what = "discrete" if discrete else "not reparameterised"
                raise NoDensityError(
                    f"site {name!r} of the guide is {what} ({type(site.fn).__name__}); "
                    "sum it out in the model (config_enumerate), and make the guide from the model without it"
                )

    def _try_density(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Evaluate the density at an image, so that a guide without one is refused at once."""
        values, dims = draws.values, layout.native_dims
        # Several images, as a random element of a small group may be the identity.
        rows = {name: value.unsqueeze(0) for name, value in values.items()}
        moved = self.symmetry.act(self.symmetry.sample(values, (NUM_MOVED, 1)), rows)
        for outside, why in (
            (layout.local, "lie in subsampled plates, where a minibatch tells their density only in part"),
            (layout.apart, "have a scale of their own"),
        ):
            if outside:
                rest = {name: dim for name, dim in dims.items() if name not in outside}
                own = {name: dim for name, dim in dims.items() if name in outside}
                call = GuideCall(own, args, kwargs, draws.indices, rest)
                check_independence(self.guide, call, rows, moved, why)
        self._log_density(layout, draws, args, kwargs)(moved)

    def _pair_factors(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LogRatios | None:
        """For a guide that isn't known from outside, but is seen to factorise over units."""
        pairs = pair_factors(self.symmetry, draws)
        if pairs is None:
            return None
        rows = []
        for _ in range(NUM_TRIED):
            with Capture(self.guide) as captured:
                self.guide(*args, **kwargs)
            rows.append(captured.draws(layout.native_dims))
        others = _joined(rows)
        density = self._log_density(layout, others, args, kwargs)
        return pairs if factorises(pairs, others, density) else None

    def _check_symmetry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.model is not None:
            check_symmetry(self.model, self.symmetry, *args, **kwargs)
            return
        warnings.warn(
            f"{self.symmetry!r} is not checked, for the guide does not carry its model; pass model= to "
            "AutoSymmetrized",
            stacklevel=4,
        )

    def _support(self, name: str, site: Captured) -> Any:
        """Where a site lives; an autoguide's own sites may be point masses, which do not say."""
        prototype = getattr(self.guide, "prototype_trace", None)
        nodes = {} if prototype is None else prototype.nodes
        return nodes.get(name, {}).get("fn", site.fn).support


def _model_of(guide: Callable[..., Any]) -> Callable[..., Any] | None:
    """The model of a guide that carries it; in Pyro, an autoguide that is copied and its copy do not."""
    if not isinstance(guide, AutoGuide):
        return getattr(guide, "model", None)
    if guide._model is not None:
        return guide.model
    if guide.prototype_trace is None:
        raise ValueError(
            f"{type(guide).__name__} lost its model when it was copied or pickled, and had not been run "
            "before; make a new one from the model, or run it once before it is copied"
        )
    return None


def _has_run(guide: PyroModule) -> bool:
    """Whether any part of a guide has run, so that its parameters have their names."""
    used = any(has_run(m) for m in guide.modules() if isinstance(m, PyroModule))
    if used and not getattr(guide, "_pyro_name", ""):
        raise ValueError(
            f"{type(guide).__name__} has been run already, and has no name to go by within another module; "
            "give it one when it is made, as in super().__init__(name='guide'), or symmetrise it unrun"
        )
    return used


def _joined(rows: list[Draws]) -> Draws:
    """Several calls' draws as those of one call, which is the last."""
    values = {name: torch.cat([row.values[name] for row in rows]) for name in rows[-1].values}
    return replace(rows[-1], values=values, own=torch.cat([row.own for row in rows]), scaled=None)


class AutoSymmetrizedNormal(AutoSymmetrized):
    """A mean-field normal guide averaged over a symmetry.

    It is :class:`AutoSymmetrized` around Pyro's ``AutoNormal``, whose formulas hold here.

    Args:
        model: a Pyro model.
        symmetry: a symmetry of the model.
        init_loc_fn: a per-site initialisation, as for ``AutoNormal``.
        init_scale: initial standard deviation of each unconstrained coordinate.
        create_plates: a function of the model's arguments that makes its subsampled plates.
        estimator: as for :class:`AutoSymmetrized`.
        num_elements: as for :class:`AutoSymmetrized`.
        tolerance: as for :class:`AutoSymmetrized`.

    Raises:
        ValueError: as :class:`AutoSymmetrized` does, here and on the first call.

    Example:
        >>> def model():
        ...     pyro.sample("locs", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        >>> guide = AutoSymmetrizedNormal(model, Permutation({"locs": -1}))
        >>> guide()["locs"].shape
        torch.Size([3])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        symmetry: Symmetry,
        *,
        init_loc_fn: Callable[..., Tensor] = init_to_feasible,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
        estimator: Estimator = "auto",
        num_elements: int = 16,
        tolerance: float | None = 1e-6,
    ) -> None:
        guide = AutoNormal(model, init_loc_fn=init_loc_fn, init_scale=init_scale, create_plates=create_plates)
        super().__init__(guide, symmetry, estimator=estimator, num_elements=num_elements, tolerance=tolerance)
