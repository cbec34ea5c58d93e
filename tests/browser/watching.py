"""Browser faults that a user would not see."""

from __future__ import annotations

import re

from playwright.sync_api import BrowserContext, ConsoleMessage, Request, Response

# Known faults of other projects' code, with the project: a regular expression of "kind address text".
ALLOWED = (
    # A request, or an event stream, that was cut because its page was left or closed it. Not a fault.
    r"failed .* net::ERR_ABORTED$",
    # JupyterLab asks for all kernels while one is made, and Jupyter Server 2.21 has it in its list a turn of its loop
    # before it has noted its last activity: its list_kernels raises a TraitError. Lab asks again.
    r"(status GET|console) \S+/api/kernels\?\S* .*\b500\b",
)


class Faults:
    """Faults of one test's pages: console errors, exceptions, failed and refused requests."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._allowed = [re.compile(a, re.DOTALL) for a in ALLOWED]

    def allow(self, pattern: str) -> None:
        """Expect this in the test at hand."""
        self._allowed.append(re.compile(pattern, re.DOTALL))

    def watch(self, context: BrowserContext) -> None:
        """Take note of everything in this context from now on."""
        context.on("console", self._console)
        context.on("weberror", lambda e: self.found.append(f"exception {e.page and e.page.url} {e.error}"))
        context.on("requestfailed", self._failed)
        context.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.found.append(f"console {message.location['url']} {message.text}")

    def _failed(self, request: Request) -> None:
        self.found.append(f"failed {request.method} {request.url} {request.failure}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.found.append(f"status {response.request.method} {response.url} {response.status}")

    def unexpected(self) -> list[str]:
        """Return the faults that the test did not allow."""
        return [f for f in self.found if not any(a.match(f) for a in self._allowed)]
