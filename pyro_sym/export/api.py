"""Convert runs and guides of Pyro to ArviZ.

An MCMC run, a guide or a dict is read into a :class:`~pyro_sym.export.read.Fit`, which holds tensors and does
not depend on ArviZ. Each group of the result is then a function of the fit, the model and the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from pyro_sym._options import write_out
from pyro_sym.export.groups import convert
from pyro_sym.export.options import DEFAULTS, Options, checked
from pyro_sym.export.read import from_draws, from_guide, from_mcmc

__all__ = ["dataset", "from_pyro", "from_pyro_svi"]


@write_out(Options, DEFAULTS)
def from_pyro(
    mcmc: Any,
    *,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Convert an MCMC run to ArviZ, with raw draws and draws aligned modulo a symmetry.

    The groups are

    * ``posterior``: the draws as they are, the model's deterministic sites, and ``functions`` of the draws;
    * ``posterior_aligned``, with a symmetry: draw :math:`\theta_m` moved to :math:`g_m \cdot \theta_m`
      (:func:`~pyro_sym.align`, all chains to the same labels), and what is computed from the moved draws;
    * ``sample_stats``: ``diverging`` if the kernel reports divergences; every statistic that the kernel
      reports by draw, under its own name, those by site along ``latent_site``; and the elements :math:`g_m`
      as integers ``permutation`` and ``sign`` (numbered ``permutation_0``, ``permutation_1``, ... if there
      are several), with ``alignment_confidence``, the probability of each element against its best rival;
    * ``observed_data``: the model's observed sites, without deterministic sites, factors, and parameters
      that ``poutine.condition`` fixes;
    * ``log_likelihood``: of every datum (:func:`~pyro_sym.log_likelihood`), for ``az.loo``;
    * ``posterior_predictive``, ``predictions``, ``prior``, ``prior_predictive``, ``constant_data`` and
      ``predictions_constant_data``, if they are asked for.

    Deterministic sites are those of ``pyro.deterministic``, sites with a ``Delta``, and those that
    ``poutine.reparam`` computes from new ones; the attribute ``deterministic`` names them. Sites that depend
    on summed-out sites, or on the rows that a plate or a loader happens to show, have not one value a draw;
    the attribute ``left_out`` names them. Sites in subsampled plates are computed only if they are named.

    A site that ``poutine.condition`` fixes is data, as with ``obs=``, if its density depends on the latent
    sites. Otherwise it is a parameter, and keeps its value in the predictions.

    Dims are named after the plates, and event dims after ``infer={"event_dims": ["feature"]}`` of the site;
    dims without a name are called ``site_dim_0`` and so on. Slashes in names, as from
    ``pyro.contrib.autoname.scope``, become dots. Data ``y_0``, ``y_1``, ... of a sequential plate become one
    variable ``y`` along a dim of the plate, as ``az.loo`` needs one variable.

    Data and likelihood cover all rows of a subsampled plate. Where the model's arguments choose the rows, as
    with batches of a loader, its sites are left out (``left_out`` names them): pass ``args`` with all rows.

    Masked entries are not data. They are dropped from ``observed_data``, ``log_likelihood`` and
    ``posterior_predictive``: whole rows, if the masked entries are rows (the others keep their labels);
    otherwise the remaining entries are laid along a flat dim ``y_observed``.

    Draws that are not finite, as of a masked chain of :class:`~pyro_sym.VectorizedMCMC`, are exported as they
    are, with a warning; the others are aligned without them. If more than 1 % of the draws have an
    ``alignment_confidence`` below 0.9, a warning says that labels are in doubt; the attribute ``alignment``
    holds the share of such draws and the smallest confidence. Torch's random state is restored: two calls
    simulate the same data.

    Args:
        mcmc: a :class:`pyro.infer.MCMC` that has been run, with any kernel; a
            :class:`~pyro_sym.VectorizedMCMC`; the path of a store, or :func:`~pyro_sym.open_run` of it, also
            while it is being written (pass ``model`` and ``args``, which it doesn't hold); or a dict of
            draws by site, each of shape ``(num_chains, num_samples, *shape)``.
        args: positional arguments of the model; by default those of ``mcmc.run``.
        kwargs: keyword arguments of the model; by default those of ``mcmc.run``.
        model: the model; by default the kernel's. Without one (a kernel given a potential, or a dict) there
            are no observed data and no dims from plates.
        **options: what to export beside the draws (:class:`~pyro_sym.export.options.Options`).

    Returns:
        An ``arviz.InferenceData`` with ArviZ 0.23, an ``xarray.DataTree`` with ArviZ 1.x.

    Raises:
        ValueError: if there are no draws, ``deterministic`` names a site that the model has not, a dim would
            have two sizes or the name of a variable, names clash, a statistic has not one entry a draw, data
            can't be simulated, or an option needs a model or rows that are missing.
        TypeError: if there is no such option, ``mcmc`` keeps no draws, a function returns no tensor, a
            variable is complex, or an argument has the wrong type.
        SymmetryError: if the symmetry can't act on the draws.

    Warns:
        UserWarning: if something is left out, as the log likelihood of a model without data, or
            deterministic sites in subsampled plates; if draws are not finite, or their labels are in doubt.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("city", len(y)):
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> mcmc = MCMC(NUTS(model), num_samples=20, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
        >>> data = from_pyro(mcmc, log_likelihood=True, coords={"city": ["Bern", "Genf", "Chur"]})
        >>> data["log_likelihood"]["y"].dims
        ('chain', 'draw', 'city')
    """
    asked = checked(options, "from_pyro")
    read = from_draws if isinstance(mcmc, Mapping) else from_mcmc
    return convert(read(mcmc, model, args, kwargs), asked)


