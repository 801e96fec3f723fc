"""Options of an application on Ray Serve, checked before any replica is started."""

from dataclasses import fields
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from edgellm.errors import OptionError
from edgellm.llm import LoadArguments
from edgellm.options import EngineArguments, EngineOptions
from edgellm.serve.options import ServeOptions
from edgellm.store.sources import DEFAULT_MODEL


class Arguments(BaseModel):
    """The arguments of `edgellm.ray:application`.

    Attributes:
        model: model name, as in `edgellm serve MODEL`.
        threads: CPU threads of each replica, which reserves as many CPUs in Ray. There is no
            default: only the user knows how many replicas share a machine.
        replicas: number of replicas that answer requests; each of them loads the model.
        prefill_replicas: number of further replicas that only compute prompts; 0: each replica
            computes its own.
        prefill_min_tokens: minimum of tokens of a prompt, cached ones aside, for a prefill replica;
            a shorter one is computed by the replica that answers.
        prefill_timeout_s: seconds to wait for a prefill replica before the replica that answers
            computes the prompt itself.
        hand_over_bytes: bytes of KV blocks that a prefill replica keeps in Ray's object store.
        most_ahead: number of requests that a replica may have more than the least busy one, and
            still be given a request whose prefix it has.
        engine: fields of `EngineOptions`, all but `threads`.
        adapters: adapters (LoRA) that clients may name as their model: name to path, or to path and
            scale. Each replica reads them there.
        server: fields of `ServeOptions`, all but `port`; `host` is the address of Ray Serve's
            proxy, which has to be configured separately. A replica has at most `max_waiting`
            requests, and as many wait for one. `metrics` are one replica's, so they are off unless
            asked for.

    Raises:
        pydantic.ValidationError: a value is not allowed, or a name is unknown.
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
    adapters: dict[str, str | tuple[str, float]] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Check the fields in `engine` and `server`; pydantic turns errors into its own."""
        _check_names("engine", self.engine, EngineOptions, "threads")
        _check_names("server", self.server, ServeOptions, "port")
        EngineOptions(**self.engine_arguments)
        _ = self.serve_options

    @property
    def engine_arguments(self) -> EngineArguments:
        return EngineArguments(**{**self.engine, "threads": self.threads})  # type: ignore[typeddict-item]

    @property
    def load_arguments(self) -> LoadArguments:
        """Arguments of the replicas that answer; those that compute prompts have no adapters."""
        return cast(LoadArguments, {**self.engine_arguments, "adapters": self.adapters})

    @property
    def serve_options(self) -> ServeOptions:
        lists = {name: tuple(v) for name, v in self.server.items() if isinstance(v, list)}
        return ServeOptions(**{"metrics": False, **self.server, **lists})


def _check_names(
    name: str, given: dict[str, Any], options: type[EngineOptions | ServeOptions], *without: str
) -> None:
    """Refuse names that are no fields of `options`, or are among `without`.

    Raises:
        OptionError: the message names them.
    """
    allowed = sorted({field.name for field in fields(options)} - set(without))
    wrong = sorted(set(given) - set(allowed))
    if wrong:
        raise OptionError(
            f"`{name}` has {', '.join(wrong)}; allowed are {', '.join(allowed)}"
            + (" (`threads` stands beside it)" if "threads" in wrong else "")
        )
