"""Fixtures that open pages in Chromium, without a window and without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

APP = "document.querySelector('.explorer').explorer"  # the interactive views of a page
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Opened:
    """A page in the browser, with its console messages and errors, and the URLs that it requested."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("Chromium is missing; install the package chromium")
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    opener = OpenPage(browser)
    yield opener
    opener.close()


class OpenPage:
    """Opens files in fresh pages and waits until their interactive views are drawn."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts = []

    def __call__(
        self,
        path: Path,
        *,
        hash_text: str = "",
        size: tuple[int, int] = (1300, 1000),
        scheme: str = "light",
        init_script: str = "",
    ) -> Opened:
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if scheme == "dark" else "light",
            offline=True,
            permissions=["clipboard-read", "clipboard-write"],
        )
        context.add_init_script(init_script)
        self._contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.messages.append(message.text))
        opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(path.as_uri() + hash_text)
        opened.page.wait_for_selector(".explorer[data-ready]", state="attached")
        return opened

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def evaluate(opened: Opened, code: str, argument: Any = None) -> Any:
    return opened.page.evaluate(code, argument)


def wait_until_drawn(opened: Opened) -> None:
    """Wait until the page has drawn its changes and stored its state in the URL."""
    opened.page.wait_for_timeout(350)


def count_colors(opened: Opened, selector: str) -> int:
    """Return the number of different colors of a canvas."""
    return evaluate(
        opened,
        """selector => {
          const canvas = document.querySelector(selector);
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        }""",
        selector,
    )
