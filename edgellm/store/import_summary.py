"""How a precision's weights came into the bundle, as people are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.graphs.typed_json import parse
from edgellm.store.manifest import Manifest


@dataclass(frozen=True)
class ImportSummary:
    """What an `ImportReport` came to; norms and biases, always exact, are left out.

    Attributes:
        mean_relative_error, worst_relative_error: of the matrices that were rounded again.
        file_bytes, decode_bytes: size of the matrices that a decode step reads, in the file and
            packed; 0 where that is not known.
        taken: how many matrices the file holds in a type and the bundle in a kind, by both.
    """

    exact_tensors: int = 0
    requantized_tensors: int = 0
    mean_relative_error: float = 0.0
    worst_tensor: str | None = None
    worst_relative_error: float = 0.0
    file_bytes: int = 0
    decode_bytes: int = 0
    taken: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ImportSummary:
        """The summary in a manifest.

        Raises:
            ModelFormatError: a value has another type.
        """
        return parse(cls, dict(values), where="import_report")

    @property
    def tensors(self) -> int:
        return self.exact_tensors + self.requantized_tensors

    @property
    def storage(self) -> dict[str, int]:
        """How many matrices the file holds in each of its types."""
        return {storage: sum(kinds.values()) for storage, kinds in self.taken.items()}

    @property
    def kinds(self) -> dict[str, int]:
        """How many the bundle holds in each kind."""
        counts: Counter[str] = Counter()
        for kinds in self.taken.values():
            counts.update(kinds)
        return dict(counts)

    def joined(self, other: ImportSummary) -> ImportSummary:
        """The summary of both together."""
        count = self.requantized_tensors + other.requantized_tensors
        sums = (s.mean_relative_error * s.requantized_tensors for s in (self, other))
        worst = max(self, other, key=lambda s: s.worst_relative_error)
        pairs = [s.taken for s in (self, other)]
        return ImportSummary(
            self.exact_tensors + other.exact_tensors,
            count,
            sum(sums) / count if count else 0.0,
            worst.worst_tensor,
            worst.worst_relative_error,
            self.file_bytes + other.file_bytes,
            self.decode_bytes + other.decode_bytes,
            {
                name: dict(sum((Counter(taken.get(name, {})) for taken in pairs), Counter()))
                for name in sorted({*pairs[0], *pairs[1]})
            },
        )

    def __str__(self) -> str:
        """One line."""
        if not self.requantized_tensors:
            return f"all {self.tensors} tensors as in the file"
        return (
            f"{self.exact_tensors} of {self.tensors} tensors as in the file, "
            f"{self.requantized_tensors} rounded again (largest error "
            f"{_percent(self.worst_relative_error)} in {self.worst_tensor})"
        )

    def details(self) -> str:
        """One line with every type and kind, and the mean error too."""
        pairs = [
            f"{count} {storage} as {kind}"
            for storage, kinds in self.taken.items()
            for kind, count in kinds.items()
        ]
        rounded = self.requantized_tensors
        mean = f", mean error {_percent(self.mean_relative_error)}" if rounded else ""
        return f"{self}{mean}{': ' if pairs else ''}{', '.join(pairs)}"


def imported(manifest: Manifest, precision: str) -> ImportSummary:
    """How a precision's weights came in, those of its LM head and embedding among them."""
    entry = manifest.precisions[precision]
    summary = ImportSummary.of(entry.import_report)
    if entry.head is None:
        return summary
    return summary.joined(ImportSummary.of(manifest.heads[entry.head].import_report))


def rounding_notes(manifest: Manifest, precisions: Collection[str]) -> Iterator[str]:
    """A line for each precision whose weights are not all as in the file."""
    for precision in sorted(precisions):
        summary = imported(manifest, precision)
        if summary.requantized_tensors:
            of = "" if len(precisions) == 1 else f" of {precision}"
            yield f"weights{of}: {summary}"


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %"
