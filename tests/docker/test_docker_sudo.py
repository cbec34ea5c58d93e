"""Becoming root in a session: off unless the image or a group has it, and what it does not open even then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dockerhub import BASE, MINI, DockerHub, Engine, Running, write_catalogue

AS_ROOT = "/usr/bin/as-root"
"""Stands for sudo, which is not in the image that is made without a registry: a shell that is root's, set-user-id."""

CGROUPS = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/cgroup.procs")
"""Of versions 1 and 2: one of them is there."""


@pytest.fixture(scope="module")
def hub(
    make_hub: Callable[..., DockerHub], engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> DockerHub:
    image = engine.build(
        "sudo",
        f"FROM {BASE}\nUSER root\nRUN cp /bin/bash {AS_ROOT} && chmod 4755 {AS_ROOT}\nUSER 1000:1000\n",
    )
    folder = tmp_path_factory.mktemp("catalogue")
    catalogue = write_catalogue(folder, {"python": image, "sudo": image}, "sudo = true\n")
    after = MINI + "c.JupyterHub.load_groups = {'staff': {'users': ['bob']}}\n"
    return make_hub(after=after, catalogue=catalogue, sudo_groups=["staff"]).start()


def as_root(engine: Engine, running: Running, command: str) -> tuple[int, str]:
    return engine.run_in(running.id, AS_ROOT, "-p", "-c", command)


def test_set_user_id_program_gives_nothing_without_sudo(hub: DockerHub, engine: Engine) -> None:
    alice = hub.running("alice")
    assert as_root(engine, alice, "id -u")[1].strip() == "1000"
    assert alice.host["SecurityOpt"] == ["no-new-privileges"]
    assert not alice.host["CapAdd"]
    hub.end("alice")


@pytest.mark.parametrize("by", ["image", "group"])
def test_sudo_gives_root_within_the_isolation(hub: DockerHub, engine: Engine, by: str) -> None:
    user = "bob" if by == "group" else "alice"
    bob = hub.running(user, image="python" if by == "group" else "sudo")
    status, said = as_root(engine, bob, "id -u; echo package > /usr/lib/new && chown 33:33 /usr/lib/new")
    assert (status, said.split()[0]) == (0, "0"), said
    assert bob.host["CapDrop"] == ["ALL"]
    assert sorted(bob.host["CapAdd"]) == ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID"]
    # What holds the session to its slice is mounted, and root here may not mount.
    for command in (
        "umount /etc/ld.so.preload",
        "mount -t tmpfs none /mnt",
        "echo 'fgpu-limits 1' > /run/fgpu/limits",
        "rm -f /run/fgpu/limits",
        "mknod /tmp/device b 8 0",
        f"for own in {' '.join(CGROUPS)}; do [ -e $own ] && echo 99999999999 > $own && exit 0; done; exit 1",
        "echo 1 > /proc/sys/kernel/panic",
    ):
        status, said = as_root(engine, bob, f"{command} 2>&1")
        assert status != 0, f"{command}: {said}"
    assert "fgpu-limits" in as_root(engine, bob, "cat /run/fgpu/limits")[1]
    hub.end(user)
