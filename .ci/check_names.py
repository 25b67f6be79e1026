"""Finds names of files and modules in prose that do not exist in the known.

Owns: what counts as such a name, in Markdown pages and in docstrings and comments of Python and C++.
Promises: status 1 and one line for each missing name, with its place. Never: looks at code, or at names of
other projects (a path below `vllm/`, a module that is not `rose.`).
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = {"rose/scheduler": "scheduler", "rose/transfer": "transfer", "rose/measure": "benchmarks/measure"}
"""Where a link in the package leads."""
FOREIGN = {"train.py", "conftest.py", "bench_NAME.py", "cuda.h", "malloc.h"}
"""Names that stand for a user's file, or that every project has."""

_FILE = re.compile(
    r"(?<![\w/.:{}*-])((?:[\w.{},*-]+/)*[\w{},*-]+\.(?:py|pyi|md|cpp|hpp|cu|sh|h))(?![\w(]|\.\w)"
)
_MODULE = re.compile(r"(?<![\w/.-])rose(?:\.[A-Za-z_]\w*)+(?![\w<])")
_FOLDER = re.compile(
    r"(?<![\w/.:-])((?:rose|scheduler|transfer|csrc|benchmarks|tests|docs)/[a-z_]\w*(?:/\w+)*)/?(?![\w/.*{-])"
)
_OUTER_FOLDERS = ("vllm/", "verl/", "roll/", "skyrl/", "rose/v1")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Known:
    """What exists: tracked files, and files that are about to be."""

    def __init__(self) -> None:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )
        self.files = {name for name in names if name and (ROOT / name).is_file()}
        self.tails = {
            "/".join(parts[i:]) for parts in (f.split("/") for f in self.files) for i in range(len(parts))
        }
        self.folders = {parent.as_posix() for name in self.files for parent in Path(name).parents}

    def has_file(self, name: str) -> bool:
        """Whether some file's path ends with `name`; `*` and `{a,b}` stand for anything."""
        if not re.search(r"[{},*]", name):
            is_ours = name in self.tails or _followed(name) in self.files
            return is_ours or Path(name).name in FOREIGN
        pattern = re.sub(r"\\\{[^/]*?\\\}|\\\*+|\\\{|\\\}|,", lambda _: "[^/]*", re.escape(name))
        return any(re.fullmatch(pattern, tail) for tail in self.tails)

    def has_module(self, name: str) -> bool:
        """Whether `name` is a module or package of ours, or something that one of them defines."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            path = _followed("/".join(parts[:end]))
            file = next(
                (f for f in (f"{path}.py", f"{path}.pyi", f"{path}/__init__.py") if f in self.files), None
            )
            if file is not None:
                rest = parts[end:]
                return (
                    not rest or re.search(rf"\b{re.escape(rest[0])}\b", (ROOT / file).read_text()) is not None
                )
            if path in self.folders:
                return end == len(parts)
        return False

    def has_folder(self, name: str) -> bool:
        """Whether `name` is a folder, or a file without its ending."""
        path = _followed(name)
        return path in self.folders or path in self.files or f"{path}.py" in self.files


def _followed(path: str) -> str:
    """Returns where a path leads that begins with a link of the package."""
    for link, target in LINKED.items():
        if path == link or path.startswith(f"{link}/"):
            return target + path.removeprefix(link)
    return path


def missing(known: Known, text: str) -> Iterator[str]:
    """The names in `text` that do not exist."""
    for found in _FILE.finditer(text):
        inner = re.sub(r"^(\.\.?/)+", "", found[1])
        if not found[1].startswith(_OUTER_FOLDERS) and not known.has_file(inner):
            yield found[1]
    for found in _MODULE.finditer(text):
        if found[0].rpartition(".")[2] not in ("py", "md", "so", "pth") and not known.has_module(found[0]):
            yield found[0]
    for found in _FOLDER.finditer(text):
        if not found[1].startswith(_OUTER_FOLDERS) and not known.has_folder(found[1]):
            yield found[1]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file, in pieces, each with its first line's number."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.split("\n"), 1)
    elif path.suffix in (".py", ".pyi"):
        yield from _python(text)
    else:
        for found in _COMMENT.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, found[0]


def _python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    known = Known()
    problems = []
    for name in sorted(known.files):
        path = ROOT / name
        if path.suffix not in (".md", ".py", ".pyi", ".cpp", ".hpp", ".h", ".cu") or path.is_symlink():
            continue
        for line, text in prose(path):
            problems += [f"{name}:{line}: {each} does not exist" for each in missing(known, text)]
    print("\n".join(problems) if problems else "names in prose: all exist")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
