"""The rights of a Hub as manifests, and as docs/kubernetes.md tells them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fgpuspawner.engines.kubernetes.dialects import DIALECTS
from fgpuspawner.engines.kubernetes.rights import REACHES, RIGHTS, manifests, rights_of

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "kubernetes.md").read_text()


def test_cluster_role_only_reads() -> None:
    role, binding, whole, whole_binding = manifests(rights_of("lease"), namespace="jhub", account="hub")
    assert [m["kind"] for m in (role, binding, whole, whole_binding)] == [
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
    ]
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "jhub"
    assert "jhub" in whole["metadata"]["name"], "each Hub of a cluster has its own"
    assert {verb for rule in whole["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    for bound in (binding, whole_binding):
        assert bound["subjects"] == [{"kind": "ServiceAccount", "name": "hub", "namespace": "jhub"}]


def test_a_smaller_reach_leaves_out_rights_in_the_cluster() -> None:
    def everywhere(reach: str) -> list[str]:
        made = manifests(rights_of("lease", reach), namespace="jhub", account="hub")
        assert made[0]["rules"] == manifests(rights_of("lease"), namespace="jhub", account="hub")[0]["rules"]
        return [rule["resources"][0] for one in made if one["kind"] == "ClusterRole" for rule in one["rules"]]

    assert [everywhere(reach) for reach in REACHES] == [[], ["nodes"], ["nodes", "pods"]]
    assert all(bool(right.else_) is right.everywhere for right in RIGHTS)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda kind: kind.name)
def test_only_dra_touches_claims_and_slices(dialect: type) -> None:
    own = {right.resource for right in rights_of(dialect.name)}  # type: ignore[attr-defined]
    assert ({"resourceclaims", "resourceslices"} <= own) is (dialect.name == "dra")  # type: ignore[attr-defined]


def test_no_right_has_a_wildcard_or_changes_rights() -> None:
    for right in RIGHTS:
        assert "*" not in {right.resource, right.group, *right.verbs}
        assert {"update", "patch", "deletecollection", "impersonate", "escalate", "bind"}.isdisjoint(
            right.verbs
        )


def test_the_page_has_a_row_for_each_right() -> None:
    section = PAGE.split("## What the Hub may do in your cluster\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z/]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", section, re.M)
    assert [(name, tuple(verbs.split(", ")), where == "the cluster") for name, verbs, where, _ in rows] == [
        (right.resource, right.verbs, right.everywhere) for right in RIGHTS
    ]
    for right, (*_, what_for) in zip(RIGHTS, rows, strict=True):
        assert right.what_for in what_for
        assert ("dra" in what_for) is (right.dialect == "dra")
