"""That the look for accessibility finds what is wrong, on a page with a policy that forbids scripts."""

from __future__ import annotations

import pytest
from axe import check_page
from playwright.sync_api import Browser

POLICY = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\">"
GOOD = "<!doctype html><html lang=en><head>{}<title>t</title></head><body><main><h1>h</h1>{}</main></body></html>"


def test_axe_finds_a_missing_label(chromium: Browser) -> None:
    page = chromium.new_page()
    page.set_content(GOOD.format(POLICY, "<input id=a><label for=a>A</label>"))
    check_page(page)
    page.set_content(GOOD.format(POLICY, "<input id=a><p id=b>B</p>"))
    with pytest.raises(AssertionError, match=r"critical label: .*(\n.*)*<input id=\"a\">"):
        check_page(page)
    check_page(page, within="#b")
    page.close()
