"""From Pyro to ArviZ: conversion, and what is asked for beside it.

A source (an MCMC run, a guide, a dict) is read into a :class:`~pyro_sym.export.read.Fit`, which holds
tensors and knows nothing of ArviZ. Each group of the result is then a function of the fit and the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pyro_sym.export.groups import Function, Given, Request, convert
from pyro_sym.export.names import Dims
from pyro_sym.export.read import from_draws, from_guide, from_mcmc
from pyro_sym.symmetry.base import Group

__all__ = ["dataset", "from_pyro", "from_pyro_svi"]


def from_pyro(
    mcmc: Any,
    *,
    symmetry: Group | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    deterministic: bool | Collection[str] = True,
    log_likelihood: bool = False,
    posterior_predictive: bool | Given | None = None,
    predictions: Given | None = None,
    prior: int | Given | None = None,
    constant_data: Given | None = None,
    predictions_constant_data: Given | None = None,
    functions: Mapping[str, Function] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    pred_coords: Mapping[str, Any] | None = None,
    pred_dims: Dims | None = None,
) -> Any:
    r"""Convert an MCMC run to ArviZ, with draws aligned modulo a symmetry beside the raw ones.

    The groups are

    * ``posterior``: the draws as they are, the model's deterministic sites, and ``functions`` of the draws;
    * ``posterior_aligned``, with a symmetry: draw :math:`\theta_m` moved to :math:`g_m \cdot \theta_m`
      (:func:`~pyro_sym.align`, all chains to the same labels), and what is computed from it there;
    * ``sample_stats``: ``diverging`` if the kernel reports divergences, the per-draw statistics of this
      package's kernels, those by site along ``latent_site``, and the elements :math:`g_m` as integers
      ``permutation`` and ``sign`` (numbered ``permutation_0``, ``permutation_1``, ... if there are several),
      with ``alignment_confidence``, the probability of each element against its best rival;
    * ``observed_data``: the model's observed sites, without deterministic sites, factors, and parameters
      that ``poutine.condition`` fixes;
    * ``log_likelihood``: of every datum (:func:`~pyro_sym.log_likelihood`), for ``az.loo``;
    * ``posterior_predictive``, ``predictions``, ``prior``, ``prior_predictive``, ``constant_data`` and
      ``predictions_constant_data``, if they are asked for.

    Deterministic sites are those of ``pyro.deterministic``, sites with a ``Delta``, and those that
    ``poutine.reparam`` computes from new ones. The model is run at each draw to have them; the attribute
    ``deterministic`` names them. Those that depend on summed-out sites, or on the rows that a plate or a
    loader happens to show, have not one value a draw; the attribute ``left_out`` names these. A value for
    every row of a subsampled plate is computed where ``deterministic`` names the site.

    A site that ``poutine.condition`` fixes is data if its density depends on the latent sites, as ``obs=``
    is, and a parameter if it doesn't: it keeps its value in the predictions.

    R-hat of a network's weights says little, as they have many equal modes; R-hat of what the network
    predicts at some inputs, one of the ``functions``, stands beside it.

    Dims are named after the plates, and event dims after ``infer={"event_dims": ["feature"]}`` of the site;
    what has no name is called ``site_dim_0`` and so on. Slashes in names, as from
    ``pyro.contrib.autoname.scope``, become dots. Data ``y_0``, ``y_1``, ... of a sequential plate become one
    variable ``y`` along a dim of the plate, as ``az.loo`` wants one.

    A subsampled plate is shown window after window, so that data and likelihood cover all rows. Where the
    model's arguments choose the rows, as with batches of a loader, its sites are left out of the data and
    named in the attribute ``left_out``: pass ``args`` and ``kwargs`` with all rows to have them.

    Masked entries are no data. They are dropped from ``observed_data``, ``log_likelihood`` and
    ``posterior_predictive`` alike: as rows, the others keeping their labels, or where whole rows don't do, by
    keeping the other entries along a flat dim ``y_observed``.

    Draws that aren't finite, those of a masked chain of :class:`~pyro_sym.VectorizedMCMC`, stay as they are,
    with a warning; the others are aligned without them.

    If more than 1 % of the draws have an ``alignment_confidence`` below 0.9, a warning says that labels are
    in doubt; the attribute ``alignment`` holds the share of such draws and the least confidence.

    Torch's random state is left as it was: two calls simulate the same data.

    ArviZ reads an opened file when it is asked for values, and keeps it locked: write what was read from a
    file to another one, not over its own.

    Args:
        mcmc: a :class:`pyro.infer.MCMC` that has been run, with any kernel; a
            :class:`~pyro_sym.VectorizedMCMC`; the path of a store, or :func:`~pyro_sym.open_run` of it, also
            while it is being written (pass ``model`` and ``args`` too, which it doesn't hold); or a dict of
            draws by site, each of shape ``(num_chains, num_samples, *shape)``.
        symmetry: what to align modulo; by default nothing is aligned.
        args: positional arguments of the model; by default those of ``mcmc.run``.
        kwargs: keyword arguments of the model; by default those of ``mcmc.run``.
        model: the model; by default the kernel's. Without one (a kernel given a potential, or a dict) there
            are no observed data and no dims from plates.
        deterministic: which deterministic sites to export: ``True`` for all that have no row of a subsampled
            plate, or names. A function of the same name takes the place of one.
        log_likelihood: whether to compute the log likelihood of every datum.
        posterior_predictive: ``True`` to draw the observed sites anew at every draw, or draws by name, of
            shape ``(num_chains * num_samples, *shape)`` as from Pyro's ``Predictive`` (whose padding is taken
            off), or ``(num_chains, num_samples, *shape)``. What is given is kept; ``az.plot_ppc_dist`` wants
            ``var_names`` if there are others than observed sites.
        predictions: draws at other inputs, of the same shapes.
        prior: a number of draws to take from the model, or draws by site, of shape ``(num_draws, *shape)``;
            those of observed sites go to ``prior_predictive``.
        constant_data: arrays by name.
        predictions_constant_data: arrays by name, that go with the predictions.
        functions: by name, a function of one draw, given as constrained values by site, that returns a
            tensor.
        coords: labels by dim.
        dims: dim names by site, one a dim (``None`` for the default name), in place of those from the model.
        pred_coords: labels by dim, for the predictions and what goes with them.
        pred_dims: dim names for these.

    Returns:
        An ``arviz.InferenceData`` with ArviZ 0.23, an ``xarray.DataTree`` with ArviZ 1.x.

    Raises:
        ValueError: if there are no draws, ``deterministic`` names what is none of the model's sites, a dim
            would have two sizes or the name of a variable, names clash, a statistic is not one value a draw,
            data can't be simulated, or something asked for needs a model or rows that aren't there.
        TypeError: if ``mcmc`` keeps no draws, a function returns no tensor, a variable is complex, or an
            argument has another type than it says.
        SymmetryError: if the symmetry can't act on the draws.

    Warns:
        UserWarning: if something that was asked for is left out, as the log likelihood of a model without
            data, or deterministic sites in subsampled plates; if draws are not finite, or their labels in
            doubt.

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
    read = from_draws if isinstance(mcmc, Mapping) else from_mcmc
    request = Request(
        symmetry=symmetry,
        deterministic=deterministic,
        log_likelihood=log_likelihood,
        posterior_predictive=posterior_predictive,
        predictions=predictions,
        prior=prior,
        constant_data=constant_data,
        predictions_constant_data=predictions_constant_data,
        functions=functions,
        coords=coords,
        dims=dims,
        pred_coords=pred_coords,
        pred_dims=pred_dims,
    )
    return convert(read(mcmc, model, args, kwargs), request)


