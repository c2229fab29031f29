"""The potential energy of a Pyro model in unconstrained space, minibatches included, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.transforms import Transform, identity_transform

from pyro_sym._private import unvalidated
from pyro_sym._random import fork_random_state
from pyro_sym.graph.record import message_of
from pyro_sym.model.minibatch import draw_indices
from pyro_sym.model.program import Args, Program, Values, uniform_draw
from pyro_sym.unwrap import transform_of_entries

__all__ = ["ContinuousOnly", "Potential"]


class Potential:
    r"""The potential energy of a Pyro model and its arguments, a function of unconstrained latent values.

    With constrained values :math:`\theta = f(u)`, where :math:`f` is ``biject_to(support)`` site by site, it
    is

    .. math::

        U(u) = -\log p(f(u), D) - \log |\det \partial f / \partial u|,

    the full negative log joint with enumerable discrete sites summed out. Subsampled plates scale what they
    enclose by ``size / subsample_size``, so that over uniformly drawn indices :math:`U` and its gradient are
    unbiased. ``pyro.param`` s are held at their values.

    Args:
        model: a Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        init_strategy: a per-site function, as in Pyro's autoguides, for :meth:`initial`.

    Attributes:
        program: the model as constrained values see it.
        transforms: by site, from constrained to unconstrained values (Pyro's convention).
        shapes: the unconstrained shape of each latent site.
        sizes: the number of unconstrained values of each latent site.
        size: the number of unconstrained values of all sites together, :math:`d`.

    Raises:
        ValueError: if the model has no continuous latent site, a discrete one that can't be enumerated, one
            without elements, a latent site inside a subsampled plate, or one whose support depends on other
            latent sites.

    Example:
        >>> def model():
        ...     pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        >>> potential = Potential(model)
        >>> potential({"scale": torch.tensor(1.0)})
        tensor(1.4189)
        >>> potential.constrain({"scale": torch.tensor(1.0)})
        {'scale': tensor(2.7183)}
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        init_strategy: Callable[[Any], Tensor] = init_to_uniform,
    ) -> None:
        self.program = Program(model, args, kwargs, init_strategy=ContinuousOnly(init_strategy))
        latents = self.program.latents
        if not latents:
            raise ValueError("the model has no continuous latent site, so there is nothing to sample")
        self._refuse_local_latents()
        self._bijections: dict[str, Transform] = {name: biject_to(s.support) for name, s in latents.items()}
        self._curved = tuple(
            name for name, f in self._bijections.items() if transform_of_entries(f) is not identity_transform
        )
        self.transforms: dict[str, Transform] = {name: f.inv for name, f in self._bijections.items()}
        prototype = self.unconstrain({name: site.value for name, site in latents.items()})
        self.shapes = {name: value.shape for name, value in prototype.items()}
        self.sizes = {name: value.numel() for name, value in prototype.items()}
        if empty := [name for name, size in self.sizes.items() if size == 0]:
            raise ValueError(
                f"latent site {empty[0]!r} has no elements (its shape is "
                f"{tuple(latents[empty[0]].value.shape)}), so there is nothing to sample; leave the site out "
                "of the model where its size is 0"
            )
        self._dtypes = [value.dtype for value in prototype.values()]
        self.size = sum(self.sizes.values())
        self._refuse_moving_supports(prototype)

    def _refuse_local_latents(self) -> None:
        for name, site in self.program.latents.items():
            for frame in site.frames:
                if frame.name in self.program.plates:
                    raise ValueError(
                        f"latent site {name!r} is inside the subsampled plate {frame.name!r}: each step "
                        "would use its values for other rows; move the site out of the plate, "
                        "marginalise it, or drop the plate's subsample_size"
                    )

    def _refuse_moving_supports(self, prototype: Values) -> None:
        """Compare the transforms, which are those of the prototype, with those at a second point."""
        moved = {name: value + 0.1 for name, value in prototype.items()}
        values = self.constrain(moved)
        with fork_random_state(), torch.no_grad(), unvalidated():
            trace = self.program.trace(values, self.draw_indices())
        for name in self._curved:
            there = biject_to(cast(Any, trace.nodes[name]["fn"]).support)(moved[name])
            if not torch.allclose(there, values[name], equal_nan=True):
                raise ValueError(
                    f"the support of latent site {name!r} depends on other latent sites; sample it on a "
                    "fixed support and shift or scale it by pyro.deterministic"
                )

    def __call__(
        self, unconstrained: Values, indices: Values | None = None, args: Args | None = None
    ) -> Tensor:
        """The potential energy.

        Args:
            unconstrained: unconstrained values by latent site, of the shapes in ``shapes``.
            indices: ``subsample_size`` indices for each subsampled plate, as :meth:`draw_indices` draws.
            args: the model's positional arguments in place of those of construction: a batch of the data.
                Subsampled plates without indices then show the rows of the batch in order.

        Returns:
            A scalar tensor, differentiable in ``unconstrained``.

        Raises:
            ValueError: if a latent site has no value, or a subsampled plate no indices.
        """
        values = self.constrain(unconstrained)
        energy = -self.program.log_joint(values, indices, args)
        for log_det in self._log_dets(unconstrained, values).values():
            energy = energy - log_det
        return energy

    def _log_dets(self, unconstrained: Values, values: Values) -> dict[str, Tensor]:
        return {
            name: self._bijections[name].log_abs_det_jacobian(unconstrained[name], values[name]).sum()
            for name in self._curved
        }

    def value_and_grad(
        self, position: Tensor, indices: Values | None = None, args: Args | None = None
    ) -> tuple[Tensor, Tensor]:
        """The potential energy and its gradient at a flat position, by one evaluation of the model.

        Args:
            position: all unconstrained values, flattened, of shape ``(d,)``.
            indices: as for a call.
            args: as for a call.

        Returns:
            The energy, a scalar, and the gradient, of shape ``(d,)``; both detached.
        """
        with torch.enable_grad():
            leaves = {name: v.detach().requires_grad_() for name, v in self.unflatten(position).items()}
            energy = self(leaves, indices, args)
            if not energy.requires_grad:  # a constant, which autograd refuses
                return energy, torch.zeros_like(position)
            gradients = torch.autograd.grad(
                energy, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        return energy.detach(), torch.cat([g.reshape(-1) for g in gradients])

    def constrain(self, unconstrained: Values) -> dict[str, Tensor]:
        """Constrained values from unconstrained ones, site by site."""
        return {name: bijection(unconstrained[name]) for name, bijection in self._bijections.items()}

    def unconstrain(self, values: Values) -> dict[str, Tensor]:
        """Unconstrained values from constrained ones, site by site."""
        return {name: transform(values[name]) for name, transform in self.transforms.items()}

    def flatten(self, unconstrained: Values) -> Tensor:
        """All unconstrained values as one tensor of shape ``(d,)``, in the order of ``shapes``."""
        return torch.cat([unconstrained[name].reshape(-1) for name in self.shapes])

    def unflatten(self, position: Tensor) -> dict[str, Tensor]:
        """Values by site of flat positions ``(*batch, d)``; the inverse of :meth:`flatten`."""
        parts = position.split(list(self.sizes.values()), dim=-1)  # each (*batch, size)
        sites = zip(self.shapes.items(), parts, self._dtypes, strict=True)
        batch = position.shape[:-1]
        return {name: part.reshape((*batch, *shape)).to(dtype) for (name, shape), part, dtype in sites}

    def draw_indices(self) -> dict[str, Tensor]:
        """Draw indices for every subsampled plate, uniformly and without replacement."""
        return draw_indices(self.program.plates)

    def initial(self, num_tries: int = 100) -> dict[str, Tensor]:
        """Draw a point by ``init_strategy`` until potential energy and gradient are finite there.

        Args:
            num_tries: how many draws to try.

        Returns:
            Unconstrained values by site.

        Raises:
            ValueError: if no draw is finite; the message names the sites at fault in the last one.
        """
        for _ in range(num_tries):
            unconstrained = {name: u.detach() for name, u in self.unconstrain(self.program.draw()[0]).items()}
            problem = self.problem_at(unconstrained, self.draw_indices())
            if problem is None:
                return unconstrained
        raise ValueError(
            f"no initial point with finite potential energy and gradient in {num_tries} draws; not finite at "
            f"the last one: {problem}. Give initial_params or another init_strategy, or check the data"
        )

    def problem_at(self, unconstrained: Values, indices: Values | None = None) -> str | None:
        """Describe what isn't finite at a point, and why if known; ``None`` if all is finite.

        Args:
            unconstrained: unconstrained values by site.
            indices: indices by subsampled plate.

        Returns:
            The phrases of :meth:`non_finite_sites`, and a sentence on the cause.
        """
        refusal = ""
        try:
            at_fault = self.non_finite_sites(unconstrained, indices)
        except ValueError as error:  # Pyro's validation refuses non-finite data, also under a mask
            refusal = f" ({message_of(error)})"
            with unvalidated():
                at_fault = self.non_finite_sites(unconstrained, indices)
        if not at_fault:
            return None
        problem = ", ".join(at_fault)
        if not all(phrase.startswith("gradient") for phrase in at_fault):
            problem += refusal
        else:
            problem += f". {self._why_gradient_alone(unconstrained, indices)}"
        return problem

    def _why_gradient_alone(self, unconstrained: Values, indices: Values | None) -> str:
        """Why a gradient is NaN although the log density is finite, with the data at fault if any."""
        with torch.no_grad(), unvalidated():
            trace = self.program.trace(self.constrain(unconstrained), indices)
        data = [
            repr(name)
            for name, site in trace.nodes.items()
            if site["type"] == "sample"
            and name not in self.program.latents
            and not torch.isfinite(torch.as_tensor(site["value"])).all()
        ]
        where = f"the data of site {', '.join(data)} are not finite there" if data else "as with missing data"
        return (
            "The log density itself is finite. A mask, and torch.where, set the value of an entry to zero, "
            f"but not its derivative (0 * nan = nan): {where}. Fill masked entries with any feasible value, "
            "as y.nan_to_num(), and keep the mask"
        )

    def non_finite_sites(self, unconstrained: Values, indices: Values | None = None) -> list[str]:
        """Phrases that name what isn't finite at a point, in the model's order; none if all is finite.

        Args:
            unconstrained: unconstrained values by site.
            indices: indices by subsampled plate.

        Returns:
            Phrases such as ``"log probability of site 'y'"``.
        """
        values = self.constrain(unconstrained)
        with torch.no_grad():
            terms = self.program.log_joint_terms(values, indices)
            log_dets = self._log_dets(unconstrained, values)
        _, gradient = self.value_and_grad(self.flatten(unconstrained), indices)
        parts = {
            "unconstrained value of": unconstrained,
            "log probability of": terms,
            "log Jacobian of": log_dets,
            "gradient at": self.unflatten(gradient),
        }
        return [
            f"{what} site {name!r}"
            for what, sites in parts.items()
            for name, value in sites.items()
            if not torch.isfinite(value).all()
        ]


class ContinuousOnly:
    """An initialisation strategy that also accepts discrete and improper sites, which Pyro's refuse."""

    def __init__(self, init_strategy: Callable[[Any], Tensor]) -> None:
        self.init_strategy = init_strategy

    def __call__(self, site: Any) -> Tensor:
        """A value of a site."""
        if site["fn"].support.is_discrete:
            return site["fn"].sample()
        try:
            return self.init_strategy(site)
        except NotImplementedError:
            return uniform_draw(site["fn"])
