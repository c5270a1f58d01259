"""The maths of the pages as MathML, which browsers draw without scripts, fonts or a network.

It is written in Unicode, to be read in a terminal and on any viewer of Markdown:

    z_{k+1} = x_0 − s_{k+1} / (∛ν_{k+1} + ε)

An indented block with an equals or inequality sign is a displayed equation (code is fenced). In the
text, scripts are set; on a page with equations, single letters become italic as in these.
"""

import re
from html import escape
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement

from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor

TOKEN = re.compile(r"[A-Za-z]{2,}|[^\W\d_]\u0302?|\d+(?:\.\d+)?|\S")
RELATION = re.compile(r"(?:^|\s)[=≤]\s")  # with spaces: a command may have a plain =
SEPARATORS = set("=≤≥<>+−±,·←∝")
CLOSING = {"(": ")", "[": "]", "⟨": "⟩"}
RAISED = {"²": "<mn>2</mn>", "³": "<mn>3</mn>", "'": "<mo>′</mo>"}
# {…} with one more pair inside, a number with its sign, a word, a star or an infinity.
SCRIPT = r"[_^](?:\{(?:[^{}]|\{[^{}]*\})*\}|[-−]?\d+|[A-Za-z]+(?![A-Za-z0-9_])|[*∞])"
WITH_SCRIPTS = rf"(?:(?<![A-Za-z0-9_.#])(?<![A-Za-z]-)(?:[^\W\d_]|mean|\d+)|[)|‖∑])(?:{SCRIPT})+"
# Not the words "a", "A" and "I", nor the language C; not a part of "D-Adaptation" or "s.e.".
LETTER = r"(?<![\w'’.-])[b-zBD-HJ-Z](?![A-Za-z0-9_]|['’.-]\w)|[α-ω]"


class Factor(NamedTuple):
    markup: str
    inside: str  # without the brackets that a fraction or a root makes superfluous


class Equation:
    """A recursive descent over the tokens of one side of an equation."""

    def __init__(self, text: str) -> None:
        self.tokens = TOKEN.findall(text.replace("-", "−"))
        self.at = 0

    def next_is(self, *tokens: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at] in tokens

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def row(self, closing: str = "", fractions: bool = True) -> str:
        """Everything up to the closing bracket. A fraction's numerator is the product before it."""
        done, product = "", list[Factor]()
        while self.at < len(self.tokens) and not self.next_is(closing):
            if fractions and self.next_is("/"):
                self.take()
                above = "".join(one.markup for one in product)
                above = product[0].inside if len(product) == 1 else above
                fraction = f"<mfrac>{_row(above)}{_row(self.factor().inside)}</mfrac>"
                product = [Factor(fraction, fraction)]
            elif self.tokens[self.at] in SEPARATORS:
                done += "".join(one.markup for one in product) + f"<mo>{escape(self.take())}</mo>"
                product = []
            else:
                product.append(self.factor())
        return done + "".join(one.markup for one in product)

    def factor(self, fractions: bool = True) -> Factor:
        """A letter, number, root or bracket, with its scripts."""
        token = self.take()
        if token in "√∛":
            # No fraction: without a font for maths, browsers draw no tall roots.
            radicand = _row(self.factor(fractions=False).inside)
            root, index = ("msqrt", "") if token == "√" else ("mroot", "<mn>3</mn>")
            return Factor(*[f"<{root}>{radicand}{index}</{root}>"] * 2)
        if token in CLOSING:
            inside = self.row(CLOSING[token], fractions)
            self.take()
            base = _row(f"<mo>{token}</mo>{inside}<mo>{CLOSING[token]}</mo>")
            bare = inside if token == "(" else base
        else:
            base = bare = _atom(token)
        markup = self.scripts(base, below=token in "Σ∑")
        bare = bare if markup == base else markup
        space = '<mspace width="0.17em"/>' if _is_word(token) and not self.next_is("(") else ""
        return Factor(markup + space, bare + space)

    def scripts(self, base: str, below: bool) -> str:
        parts = {"_": "", "^": ""}
        while self.next_is("_", "^", *RAISED):
            token = self.take()
            if token in RAISED:
                parts["^"] += RAISED[token]
            else:
                parts[token] += self.script()
        sub, sup = _row(parts["_"]), _row(parts["^"])
        if parts["_"] and parts["^"]:
            return f"<msubsup>{base}{sub}{sup}</msubsup>"
        if parts["_"]:
            tag = "munder" if below else "msub"
            return f"<{tag}>{base}{sub}</{tag}>"
        return f"<msup>{base}{sup}</msup>" if parts["^"] else base

    def script(self) -> str:
        if not self.next_is("{"):
            return _atom(self.take())
        self.take()
        inside = self.row("}", fractions=False)
        self.take()
        return inside


