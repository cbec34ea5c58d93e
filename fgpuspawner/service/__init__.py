"""The managed Hub service ``fgpu``: REST API, event stream, pages, and the resume of waiting requests.

It reads the scheduler's database and writes what people change there. It ends sessions through the Hub's own API, with
the caller's rights; with its own only for an administrator of the session's resource group.
"""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Scripts and styles. The Hub's pages include the header's from here."""
