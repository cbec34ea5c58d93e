"""Backend.AI's resource policies, projects and presets, as quotas and presets. Pure.

Its policy is a keypair's, ours a quota of a user; its slots are CPU, memory and accelerators together, and our quotas
are of fGPU and sessions. The form is that of its fixtures, one object with a list for each table; lists may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fgpuspawner.cli.csv_rows import BadFile
from fgpuspawner.cli.importing import Spec, Translated, entries, fgpu_words, number, size_mib

SHARES, DEVICES = "cuda.shares", "cuda.device"
POLICY_LEFT = {
    "max_containers_per_session": "a session is one container",
    "max_pending_session_resource_slots": "max_pending counts requests, whatever they ask for",
    "max_concurrent_sftp_sessions": "there are no such sessions",
    "max_session_count_per_model_session": "there are no such sessions",
    "max_network_count": "each user has a network",
    "max_customized_image_count": "c.FGPU.max_private_images is one number for everybody",
    "max_vfolder_count": "homes are what you mount (docs/administrator.md)",
    "max_vfolder_size": "homes are what you mount; c.FGPU.home_disk_mib limits them",
    "max_quota_scope_size": "homes are what you mount; c.FGPU.home_disk_mib limits them",
    "allowed_vfolder_hosts": "homes are what you mount (docs/administrator.md)",
}
TABLE_LEFT = {
    "scaling_groups": "write resource groups into c.FGPU.groups, and each node's into c.FGPU.nodes",
    "sgroups_for_domains": "write who may use a resource group into c.FGPU.groups",
    "sgroups_for_groups": "write who may use a resource group into c.FGPU.groups",
    "sgroups_for_keypairs": "write who may use a resource group into c.FGPU.groups",
    "agents": "add machines in c.FGPU.nodes (docs/machines.md)",
    "images": "fgpu images scan reads images' labels (docs/images.md)",
    "vfolders": "homes are what you mount (docs/administrator.md)",
    "association_scopes_entities": "members are taken from association_groups_users",
}
NAMES = ("name", "created_at", "id", "description")
USED_TABLES = {
    "keypair_resource_policies", "user_resource_policies", "project_resource_policies", "keypairs", "users", "groups",
    "domains", "resource_presets", "association_groups_users",
}  # fmt: skip


def translated(data: Any, per_gpu_milli: int, per_share_milli: int) -> Translated:
    """Return what a file means; an amount is what one GPU, and one of its shares, are worth in fGPU x 1000.

    Raises:
        BadFile: it has another form.
    """
    if not isinstance(data, Mapping):
        raise BadFile("it must be one object with lists such as keypair_resource_policies")
    found = Translated()
    worth = {SHARES: per_share_milli, DEVICES: per_gpu_milli}
    names = {str(u.get("email")): str(u.get("username") or u.get("email")) for u in entries(data, "users")}
    policies = {}
    for policy in entries(data, "keypair_resource_policies"):
        policies[str(policy.get("name"))] = _limits(policy, worth, found)
    _idle(entries(data, "keypair_resource_policies"), found)
    _assign(data, policies, names, found)
    for kind in ("groups", "domains"):
        for group in entries(data, kind):
            _group(kind, group, worth, found)
    for kind in ("user_resource_policies", "project_resource_policies"):
        for policy in entries(data, kind):
            for key, value in policy.items():
                if key not in NAMES:
                    _left(key, value, f"{kind}: {policy.get('name')}", found)
    _presets(data, worth, found)
    _members(data, names, found)
    for name, value in data.items():
        if name not in USED_TABLES:
            count = len(value) if isinstance(value, (list, dict)) else 1
            found.leave(f"{name}, {count} of them", TABLE_LEFT.get(name, "fgpuspawner has nothing like it"))
    return found


def _left(key: str, value: object, where: str, found: Translated) -> None:
    if value not in (None, {}, [], "", 0, -1, "0"):
        found.leave(key, POLICY_LEFT.get(key, "fgpuspawner has nothing like it"), where)


def _slots(policy: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    slots = policy.get(key) or {}
    if isinstance(slots, str):
        # So its API has them.
        try:
            slots = json.loads(slots)
        except ValueError:
            slots = None
    if not isinstance(slots, Mapping):
        raise BadFile(f'{key} of {str(policy.get("name"))!r} must be an object, such as {{"{SHARES}": "2"}}')
    return slots


def _fgpu(slots: Mapping[str, Any], worth: Mapping[str, int], where: str, found: Translated) -> str | None:
    """Return the fGPU that slots mean; None is no limit, or nothing of it."""
    amounts = {name: value for name in worth if (value := number(slots.get(name))) is not None}
    if len(amounts) == 2:
        found.leave(DEVICES, f"there is {SHARES}, too, which counts", where)
    for name in worth:
        if name in amounts:
            return fgpu_words(amounts[name], worth[name])
    return None


def _limits(policy: Mapping[str, Any], worth: Mapping[str, int], found: Translated) -> Spec:
    """Return what a keypair's policy limits, by the keys of a quota."""
    name = str(policy.get("name"))
    spec: Spec = {}
    slots = _slots(policy, "total_resource_slots")
    fgpu = _fgpu(slots, worth, name, found)
    limited = str(policy.get("default_for_unspecified", "UNLIMITED")).upper() in ("LIMITED", "0")
    if fgpu is None and limited and not any(slot in slots for slot in worth):
        fgpu = "0"
    if fgpu is not None:
        spec["max_fgpu"] = fgpu
    for slot, amount in slots.items():
        if slot not in worth and number(amount) is not None:
            why = "quotas limit fGPU and sessions; c.FGPU.max_cpu and max_memory_mib limit each session"
            found.leave(slot, why if slot in ("cpu", "mem") else "only NVIDIA's GPUs are shared", name)
    for key, ours, least in (
        ("max_concurrent_sessions", "max_sessions", 1),
        ("max_pending_session_count", "max_pending", 1),
        ("max_session_lifetime", "max_lifetime_s", 60),
    ):
        value = number(policy.get(key))
        if value is not None and value >= least:
            spec[ours] = int(value)
        elif value:
            found.leave(key, f"{ours} begins at {least}", name)
        elif value is not None and key != "max_session_lifetime":
            found.leave(f"{key} 0", f"write {ours} yourself if nothing is to be allowed", name)
    used = {"total_resource_slots", "default_for_unspecified", "idle_timeout", *NAMES}
    used |= {"max_concurrent_sessions", "max_pending_session_count", "max_session_lifetime"}
    for key, value in policy.items():
        if key not in used:
            _left(key, value, name, found)
    return spec


