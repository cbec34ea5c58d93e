"""``fgpu kube``: the files image and the Hub's rights, each as a file for its command."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import yaml

from commandline import failure, fgpu, write_config
from fgpuspawner import __version__
from fgpuspawner.isolation import native

pytestmark = pytest.mark.skipif(native.find() is None, reason=native.NOT_BUILT)


def tags(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        (member,) = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
    return list(member["RepoTags"])


def test_the_image_is_written_with_its_name_and_the_ways_to_push_it_are_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, name = tmp_path / "my files.tar", "registry.example.org:5000/lab/files:1.2"
    status, out, err = fgpu(capsys, "kube", "image", str(path), "--reference", name)
    assert (status, err, tags(path)) == (0, "", [name])
    assert out.splitlines()[0] == f"wrote {path}: the image {name}"
    assert f"  docker load -i '{path}' && docker push {name}\n" in out
    assert f"  skopeo copy docker-archive:'{path}' docker://{name}\n" in out
    assert f"  ctr -n k8s.io images import '{path}'\n" in out


def test_without_a_name_the_image_is_named_after_the_version(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fgpu(capsys, "kube", "image", str(tmp_path / "files.tar"))[0] == 0
    assert tags(tmp_path / "files.tar") == [f"fgpuspawner/files:{__version__}"]


@pytest.mark.parametrize(
    "name", ["files", "Files:1", "files:", "files:1 x", "host:5000/files", "--privileged:1"]
)
def test_a_name_without_a_tag_or_that_no_registry_takes_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / "files.tar"
    status, said = failure(capsys, "kube", "image", str(path), f"--reference={name}")
    assert status == 2
    assert said.startswith(f"--reference {name!r}: use a name with a tag, such as registry.example.org/")
    assert not path.exists()


def test_a_folder_that_is_not_there_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, said = failure(capsys, "kube", "image", str(tmp_path / "none" / "files.tar"))
    assert (status, "No such file or directory" in said) == (1, True)


def test_the_manifests_are_what_kubectl_takes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = fgpu(capsys, "kube", "manifests", "--namespace", "jhub", "--account", "mine")
    assert (status, err) == (0, "")
    kinds = [document["kind"] for document in yaml.safe_load_all(out)]
    assert kinds == ["Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"]
    assert "claims" not in out.replace("persistentvolumeclaims", "")
    assert "# Another one for --dialect dra." in out
    assert "resourceclaims" in fgpu(capsys, "kube", "manifests", "--namespace", "jhub", "--dialect", "dra")[1]


@pytest.mark.parametrize("wrong", ["Jhub", "a/b", "-x", "a\nb", ""])
def test_a_namespace_that_no_cluster_has_is_refused(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    status, said = failure(capsys, "kube", "manifests", f"--namespace={wrong}")
    assert status == 2
    assert said.endswith("use small letters, digits and dashes")


def test_a_cluster_is_checked_for_sessions_as_pods_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, said = failure(capsys, "kube", "check", "--config", write_config(tmp_path))
    assert status == 2
    assert 'its sessions are no pods; call configure(c, runtime="kubernetes") in it' in said