def _row(markup: str) -> str:
    return f"<mrow>{markup}</mrow>"


def _is_word(token: str) -> bool:
    return token.isascii() and token.isalpha() and len(token) > 1


def _atom(token: str) -> str:
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token in "∇Σ∑" or not token[0].isalpha():
        tight = ' lspace="0" rspace="0" stretchy="false"' if token in "|‖/" else ""
        return f"<mo{tight}>{escape(token)}</mo>"
    return f'<mi mathvariant="normal">{token}</mi>' if _is_word(token) else f"<mi>{token}</mi>"


def displayed(text: str) -> str:
    """The lines of a block, aligned at their first relation; words after a gap are a remark."""
    rows = []
    for line in text.strip("\n").splitlines():
        first, *others = re.split(r" {4,}(?=[^\s=])", line.rstrip())
        left, relation, right = re.match(r"([^=≤]*)([=≤]?)(.*)", first.strip()).groups()
        cells = [Equation(left).row(), Equation(relation + right).row(), ""]
        for other in others:
            if "=" in other:
                cells[1] += '<mspace width="2em"/>' + Equation(other).row()
            else:
                cells[2] = f"<mtext>{escape(other)}</mtext>"
        rows.append("".join(f"<mtd>{cell}</mtd>" for cell in cells))
    table = "".join(f"<mtr>{row}</mtr>" for row in rows)
    table = f'<math display="block"><mtable displaystyle="true">{table}</mtable></math>'
    return f'<div class="maths" data-search-exclude="">{table}</div>'


class EquationBlocks(BlockProcessor):
    def test(self, parent: Element, block: str) -> bool:  # noqa: ARG002
        lines = block.lstrip("\n")
        # \x02 marks fenced code that another extension has taken out already.
        return lines.startswith("    ") and "\x02" not in lines and bool(RELATION.search(lines))

    def run(self, parent: Element, blocks: list[str]) -> None:
        block, rest = self.detab(blocks.pop(0).lstrip("\n"))
        SubElement(parent, "p").text = self.parser.md.htmlStash.store(displayed(block))
        self.parser.md.has_equations = True
        if rest:
            blocks.insert(0, rest)


class Inline(InlineProcessor):
    """x_{k+1} in the text with its script lowered; on a page with equations, letters italic."""

    def handleMatch(  # noqa: N802
        self,
        m: re.Match[str],
        data: str,  # noqa: ARG002
    ) -> tuple[str | None, int | None, int | None]:
        html = self.markup(m)
        return (None,) * 3 if html == m[0] else (self.md.htmlStash.store(html), m.start(), m.end())

    def markup(self, match: re.Match[str]) -> str:
        base, scripts = re.match(rf"(.+?)((?:{SCRIPT})*)$", match[0]).groups()
        italic = getattr(self.md, "has_equations", False) and re.fullmatch("[A-Za-zα-ω]", base)
        html = f"<i>{base}</i>" if italic else base
        for script in re.findall(SCRIPT, scripts):
            tag = "sub" if script[0] == "_" else "sup"
            inside = re.sub(r"^\{(.*)\}$", r"\1", script[1:])
            inside = re.sub(f"{WITH_SCRIPTS}|{LETTER}", self.markup, escape(inside))
            html += f"<{tag}>{inside}</{tag}>"
        return html


class Maths(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.parser.blockprocessors.register(EquationBlocks(md.parser), "equations", 85)
        # Below code spans, above emphasis: the star of x_* starts none.
        md.inlinePatterns.register(Inline(WITH_SCRIPTS, md), "scripts", 185)
        md.inlinePatterns.register(Inline(LETTER, md), "letters", 5)
