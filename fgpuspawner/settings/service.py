"""Where the installation keeps what must survive, its service and pages, and how long things may take."""

from __future__ import annotations

import os
from pathlib import Path

from traitlets import Bool, Integer, List, Unicode

from fgpu_scheduler import BadSettings, Claim
from fgpuspawner.settings.traits import Settings


class ServiceSettings(Settings):
    """The data folder and database, and the managed service ``fgpu``."""

    data_dir = Unicode("data").tag(example='"/var/lib/fgpu"')
    """Folder for everything that must survive: database, limits files, logs, homes."""
    db_url = Unicode().tag(example='"postgresql+psycopg://fgpu:secret@127.0.0.1/fgpu"')
    """SQLAlchemy URL of the scheduler's database; empty: SQLite in ``data_dir``."""
    service_ip = Unicode("127.0.0.1").tag(example='"127.0.0.1"')
    """Address the service ``fgpu`` listens on; with ``runtime="docker"`` the host's on the sessions' network."""
    service_port = Integer(10880, min=1, max=65535).tag(example="10881")
    """Port the service ``fgpu`` listens on."""
    service_url_for_sessions = Unicode().tag(example='"http://172.17.0.1:10880/services/fgpu/"')
    """URL under which sessions reach the service; empty: its own address and port."""
    site_name = Unicode("GPU sessions").tag(example='"Lab GPUs"')
    """Name of this site in the header of all pages. For a logo of your own set ``c.JupyterHub.logo_file``."""
    sessions_may_end_sessions = Bool(True).tag(example="False")
    """Let JupyterLab in a session end its owner's other sessions."""
    notice_command = List(Unicode()).tag(example='["/bin/sh", "/etc/fgpu/notice.sh"]')
    """Program, with its arguments, that notifies owners by mail or chat; empty: none.

    It runs when a session that has waited has started, will end soon, or has ended. docs/operations.md describes
    its input.
    """
    meter_every_s = Integer(10, min=1, max=300).tag(example="5")
    """Seconds between the meter's reports on what sessions hold and use of their GPUs; 1 to 300.

    Readings of the GPUs are at least as often on average, also as ``watchdog_every_s`` and at least every 5 s. Pages
    show the latest. Totals are written to the database once a minute.
    """
    history_days = Integer(365, min=0, max=36500).tag(example="90")
    """Days for which ended sessions and their log are kept; 0: always.

    Use by older sessions still counts for fair shares.
    """

    def database_url(self) -> str:
        """Return the URL of the scheduler's database."""
        return self.db_url or f"sqlite:///{self.data_path() / 'fgpu.sqlite'}"

    def _check_database(self) -> None:
        try:
            Claim(self.database_url())
        except BadSettings as e:
            raise BadSettings(f"c.FGPU.db_url: {e}") from e

    def _check_notice_command(self) -> None:
        for program in self.notice_command[:1]:
            if not (Path(program).is_absolute() and os.access(program, os.X_OK) and Path(program).is_file()):
                raise BadSettings(
                    f"c.FGPU.notice_command begins with {program!r}; it must be the absolute path of a program "
                    "that the Hub may run"
                )

    def data_path(self) -> Path:
        """Return the folder of everything that must survive, absolute."""
        return Path(self.data_dir).absolute()

    def service_url(self) -> str:
        """Return the URL under which sessions reach the service."""
        return self.service_url_for_sessions or f"http://{self.service_ip}:{self.service_port}/services/fgpu/"


class TimeoutSettings(Settings):
    """How long requests wait, launches take, and what a restart of the Hub left is kept."""

    queue_timeout_s = Integer(24 * 3600, min=1).tag(example="3600")
    """Cancel a request that has waited this long, in seconds."""
    launch_timeout_s = Integer(600, min=1).tag(example="900")
    """Longest launch, image pull included, in seconds; then it counts as failed."""
    resume_grace_s = Integer(60, min=0).tag(example="120")
    """Longest pause of the queue after a restart of the Hub, in seconds, while waiting requests are resumed."""
    abandoned_after_s = Integer(900, min=1).tag(example="3600")
    """Cancel a request that was not resumed within this time after a restart, in seconds."""
    end_unknown_sessions = Bool(False).tag(example="True")
    """Whether a start of the Hub ends running sessions that one of its databases, or the engine, does not know.

    If false, sessions that only JupyterHub's database does not know are adopted: they go on, and their owners find them
    after a log-in. If the scheduler's database or the engine does not know them, a setting is wrong: the Hub names it,
    does not begin its work, and ends nothing.
    """
