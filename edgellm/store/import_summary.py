"""Summary for people: how many of a precision's weights are exact and how many rounded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.graphs.typed_json import parse
from edgellm.store.manifest import Manifest


@dataclass(frozen=True)
class ImportSummary:
    """The totals of an `ImportReport`; norms and biases, always exact, are left out.

    Attributes:
        exact_tensors: number of matrices with every value as in the file.
        requantized_tensors: number of matrices that were rounded again.
        mean_relative_error, worst_relative_error: errors of the matrices rounded again.
        worst_tensor: name of the matrix with the largest error; None where all are exact.
        file_bytes, decode_bytes: bytes of matrices that a decode step of one token reads, in the
            file and packed; 0 if not known.
        taken: number of matrices by the file's type and then by the bundle's kind.
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
        """Read the summary in a manifest.

        Raises:
            ModelFormatError: a value has another type.
        """
        return parse(cls, dict(values), where="import_report")

    @property
    def tensors(self) -> int:
        return self.exact_tensors + self.requantized_tensors

    @property
    def storage(self) -> dict[str, int]:
        """Number of matrices by the type that the checkpoint file holds them in."""
        return {storage: sum(kinds.values()) for storage, kinds in self.taken.items()}

    @property
    def kinds(self) -> dict[str, int]:
        """Number of matrices by the kind that the bundle holds them in."""
        counts: Counter[str] = Counter()
        for kinds in self.taken.values():
            counts.update(kinds)
        return dict(counts)

    def joined(self, other: ImportSummary) -> ImportSummary:
        """Return the summary of this one's and `other`'s matrices together."""
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
        """Return the summary as one line of text."""
        if not self.requantized_tensors:
            return f"all {self.tensors} tensors as in the file"
        return (
            f"{self.exact_tensors} of {self.tensors} tensors as in the file, "
            f"{self.requantized_tensors} rounded again (largest error "
            f"{_percent(self.worst_relative_error)} in {self.worst_tensor})"
        )

    def details(self) -> str:
        """Return the summary as one line with the mean error and every type and kind too."""
        pairs = [
            f"{count} {storage} as {kind}"
            for storage, kinds in self.taken.items()
            for kind, count in kinds.items()
        ]
        rounded = self.requantized_tensors
        mean = f", mean error {_percent(self.mean_relative_error)}" if rounded else ""
        return f"{self}{mean}{': ' if pairs else ''}{', '.join(pairs)}"


def imported(manifest: Manifest, precision: str) -> ImportSummary:
    """Return the import summary of a precision's weights, LM head and embedding included."""
    entry = manifest.precisions[precision]
    summary = ImportSummary.of(entry.import_report)
    if entry.head is None:
        return summary
    return summary.joined(ImportSummary.of(manifest.heads[entry.head].import_report))


def rounding_notes(manifest: Manifest, precisions: Collection[str]) -> Iterator[str]:
    """Yield a line for each precision whose weights are not all as in the file."""
    for precision in sorted(precisions):
        summary = imported(manifest, precision)
        if summary.requantized_tensors:
            of = "" if len(precisions) == 1 else f" of {precision}"
            yield f"weights{of}: {summary}"


def _percent(error: float) -> str:
    return f"{100 * error:.2g} %"
