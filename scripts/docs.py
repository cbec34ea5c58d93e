"""Write docs/lifecycle.md, settings.md, openapi.json and a table of security.md from the code; from the results of
`make gpu-check` what isolation.md says of real GPUs; and what JupyterLab's extension knows of the API's objects.

A test, tests/unit/test_docs.py, says when they are old.

docs.py          write them
docs.py --check  say which of them are out of date, and end with 1 if any is
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

from traitlets import HasTraits, TraitType

from fgpu_scheduler import (
    ENDED,
    FAILURES,
    HOLDING,
    LAUNCHING,
    LEGAL,
    MOVED_BY,
    SERVING,
    EndCause,
    SessionState,
    WaitReason,
)
from fgpuspawner.engines.base import Safeguard
from fgpuspawner.engines.docker.checks import LINES
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.hub.checks import DEMANDS
from fgpuspawner.hub.inherited import NO_EFFECT, REFUSED, TABLES
from fgpuspawner.service.openapi import document
from fgpuspawner.settings import FGPU

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEADER = "<!-- Written by scripts/docs.py from the code. Do not edit: change the code, then run it again. -->"

RESULTS = DOCS.parent / "bench" / "results"

HARDWARE_BEGIN = (
    "<!-- hardware: `a real GPU` is written by scripts/docs.py from bench/results/gpu-check-*.jsonl -->"
)
HARDWARE_END = "<!-- end of hardware -->"
WHOLE_PART = "the whole part"
LEFT_OUT = "left out"

DEMANDS_BEGIN = "<!-- demands: written by scripts/docs.py from fgpuspawner/hub/checks.py -->"
DEMANDS_END = "<!-- end of demands -->"

STATES: dict[SessionState, str] = {
    SessionState.PENDING: "It waits in the queue. There is no container.",
    SessionState.SCHEDULED: "It has its shares; nothing has been started.",
    SessionState.PREPARING: "Its launch has begun.",
    SessionState.PULLING: "Its engine fetches its image.",
    SessionState.RUNNING: "Its server answers.",
    SessionState.PARKED: "Its server answers, and it holds no share of a GPU. Its GPU memory is in the host's memory.",
    SessionState.RESUMING: "It holds its shares again, and its GPU memory is being copied back.",
    SessionState.TERMINATING: "It is being ended. It holds its shares until its engine has removed it.",
    SessionState.TERMINATED: "It ran, or was starting, and has ended.",
    SessionState.ERROR: "It has ended because something failed; the end cause says what.",
    SessionState.CANCELLED: "It has ended before anything was started for it.",
}

WAIT_REASONS: dict[WaitReason, str] = {
    WaitReason.RESOURCES: "The GPU amount, the CPU or the memory is not free. The text says which.",
    WaitReason.HELD: "The Hub has restarted, and has not resumed it yet. It keeps its place.",
    WaitReason.QUOTA: "A quota is used up: its owner's, a Hub group's or the resource group's.",
    WaitReason.PRIORITY: "Enough is free, but it is reserved for a request ahead in the queue.",
    WaitReason.CLUSTER: (
        "It was placed, and the cluster refused. The text has the cluster's words. For 30 seconds, doubled up to "
        "5 minutes, it is placed on other machines only, and blocks no other request."
    ),
    WaitReason.RESERVED: "Resources are reserved for it, or for a request ahead of it with a promised start.",
}

END_CAUSES: dict[EndCause, str] = {
    EndCause.USER: "Its owner or an administrator ended or cancelled it, or replaced it by a new request.",
    EndCause.EXITED: ("Its server ended, or its container or process was removed outside JupyterHub."),
    EndCause.QUEUE_TIMEOUT: (
        "It waited for `queue_timeout_s`, or was not resumed within `abandoned_after_s` after a restart."
    ),
    EndCause.PULL_FAILED: "Its image could not be pulled, or was removed from the catalogue.",
    EndCause.LAUNCH_FAILED: "Its server ended while it started, or did not answer within `launch_timeout_s`.",
    EndCause.OOM: "It used more memory than it asked for, so the engine killed it. (Memory, not GPU memory.)",
    EndCause.IDLE: "It was idle for too long, and its owner did not press *Keep running* when warned.",
    EndCause.TIME_LIMIT: "It reached its time limit: its own, or an administrator's. Its owner was warned.",
    EndCause.PREEMPTED: "It made room for a request that goes first, after a warning. It may wait in the queue again.",
    EndCause.NODE_LOST: "Its machine did not answer at the start, or an administrator declared it gone.",
    EndCause.HUB_STOPPED: "JupyterHub stopped, and was set to end all sessions (`c.JupyterHub.cleanup_servers`).",
    EndCause.DISK_LIMIT: (
        "It or its owner's home took more of the disk, or more files, than the limits allow, also after a warning."
    ),
    EndCause.ISOLATION_FAILED: (
        "Its GPU limit was not in force after its start, or it held too much GPU memory, also after a warning."
    ),
}

SECTIONS: tuple[tuple[type[HasTraits], str], ...] = (
    (FGPU, "What `configure()` takes by name, and `c.FGPU` by attribute."),
    (
        FGPUSpawner,
        'Sessions as containers (`runtime="docker"`). It also has the settings of DockerSpawner, such as `volumes`, '
        "except for those [at the end of this page](#settings-of-other-classes).",
    ),
    (
        KubernetesFGPUSpawner,
        'Sessions as pods (`runtime="kubernetes"`). It also has the settings of KubeSpawner, except for those '
        "[at the end of this page](#settings-of-other-classes).",
    ),
    (LocalFGPUSpawner, 'Sessions as local processes (`runtime="local"`).'),
)


def lifecycle() -> str:
    """Return docs/lifecycle.md."""
    lines = [
        "# A session's life",
        "",
        HEADER,
        "",
        "For readers of a session's state, wait reason or end cause: what it means.",
        "",
        "Each change of state is one transaction of the scheduler's database, one row in its log of events, and one line",
        "in the Hub's log. [glossary.md](glossary.md) explains the words.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> PENDING",
        *(f"    {state} --> {to}" for state, following in LEGAL.items() for to in following),
        *(f"    {state} --> [*]" for state in ENDED),
        "```",
        "",
        "## States",
        "",
        "| state | meaning | next states | set by |",
        "|---|---|---|---|",
        *(
            f"| {state} | {STATES[state]} | {', '.join(LEGAL[state]) or 'none: it has ended'} | {MOVED_BY[state]} |"
            for state in SessionState
        ),
        "",
        f"A session holds its shares in {_list(tuple(s for s in HOLDING if s is not SessionState.PARKED))}, and in no "
        "other state. One that ends while it is PARKED holds none in TERMINATING. One on demand holds none until its "
        "first RESUMING.",
        "",
        f"A server has at most one session in {_list(SERVING)}. TERMINATING does not count: the server may be "
        "started again while its last container ends.",
        "",
        f"In {_list(LAUNCHING)} a launch is under way. A launch that is resumed after a restart of the Hub is "
        "a new attempt of the same session; its number is in the container's name.",
        "",
        "PREPARING is written before the first effect. After it every end passes TERMINATING, because the GPU is free "
        "only when the engine reports the container exited or absent. A session goes back to PENDING only if the engine "
        "says that nothing of it is left.",
        "",
        "## Why a session waits (`wait_reason`)",
        "",
        "| reason | meaning |",
        "|---|---|",
        *(f"| {reason} | {sentence} |" for reason, sentence in WAIT_REASONS.items()),
        "",
        "## Why a session ended (`end_cause`)",
        "",
        "| cause | meaning | ends in |",
        "|---|---|---|",
        *(
            f"| {cause} | {sentence} | {'ERROR' if cause in FAILURES else 'TERMINATED'} |"
            for cause, sentence in END_CAUSES.items()
        ),
        "",
        "A session that ends in PENDING or SCHEDULED becomes CANCELLED, whatever the cause.",
        "",
    ]
    return "\n".join(lines)


def _list(states: tuple[SessionState, ...]) -> str:
    return states[0] if len(states) == 1 else f"{', '.join(states[:-1])} and {states[-1]}"


def settings() -> str:
    """Return docs/settings.md."""
    lines = [
        "# Settings",
        "",
        HEADER,
        "",
        "For administrators: every setting, with its default. Set them in jupyterhub_config.py. A wrong one stops the",
        "Hub with one line that names it; `fgpu check` says so without starting the Hub. Amounts of fGPU and CPU",
        'are exact decimals with at most three places, as numbers or quoted (`"0.1"`).',
        "",
    ]
    for owner, about in SECTIONS:
        lines += [f"## {owner.__name__}", "", about, ""]
        for name, trait in own_traits(owner).items():
            lines += [f"### {owner.__name__}.{name}", "", f"Default: `{shown_default(owner, name)}`", ""]
            lines += [markdown(str(trait.metadata.get("help", ""))), ""]
    lines += [
        "## Settings of other classes",
        "",
        "Settings of JupyterHub, DockerSpawner and KubeSpawner are used, except for these. One that is refused stops",
        "the Hub. Of one without effect the Hub's log and `fgpu check` warn. `setting.key` is a key of a dict.",
        "",
        "| class | setting | | instead |",
        "|---|---|---|---|",
    ]
    for name in ("Spawner", "LocalProcessSpawner", "DockerSpawner", "KubeSpawner"):
        for use, said in ((REFUSED, "refused"), (NO_EFFECT, "no effect")):
            for names, instead in TABLES[name][use].items():
                settings = ", ".join(f"`{one}`" for one in names.split())
                lines.append(f"| {name} | {settings} | {said} | {instead} |")
    return "\n".join(lines).rstrip() + "\n"


def own_traits(owner: type[HasTraits]) -> dict[str, TraitType[object, object]]:
    """Return the settings that a class of this package declares, in the order in which it and its parts do."""
    found = owner.class_traits(config=True)
    own = [cls for cls in owner.__mro__ if cls.__module__.startswith("fgpuspawner.")]
    return {name: found[name] for cls in own for name in vars(cls) if name in found}


def shown_default(owner: type[HasTraits], name: str) -> str:
    """Return the default as it would be written in a configuration."""
    default = owner.class_traits()[name].default()
    return f'"{default}"' if isinstance(default, str) else repr(default).replace("'", '"')


def markdown(help_text: str) -> str:
    """Return a trait's help, which is reStructuredText of the simplest kind, as Markdown."""
    text = inspect.cleandoc(help_text)
    text = re.sub(r"``([^`]+)``", lambda found: f"`{' '.join(found[1].split())}`", text)
    text = re.sub(r"(?<=\S) Example: ", "\n\nExample: ", text)
    head, mark, code = text.partition("Example::\n")
    if mark:
        text = f"{head}Example:\n\n```python\n{inspect.cleandoc(code)}\n```"
    return text


