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
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor

from pyro_sym._random import fork_random_state
from pyro_sym.errors import SymmetryError
from pyro_sym.guides.average import OrbitAverage, Run, Trivial
from pyro_sym.guides.capture import Capture, Draws, InPlates, is_one
from pyro_sym.guides.checks import check_independence, check_site_normals, refuse_sites
from pyro_sym.guides.choose import Estimator, EstimatorName, choose
from pyro_sym.guides.density import GuideCall, log_density
from pyro_sym.guides.gain import SymmetryGain, reliable, symmetry_gain
from pyro_sym.guides.handwritten import factorises, pair_factors
from pyro_sym.guides.pyro_guides import is_named, model_of, prototype_sites
from pyro_sym.guides.scale_and_mask import common_scale, masks, refuse_uneven_masks, sites_apart
from pyro_sym.guides.separation import Certificate, certificate
from pyro_sym.guides.site_normals import drawn_normals, site_normals
from pyro_sym.guides.unit_pairs import LogRatios, pair_normals
from pyro_sym.search.check import check_symmetry
from pyro_sym.symmetry.base import Symmetry

__all__ = ["AutoSymmetrized"]

# Dims left free for plates around the guide.
MAX_OUTER = 4
# Draws at which a guide's density is compared with what is known about it.
NUM_TRIED = 8
# Images of a draw at which sites outside of the average are checked to be independent of the moved ones.
NUM_MOVED = 16


