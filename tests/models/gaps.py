"""Small programs with an identifier taken out: cases for an infill model.

    python gaps.py [COUNT] [SEED]      a JSON object a line: {"prefix", "middle", "suffix"}

The middle can only be known from the suffix, or from prefix and suffix together, so a model that
sees no suffix fails most of them.
"""

import json
import random
import sys

NOUNS = """
    value count total path name item node left right key index line text width height size
    data file user token score color price rate limit start end step buffer result parent
    child weight offset length speed depth angle radius owner label title alpha beta gamma
""".split()  # noqa: SIM905
VERBS = """
    get set make read write load save find build parse update remove add compute merge split
""".split()  # noqa: SIM905


def identifier(rng: random.Random) -> str:
    r = rng.random()
    if r < 0.5:
        return rng.choice(NOUNS)
    if r < 0.8:
        return rng.choice(NOUNS) + "_" + rng.choice(NOUNS)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))


def gap(rng: random.Random) -> dict[str, str]:
    a = b = c = ""
    while len({a, b, c}) < 3:
        a, b, c = identifier(rng), identifier(rng), identifier(rng)
    f = rng.choice(VERBS) + "_" + rng.choice(NOUNS)
    prefix, middle, suffix = rng.choice(
        [
            (f"def {f}(", a, f", {b}):\n    {c} = {a} + {b}\n    return {c}\n"),
            (f"with open({a}) as ", b, f":\n    {c} = {b}.read()\nprint({c})\n"),
            ("for ", a, f" in {b}:\n    {c}.append({a})\nreturn {c}\n"),
            (f"if {a} > {b}:\n    ", c, f" = {a}\nelse:\n    {c} = {b}\n"),
        ]
    )
    return {"prefix": prefix, "middle": middle, "suffix": suffix}


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for _ in range(count):
        print(json.dumps(gap(rng)))
