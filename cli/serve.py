"""`edgellm serve`: models over HTTP, for the clients that people already use."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from edgellm import LoadArguments
from edgellm.cli.config import Config
from edgellm.cli.options import (
    Command,
    draft_options,
    load_options,
    lora_options,
    option_of,
    over_file,
)
from edgellm.cli.progress import progress_bar
from edgellm.errors import OptionError
from edgellm.options import NO_DRAFT
from edgellm.progress import ProgressCallback
from edgellm.serve import ServeOptions

if TYPE_CHECKING:
    from edgellm.serve import ServedModel

_MIB = 1 << 20
_field = functools.partial(option_of, ServeOptions)


def serve_options(command: Command) -> Command:
    """Add options for a server's behaviour to a command; passed on as `options`."""

    @_field(
        "host",
        "Address, or the path of a Unix socket (*.sock). Others than this machine need a key.",
    )
    @_field("port", "0 takes a free one.")
    @click.option(
        "--api-key", "api_keys", multiple=True, envvar="EDGELLM_API_KEY",
        help="A key that clients have to send; may be repeated. Others of this machine can see it: "
        "--api-key-file and the variable EDGELLM_API_KEY hide it.",
    )  # fmt: skip
    @click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Keys, one in a line.",
    )
    @_field("insecure", "Let others than this machine in without a key.")
    @click.option(
        "--allow-host", "allowed_hosts", multiple=True, metavar="NAME",
        help="A name of this machine that requests may give as Host; may be repeated.",
    )  # fmt: skip
    @click.option(
        "--allow-origin", "allowed_origins", multiple=True, metavar="ORIGIN",
        help="A web page that may call the server, as https://app.example; may be repeated.",
    )  # fmt: skip
    @_field("max_waiting", "Requests that may wait for their first token; more get 503.")
    @_field("max_waiting_tokens", "Prompt tokens that may wait; a request beyond them gets 503.")
    @_field("max_tokens", "Tokens of an answer at most.  [default: the context]")
    @_field("max_n", "Answers to one prompt.")
    @_field("time_limit_ms", "Time of an answer, from the arrival of its request.")
    @_field("max_body_bytes", "Size of a request at most.")
    @_field("read_timeout_s", "Time in which a request has to arrive.")
    @_field("write_timeout_s", "Time in which a client has to read on.")
    @_field("heartbeat_s", "Time between comments in streams that have nothing to say.")
    @_field("grace_s", "Time for answers to end, after the first Ctrl-C or SIGTERM.")
    @click.option(
        "--memory-limit-mib", type=int,
        help="Memory of all loaded models, as estimated.  [default: what is available]",
    )  # fmt: skip
    @click.option(
        "--idle-unload-s",
        type=float,
        help="Time without a request until a model is unloaded.",
    )
    @click.option(
        "--any-model",
        is_flag=True,
        help="Take the first MODEL for any name that is not served, as programs with a fixed name "
        "need it.",
    )
    @click.option(
        "--pin", "pinned", multiple=True, metavar="MODEL",
        help="Never unload this MODEL to make room for others; may be repeated.",
    )  # fmt: skip
    @click.option(
        "--manage-models", is_flag=True,
        help="Let clients add models (POST /api/pull) and drop them (DELETE /api/delete).",
    )  # fmt: skip
    @_field("pooling", "Pooling of a text's token states into its embedding.")
    @_field("metrics", "GET /metrics.")
    @_field("cache_reuse", "Tokens of a suffix worth copying behind a change (llama.cpp's).")
    @click.option(
        "--log-requests", is_flag=True,
        help="A line on stderr for each request: how it ended and what it took, nothing of its "
        "text.",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(
        *,
        api_keys: tuple[str, ...],
        api_key_file: Path | None,
        **given: Any,
    ) -> Any:
        given["api_keys"] = (*api_keys, *_keys(api_key_file))
        options = ServeOptions(**{each.name: given.pop(each.name) for each in fields(ServeOptions)})
        return command(options=options, **given)

    return wrapped


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@serve_options
@draft_options
@lora_options
@click.option(
    "--manage-adapters", is_flag=True,
    help="Let clients add adapters of this machine's files and drop them (POST "
    "/v1/load_lora_adapter, /v1/unload_lora_adapter).",
)  # fmt: skip
@load_options
def serve(
    *,
    models: tuple[str, ...],
    config: Config,
    options: ServeOptions,
    memory_limit_mib: int | None,
    idle_unload_s: float | None,
    any_model: bool,
    pinned: tuple[str, ...],
    manage_models: bool,
    manage_adapters: bool,
    log_requests: bool,
    load_arguments: LoadArguments,
) -> None:
    """Serve MODEL... over HTTP: OpenAI's API, and others.

    The first MODEL is loaded at once and answers requests that name none, the others when they are
    asked for. MODEL is as in `edgellm run`; ID=MODEL lets clients call it ID. Where memory does not
    hold all of them, they take turns. Clients name an adapter of --lora as their model; it changes
    the first MODEL.
    """
    try:
        from edgellm.serve import ModelPool, served_model
        from edgellm.serve import serve as run_server
    except ImportError as error:
        raise OptionError(
            f"serving needs starlette and uvicorn, which cannot be imported ({error}); install "
            "them with: pip install starlette uvicorn llguidance"
        ) from None
    limit = None if memory_limit_mib is None else memory_limit_mib * _MIB
    if limit is not None:
        load_arguments = {**load_arguments, "memory_limit_bytes": limit}
    with progress_bar() as progress:
        served = _served(models, pinned, config, load_arguments, progress)

        others = load_arguments.copy()
        others.pop("adapters", None)  # those of the first model

        def pulled(name: str, progress: ProgressCallback) -> ServedModel:
            return served_model(name, others, id=name, progress=progress)

        pool = ModelPool(
            served,
            memory_limit_bytes=limit,
            idle_unload_s=idle_unload_s,
            any_model=any_model,
            pull=pulled if manage_models else None,
            manage_adapters=manage_adapters,
        )
        for model in served:
            model.check()
        first = served[0].open()
        pool.put(served[0].id, first)
        ctx_size = first.ctx_size
        del first  # the pool unloads it

        def started(address: str) -> None:
            names = ", ".join([*pool.ids, *pool.adapters.all])
            click.echo(
                f"serving {names} at {address} (context {ctx_size}, Ctrl-C ends)",
                err=True,
            )

        def stopping(count: int) -> None:
            answers = "1 answer" if count == 1 else f"{count} answers"
            click.echo(
                f"waiting for {answers}, {options.grace_s:g} s at most (Ctrl-C again ends at once)",
                err=True,
            )

        with _requests_on_stderr() if log_requests else nullcontext():
            run_server(pool, options, started=started, stopping=stopping)


def _served(
    models: tuple[str, ...],
    pinned: tuple[str, ...],
    config: Config,
    load_arguments: LoadArguments,
    progress: ProgressCallback,
) -> list[ServedModel]:
    """Return the models to serve, those of the configuration file where none is named.

    Raises:
        OptionError: one is to be pinned that is not served, or one draft is given to several.
    """
    from edgellm.serve import served_model, split_id

    names = models or config.serve or (config.default,)
    if load_arguments.get("draft", NO_DRAFT) != NO_DRAFT and len(names) > 1:
        raise OptionError(
            f"--draft guesses for one model, and {len(names)} are served; give each its `draft` in "
            "edgellm.toml"
        )

    load_arguments = load_arguments.copy()
    given = load_arguments.pop("adapters", None)
    of_first: LoadArguments = {"adapters": given} if given else {}
    served: list[ServedModel] = []
    for name in names:
        id, source = split_id(name)
        model = config.model(source)
        first = {} if served else of_first
        served.append(
            served_model(
                model.source,
                cast(LoadArguments, over_file(model.arguments, {**load_arguments, **first})),
                id=id or (source if source in config.models else None),
                pinned=model.pinned,
                progress=progress,
            )
        )
    ids = [model.id for model in served]
    for name in set(pinned) - set(ids):
        raise OptionError(f"--pin {name}: served are {', '.join(ids)}")
    return [replace(each, pinned=each.pinned or each.id in pinned) for each in served]


@contextmanager
def _requests_on_stderr() -> Iterator[None]:
    """Write the server's log of requests to stderr."""
    log, lines = logging.getLogger("edgellm.requests"), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(lines)


def _keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"`api_key_file` {path}: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise OptionError(f"`api_key_file` {path}: there is no key in it")
    return keys
