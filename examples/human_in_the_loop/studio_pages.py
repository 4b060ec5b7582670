"""The studio's pages as a browser uses them: it signs in, reads items from the HTML, and sends what a key press sends."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx

_AT_ONCE = 10


@dataclass
class Item:
    """An item of a queue, as the page shows it.

    Attributes:
        attributes: of the article: ids, and what an answer must send back.
        question: the texts before the answers.
        answers: the model's texts; those of a ranking in the order of their letters.
    """

    attributes: dict[str, str]
    question: str = ""
    answers: list[str] = field(default_factory=list)
    seen_at: float = field(default_factory=time.monotonic)


class StudioPages:
    """A signed-in reader of a studio.

    Args:
        address: the one-time address that the studio has printed.
    """

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(
            base_url=httpx.URL(address).join("/"),
            headers={"Sec-Fetch-Site": "same-origin"},
            timeout=60,
            trust_env=False,
        )
        self._client.get(address).raise_for_status()
        body = self._client.get("/review").text
        found = re.search(r'data-token="([^"]+)" data-identity="([^"]+)"', body)
        if found is None:
            raise RuntimeError("the page has no token: its reader is not signed in")
        self._client.headers.update({"X-Studio-Token": found[1], "X-Studio-Identity": found[2]})

    def __enter__(self) -> StudioPages:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def reviews(self) -> list[Item]:
        """Return the reviews that wait, the most urgent first."""
        return self._items(self._client.get("/review/items", params={"count": _AT_ONCE}))

    def claimed(self, kind: str) -> Iterator[Item]:
        """Yield the items of a kind's queue, claimed a few at a time, until none is left."""
        while items := self._items(self._client.post(f"/label/{kind}/claim", data={"count": str(_AT_ONCE)})):
            yield from items

    def answer(self, queue: str, item: Item, **fields: str) -> None:
        """Send an answer to an item of a queue (`/review`, `/label/KIND`)."""
        sent = {
            "reason": "",
            **fields,
            "item": item.attributes["data-item-id"],
            "seen": item.attributes.get("data-seen", ""),
            "version": item.attributes.get("data-version", ""),
            "shown": item.attributes.get("data-shown", ""),
            "seconds": f"{time.monotonic() - item.seen_at:.1f}",
            "key": str(uuid.uuid4()),
        }
        answer = self._client.post(f"{queue}/answer", data=sent, headers={"Accept": "application/json"})
        if answer.is_error:
            raise RuntimeError(f"the studio refuses the answer to item {sent['item']}: {answer.text}")

    def _items(self, answer: httpx.Response) -> list[Item]:
        answer.raise_for_status()
        reader = _ItemReader()
        reader.feed(answer.text)
        return reader.items


class _ItemReader(HTMLParser):
    """Reads articles and the texts of their chats."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self._is_of_model = False
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        classes = values.get("class", "").split()
        if tag == "article":
            self.items.append(Item(values))
        elif tag == "section" and "part" in classes:
            self._is_of_model = "of-model" in classes
        elif tag == "div" and "model-text" in classes:
            self._text = []

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag != "div" or self._text is None:
            return
        text, self._text = "".join(self._text), None
        if self._is_of_model:
            self.items[-1].answers.append(text)
        else:
            self.items[-1].question += text
