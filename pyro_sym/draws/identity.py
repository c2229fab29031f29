"""What a run was started with, to tell whether a store holds the same run."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyro
import torch

from pyro_sym.draws.fingerprint import COLLAPSED, Fingerprint, fingerprint
from pyro_sym.draws.value_reader import CODE
from pyro_sym.model.program import Program

__all__ = ["Identity", "identify"]

# How many places an error or a warning lists.
MAX_LISTED = 5


@dataclass(frozen=True)
class Identity:
    """What a run was started with: words by place that its model, data and kernel reach, and versions.

    Places in ``changing`` changed while the chains were started and are not compared; those in ``noted`` were
    changed by the model itself, not by one of Pyro's effect handlers. ``doubts`` are places that can't be
    read.
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
        """Where this run differs from a recorded one, in words; empty if it is the same."""
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
        return _some([_difference(place, then.get(place), now.get(place)) for place in places])

    def warn_of_versions(self, record: Mapping[str, Any], path: object) -> None:
        """Warn if the recorded run was begun with other versions."""
        for name, now in self.versions.items():
            if (then := record["versions"][name]) != now:
                code = "; byte code differs between them, so whether the code has changed can't be checked"
                warnings.warn(
                    f"the run in {path} was begun with {name} {then} and is resumed with {now}, which may "
                    f"round differently{code if name == 'python' else ''}",
                    stacklevel=2,
                )

    def warn(self, path: object) -> None:
        """Warn about what can't be compared when the run is resumed."""
        if self.doubts:
            warnings.warn(
                f"the run in {path} depends on objects that can't be read: {'; '.join(_some(self.doubts))}. "
                "When it is resumed, changes in them go unnoticed",
                stacklevel=2,
            )
        if self.noted:
            warnings.warn(
                f"the model of the run in {path} changes {', '.join(_some(self.noted))} when it runs, which "
                "the store doesn't keep: if the log density depends on it, a resumed run differs",
                stacklevel=2,
            )


def identify(
    roots: Mapping[str, Any], before: Fingerprint, program: Program, settings: Mapping[str, Any]
) -> Identity:
    """Describe a run by its ``roots`` (model, arguments and options of the kernel) and ``settings``.

    ``before`` is a fingerprint of the roots from before the chains were started, which runs the model;
    ``program`` is the model as the chains run it.
    """
    after = fingerprint(roots, before)
    words, words_after = before.words(program.latents), after.words(program.latents)
    changed = [place for place in {**words, **words_after} if words.get(place) != words_after.get(place)]
    changed = [place for place in changed if not any(_is_within(place, other, True) for other in changed)]
    noted = [place for place in changed if not any(_is_within(place, one) for one in before.handlers)]
    sites = [
        f"{name} {site.value.dtype} {tuple(site.value.shape)} {site.support}"
        for name, site in program.latents.items()
    ]
    params = {f"pyro.param({name!r})": pyro.get_param_store()[name] for name in program.params}
    words |= fingerprint(params).words()
    words |= {"its sites": ", ".join(sites), **{name: repr(value) for name, value in settings.items()}}
    versions = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "pyro": str(pyro.__version__),
    }
    return Identity(words, tuple(changed), tuple(noted), tuple(before.doubts), versions)


def _is_within(place: str, other: str, strictly: bool = False) -> bool:
    """Whether a place is at or below another one."""
    rest = place[len(other) :]
    return place.startswith(other) and (rest[:1] in (".", "[", ":") or (not rest and not strictly))


def _difference(place: str, then: str | None, now: str | None) -> str:
    was, is_ = ("not there" if word is None else word for word in (then, now))
    return f"{place} was {was} when it was started and is {is_} now"


def _some(places: Sequence[str]) -> list[str]:
    more = len(places) - MAX_LISTED
    return [*places[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
