"""Models on the Hugging Face hub: their names, and the repository files to download.

hf:org/repo[@revision]              config.json, safetensors, tokenizer and templates
hf:org/repo[@revision]!file.gguf    one GGUF file, all parts of it
hf:org/repo[@revision]:Q4_K_M       the GGUF file with this quantization in its name

Downloaded files stay in the hub's own cache (HF_HOME) and serve without a network.
"""

from __future__ import annotations

import glob
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from edgellm.errors import EdgeLLMError, SourceError, first_line
from edgellm.graphs.config import ModelConfig
from edgellm.graphs.gguf_file import parts_of
from edgellm.progress import Progress, ProgressCallback

# Patterns of the files of a Hugging Face folder that an export reads.
SETTINGS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
WEIGHTS = ("*.safetensors",)
_SPEC = re.compile(
    r"(?P<repo>hf:[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(!(?P<file>[^!]+)|:(?P<tag>[\w.-]+))?"
)
# A repository with all weights has one of these files.
_WHOLE = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class HubModel:
    """A parsed `hf:` model name.

    Attributes:
        spec: the whole name.
        repo: the repository, with `hf:` before it.
        revision: a branch, tag or commit; None is the main branch.
        file: a GGUF file of the repository.
        tag: a quantization in the GGUF file's name, in place of `file`.
    """

    spec: str
    repo: str
    revision: str | None
    file: str | None
    tag: str | None

    @classmethod
    def parse(cls, spec: str) -> HubModel | None:
        """Parse a model name; None for a name that is not of the hub."""
        match = _SPEC.fullmatch(spec)
        return None if match is None else cls(spec, **match.groupdict())

    def fetch(
        self,
        *,
        check: Callable[[ModelConfig], object] | None = None,
        progress: ProgressCallback | None = None,
    ) -> tuple[Path, str]:
        """Download the model's files unless they are in the cache.

        Args:
            check: called with the config of a Hugging Face folder before any weights are
                downloaded; may raise an error.
            progress: called for the weights, in threads of `huggingface_hub`, one at a time; None:
                its own bars are shown.

        Returns:
            The folder or GGUF file, and the commit.

        Raises:
            SourceError: no such repository or file, or a failed download.
            ModelFormatError, UnsupportedModelError: config.json, which is read before any weights
                are downloaded, is damaged or of a model that is not supported.
        """
        from edgellm.graphs.safetensors_checkpoint import read_config  # 0.1 s, and rarely needed

        with self._hub_errors():
            names = self._names()
            if self.file or self.tag:
                parts = self._gguf_parts(names)
                folder = self._download(parts, progress)
                return folder / parts[0], folder.name
            if "config.json" not in names or not set(_WHOLE) & set(names):
                raise self._no_checkpoint(names)
            wanted = [name for name in names if _is_wanted(name, SETTINGS)]
            config = read_config(self._download(wanted)).config
            if check is not None:
                check(config)
            wanted += [name for name in names if _is_wanted(name, WEIGHTS)]
            folder = self._download(wanted, progress)
            return folder, folder.name

    @property
    def _id(self) -> str:
        return self.repo.removeprefix("hf:")

    def _names(self) -> list[str]:
        """Return the repository's file names; without the hub, those of the files in the cache."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            # not list_repo_files, which without a network tries for half a minute
            info = HfApi().model_info(self._id, revision=self.revision)
            return sorted(file.rfilename for file in info.siblings or ())
        except Exception as error:  # of HTTP libraries, another one in each huggingface_hub
            if names := self._cached_names():
                return names
            if isinstance(error, HfHubHTTPError):
                raise
            raise SourceError(
                f"{self.spec}: not in the local Hugging Face cache, and the hub cannot be "
                "reached (no network, or HF_HUB_OFFLINE is set)"
            ) from None

    def _cached_names(self) -> list[str]:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
        except CacheNotFound:
            return []
        wanted = self.revision or "main"
        return sorted(
            file.file_path.relative_to(kept.snapshot_path).as_posix()
            for repo in repos
            if (repo.repo_id, repo.repo_type) == (self._id, "model")
            for kept in repo.revisions
            if wanted == kept.commit_hash or wanted in kept.refs
            for file in kept.files
        )

    def _gguf_parts(self, names: Sequence[str]) -> list[str]:
        """Return the GGUF file that `file` or `tag` names, or all parts of it, in order."""
        models = _gguf_models(names)
        if self.file is None:
            tag = re.compile(rf"(?<![a-z0-9]){re.escape(self.tag or '')}(?![a-z0-9_])", re.I)
            matching = [name for name in models if tag.search(name)]
        else:
            matching = [self.file] if self.file in names and self.file.endswith(".gguf") else []
        if len(matching) == 1:
            return [part.as_posix() for part in parts_of(Path(matching[0]))]
        problem = f"stands for {', '.join(matching)}" if matching else "is no GGUF file of it"
        raise SourceError(f"{self.spec}: {self.file or self.tag} {problem}; {self._listed(models)}")

    def _no_checkpoint(self, names: Sequence[str]) -> SourceError:
        models = _gguf_models(names)
        if models:
            return SourceError(f"{self.spec}: a repository of GGUF files; {self._listed(models)}")
        return SourceError(
            f"{self.spec}: the repository has neither config.json with model.safetensors nor GGUF "
            "files; models in other formats must be converted first"
        )

    def _listed(self, models: Sequence[str]) -> str:
        """Return advice for an error: the repository's GGUF files, and names to write for one."""
        if not models:
            return "the repository has none"
        at = "" if self.revision is None else f"@{self.revision}"
        return (
            f"write {self.repo}{at}!{models[0]} or, by a quantization, {self.repo}{at}:Q4_K_M; "
            f"it has {', '.join(models)}"
        )

    def _download(self, names: Sequence[str], progress: ProgressCallback | None = None) -> Path:
        """Download files by their names, and return the folder that they are in."""
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in names]
        count = None if progress is None else _ByteCount(f"downloading {self.spec}", progress)
        folder = snapshot_download(
            self._id,
            revision=self.revision,
            allow_patterns=patterns,
            tqdm_class=None if count is None else count.bars(),
        )
        if count is not None:
            count.end()
        return Path(folder)

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        try:
            yield
        except EdgeLLMError:
            raise
        except Exception as error:  # see `_names`
            raise SourceError(f"{self.spec}: the Hugging Face hub: {first_line(error)}") from None


