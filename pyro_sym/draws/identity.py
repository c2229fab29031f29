"""Whether a run is the one that a store holds: what it was started with, compared place by place."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyro
import torch

from pyro_sym.draws.fingerprint import CODE, COLLAPSED, fingerprint
from pyro_sym.sgmcmc.chains import Chains

__all__ = ["Identity", "start_identified"]

# How many differences an error lists.
MAX_LISTED = 5


@dataclass(frozen=True)
class Identity:
    """What a run was started with.

    Attributes:
        words: what is at each place that its model, data and kernel reach.
        changing: places whose contents changed while the chains were started. They are not compared.
        noted: those of them that the model itself changes, and not one of Pyro's effect handlers.
        doubts: places that can't be read.
        versions: of Python, torch and Pyro.
    """

    words: Mapping[str, str]
    changing: tuple[str, ...]
    noted: tuple[str, ...]
    doubts: tuple[str, ...]
    versions: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """As plain containers."""
        return asdict(self)

    def differences(self, record: Mapping[str, Any]) -> list[str]:
        """Say where this run differs from a recorded one; nothing if it is the same."""
        then, now = record["words"], self.words
        ignored = (*record["changing"], *self.changing)
        other_python = record["versions"]["python"] != self.versions["python"]
        places = [
            place
            for place in {**then, **now}
            if then.get(place) != now.get(place)
            and not any(_is_within(place, other) for other in ignored)
            and not (other_python and (place.endswith(CODE) or COLLAPSED in then.get(place, COLLAPSED)))
        ]
        places = [place for place in places if place in then and place in now] or places
        listed = [_difference(place, then.get(place), now.get(place)) for place in places[:MAX_LISTED]]
        more = len(places) - len(listed)
        return [*listed, f"and {more} more"] if more else listed

    def warn_of_versions(self, record: Mapping[str, Any], path: object) -> None:
        """Warn if the recorded run was begun with other versions."""
        for name, now in self.versions.items():
            if (then := record["versions"][name]) != now:
                unread = "; whether the code has changed can't be told, as byte code differs between them"
                warnings.warn(
                    f"the run in {path} was begun with {name} {then} and goes on with {now}, which may round "
                    f"otherwise{unread if name == 'python' else ''}",
                    stacklevel=2,
                )

    def warn(self, path: object) -> None:
        """Warn of what can't be compared when the run is resumed."""
        if self.doubts:
            warnings.warn(
                f"the run in {path} reaches what can't be read: {'; '.join(_some(self.doubts))}. When it is "
                "resumed, nothing tells whether that has changed",
                stacklevel=2,
            )
        if self.noted:
            warnings.warn(
                f"the model of the run in {path} changes {', '.join(_some(self.noted))} as it runs. The "
                "store doesn't keep that: a resumed run draws what the run would have drawn only if the log "
                "density doesn't depend on it",
                stacklevel=2,
            )


def start_identified(
    start: Callable[[], Chains], roots: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Chains, Identity]:
    """Start chains, and say what they were started with.

    Args:
        start: starts the chains, which runs the model some times.
        roots: the model, its arguments and the options of the kernel, by name.
        settings: numbers and names, which are compared by their ``repr``.

    Returns:
        The chains and their identity.
    """
    before = fingerprint(roots)
    chains = start()
    program = chains.potential.program
    after = fingerprint(roots, before)
    words, words_after = before.words(program.latents), after.words(program.latents)
    changed = [place for place in {**words, **words_after} if words.get(place) != words_after.get(place)]
    changed = [place for place in changed if not any(_is_within(place, other, True) for other in changed)]
    shapes = {name: (site.value.dtype, tuple(site.value.shape)) for name, site in program.latents.items()}
    params = {f"pyro.param({name!r})": pyro.get_param_store()[name] for name in program.params}
    sites = [f"{n} {dtype} {shape} {program.latents[n].support}" for n, (dtype, shape) in shapes.items()]
    words |= fingerprint(params).words()
    words |= {"its sites": ", ".join(sites), **{name: repr(value) for name, value in settings.items()}}
    versions = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "pyro": str(pyro.__version__),
    }
    noted = [place for place in changed if not any(_is_within(place, one) for one in before.handlers)]
    return chains, Identity(words, tuple(changed), tuple(noted), tuple(before.doubts), versions)


def _is_within(place: str, other: str, strictly: bool = False) -> bool:
    """Whether a place is at or below another one."""
    rest = place[len(other) :]
    return place.startswith(other) and (rest[:1] in (".", "[", ":") or (not rest and not strictly))


def _difference(place: str, then: str | None, now: str | None) -> str:
    if then is None:
        return f"{place} was not there when it was started and is {now} now"
    if now is None:
        return f"{place} was {then} when it was started and is not there now"
    return f"{place} was {then} when it was started and is {now} now"


def _some(places: tuple[str, ...]) -> list[str]:
    more = len(places) - MAX_LISTED
    return [*places[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