def from_pyro_svi(
    guide: Callable[..., Any],
    *,
    symmetry: Group | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    num_samples: int = 1000,
    deterministic: bool | Collection[str] = True,
    log_likelihood: bool = False,
    posterior_predictive: bool | Given | None = None,
    predictions: Given | None = None,
    prior: int | Given | None = None,
    constant_data: Given | None = None,
    predictions_constant_data: Given | None = None,
    functions: Mapping[str, Function] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
    pred_coords: Mapping[str, Any] | None = None,
    pred_dims: Dims | None = None,
) -> Any:
    r"""Convert a guide to ArviZ: independent draws :math:`\theta_m \sim q` as one chain.

    Groups, dims and names are as in :func:`from_pyro`. A guide with ``sample_posterior``
    (:class:`~pyro_sym.AutoSymmetrized`) is asked for draws, and its own symmetry is the default; any other
    guide is run ``num_samples`` times, and its sample sites are read, auxiliary ones excepted.

    With ``log_likelihood``, ``sample_stats`` has ``log_p``, the log joint, and ``log_q``, the guide's log
    density, at each draw, both of constrained values and on all data, as ``az.loo_approximate_posterior`` of
    ArviZ 1.x asks for them. A symmetrised guide's is :math:`\log q^G`, as its estimator has it. The attribute
    ``log_q`` says why a guide has none.

    Draws of sites inside subsampled plates belong to other rows every time; a warning says that they are
    left out, and the attribute ``left_out`` names them.

    The draws start from torch's random state, which is then put back: two calls give the same draws.

    Args:
        guide: a Pyro guide, trained.
        symmetry: what to align modulo; by default the guide's symmetry, if it has one.
        args: positional arguments of the guide and the model.
        kwargs: their keyword arguments.
        model: the model; by default the guide's. Without one there are no observed data and no dims from
            plates.
        num_samples: number of draws.
        deterministic: which deterministic sites to export, as in :func:`from_pyro`.
        log_likelihood: whether to compute the log likelihood of every datum, ``log_p`` and ``log_q``.
        posterior_predictive: as in :func:`from_pyro`, and so are all that follow.
        predictions: draws at other inputs.
        prior: a number of draws, or draws by site.
        constant_data: arrays by name.
        predictions_constant_data: arrays by name.
        functions: by name, a function of one draw.
        coords: labels by dim.
        dims: dim names by site.
        pred_coords: labels by dim, of predictions.
        pred_dims: dim names, of predictions.

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
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be positive")
    request = Request(
        symmetry=symmetry if symmetry is not None else getattr(guide, "symmetry", None),
        deterministic=deterministic,
        log_likelihood=log_likelihood,
        posterior_predictive=posterior_predictive,
        predictions=predictions,
        prior=prior,
        constant_data=constant_data,
        predictions_constant_data=predictions_constant_data,
        functions=functions,
        coords=coords,
        dims=dims,
        pred_coords=pred_coords,
        pred_dims=pred_dims,
    )
    fit = from_guide(guide, model, args, dict(kwargs or {}), num_samples, densities=log_likelihood)
    return convert(fit, request)


def dataset(data: Any, group: str) -> Any:
    """One group of an export, alike with both generations of ArviZ.

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