def openapi() -> str:
    """Return the REST API's description."""
    return json.dumps(document(), indent=1) + "\n"


LAB_READS_NOT = {
    "Group": ("nodes", "nodes_lost", "total", "used", "free", "largest_fgpu_now", "waiting"),
    "Me": ("admin", "administers", "groups"),
    "Pull": (
        "phase",
        "layers_done",
        "layers",
        "bytes_done",
        "bytes_total",
        "seconds_left",
        "attempt",
        "trouble",
    ),
    "Queue": ("entries",),
    "Session": (
        *("submitted_at_s", "started_at_s", "ended_at_s", "end_cause", "ends_cause", "time_limit_s"),
        *("wait_reason", "waits_for", "sooner", "ahead", "preemptible_from_s", "priority"),
        *("gpu_models", "node", "disk", "folders", "saving"),
    ),
    "SessionMeter": ("now", "processes"),
}
"""What JupyterLab does not show; so an answer without these fields is as good."""


def lab_schemas(*names: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of these objects and of those in them, without descriptions."""
    schemas = document()["components"]["schemas"]
    found: dict[str, dict[str, Any]] = {}
    missing = list(names)
    while missing:
        name = missing.pop()
        if name not in found:
            found[name] = schema = _plain(schemas[name])
            for field in LAB_READS_NOT.get(name, ()):
                del schema["properties"][field]
            missing += re.findall(r'"#/components/schemas/(\w+)"', json.dumps(found[name]))
    return dict(sorted(found.items()))


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    # A field may have the name of such a word.
    told = ("type", "properties", "items", "anyOf", "$ref", "enum", "const")
    if "properties" in schema:
        fields = {name: _plain(own) for name, own in schema["properties"].items()}
        return {"type": "object", "properties": fields}
    plain = {key: _plain(one) for key, one in schema.items() if key in told}
    # Null needs no default.
    return plain if schema.get("default") is None else {**plain, "default": schema["default"]}


def lab_python() -> str:
    """Return what the extension's server checks answers by: an object a line."""
    read = lab_schemas("Me", "Session", "SessionMeter", "Queue", "Capacity")
    objects = [f"{json.dumps(name)}: {json.dumps(own)}" for name, own in read.items()]
    return "{\n" + ",\n".join(objects) + "\n}\n"


def lab_typescript() -> str:
    """Return the types of what the extension's server passes to the browser as it is."""
    lines = ["// Written by scripts/docs.py from fgpuspawner/service/objects.py. Do not edit.", ""]
    for name, schema in lab_schemas("Session", "Banner").items():
        if "enum" in schema:
            lines += [f"export type {name} =", *(f"  | '{one}'" for one in schema["enum"])]
            lines[-1] += ";"
        else:
            fields = [f"  {key}: {_typescript(own)};" for key, own in schema["properties"].items()]
            lines += [f"export interface {name} {{", *fields, "}"]
        lines.append("")
    return "\n".join(lines)


def _typescript(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " | ".join(map(_typescript, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(f"'{one}'" for one in schema["enum"])
    if "const" in schema:
        return f"'{schema['const']}'"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if schema["type"] == "array":
        return f"{_typescript(schema['items'])}[]"
    return {"integer": "number"}.get(schema["type"], schema["type"])


def security() -> str:
    """Return docs/security.md, which is written by hand, with its table of demands."""
    before, begin, rest = (DOCS / "security.md").read_text(encoding="utf-8").partition(DEMANDS_BEGIN)
    _, end, after = rest.partition(DEMANDS_END)
    rows = [
        f"| {own.since} | {own.what} | `{LINES[own.judge] if isinstance(own.judge, Safeguard) else own.line}` |"
        for own in DEMANDS
    ]
    table = "\n".join(["| from | what | with |", "|---|---|---|", *rows])
    return f"{before}{begin}\n{table}\n{end}{after}"


def isolation() -> str:
    """Return docs/isolation.md, which is written by hand, with what `make gpu-check` has shown on real GPUs."""
    before, begin, rest = (DOCS / "isolation.md").read_text(encoding="utf-8").partition(HARDWARE_BEGIN)
    table, end, after = rest.partition(HARDWARE_END)
    head, rule, *rows = table.strip().splitlines()
    filled = []
    for row in rows:
        what, simulated, _, parts = row.strip("| ").split(" | ")
        found = on_hardware(re.findall(r"`(\w+)`", parts), RESULTS)
        filled.append(f"| {what} | {simulated} | {found} | {parts} |")
    return "\n".join([before + begin, head, rule, *filled, end]) + after


def on_hardware(parts: list[str], results: Path) -> str:
    """Return what the newest run of each part has shown on each model and driver; a rehearsal shows nothing."""
    newest: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    runs: dict[tuple[str, str, str], str] = {}
    found = gpu_results(results)
    partial = {((x["model"], x["driver"]), x["part"], x["run"]) for x in found if x.get("why") == LEFT_OUT}
    for line in sorted(found, key=lambda line: str(line["run"])):
        machine, part = (line["model"], line["driver"]), line["part"]
        if part in parts:
            checks = newest.setdefault(machine, {})
            if runs.get((*machine, part)) != line["run"]:
                runs[*machine, part] = line["run"]
                # A run of single checks adds to the one before.
                if part not in checks or (machine, part, line["run"]) not in partial:
                    checks[part] = {}
            if line.get("why") != LEFT_OUT or line["name"] not in checks[part]:
                checks[part][line["name"]] = line["verdict"]
    said = []
    for (model, driver), checks in sorted(newest.items()):
        date = max(run for (*machine, _), run in runs.items() if machine == [model, driver])[:10]
        words = ", ".join(_shown(part, checks[part]) for part in parts if part in checks)
        lacking = [f"`{part}`" for part in parts if part not in checks]
        words += f"; {', '.join(lacking)} not run" if lacking else ""
        said.append(f"{model}, driver {driver}, {date}: {words}")
    return "<br>".join(said) or "not run"


def gpu_results(results: Path) -> list[dict[str, str]]:
    """Return the lines of real GPUs. A truncated last line is skipped."""
    found = []
    for path in sorted(results.glob("gpu-check-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if line["simulated"] is False:
                found.append(line)
    return found


def _shown(part: str, checks: dict[str, str]) -> str:
    verdicts = [verdict for name, verdict in checks.items() if name != WHOLE_PART]
    refuted, unknown = verdicts.count("REFUTED"), verdicts.count("NOT RUN")
    ended = "" if WHOLE_PART in checks else ", ended early"
    if refuted:
        lacking = f", {unknown} not run" if unknown else ""
        return f"`{part}` REFUTED ({refuted} of {len(verdicts)} checks{lacking}{ended})"
    if "PROVED" not in verdicts:
        return f"`{part}` not run"
    more = f" ({unknown} of {len(verdicts)} checks not run{ended})" if unknown or ended else ""
    return f"`{part}` PROVED{more}"


PAGES = {
    "lifecycle.md": lifecycle,
    "settings.md": settings,
    "openapi.json": openapi,
    "isolation.md": isolation,
    "security.md": security,
    "../labextension/jupyterlab_fgpu/service_schema.json": lab_python,
    "../labextension/src/service.ts": lab_typescript,
}


def main() -> int:
    """Write the pages, or say which are old."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    old = [
        name
        for name, page in PAGES.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != page()
    ]
    for name in old:
        if given.check:
            print(f"docs/{name} is out of date: run scripts/docs.py", file=sys.stderr)
        else:
            (DOCS / name).write_text(PAGES[name]())
            print(f"wrote docs/{name}")
    return 1 if old and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
