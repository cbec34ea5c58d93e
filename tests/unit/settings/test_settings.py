"""The administrator's settings: the exact line for each wrong one, and what good ones give."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from fgpu_scheduler import (
    Account,
    Accounts,
    BadSettings,
    Caps,
    Node,
    Policy,
    ProbeFailed,
    Quota,
    QuotaScope,
    Rules,
    Store,
    format_milli,
    group_policy,
)
from fgpuspawner.config import make_data
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.network import METADATA

TWO_NODES = [
    {"name": "a", "cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 2}},
    {
        "name": "b",
        "group": "class",
        "cpu": 1.5,
        "memory_mib": 4096,
        "gpus": {"simulated": 1, "memory_mib": 16160},
    },
]
TWO_GROUPS: dict[str, Any] = {"default": {}, "class": {"hub_groups": ["ml101"], "users": ["zoe"]}}


def made(**settings: Any) -> FGPU:
    """Return settings as the Hub reads them from its configuration."""
    config = Config()
    for name, value in settings.items():
        setattr(config.FGPU, name, value)
    return FGPU.from_config(config).checked()


def refusal(**settings: Any) -> str:
    with pytest.raises(BadSettings) as caught:
        made(**settings)
    return str(caught.value)


def node(**keys: Any) -> dict[str, Any]:
    return {"nodes": [{"name": "a", **keys}]}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"fgpu_per_gpu": 0}, "fgpu_per_gpu is 0; one GPU must be worth more than 0 fGPU, such as 2"),
        ({"fgpu_per_gpu": "0.000"}, "fgpu_per_gpu is 0; one GPU must be worth more than 0 fGPU, such as 2"),
        ({"fgpu_per_gpu": -2}, "fgpu_per_gpu: -2 is negative; it must be above 0"),
        ({"fgpu_per_gpu": "two"}, "fgpu_per_gpu: 'two' is not a number such as 0.5"),
        ({"fgpu_per_gpu": ""}, "fgpu_per_gpu: '' is not a number such as 0.5"),
        ({"fgpu_per_gpu": float("nan")}, "fgpu_per_gpu: 'nan' is not a number such as 0.5"),
        ({"fgpu_per_gpu": True}, "fgpu_per_gpu: 'True' is not a number such as 0.5"),
        ({"fgpu_per_gpu": 1000000000}, "fgpu_per_gpu: 1000000000 is too large; at most 1000000 is possible"),
        ({"fgpu_per_gpu": "2.0001"}, "fgpu_per_gpu: 2.0001 has more than three decimals"),
        ({"fgpu_per_gpu": {"*A100*": 0, "*": 2}}, "fgpu_per_gpu['*A100*'] ... than 0 fGPU, such as 2"),
        ({"fgpu_per_gpu": {"*": None}}, "fgpu_per_gpu: 'None' is not a number such as 0.5"),
        ({"fgpu_step": 0}, "fgpu_step is 0; it must be above 0, such as 0.1"),
        ({"fgpu_step": ""}, "fgpu_step: '' is not a number such as 0.5"),
        ({"fgpu_step": "-0.1"}, "fgpu_step: -0.1 is negative; it must be above 0"),
        ({"fgpu_step": "0.0001"}, "fgpu_step: 0.0001 has more than three decimals"),
        ({"fgpu_per_gpu": 1, "fgpu_step": "1.5"}, "fgpu_step is 1.5, above ... use a step of at most 1"),
        (
            {"fgpu_per_gpu": {"*T4*": "0.5", "*": 2}, "fgpu_step": 1},
            "fgpu_step is 1, ... step of at most 0.5",
        ),
        ({"fgpu_per_gpu": {"*T4*": 1, "*": 2}, "fgpu_step": "0.3"}, "fgpu_step is 0.3, ... 1, such as 0.25"),
        ({"default_fgpu": 3, "max_fgpu": "2"}, "default_fgpu is 3, above ... of 2; make it at most that"),
        ({"default_cpu": "2.5", "max_cpu": 2}, "default_cpu is 2.5, above ... of 2; make it at most that"),
        ({"default_memory_mib": 4096, "max_memory_mib": 2048}, "default_memory_mib ... it at most that"),
        ({"db_url": "sqlite://data/fgpu.sqlite"}, "db_url: the database URL ... sqlite:////srv/fgpu.sqlite"),
        ({"db_url": "postgres://fgpu@db/fgpu"}, "db_url: the database may ... postgresql+psycopg://"),
        ({"fgpu_per_gpus": 2}, "fgpu_per_gpus is not a setting; did you mean fgpu_per_gpu?"),
        ({"hami_library": "/lib/libvgpu.so"}, "hami_library is not a setting; docs/settings.md has them all"),
        ({"log_format": "json"}, "log_format is not a setting; docs/settings.md has them all"),
        ({"wholly_other": 2}, "wholly_other is not a setting; docs/settings.md has them all"),
        ({"max_sessions": "x"}, "max_sessions is 'x'; it must be a whole number, at least 1"),
        ({"meter_every_s": 0.5}, "meter_every_s is 0.5; it must be a whole number, between 1 and 300 s"),
        ({"owners_may_commit": "no"}, "owners_may_commit is 'no'; it must be True or False"),
        ({"data_dir": 7}, "data_dir is 7; it must be text"),
        ({"groups": ["default"]}, "groups is ['default']; it must be a dict"),
        ({"nodes": {}}, "nodes is {}; it must be a list, each entry a dict"),
        ({"sudo_groups": ["a", 7]}, "sudo_groups is ['a', 7]; it must be a list, each entry text"),
        ({"fgpu_step": None}, "fgpu_step is None; it must be a number such as 0.5"),
        ({"fgpu_per_gpu": None}, "fgpu_per_gpu is None; it must be ... or a dict with one for each model"),
        ({"max_private_images": -1}, "max_private_images is -1; it must be between 0 and 1000000000"),
        ({"warm_pool": {"python": True}}, "warm_pool: 'python' has ... from 0 to 100, or \"auto\""),
        ({"groups": {"A B": {}}}, "groups: 'A B' is not a name; use ... a-z, 0-9 and '-', not '-' first"),
        ({"groups": {7: {}}}, "groups: 7 is not a name; use 1 to 40 of a-z, 0-9 and '-', not '-' first"),
        ({"groups": {"default": ["zoe"]}}, "groups['default'] is ['zoe']; ... or left out for all users"),
        ({"groups": {"default": {"user": ["zoe"]}}}, "groups['default'] is ... left out for all users"),
        ({"groups": {"default": {"users": "zoe"}}}, "groups['default'] is ... left out for all users"),
        ({"groups": {"default": {"users": [7]}}}, "groups['default'] is ... left out for all users"),
        ({"groups": {"default": {"users": []}}}, "groups['default'] is ... left out for all users"),
        ({"groups": {"default": {}, "class": {}}}, "groups: no node is in ... add one to c.FGPU.nodes"),
        (
            {"groups": {"class": {}}, "nodes": [{"name": "a", "group": "class"}], "max_sessions": 0},
            "max_sessions is 0; ... must be at least 1",
        ),
        ({"groups": {"class": {}}}, "groups: no node is in group 'class'; add one to c.FGPU.nodes"),
        (
            {"accounts": {"a/b": {}}},
            "accounts['a/b']: use letters, digits, '.', '_' and '-' for a ... most 64",
        ),
        ({"accounts": {"a": 2}}, "accounts['a'] must be a dict, got 2"),
        ({"accounts": {"a": {"wait": 2}}}, "accounts['a'] has an unknown key 'wait'; ... parent, groups"),
        ({"accounts": {"a": {"weight": 0}}}, "accounts['a']['weight'] is 0; use a number from 0.01 to 1000"),
        ({"accounts": {"a": {"groups": "g"}}}, "accounts['a']['groups'] is 'g'; use a list of ... groups"),
        ({"accounts": {"a": {"parent": "b"}}}, "accounts['a']['parent'] is 'b', which is no ... one of a"),
        (
            {"accounts": {"a": {"parent": "b"}, "b": {"parent": "a"}}},
            "accounts['b']['parent'] is 'a', which is below it; leave one of the parents out",
        ),
        ({"policies": {"class": {}}}, "policies: there is no resource group 'class'; there are 'default'"),
        ({"policies": {"*": ["fifo"]}}, "policies['*'] must be a dict, got ['fifo']"),
        ({"policies": {"*": {"ordre": "fifo"}}}, "policies['*'] has an ... half_life_s"),
        ({"policies": {"*": {"order": 7}}}, "policies['*']['order'] is 7; use one of the words for it"),
        ({"policies": {"*": {"backfill": "easy"}}}, "policies['*']['backfill'] is gone; leave it out"),
        ({"policies": {"*": {"placement": "spread"}}}, "policies['*']['placement'] is gone; leave it out"),
        ({"policies": {"*": {"size": 3}}}, "policies['*'] has an ... half_life_s"),
        ({"policies": {"*": {"longest_wait_s": 0}}}, "policies['*']['longest_w ... from 1 to 36000000"),
        (
            {"policies": {"*": {"longest_wait_s": 1801}}, "queue_timeout_s": 3600},
            "policies['*']['long ... it at most 1800",
        ),
        ({"policies": {"*": {"half_life_s": True}}}, "policies['*']['half_life ... from 1 to 36000000"),
        ({"quotas": [{"user": "*", "max_gpus": 2}]}, "quotas: {'user': '*', ... guaranteed_fgpu"),
        (
            {"quotas": [{"user": "zoe", "hub_group": "ml101", "max_sessions": 2}]},
            "quotas: {'user': ... write two quotas",
        ),
        ({"quotas": [{"max_sessions": 2}]}, "quotas: {'max_sessions': 2} ... account or resource_group"),
        ({"quotas": [{"user": ["zoe"], "max_sessions": 2}]}, "quotas: {'user': ... user must be a name"),
        ({"quotas": [{"user": "*"}]}, "quotas: {'user': '*'} limits ... max_lifetime_s, guaranteed_fgpu"),
        (
            {"quotas": [{"account": "a", "max_fgpu": 1}]},
            "quotas: there is no account 'a'; set c.FGPU.accounts",
        ),
        (
            {"quotas": [{"account": "b", "max_fgpu": 1}], "accounts": {"a": {}}},
            "quotas: there is no account 'b'; use one of *, a, default",
        ),
        (
            {"quotas": [{"user": "*", "guaranteed_fgpu": 1}]},
            "quotas: {'user': '*', ... add account, or use max_fgpu",
        ),
        (
            {"quotas": [{"account": "a", "max_fgpu": 1, "guaranteed_fgpu": 2}], "accounts": {"a": {}}},
            "quotas: {'account': 'a', ... is above max_fgpu; make it at most 1",
        ),
        (
            {"quotas": [{"account": "a", "hub_group": "b", "max_fgpu": 1}], "accounts": {"a": {}}},
            "quotas: {'account': 'a', ... has hub_group and account; write two quotas",
        ),
        ({"quotas": [{"user": "*", "max_fgpu": "0.0001"}]}, "quotas: {'user': ... than three decimals"),
        ({"quotas": [{"user": "*", "max_sessions": -1}]}, "quotas: {'user': ... from 0 to 36000000"),
        ({"quotas": [{"user": "*", "max_lifetime_s": 5}]}, "quotas: {'user': ... from 60 to 36000000"),
        (
            {"quotas": [{"user": "*", "resource_group": "class", "max_sessions": 2}]},
            "quotas: there is ... there are 'default'",
        ),
        (
            {"quotas": [{"user": "*", "resource_group": "*", "max_sessions": 2}]},
            "quotas: there is ... there are 'default'",
        ),
        (
            {"quotas": [{"user": "*", "max_sessions": 2}, {"user": "*", "max_fgpu": 1}]},
            "quotas has two for ... write them as one",
        ),
        ({"default_time_limit_s": 30}, "default_time_limit_s is 30; it ... and 36000000 s, or 0 for none"),
        ({"default_time_limit_s": 7200, "max_time_limit_s": 3600}, "default_time_limit_ ... it at most that"),
        ({"max_priority": {"staff": 5000}}, "max_priority['staff'] is ... whole number from 0 to 1000"),
        ({"reclaim": {"class": {}}}, "reclaim: there is no resource group 'class'; there are 'default'"),
        (
            {"reclaim": {"*": {"idle_minutes": 60}}},
            "reclaim['*'] has an ... park, park_after_s, parked_for_s, park_opt_out",
        ),
        (
            {"reclaim": {"*": {"park": "often"}}},
            "reclaim['*']['park'] is 'often'; use 'never', 'when needed', 'always'",
        ),
        (
            {"reclaim": {"*": {"park_after_s": 600}}},
            "reclaim['*']['park_after_s'] needs 'park' there: 'when needed' or 'always'",
        ),
        (
            {"reclaim": {"*": {"park": "always"}}},
            "reclaim['*']['park'] ... may hold the GPU memory of parked sessions",
        ),
        ({"reclaim": {"*": {"idle_after_s": 9}}}, "reclaim['*']['idle_after_ ... 36000000, or leave it out"),
        (
            {"reclaim": {"*": {"preempt": True, "min_runtime_s": 0}}},
            "reclaim['*']['min_r ... or leave it out",
        ),
        ({"reclaim": {"*": {"preempt": "yes"}}}, "reclaim['*']['preempt'] is 'yes'; use True or False"),
        (node(engine="http://x:1"), "nodes: node 'a' has engine ... or 'unix:///PATH'"),
        (node(engine="tcp://[fd00::2]:2376"), "nodes: node 'a' has engine ... a name or an IPv4 address"),
        (node(engine="ssh://u@[fd00::2]"), "nodes: node 'a' has engine ... a name or an IPv4 address"),
        (node(engine="tcp://[fe80::2%eth0]"), "nodes: node 'a' has engine ... a name or an IPv4 address"),
        (node(engine="ssh://u@fd00::2"), "nodes: node 'a' has engine ... or 'unix:///PATH'"),
        (node(engine="tcp://[fd00::2"), "nodes: node 'a' has engine ... or 'unix:///PATH'"),
        (node(engine="tcp://lab:99999"), "nodes: node 'a' has engine ... or 'unix:///PATH'"),
        (node(engine="tcp://:2376"), "nodes: node 'a' has engine ... or 'unix:///PATH'"),
        (node(engine="ssh://lab", address="fd00::2"), "nodes: node 'a' has ... address, without a port"),
        (node(engine="ssh://lab", address="[fd00::2]"), "nodes: node 'a' has ... without a port"),
        (node(engine="ssh://lab", address="10.0.0.2:2376"), "nodes: node 'a' has ... without a port"),
        (node(engine="tcp://10.0.0.2:2375"), "nodes: node 'a' is at ... nobody else can reach it"),
        (
            node(engine="tcp://10.0.0.2:2375", tls={"ca": "/no", "cert": "/no", "key": "/no"}),
            "nodes: node 'a' ... the Hub cannot read",
        ),
        (node(engine="ssh://lab", tls=False), "nodes: node 'a' has tls, which is for engines at tcp:// only"),
        (node(address="10.0.0.2"), "nodes: node 'a' has address, and ... name the engine that it is for"),
        (node(engine="ssh://lab"), "hub_address is empty, and node ... sessions there reach the Hub"),
        (node(gpus=[{"uuid": "GPU-1", "memory_mib": 8192}]), "nodes: node 'a' ... that NVML reports"),
        (node(engine="ssh://lab", gpus=[{"uuid": "GPU-1"}]), "nodes: node 'a' has ... 40960}"),
        (node(group="class"), "nodes: node 'a' is in group ... does not have; it has 'default'"),
        (node(group=["class"]), "nodes: node 'a' is in group ... does not have; it has 'default'"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "nodes: two nodes are named 'a'"),
        ({"nodes": [{}]}, "nodes: name None will not do; use 1 to 40 of a-z, 0-9 and '-', not '-' first"),
        ({"nodes": [{"name": "A"}]}, "nodes: name 'A' will not do; ... a-z, 0-9 and '-', not '-' first"),
        ({"nodes": [{"name": "-a"}]}, "nodes: name '-a' will not do; ... a-z, 0-9 and '-', not '-' first"),
        (
            {"nodes": [{"name": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}]},
            "nodes: name ... '-', not '-' first",
        ),
        (node(gpu=1), "nodes: node 'a' has an unknown key ... memory_mib, gpus, engine, tls, address"),
        (node(cpu=0), "nodes: node 'a' has cpu 0; it must be a number above 0"),
        (node(cpu=-1), "nodes: node 'a' has cpu -1; it must be a number above 0"),
        (node(cpu="4"), "nodes: node 'a' has cpu '4'; it must be a number above 0"),
        (node(cpu=True), "nodes: node 'a' has cpu True; it must be a number above 0"),
        (node(cpu=float("nan")), "nodes: node 'a' has cpu nan; it must be a number above 0"),
        (node(cpu=float("inf")), "nodes: node 'a' has cpu inf; it must be a number above 0"),
        (node(memory_mib="8GB"), "nodes: node 'a' has memory_mib '8GB'; use whole MiB such as 65536"),
        (node(memory_mib=0), "nodes: node 'a' has memory_mib 0; use whole MiB such as 65536"),
        (node(memory_mib=512.5), "nodes: node 'a' has memory_mib 512.5; use whole MiB such as 65536"),
        (node(memory_mib=None), "nodes: node 'a' has memory_mib None; use whole MiB such as 65536"),
        (node(gpus=2), "nodes: node 'a' has gpus 2; use 'nvml', a list of UUIDs, or {'simulated': 2}"),
        (node(gpus=[0]), "nodes: node 'a' has gpus [0]; use 'nvml', a list of UUIDs, or {'simulated': 2}"),
        (node(gpus={}), "nodes: node 'a' has gpus {}; use {'simulated': 2, 'memory_mib': 8192}"),
        (node(gpus={"simulated": -1}), "nodes: node 'a' has gpus ... 2, 'memory_mib': 8192}"),
        (node(gpus={"simulated": True}), "nodes: node 'a' has gpus ... 2, 'memory_mib': 8192}"),
        (node(gpus={"simulated": 1, "memory_mib": 127}), "nodes: node 'a' has ... 'memory_mib': 8192}"),
        (node(gpus={"simulated": 1, "memory": 8192}), "nodes: node 'a' has ... 2, 'memory_mib': 8192}"),
        ({"simulated_gpus": "x"}, "simulated_gpus is 'x'; use \"auto\" or a number such as 2"),
        ({"simulated_gpus": "-1"}, "simulated_gpus is '-1'; use \"auto\" or a number such as 2"),
        ({"simulated_gpus": ""}, "simulated_gpus is ''; use \"auto\" or a number such as 2"),
        ({"max_fgpu": "x"}, "max_fgpu: 'x' is not a number such as 0.5"),
        ({"max_fgpu": 0}, 'max_fgpu is 0; it must be above 0, or "" to leave it open'),
        ({"max_fgpu": "0.05"}, "max_fgpu is 0.05, below one step of 0.1; no request would be possible"),
        ({"max_cpu": 0}, 'max_cpu is 0; it must be above 0, or "" to leave it open'),
        ({"default_fgpu": "x"}, "default_fgpu: 'x' is not a number such as 0.5"),
        ({"default_cpu": "0.0001"}, "default_cpu: 0.0001 has more than three decimals"),
        ({"max_memory_mib": -1}, "max_memory_mib is -1; it must be ... 128 and 2147483648, or 0 for none"),
        ({"default_memory_mib": 1}, "default_memory_mib is 1; it ... and 2147483648, or 0 for none"),
        ({"max_memory_mib": 68719476736}, "max_memory_mib is ... and 2147483648, or 0 for none"),
        ({"max_memory_mib": "8GB"}, "max_memory_mib is '8GB'; it ... MiB, such as 8192 for 8 GiB"),
        ({"max_sessions": 0}, "max_sessions is 0; it must be at least 1"),
        ({"max_shares_per_gpu": 0}, "max_shares_per_gpu is 0; it must be between 1 and 100"),
        ({"max_shares_per_gpu": 101}, "max_shares_per_gpu is 101; it must be between 1 and 100"),
        ({"max_pending_per_user": 0}, "max_pending_per_user is 0; it must be at least 1"),
        ({"queue_timeout_s": 0}, "queue_timeout_s is 0; it must be at least 1 s"),
        ({"launch_timeout_s": 0}, "launch_timeout_s is 0; it must be at least 1 s"),
        ({"abandoned_after_s": -5}, "abandoned_after_s is -5; it must be at least 1 s"),
        ({"pulls_at_a_time": 0}, "pulls_at_a_time is 0; it must be at least 1"),
        ({"prefetch": -1}, "prefetch is -1; it must be at least 0"),
        ({"resume_grace_s": -1}, "resume_grace_s is -1; it must be at least 0 s"),
        ({"service_port": 0}, "service_port is 0; it must be between 1 and 65535"),
        ({"service_port": 70000}, "service_port is 70000; it must be between 1 and 65535"),
        ({"isolation": "hard"}, "isolation is 'hard'; use one of ... driver-cgroup, mig, mps, none"),
        ({"managed_memory": "ignore"}, "managed_memory is 'ignore'; use one of charge, refuse"),
        ({"gpu_reserve_mib": -1}, 'gpu_reserve_mib is -1; use "auto" or MiB such as 1024'),
        ({"context_mib": -1}, 'context_mib is -1; use "auto" or MiB such as 400'),
        ({"context_mib": "400"}, "context_mib is '400'; use \"auto\" or MiB such as 400"),
        ({"verify_timeout_s": 0}, "verify_timeout_s is 0; it must be at least 1 s"),
        ({"watchdog_every_s": 0}, "watchdog_every_s is 0; it must be between 1 and 300 s"),
        ({"meter_every_s": 0}, "meter_every_s is 0; it must be between 1 and 300 s"),
        ({"meter_every_s": 301}, "meter_every_s is 301; it must be between 1 and 300 s"),
        ({"history_days": -1}, "history_days is -1; it must be between 0 and 36500"),
        ({"watchdog_every_s": 301}, "watchdog_every_s is 301; it must be between 1 and 300 s"),
        ({"watchdog_tolerance_mib": -1}, "watchdog_tolerance_mib is -1; it must be between 0 and 2147483648"),
        ({"accounting_dir": "x"}, "accounting_dir is 'x'; it must be an absolute path"),
        ({"mps_pipe_directory": "x"}, "mps_pipe_directory is 'x'; it must be an absolute path"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_wrong_setting_is_refused_with_one_line(wrong: dict[str, Any], line: str) -> None:
    head, cut, tail = line.partition(" ... ")
    found = refusal(**wrong)
    assert found.startswith(f"c.FGPU.{head}")
    assert found.endswith(tail if cut else head)
    assert "\n" not in found


def config_of(lines: str) -> Config:
    """Return what a configuration file with these lines sets."""
    c = Config()
    exec(lines, {"c": c})
    return c


@pytest.mark.parametrize(
    "lines",
    [
        "c.FGPU.max_sessions.append(4)",
        "c.FGPU.groups.append('class')",
        "c.FGPU.groups.add('class')",
        "c.FGPU.nodes.update({'name': 'a'})",
        "c.FGPU.fgpu_per_gpu.update({'*A100*': 10})",
    ],
)
def test_adding_to_a_setting_of_another_kind_is_refused(lines: str) -> None:
    name = lines.split(".")[2]
    with pytest.raises(BadSettings) as caught:
        FGPU.from_config(config_of(lines))
    assert str(caught.value) == f"c.FGPU.{name} cannot be added to so; set it as a whole: c.FGPU.{name} = ..."


def test_lists_and_dicts_can_be_added_to() -> None:
    lines = "c.FGPU.groups.update({'default': {'users': ['zoe']}})\nc.FGPU.allowed_ports.append(443)\n"
    lines += "c.FGPU.blocked_networks.append('10.1.0.0/16')\nif c.FGPU.nodes: pass"
    own = FGPU.from_config(config_of(lines)).checked()
    assert own.groups == {"default": {"users": ["zoe"]}}
    assert own.blocked_networks == [*METADATA, "10.1.0.0/16"]
    assert (own.allowed_ports, own.nodes) == ([443], [])
    assert FGPU.from_json(own.to_json()).checked().groups == own.groups


@pytest.mark.parametrize("name", FGPU.class_trait_names(config=True))
def test_example_of_every_setting_is_accepted(name: str) -> None:
    example = FGPU.class_traits()[name].help.partition("Example")[2]
    lines = inspect.cleandoc(example.partition(":\n")[2]) if "\n" in example else example.strip(": `")
    own = FGPU.from_config(config_of(lines))
    if name not in ("nodes", "groups", "policies", "quotas", "reclaim", "presets"):
        # These name other nodes and groups than there are, and files.
        own.checked()
    assert getattr(own, name) != FGPU.class_traits()[name].default() or name == "service_ip"


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"fgpu_per_gpu": 5},
        {"fgpu_per_gpu": "2.5", "fgpu_step": "0.25"},
        {"fgpu_per_gpu": {"*A100*": 10, "*": 2}},
        {"fgpu_per_gpu": 1, "fgpu_step": 1},
        {"nodes": TWO_NODES, "groups": TWO_GROUPS},
        {"nodes": [{"name": "a", "gpus": ["GPU-1", "GPU-2"]}]},
        {"simulated_gpus": "0"},
        {"simulated_gpus": "9999"},
        {"max_fgpu": 2, "max_cpu": "1.5", "max_memory_mib": 128, "default_fgpu": 1, "default_cpu": 1},
        {"resume_grace_s": 0, "service_port": 1},
        {"service_port": 65535, "queue_timeout_s": 1},
        {**node(engine="ssh://u@[fd00::2]", address="10.0.0.2"), "hub_address": "10.0.0.1"},
    ],
    ids=str,
)
def test_good_settings_are_accepted_and_reach_the_service(good: dict[str, Any]) -> None:
    settings = made(**good)
    for name, value in good.items():
        assert getattr(settings, name) == value
    again = FGPU.from_json(settings.to_json()).checked()
    assert json.loads(again.to_json()) == json.loads(settings.to_json())


# --- What the scheduler is given ---


def test_configured_nodes_become_nodes_with_exact_amounts() -> None:
    settings = made(nodes=TWO_NODES, groups=TWO_GROUPS, fgpu_per_gpu={"*16160*": 5, "*": 2})
    a, b = settings.discover_nodes()
    assert (a.id, a.resource_group, a.cpu_milli, a.memory_mib) == ("a", "default", 4000, 8192)
    assert (b.id, b.resource_group, b.cpu_milli, b.memory_mib) == ("b", "class", 1500, 4096)
    assert [
        (d.uuid, d.index, d.memory_mib, d.capacity_milli, d.simulated) for d in (*a.devices, *b.devices)
    ] == [
        ("GPU-simulated-a-0", 0, 8192, 2000, True),
        ("GPU-simulated-a-1", 1, 8192, 2000, True),
        ("GPU-simulated-b-0", 0, 16160, 5000, True),
    ]


def test_a_fraction_of_a_core_is_exact() -> None:
    # 1000 * 1.005 is 1004.9999999999999.
    settings = made(nodes=[{"name": "a", "cpu": 1.005, "memory_mib": 1024, "gpus": {"simulated": 1}}])
    assert settings.discover_nodes()[0].cpu_milli == 1005


def test_whole_number_may_be_written_as_a_float() -> None:
    lab = {"name": "a", "cpu": 4.0, "memory_mib": 512.0, "gpus": {"simulated": 2.0, "memory_mib": 8192.0}}
    settings = made(nodes=[lab], max_memory_mib=512.0, max_sessions=3.0)
    (node,) = settings.discover_nodes()
    assert (repr(node.memory_mib), [repr(d.memory_mib) for d in node.devices]) == ("512", ["8192", "8192"])
    assert (repr(settings.max_memory_mib), repr(settings.max_sessions)) == ("512", "3")


@pytest.mark.parametrize("count", ["3", 3, 3.0])
def test_this_machine_is_the_one_node_where_none_is_configured(count: object) -> None:
    (node,) = made(simulated_gpus=count).discover_nodes()
    assert (node.id, node.resource_group, len(node.devices)) == ("local", "default", 3)
    assert node.cpu_milli == 1000 * (os.cpu_count() or 1)
    assert node.memory_mib > 0


def discovered(**settings: Any) -> tuple[Node, ...]:
    try:
        return made(**settings).discover_nodes()
    except ProbeFailed as e:  # pragma: no cover - a machine with a broken driver
        pytest.skip(f"this machine's GPUs cannot be read: {e}")


def test_auto_simulates_one_gpu_on_a_machine_without_gpus() -> None:
    real = discovered(simulated_gpus="0")[0].devices
    assert not any(d.simulated for d in real)
    auto = discovered(simulated_gpus="auto")[0].devices
    assert (
        auto == real if real else [(d.uuid, d.simulated) for d in auto] == [("GPU-simulated-local-0", True)]
    )


def test_unknown_gpu_of_a_node_is_refused() -> None:
    settings = made(nodes=[{"name": "a", "gpus": ["GPU-none"]}], simulated_gpus="1")
    with pytest.raises(BadSettings) as caught:
        settings.discover_nodes()
    assert str(caught.value) == (
        "c.FGPU.nodes: node 'a' names GPU GPU-none, which NVML does not report; it has GPU-simulated-a-0"
    )


def test_gpu_of_two_nodes_is_refused() -> None:
    settings = made(nodes=[{"name": "a"}, {"name": "b"}], simulated_gpus="1")
    with pytest.raises(BadSettings) as caught:
        settings.discover_nodes()
    assert str(caught.value) == (
        "c.FGPU.nodes: GPU GPU-simulated-a-0 is on two nodes; list each node's GPUs by their UUIDs"
    )


def test_a_model_without_a_pattern_is_refused() -> None:
    with pytest.raises(BadSettings) as caught:
        made(fgpu_per_gpu={"*A100*": 10}, simulated_gpus="1").discover_nodes()
    assert str(caught.value) == ("c.FGPU.fgpu_per_gpu has no pattern for 'Simulated GPU 8192 MiB'; add \"*\"")


def test_the_first_pattern_that_matches_decides() -> None:
    settings = made(fgpu_per_gpu={"*A100*80GB*": 10, "*A100*": 5, "*": 2})
    models = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "Tesla T4")
    assert [format_milli(settings.capacity_milli(model)) for model in models] == ["10", "5", "2"]


def test_limits_on_a_request_are_what_is_set() -> None:
    assert made().caps() == Caps(fgpu_step_milli=100, max_count=8, max_pending_per_user=16)
    limited = made(
        fgpu_step="0.25",
        max_fgpu=2,
        max_cpu="1.5",
        max_memory_mib=4096,
        max_sessions=3,
        max_pending_per_user=4,
    )
    assert limited.caps() == Caps(250, 2000, 1500, 4096, 3, 4)


@pytest.mark.parametrize(
    ("user", "hub_groups", "expected"),
    [
        ("alice", [], ("default",)),
        ("alice", ["ml101"], ("default", "class")),
        ("zoe", [], ("default", "class")),
        ("zoe", ["other"], ("default", "class")),
    ],
)
def test_resource_groups_are_open_to_their_users_and_hub_groups(
    user: str, hub_groups: list[str], expected: tuple[str, ...]
) -> None:
    assert made(nodes=TWO_NODES, groups=TWO_GROUPS).groups_of(user, hub_groups) == expected


def test_addresses_follow_from_the_settings(tmp_path: Path) -> None:
    settings = made(data_dir=str(tmp_path), service_ip="10.0.0.1", service_port=1234)
    assert settings.database_url() == f"sqlite:///{tmp_path}/fgpu.sqlite"
    assert settings.service_url() == "http://10.0.0.1:1234/services/fgpu/"
    given = made(db_url="sqlite:////srv/x.sqlite", service_url_for_sessions="http://hub/services/fgpu/")
    assert given.database_url() == "sqlite:////srv/x.sqlite"
    assert given.service_url() == "http://hub/services/fgpu/"


# --- What is not known before it is tried ---


@pytest.mark.parametrize(
    ("url", "line"),
    [
        (
            "not a url, s3cret",
            "c.FGPU.db_url: the database URL cannot be read; one is sqlite:////srv/fgpu.sqlite",
        ),
        (
            "mysql+nothing://fgpu:s3cret@h/x",
            "c.FGPU.db_url: the database may be SQLite or PostgreSQL, and not mysql",
        ),
    ],
)
def test_a_bad_database_url_is_refused_without_being_shown(url: str, line: str) -> None:
    with pytest.raises(BadSettings) as caught:
        Store(made(db_url=url).database_url())
    assert str(caught.value) == line


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "data", "Not a directory")):
        with pytest.raises(BadSettings, match=f"^c.FGPU.data_dir: {folder} cannot be made: {why}$"):
            make_data(folder)


AS_NOBODY = """
import os, sys
from pathlib import Path
from fgpu_scheduler import BadSettings
from fgpuspawner.config import make_data

