"""Finds circles of imports between a package's files, and between its sibling packages.

Reads the imports from the syntax trees, those within functions included; what is imported for type checkers
alone is left out. Promises that each group of files or packages that reach each other is named once.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

LINKED = ("scheduler", "transfer", "benchmarks/measure")
"""Folders that are linked into the package `rose`, under their last name."""
Graph = Mapping[str, set[str]]


def circles(parsed: Mapping[PurePosixPath, ast.Module]) -> list[list[str]]:
    """Returns the circles of `rose`: lists of module names, then lists of the names of sibling packages."""
    modules = {name: (path, tree) for path, tree in parsed.items() if (name := module_name(path))}
    graph = {
        name: set(_imports(name, path, tree, modules.keys())) - {name}
        for name, (path, tree) in modules.items()
    }
    return _groups(graph) + [
        group for parent in _parents(graph) for group in _groups(_siblings(graph, parent))
    ]


def module_name(path: PurePosixPath) -> str | None:
    """Returns the importable name of a file of the product, and None for any other file."""
    linked = next((folder for folder in LINKED if path.is_relative_to(folder)), None)
    if linked is not None:
        path = "rose" / path.relative_to(PurePosixPath(linked).parent)
    parts = [*path.with_suffix("").parts]
    if parts[0] != "rose":
        return None
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: PurePosixPath, tree: ast.Module, known: Iterable[str]) -> Iterator[str]:
    """Yields the modules of the product that a module imports."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in _run_nodes(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            inner = [f"{source}.{alias.name}" for alias in node.names]
            targets = [each if each in known else source for each in inner]
        else:
            continue
        yield from (target for target in targets if target in known)


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields every node but those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _run_nodes(node)


def _parents(graph: Graph) -> list[str]:
    """Returns the packages that hold packages or files, `rose` first."""
    return sorted(
        {".".join(name.split(".")[:depth]) for name in graph for depth in range(1, name.count(".") + 1)}
    )


def _siblings(graph: Graph, parent: str) -> Graph:
    """Returns the imports between the children of a package where one child at least is a package.

    Files that import each other side by side are found as files already.
    """
    depth = parent.count(".") + 2
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if not name.startswith(f"{parent}."):
            continue
        child = ".".join(name.split(".")[:depth])
        others = {".".join(each.split(".")[:depth]) for each in targets if each.startswith(f"{parent}.")}
        found.setdefault(child, set()).update(others - {child})
    packages = {child for child in found if any(name.startswith(f"{child}.") for name in graph)}
    return {child: {each for each in others if packages & {child, each}} for child, others in found.items()}


def _groups(graph: Graph) -> list[list[str]]:
    """Returns the groups of at least two nodes of which each reaches each other one (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return groups
