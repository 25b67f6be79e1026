"""Makes the reference pages from the code, and brings the top-level pages into the site (a mkdocs hook).

Owns: the marks `<!-- generated: NAME -->` in docs/reference, and the copies of README.md, ARCHITECTURE.md,
CONTRIBUTING.md and benchmarks/results in the site. Promises: a reference page can't be stale, because it is
made when the site is built; a command, model, route or metric that can't be read ends the build. Never:
writes into the tree.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from reference_sources import BODY_MODULES, METRIC_FOLDERS, ROUTE_FOLDERS, SETTINGS, read_metrics, read_routes

from rose import cli
from rose.scheduler.runtime.command.sched import SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_TOP_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LICENSE = "license.md"
_RESULTS = "benchmarks/results"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)]*)?\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that live outside docs/."""
    for source, target in _TOP_PAGES.items():
        text = _relink((ROOT / source).read_text(), ROOT, target)
        files.append(File.generated(config, target, content=text))
    for result in sorted((ROOT / _RESULTS).glob("*.md")):
        target = f"results/{result.name}"
        files.append(
            File.generated(config, target, content=_relink(result.read_text(), result.parent, target))
        )
    listing = "\n".join(f"- [{path.stem}]({path.name})" for path in sorted((ROOT / _RESULTS).glob("*.md")))
    index = f"# Results\n\nOne page a theme: figures with their commit, machine and command.\n\n{listing}\n"
    files.append(File.generated(config, "results/index.md", content=index))
    license_text = f"# License\n\n```text\n{(ROOT / 'LICENSE').read_text()}\n```\n"
    files.append(File.generated(config, _LICENSE, content=license_text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills the marks of a reference page, and turns links that leave docs/ into links of the site."""
    if page.file.generated_by is not None:
        return markdown
    filled = _MARK.sub(lambda mark: _REFERENCES[mark[1]](), markdown)
    return _relink(filled, (ROOT / "docs" / page.file.src_uri).parent, page.file.src_uri)


def _relink(text: str, folder: Path, target: str) -> str:
    """Links that are right in the repository, made right in the site; a source file becomes plain text."""

    def replace(found: re.Match[str]) -> str:
        link = found[2]
        if "://" in link or link.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(folder / link))
        if not path.is_relative_to(ROOT):
            return found[0]
        inside = _in_site(path.relative_to(ROOT).as_posix())
        base = Path(target).parent.as_posix()
        return found[1] + os.path.relpath(inside, base) + found[3] if inside is not None else found[0]

    return _LINK.sub(replace, text)


def _in_site(path: str) -> str | None:
    if path in _TOP_PAGES:
        return _TOP_PAGES[path]
    if path == _RESULTS:
        return "results/index.md"
    if path.startswith(f"{_RESULTS}/"):
        return f"results/{path.removeprefix(f'{_RESULTS}/')}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return _LICENSE if path == "LICENSE" else None


# Commands --------------------------------------------------------------------------------------------------


def _commands() -> str:
    os.environ.update(COLUMNS="100", ROSE_RUNTIME_DIR="/run/user/1000/rose")  # noqa: TID251 - not this machine's
    commands = [([command.name], command.summary) for command in cli.COMMANDS]
    commands += [(["sched", each.name], each.summary) for each in SUBCOMMANDS]
    rows = [f"| [`rose {' '.join(name)}`](#rose-{'-'.join(name)}) | {text} |" for name, text in commands]
    table = "\n".join(["| Command | What it does |", "|---|---|", *rows])
    helps = [f"## rose {' '.join(name)}\n\n```text\n{_help(name)}\n```" for name, _ in commands]
    return "\n\n".join([table, *helps])


def _help(name: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*name, "--help"])
    if not out.getvalue().startswith("usage: rose"):
        raise ValueError(f"`rose {' '.join(name)} --help` printed no usage: {out.getvalue()[:200]!r}")
    return out.getvalue().rstrip()


# Configuration ---------------------------------------------------------------------------------------------


def _configuration() -> str:
    told: list[type[BaseModel]] = []
    return "\n\n".join([*(_file_section(*each, told) for each in SETTINGS), _environment()])


def _file_section(title: str, intro: str, place: str, told: list[type[BaseModel]]) -> str:
    """A file's keys, and below them the sections that no earlier file has."""
    num_told = len(told)
    _collect(_find(place), told)
    first, *others = told[num_told:]
    parts = [f"## {title}\n\n{intro}\n\n{_table(first)}"]
    for model in others:
        about = inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0]
        parts.append(f"### {model.__name__} ({title})\n\n{about}\n\n{_table(model)}".replace("\n\n\n", "\n"))
    return "\n\n".join(parts)


def _find(place: str) -> Any:
    module, _, name = place.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{place}: {error}; name its new place in docs/reference_sources.py") from error


def _collect(model: type[BaseModel], found: list[type[BaseModel]]) -> None:
    if model in found:
        return
    found.append(model)
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                _collect(part, found)


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _table(model: type[BaseModel]) -> str:
    notes = _attribute_docs(model)
    rows = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = field.description or notes.get(name, "")
        cells = [f"`{name}`", f"`{_type_name(field.annotation)}`{_limits(field)}", _default(field), meaning]
        rows.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _attribute_docs(model: type) -> dict[str, str]:
    """The string under each attribute, of the model and of what it inherits."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each.__module__.startswith("rose"):
            tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(each)))
            found.update(_strings_below(tree.body[0]))
    return found


def _strings_below(tree: Any) -> Iterator[tuple[str, str]]:
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            yield field.target.id, str(below.value.value)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return " | ".join(str(member.value) for member in annotation)
        if not get_args(annotation):
            return annotation.__name__
    if isinstance(annotation, UnionType):
        return " | ".join(_type_name(part) for part in get_args(annotation)).replace("NoneType", "none")
    text = re.sub(r"<enum '(\w+)'>|<class '([\w.]+)'>", lambda found: found[1] or found[2], str(annotation))
    text = re.sub(r"Annotated\[([^,]+), FieldInfo\(.*?\]\)\]", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def _limits(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{sign} {getattr(each, name)}"
        for each in field.metadata
        for name, sign in signs.items()
        if hasattr(each, name)
    ]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its own defaults"
    if value is None:
        return "none"
    return (
        f"`{value.value if isinstance(value, Enum) else value!r}`" if value not in ({}, (), []) else "empty"
    )


def _environment() -> str:
    from rose.config import Settings

    notes = _attribute_docs(Settings)
    rows = ["| Variable | Meaning |", "|---|---|"]
    for field in fields(Settings):
        text = " ".join(notes[field.name].split())
        if name := re.search(r"\((ROSE_\w+)\)", text):
            rows.append(f"| `{name[1]}` | {text.replace(f' ({name[1]})', '')} |")
    return "## Environment\n\nThe environment is read once, when a process starts.\n\n" + "\n".join(rows)


# Routes and metrics ----------------------------------------------------------------------------------------


def _http() -> str:
    head = "| Method | Path | What it does |\n|---|---|---|\n"
    parts = []
    for title, intro, folder in ROUTE_FOLDERS:
        rows = [f"| {route.method} | `{route.path}` | {route.text} |" for route in read_routes(ROOT / folder)]
        parts.append(_section(title, intro, folder, head, rows))
        parts += [_body(model) for module in BODY_MODULES.get(title, ()) for model in _models(module)]
    return "\n\n".join(parts)


def _models(module: str) -> list[type[BaseModel]]:
    """The bodies that a module defines, in its order."""
    found = vars(importlib.import_module(module)).values()
    return [
        each
        for each in found
        if isinstance(each, type)
        and issubclass(each, BaseModel)
        and each.__module__ == module
        and each.model_fields
    ]


def _body(model: type[BaseModel]) -> str:
    about = inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0]
    return f"### {model.__name__.removeprefix('_')}\n\n{about}\n\n{_table(model)}".replace("\n\n\n", "\n")


def _metrics() -> str:
    head = "| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n"
    parts = []
    for title, intro, folder in METRIC_FOLDERS:
        rows = []
        for metric in read_metrics(ROOT / folder):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
        parts.append(_section(title, intro, folder, head, rows))
    return "\n\n".join(parts)


def _section(title: str, intro: str, folder: str, head: str, rows: list[str]) -> str:
    if not rows:
        raise ValueError(f"{folder}: nothing found for {title}; name its new folder in reference_sources.py")
    return f"## {title}\n\n{intro}\n\n{head}" + "\n".join(rows)


_REFERENCES: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "configuration": _configuration,
    "http": _http,
    "metrics": _metrics,
}