if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
try:
    make_data(Path(sys.argv[1]))
except BadSettings as e:
    sys.exit(str(e))
"""


def test_a_data_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    # In a process of its own: root, who may run the tests, can write everywhere.
    folder = Path("/tmp") / f"fgpu-test-{os.getpid()}"
    folder.mkdir(mode=0o555)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        )
    finally:
        folder.rmdir()
    line = f"c.FGPU.data_dir: {folder} cannot be written to by the Hub's user\n"
    assert (ended.returncode, ended.stderr) == (1, line)


def test_resource_groups_have_own_policies_and_rules() -> None:
    own = made(
        nodes=TWO_NODES,
        groups=TWO_GROUPS,
        policies={"*": {"order": "lifo"}, "class": {"order": "drf", "longest_wait_s": 3600}},
        reclaim={
            "*": {"idle_after_s": 900},
            "class": {"max_lifetime_s": 7200, "preempt": True, "min_runtime_s": 1800, "keep_s": 60},
        },
    )
    policy, rules = own.policy(), own.rules()
    assert policy.of("default") == group_policy(order="lifo")
    of_class = group_policy(order="drf", longest_wait_s=3600)
    assert policy.of("class") == replace(of_class, max_lifetime_s=7200)
    assert rules.of("default") == Rules(idle_after_s=900)
    assert rules.of("class") == Rules(max_lifetime_s=7200, preempt=True, min_runtime_s=1800)
    assert (own.keep_s("default"), own.keep_s("class")) == (1800, 60)


def test_accounts_are_read_into_one_tree() -> None:
    own = made(accounts={"science": {"weight": 2.5}, "physics": {"parent": "science", "groups": ["phys"]}})
    by_name = {"science": Account(2.5), "physics": Account(1, "science", ("phys",))}
    assert own.policy() == Policy(group_policy(), accounts=Accounts(by_name))


def test_parking_has_a_default_time_and_needs_memory_of_the_machine() -> None:
    reclaim = {
        "*": {"park": "when needed"},
        "class": {"park": "always", "park_after_s": 60, "parked_for_s": 3600},
    }
    own = made(nodes=TWO_NODES, groups=TWO_GROUPS, reclaim=reclaim, parked_memory_mib=65536)
    assert own.rules().of("default") == Rules(park_after_s=600)
    assert own.rules().of("class") == Rules(park_after_s=60, park_always=True, parked_for_s=3600)


def test_queue_has_no_limits_by_default() -> None:
    own = made()
    assert own.policy() == Policy(group_policy())
    assert made(queue_timeout_s=3600).policy() == Policy(group_policy(longest_wait_s=900))
    assert own.rules().of("default") == Rules(max_lifetime_s=None, idle_after_s=None, preempt=False)
    assert own.quotas_given() == ()
    assert own.priority_of(["staff"]) == 0


def test_quota_of_an_account_has_a_guarantee() -> None:
    own = made(quotas=[{"account": "a", "guaranteed_fgpu": 2, "max_fgpu": "2.5"}], accounts={"a": {}})
    quota = Quota(QuotaScope.ACCOUNT, "a", max_fgpu_milli=2500, guaranteed_milli=2000)
    assert own.quotas_given() == (quota,)


def test_quotas_become_the_schedulers() -> None:
    own = made(
        nodes=TWO_NODES,
        groups=TWO_GROUPS,
        quotas=[
            {"user": "*", "max_fgpu": "2.5", "max_sessions": 4, "max_pending": 8},
            {"hub_group": "ml101", "resource_group": "class", "max_lifetime_s": 7200},
            {"resource_group": "class", "max_sessions": 0},
        ],
    )
    assert own.quotas_given() == (
        Quota(QuotaScope.USER, "*", None, 2500, 4, 8, None),
        Quota(QuotaScope.GROUP, "ml101", "class", max_lifetime_s=7200),
        Quota(QuotaScope.ALL, "*", "class", max_sessions=0),
    )


def test_highest_priority_of_a_users_hub_groups_counts() -> None:
    own = made(max_priority={"staff": 10, "ml101": 2, "*": 1})
    assert [own.priority_of(groups) for groups in ([], ["ml101"], ["ml101", "staff"], ["x"])] == [1, 2, 10, 1]