def _idle(policies: list[Mapping[str, Any]], found: Translated) -> None:
    times = {str(p.get("name")): int(number(p.get("idle_timeout")) or 0) for p in policies}
    if len(set(times.values())) == 1 and (only := next(iter(times.values()))) >= 10:
        found.reclaim = {"*": {"idle_after_s": only}}
        return
    for name, seconds in times.items():
        if seconds:
            why = "c.FGPU.reclaim is of a resource group, and the policies differ"
            found.leave(f"idle_timeout {seconds}", why, name)


def _assign(
    data: Mapping[str, Any], policies: Mapping[str, Spec], names: Mapping[str, str], found: Translated
) -> None:
    """Give each user what the policies of their keypairs say; of several the most of each limit."""
    own: dict[str, list[str]] = {}
    for keypair in entries(data, "keypairs"):
        user, policy = str(keypair.get("user_id")), str(keypair.get("resource_policy"))
        if not keypair.get("is_active", True):
            found.leave("a keypair that is not active", "it has no quota", user)
        elif policy not in policies:
            found.leave(f"resource_policy {policy!r}", "the policy is not in the file", user)
        else:
            own.setdefault(names.get(user, user), []).append(policy)
    if not entries(data, "keypairs"):
        # Nothing says whose they are: the one that new keypairs have is everybody's.
        for name, spec in policies.items():
            if name == "default" and spec:
                found.quotas.append({"user": "*", **spec})
            elif name != "default":
                found.leave(
                    f"policy {name!r} {spec}", "the file has no keypairs, so nobody is known to have it"
                )
        return
    default = policies.get("default")
    everybodys = default and all(_within(policies[p], default) for having in own.values() for p in having)
    if default and everybodys:
        found.quotas.append({"user": "*", **default})
    elif default:
        why = "others have more, and of several quotas the strictest counts: users to come get none"
        found.leave("policy 'default' for everybody", why)
    for user, having in sorted(own.items()):
        if len(set(having)) > 1:
            found.leave("several keypairs with different policies", "the most of each limit was taken", user)
        spec = _most([policies[name] for name in having])
        if spec and not (everybodys and spec == default):
            found.quotas.append({"user": user, **spec})


