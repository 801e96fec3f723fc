"""What a user chooses of an application on Ray Serve, checked before anything is started."""

from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from edgellm.errors import OptionError
from edgellm.options import EngineArguments, EngineOptions
from edgellm.serve.options import ServeOptions
from edgellm.store.sources import DEFAULT_MODEL


class Arguments(BaseModel):
    """The arguments of `edgellm.ray:application`.

    Attributes:
        model: as in `edgellm serve MODEL`.
        threads: CPU threads of each replica, which are as many CPUs of Ray's. There is no default:
            how many replicas share a machine is for whoever starts them to say.
        replicas: that answer; each of them loads the model.
        prefill_replicas: beside them, that only compute prompts; 0: each computes its own.
        prefill_min_tokens: a prompt with fewer tokens that are not cached is computed where it is
            answered.
        prefill_timeout_s: after which it is computed where it is answered all the same.
        hand_over_bytes: of KV blocks that a prefill replica keeps in Ray's object store.
        most_ahead: requests that a replica may have more than the least busy one, and still be
            given one whose prefix it has.
        engine: fields of `EngineOptions`, all but `threads`.
        server: fields of `ServeOptions`, all but `port`; `host` is where Ray Serve's proxy listens,
            which is told so by itself. A replica has at most `max_waiting` requests, and as many
            wait for one. `metrics` are one replica's, so they are off unless asked for.

    Raises:
        pydantic.ValidationError: a value that is not allowed, or a name that is not there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = DEFAULT_MODEL
    threads: int = Field(ge=1)
    replicas: int = Field(default=1, ge=1)
    prefill_replicas: int = Field(default=0, ge=0)
    prefill_min_tokens: int = Field(default=256, ge=1)
    prefill_timeout_s: float = Field(default=30, gt=0)
    hand_over_bytes: int = Field(default=512 << 20, ge=1)
    most_ahead: int = Field(default=8, ge=0)
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Check what is inside `engine` and `server`; pydantic makes its own error of theirs."""
        _check_names("engine", self.engine, EngineOptions, "threads")
        _check_names("server", self.server, ServeOptions, "port")
        EngineOptions(**self.engine_arguments)
        _ = self.serve_options

    @property
    def engine_arguments(self) -> EngineArguments:
        return EngineArguments(**{**self.engine, "threads": self.threads})  # type: ignore[typeddict-item]

    @property
    def serve_options(self) -> ServeOptions:
        lists = {name: tuple(v) for name, v in self.server.items() if isinstance(v, list)}
        return ServeOptions(**{"metrics": False, **self.server, **lists})


def _check_names(
    name: str, given: dict[str, Any], options: type[EngineOptions | ServeOptions], *without: str
) -> None:
    """Refuse fields that options do not have, or that are not to be given here."""
    allowed = sorted({field.name for field in fields(options)} - set(without))
    wrong = sorted(set(given) - set(allowed))
    if wrong:
        raise OptionError(
            f"`{name}` has {', '.join(wrong)}; allowed are {', '.join(allowed)}"
            + (" (`threads` stands beside it)" if "threads" in wrong else "")
        )
