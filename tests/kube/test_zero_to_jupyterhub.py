"""A Hub that is set up as Zero to JupyterHub sets one up, with our values over it."""

from __future__ import annotations

from pathlib import Path

from hubs import NAMESPACE, SMALL, Cluster, on

THEIRS = """
# As the chart's own configuration: everything here is set before ours is called.
c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
c.JupyterHub.cleanup_servers = False
c.JupyterHub.last_activity_interval = 60
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 0}}
c.JupyterHub.concurrent_spawn_limit = 64
c.JupyterHub.allow_named_servers = True
c.JupyterHub.hub_bind_url = f"http://:{{c.JupyterHub.hub_port}}"
c.JupyterHub.hub_connect_url = f"http://{address}:{{c.JupyterHub.hub_port}}"
c.KubeSpawner.common_labels = {{"app": "jupyterhub", "heritage": "jupyterhub", "release": "lab"}}
c.KubeSpawner.namespace = {namespace!r}
c.Spawner.consecutive_failure_limit = 0
c.KubeSpawner.pod_name_template = "jupyter-{{user_server}}"
c.KubeSpawner.start_timeout = 300
c.KubeSpawner.image_pull_policy = "IfNotPresent"
c.KubeSpawner.events_enabled = True
c.KubeSpawner.extra_labels = {{"hub.jupyter.org/network-access-hub": "true"}}
c.KubeSpawner.uid = 1000
c.KubeSpawner.fs_gid = 100
c.KubeSpawner.mem_guarantee = "1G"
c.KubeSpawner.image = "quay.io/jupyterhub/k8s-singleuser-sample:4.3.0"
c.KubeSpawner.allow_privilege_escalation = False
c.KubeSpawner.profile_list = []
c.KubeSpawner.lifecycle_hooks = {{}}
c.KubeSpawner.init_containers = []
c.KubeSpawner.node_affinity_preferred.append(
    {{
        "weight": 100,
        "preference": {{
            "matchExpressions": [
                {{"key": "hub.jupyter.org/node-purpose", "operator": "In", "values": ["user"]}}
            ]
        }},
    }}
)
c.KubeSpawner.tolerations = [
    {{"key": "hub.jupyter.org/dedicated", "operator": "Equal", "value": "user", "effect": "NoSchedule"}}
]
c.KubeSpawner.volumes = []
c.KubeSpawner.volume_mounts = []
{more}
"""


def theirs(cluster: Cluster, *, more: str = "", namespace: str = NAMESPACE) -> str:
    """Return the settings of the chart's configuration, with our values."""
    return THEIRS.format(address=cluster.address, more=more, namespace=namespace)


def test_session_on_a_charts_hub_has_the_charts_pod_settings(cluster: Cluster, tmp_path: Path) -> None:
    with on(cluster, tmp_path, before=theirs(cluster)) as hub:
        hub.add_user("ann")
        assert hub.spawn("ann", options={"fgpu": "1", **SMALL}).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING"})
        (pod,) = cluster.pods(hub).values()
        assert pod["metadata"]["labels"]["hub.jupyter.org/network-access-hub"] == "true"
        assert pod["metadata"]["labels"]["release"] == "lab"
        assert pod["spec"]["securityContext"]["fsGroup"] == 100
        assert pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == "128Mi"
        assert "hub.jupyter.org/dedicated" in [t["key"] for t in pod["spec"]["tolerations"]]
        preferred = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [p["weight"] for p in preferred] == [100]
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({})
