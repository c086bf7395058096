# pyright: basic
from pathlib import Path

import pytest

from etude.telemetry.metrics import METRICS, combine, find, markdown


def test_the_page_of_metrics_is_the_list():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "run: python -m etude.telemetry.metrics > docs/metrics.md"


def test_a_name_means_one_thing():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert find(metric.name.replace("<pool>", "half-8.x").replace("<edge>", "rewrite")) == metric
    assert find("mismatch/k3/pool one") is None
    assert find("no/such_thing") is None


def test_parts_combine_each_by_its_reduction():
    parts = [
        {"tokens/trained": 10.0, "reward/mean": 0.5, "staleness/max_versions": 2.0, "trainer/lr": 0.1},
        {"tokens/trained": 20.0, "reward/mean": 1.0, "staleness/max_versions": 1.0, "trainer/lr": 0.2},
    ]
    assert combine(parts) == {
        "tokens/trained": 30.0,
        "reward/mean": 0.75,
        "staleness/max_versions": 2.0,
        "trainer/lr": 0.2,
    }
    with pytest.raises(ValueError, match="no/such_thing"):
        combine([{"no/such_thing": 1.0}])
