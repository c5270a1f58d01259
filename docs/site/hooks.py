"""What mkdocs.yml cannot say: maths, pages from files outside docs/, links, and their check.

MkDocs checks the links between pages. `on_post_build` checks all others: those of README.md, and
every address in the pages as they were built, which must not load anything from a network.
"""

import posixpath
import re
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown, markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from maths import Maths

log = get_plugin_logger("links")
ROOT = Path(__file__).parents[2]
PAGES_OF_ROOT = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def repository() -> str:
    """The public address of the repository, once pyproject.toml has one, else nothing."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"].get("Repository", "").rstrip("/")


class Links(Treeprocessor):
    """Links are written as they work in the repository; make them work on the site.

    A link to a file that has no page becomes one to the repository's address. While there is none,
    its text stays without a link, and its path is the tooltip.
    """

    source = ""  # the page's file, from the root of the repository
    page = ""  # the page, from docs/
    files: Files

    def run(self, root: Element) -> None:
        for element in root.iter():
            key = {"a": "href", "img": "src"}.get(element.tag, "")
            target = urlsplit(element.get(key, ""))
            if target.path and not target.scheme:
                self.resolve(element, key, target.path, target.fragment)

    def resolve(self, element: Element, key: str, path: str, fragment: str) -> None:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(self.source), path))
        if not (ROOT / wanted).exists():
            log.warning(f"{self.source} links to {path}, which is not in the repository")
        if (ROOT / wanted).is_dir():
            wanted += "/README.md"
        on_site = PAGES_OF_ROOT.get(wanted, wanted.removeprefix("docs/"))
        on_site = "index.md" if wanted == "README.md" else on_site
        if self.files.get_file_from_path(on_site):
            href = posixpath.relpath(on_site, posixpath.dirname(self.page) or ".")
            element.set(key, href + ("#" + fragment if fragment else ""))
        elif repository():
            element.set(key, f"{repository()}/blob/main/{wanted}")
        else:
            del element.attrib[key]
            element.tag = "span"
            element.set("title", wanted)


class NamesOfPages(InlineProcessor):
    """Docstrings name pages, as in "See docs/memory.md": a link on the pages of the API."""

    def handleMatch(  # noqa: N802
        self,
        m: re.Match[str],
        data: str,  # noqa: ARG002
    ) -> tuple[Element | None, int | None, int | None]:
        if not links.page.startswith("api/"):
            return None, None, None
        link = Element("a", href=f"../{m[1]}.md")
        link.text = f"{m[1]}.md"
        return link, m.start(), m.end()


class LinksExtension(Extension):
    def __init__(self, links: Links) -> None:
        super().__init__()
        self.links = links

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.treeprocessors.register(self.links, "repository", 1)  # mkdocs' own comes next, at 0
        md.inlinePatterns.register(NamesOfPages(r"\bdocs/([\w/]+)\.md", md), "pages", 186)


links = Links()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.repo_url = repository() or None
    config.markdown_extensions += [Maths(), LinksExtension(links)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES_OF_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    links.files = files
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    links.page = page.file.src_uri
    sources = {made: source for source, made in PAGES_OF_ROOT.items()}
    links.source = sources.get(links.page, f"docs/{links.page}")
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\sid="([^"]*)"', html)) for path, html in pages.items()}
    own = {path: html for path, html in pages.items() if path.parent.name != "report"}
    own.pop(site / "404.html")  # its addresses depend on the server
    links.source, links.page = "README.md", "index.md"
    readme = markdown(
        (ROOT / "README.md").read_text(encoding="utf-8"),
        extensions=["fenced_code", LinksExtension(links)],
    )
    own[site / "README.md"] = re.sub(r'(href="[^"#:]*)\.md\b', _page_of, readme)
    for path, html in own.items():
        for tag, address in re.findall(r'<(\w+)[^>]*?\s(?:href|src)="([^"]*)"', html):
            if problem := _problem(path, tag, address, ids):
                log.warning(f"{path.relative_to(site)}: <{tag}> {address}: {problem}")


def _page_of(match: re.Match[str]) -> str:
    page = match[1].removesuffix("README")
    return f"{page}index.html" if page.endswith(("/", '"')) else f"{page}.html"


def _problem(path: Path, tag: str, address: str, ids: dict[Path, set[str]]) -> str:
    parts = urlsplit(address)
    if parts.scheme in ("http", "https", "mailto"):
        return "" if tag == "a" else "loaded from a network"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "no such file"
    found = not parts.fragment or unquote(parts.fragment) in ids.get(target, ())
    return "" if found else "no such heading"