@dataclass(frozen=True)
class _Layout:
    """The sites that the first call of the base guide shows, with the number of dims of one draw.

    ``local`` sites lie in subsampled plates and are not averaged; ``apart`` sites have a scale of their own
    and are independent of the moved ones.
    """

    native_dims: dict[str, int]
    local: frozenset[str]
    apart: frozenset[str] = frozenset()

    @property
    def averaged(self) -> dict[str, int]:
        return self.dims_of(self.native_dims.keys() - self.local)

    def dims_of(self, sites: Collection[str]) -> dict[str, int]:
        return {name: dim for name, dim in self.native_dims.items() if name in sites}


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

    * ``"exact"`` computes the average itself: by permanents of up to 14 units if no site ties the group's
      permutations together, and every moved site is normal coordinate by coordinate
      (:func:`~pyro_sym.guides.site_normals.site_normals`; a simplex is not), or, for guides written by hand
      under one permutation, independent of all other sites and from unit to unit, or Dirichlet. Otherwise it
      enumerates up to 200,000 elements;
    * ``"importance"`` weighs :math:`K` permutations and sign flips, the identity and others proposed by the
      guide's density of each unit (:func:`~pyro_sym.orbit.guided_permutations.importance`,
      :func:`~pyro_sym.orbit.guided_blocks.draw_elements`). It is tight where units are well separated, at
      any number of them. For guides that are not independent normals the proposals come from normals fitted
      to the marginals, and are looser where units are strongly correlated and overlap;
    * ``"uniform"`` averages over :math:`K` elements, the identity and uniform ones; its gain saturates at
      :math:`\log K`;
    * ``"auto"`` is exact where that takes permanents, or an enumeration of up to 1,000 elements; importance
      otherwise, and uniform only for groups that are not made of permutations and sign flips. :attr:`method`
      says which of the three was chosen.

    Where the units of independent normals under one permutation lie far apart,
    :math:`\log q^G(\omega) = \log q(\omega) - \log |G|` up to an error with a known bound
    (:class:`~pyro_sym.guides.separation.Certificate`). If the bound is within ``tolerance``, training takes
    that value plus the bound, whatever the estimator, with the gradient of the plain guide; the ELBO stays a
    lower bound.

    A :class:`Viewed` of permutations and sign flips counts as these. With a group of one element, such as
    ``Product()`` where no symmetry was found, the guide runs as it is.

    The guide's own scales and masks (``poutine.scale``, ``poutine.mask``, masked distributions) are kept.
    With a scale :math:`s` on the moved sites their term is :math:`s \log q^G(\omega)`; sites with another
    scale keep it, and have to be independent of the moved ones. Masked entries are left out of the density,
    and the group has to leave the mask as it is. As without symmetrising, the objective is no bound on the
    log evidence if scales differ between guide and model.

    In training :math:`\omega` is drawn from :math:`q`, as by invariance no expectation changes.
    :meth:`sample_posterior` draws from :math:`q^G`. :meth:`median` and :meth:`quantiles` are the base
    guide's: they describe one representative of the orbit.

    On the first call the symmetry is checked against the model (:func:`~pyro_sym.check_symmetry`); a symmetry
    that the model does not have is an error.

    Args:
        guide: any Pyro guide whose density can be evaluated: Pyro's autoguides (but not the point masses),
            and hand-written guides without auxiliary variables. Sites inside subsampled plates are not
            averaged; the group must not move them, and they must not depend on what it moves. A trained guide
            keeps its parameters and their names.
        symmetry: the group; its sites must be latent sites of the guide.
        estimator: how the orbit average is computed: a name, or a subclass of
            :class:`~pyro_sym.guides.average.OrbitAverage`.
        num_elements: :math:`K`, the identity included, for ``"importance"`` and ``"uniform"``.
        tolerance: the largest error, in nats and in the mean over draws, at which the average is not
            computed; 0 or ``None`` to compute it in every step.
        model: the model, for guides that don't hold theirs; without it the symmetry can't be checked, and a
            warning says so.

    Raises:
        ValueError: for an unknown estimator, ``num_elements < 2`` or a negative tolerance; for a guide run
            without a name, or an autoguide copied before its first run; on the first call, if the guide's
            registered normals are not what it draws from.
        SymmetryError: on the first call, if the model is not invariant, a site is unknown, sizes disagree, or
            the group is too large for ``"exact"`` or of another kind than ``"importance"`` takes.
        NoDensityError: if the guide has no density, its moved sites have several scales or a mask that the
            group changes, or sites with another scale or in subsampled plates depend on the moved ones.

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
        names = get_args(EstimatorName)
        if not own and estimator not in names:
            raise ValueError(f"estimator={estimator!r} is none of {names}, and no subclass of OrbitAverage")
        if num_elements < 2:
            raise ValueError(f"num_elements={num_elements} must be at least 2: the identity and one more")
        if tolerance is not None and not tolerance >= 0:
            raise ValueError(f"tolerance={tolerance} must be a number of nats, at least 0, or None")
        found = model_of(guide)
        super().__init__(model if model is not None else found)
        if not symmetry.is_finite:
            raise SymmetryError(
                f"{symmetry!r} is not finite, and guides are averaged over finite groups only; name a finite "
                "subgroup, such as a Product of Permutation and SignFlip"
            )
        self.guide = guide
        self.symmetry = symmetry
        self.estimator = estimator
        self.num_elements = num_elements
        self.tolerance = tolerance
        self._average: OrbitAverage | None = None
        self._layout: _Layout | None = None
        self._certificate: Certificate | None = None
        self._masks: dict[str, Tensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, PyroModule) and is_named(value):
            # Its parameters keep the names that they have in the param store.
            torch.nn.Module.add_module(self, name, value)
            return
        # AutoGuide.__setattr__ would adopt the base guide and create its plates.
        PyroModule.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AutoGuide.__setstate__ would adopt the copied base guide.
        super(AutoGuide, self).__setstate__(state)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw from the base guide, and add the log orbit average as a factor; returns the values by site."""
        layout, captured = self._capture(args, kwargs)
        values = {name: site.value for name, site in captured.sites.items()}
        # Outside of inference, no handler would take the factor.
        if not captured.hide or not am_i_wrapped():
            return values
        captured.refuse_uneven_weights_outside()
        draws = captured.draws(layout.native_dims)
        ratio: Any = self._certified_ratio(captured, draws)
        if ratio is None:
            ratio = self._log_ratio(self._run(layout, draws, args, kwargs))
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
            A :class:`SymmetryGain`, whose bounds agree with the exact estimator. With the importance one they
            are the best of sampled and deterministic bounds (:func:`~pyro_sym.orbit.bracket.bracket`), with
            at least 64 permutations; a draw takes some 20 ms at 64 units and seconds at 512. With the uniform
            one the lower half is at most :math:`\log K`, and the upper half is the better single figure.

        Raises:
            ValueError: if ``num_samples`` is below 1.

        Warns:
            UserWarning: if draws have another density when it is computed again from their values.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        with torch.no_grad():
            run = self.draw(num_samples, *args, **kwargs)
            draws, average = run.draws, self.average
            good = torch.ones_like(draws.own, dtype=torch.bool)
            if not average.trivial:
                good = reliable(run.density()(draws.values), draws.own)
            found = None
            if good.any():
                found = average.bracket(replace(run, draws=draws.at(good)), self.num_elements)
        return symmetry_gain(found, good, average.method, self.symmetry.log_order(draws.values))

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
        values = self.draw(count, *args, **kwargs).draws.values
        images = self.symmetry.act(self.symmetry.sample(values, (count,)), values)
        return {name: value.reshape(*sample_shape, *value.shape[1:]) for name, value in images.items()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The base guide's median: of one representative of the orbit, not of the average over it."""
        return self._of_base("median")(*args, **kwargs)

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The base guide's quantiles: of one representative of the orbit, not of the average over it."""
        return self._of_base("quantiles")(quantiles, *args, **kwargs)

    def draw(self, num_draws: int, /, *args: Any, **kwargs: Any) -> Run:
        """``num_draws`` draws of the base guide, not moved by any element, unseen by handlers outside."""
        several = []
        for _ in range(num_draws):
            with poutine.block():
                layout, captured = self._capture(args, kwargs)
            several.append(captured.draws(layout.native_dims))
        return self._run(layout, Draws.joined(several), args, kwargs)

    def log_average(self, run: Run) -> Tensor:
        r"""The log orbit average :math:`\log q^G(\omega)` at draws, ``(P,)``, by the guide's estimator."""
        return run.draws.own + self._log_ratio(run)

    @property
    def average(self) -> OrbitAverage:
        """The estimator of the orbit average, once it has been chosen on the first call."""
        if self._average is None:
            raise RuntimeError("the estimator is chosen on the first call of the guide; call it first")
        return self._average

    @property
    def method(self) -> str | None:
        """``"exact"``, ``"importance"`` or ``"uniform"``, as chosen on the first call, or a class's name."""
        return None if self._average is None else self._average.method

    @property
    def proposes_elements(self) -> bool:
        """Whether the average is over elements proposed by what the guide says of each unit."""
        return self._average is not None and self._average.proposes_elements

    def _of_base(self, method: str) -> Callable[..., dict[str, Tensor]]:
        if not hasattr(self.guide, method):
            raise NotImplementedError(
                f"the base guide {self.guide!r} has no {method}(); use sample_posterior()"
            )
        return getattr(self.guide, method)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Layout, Capture]:
        """Run the base guide; repeat the setup if the sites outside of the average have changed."""
        layout = self._setup(args, kwargs)
        if self.average.trivial:  # the guide as it is, for any handler outside to see
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
        """Refuse masks that the group changes; checked again whenever they differ from the last ones."""
        found = masks(captured.sites, self.symmetry.sites)
        known = self._masks.keys() == found.keys() and all(
            mask.shape == self._masks[name].shape and torch.equal(mask, self._masks[name])
            for name, mask in found.items()
        )
        if not known:
            refuse_uneven_masks(self.symmetry, found, captured.sites)
            self._masks = {name: mask.clone() for name, mask in found.items()}

    def _redraw(self, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Independent draws of the base guide, in one call if it is one of Pyro's autoguides."""
        if not isinstance(self.guide, AutoGuide):
            return self.draw(count, *args, **kwargs).draws.values
        layout = self._setup(args, kwargs)
        plates = [plate.dim for plate in self.guide.plates.values()]
        lowest = min([*plates, *(-dim for dim in layout.native_dims.values())], default=0)
        with poutine.block(), pyro.plate("_redraw", count, dim=lowest - 1 - MAX_OUTER):
            captured = self._capture(args, kwargs)[1]
        return captured.draws(layout.native_dims).values

    def _certified_ratio(self, captured: Capture, draws: Draws) -> float | None:
        r""":math:`\log q^G - \log q` up to the tolerance, if units lie so far apart that it is known."""
        if self._certificate is None:
            return None
        normals = drawn_normals(self.guide, self._certificate.axes, captured.auxiliary)
        bound = self._certificate.bound(normals)
        return None if bound is None else bound - self.symmetry.log_order(draws.values)

    def _log_ratio(self, run: Run) -> Tensor:
        r""":math:`\log q^G - \log q`, as the estimator has it, of shape ``(P,)``."""
        return self.average.bound(run, self.num_elements).to(run.draws.own.dtype)

    def _run(self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        call = GuideCall(layout.averaged, args, kwargs, draws.indices, layout.dims_of(layout.local))
        return Run(
            draws,
            density=lambda: log_density(self.guide, call),
            redraw=lambda count: self._redraw(count, args, kwargs),
        )

    def _setup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Layout:
        """On the first call: run the base guide, check the symmetry, choose the estimator."""
        if self._layout is not None:
            return self._layout
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
            refuse_sites(self.symmetry, captured.sites)
            dims = {name: value.dim() for name, value in values.items()}
            layout = _Layout(dims, captured.local, self._apart(captured))
            draws = captured.draws(layout.native_dims)
            self._try_density(layout, draws, args, kwargs)
            units = self._pair_units(layout, draws, args, kwargs)
        if self.model is not None:
            check_symmetry(self.model, self.symmetry, *args, **kwargs)
        else:
            why = "as the guide does not hold its model; pass model= to AutoSymmetrized"
            warnings.warn(f"{self.symmetry!r} is not checked, {why}", stacklevel=3)
        supports = {name: site.fn.support for name, site in captured.sites.items()}
        supports |= {name: site["fn"].support for name, site in prototype_sites(self.guide).items()}
        self._average = choose(self.estimator, self.guide, self.symmetry, values, supports, units)
        self._certificate = certificate(self.guide, self.symmetry, self.tolerance)
        self._layout = layout
        return self._layout

    def _try_density(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Evaluate the density at images, so that a guide without a density is refused at once."""
        rows = {name: value.unsqueeze(0) for name, value in draws.values.items()}  # (1, 1, *native)
        moved = self.symmetry.act(self.symmetry.sample(draws.values, (NUM_MOVED, 1)), rows)
        for outside, why in (
            (layout.local, "lie in subsampled plates, where a minibatch shows only part of their density"),
            (layout.apart, "have a scale of their own"),
        ):
            if outside:
                rest = layout.dims_of(layout.native_dims.keys() - outside)
                call = GuideCall(layout.dims_of(outside), args, kwargs, draws.indices, rest)
                check_independence(self.guide, call, rows, moved, why)
        self._run(layout, draws, args, kwargs).density()(moved)

    def _pair_units(
        self, layout: _Layout, draws: Draws, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LogRatios | None:
        """The matrix that pairs slots with units, if the guide's density factorises over units."""
        factors = pair_factors(self.symmetry, draws)
        if not (factors or site_normals(self.guide, layout.averaged)):
            return None
        several = []
        for _ in range(NUM_TRIED):
            with Capture(self.guide) as captured:
                self.guide(*args, **kwargs)
            several.append(captured.draws(layout.native_dims))
        others = Draws.joined(several)
        density = self._run(layout, others, args, kwargs).density()
        check_site_normals(self.guide, layout.averaged, others, density)
        units = pair_normals(self.guide, self.symmetry)
        if units is None and factors and factorises(factors, others, density):
            return factors
        return units
