"""Passages of a folder or a file, searched with BM25 (the bm25s library)."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import bm25s

from agents.hover import Passage
from pbkv_ray.errors import ConfigError
from workflows.records import field, records


@dataclass(frozen=True, slots=True)
class Corpus:
    passages: tuple[Passage, ...]
    index: bm25s.BM25

    @classmethod
    def load(cls, place: Path) -> "Corpus":
        """Reads *.txt (the title is the first line) and *.jsonl(.gz) of {title, text}: one file, or those of a folder
        in order of their names.

        Raises ConfigError where there are no passages, InputError for a bad file.
        """
        paths = [place] if place.is_file() else sorted(place.glob("*"))
        passages = tuple(passage for path in paths for passage in _read(path))
        if not passages:
            raise ConfigError(
                f"{place} holds no passages; name a *.txt or *.jsonl(.gz) file of {{title, text}}, or a folder of them"
            )
        index = bm25s.BM25()
        texts = [f"{passage['title']} {passage['text']}" for passage in passages]
        index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
        return cls(passages, index)

    async def search(self, query: str, count: int, without: Collection[str] = ()) -> list[Passage]:
        """The `count` best passages among those sharing a word with the query, less the titles in `without`."""
        return await asyncio.to_thread(self._search, query, count, frozenset(without))

    def _search(self, query: str, count: int, without: frozenset[str]) -> list[Passage]:
        tokens = bm25s.tokenize([query], stopwords="en", return_ids=False, show_progress=False)
        if not tokens[0]:
            return []
        found, scores = self.index.retrieve(tokens, k=min(count, len(self.passages)), show_progress=False)
        best = [self.passages[number] for number, score in zip(found[0], scores[0], strict=True) if score > 0]
        return [passage for passage in best if passage["title"] not in without]


def _read(path: Path) -> list[Passage]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return [
            Passage(title=field(record, "title", path), text=field(record, "text", path)) for record in records(path)
        ]
    if path.suffix == ".txt":
        title, _, text = path.read_text(encoding="utf-8").strip().partition("\n")
        return [Passage(title=title.strip(), text=text.strip())]
    return []
