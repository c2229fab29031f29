"""The machinery of the benchmarks; what they measure is in ``benchmarks/results``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks._runner import NAMES, RESULTS, ROOT, Ratio, figure, markdown, missed, ratios, text


def slow(target: float) -> Ratio:
    return Ratio("a step", ours=2e-3, peer=1e-3, ratio=2.0, spread=0.1, wall=2.1, target=target)


def test_rows_above_their_targets_are_named() -> None:
    assert missed(ratios([slow(target=1.5)])) == ["a step"]
    assert missed(ratios([slow(target=2.5)])) == []
    assert missed({"": [figure("size", 3.0, "GB", 2.0), figure("files", 7, "")]}) == ["size"]
    assert missed({"": [{"case": "one", "outcome": "MISS"}, {"case": "other", "outcome": "within"}]}) == [
        "one"
    ]


def test_tables_say_which_peers_are_left_out() -> None:
    (caption,) = ratios([slow(target=1.0)], left_out=["blackjax"])
    assert "blackjax is not installed and left out" in caption


def test_markdown_is_made_of_the_json_alone(tmp_path: Path) -> None:
    kept = {
        "title": "A title",
        "about": "What was done.",
        "tables": ratios([slow(target=1.5)]),
        "date": "2026-01-01",
        "commit": "abc",
        "python": "3.11",
        "machine": "x86_64",
        "packages": {"torch": "2.13"},
    }
    path = tmp_path / "one.json"
    path.write_text(json.dumps(kept))
    shown = markdown(path)
    assert shown.startswith("## A title\n\n```{eval-rst}\nWhat was done.\n```\n")
    assert "| a step | 2 | 1 | 2 | 0.1 | 2.1 | 1.5 |" in shown
    assert "commit abc" in shown and "torch 2.13" in shown
    assert "a step" in text(kept["tables"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_benchmark(name: str) -> None:
    assert (ROOT / "benchmarks" / f"{name}.py").exists()


def test_results_that_are_kept_can_be_shown() -> None:
    for name in NAMES:
        path = RESULTS / f"{name}.json"
        if path.exists():
            assert markdown(path)
