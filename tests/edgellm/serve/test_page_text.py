"""Markdown, formulas and code on the chat page, in a headless Chromium."""

from __future__ import annotations

import json

import pytest
from browser import Browser

MARKDOWN = {
    "a **b** *c* `d`": "<p>a <strong>b</strong> <em>c</em> <code>d</code></p>",
    "# T\ntext\nmore\n\nnext": "<h3>T</h3><p>text\nmore</p><p>next</p>",
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "2. x\n3. y": '<ol start="2"><li>x</li><li>y</li></ol>',
    "```py\na <b>\n  c\n```\nz": '<div class="block"><div class="bar"><span>py</span>'
    '<button class="bare" type="button">Copy</button></div>'
    "<pre><code>a &lt;b&gt;\n  c</code></pre></div><p>z</p>",
    "```\nopen": '<div class="block"><div class="bar"><span></span>'
    '<button class="bare" type="button">Copy</button></div><pre><code>open</code></pre></div>',
    "x\n\n---\ny": "<p>x</p><hr><p>y</p>",
    "* * *": "<hr>",
    "| a | **b** |\n|---|--:|\n| 1 | `x\\|y` |\n| <i> |\nz": '<div class="table"><table><thead>'
    '<tr><th>a</th><th class="end"><strong>b</strong></th></tr></thead><tbody>'
    '<tr><td>1</td><td class="end"><code>x|y</code></td></tr>'
    '<tr><td>&lt;i&gt;</td><td class="end"></td></tr></tbody></table></div><p>z</p>',
    "a | b\nc | d": "<p>a | b\nc | d</p>",
    "a | b\n---": "<p>a | b</p><hr>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](https://e.org/a)": '<p><a href="https://e.org/a" target="_blank" '
    'rel="noopener noreferrer">x</a></p>',
    "2 * 3 * 4 and a_b_c": "<p>2 * 3 * 4 and a_b_c</p>",
    "> said": "<blockquote>said</blockquote>",
    "so $x$.": "<p>so <math><mi>x</mi></math>.</p>",
    r"\(2\) **$y$**": "<p><math><mn>2</mn></math> <strong><math><mi>y</mi></math></strong></p>",
    "$5 and $6, $HOME/bin:$PATH, `$x$`": "<p>$5 and $6, $HOME/bin:$PATH, <code>$x$</code></p>",
    "a\n$$\n- x\n$$\nb": '<p>a</p><div class="formula"><math display="block"><mrow>'
    '<mo stretchy="false">−</mo><mi>x</mi></mrow></math></div><p>b</p>',
    "$$\nx": "<p>$$\nx</p>",
    r"\[ <b> \]": '<div class="formula"><math display="block"><mrow><mo stretchy="false">&lt;</mo>'
    '<mi>b</mi><mo stretchy="false">&gt;</mo></mrow></math></div>',
}
LEFT, RIGHT = ('<mo stretchy="true" fence="true">' + each + "</mo>" for each in "()")
# Texts with no formula, and how often there is one in others.
PLAIN = [
    "Cost: $$ - $$$", "A: $$\nB: $$", "`a` ${name}-${version}.tar", "$(pwd)/$(date)",
    "$20 or 20$.", "- \\[ \\] buy", "$$ is the PID:\n```bash\necho $$\n```\nmore",
]  # fmt: skip
COUNTS = {
    "$$x$$ and $$y$$": 2,
    "\\[ a \\], \\[ b \\]": 2,
    "$$a = b$$,\n$$c = d$$": 2,
    "1. Step:\n   \\[\n   \\frac{a}{b}\n   \\]\n2. Next": 1,
    "\\begin{align*}\na &= b\n\\end{align*}": 1,
    "\\\\( x \\\\) and \\[ x": 1,
}
FORMULAS = {
    "x_{1}^2": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    "f'": '<msup><mi>f</mi><mo stretchy="false">′</mo></msup>',
    r"\frac{a}12": "<mrow><mfrac><mi>a</mi><mn>1</mn></mfrac><mn>2</mn></mrow>",
    r"\sqrt[3]\pi": "<mroot><mi>π</mi><mn>3</mn></mroot>",
    r"\left(a\right)": f"<mrow>{LEFT}<mi>a</mi>{RIGHT}</mrow>",
    r"\begin{pmatrix}a&b\\[2pt]c\end{pmatrix}": f'<mrow>{LEFT}<mtable class="pmatrix">'
    "<mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr><mtr><mtd><mi>c</mi></mtd></mtr>"
    f"</mtable>{RIGHT}</mrow>",
    r"\text{if }\mathbb{R}": '<mrow><mtext class="text">if&nbsp;</mtext><mi>ℝ</mi></mrow>',
    r"\hat x \log": '<mrow><mover accent="true"><mi>x</mi><mo>^</mo></mover><mi>log</mi></mrow>',
    r"\log n": '<mrow><mrow><mi>log</mi><mspace width=".17em"></mspace></mrow><mi>n</mi></mrow>',
    r"\boxed{4}": '<mrow class="boxed"><mn>4</mn></mrow>',
    r"a \bmod n": '<mrow><mi>a</mi><mo lspace=".22em" rspace=".22em">mod</mo><mi>n</mi></mrow>',
    r"\mathbb{R^2}": '<mrow class="mathbb"><msup><mi>R</mi><mn>2</mn></msup></mrow>',
    r"\text{a\_b}": '<mtext class="text">a_b</mtext>',
    r"\mathrm{H_2}": '<mrow class="mathrm"><msub><mi>H</mi><mn>2</mn></msub></mrow>',
    r"\overset{!}{=}": '<mover><mo stretchy="false">=</mo><mo stretchy="false">!</mo></mover>',
    r"\not=": '<mo stretchy="false">=\u0338</mo>',
    "x \\": "<mrow><mi>x</mi><mtext>\\</mtext></mrow>",
    r"\what{x}": "<mrow><mtext>\\what</mtext><mi>x</mi></mrow>",
    # what has no end yet, or no beginning
    r"\frac{a": "<mfrac><mi>a</mi><mrow></mrow></mfrac>",
    r"\begin{cases": "<mrow><mtext>\\begin</mtext><mrow>"
    + "".join(f"<mi>{each}</mi>" for each in "cases")
    + "</mrow></mrow>",
    "a}^": '<mrow><mi>a</mi><msup><mo stretchy="false">}</mo><mrow></mrow></msup></mrow>',
}
CODE = {
    "python": ('def f("a # b"):  # c', ("word", "def"), ("string", '"a # b"'), ("remark", "# c")),
    "rust": ("fn f<'a>() { 0x1f } /* c", ("word", "fn"), ("number", "0x1f"), ("remark", "/* c")),
    "sql": ("SELECT a -- c", ("word", "SELECT"), ("remark", "-- c")),
    "js": ("`a\nb` // c", ("string", "`a\nb`"), ("remark", "// c")),
    "text": ("def f # c",),
}


