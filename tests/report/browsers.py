"""A headless Chromium for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

__all__ = ["opened_browser"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def opened_browser() -> Iterator[webdriver.Chrome]:
    """A browser, closed afterwards. Where there is none, the test is skipped, except in CI."""
    options = Options()
    options.binary_location = _found(*_BROWSERS)
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_found("chromedriver")))
    yield driver
    driver.quit()


def _found(*names: str) -> str:
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        reason = f"the browser tests need {' or '.join(names)} on the PATH"
        # In CI the browser is installed on purpose; a silent skip would hide that it is gone.
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path
