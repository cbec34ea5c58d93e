"""KubeSpawner's profiles, and Zero to JupyterHub's values with them, as presets. Pure.

A profile with options becomes a preset for each choice, as long as there are few; what a profile sets beside amounts and
the image is a setting of every session here, or none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fgpuspawner.cli.csv_rows import BadFile
from fgpuspawner.cli.importing import Spec, Translated, fgpu_words, number, size_mib

GPU = "nvidia.com/gpu"
MOST_CHOICES = 12
MOST_NAME = 60
RESOURCES = ("extra_resource_limits", "extra_resource_guarantees")
WHY = {
    "node_selector": "name the GPU with gpu_models in the preset, or give its nodes a resource group",
    "tolerations": "c.KubernetesFGPUSpawner.tolerations is of all sessions",
    "environment": "c.Spawner.environment is of all sessions",
    "default_url": "c.Spawner.default_url is of all sessions",
    "cmd": "c.Spawner.cmd is of all sessions",
    "volumes": "c.KubernetesFGPUSpawner.volumes is of all sessions",
    "volume_mounts": "c.KubernetesFGPUSpawner.volume_mounts is of all sessions",
    "start_timeout": "c.FGPU.launch_timeout_s is of all sessions",
}
VALUES = "it stays in the chart's values (docs/kubernetes.md)"


def translated(data: Any, per_gpu_milli: int) -> Translated:
    """Return what values, or a list of profiles, mean; one GPU is worth so much fGPU x 1000.

    Raises:
        BadFile: it has another form.
    """
    found = Translated()
    profiles, base = _profiles(data, found)
    for profile in profiles:
        _profile(profile, base, per_gpu_milli, found)
    return found


def _profiles(data: Any, found: Translated) -> tuple[list[Mapping[str, Any]], Spec]:
    base: Spec = {}
    if isinstance(data, Mapping) and ("singleuser" in data or "hub" in data or "jupyterhub" in data):
        # Of a chart that has the chart as a part.
        data = data.get("jupyterhub", data)
        base = _values(data, found)
        data = (data.get("singleuser") or {}).get("profileList") or []
    if isinstance(data, Mapping):
        data = list(data.values())
    if not isinstance(data, list) or not all(isinstance(one, Mapping) for one in data):
        raise BadFile("it must be a list of profiles, or values with singleuser.profileList")
    return data, base


def _values(values: Mapping[str, Any], found: Translated) -> Spec:
    """Return what the chart's values set for every profile, by KubeSpawner's names; and note the rest."""
    single = values.get("singleuser") or {}
    base: Spec = {}
    image = single.get("image") or {}
    if image.get("name"):
        base["image"] = f"{image['name']}:{image['tag']}" if image.get("tag") else image["name"]
    for name, short in (("cpu", "cpu"), ("memory", "mem")):
        for kind in ("limit", "guarantee"):
            if (value := (single.get(name) or {}).get(kind)) is not None:
                base[f"{short}_{kind}"] = value
    for key, ours in (("limits", RESOURCES[0]), ("guarantees", RESOURCES[1])):
        if own := (single.get("extraResource") or {}).get(key):
            base[ours] = own
    for key in single:
        if key not in ("image", "cpu", "memory", "extraResource", "profileList"):
            found.leave(f"singleuser.{key}", VALUES)
    cull = values.get("cull") or {}
    if cull.get("enabled", True) and cull:
        rules = {"timeout": "idle_after_s", "maxAge": "max_lifetime_s"}
        own = {
            ours: int(v)
            for key, ours in rules.items()
            if (v := number(cull.get(key))) is not None and v >= 10
        }
        if own:
            found.reclaim = {"*": own}
        for key in cull:
            if key not in (*rules, "enabled"):
                found.leave(
                    f"cull.{key}", "idle sessions are looked for all the time, and their owners are warned"
                )
    for key in values:
        if key not in ("singleuser", "cull"):
            found.leave(key, VALUES)
    return base


def _profile(profile: Mapping[str, Any], base: Spec, per_gpu_milli: int, found: Translated) -> None:
    title = str(profile.get("display_name") or profile.get("slug") or "")
    if not title:
        raise BadFile(f"profile {len(found.presets) + 1} has no display_name")
    own = {**base, **(profile.get("kubespawner_override") or {})}
    variants = list(_variants(title, profile.get("profile_options") or {}, found))
    for name, chosen in variants:
        _preset(name, {**own, **chosen}, per_gpu_milli, found)
    if profile.get("default"):
        found.leave(
            "default",
            "the form preselects c.FGPU.default_fgpu, or the options of somebody's last start",
            title,
        )
    for key in profile:
        if key == "description":
            found.leave(key, "a preset shows its amounts", title)
        elif key == "slug":
            found.leave(key, "a preset has a name alone", title)
        elif key not in ("display_name", "default", "kubespawner_override", "profile_options"):
            found.leave(key, "KubeSpawner knows no such key", title)


def _variants(title: str, options: Mapping[str, Any], found: Translated) -> Iterator[tuple[str, Spec]]:
    """Return a name and what is set for each way to choose among a profile's options."""
    each: list[list[tuple[str, Spec]]] = []
    for key, option in options.items():
        choices = option.get("choices") or {}
        if (option.get("unlisted_choice") or {}).get("enabled"):
            found.leave(
                f"unlisted_choice of {key}",
                "only what the catalogue and the form's fields have can be chosen",
                title,
            )
        if choices:
            each.append(
                [
                    (
                        str(c.get("display_name") or slug),
                        {**(c.get("kubespawner_override") or {}), "": c.get("default")},
                    )
                    for slug, c in choices.items()
                ]
            )
    ways = list(itertools.islice(itertools.product(*each), MOST_CHOICES + 1))
    if len(ways) > MOST_CHOICES:
        found.leave(
            "profile_options",
            f"more than {MOST_CHOICES} ways to choose: only the preselected ones became a preset",
            title,
        )
        ways = [tuple(next((c for c in own if c[1][""]), own[0]) for own in each)]
    for way in ways:
        merged = {key: value for _, spec in way for key, value in spec.items() if key}
        yield ": ".join([title, ", ".join(name for name, _ in way)]) if way else title, merged


