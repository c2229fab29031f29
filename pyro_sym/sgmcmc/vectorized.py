"""Many chains in one process: the driver for this package's kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Unpack

from pyro.infer.autoguide.initialization import init_to_sample
from pyro.infer.mcmc.util import select_samples
from torch import Tensor

from pyro_sym.draws.identity import start_identified
from pyro_sym.draws.memory import Draws, DrawsInMemory
from pyro_sym.draws.store import DrawsOnDisk, Store, block_of_draws, random_state, set_random_state
from pyro_sym.draws.summaries import diagnose, print_table, without_diverged
from pyro_sym.sgmcmc.chains import Chains, Divergence
from pyro_sym.sgmcmc.kernel import Options, StochasticGradientKernel
from pyro_sym.sgmcmc.kernels import BAOA, SGHMC
from pyro_sym.sgmcmc.progress import Bar, Callback, Progress, asks_to_stop
from pyro_sym.sgmcmc.start import refuse_copies

__all__ = ["VectorizedMCMC", "deep_ensemble"]


class VectorizedMCMC:
    r"""Run many chains of a kernel side by side, as one batched computation.

    It has the interface of ``pyro.infer.MCMC``; what chains there are processes for is one more dim here, so
    that a step of 64 chains costs little more than a step of one. Chains start, draw their noise and (unless
    the kernel shares them) their minibatches independently, and a run is reproduced by
    ``pyro.set_rng_seed``.

    Args:
        kernel: one of this package's kernels.
        num_samples: draws per chain, after the warm-up.
        warmup_steps: draws per chain that are thrown away first, as in ``MCMC``; by default ``num_samples``.
        num_chains: :math:`C`.
        thinning: steps per draw, in warm-up as well; by default the kernel's.
        initial_params: unconstrained values by site to start from, with the chains in front: ``(C, *shape)``.
        initial_values: the same as constrained values, say draws of a guide or an optimum. Without either,
            the kernel's ``init_strategy`` draws them anew for each chain.
        on_divergence: what happens if a chain's position, gradient or energy is no longer finite.
            ``"raise"`` an error that names chain, step and first site; draws so far stay readable.
            ``"mask"`` the chain: its draws from there on are NaN, ``diverged`` says where and why, and the
            others go on.
        disable_progbar: whether to show no progress bar. It counts steps if a draw takes several, and is
            drawn anew five times a second.
        callback: is called between draws with a :class:`~pyro_sym.sgmcmc.progress.Progress`: how far the run
            is, energies, temperatures, and the draws so far. If it returns ``True`` or raises
            ``StopIteration`` the run ends there, with the draws that there are; another error ends it as
            well, is raised, and leaves them too. Whatever it draws at random, the run is the same with and
            without it.
        callback_every: draws from one call to the next, warm-up included.
        store: a local directory to write draws and statistics to, a block at a time, instead of keeping them
            in memory (:class:`~pyro_sym.draws.store.Store`). :func:`~pyro_sym.open_run` reads it, also while
            the run goes on.
        resume: whether to go on from the last block of a run in ``store``, to the very bits that it would
            have come to. Without a run there, one is begun. With a larger ``num_samples`` a run is extended,
            a finished one too: draws, momenta and learnt masses go on without a new warm-up. A finished run
            is only read. It has to be the same run: model and data
            (:func:`~pyro_sym.draws.fingerprint.fingerprint` says how they are compared), kernel, warm-up and
            number of chains. Seed and starting values don't matter any more. Batches have to depend on
            torch's random state alone (:class:`~pyro_sym.model.minibatch.Loader`), and
            ``torch.get_num_threads()`` to be what it was.
        store_every: draws a block, of which a crash may cost one; by default 1/20 of the run, and at most
            64 MB.

    Attributes:
        diverged: by chain, a :class:`~pyro_sym.sgmcmc.chains.Divergence` with step and reason.
        sampling_time: seconds that the draws took, warm-up included, and those before a crash.

    Raises:
        ValueError: if an argument is out of range.
        ImportError: if ``store`` is given and Zarr is not installed.

    Example:
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("rows", len(y), subsample_size=20) as rows:
        ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
        >>> kernel = BAOA(model, step_size=0.02, friction=5.0)
        >>> mcmc = VectorizedMCMC(
        ...     kernel, num_samples=50, warmup_steps=20, num_chains=8, thinning=5, disable_progbar=True
        ... )
        >>> mcmc.run(torch.ones(100))
        >>> mcmc.get_samples(group_by_chain=True)["mean"].shape
        torch.Size([8, 50])
    """

    def __init__(
        self,
        kernel: StochasticGradientKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        num_chains: int = 1,
        thinning: int | None = None,
        *,
        initial_params: Mapping[str, Tensor] | None = None,
        initial_values: Mapping[str, Tensor] | None = None,
        on_divergence: Literal["raise", "mask"] = "raise",
        disable_progbar: bool = False,
        store: str | os.PathLike[str] | None = None,
        resume: bool = False,
        store_every: int | None = None,
        callback: Callback | None = None,
        callback_every: int = 1,
    ) -> None:
        if not isinstance(kernel, StochasticGradientKernel):
            raise TypeError(
                f"kernel is {kernel!r}; VectorizedMCMC runs pyro_sym's stochastic-gradient kernels. Others "
                "run in pyro.infer.MCMC"
            )
        self._warmup_given = warmup_steps is not None
        warmup_steps = num_samples if warmup_steps is None else warmup_steps
        thinning = kernel.thinning if thinning is None else thinning
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("warmup_steps", warmup_steps, 0),
            ("num_chains", num_chains, 1),
            ("thinning", thinning, 1),
            ("callback_every", callback_every, 1),
            *([] if store_every is None else [("store_every", store_every, 1)]),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; pass an integer >= {least}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback is {callback!r}; pass a function of a Progress")
        if on_divergence not in ("raise", "mask"):
            raise ValueError(f"on_divergence is {on_divergence!r}; pass 'raise' or 'mask'")
        if initial_params is not None and initial_values is not None:
            raise ValueError("both initial_params and initial_values are given; pass one of them")
        if store is None and (resume or store_every is not None):
            raise ValueError("resume and store_every are about a store, and none is given; pass store=path")
        self.kernel = kernel
        self.num_samples = num_samples
        self.warmup_steps = warmup_steps
        self.num_chains = num_chains
        self.thinning = thinning
        self.initial_params = initial_params
        self.initial_values = initial_values
        self.on_divergence = on_divergence
        self.disable_progbar = disable_progbar
        self.store = None if store is None else Store(store)
        self.resume = resume
        self.store_every = store_every
        self.callback = callback
        self.callback_every = callback_every
        self.diverged: dict[int, Divergence] = {}
        self._ended = "call run() first"
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._chains: Chains | None = None
        self._draws: Draws | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Draw ``num_samples`` from each chain.

        An interrupt (Ctrl-C) or a divergence ends the run with its error; the draws up to there stay
        readable. So does a callback that stops the run, without an error.

        Args:
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the model can't be sampled, initial values don't fit it, chains would stay copies
                of each other, the number of temperatures is not that of the chains, or the store holds
                another run.
            DivergenceError: if a chain diverges, unless chains are masked.
            FileExistsError: if there is something at the path of the store, and it is not to be resumed.
            OSError: if the store can't be written, as when the disk is full.
        """
        self._args, self._kwargs = args, kwargs
        self._draws, self._ended = None, "the run ended before its first draw"
        try:
            self._take_draws()
        except BaseException as error:
            self._ended = f"the run was ended by {type(error).__name__}: {error}".rstrip(": ")
            raise

    def _take_draws(self) -> None:
        """Start the chains, and take what draws are left of the run."""
        with ExitStack() as stack:
            if self.store is None:
                chains = self._start()
                draws: Draws = DrawsInMemory(chains, self.num_samples)
            else:
                stack.callback(self.store.close)
                chains, draws = self._start_with(self.store)
            self._chains, self.diverged = chains, chains.diverged
            self._draws = stack.enter_context(draws)
            began = time.perf_counter() - draws.sampling_time
            total = self.warmup_steps + self.num_samples
            bar = stack.enter_context(Bar(total, draws.done, self.thinning, disable=self.disable_progbar))
            for draw in range(draws.done, total):
                warming_up = draw < self.warmup_steps
                chains.advance(
                    self.thinning,
                    warming_up=warming_up,
                    tick=partial(bar.tick, chains, warming_up=warming_up),
                )
                if not warming_up:
                    draws.append()
                draws.proceed(time.perf_counter() - began)
                if self._stops(chains, draws):
                    break

    def _start(self) -> Chains:
        chains = self.kernel.start(
            self._args,
            self._kwargs,
            num_chains=self.num_chains,
            initial_params=self.initial_params,
            initial_values=self.initial_values,
            on_divergence=self.on_divergence,
        )
        steps = (self.warmup_steps + self.num_samples) * self.thinning
        given = self.initial_params is not None or self.initial_values is not None
        refuse_copies(chains, steps, given=given)
        return chains

    def _stops(self, chains: Chains, draws: Draws) -> bool:
        """Call the callback if it is its turn, and ask whether it stops the run."""
        if self.callback is None or draws.done % self.callback_every:
            return False
        kept = max(0, draws.done - self.warmup_steps)
        progress = Progress(self, chains, draws.done, kept, draws.sampling_time)
        self._ended = "the run is in its warm-up"
        stops = asks_to_stop(self.callback, progress)
        self._ended = f"the callback stopped the run after {draws.done} draws of the warm-up"
        return stops

    def _start_with(self, store: Store) -> tuple[Chains, Draws]:
        """Start the chains, or start them once more as they were started, and set them to where they were."""
        record = None
        if store.exists():
            if not self.resume:
                raise FileExistsError(
                    f"{store.path} holds a run already; pass resume=True to go on with it, or another path"
                )
            store.lock()
            record = store.record()
            if not self._warmup_given:
                self.warmup_steps = int(record["identity"]["words"]["warmup_steps"])
            set_random_state(record["start"])
        start = random_state()
        numbers = {name: getattr(self, name) for name in ("warmup_steps", "num_chains", "thinning")}
        settings: dict[str, Any] = {"on_divergence": self.on_divergence, "store_every": self.store_every}
        settings |= {"kernel": type(self.kernel).__name__, **numbers}
        chains, identity = start_identified(self._start, self._roots(), settings)
        block = self.store_every or block_of_draws(chains, self.num_samples)
        return chains, DrawsOnDisk(store, chains, self.num_samples, block, identity, start, record)

    def _roots(self) -> dict[str, Any]:
        """What the run depends on, by name: model, data and options of the kernel."""
        own = {name: value for name, value in vars(self.kernel).items() if not name.startswith("_")}
        for name in ("model", "transforms", "init_strategy", "thinning"):
            own.pop(name, None)
        kwargs = {f"kwargs[{name!r}]": self._kwargs[name] for name in sorted(self._kwargs)}
        return {"model": self.kernel.model, "args": self._args, **kwargs, **own}

    @property
    def sampling_time(self) -> float:
        """Seconds that the draws took, warm-up included, and those before a crash."""
        return 0.0 if self._draws is None else self._draws.sampling_time

    @property
    def _samples(self) -> Mapping[str, Tensor] | None:
        """Constrained values by site, ``(C, draws, *shape)``; also where the exporter looks for draws."""
        return None if self._draws is None else self._draws.samples()

    @property
    def _diagnostics(self) -> list[dict[str, Any]]:
        """A report a chain, as ``pyro.infer.MCMC`` keeps them."""
        if self._draws is None:
            return []
        stats, diverging = self._draws.statistics(), self._draws.diverging()
        return [
            {
                "divergences": diverging[:, chain].nonzero().flatten().tolist(),
                "sample_stats": {name: values[:, chain] for name, values in stats.items()},
            }
            for chain in range(self.num_chains)
        ]

    def _drawn(self) -> Draws:
        if self._draws is None or self._draws.num_draws == 0:
            raise ValueError(f"there are no draws: {self._ended}")
        return self._draws

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> dict[str, Tensor]:
        """The draws, in constrained space.

        Args:
            num_samples: how many to pick at random, with replacement; by default all of them.
            group_by_chain: whether to keep the chains apart.

        Returns:
            Values by site, of shape ``(C, draws, *shape)`` if grouped by chain, otherwise ``(draws, *shape)``
            without the draws of masked chains that are NaN.

        Raises:
            ValueError: if there are no draws; the message says why.
        """
        draws = self._drawn()
        samples = dict(draws.samples())
        if not group_by_chain and self.diverged:
            fine = ~draws.diverging().transpose(0, 1)
            samples = {name: values[fine].unsqueeze(0) for name, values in samples.items()}
        return select_samples(samples, num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Any]:
        """Effective sample size and split R-hat by site, and statistics by draw.

        Returns:
            As ``pyro.infer.MCMC.diagnostics()`` has it: ``{site: {"n_eff": …, "r_hat": …}}``, with
            ``"sample_stats"`` and ``"divergences"`` by ``"chain 0"``, ``"chain 1"``, …; the statistics are
            those of the kernel's :meth:`~pyro_sym.StochasticGradientKernel.diagnostics`. Effective sample
            size and R-hat are those of the chains that did not diverge; of fewer than four draws a chain they
            are NaN.

        Raises:
            ValueError: if there are no draws; the message says why.
        """
        draws = self._drawn()
        report = diagnose(without_diverged(draws.samples(), draws.diverging()))
        chains = self._diagnostics
        for name in ("divergences", "sample_stats"):
            report[name] = {f"chain {chain}": own[name] for chain, own in enumerate(chains)}
        return report

    def summary(self, prob: float = 0.9) -> None:
        """Print mean, sd, quantiles, effective sample size and R-hat by coordinate, as Pyro does.

        Draws of masked chains that are NaN don't count, and the last two are of the other chains.

        Args:
            prob: of the interval shown.

        Raises:
            ValueError: if there are no draws, which the message explains, or ``prob`` is out of range.
        """
        draws = self._drawn()
        print_table(draws.samples(), prob, draws.diverging())
        for chain, divergence in self.diverged.items():
            print(f"chain {chain} diverged at step {divergence.step}: {divergence.what}")


