"""Our manifests' YAML means to a YAML reader what was written."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from photinus.launcher.schedulers.yaml_text import yaml_text

yaml = pytest.importorskip("yaml")

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=12)
ODD = st.sampled_from(
    ["yes", "No", "null", "1e3", "0x10", "12:30", "a: b", "- x", "#x", "*a", "~", "", " ", "=", "<<", "a #b"]
)
VALUES = st.recursive(
    SCALARS | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | ODD, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(VALUES, min_size=1, max_size=3))
@pytest.mark.seconds
def test_any_plain_data_is_read_back_as_it_was(documents):
    assert list(yaml.safe_load_all(yaml_text(documents))) == documents


def test_it_is_written_as_a_person_would():
    data = {"kind": "Job", "spec": {"args": ["--nnodes", "2"], "env": [{"name": "A", "value": "b c"}], "none": {}}}
    assert yaml_text([data]) == (
        'kind: Job\nspec:\n  args: [--nnodes, "2"]\n  env:\n  - name: A\n    value: "b c"\n  none: {}\n'
    )