class _ByteCount:
    """Count of the bytes of a download, reported as they come."""

    def __init__(self, label: str, progress: ProgressCallback) -> None:
        self._label = label
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._total = 0

    def bars(self) -> Any:
        """Make a class of progress bars that draw nothing, of which those of bytes report here."""
        from tqdm import tqdm

        report = self._report

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                self.counts = options.get("unit") == "B"

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                if self.counts:
                    report(int(self.n), int(self.total or 0))

        return Bar

    def _report(self, done: int, total: int) -> None:
        """Report bytes, but not the end: the total grows with each file that is begun."""
        with self._lock:
            if self._done < done < total:
                self._done, self._total = done, total
                self._progress(Progress(self._label, done, total, "bytes"))

    def end(self) -> None:
        if self._total:
            self._progress(Progress(self._label, self._total, self._total, "bytes"))


def _gguf_models(names: Sequence[str]) -> list[str]:
    """Return the GGUF files that are models, not vision projectors; of a split one, the first."""
    return [
        name
        for name in names
        if name.endswith(".gguf")
        and "mmproj" not in Path(name).name
        and parts_of(Path(name))[0] == Path(name)
    ]


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a file; `consolidated` files, weights again, are never wanted."""
    return not name.startswith("consolidated") and any(
        fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns
    )
