"""Tests that share what there is one of, such as a machine outside, run one after the other."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("itself")
def test_the_scheduler_of_the_tests_knows_their_groups(request: pytest.FixtureRequest) -> None:
    """It goes by the ends of their names, and silently spreads them over the workers where it finds none."""
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        pytest.skip("one worker")
    assert request.node.nodeid.endswith("@itself")
