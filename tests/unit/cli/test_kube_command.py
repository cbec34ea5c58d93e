"""``fgpu kube``: the Hub's rights as manifests, and which Hubs are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from commandline import Fgpu, write_config


def test_the_manifests_are_what_kubectl_takes(fgpu: Fgpu) -> None:
    status, out, err = fgpu("kube", "manifests", "--namespace", "jhub", "--account", "mine")
    assert (status, err) == (0, "")
    kinds = [document["kind"] for document in yaml.safe_load_all(out)]
    assert kinds == ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"]
    assert "claims" not in out.replace("persistentvolumeclaims", "")
    assert "# Another one for --dialect dra." in out
    assert "resourceclaims" in fgpu("kube", "manifests", "--namespace", "jhub", "--dialect", "dra")[1]


@pytest.mark.parametrize("wrong", ["Jhub", "a/b", "-x", "a\nb", ""])
def test_a_namespace_that_no_cluster_has_is_refused(fgpu: Fgpu, wrong: str) -> None:
    status, said = fgpu.failure("kube", "manifests", f"--namespace={wrong}")
    assert status == 2
    assert said.endswith("use small letters, digits and dashes")


def test_a_cluster_is_checked_for_sessions_as_pods_alone(fgpu: Fgpu, tmp_path: Path) -> None:
    status, said = fgpu.failure("kube", "check", "--config", write_config(tmp_path))
    assert status == 2
    assert 'its sessions are no pods; call configure(c, runtime="kubernetes") in it' in said