def _preset(name: str, override: Mapping[str, Any], per_gpu_milli: int, found: Translated) -> None:
    if len(name) > MOST_NAME:
        found.leave(f"the whole name {name!r}", f"a preset's has at most {MOST_NAME} letters")
    spec: Spec = {"name": _free(name[:MOST_NAME], {preset["name"] for preset in found.presets})}
    used = set()
    for key in ("image", "image_spec"):
        if isinstance(override.get(key), str) and not _is_code(override[key]):
            spec["image"] = _slug(override[key], found)
            used.add(key)
    gpus = _gpus(override, name, used, found)
    if gpus:
        spec["fgpu"] = fgpu_words(gpus, per_gpu_milli)
    for ours, limit, guarantee, read in (
        ("cpu", "cpu_limit", "cpu_guarantee", _cpu),
        ("memory_mib", "mem_limit", "mem_guarantee", size_mib),
    ):
        both = [read(override[key]) for key in (limit, guarantee) if override.get(key) is not None]
        value = next((v for v in both if v), None)
        if value:
            spec[ours] = value
            used |= {limit, guarantee}
            if len({v for v in both if v}) > 1:
                found.leave(
                    guarantee,
                    f"a session has its {'CPU' if ours == 'cpu' else 'memory'} for itself: the limit counts",
                    name,
                )
    for key, value in override.items():
        if key not in used and value is not None:
            why = (
                "it is computed by a program"
                if _is_code(value)
                else WHY.get(key, "fgpuspawner has nothing like it")
            )
            found.leave(key, why, name)
    if len(spec) > 1:
        found.presets.append(spec)
    else:
        found.leave("a profile", "it sets nothing that a preset has", name)


def _gpus(override: Mapping[str, Any], name: str, used: set[str], found: Translated) -> Any:
    gpus = None
    for key in RESOURCES:
        resources = override.get(key)
        if not isinstance(resources, Mapping):
            continue
        used.add(key)
        for resource, amount in resources.items():
            if resource == GPU and (value := number(amount)) is not None:
                gpus = gpus or value
            elif resource.startswith("nvidia.com/mig-"):
                found.leave(
                    resource, "give the preset gpu_memory_mib and compute_percent of that slice", name
                )
            else:
                found.leave(
                    resource, "only whole GPUs of NVIDIA are translated; write the preset's fgpu", name
                )
    return gpus


def _is_code(value: object) -> bool:
    # As the dump of a program's list writes what is no data.
    return isinstance(value, str) and re.match(r"<(function|bound method|.* object at )", value) is not None


def _cpu(value: object) -> str | None:
    milli = re.fullmatch(r"([0-9]+)m", str(value))
    found = number(int(milli[1]) / 1000 if milli else value)
    return format(found.normalize(), "f") if found else None


def _free(name: str, taken: set[str]) -> str:
    found, count = name, 2
    while found in taken:
        end = f" ({count})"
        found, count = name[: MOST_NAME - len(end)] + end, count + 1
    return found


def _slug(reference: str, found: Translated) -> str:
    if reference not in found.images:
        plain = re.sub(r"[^a-z0-9]+", "-", reference.partition("@")[0].rpartition("/")[2].lower()).strip("-")[
            :40
        ]
        slug, count = plain or "image", 2
        while slug in found.images.values():
            slug, count = f"{plain[:37].strip('-')}-{count}", count + 1
        found.images[reference] = slug
    return found.images[reference]