def deep_ensemble(
    model: Callable[..., Any],
    *args: Any,
    num_members: int,
    num_steps: int,
    lr: float,
    num_data: int,
    momentum: float = 0.9,
    kernel: type[BAOA] | type[SGHMC] = BAOA,
    model_kwargs: Mapping[str, Any] | None = None,
    initial_params: Mapping[str, Tensor] | None = None,
    initial_values: Mapping[str, Tensor] | None = None,
    **options: Unpack[Options],
) -> VectorizedMCMC:
    r"""Train a deep ensemble, or draw from the posterior by the same run: one number is the difference.

    Each member is a chain of its own start, a draw from the prior, and its own minibatches. At
    ``temperature=0`` (the default) it is ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the loss averaged
    over the data, and the last states are a deep ensemble; at ``temperature=1`` the noise that makes it a
    sampler is added, and they are draws of the posterior, as far as the chains have got.

    Args:
        model: a Pyro model, with a subsampled plate for minibatches.
        *args: its positional arguments.
        num_members: chains.
        num_steps: steps of each.
        lr: the learning rate for the mean loss.
        num_data: :math:`N`, over which the loss is averaged.
        momentum: of SGD.
        kernel: :class:`~pyro_sym.BAOA` or :class:`~pyro_sym.SGHMC`.
        model_kwargs: the model's keyword arguments.
        initial_params: unconstrained values by site to start from, with the members in front.
        initial_values: the same as constrained values.
        temperature: 0 by default, which trains an ensemble; at 1 the members are draws.
        init_strategy: by default ``init_to_sample``, a draw from the prior. (Kernels start from
            ``init_to_uniform``, as Pyro's do, which makes weights so large that units saturate.)
        **options: the kernel's other options.

    Returns:
        The run, whose ``get_samples()`` are the members, one a chain.

    Raises:
        ValueError: if members would be copies of each other: they start at the same point (as with
            ``init_to_pretrained``), and see the same data in each step (all of it, or batches of a loader).

    Example:
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(x), subsample_size=10) as rows:
        ...         pyro.sample("y", dist.Normal(w * x[rows], 1.0), obs=y[rows])
        >>> x = torch.linspace(-1, 1, 50)
        >>> cold = deep_ensemble(model, x, 2 * x, num_members=4, num_steps=100, lr=0.1, num_data=50)
        >>> warm = deep_ensemble(
        ...     model, x, 2 * x, num_members=4, num_steps=100, lr=0.1, num_data=50, temperature=1.0
        ... )
        >>> cold.get_samples()["w"].shape, bool(cold.get_samples()["w"].std() < warm.get_samples()["w"].std())
        (torch.Size([4]), True)

    References:
        Lakshminarayanan et al. 2017 (arXiv 1612.01474) for ensembles; Duffield et al. 2025 (arXiv
        2406.00104), section 4, for what the noise adds.
    """
    options = {"temperature": 0.0, "init_strategy": init_to_sample, **options}
    run = VectorizedMCMC(
        kernel.from_sgd(model, lr=lr, momentum=momentum, num_data=num_data, **options),
        num_samples=1,
        warmup_steps=0,
        num_chains=num_members,
        thinning=num_steps,
        initial_params=initial_params,
        initial_values=initial_values,
        disable_progbar=True,
    )
    run.run(*args, **(model_kwargs or {}))
    return run
