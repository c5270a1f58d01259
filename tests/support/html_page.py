"""What a browser would make of a page: its tags, and the addresses it would load."""

import json
from html.parser import HTMLParser
from typing import Any

WITHOUT_END = ("meta", "link", "img", "br")


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.charts: list[Any] = []  # the data of each group of charts
        self.in_data = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_data = dict(attributes).get("type") == "application/json"
        if tag not in WITHOUT_END:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.addresses.append(value or "")

    def handle_data(self, text: str) -> None:
        if self.in_data:
            self.charts.append(json.loads(text))
            self.in_data = False

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
