"""A session's pod: its token stays secret, its limits are the request's, and our mounts stay in place."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import LaunchSpec
from fgpuspawner.engines.kubernetes.dialects.base import with_owner
from fgpuspawner.engines.kubernetes.files import MOST_BYTES, READ, WRITTEN, PodFiles, pod_files
from fgpuspawner.engines.kubernetes.pods import PodOptions, SessionObjects, session_objects
from fgpuspawner.images.model import Image
from fgpuspawner.isolation import native
from fgpuspawner.isolation.base import IN_CONTAINER, Mount, Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.settings.folders import SharedFolder

SHARE = Share("GPU-1", 500, 2048, 25)
ASKED = Request("Ärlice@lab", "", "python", "default", 500, 1500, 3000)
SESSION = Session(
    7, ASKED, SessionState.PREPARING, 0, attempt=2, placement=Placement("gpu1.lab.example", (SHARE,))
)
IMAGE = Image("python", "Python", "python", "3", "3", "registry.lab/python:3", enabled=True)
OPTIONS = PodOptions(stop_timeout_s=7)
RUN = {"name": READ, "mountPath": IN_CONTAINER, "subPath": "run", "readOnly": True}
PRELOAD = {
    "name": READ,
    "mountPath": "/etc/ld.so.preload",
    "subPath": "outside/etc/ld.so.preload",
    "readOnly": True,
}
CARRIED = PodFiles({"fgpu.file-0": "text"}, (), ({"name": READ, "projected": {}},), (RUN, PRELOAD))


def spec(**changes: Any) -> LaunchSpec:
    return replace(
        LaunchSpec(
            SESSION,
            IMAGE,
            command=(),
            arguments=("--port=8888",),
            environment={"JUPYTERHUB_API_TOKEN": "s3cret", "HOME": "/home/jovyan", "LD_PRELOAD": "/evil.so"},
            slice_environment={
                "FGPU_SESSION_ID": "7",
                "NVIDIA_VISIBLE_DEVICES": "GPU-1",
                "CUDA_VISIBLE_DEVICES": "GPU-1",
            },
            prepared=Prepared("interposer", Limits(7, "charge", ())),
            devices=(),
            folder=Path("/nowhere"),
            port=8888,
        ),
        **changes,
    )


def pod_of(changed: LaunchSpec | None = None, **options: Any) -> SessionObjects:
    return session_objects(
        changed or spec(), replace(OPTIONS, **options), CARRIED, installation="lab", node="gpu1.lab.example"
    )


def container_of(found: SessionObjects) -> dict[str, Any]:
    container: dict[str, Any] = found.pod["spec"]["containers"][0]
    return container


def environment_of(found: SessionObjects) -> dict[str, str]:
    return {entry["name"]: entry.get("value") for entry in container_of(found)["env"]}


def test_shared_folders_are_mounted_with_one_volume_for_each_claim() -> None:
    shared = (
        SharedFolder("sets", "data/sets", claim="sets"),
        SharedFolder("vision", "vision", claim="projects", subpath="teams/vision", read_only=False),
        SharedFolder("old", "old", claim="projects", subpath="old"),
        SharedFolder("common", "common", claim="homes", subpath="common"),
    )
    homes = {"name": "home", "persistentVolumeClaim": {"claimName": "homes"}}
    found = pod_of(spec(shared=shared), manifest={"spec": {"volumes": [homes]}})
    volumes = {
        v["name"]: v["persistentVolumeClaim"] for v in found.pod["spec"]["volumes"] if v["name"] != READ
    }
    assert volumes == {
        "home": {"claimName": "homes"},
        "fgpu-folder-2": {"claimName": "sets", "readOnly": True},
        "fgpu-folder-3": {"claimName": "projects", "readOnly": False},
    }
    at = f"{IN_CONTAINER}/folders"
    assert [m for m in container_of(found)["volumeMounts"] if m not in CARRIED.mounts] == [
        {"name": "fgpu-folder-2", "mountPath": f"{at}/sets", "readOnly": True},
        {"name": "fgpu-folder-3", "mountPath": f"{at}/vision", "readOnly": False, "subPath": "teams/vision"},
        {"name": "fgpu-folder-3", "mountPath": f"{at}/old", "readOnly": True, "subPath": "old"},
        {"name": "home", "mountPath": f"{at}/common", "readOnly": True, "subPath": "common"},
    ]
    # A session only reads its files: the places of the mounts are there before.
    (texts,) = pod_files(spec().prepared, shared[:2]).volumes[0]["projected"]["sources"]
    places = [item["path"] for item in texts["downwardAPI"]["items"]]
    assert places == ["run/folders/sets/.folder", "run/folders/vision/.folder"]


def test_token_is_in_the_secret_and_not_in_the_pod() -> None:
    found = pod_of()
    assert "s3cret" not in json.dumps(found.pod)
    assert found.secret["stringData"] == {"JUPYTERHUB_API_TOKEN": "s3cret"}
    assert container_of(found)["envFrom"] == [{"secretRef": {"name": "fgpu-lab-7-2"}}]
    assert "s3cret" not in repr(found)


def test_shared_memory_is_mounted_unless_a_volume_is_there() -> None:
    found = pod_of(spec(shared_memory_mib=1500))
    mount = {"name": "fgpu-shm", "mountPath": "/dev/shm"}
    volume = {"name": "fgpu-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1500Mi"}}
    assert mount in container_of(found)["volumeMounts"]
    assert volume in found.pod["spec"]["volumes"]
    own = {"containers": [{"volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}]}]}
    for other in (pod_of(spec(shared_memory_mib=1500), manifest={"spec": own}), pod_of()):
        assert mount not in container_of(other)["volumeMounts"]
        assert volume not in other.pod["spec"]["volumes"]


def test_secret_is_owned_by_its_pod() -> None:
    found = pod_of()
    (owner,) = with_owner(found.secret, {"metadata": {"name": "fgpu-lab-7-2", "uid": "u-1"}})["metadata"][
        "ownerReferences"
    ]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Pod", "fgpu-lab-7-2", "u-1")


def test_variables_that_disable_isolation_are_emptied() -> None:
    found = environment_of(pod_of())
    assert found["LD_PRELOAD"] == ""
    assert found["CUDA_DISABLE_CONTROL"] == ""
    assert found["NVIDIA_VISIBLE_DEVICES"] == "GPU-1"
    assert found["FGPU_SESSION_ID"] == "7"
    assert found["HOME"] == "/home/jovyan"


def test_session_without_gpu_sees_none() -> None:
    assert environment_of(pod_of(spec(slice_environment={})))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_values_of_variables_are_not_expanded() -> None:
    found = pod_of(spec(slice_environment={"FGPU_AMOUNT": "$(HOME) of $$"}))
    assert environment_of(found)["FGPU_AMOUNT"] == "$$(HOME) of $$"


def test_references_to_secrets_stay_except_for_our_variables() -> None:
    reference = {"valueFrom": {"secretKeyRef": {"name": "lab", "key": "key"}}}
    environment: dict[str, Any] = {"LICENCE": reference, "LD_PRELOAD": reference}
    found = container_of(pod_of(spec(environment=environment)))["env"]
    assert {"name": "LICENCE", **reference} in found
    assert [e for e in found if e["name"] == "LD_PRELOAD"] == [{"name": "LD_PRELOAD", "value": ""}]


def test_cpu_and_memory_limits_equal_the_request() -> None:
    given = {
        "spec": {"containers": [{"name": "notebook", "resources": {"limits": {"cpu": "64", "x/y": "1"}}}]}
    }
    assert container_of(pod_of(manifest=given))["resources"] == {
        "limits": {"cpu": "1500m", "memory": "3000Mi", "x/y": "1"},
        "requests": {"cpu": "1500m", "memory": "3000Mi"},
    }


def test_pod_is_restricted_to_its_node() -> None:
    own = {"key": "metadata.name", "operator": "In", "values": ["gpu1.lab.example"]}
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    given = {
        "spec": {
            "affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": [term]}}, "podAffinity": {}},
            "tolerations": [{"key": "gpu"}],
        }
    }
    plain = pod_of().pod["spec"]["affinity"]["nodeAffinity"][required]
    assert plain == {"nodeSelectorTerms": [{"matchFields": [own]}]}
    found = pod_of(manifest=given).pod["spec"]
    assert found["affinity"]["nodeAffinity"][required] == {
        "nodeSelectorTerms": [{**term, "matchFields": [own]}]
    }
    assert found["affinity"]["podAffinity"] == {}
    assert {"key": "gpu"} in found["tolerations"]
    assert "nodeName" not in found


def test_pod_meets_pod_security_restricted() -> None:
    found = pod_of().pod["spec"]
    assert found["restartPolicy"] == "Never"
    assert found["automountServiceAccountToken"] is False
    assert found["enableServiceLinks"] is False
    assert found["terminationGracePeriodSeconds"] == 7
    (container,) = found["containers"]
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}


def test_sudo_gets_only_its_capabilities() -> None:
    security = container_of(pod_of(spec(sudo=True)))["securityContext"]
    assert security["allowPrivilegeEscalation"] is True
    assert security["capabilities"]["drop"] == ["ALL"]
    assert "SYS_ADMIN" not in security["capabilities"]["add"]


@pytest.mark.parametrize(
    "path", ["/run/fgpu/limits", "/run/fgpu", "/run//fgpu/", "/run/x/../fgpu/a", "/etc/ld.so.preload"]
)
def test_administrators_mounts_do_not_cover_ours(path: str) -> None:
    home = {"name": "home", "mountPath": "/home/jovyan"}
    given = {
        "spec": {
            "volumes": [{"name": "home"}, {"name": READ, "hostPath": {}}, {"name": WRITTEN, "hostPath": {}}],
            "containers": [{"volumeMounts": [home, {"name": "home", "mountPath": path}]}],
        }
    }
    found = pod_of(manifest=given)
    assert container_of(found)["volumeMounts"] == [home, *CARRIED.mounts]
    assert not any("hostPath" in volume for volume in found.pod["spec"]["volumes"])


def test_user_names_are_not_labels() -> None:
    found = pod_of().pod["metadata"]
    assert found["labels"] == {"fgpu.installation": "lab", "fgpu.session": "7", "fgpu.attempt": "2"}
    assert found["annotations"]["fgpu.user"] == "Ärlice@lab"
    assert found["annotations"]["fgpu.file-0"] == "text"
    assert found["name"] == "fgpu-lab-7-2"


def test_small_files_are_texts_of_the_pod_and_large_ones_are_shared(tmp_path: Path) -> None:
    small, large, tool, ledger = (tmp_path / name for name in ("limits", "libfgpu.so", "tool", "ledger"))
    small.write_text("fgpu-limits 1\n")
    large.write_bytes(b"x" * 5000)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    ledger.touch()
    prepared = Prepared(
        "interposer",
        Limits(7, "charge", ()),
        mounts=(
            Mount(tmp_path, IN_CONTAINER),
            Mount(small, f"{IN_CONTAINER}/limits"),
            Mount(large, f"{IN_CONTAINER}/libfgpu.so"),
            Mount(tool, "/usr/local/bin/tool"),
            Mount(ledger, f"{IN_CONTAINER}/simulated/ledger", read_only=False),
        ),
        in_memory={f"{IN_CONTAINER}/written": "rw"},
    )
    found = pod_files(prepared)
    (config_map,) = found.config_maps
    assert config_map["immutable"] is True
    assert [base64.b64decode(one) for one in config_map["binaryData"].values()] == [b"x" * 5000]
    (of_map, of_pod) = found.volumes[0]["projected"]["sources"]
    (library,) = of_map["configMap"]["items"]
    assert (of_map["configMap"]["name"], library["path"], library["mode"]) == (
        config_map["metadata"]["name"],
        "run/libfgpu.so",
        0o444,
    )
    assert found.annotations == {"fgpu.file-0": "fgpu-limits 1\n", "fgpu.file-1": "#!/bin/sh\n"}
    texts = {
        item["path"]: (item.get("mode"), item["fieldRef"]["fieldPath"])
        for item in of_pod["downwardAPI"]["items"]
    }
    assert texts["run/limits"] == (0o444, "metadata.annotations['fgpu.file-0']")
    assert texts["outside/usr/local/bin/tool"] == (0o555, "metadata.annotations['fgpu.file-1']")
    assert {"run/written/.folder", "run/simulated/.folder"} <= texts.keys(), "places to mount folders on"
    mounts = {mount["mountPath"]: mount for mount in found.mounts}
    assert mounts[IN_CONTAINER] == RUN
    assert mounts["/usr/local/bin/tool"]["readOnly"] is True
    for folder in ("simulated", "written"):
        assert mounts[f"{IN_CONTAINER}/{folder}"]["name"] == WRITTEN
        assert mounts[f"{IN_CONTAINER}/{folder}"]["readOnly"] is False
    for name in ("limits", "libfgpu.so"):
        assert mounts[f"{IN_CONTAINER}/{name}"]["readOnly"] is True, "fgpu-verify wants each to be a mount"


def test_large_files_fit_config_maps_whose_names_tell_their_content(tmp_path: Path) -> None:
    def maps_of(*contents: bytes) -> dict[str, int]:
        """Return the size of each ConfigMap's content, by name."""
        mounts = []
        for number, content in enumerate(contents):
            source = tmp_path / str(number)
            source.write_bytes(content)
            mounts.append(Mount(source, f"{IN_CONTAINER}/{number}"))
        made = pod_files(Prepared("interposer", Limits(7, "charge", ()), mounts=tuple(mounts))).config_maps
        sizes = {
            one["metadata"]["name"]: sum(len(base64.b64decode(v)) for v in one["binaryData"].values())
            for one in made
        }
        assert len(sizes) == len(made)
        return sizes

    large = [bytes([n]) * 400_000 for n in range(6)]
    sizes = maps_of(*large)
    assert (len(sizes), sum(sizes.values()), max(sizes.values())) == (3, 2_400_000, 800_000)
    assert maps_of(*reversed(large)) == sizes, "sessions share them"
    assert maps_of(large[0]).keys().isdisjoint(maps_of(large[1]))


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
def test_session_objects_are_valid_in_kubernetes(version: str, tmp_path: Path) -> None:
    mounts = []
    for name, content in (("limits", b"fgpu-limits 1"), ("libfgpu.so", b"x" * 5000)):
        (tmp_path / name).write_bytes(content)
        mounts.append(Mount(tmp_path / name, f"{IN_CONTAINER}/{name}"))
    prepared = Prepared(
        "interposer", Limits(7, "charge", ()), mounts=tuple(mounts), in_memory={"/run/x": "rw"}
    )
    files = pod_files(prepared)
    found = session_objects(spec(), OPTIONS, files, installation="lab", node="gpu1")
    for manifest in (found.pod, found.secret, *files.config_maps):
        assert kubernetes_validate.validate(dict(manifest), version, strict=True) == version


@pytest.mark.skipif(native.find() is None, reason=native.NOT_BUILT)
def test_each_part_of_libfgpu_fits_a_config_map() -> None:
    parts = native.find()
    assert parts is not None
    assert max(part.stat().st_size for part in parts.parts) <= MOST_BYTES


def test_pod_tolerates_gpu_nodes_and_nodes_that_are_away() -> None:
    away = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    manifest = {"spec": {"tolerations": [{"key": "team"}, {**away, "tolerationSeconds": 300}]}}
    assert pod_of(manifest=manifest).pod["spec"]["tolerations"] == [
        {"key": "team"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/not-ready", "operator": "Exists"},
        {"key": "node.kubernetes.io/unreachable", "operator": "Exists"},
    ]
