"""Records that were refused, each with its reason: the run's `quarantine.jsonl`.

Written by `PromptStream` and `read_prompts` while the run goes on. A record is written once for each kind of reason, however
many passes, or resumed runs that read it again, meet it. A refused record is never repaired or replaced.
"""

import json
from collections import Counter
from pathlib import Path

from relax.core.error import DataError
from relax.data.dataset import Refusal

EXCERPT_CHARACTERS = 200


class Quarantine:
    """Lines of {source, index, line, reason, excerpt} in `path`; without a path the refusals are only counted."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._opened = False
        self._seen: set[tuple[str, int, str]] = set()
        self._reasons: dict[str, Counter[str]] = {}
        self._examples: dict[tuple[str, str], str] = {}

    def open(self) -> None:
        """Read what an earlier run wrote and prove that more can be written. Raises DataError when it cannot."""
        if self._opened or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8") as file:
                file.seek(0)
                lines = file.read().splitlines(keepends=True)
                if lines and not lines[-1].endswith("\n"):
                    file.write("\n")  # a crash tore the last line; what follows starts on its own
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"cannot write refused records to {str(self._path)!r}: {error};"
                " make the run directory writable or choose another with run.directory"
            ) from error
        for line in lines:
            try:
                entry = json.loads(line)
                source, index = entry["source"], entry["index"]
                reason, _, detail = entry["reason"].partition(": ")
            except (ValueError, TypeError, KeyError):
                continue  # the torn line: its record is refused and written again
            self._count(source, index, reason, detail)
        self._opened = True

    def add(self, source: str, index: int, line: str | None, refusal: Refusal, excerpt: str) -> bool:
        """Keep a refused record. False when it was here before for that kind of reason, also in an earlier run.

        Another reason at the same place is another line: the data set was changed, or a limit (see `data.accept_changes`).
        """
        self.open()
        if (source, index, refusal.reason) in self._seen:
            return False
        self._count(source, index, refusal.reason, refusal.detail)
        entry = {
            "source": source,
            "index": index,
            "line": line,
            "reason": str(refusal),
            "excerpt": excerpt[:EXCERPT_CHARACTERS],
        }
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                raise DataError(f"cannot write a refused record to {str(self._path)!r}: {error}") from error
        return True

    def reasons(self, source: str) -> dict[str, int]:
        """How many records of a source were refused, by reason."""
        return dict(self._reasons.get(source, {}))

    def summary(self, source: str) -> str:
        """The reasons of a source with their counts and one example each, in one line."""
        counts = self._reasons.get(source, Counter())
        return "; ".join(
            f"{count} x {reason} (e.g. {self._examples[source, reason]})" for reason, count in counts.most_common()
        )

    def _count(self, source: str, index: int, reason: str, detail: str) -> None:
        self._seen.add((source, index, reason))
        self._reasons.setdefault(source, Counter())[reason] += 1
        self._examples.setdefault((source, reason), detail)
