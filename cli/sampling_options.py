"""Options for choosing tokens, under the names that llama.cpp's users know."""

from __future__ import annotations

import functools
from typing import Any

import click
from click.core import ParameterSource

from edgellm.cli.options import Command, all_of, chosen_adapter
from edgellm.errors import OptionError
from edgellm.generation_options import CONTEXT_POLICIES, SAMPLERS, GenerationArguments

_SAMPLING = (
    click.option(
        "-n",
        "--predict",
        "--n-predict",
        "--max-tokens",
        "max_tokens",
        type=click.IntRange(min=-1),
        help="Tokens to generate at most; -1 goes on to the answer's end.  [default: -1]",
    ),
    click.option(
        "--context-policy",
        type=click.Choice(list(CONTEXT_POLICIES)),
        help="In a full context: end, or shift: forget the older half and go on.  [default: error]",
    ),
    click.option("--keep", type=int, help="First tokens that shift never forgets.  [default: 4]"),
    click.option("--temp", "--temperature", "temperature", type=float, help="0 is greedy."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the tokens that make up this probability."),
    click.option("--min-p", type=float, help="Keep tokens this probable relative to the first."),
    click.option("--repeat-penalty", type=float, help="Penalty of recent tokens; 1 is none."),
    click.option("--repeat-last-n", type=int, help="How many tokens are recent; -1 all."),
    click.option("--presence-penalty", type=float, help="Subtracted for each recent token."),
    click.option("--frequency-penalty", type=float, help="Subtracted for each occurrence."),
    click.option("--typical", "--typical-p", "typical_p", type=float, help="Keep typical tokens."),
    click.option(
        "--top-n-sigma",
        "--top-nsigma",
        "top_n_sigma",
        type=float,
        help="Keep logits so many standard deviations below the highest.",
    ),
    click.option("--xtc-probability", type=float, help="How often the top tokens are left out."),
    click.option("--xtc-threshold", type=float, help="Least probability of those."),
    click.option("--dynatemp-range", type=float, help="Let the temperature vary with the entropy."),
    click.option("--dynatemp-exp", "dynatemp_exponent", type=float, help="Power of the entropy."),
    click.option("--dry-multiplier", type=float, help="Penalty of repetitions (DRY); 0 is none."),
    click.option("--dry-base", type=float, help="How the penalty grows with their length."),
    click.option("--dry-allowed-length", type=int, help="Length that has no penalty yet."),
    click.option("--dry-penalty-last-n", type=int, help="Where they are looked for; -1 all."),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help='Text that ends repetitions; may be repeated; "none" for none.',
    ),
    click.option("--mirostat", type=int, help="2: keep the mean surprise of tokens at a target."),
    click.option("--mirostat-ent", "mirostat_tau", type=float, help="That target, in bits."),
    click.option("--mirostat-lr", "mirostat_eta", type=float, help="Its learning rate."),
    click.option("--min-keep", type=int, help="Tokens that samplers leave at least."),
    click.option(
        "--samplers",
        metavar="NAMES",
        help="The samplers to use, in order, with ; between them.  "
        "[default: " + ";".join(SAMPLERS) + "]",
    ),
    click.option(
        "-l",
        "--logit-bias",
        multiple=True,
        metavar="TOKEN(+/-)BIAS",
        help="Change a token's logit, e.g. 29905-100; may be repeated.",
    ),
    click.option(
        "-s",
        "--seed",
        type=click.IntRange(min=-1),
        help="The same seed gives the same text; -1 draws one.",
    ),
    click.option(
        "-r",
        "--reverse-prompt",
        "--stop",
        "stop",
        multiple=True,
        help="A text that ends the answer; may be repeated.",
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Never take an end token."),
    click.option(
        "--repetition-limit",
        type=int,
        help="End an endless answer that repeats itself for so many tokens; 0 never.  "
        "[default: 256]",
    ),
    click.option(
        "--speculate/--no-speculate",
        default=None,
        help="Check guesses of several tokens at once; the answer is the same.  "
        "[default: speculate]",
    ),
    click.option(
        "--adapter",
        metavar="NAME",
        help="The adapter of --lora to answer with.  [default: the only one]",
    ),
    click.option(
        "--speculate-most",
        type=int,
        help="Tokens guessed for one step at most.  [default: as many as pay]",
    ),
)


def sampling_options(command: Command) -> Command:
    """Add options for choosing tokens to a command; given options are passed on as `sampling`."""
    names = list(GenerationArguments.__annotations__)

    @all_of(_SAMPLING)
    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        source = click.get_current_context().get_parameter_source
        chosen = {
            name: value
            for name in names
            for value in (given.pop(name, None),)
            if source(name) not in (None, ParameterSource.DEFAULT)
        }
        adapter = chosen_adapter(chosen.get("adapter"))
        if adapter is not None:
            chosen["adapter"] = adapter
        if "logit_bias" in chosen:
            chosen["logit_bias"] = dict(map(_parse_bias, chosen["logit_bias"]))
        for name in ("stop", "dry_sequence_breakers"):
            if name in chosen:
                chosen[name] = list(chosen[name])
        if chosen.get("dry_sequence_breakers") == ["none"]:
            chosen["dry_sequence_breakers"] = []
        if "samplers" in chosen:
            chosen["samplers"] = [name for name in chosen["samplers"].split(";") if name]
        for name in ("max_tokens", "seed"):
            if chosen.get(name) == -1:
                chosen[name] = None
        return command(sampling=chosen, **given)

    return wrapped


def _parse_bias(text: str) -> tuple[int, float]:
    cut = max(text.rfind("+"), text.rfind("-"))
    try:
        return int(text[:cut]), float(text[cut:])
    except ValueError:
        raise OptionError(f"logit bias {text!r}: write TOKEN+BIAS or TOKEN-BIAS") from None