@write_out(Options, DEFAULTS)
def from_pyro_svi(
    guide: Callable[..., Any],
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    num_samples: int = 1000,
    **options: Unpack[Options],
) -> Any:
    r"""Convert a guide to ArviZ: independent draws :math:`\theta_m \sim q` as one chain.

    Groups, dims and names are as in :func:`from_pyro`. If the guide has ``sample_posterior``
    (:class:`~pyro_sym.AutoSymmetrized`), it draws by that method; any other guide is run ``num_samples``
    times, and all its sample sites but the auxiliary ones are read.

    With ``log_likelihood``, ``sample_stats`` has ``log_p``, the log joint, and ``log_q``, the log density of
    the guide, at each draw, both of constrained values and on all data, for ``az.loo_approximate_posterior``
    of ArviZ 1.x. For a symmetrised guide it is :math:`\log q^G`, by the guide's own estimator. If a guide has
    no density, the attribute ``log_q`` says why.

    Sites inside subsampled plates have other rows in every draw. They are left out with a warning, and the
    attribute ``left_out`` names them. Torch's random state is restored: two calls give the same draws.

    Args:
        guide: a Pyro guide, trained.
        args: positional arguments of the guide and the model.
        kwargs: their keyword arguments.
        model: the model; by default the guide's. Without one there are no observed data and no dims from
            plates.
        num_samples: number of draws.
        **options: what to export beside the draws (:class:`~pyro_sym.export.options.Options`).

    Returns:
        An ``arviz.InferenceData`` with ArviZ 0.23, an ``xarray.DataTree`` with ArviZ 1.x.

    Raises:
        ValueError: if ``num_samples`` is not positive, the guide has no latent sites, or as in
            :func:`from_pyro`.
        SymmetryError: if the symmetry can't act on the draws.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("city", len(y)):
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> y = torch.tensor([1.0, 2.0, 3.0])
        >>> from_pyro_svi(AutoNormal(model), args=(y,), num_samples=50)["posterior"]["loc"].shape
        (1, 50)

    References:
        Magnusson, Riis Andersen, Jonasson and Vehtari (2019), "Bayesian leave-one-out cross-validation for
        large data" (arXiv 1904.10679), for the correction by log p − log q.
    """
    asked = checked(options, "from_pyro_svi")
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be positive")
    if asked["symmetry"] is None:
        asked["symmetry"] = getattr(guide, "symmetry", None)
    fit = from_guide(guide, model, args, dict(kwargs or {}), num_samples, densities=asked["log_likelihood"])
    return convert(fit, asked)


def dataset(data: Any, group: str) -> Any:
    """One group of an export, with either generation of ArviZ.

    Args:
        data: what :func:`from_pyro` or :func:`from_pyro_svi` returned.
        group: the name of a group.

    Returns:
        An ``xarray.Dataset``, which ``az.summary``, ``az.rhat`` and ``az.plot_trace`` take.

    Raises:
        KeyError: if there is no such group.
    """
    node = data[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node
