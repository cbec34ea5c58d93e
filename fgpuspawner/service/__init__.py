"""The managed Hub service ``fgpu``: REST, event stream, first page, and the resume of waiting requests.

It reads the scheduler's database, and writes to it what the owner of an idle session wishes: to keep it. Sessions are
ended through the Hub's own API, with the caller's own rights but for who administers their resource group.
"""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""Scripts and styles. The Hub's pages have the header of them."""
