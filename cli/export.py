"""`edgellm export`: a bundle of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgellm.cli.config import path_and_scale
from edgellm.cli.options import model_argument
from edgellm.cli.progress import progress_bar
from edgellm.cli.text import read_text, spelled_out
from edgellm.errors import OptionError
from edgellm.export import (
    DEFAULT_CHUNK_SIZES,
    DEFAULT_PRECISIONS,
    FLOAT_WEIGHTS,
    METHODS,
    PRECISIONS,
    ROUNDINGS,
    CalibrationOptions,
    Method,
    Rounding,
    check_chunk_sizes,
    check_precisions,
    default_precisions,
)
from edgellm.models import Bundle, imported, prepare


def calibration_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add options for the calibration of static scales; passed on as `calibration`."""

    @click.option(
        "--calibration-text", type=click.Path(path_type=Path),
        help="File to calibrate static precisions on.  [default: Python's manual and library]",
    )  # fmt: skip
    @click.option("--calibration-windows", type=int, default=128, show_default=True)
    @click.option(
        "--calibration-window", type=int, default=64, show_default=True, help="Tokens of each."
    )
    @click.option("--calibration-seed", type=int, default=0, show_default=True)
    @click.option(
        "--calibration-method", type=click.Choice(METHODS), default="percentile",
        show_default=True,
        help="How far 8-bit activations reach.",
    )  # fmt: skip
    @click.option("--calibration-percentile", type=float, default=99.99, show_default=True)
    @click.option(
        "--calibration-shadow-share", type=float, default=0.15, show_default=True,
        help="Of the down_proj layers, those for which the host computes what 8 bits clip.",
    )  # fmt: skip
    @click.option(
        "--calibration-shadow-percentile", type=float, default=99.5, show_default=True,
        help="How far 8 bits reach in those.",
    )  # fmt: skip
    @click.option(
        "--calibration-rounding", type=click.Choice(ROUNDINGS), default="gptq", show_default=True,
        help="Of weights: for the inputs that were seen, or to the nearest, which is faster.",
    )  # fmt: skip
    @functools.wraps(command)
    def wrapped(
        *,
        calibration_text: Path | None,
        calibration_windows: int,
        calibration_window: int,
        calibration_seed: int,
        calibration_method: Method,
        calibration_percentile: float,
        calibration_shadow_share: float,
        calibration_shadow_percentile: float,
        calibration_rounding: Rounding,
        **rest: Any,
    ) -> None:
        calibration = CalibrationOptions(
            text=None if calibration_text is None else read_text(calibration_text),
            windows=calibration_windows,
            window=calibration_window,
            seed=calibration_seed,
            method=calibration_method,
            percentile=calibration_percentile,
            shadow_share=calibration_shadow_share,
            shadow_percentile=calibration_shadow_percentile,
            rounding=calibration_rounding,
        )
        command(calibration=calibration, **rest)

    return wrapped


@click.command()
@model_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder of the bundle."
    "  [default: inside EDGELLM_HOME]",
)  # fmt: skip
@click.option(
    "--precisions",
    help=f"Precisions to export, from {', '.join(PRECISIONS)}.  [default: "
    f"{','.join(DEFAULT_PRECISIONS)}, or f32 for w8a8 where a model cannot be rotated]",
)
@click.option(
    "--weights",
    type=click.Choice(FLOAT_WEIGHTS),
    help="What linear layers of F32, F16 and BF16 files become; auto is int8.  [default: auto]",
)
@click.option(
    "--chunk-sizes",
    help=f"Static chunk sizes.  [default: {','.join(map(str, DEFAULT_CHUNK_SIZES))}]",
)
@calibration_options
@click.option(
    "--lora", multiple=True, metavar="PATH[:SCALE]",
    help="An adapter (LoRA) to merge into the weights before they are rounded, for back ends that "
    "take no adapters; may be repeated.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a bundle that is there.")
def export(
    *,
    name: str,
    output: Path | None,
    precisions: str | None,
    weights: str | None,
    chunk_sizes: str | None,
    calibration: CalibrationOptions,
    lora: tuple[str, ...],
    force: bool,
) -> None:
    """Export MODEL to a bundle: static-shape ONNX graphs, decode weights, tokenizer."""
    sizes = None if chunk_sizes is None else _sizes(chunk_sizes)
    names = [*DEFAULT_PRECISIONS] if precisions is None else precisions.split(",")
    check_precisions(names)
    if sizes is not None:
        check_chunk_sizes(sizes, names)
    with progress_bar() as progress:
        bundle = prepare(
            name,
            precisions=default_precisions if precisions is None else names,
            out=output,
            chunk_sizes=sizes,
            weights=weights,
            calibration=calibration,
            lora=[(Path(path), scale) for path, scale in map(path_and_scale, lora)],
            force=force,
            progress=progress,
        )
    report(bundle)


def report(bundle: Bundle) -> None:
    """Print one line for each precision of a bundle, and the bundle's folder and size."""
    for name in bundle.manifest.precisions:
        click.echo(spelled_out(f"{name}: {imported(bundle.manifest, name).details()}"), err=True)
    click.echo(f"{bundle.path} ({bundle.bytes / 1e6:.1f} MB)")


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"chunk sizes {text!r}: write numbers with commas, e.g. 32,128") from None