def _within(spec: Spec, limits: Spec) -> bool:
    return all(key in spec and float(spec[key]) <= float(limits[key]) for key in limits)


def _most(specs: list[Spec]) -> Spec:
    shared = [key for key in specs[0] if all(key in spec for spec in specs)]
    return {key: max((spec[key] for spec in specs), key=float) for key in shared}


def _group(kind: str, group: Mapping[str, Any], worth: Mapping[str, int], found: Translated) -> None:
    name = str(group.get("name"))
    if not group.get("is_active", True):
        found.leave(f"{kind} that are not active", "they have no quota", name)
        return
    slots = _slots(group, "total_resource_slots")
    fgpu = _fgpu(slots, worth, name, found)
    if fgpu is not None:
        found.quotas.append({"hub_group": name, "max_fgpu": fgpu})
    for slot, amount in slots.items():
        if slot not in worth and number(amount) is not None:
            found.leave(f"{slot} of {kind}", "quotas limit fGPU and sessions", name)
    used = {
        *NAMES,
        "total_resource_slots",
        "is_active",
        "domain_name",
        "resource_policy",
        "type",
        "created_at",
    }
    for key, value in group.items():
        if key not in used:
            _left(key, value, f"{kind}: {name}", found)


def _presets(data: Mapping[str, Any], worth: Mapping[str, int], found: Translated) -> None:
    for preset in entries(data, "resource_presets"):
        name = str(preset.get("name"))[:60]
        slots = _slots(preset, "resource_slots")
        spec: Spec = {"name": name}
        fgpu = _fgpu(slots, worth, name, found)
        if fgpu is not None and fgpu != "0":
            spec["fgpu"] = fgpu
        if (cpu := number(slots.get("cpu"))) is not None and cpu:
            spec["cpu"] = format(cpu.normalize(), "f")
        if (memory := size_mib(slots.get("mem", ""))) is not None:
            spec["memory_mib"] = memory
        if preset.get("scaling_group_name"):
            spec["group"] = str(preset["scaling_group_name"])
        for slot in slots:
            if slot not in ("cpu", "mem", *worth):
                found.leave(slot, "only NVIDIA's GPUs are shared", name)
        if preset.get("shared_memory"):
            found.leave("shared_memory", "it is a part of the session's memory", name)
        for key in preset:
            if key not in (*NAMES, "resource_slots", "scaling_group_name", "shared_memory"):
                _left(key, preset[key], f"preset {name}", found)
        if len(spec) > 1:
            found.presets.append(spec)
        else:
            found.leave("a preset", "it chooses nothing that a session has", name)


def _members(data: Mapping[str, Any], names: Mapping[str, str], found: Translated) -> None:
    groups = {str(g.get("id")): str(g.get("name")) for g in entries(data, "groups")}
    users = {str(u.get("uuid")): names[str(u.get("email"))] for u in entries(data, "users")}
    for one in entries(data, "association_groups_users"):
        group, user = groups.get(str(one.get("group_id"))), users.get(str(one.get("user_id")))
        if group is None or user is None:
            found.leave("an entry of association_groups_users", "its group or its user is not in the file")
        else:
            found.members.append((group, user))
    found.members.sort()
    if users:
        found.leave("users' log-ins, names and roles", "people log in as docs/log-in.md says")
