"""A headless chromium with one page, driven by selenium and the system's chromedriver."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

PATIENCE_S = 300.0
"""For what takes a second, on a machine that is busy with something else."""
POLL_S = 0.05
CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # chromium refuses to run as root otherwise; it sees our own page alone
    "--disable-dev-shm-usage",
    "--no-proxy-server",
)


class Browser:
    """One page. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None and CHROMEDRIVER is not None
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for flag in (*_FLAGS, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        # Given its path, selenium downloads no driver.
        driver: Any = Chrome
        self._driver = driver(options, ChromeService(CHROMEDRIVER))
        self._driver.command_executor.client_config.timeout = PATIENCE_S

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()

    @property
    def errors(self) -> list[str]:
        """What the page wrote to the console as an error since the last look, exceptions included."""
        entries: list[dict[str, Any]] = self._driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def open(self, url: str) -> None:
        """Returns when the page has loaded."""
        self._driver.get(url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self._driver.execute_script(f"return {expression}")

    def text(self, selector: str) -> str:
        """The text of the first element that matches; empty if there is none."""
        return str(self.value(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def wait_for(self, selector: str, pattern: str) -> str:
        """Returns the element's text as soon as it matches."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, text := self.text(selector)):
            assert time.monotonic() < deadline, (
                f"{selector}: never {pattern!r}; the page: {self.text('body')}"
            )
            time.sleep(POLL_S)
        return text
