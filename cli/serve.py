"""`edgellm serve`: models over HTTP, for the clients that people already use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgellm.cli.options import load_options
from edgellm.cli.progress import progress_bar
from edgellm.errors import OptionError
from edgellm.models import DEFAULT_MODEL
from edgellm.options import EngineArguments

if TYPE_CHECKING:
    from edgellm.serve import ServeOptions

_MIB = 1 << 20


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Address, or the path of a Unix socket (*.sock). Others than this machine need a key.",
)  # fmt: skip
@click.option("--port", type=int, default=8080, show_default=True, help="0 takes a free one.")
@click.option(
    "--api-key", "api_keys", multiple=True, envvar="EDGELLM_API_KEY",
    help="A key that clients have to send; may be repeated. Others of this machine can see it: "
    "--api-key-file and the variable EDGELLM_API_KEY hide it.",
)  # fmt: skip
@click.option(
    "--api-key-file", type=click.Path(path_type=Path, dir_okay=False), help="Keys, one in a line."
)
@click.option("--insecure", is_flag=True, help="Let others than this machine in without a key.")
@click.option(
    "--allow-host", "allowed_hosts", multiple=True, metavar="NAME",
    help="A name of this machine that requests may give as Host; may be repeated.",
)  # fmt: skip
@click.option(
    "--allow-origin", "allowed_origins", multiple=True, metavar="ORIGIN",
    help="A web page that may call the server, as https://app.example; may be repeated.",
)  # fmt: skip
@click.option(
    "--max-waiting", type=int, default=64, show_default=True,
    help="Requests that may wait for their first token; more get 503.",
)  # fmt: skip
@click.option(
    "--max-waiting-tokens", type=int, default=1 << 17, show_default=True,
    help="Tokens of their prompts, likewise.",
)  # fmt: skip
@click.option("--max-tokens", type=int, help="Of an answer, at most.  [default: the context]")
@click.option("--max-n", type=int, default=16, show_default=True, help="Answers to one prompt.")
@click.option("--time-limit-ms", type=int, help="For an answer, from when it is asked for.")
@click.option(
    "--max-body-bytes", type=int, default=16 << 20, show_default=True, help="Of a request."
)
@click.option(
    "--read-timeout-s", type=float, default=30, show_default=True,
    help="In which a request has to be there.",
)  # fmt: skip
@click.option(
    "--write-timeout-s", type=float, default=300, show_default=True,
    help="In which a client has to read on.",
)  # fmt: skip
@click.option(
    "--heartbeat-s", type=float, default=15, show_default=True,
    help="Between comments in streams that have nothing to say.",
)  # fmt: skip
@click.option(
    "--grace-s", type=float, default=30, show_default=True,
    help="For answers to end, after the first Ctrl-C or SIGTERM.",
)  # fmt: skip
@click.option(
    "--memory-limit-mib", type=int,
    help="Of all loaded models, as estimated.  [default: what is available]",
)  # fmt: skip
@click.option("--idle-unload-s", type=float, help="Unload models that nobody asked for so long.")
@click.option(
    "--pooling", type=click.Choice(["mean", "last"]), default="mean", show_default=True,
    help="What is the embedding of a text: of its tokens' states.",
)  # fmt: skip
@click.option("--metrics/--no-metrics", default=True, show_default=True, help="GET /metrics.")
@load_options
def serve(
    *,
    models: tuple[str, ...],
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    insecure: bool,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    max_waiting: int,
    max_waiting_tokens: int,
    max_tokens: int | None,
    max_n: int,
    time_limit_ms: int | None,
    max_body_bytes: int,
    read_timeout_s: float,
    write_timeout_s: float,
    heartbeat_s: float,
    grace_s: float,
    memory_limit_mib: int | None,
    idle_unload_s: float | None,
    pooling: str,
    metrics: bool,
    load_arguments: EngineArguments,
) -> None:
    """Serve MODEL... over HTTP: OpenAI's API, and others.

    The first MODEL is loaded at once and answers requests that name none, the others when they are
    asked for. MODEL is as in `edgellm run`; ID=MODEL lets clients call it ID.
    """
    options = _options(
        host=host,
        port=port,
        api_keys=(*api_keys, *_keys(api_key_file)),
        insecure=insecure,
        allowed_hosts=allowed_hosts,
        allowed_origins=allowed_origins,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        max_tokens=max_tokens,
        max_n=max_n,
        time_limit_ms=time_limit_ms,
        max_body_bytes=max_body_bytes,
        read_timeout_s=read_timeout_s,
        write_timeout_s=write_timeout_s,
        heartbeat_s=heartbeat_s,
        grace_s=grace_s,
        memory_limit_bytes=None if memory_limit_mib is None else memory_limit_mib * _MIB,
        idle_unload_s=idle_unload_s,
        pooling=pooling,
        metrics=metrics,
    )
    _run(models or (DEFAULT_MODEL,), options, load_arguments)


def _options(**values: object) -> ServeOptions:
    try:
        from edgellm.serve import ServeOptions
    except ImportError as error:
        raise OptionError(
            f"serving needs starlette and uvicorn, which cannot be imported ({error}); install "
            'them with: pip install "edgellm[serve]"'
        ) from None
    return ServeOptions(**values)  # type: ignore[arg-type]


def _run(models: tuple[str, ...], options: ServeOptions, load_arguments: EngineArguments) -> None:
    from edgellm.serve import ModelPool, served_model
    from edgellm.serve import serve as run_server

    served = [served_model(name, load_arguments) for name in models]
    pool = ModelPool(
        served,
        memory_limit_bytes=options.memory_limit_bytes,
        idle_unload_s=options.idle_unload_s,
    )
    with progress_bar():
        pool.put(served[0].id, served[0].open())

    def started(address: str) -> None:
        click.echo(f"serving {', '.join(pool.ids)} at {address} (Ctrl-C ends)", err=True)

    run_server(pool, options, started=started)


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