@pytest.mark.slow
def test_markdown(tab: Browser) -> None:
    for text, expected in MARKDOWN.items():
        shown = f"make('div', {{}}, ...markdown({json.dumps(text)})).innerHTML"
        assert tab.evaluate(shown) == expected
    for text, expected in FORMULAS.items():
        assert tab.evaluate(f"formula({json.dumps(text)}).innerHTML") == expected
    for deep in ("{" * 100_000, r"\frac{1}{1+" * 500):
        assert tab.evaluate(f"formula({json.dumps(deep)}).outerHTML") == f"<code>{deep}</code>"
    for text, count in {**dict.fromkeys(PLAIN, 0), **COUNTS}.items():
        node = f"make('div', {{}}, ...markdown({json.dumps(text)}))"
        assert tab.evaluate(f"{node}.querySelectorAll('math').length") == count
    item = "1. Run:\n   ```sh\n   ls\n     a\n   ```\n2. Next"
    node = f"make('div', {{}}, ...markdown({json.dumps(item)}))"
    assert tab.evaluate(f"{node}.querySelector('ol > li pre').textContent") == "ls\n  a"
    for language, (text, *parts) in CODE.items():
        nodes = f"make('div', {{}}, ...coloured({json.dumps(text)}, '{language}'))"
        assert tab.evaluate(f"{nodes}.textContent") == text
        spans = f"[...{nodes}.children].map((each) => [each.className, each.textContent])"
        assert tab.evaluate(spans) == [list(part) for part in parts]
    assert tab.complaints == []
